"""Rows of a run subtracted seed by seed, as `benchmarks.differences` prints them."""

from typing import Any

import pytest

from benchmarks.differences import differences, interval


def _cell(row: str, mu: float, seed: int, accuracy: float) -> dict[str, Any]:
    return {"point": {"label.method": row, "privacy.mu": mu}, "seed": seed, "test_accuracy": accuracy}


def test_rows_are_subtracted_within_a_column_and_a_seed() -> None:
    """What seeds have in common falls out; a seed that only one of the rows has is left out."""
    cells = [
        *(_cell("a", 1.0, seed, 0.9 + 0.1 * seed) for seed in (0, 1, 2)),
        *(_cell("b", 1.0, seed, 0.8 + 0.1 * seed) for seed in (1, 0)),
        _cell("a", 4.0, 0, 0.5),
        _cell("b", 4.0, 0, 0.75),
        _cell("c", 1.0, 0, 0.0),
    ]
    found = differences(cells, "a", "b")
    assert found.keys() == {'{"privacy.mu": 1.0}', '{"privacy.mu": 4.0}'}
    assert found['{"privacy.mu": 1.0}'] == pytest.approx([0.1, 0.1])
    assert found['{"privacy.mu": 4.0}'] == [-0.25]


def test_a_row_that_the_run_has_not_is_named() -> None:
    with pytest.raises(ValueError, match="'z': no such row"):
        differences([_cell("a", 1.0, 0, 0.9)], "a", "z")


def test_the_interval_is_students() -> None:
    """Of five values: 2.776 standard errors."""
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(2.776445 * 2.5**0.5 / 5**0.5, rel=1e-6)
    assert interval([1.0])[1] == float("inf")
