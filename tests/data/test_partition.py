"""Spreading records over silos: disjoint, reproducible, refused where it cannot be done."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.random import SamplingRandomness
from fedpriv.data.own import Dataset, Sites
from fedpriv.data.partition import (
    SiloRows,
    _round_amounts,
    blank_training_share,
    counted_mask,
    draw_split,
    partition_alike,
    partition_dirichlet,
    partition_iid,
    partition_shards,
    secret_permutation,
    silo_sizes,
)

Deal = Callable[[NDArray[np.int64], list[int], int], SiloRows]
DEALS: dict[str, Deal] = {
    "iid": partition_iid,
    "dirichlet": lambda labels, sizes, seed: partition_dirichlet(labels, sizes, seed, 0.3),
    "shards": lambda labels, sizes, seed: partition_shards(labels, sizes, seed, 2),
}


@given(
    name=st.sampled_from(list(DEALS)),
    sizes=st.lists(st.integers(2, 20), min_size=1, max_size=12),
    spare=st.integers(0, 30),
    seed=st.integers(0),
)
def test_no_record_is_assigned_twice(name: str, sizes: list[int], spare: int, seed: int) -> None:
    labels = np.random.default_rng(seed % 2**32).integers(0, 5, sum(sizes) + spare)
    shares = DEALS[name](labels, sizes, seed)
    assert [len(share) for share in shares] == sizes
    given_out = np.concatenate(shares)
    assert len(np.unique(given_out)) == sum(sizes)
    assert given_out.min() >= 0
    assert given_out.max() < len(labels)


@pytest.mark.parametrize("kind", ["dirichlet", "alike"])
def test_records_with_missing_numbers_as_labels_are_assigned_like_others(kind: str) -> None:
    """Rows that do not count have the label NaN.  Before, none was assigned, and dealing all never ended."""
    labels, sizes = np.array([1.0, *[np.nan] * 4] * 10), [4, 4]
    shares = (
        partition_dirichlet(labels, sizes, 0, 1.0)
        if kind == "dirichlet"
        else partition_alike(labels, sizes, 0, [np.ones(3), np.ones(2)])
    )
    assert [len(share) for share in shares] == sizes
    assert np.isnan(labels[np.concatenate(shares)]).sum() in (6, 7)  # four fifths of 8, and each silo rounds


def test_rows_that_count_are_marked_for_several_labels_and_without_rows() -> None:
    assert counted_mask(np.array([[-1, 0], [-1, -1]])).tolist() == [True, False]
    assert counted_mask(np.zeros((0, 3))).shape == (0,)


@pytest.mark.parametrize("name", list(DEALS))
def test_a_partition_is_a_function_of_the_seed(name: str) -> None:
    labels, sizes = np.arange(1000) % 10, [50] * 10
    first, again, other = (DEALS[name](labels, sizes, seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("rare", "others", "drawn"), [(10, 30, 8), (3, 39, 14), (2, 38, 20)])
def test_a_redrawn_split_is_stratified_by_every_label_with_three_records_or_more(
    rare: int, others: int, drawn: int
) -> None:
    """With three records of a label or more, the test part has exactly its share of them."""
    labels = np.array([0] * rare + [1] * others)
    data = Dataset("x", np.ones((len(labels) - drawn, 1)), labels[drawn:], np.ones((drawn, 1)), labels[:drawn], 2)
    counts = {int((draw_split(data, number).test_labels == 0).sum()) for number in range(1, 21)}
    assert (counts == {rare * drawn // (rare + others)}) == (rare > 2)


def test_redrawn_splits_and_spared_training_records_match_golden_values() -> None:
    """Numbers of published comparisons rest on them."""
    labels = np.array([0, 1] * 12)
    data = Dataset("x", np.arange(20.0)[:, None], labels[:20], np.arange(20.0, 24.0)[:, None], labels[20:], 2)
    assert draw_split(data, 1).test_images.ravel().tolist() == [0.0, 11.0, 14.0, 21.0]
    is_spared = ~counted_mask(blank_training_share(data, 0.25).train_labels)
    assert np.flatnonzero(is_spared).tolist() == [5, 12, 13, 18, 19]


def test_splits_are_redrawn_only_if_persons_and_sites_of_test_records_are_known() -> None:
    data = Dataset("x", np.ones((4, 1)), np.zeros(4), np.ones((2, 1)), np.zeros(2), 0)
    assert len(draw_split(data, 1).test_labels) == 2
    one_part = Sites(("a",), np.zeros(4, np.int64), np.zeros(0, np.int64))
    for known in ({"persons": np.array(list("aabb"))}, {"sites": one_part}):
        with pytest.raises(InputError, match="persons or sites of the test records of x are not known"):
            draw_split(dataclasses.replace(data, **known), 1)


def test_the_iid_partition_matches_golden_values() -> None:
    """Published results depend on who holds which record; a change here is a change of every number."""
    np.testing.assert_array_equal(partition_iid(np.zeros(10, np.int64), [3, 3], seed=0), [[3, 5, 7], [6, 8, 4]])


def test_the_iid_partition_selects_all_records_equally_often() -> None:
    """Half of 40 records, 2,000 seeds: a count is Binomial(2000, 1/2); false alarm < 40 * 2 * Φ(-5.5) < 2e-6."""
    labels = np.zeros(40, np.int64)
    drawn = [np.concatenate(partition_iid(labels, [5] * 4, seed)) for seed in range(2000)]
    counts = np.bincount(np.concatenate(drawn))
    assert len(counts) == 40
    assert np.abs(counts - 1000).max() < 5.5 * np.sqrt(500)


def test_a_secret_permutation_has_as_many_ascents_as_descents_and_is_fixed_by_its_key() -> None:
    """Of 20,000 units a unit is behind the one before it half of the time; 5 deviations of √((n + 1)/12)."""
    order = secret_permutation(bytes(range(32)), 20_000)
    assert np.array_equal(np.sort(order), np.arange(20_000))
    assert abs(np.count_nonzero(np.diff(order) > 0) - 19_999 / 2) < 5.0 * np.sqrt(20_001 / 12)
    assert secret_permutation(bytes(32), 8).tolist() == [6, 1, 2, 3, 0, 7, 5, 4]


def test_a_secret_permutation_is_random_among_units_whose_first_96_bits_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tie that the order of names breaks reveals names; at 2^-96 a pair 400,000 units exceed a claim's 2^-60."""
    numbers = SamplingRandomness.numbers

    def tied(self: SamplingRandomness, count: int, choices: int, party: int, t: int) -> NDArray[np.int64]:
        return numbers(self, count, choices, party, t) * (t > 2)

    monkeypatch.setattr(SamplingRandomness, "numbers", tied)
    orders = np.stack([secret_permutation(bytes([number] * 32), 2) for number in range(200)])
    assert abs(np.count_nonzero(orders[:, 0]) - 100) < 5.0 * np.sqrt(50.0)


def _purity(shares: SiloRows, labels: NDArray[np.int64]) -> float:
    """The share of a silo's commonest label, averaged over silos."""
    return float(np.mean([np.bincount(labels[share]).max() / len(share) for share in shares]))


def test_label_skew_falls_with_the_dirichlet_concentration() -> None:
    """10 balanced labels: the commonest has a share of nearly 1 at concentration 0.01, nearly 1/10 at 1,000."""
    labels, sizes = np.arange(6000) % 10, [300] * 20
    partitions = (partition_dirichlet(labels, sizes, 0, concentration) for concentration in (0.01, 0.3, 1e3))
    purities = [_purity(shares, labels) for shares in partitions]
    assert purities[0] > 0.75
    assert 0.25 < purities[1] < purities[0]
    assert purities[2] < 0.15


def test_a_tiny_dirichlet_concentration_skews_labels_and_still_assigns_every_record() -> None:
    """Drawn shares are 0 or 1 at 1e-6, and records of a label that nobody has drawn are given out, too."""
    labels = np.arange(1000) % 10
    shares = partition_dirichlet(labels, [100] * 10, 0, 1e-6)
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(1000))
    assert _purity(shares, labels) > 0.6


@pytest.mark.parametrize("sizes", [[], [3, 0], [-1, 2]])
@pytest.mark.parametrize("name", list(DEALS))
def test_a_silo_without_records_is_refused(name: str, sizes: list[int]) -> None:
    with pytest.raises(InputError, match="at least one silo, and one record in each"):
        DEALS[name](np.zeros(10, np.int64), sizes, 0)


def test_all_records_are_assigned_if_the_silo_sizes_add_up_to_all() -> None:
    labels, sizes = np.arange(6000) % 10, [1000, 2000, 3000]
    for deal in DEALS.values():
        np.testing.assert_array_equal(np.sort(np.concatenate(deal(labels, sizes, 3))), np.arange(6000))


def test_the_shards_partition_limits_the_number_of_labels_in_a_silo() -> None:
    """Pieces of 300 out of 600 records a label: two pieces have at most two labels when they do not straddle."""
    labels = np.repeat(np.arange(10), 600)
    shares = partition_shards(labels, [600] * 10, 0, 2)
    assert max(len(np.unique(labels[share])) for share in shares) <= 2
    with pytest.raises(InputError, match=r"data\.shards = 5: a silo has 4 records"):
        partition_shards(labels, [4, 6], 0, 5)


def test_too_few_records_raise_an_error_that_shows_the_counts() -> None:
    with pytest.raises(InputError, match=r"100 silos of 601 .* 100 \* 601 = 60100 .* there are 60000"):
        silo_sizes(60_000, 100, None, 0, min_size=601)
    assert silo_sizes(60_000, 100, None, 0, min_size=600) == (600,) * 100
    for deal in DEALS.values():
        with pytest.raises(InputError, match="2 silos need 12 records in all, but there are 11"):
            deal(np.zeros(11, np.int64), [6, 6], 0)


@pytest.mark.parametrize(("silos", "least"), [(0, 5), (5, 0), (-2, -3)])
def test_silo_counts_and_minimum_sizes_below_one_are_refused(silos: int, least: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        silo_sizes(100, silos, None, 0, least)


@given(silos=st.integers(1, 30), least=st.integers(1, 9), spare=st.integers(0, 500), skew=st.floats(0.05, 50.0))
def test_skewed_silo_sizes_use_every_record(silos: int, least: int, spare: int, skew: float) -> None:
    records = silos * least + spare
    sizes = silo_sizes(records, silos, skew, 1, least)
    assert sum(sizes) == records
    assert min(sizes) >= least


def test_silo_sizes_are_uneven_for_small_values_of_the_skew_parameter() -> None:
    uneven, even = (silo_sizes(60_000, 20, skew, 0, 10) for skew in (0.3, 1e4))
    assert max(uneven) > 5 * np.median(uneven)
    assert max(even) < 1.2 * min(even)


@given(amounts=st.lists(st.floats(0.0, 50.0), min_size=1, max_size=12))
def test_rounded_amounts_preserve_their_sum_and_round_up_the_largest_remainders(amounts: list[float]) -> None:
    exact = np.array(amounts)
    whole, below = _round_amounts(exact), np.floor(exact)
    up = whole > below
    assert whole.sum() == round(float(exact.sum()))
    assert (whole == below + up).all()
    if up.any() and not up.all():
        assert (exact - below)[up].min() >= (exact - below)[~up].max()
