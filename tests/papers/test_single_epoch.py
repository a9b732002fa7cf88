"""The rates and identities that pin Accelerated-DP-SRGD and its variants, noise off."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedpriv.loss.estimators import Estimator, LinearWeights, PlainGradient, PowerWeights, RecursiveGradient
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.objective import Records
from fedpriv.noise.tree import BinaryTree
from fedpriv.papers.base import Problem
from fedpriv.papers.choquette_choo import NesterovCoupling
from fedpriv.papers.ftrl import FollowTheRegularizedLeader
from fedpriv.papers.reshef_levy import AnytimeSGD
from fedpriv.papers.sgd import ProjectedSGD
from fedpriv.papers.table import find_algorithm
from fedpriv.participation.orders import FixedOrder
from fedpriv.rounds.floats import initial_running_sum, update_running_sum
from tests.noise.matrices import workload_of
from tests.papers.builders import drive

LOOSE = 1e9
OBJECTIVE = SoftmaxRegression(4, 3, feature_norm=LOOSE, dtype=torch.float64)


def random_records(count: int, generator: torch.Generator, size: float = 1.0) -> Records:
    features = size * torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return Records(features, torch.randint(0, 3, (count,), generator=generator))


def huber(seed: int, directions: int = 12, dimension: int = 8) -> tuple[Callable[[Tensor], Tensor], float]:
    """Σ_k huber(⟨a_k, x⟩ - b_k) with its minimizer at distance 1 of 0, and its smoothness."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(directions, dimension, generator=generator, dtype=torch.float64)
    matrix *= torch.logspace(0, -2, dimension, dtype=torch.float64)
    optimum = torch.randn(dimension, generator=generator, dtype=torch.float64)
    optimum /= optimum.norm()
    width = 0.02

    def value(point: Tensor) -> Tensor:
        residual = matrix @ (point - optimum)
        small = residual.abs() <= width
        return torch.where(small, residual**2 / 2, width * (residual.abs() - width / 2)).sum()

    return value, float(torch.linalg.matrix_norm(matrix, 2) ** 2)


def descend(optimizer: Any, estimator: Estimator, value: Callable[[Tensor], Tensor], rounds: int) -> list[float]:
    """F of the output after each round, from exact gradients; the minimum of F is 0."""
    gradient = torch.func.grad(value)
    state = optimizer.start(torch.zeros(8, dtype=torch.float64))
    values = []
    for t in range(1, rounds + 1):
        current = estimator.round(t)
        state = optimizer.update(state, current.scale * gradient(optimizer.query(state)), current)
        values.append(float(value(optimizer.output(state))))
    return values


@pytest.mark.every(6)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_nesterov_coupling_reaches_the_accelerated_rate_on_huber_losses(seed: int, factor: float) -> None:
    """F(y_T) - F* ≤ 0.63 β R² / η_{0:T} for every T, η_{0:T} = (T+1)(T+2)/2; the halved z-step reaches 1.02."""
    value, smoothness = huber(seed)
    beta = factor * smoothness
    values = descend(NesterovCoupling(beta, radius=1.0), RecursiveGradient(LOOSE), value, 300)
    for rounds, reached in enumerate(values, start=1):
        assert reached <= 0.63 * beta / ((rounds + 1) * (rounds + 2) / 2)


def test_projected_sgd_is_over_three_times_worse_than_nesterov_coupling() -> None:
    value, smoothness = huber(0)
    fast = descend(NesterovCoupling(smoothness, 1.0), RecursiveGradient(LOOSE), value, 200)
    slow = descend(ProjectedSGD(1.0 / smoothness, 1.0), RecursiveGradient(LOOSE), value, 200)
    assert slow[-1] > 3.0 * fast[-1]
    assert slow[-1] < slow[0]


@given(rounds=st.integers(1, 12), batch=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_at_a_fixed_query_the_normalized_running_sum_is_the_mean_gradient(
    rounds: int, batch: int, seed: int
) -> None:
    """S_t / η_t with x_t = x_{t-1} is the mean of the batch gradients so far."""
    generator = torch.Generator().manual_seed(seed)
    point = torch.randn(12, generator=generator, dtype=torch.float64)
    weights = torch.full((batch,), 1.0 / batch, dtype=torch.float64)
    recursive, plain = RecursiveGradient(LOOSE), PlainGradient(LOOSE)
    state, gradients = initial_running_sum(point), []
    for t in range(1, rounds + 1):
        batch_of_round = OBJECTIVE, random_records(batch, generator), weights
        state, _ = update_running_sum(state, recursive.round(t), point, *batch_of_round, recursive.memory)
        alone, _ = update_running_sum(initial_running_sum(point), plain.round(t), point, *batch_of_round, 1)
        gradients.append(alone.total)
        torch.testing.assert_close(state.total / t, torch.stack(gradients).mean(0), rtol=1e-10, atol=1e-12)


@given(rounds=st.integers(2, 10), victim=st.integers(0, 9), seed=st.integers(0, 10**6), clip=st.floats(0.1, 5.0))
@settings(max_examples=40)
def test_a_zeroed_record_moves_every_later_running_sum_by_at_most_clip_norm_over_batch(
    rounds: int, victim: int, seed: int, clip: float
) -> None:
    """Brute force, neighbours with the same queries: ≤ C/B from the record's round on (round 1: first_clip/B)."""
    batch, victim = 3, victim % rounds + 1
    generator = torch.Generator().manual_seed(seed)
    estimator = RecursiveGradient(clip, first_clip=0.7 * clip)
    weights = torch.full((batch,), 1.0 / batch, dtype=torch.float64)
    without = weights.clone()
    without[0] = 0.0
    ours = theirs = initial_running_sum(torch.zeros(12, dtype=torch.float64))
    for t in range(1, rounds + 1):
        point = 3.0 * torch.randn(12, generator=generator, dtype=torch.float64)
        records, current = random_records(batch, generator, 5.0), estimator.round(t)
        ours, _ = update_running_sum(ours, current, point, OBJECTIVE, records, weights, 2)
        counted = without if t == victim else weights
        theirs, _ = update_running_sum(theirs, current, point, OBJECTIVE, records, counted, 2)
        moved = float((ours.total - theirs.total).norm())
        bound = (0.7 * clip if victim == 1 else clip) / batch
        assert moved <= bound * (1 + 1e-9) if t >= victim else moved == 0.0


def test_a_zeroed_record_with_a_large_gradient_attains_the_bound_on_the_running_sum() -> None:
    """A record whose gradient is above the clip norm moves the sum by exactly C/B: the noise buys no slack."""
    point = torch.zeros(12).double()
    records = Records(10.0 * torch.eye(4, dtype=torch.float64)[:2], torch.tensor([0, 1]))
    current = RecursiveGradient(0.5).round(1)
    both, one = (
        update_running_sum(initial_running_sum(point), current, point, OBJECTIVE, records, weights, 2)[0].total
        for weights in (torch.tensor([0.5, 0.5]).double(), torch.tensor([0.0, 0.5]).double())
    )
    assert float((both - one).norm()) == pytest.approx(0.25, rel=1e-12)


@given(power=st.integers(1, 5), t=st.integers(1, 300))
def test_the_total_of_power_weights_is_the_sum_of_the_single_weights(power: int, t: int) -> None:
    weights = PowerWeights(power)
    assert weights.total(t) == pytest.approx(sum(k**power for k in range(1, t + 1)), rel=1e-12)
    assert weights.weight(0) == 0.0
    if power == 1:
        assert (weights.weight(t), weights.total(t)) == (LinearWeights().weight(t), LinearWeights().total(t))


def test_momentum_averaging_and_follow_the_leader_match_a_calculation_by_hand() -> None:
    """Three gradients of one coordinate: heavy ball, its average, and follow the leader on sums."""
    gradients, rounds = [1.0, -2.0, 4.0], PlainGradient(LOOSE)
    sgd, leader = ProjectedSGD(0.1, LOOSE, 0.5, averaged=True), FollowTheRegularizedLeader(0.1, LOOSE, 0.5)
    *_, state = drive(sgd, torch.zeros(1), torch.tensor(gradients)[:, None], rounds.round)
    *_, chosen = drive(leader, torch.ones(1), torch.tensor(gradients).cumsum(0)[:, None], rounds.round)
    velocities = [1.0, 0.5 - 2.0, 0.25 - 1.0 + 4.0]
    iterates = [-0.1 * sum(velocities[: t + 1]) for t in range(3)]
    assert float(sgd.query(state)) == pytest.approx(iterates[-1])
    assert float(sgd.output(state)) == pytest.approx(sum(iterates) / 3)
    assert float(leader.output(chosen)) == pytest.approx(1.0 - 0.1 * (0.25 * 1.0 + 0.5 * -1.0 + 3.0))


def test_online_to_batch_with_power_one_equals_anytime_sgd() -> None:
    released = [torch.tensor([float(k), -1.0]) for k in range(5)]
    outputs = []
    for weights in (LinearWeights(), PowerWeights(1)):
        optimizer = AnytimeSGD(0.1, 2.0)
        *_, state = drive(optimizer, torch.zeros(2), released, RecursiveGradient(1.0, weights=weights).round)
        outputs.append(optimizer.query(state))
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize(("rounds", "saved"), [(16, 0.106), (60, 0.087), (240, 0.065)])
def test_a_balanced_first_clip_norm_lowers_the_tree_sensitivity_by_one_node(rounds: int, saved: float) -> None:
    """Round 1 is in one released node more than any other; with its clip smaller all cost the same."""
    row = find_algorithm("accelerated-dp-srgd")
    problem = Problem(10, lipschitz=1.0, smoothness=1.0, convex=True, batch=1, schedule=FixedOrder(rounds, rounds))
    prices = []
    for first_clip in ("same", "balanced"):
        settings = row.settings.model_validate({"clip": 3.0, "beta": 1.0, "radius": 1.0, "first_clip": first_clip})
        estimator = row.estimator(settings, problem)
        clips = np.array([float(estimator.round(t).clip) for t in range(1, rounds + 1)])
        assert clips[1:].tolist() == [3.0] * (rounds - 1)
        prices.append(BinaryTree().sensitivity(workload_of(rounds, clips=clips)))
    most = math.floor(math.log2(rounds)) + 1
    assert prices == pytest.approx([3.0 * math.sqrt(most), 3.0 * math.sqrt(most - 1)])
    assert 1.0 - prices[1] / prices[0] == pytest.approx(saved, abs=5e-4)
