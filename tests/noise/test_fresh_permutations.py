"""The tree under fresh permutations: golden numbers, brute force, the bound over all orders, and integers."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.addons.rates.momentum import bound_over_orders, max_node_weights
from fedpriv.core.errors import InputError
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian, ScheduledGaussian
from fedpriv.noise.differences import AlignedDifferences
from fedpriv.noise.integers.strategies import participations_per_record
from fedpriv.noise.mechanism import Mechanism, clip_multipliers
from fedpriv.noise.series import Workload
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import (
    BinaryTree,
    PaperTree,
    level_count,
    record_squared_norms,
    visited_squared_norms,
)
from fedpriv.participation.orders import FreshOrder
from tests.noise.integers.members import disc, streamed


def node_sums(
    visits: Sequence[int], clips: Sequence[float], decay: float, block: int, released: bool
) -> list[float]:
    """Σ_nodes (Σ clip decay^(z-t))² of every record, node by node and round by round."""
    rounds, energies = len(clips), [0.0] * (max(visits) + 1)
    for start in range(0, rounds, block):
        last = min(start + block, rounds)
        for level in range(block.bit_length()):
            nodes = range(start, last - (1 << level) + 1, (2 if released else 1) << level)
            for node, record in itertools.product(nodes, range(len(energies))):
                end = node + (1 << level) - 1
                weight = sum(clips[t] * decay ** (end - t) for t in range(node, end + 1) if visits[t] == record)
                energies[record] += weight**2
    return energies


def path_norm(path: Sequence[int], size: int, decay: float, *, released: bool = False) -> float:
    """The squared norm of a record that is at position path[q] of epoch q."""
    rounds = len(path) * size
    visits = [int(t % size == path[t // size]) for t in range(rounds)]
    return node_sums(visits, [1.0] * rounds, decay, rounds, released)[1]


def random_order(size: int, epochs: int, seed: int) -> NDArray[np.int64]:
    generator = np.random.default_rng(seed)
    return np.concatenate([generator.permutation(size) for _ in range(epochs)])


def test_record_squared_norms_of_two_permutations_match_golden_values() -> None:
    """α = 1/3, orders 2 0 1 and 2 1 0, all nodes and the released ones."""
    visits, clips = np.array([2, 0, 1, 2, 1, 0]), np.ones(6)
    every = visited_squared_norms(clips, visits, 6, 2 / 3, all_nodes=True)
    np.testing.assert_allclose(every, [4.197531, 3.333333, 5.124829], atol=5e-7)
    released = visited_squared_norms(clips, visits, 6, 2 / 3)
    np.testing.assert_allclose(released, [2.197531, 2.888889, 3.124829], atol=5e-7)


def test_record_squared_norms_of_shifted_epochs_match_golden_values() -> None:
    """The order of the golden run with fresh slots: N = 5, T = 13, α = 1/4, record (p - 1 + 2q) mod 5."""
    visits = np.array([(t % 5 + 2 * (t // 5)) % 5 for t in range(13)])
    golden = [5.34252497926, 3.66448885202, 3.20218753815, 3.13722229004, 5.14672851562]
    np.testing.assert_allclose(visited_squared_norms(np.ones(13), visits, 13, 0.75), golden, rtol=1e-11)
    assert max(golden) < bound_over_orders(13, 5, 0.75) < 17.21710115671158


@pytest.mark.parametrize("block", [1, 5, 8, 23])
@pytest.mark.parametrize("decay", [0.0, 0.4, 0.9, 1.0])
def test_record_squared_norms_match_node_sums_with_unequal_clips_and_restarts(decay: float, block: int) -> None:
    clips = np.random.default_rng(1).uniform(0.5, 2.0, 23)
    for seed in range(3):
        visits = FreshOrder(23, 5, seed).visits
        for all_nodes in (False, True):
            expected = node_sums(visits.tolist(), clips.tolist(), decay, block, not all_nodes)
            found = visited_squared_norms(clips, visits, block, decay, all_nodes=all_nodes)
            np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("period", [None, 6])
def test_tree_sensitivity_under_fresh_permutations_matches_the_streamed_noise(period: int | None) -> None:
    """C = B⁻¹ A, with B measured from the noise of unit vectors: the farthest record, found by linear algebra."""
    import torch

    rounds, decay, order = 22, 0.8, FreshOrder(22, 5, 4)
    clips = np.random.default_rng(2).uniform(0.5, 2.0, rounds)
    tree = BinaryTree(decay, period)
    state, b = tree.start(), np.zeros((rounds, rounds))
    for t in range(rounds):
        row, state = tree.noise(state, t + 1, torch.from_numpy(np.eye(rounds)[t]))
        b[t] = row.numpy()
    a = np.zeros((rounds, rounds))
    for t, i in itertools.product(range(rounds), range(rounds)):
        same_period = period is None or t // period == i // period
        a[t, i] = decay ** (t - i) if i <= t and same_period else 0.0
    c = np.linalg.solve(b, a) * clips
    farthest = max(float(np.linalg.norm(c[:, order.visits == record].sum(axis=1))) for record in range(5))
    certified = tree.certified(Workload(order, decay, clips, period))
    assert certified.exact
    assert certified.value == pytest.approx(farthest, rel=1e-12)


def test_permutation_norms_of_a_fixed_order_match_the_fixed_order_formula() -> None:
    for rounds, size in ((13, 5), (64, 7), (40, 8)):
        visits = np.arange(rounds) % size
        fixed = record_squared_norms(np.ones(rounds), size, 0.9)
        np.testing.assert_allclose(fixed, visited_squared_norms(np.ones(rounds), visits, rounds, 0.9), rtol=1e-12)


def test_papers_constant_is_charged_where_it_exceeds_the_exact_sensitivity() -> None:
    workload = Workload(FreshOrder(20, 5, 0), 0.8, np.ones(20))
    exact = BinaryTree(0.8).certified(workload)
    assert PaperTree(0.8, least=1.0).certified(workload) == exact
    assert PaperTree(0.8, least=9.0).certified(workload).value == 9.0


@pytest.mark.parametrize(
    ("size", "golden"), [(5, 4.3798), (7, 4.5969), (10, 4.4873), (11, 4.7941), (100, 4.9040), (1000, 4.9818)]
)
def test_largest_node_weights_match_golden_suprema(size: int, golden: float) -> None:
    """2w over T = 64 N rounds, α = 1/N, above the printed 4 and below 2 (1 + e / (e - 1))."""
    rounds, decay = 64 * size, 1.0 - 1.0 / size
    largest = max(float(max_node_weights(rounds, size, decay, k).max()) for k in range(level_count(rounds)))
    assert 2.0 * largest == pytest.approx(golden, abs=5e-5)
    assert 4.0 < 2.0 * largest <= 2.0 * (1.0 + decay / (1.0 - decay**size)) < 5.164


def test_largest_node_weight_for_power_of_two_epochs_is_a_geometric_series() -> None:
    decay = 63 / 64
    largest = max(float(max_node_weights(4096, 64, decay, k).max()) for k in range(level_count(4096)))
    assert 2.0 * largest == pytest.approx(3.1495, abs=5e-5)
    assert largest == pytest.approx(1.0 / (1.0 - decay**64), rel=1e-3)


def test_largest_weight_of_every_node_matches_brute_force() -> None:
    """N = 3, 4 epochs: the best of all positions in each node alone."""
    size, epochs, decay = 3, 4, 0.7
    for level in range(4):
        found = max_node_weights(size * epochs, size, decay, level)
        for index, weight in enumerate(found):
            node = range(index << level, (index + 1) << level)
            best = max(
                sum(decay ** (node[-1] - q * size - p) for q, p in enumerate(path) if q * size + p in node)
                for path in itertools.product(range(size), repeat=epochs)
            )
            assert weight == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("size", "epochs", "golden"), [(3, 3, 12.322376), (3, 4, 15.322376), (5, 3, 11.212288), (4, 4, 17.563121)]
)
def test_brute_force_norm_over_all_permutation_paths_is_within_the_bound(
    size: int, epochs: int, golden: float
) -> None:
    decay, paths = 1.0 - 1.0 / size, list(itertools.product(range(size), repeat=epochs))
    best = max(path_norm(path, size, decay) for path in paths)
    assert best == pytest.approx(golden, abs=5e-7)
    bound = bound_over_orders(size * epochs, size, decay, all_nodes=True)
    assert best <= bound * (1.0 + 1e-12) <= 1.25 * best
    released = max(path_norm(path, size, decay, released=True) for path in paths)
    assert released <= bound_over_orders(size * epochs, size, decay) <= 1.7 * released


@pytest.mark.parametrize(("size", "rounds"), [(4, 4), (6, 6), (5, 6), (5, 7), (6, 7), (2, 3), (9, 15)])
def test_the_bound_is_attained_where_no_node_is_longer_than_an_epoch(size: int, rounds: int) -> None:
    """The dynamic program alone, with nodes that cross from one epoch into the next, which is cut."""
    best = {False: 0.0, True: 0.0}
    for first, second in itertools.product(range(size), repeat=2):
        visits = [int(t in (first, size + second)) for t in range(rounds)]
        for nodes in best:
            best[nodes] = max(best[nodes], node_sums([*visits, 2], [1.0] * rounds, 0.8, rounds, not nodes)[1])
    for nodes, expected in best.items():
        assert bound_over_orders(rounds, size, 0.8, all_nodes=nodes) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "epochs"), [(5, 8), (7, 6), (10, 5), (16, 4)])
def test_ten_thousand_random_orders_are_below_the_bound(size: int, epochs: int) -> None:
    rounds, decay = size * epochs, 1.0 - 1.0 / size
    bounds = {nodes: bound_over_orders(rounds, size, decay, all_nodes=nodes) for nodes in (False, True)}
    largest = dict.fromkeys(bounds, 0.0)
    for seed in range(2500):
        visits = random_order(size, epochs, seed)
        for nodes in bounds:
            norms = visited_squared_norms(np.ones(rounds), visits, rounds, decay, all_nodes=nodes)
            largest[nodes] = max(largest[nodes], float(norms.max()))
    assert all(bounds[nodes] / 1.9 < largest[nodes] <= bounds[nodes] for nodes in bounds)


@pytest.mark.parametrize("rounds", [7, 11, 22, 23])
def test_norms_of_runs_with_a_cut_last_epoch_are_below_the_bound_of_their_rounds(rounds: int) -> None:
    bound = bound_over_orders(rounds, 5, 0.8)
    largest = max(
        float(visited_squared_norms(np.ones(rounds), FreshOrder(rounds, 5, seed).visits, rounds, 0.8).max())
        for seed in range(300)
    )
    assert bound / 1.5 < largest <= bound <= bound_over_orders(25, 5, 0.8)


@pytest.mark.parametrize(
    ("size", "epochs", "realized", "any_order"),
    [(50, 20, 1.004, 1.439), (64, 20, 0.870, 1.090), (100, 10, 0.985, 1.332), (250, 14, 1.012, 1.470)],
)
def test_noise_of_fresh_permutations_relative_to_a_fixed_order_matches_golden_ratios(
    size: int, epochs: int, realized: float, any_order: float
) -> None:
    """α = 1/N.  Realized ratios are means over ten other orders than the golden ones', hence 3 %."""
    rounds, decay = size * epochs, 1.0 - 1.0 / size
    fixed = float(record_squared_norms(np.ones(rounds), size, decay).max())
    orders = [FreshOrder(rounds, size, seed).visits for seed in range(10)]
    fresh = [float(visited_squared_norms(np.ones(rounds), visits, rounds, decay).max()) for visits in orders]
    assert math.sqrt(np.mean(fresh) / fixed) == pytest.approx(realized, rel=0.03)
    assert math.sqrt(bound_over_orders(rounds, size, decay) / fixed) == pytest.approx(any_order, abs=1e-3)


ORDER = FreshOrder(12, 4, 3)
OTHERS: list[Mechanism] = [
    IndependentGaussian(),
    LeafGaussian(0.5),
    ScheduledGaussian((1.0, 2.0) * 6, 0.5),
    BandedSquareRoot(0.5, 3),
    BufferedToeplitz(0.5, (0.3,), (0.1,)),
    SlidingDifferences(4, 0.5, 1.0, 1.0, 0.1, 0.5, 1.0, 1.0, 1.0, 1.0),
    AlignedDifferences(4, 0.5, 1.0, 1.0, 0.1, 0.5, 1.0, 1.0, 1.0, 1.0),
]


@pytest.mark.parametrize("mechanism", OTHERS, ids=lambda mechanism: mechanism.name)
@pytest.mark.parametrize("order", [ORDER, FreshOrder(12, 12, 3)], ids=["three epochs", "one"])
def test_every_mechanism_but_the_tree_refuses_fresh_permutations(mechanism: Mechanism, order: FreshOrder) -> None:
    decay = 0.0 if isinstance(mechanism, IndependentGaussian) else 0.5
    with pytest.raises(InputError, match=r'binary tree alone: use algorithm\.mechanism = "tree".*order = "fixed"'):
        mechanism.certified(Workload(order, decay, np.ones(12)))


def test_clip_multipliers_are_refused_under_fresh_permutations() -> None:
    workload = Workload(ORDER, 0.5, np.ones(12))
    with pytest.raises(InputError, match="binary tree alone"):
        clip_multipliers(BinaryTree(0.5).columns(workload), workload)


@pytest.mark.parametrize("rounds", [1, 4, 5, 11, 12])
def test_integer_runs_count_the_most_rounds_of_any_record(rounds: int) -> None:
    workload = Workload(FreshOrder(rounds, 4, 2), 0.9, np.ones(rounds))
    assert participations_per_record(workload) == int(np.bincount(workload.schedule.visits).max())  # type: ignore[union-attr]


@pytest.mark.parametrize("decay", [0.9, 0.3])
def test_no_neighbours_on_integers_are_farther_apart_than_the_charged_sensitivity(decay: float) -> None:
    """Replace-one neighbours under a realized order, at random and as far as they go, through the integer tree."""
    radius, rounds, trials = 3, 9, 4000
    generator, ball = np.random.default_rng(6), disc(radius)
    order = FreshOrder(rounds, 3, 5)
    form = BinaryTree(decay).integer(Workload(order, decay, np.full(rounds, float(radius))))
    groups = form.strategy.noise_groups(rounds, form.max_participations)
    sensitivity = BinaryTree(form.workload.decay).certified(form.workload).value
    rounding = math.sqrt(2 * rounds) * float(groups[0].rounding_difference)
    worst = 0.0
    for record in range(3):
        base = [generator.integers(-500, 500, (trials, 2)) for _ in range(rounds)]
        moved = []
        for t in range(rounds):
            first, second = ball[generator.integers(0, len(ball), (2, trials))]
            first[: trials // 2], second[: trials // 2] = (radius, 0), (-radius, 0)
            moved.append((first - second) * int(order.visits[t] == record))
        ours = streamed(form.strategy, base)
        theirs = streamed(form.strategy, [b + m for b, m in zip(base, moved, strict=True)])
        distance = sum(np.sum((y - x) ** 2, axis=1) for x, y in zip(ours, theirs, strict=True))
        worst = max(worst, math.sqrt(float(np.max(distance))))
    assert 0.9 * 2.0 * sensitivity < worst <= 2.0 * sensitivity * float(form.sensitivity_factor) + rounding
