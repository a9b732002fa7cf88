"""Weights of the tree's released nodes against tables computed elsewhere, and by brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.noise import nodes
from fedpriv.noise.tree import BinaryTree
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Schedule


def compose(first: int, last: int) -> list[tuple[int, int]]:
    """The dyadic cover of [first, last], left to right (Tran & Cutkosky 2022)."""
    cover = []
    while first <= last:
        length = 1
        while (first - 1) % (2 * length) == 0 and first + 2 * length - 1 <= last:
            length *= 2
        cover.append((first, first + length - 1))
        first += length
    return cover


def released(rounds: int) -> set[tuple[int, int]]:
    """Every node that some prefix [1, t] is composed of."""
    return {node for t in range(1, rounds + 1) for node in compose(1, t)}


def weights_by_record(rounds: int, rounds_per_epoch: int, decay: float) -> list[float]:
    """Σ over released nodes of (Σ over the record's rounds in it of decay^(end - round))², node by node."""
    return [
        sum(
            sum(decay ** (end - t) for t in range(start, end + 1) if (t - 1) % rounds_per_epoch == place) ** 2
            for start, end in released(rounds)
        )
        for place in range(min(rounds_per_epoch, rounds))
    ]


def test_covers_of_the_specification() -> None:
    assert compose(3, 13) == [(3, 4), (5, 8), (9, 12), (13, 13)]
    assert compose(1, 0) == []


@pytest.mark.parametrize(
    ("rounds_per_epoch", "rounds", "weight"),
    [
        (8, 9, 3.37),
        (7, 64, 20.193067),
        (100, 1000, 46.416984),
        (128, 1280, 58.23),
        (1000, 10_000, 69.979598),
        (50, 5000, 365.3),
    ],
)
def test_published_weights(rounds_per_epoch: int, rounds: int, weight: float) -> None:
    """The table of released nodes a record is in, fixed order, decay 1 - 1/N."""
    decay = 1.0 - 1.0 / rounds_per_epoch
    sensitivity = BinaryTree(decay).sensitivity(
        Workload(Schedule(rounds, rounds_per_epoch), decay, np.ones(rounds))
    )
    assert sensitivity**2 == pytest.approx(weight, rel=2e-3 if weight < 4 else 2e-4)


def test_published_weights_of_every_record() -> None:
    expected = [4.78737208619714, 4.17755037546158, 4.09342289, 2.84059143066406, 3.056884765625]
    found = nodes.record_squared_norms(np.ones(13), 5, 0.75)
    np.testing.assert_allclose(np.delete(found, 2), np.delete(expected, 2), rtol=1e-13)
    assert found[2] == pytest.approx(expected[2], abs=5e-9)


def test_published_node_counts_of_a_single_pass() -> None:
    counts = [4, 3, 3, 2, 3, 2, 2, 1, 3, 2, 2, 1, 1]
    np.testing.assert_array_equal(nodes.column_squared_norms(13, 1.0), counts)


@given(rounds=st.integers(1, 5000))
def test_the_first_round_is_in_the_most_nodes_and_the_others_in_fewer(rounds: int) -> None:
    counts = nodes.column_squared_norms(rounds, 1.0)
    levels = int(np.floor(np.log2(rounds))) + 1
    assert counts[0] == levels
    assert np.all(counts[1:] <= levels - 1)


def test_published_noise_factors_with_decay() -> None:
    expected = {1: 1, 6: 1.31640625, 7: 1.740478515625, 8: 1, 13: 1.618813514709, 15: 1.758296463639}
    variance = nodes.row_squared_norms(15, 0.75)
    for t, factor in expected.items():
        assert variance[t - 1] == pytest.approx(factor, abs=1e-12)


@given(rounds=st.integers(1, 3000))
def test_without_decay_the_variance_counts_set_bits(rounds: int) -> None:
    t = np.arange(1, rounds + 1)
    np.testing.assert_array_equal(nodes.row_squared_norms(rounds, 1.0), np.bitwise_count(t))


@given(rounds=st.integers(1, 70), rounds_per_epoch=st.integers(1, 80), decay=st.floats(0.0, 1.0))
@settings(deadline=None)
def test_weights_are_those_of_the_node_by_node_loop(rounds: int, rounds_per_epoch: int, decay: float) -> None:
    expected = weights_by_record(rounds, rounds_per_epoch, decay)
    np.testing.assert_allclose(
        nodes.record_squared_norms(np.ones(rounds), rounds_per_epoch, decay), expected, rtol=1e-11
    )
    if rounds_per_epoch >= rounds:
        np.testing.assert_allclose(nodes.column_squared_norms(rounds, decay), expected, rtol=1e-11)


@given(rounds=st.integers(1, 300), rounds_per_epoch=st.integers(1, 40), decay=st.floats(0.0, 1.0))
@settings(deadline=None)
def test_equal_clips_take_a_short_cut_to_the_same_weights(
    rounds: int, rounds_per_epoch: int, decay: float
) -> None:
    barely_unequal = np.ones(rounds)
    barely_unequal[-1] += 1e-15
    np.testing.assert_allclose(
        nodes.record_squared_norms(np.ones(rounds), rounds_per_epoch, decay),
        nodes.record_squared_norms(barely_unequal, rounds_per_epoch, decay),
        rtol=1e-11,
    )


@pytest.mark.parametrize(
    ("first", "other", "period", "std", "mu"),
    [(0.5, 0.2, 13, 0.7, 1.428571428571), (0.1, 0.3, 8, 1.0, 0.519615242271)],
)
@pytest.mark.parametrize("rounds", [1, 3, 5])
def test_published_guarantees_of_periodic_trees(
    first: float, other: float, period: int, std: float, mu: float, rounds: int
) -> None:
    """Anchors of another sensitivity than the steps between them: μ does not depend on the number of periods."""
    clips = np.tile(np.r_[first, np.full(period - 1, other)], rounds)
    total = len(clips)
    workload = Workload(Schedule(total, total), 1.0, clips, period)
    assert BinaryTree(1.0, period).sensitivity(workload) / std == pytest.approx(mu, abs=1e-12)


def test_a_golden_momentum_run() -> None:
    """Momentum with tree noise, d = 2, N = 5, T = 13, α = 1/4, std 0.05, normalized steps of length 0.1."""
    alpha, std, step = 0.25, 0.05, 0.1
    tree = BinaryTree(1.0 - alpha)
    iterate = torch.tensor([1.0, -0.5], dtype=torch.float64)
    momentum, state = torch.zeros(2, dtype=torch.float64), tree.start()
    expected = {
        1: ((0.110686696361, 0.030907326579), (0.903684429796, -0.526894440622)),
        7: ((0.086020189033, -0.071676210017), (0.361139866827, -0.361508731018)),
        13: ((0.000107606213, -0.044093803241), (-0.053048885985, -0.117021018899)),
    }
    for t in range(1, 14):
        record = (t - 1) % 5
        x = torch.tensor([np.cos(record), np.sin(2 * record + 1)]) / np.sqrt(2)
        momentum = (1 - alpha) * momentum + alpha * torch.tanh(iterate @ x) * x
        level = (t & -t).bit_length() - 1
        index = (t >> level) - 1
        node = torch.sin(1 + 5 * level + 7 * index + 11 * torch.arange(2, dtype=torch.float64))
        noise, state = tree.noise(state, t, std * node)
        noisy = momentum + noise
        iterate = iterate - step * noisy / torch.linalg.vector_norm(noisy)
        if t in expected:
            for found, wanted in zip((noisy, iterate), expected[t], strict=True):
                torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-11)
