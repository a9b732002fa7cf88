"""Anchors with noise of their own: the certificate by brute force, streaming, and what it is worth."""

import itertools
import json

import numpy as np
import pytest
import torch

from fedpriv.noise.fitting.cost import NoiseStream, apply_adjoint
from fedpriv.noise.registry import mechanism_from_data
from fedpriv.noise.toeplitz import AnchoredSquareRoot
from fedpriv.noise.tree import BinaryTree
from tests.noise.matrices import workload_matrix, workload_of


@pytest.mark.parametrize(
    ("rounds", "period", "anchor"), list(itertools.product([1, 7, 12, 13], [1, 2, 4, 5, 20], [0.5, 3.0]))
)
def test_the_worst_record_is_charged_exactly(rounds: int, period: int, anchor: float) -> None:
    """Guarantee: C = B^-1 A from streaming alone, every record of one pass, also in a period that is cut."""
    clips = np.random.default_rng(rounds).uniform(0.3, 2.0, rounds)
    workload = workload_of(rounds, period=period, clips=clips)
    mechanism = AnchoredSquareRoot(period, anchor)
    b = apply_adjoint(NoiseStream(mechanism), np.eye(rounds))
    c = np.linalg.solve(b, workload_matrix(rounds, 1.0, period))
    found = mechanism.certified(workload)
    assert found.exact
    assert found.value == pytest.approx(float(np.max(clips * np.linalg.norm(c, axis=0))), rel=1e-9)
    assert mechanism.variance(workload) == pytest.approx(np.sum(b**2, axis=1), rel=1e-9)
    assert mechanism_from_data(json.loads(json.dumps(mechanism.as_data()))) == mechanism


@pytest.mark.parametrize(("rounds", "period"), list(itertools.product([1, 2, 3, 4, 9], [1, 2, 3, 5])))
def test_memory_vectors_are_the_largest_state_also_in_a_single_round(rounds: int, period: int) -> None:
    mechanism = AnchoredSquareRoot(period)
    state, lengths = mechanism.start(), []
    for t in range(1, rounds + 1):
        _, state = mechanism.noise(state, t, torch.zeros(2))
        lengths.append(len(state))
    assert mechanism.memory_vectors(workload_of(rounds, period=period)) == max(lengths)


def test_equal_cost_anchor_costs_the_same_as_a_gradient_difference() -> None:
    workload = workload_of(40, period=10, clips=np.tile([3.0, *[0.4] * 9], 4))
    mechanism = AnchoredSquareRoot.with_equal_cost(10, 3.0, 0.4)
    assert mechanism.sensitivity(workload) == pytest.approx(3.0 / mechanism.anchor, rel=1e-12)
    less, more = (AnchoredSquareRoot(10, mechanism.anchor * factor) for factor in (0.999, 1.001))
    assert less.sensitivity(workload) > mechanism.sensitivity(workload) * 1.0005
    assert more.sensitivity(workload) == mechanism.sensitivity(workload)
    assert mechanism.worst_variance == pytest.approx(float(np.max(mechanism.variance(workload))))


@pytest.mark.parametrize(("ratio", "share"), [(0.1, 0.0497), (0.5, 0.1051), (1.0, 0.2782)])
def test_anchored_noise_has_much_less_variance_than_a_tree_at_equal_mu(ratio: float, share: float) -> None:
    """Mean variance at the same μ, Σ = 64, for clips of differences of 0.1, 0.5 and 1 times those of anchors."""
    workload = workload_of(192, period=64, clips=np.tile([1.0, *[ratio] * 63], 3))
    ours, tree = AnchoredSquareRoot.with_equal_cost(64, 1.0, ratio), BinaryTree(1.0, 64)
    variances = [each.sensitivity(workload) ** 2 * each.mean_variance(workload) for each in (ours, tree)]
    assert variances[0] / variances[1] == pytest.approx(share, abs=5e-4)
