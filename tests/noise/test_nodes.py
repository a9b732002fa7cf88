"""Weights of the tree's released nodes: golden counts, brute force over nodes and records, and linear algebra."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.noise import tree
from fedpriv.noise.tree import BinaryTree
from fedpriv.papers.tran_cutkosky import paper_node_count
from tests.noise.matrices import streamed_matrix, workload_matrix, workload_of
from tests.oracle_momentum import compose, prefix_nodes, squared_norms


def weights_of_nodes(rounds: int, rounds_per_epoch: int, alpha: float) -> float:
    """W: the squared norm of the worst record at clip 1."""
    return BinaryTree(1.0 - alpha).sensitivity(workload_of(rounds, 1.0 - alpha, rounds_per_epoch)) ** 2


def test_tree_cover_partitions_an_interval_into_few_aligned_nodes() -> None:
    assert compose(3, 13) == [(3, 4), (5, 8), (9, 12), (13, 13)]
    assert compose(4, 8) == [(4, 4), (5, 8)]
    assert compose(1, 0) == []
    for first in range(1, 40):
        for last in range(first, 80):
            cover = compose(first, last)
            assert [t for y, z in cover for t in range(y, z + 1)] == list(range(first, last + 1))
            assert all((y - 1) % (z - y + 1) == 0 for y, z in cover)
            assert len(cover) <= max(1, 2 * ((last - first + 1).bit_length() - 1))
            if first == 1:
                assert len(cover) == last.bit_count()


@pytest.mark.parametrize("rounds", [1, 6, 13, 64, 65])
def test_exactly_one_released_node_ends_at_every_round(rounds: int) -> None:
    assert prefix_nodes(rounds) == {(t - (t & -t) + 1, t) for t in range(1, rounds + 1)}


def test_tree_squared_norms_of_every_record_match_golden_values() -> None:
    golden = [4.78737208619714, 4.17755037546158, 4.09342288970947, 2.84059143066406, 3.056884765625]
    assert tree.record_squared_norms(np.ones(13), 5, 0.75) == pytest.approx(golden, rel=1e-13)
    assert weights_of_nodes(13, 5, 0.25) == pytest.approx(golden[0], rel=1e-13)


@pytest.mark.parametrize(
    ("rounds_per_epoch", "rounds", "released", "digits", "ratio"),
    [
        (8, 9, 3.37, 2, 2.31),
        (7, 64, 20.193067, 6, 2.90),
        (100, 1000, 46.416984, 6, 2.64),
        (128, 1280, 58.23, 2, 2.46),
        (1000, 10000, 69.979598, 6, 2.57),
        (50, 5000, 365.3, 1, 2.87),
    ],
)
def test_gain_of_exact_counting_over_the_papers_count_matches_golden_ratios(
    rounds_per_epoch: int, rounds: int, released: float, digits: int, ratio: float
) -> None:
    """W and the paper's node noise over the exact one, 2 √V / √W, at α = 1/N."""
    squared_norm = weights_of_nodes(rounds, rounds_per_epoch, 1.0 / rounds_per_epoch)
    assert round(squared_norm, digits) == released
    gain = 2.0 * math.sqrt(paper_printed(rounds, rounds_per_epoch) / squared_norm)
    assert gain == pytest.approx(ratio, abs=0.006)


def paper_printed(rounds: int, rounds_per_epoch: int) -> float:
    """V as the paper prints it, with T/N not rounded up."""
    levels, within = rounds.bit_length() - 1, rounds_per_epoch.bit_length() - 1
    return (min(levels, within) + 1) * rounds / rounds_per_epoch + sum(
        rounds >> j for j in range(within + 1, levels + 1)
    )


@pytest.mark.parametrize(("rounds_per_epoch", "rounds", "corrected"), [(8, 9, 8), (7, 64, 45), (100, 1000, 81)])
def test_papers_node_count_with_whole_epochs_matches_golden_values(
    rounds_per_epoch: int, rounds: int, corrected: float
) -> None:
    assert paper_node_count(rounds, rounds_per_epoch) == corrected


def test_corrected_node_count_bounds_the_nodes_of_every_record() -> None:
    for rounds_per_epoch in range(1, 20):
        for rounds in range(1, 5 * rounds_per_epoch + 8):
            assert most_nodes(rounds, rounds_per_epoch) <= paper_node_count(rounds, rounds_per_epoch)


def most_nodes(rounds: int, rounds_per_epoch: int) -> int:
    """How many released nodes hold the record that is in the most of them, node by node."""
    places = [{(t - 1) % rounds_per_epoch for t in range(y, z + 1)} for y, z in prefix_nodes(rounds)]
    return max(sum(place in node for node in places) for place in range(min(rounds_per_epoch, rounds)))


@pytest.mark.parametrize("place", range(5))
def test_mu_is_the_mahalanobis_distance_of_the_momenta(place: int) -> None:
    """μ² = ‖B⁻¹ Δm‖² / s² = α² h² W(x) / s² by linear algebra, for a record whose gradient flips its sign."""
    rounds, alpha, step_of_h, std = 13, 0.25, 2.0, 0.05
    steps = np.where(np.arange(rounds) % 5 == place, step_of_h, 0.0)
    moved = alpha * workload_matrix(rounds, 1 - alpha) @ steps
    distance = float(np.linalg.norm(np.linalg.solve(streamed_matrix(BinaryTree(1 - alpha), rounds), moved)) / std)
    squared_norm = tree.record_squared_norms(np.ones(rounds), 5, 1 - alpha)[place]
    assert distance == pytest.approx(alpha * step_of_h * math.sqrt(squared_norm) / std, rel=1e-12)


def test_node_counts_of_a_single_pass_match_published_values() -> None:
    counts = [4, 3, 3, 2, 3, 2, 2, 1, 3, 2, 2, 1, 1]
    np.testing.assert_array_equal(tree.column_squared_norms(13, 1.0), counts)


@given(rounds=st.integers(1, 5000))
def test_the_first_round_is_in_the_most_nodes_and_the_others_in_fewer(rounds: int) -> None:
    counts = tree.column_squared_norms(rounds, 1.0)
    levels = int(np.floor(np.log2(rounds))) + 1
    assert counts[0] == levels
    assert np.all(counts[1:] <= levels - 1)


def test_variance_factors_with_decay_match_published_values() -> None:
    expected = {1: 1, 6: 1.31640625, 7: 1.740478515625, 8: 1, 13: 1.618813514709, 15: 1.758296463639}
    variance = tree.row_squared_norms(15, 0.75)
    for t, factor in expected.items():
        assert variance[t - 1] == pytest.approx(factor, abs=1e-12)


@given(rounds=st.integers(1, 3000))
def test_without_decay_the_variance_counts_set_bits(rounds: int) -> None:
    t = np.arange(1, rounds + 1)
    np.testing.assert_array_equal(tree.row_squared_norms(rounds, 1.0), np.bitwise_count(t))


@given(rounds=st.integers(1, 300), rounds_per_epoch=st.integers(1, 40), decay=st.floats(0.0, 1.0))
def test_shortcut_for_equal_clips_gives_the_same_squared_norms(
    rounds: int, rounds_per_epoch: int, decay: float
) -> None:
    barely_unequal = np.ones(rounds)
    barely_unequal[-1] += 1e-15
    equal, unequal = (
        tree.record_squared_norms(clips, rounds_per_epoch, decay) for clips in (np.ones(rounds), barely_unequal)
    )
    np.testing.assert_allclose(equal, unequal, rtol=1e-11)


@pytest.mark.parametrize(
    ("first", "other", "period", "std", "mu"),
    [(0.5, 0.2, 13, 0.7, 1.428571428571), (0.1, 0.3, 8, 1.0, 0.519615242271)],
)
@pytest.mark.parametrize("rounds", [1, 3, 5])
def test_mu_of_periodic_trees_matches_published_guarantees(
    first: float, other: float, period: int, std: float, mu: float, rounds: int
) -> None:
    """Anchors of another sensitivity than the steps between them: μ does not depend on the number of periods."""
    clips = np.tile(np.r_[first, np.full(period - 1, other)], rounds)
    workload = workload_of(len(clips), period=period, clips=clips)
    assert BinaryTree(1.0, period).sensitivity(workload) / std == pytest.approx(mu, abs=1e-12)


@given(rounds=st.integers(1, 70), rounds_per_epoch=st.integers(1, 80), decay=st.floats(0.0, 1.0))
def test_tree_squared_norms_match_a_node_by_node_loop(rounds: int, rounds_per_epoch: int, decay: float) -> None:
    expected = squared_norms(prefix_nodes(rounds), rounds_per_epoch, decay)[: min(rounds_per_epoch, rounds)]
    np.testing.assert_allclose(
        tree.record_squared_norms(np.ones(rounds), rounds_per_epoch, decay), expected, rtol=1e-11
    )
    if rounds_per_epoch >= rounds:
        np.testing.assert_allclose(tree.column_squared_norms(rounds, decay), expected, rtol=1e-11)


@pytest.mark.parametrize(
    ("rounds", "block", "decay", "most", "gap", "bound"),
    [
        (8, 8, 1.0, 2, 3, 2 + 2 + 4 + 4),
        (8, 8, 0.5, 2, 3, 2 + 2 + 1.125**2 + 1.125**2),
        (7, 4, 1.0, 3, 2, 3 + 2 + 4),
        (5, 8, 1.0, 9, 1, 3 + 4 + 16),
    ],
)
def test_separated_records_are_bounded_level_by_level(
    rounds: int, block: int, decay: float, most: int, gap: int, bound: float
) -> None:
    """Levels by hand: moves of a node times the fewer of all rounds and all released nodes' moves."""
    assert tree.separated_squared_norm(rounds, block, decay, most, gap) == pytest.approx(bound)
