"""Grids of tests in parts: rows that `make test` takes, and others for `make test-slow` and `make test-long`.

The mark `every(n)` (`tests/conftest.py`) thins out what is left of a grid whose rows are alike.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_parts(rows: Iterable[Any], fast: Iterable[Any] = (), long: Iterable[Any] = ()) -> list[Any]:
    """The rows of a grid for `parametrize`; those that are in neither `fast` nor `long` are marked slow."""
    rows, chosen, last = list(rows), list(fast), list(long)
    assert all(row in rows for row in chosen + last), "every row that is named is one of the grid"
    slow, rare = pytest.mark.slow, pytest.mark.long
    return [row if row in chosen else _marked(row, rare if row in last else slow) for row in rows]


def in_turn(names: Iterable[Any], settings: Sequence[Any]) -> list[Any]:
    """Every name with every setting: fast is each name with one setting, in turn."""
    names = list(names)
    return in_parts(itertools.product(names, settings), zip(names, itertools.cycle(settings), strict=False))


def _marked(row: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=mark)
