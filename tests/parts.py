"""Grids of tests in two parts: the rows that `make test` takes, and all others, which `make test-slow` takes.

The mark `every(n)` (`tests/conftest.py`) thins out what is left of a grid whose rows are alike.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_parts(rows: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """The rows of a grid for `parametrize`; those that are not in `fast` are marked slow."""
    rows, chosen = list(rows), list(fast)
    assert all(row in rows for row in chosen), "every fast row is one of the grid"
    return [row if row in chosen else _slow(row) for row in rows]


def in_turn(names: Iterable[Any], settings: Sequence[Any]) -> list[Any]:
    """Every name with every setting: fast is each name with one setting, in turn."""
    names = list(names)
    return in_parts(itertools.product(names, settings), zip(names, itertools.cycle(settings), strict=False))


def _slow(row: Any) -> Any:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
