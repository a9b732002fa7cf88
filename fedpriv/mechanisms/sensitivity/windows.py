"""Sums over a sliding window of N rounds, composed of tree nodes.

Node (level, end) is the interval [end - 2^level + 1, end].  `cover(a, b)` is COMPOSE of Tran & Cutkosky (NeurIPS
2022).  Of the nodes that a window can hold some are never used: only those in the cover of some window are
released, and only they cost anything.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedpriv.mechanisms.workload import Floats, powers

Node = tuple[int, int]
"""Level and end."""

Ends = NDArray[np.int64]


def cover(first: int, last: int) -> Iterator[Node]:
    """The fewest nodes that make up rounds first … last, from left to right; none if first > last."""
    while first <= last:
        aligned = ((first - 1) & -(first - 1)).bit_length() - 1 if first > 1 else last.bit_length()
        level = min(aligned, (last - first + 1).bit_length() - 1)
        first += 1 << level
        yield level, first - 1


def used_ends(rounds: int, rounds_per_epoch: int, level: int, earliest: int = 1) -> Ends:
    """Where the nodes of `level` end that are in the cover of [max(1, u - N + 1), u] for some u = earliest … T.

    A node is in a cover if the window holds it, but not its parent.
    """
    length = 1 << level
    if length > rounds_per_epoch:
        return np.empty(0, np.int64)
    ends = np.arange(length, rounds + 1, length)
    starts = ends - length + 1
    left = (ends >> level) % 2 == 1
    latest = np.minimum(
        np.where(left, ends + length - 1, rounds), np.minimum(starts + rounds_per_epoch - 1, rounds)
    )
    soonest = np.maximum(np.where(left, ends, np.maximum(ends, starts - length + rounds_per_epoch)), earliest)
    return np.asarray(ends[soonest <= latest], np.int64)


def visits(ends: Ends, level: int, rounds_per_epoch: int, decay: float, squares: Floats) -> Floats:
    """Σ over nodes of at most N rounds of squares[t] decay^{2(z-t)} for the record in each place; (N,).

    Such a node holds a record at most once.  `squares` are the squared norms of an increment in every round, (T,).
    """
    before_end = np.arange(1 << level)
    held = (ends[:, None] - 1 - before_end).ravel()  # rounds counted from 0
    decays = np.tile(powers(decay**2, 1 << level), len(ends))
    return np.asarray(np.bincount(held % rounds_per_epoch, squares[held] * decays, rounds_per_epoch), np.float64)


def window_variances(
    rounds: int, rounds_per_epoch: int, decay: float, early: float, late: float, earliest: int = 1
) -> Floats:
    """Σ std² decay^{2(u-z)} over the cover of [max(1, u - N + 1), u], for every u; 0 before `earliest`; (T,).

    Nodes that end by round 2N have standard deviation `early`, later ones `late`.
    """
    decays = powers(decay**2, rounds_per_epoch)
    return np.array(
        [
            sum(
                decays[u - z] * (early if z <= 2 * rounds_per_epoch else late) ** 2
                for _, z in cover(max(1, u - rounds_per_epoch + 1), u)
            )
            if u >= earliest
            else 0.0
            for u in range(1, rounds + 1)
        ]
    )
