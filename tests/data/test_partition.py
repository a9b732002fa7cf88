"""Spreading records over silos: disjoint, reproducible, refused where it cannot be done."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.data.partition import PARTITIONS, iid
from fedpriv.errors import InputError


@given(silos=st.integers(1, 20), per_silo=st.integers(1, 20), spare=st.integers(0, 30), seed=st.integers(0))
def test_iid_no_record_is_given_twice(silos: int, per_silo: int, spare: int, seed: int) -> None:
    records = silos * per_silo + spare
    order = iid(records, silos, per_silo, seed)
    assert order.shape == (silos, per_silo)
    assert order.dtype == np.int64
    assert len(np.unique(order)) == silos * per_silo
    assert order.min() >= 0
    assert order.max() < records


def test_iid_is_a_function_of_the_seed() -> None:
    np.testing.assert_array_equal(iid(1000, 10, 50, 7), iid(1000, 10, 50, 7))
    assert not np.array_equal(iid(1000, 10, 50, 7), iid(1000, 10, 50, 8))


def test_iid_gives_the_records_it_has_always_given() -> None:
    """Published results depend on who holds which record; a change here is a change of every number."""
    np.testing.assert_array_equal(iid(10, 2, 3, seed=0), [[3, 5, 7], [6, 8, 4]])


def test_iid_every_record_is_as_likely_as_any_other() -> None:
    """Half of 40 records, 2,000 seeds: a count is Binomial(2000, 1/2); false alarm < 40 * 2 * Φ(-5.5) < 2e-6."""
    counts = np.bincount(np.concatenate([iid(40, 4, 5, seed).ravel() for seed in range(2000)]), minlength=40)
    assert np.abs(counts - 1000).max() < 5.5 * np.sqrt(500)


def test_too_few_records_is_an_error_with_every_number() -> None:
    with pytest.raises(InputError, match=r"100 silos of 601 .* 100 \* 601 = 60100 .* there are 60000"):
        iid(60_000, 100, 601, 0)
    with pytest.raises(InputError, match="there are 59999"):
        iid(59_999, 100, 600, 0)
    assert iid(60_000, 100, 600, 0).shape == (100, 600)


@pytest.mark.parametrize(("silos", "per_silo"), [(0, 5), (5, 0), (-2, -3)])
def test_numbers_below_one_are_refused(silos: int, per_silo: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        iid(100, silos, per_silo, 0)


def test_the_table_names_it() -> None:
    assert PARTITIONS["iid"] is iid
