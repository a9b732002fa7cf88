"""Records' increments in chunks of one public shape, so that a row depends on its record and public values alone.

The bits that a matrix product gives for one row do not change with the other rows' values, NaN and infinities
included, but they do change with the number of rows.  So every evaluation of a run has the same number of rows;
what is missing is filled with a public dummy record.  An evaluation that raises is done again for each of its
records, in the same shape and the same slot, with dummies in all others: a neighbour's record cannot change a row
by failing.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.rank_one import integer_residuals, outer_sum

Columns = tuple[NDArray[np.generic], ...]
"""Records by columns (features, labels, …), each with one row a record."""
Evaluation = Callable[[Columns], NDArray[np.floating]]
"""(rows, …) columns → (rows, d) increments, one a record; a function of its rows one by one, but for rounding."""

_Kind = TypeVar("_Kind", bound=np.generic)
_VALUES = 1 << 22  # that one evaluation holds; a constant, never what memory happens to be free


def chunk_rows(dimension: int, points: int, most: int) -> int:
    """Rows of every evaluation of a run, from public numbers alone.

    `points` gradients make an increment, and `most` records (or users) are held in a round at most.
    """
    return max(1, min(most, _VALUES // (dimension * points)))


def evaluated(
    evaluate: Evaluation, records: Columns, dummy: Columns, rows: int, dimension: int, least: int = 0
) -> Iterator[NDArray[np.floating]]:
    """Increments of all records in chunks of up to `rows` ≥ 1: (n, d) each; `dummy` is one row a column.

    Rows of records that make `evaluate` raise are zeros.  Fewer records than `least` take as many evaluations as
    so many, where they raise as well; chunks of dummies alone give no increments.

    Guarantee: the row of record b is a function of record b, of its place and of public values, provided that
    `evaluate` computes rows independently of each other in a fixed shape.
    """
    count = len(records[0])
    for start in range(0, max(count, least), rows):
        present = max(0, min(rows, count - start))
        chunk = tuple(
            _padded(column[start : start + present], filler, rows)
            for column, filler in zip(records, dummy, strict=True)
        )
        try:
            increments = evaluate(chunk)
        except Exception:  # whatever a record can make happen: it must not be seen who did
            increments = _one_by_one(evaluate, chunk, dummy, dimension)
        yield increments[:present]


def outer_sum_of(
    evaluate: Evaluation,
    records: Columns,
    dummy: Columns,
    features: NDArray[np.integer],
    rows: int,
    norm: int,
    factor: float,
    classes: int,
    least: int = 0,
) -> Ints:
    """Σ_b r_b ⊗ x_b, (classes · f,) int64, where `evaluate` gives residuals (rows, classes) and x are `features`.

    Guarantee: one record moves the sum by at most `norm` under zero-out and 2 `norm` under replace-one, whatever
    `evaluate` returns or raises for it.
    """
    total, start = np.zeros(classes * features.shape[1], np.int64), 0
    for residuals in evaluated(evaluate, records, dummy, rows, classes, least):
        x = _padded(
            features[start : start + len(residuals)], np.zeros((1, features.shape[1]), features.dtype), rows
        )
        filled = _padded(residuals, np.zeros((1, classes), residuals.dtype), rows)
        total += outer_sum(integer_residuals(filled, x, norm, factor), x, norm)
        start += len(residuals)
    return total


def _padded(column: NDArray[_Kind], filler: NDArray[_Kind], rows: int) -> NDArray[_Kind]:
    missing = rows - len(column)
    return np.concatenate([column, np.repeat(filler, missing, axis=0)]) if missing else column


def _one_by_one(evaluate: Evaluation, chunk: Columns, dummy: Columns, dimension: int) -> NDArray[np.floating]:
    """The chunk's rows, each evaluated among dummies; float64, which holds float32 exactly.

    Places that hold a dummy take their turn: how many evaluations there are does not tell how many records are.
    """
    rows = len(chunk[0])
    increments = np.zeros((rows, dimension))
    for slot in range(rows):
        alone = tuple(np.repeat(filler, len(column), axis=0) for column, filler in zip(chunk, dummy, strict=True))
        for column, source in zip(alone, chunk, strict=True):
            column[slot] = source[slot]
        with contextlib.suppress(Exception):  # this record is zeros
            increments[slot] = evaluate(alone)[slot]
    return increments
