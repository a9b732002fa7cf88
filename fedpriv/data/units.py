"""Which records make up one unit: those of one person, or so many in a row."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Table = NDArray[np.int64]
"""Record numbers (units, most): those of a unit in the order of the file, filled up with -1."""


def of_persons(persons: ArrayLike, most: int) -> Table:
    """A row a person, in the order of their first records; of more than `most` records the first are taken.

    Guarantee: a person's row depends on the person's own records alone.
    """
    names = np.asarray(persons)
    _, first, numbers = np.unique(names, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first, kind="stable"), kind="stable")[numbers.ravel()]
    order = np.argsort(rank, kind="stable")
    starts = np.searchsorted(rank[order], np.arange(len(first)))
    place = np.arange(len(order)) - starts[rank[order]]
    table = np.full((len(first), most), -1, np.int64)
    kept = place < most
    table[rank[order][kept], place[kept]] = order[kept]
    return table


def in_a_row(records: int, most: int) -> Table:
    """Units of `most` consecutive records each; a rest that fills none is left out."""
    return np.arange(records // most * most, dtype=np.int64).reshape(-1, most)
