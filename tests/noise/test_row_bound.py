"""The row-wise bound against every pattern, and its dynamic program against the one for a single row."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.noise.mechanism import toeplitz_inner
from fedpriv.noise.sensitivity import heaviest_pattern, heaviest_patterns, row_bound
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Separated


@given(data=st.data(), rounds=st.integers(1, 14), rows=st.integers(1, 5))
@settings(deadline=None)
def test_it_is_the_heaviest_pattern_of_every_row(data: st.DataObject, rounds: int, rows: int) -> None:
    line = st.lists(st.floats(0.0, 9.0), min_size=rounds, max_size=rounds)
    weights = np.array(data.draw(st.lists(line, min_size=rows, max_size=rows)))
    pattern = Separated(rounds, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 16)))
    expected = [heaviest_pattern(row, pattern) for row in weights]
    np.testing.assert_allclose(heaviest_patterns(weights, pattern), expected, rtol=1e-13)


@given(data=st.data(), rounds=st.integers(1, 11), period=st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=150, deadline=None)
def test_no_pattern_moves_farther_than_the_bound(data: st.DataObject, rounds: int, period: int | None) -> None:
    """For any C ≥ 0, its coefficients falling or not."""
    numbers = st.lists(st.floats(0.0, 1.0), min_size=rounds, max_size=rounds)
    series = np.array(data.draw(numbers))
    clips = np.array(data.draw(st.lists(st.floats(0.1, 5.0), min_size=rounds, max_size=rounds)))
    pattern = Separated(rounds, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)))
    workload = Workload(pattern, 1.0, clips, period)
    block = np.arange(rounds) // workload.block
    c = sum(value * np.eye(rounds, k=-lag) for lag, value in enumerate(series))
    c = np.where(np.equal.outer(block, block), c, 0.0)
    moved = max(
        float(np.linalg.norm(c[:, chosen] @ clips[list(chosen)]))
        for count in range(1, pattern.max_participations + 1)
        for chosen in itertools.combinations(range(rounds), count)
        if all(b - a >= pattern.min_separation for a, b in itertools.pairwise(chosen))
    )
    assert row_bound(toeplitz_inner(series, rounds, period), workload, pattern) >= moved * (1 - 1e-12)


def test_it_is_exact_where_columns_do_not_overlap() -> None:
    workload = Workload(Separated(7, 3, 2), 1.0, np.array([1.0, 3.0, 1.0, 2.0, 0.5, 4.0, 1.0]))
    inner = toeplitz_inner(np.array([1.0]), 7)
    assert row_bound(inner, workload, Separated(7, 3, 2)) == pytest.approx(np.sqrt(9 + 4 + 16))
