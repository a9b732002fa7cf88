"""Where a record sits, and whether it counts: decided here for simulations, shards and guards alike.

A row of a file has its place for good.  What a row holds (a missing value, a cell of the column `split`, whose
record it is) never moves a row, not even itself: a row that does not count where it has a place is a zero there.
A rule that looks at no cell, the seeded coins of `test_share` by the number of a row, may leave rows out.

A person is one unit whatever the person's rows are, and also if none of them counts.  Persons stand in the order
of their names, so that rows move nobody; a guard reads them in a secret order of its own, so that names do not.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpriv.randomness import KeyedCoins, derive_key, public_generator, seed_key

Table = NDArray[np.int64]
"""Record numbers (units, most): those of a unit in the order of the file, filled up with -1."""
_ABSENT_CLASS = -1
_SPLIT_SEED = 0
"""The public seed of every table's split into training and test."""


@dataclass(frozen=True)
class Part:
    """The rows of a file that have a place in one part of it, training or test."""

    rows: NDArray[np.int64]
    """Their numbers in the file, in its order; for no cell of the file are they others."""
    counts: NDArray[np.bool_]
    """Which of them count: as secret as the records."""

    def taken(self, features: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The part's features and labels, of arrays with every row of the file; zeros where a row does not count.

        Guarantee: a row that does not count leaves nothing of its cells.
        """
        kept = features[self.rows]
        kept[~self.counts] = 0
        return kept, blanked(labels[self.rows], self.counts)


@dataclass(frozen=True)
class Places:
    """The places of a file's rows."""

    train: Part
    test: Part


def places(
    complete: NDArray[np.bool_], said: NDArray[np.bool_] | None, persons: Sequence[str] | None, test_share: float
) -> Places:
    """Of rows that are `complete` or not: tests are those `said`, or of the `persons` put aside, or by place.

    Guarantee: `rows` of both parts follow from the number of rows and from which arguments are given, and whether
    a row counts from its own cells and its place.
    """
    if said is None and persons is not None:
        said = put_aside(persons, test_share)
    everywhere = np.arange(len(complete))
    if said is not None:
        return Places(Part(everywhere, complete & ~said), Part(everywhere, complete & said))
    aside = public_generator(_SPLIT_SEED, "test rows").random(len(complete)) < test_share
    train, test = everywhere[~aside], everywhere[aside]
    return Places(Part(train, complete[train]), Part(test, complete[test]))


def put_aside(persons: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Whose rows are for testing: a keyed public hash of the person is below the share.

    Guarantee: all rows of a person are in one part, which depends on the name alone.
    """
    key, below = seed_key(_SPLIT_SEED, "test persons"), int(share * 2.0**64)
    fallen = {
        name: int.from_bytes(hashlib.sha256(key + name.encode()).digest()[:8], "big") < below
        for name in set(persons)
    }
    return np.array([fallen[name] for name in persons], np.bool_)


def blanked(labels: NDArray[Any], counts: NDArray[np.bool_]) -> NDArray[Any]:
    """Labels of which those of rows that do not count are no class, or no number."""
    absent: float = np.nan if np.issubdtype(labels.dtype, np.floating) else _ABSENT_CLASS
    return np.where(counts, labels, np.array(absent, labels.dtype))


def counted(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows count, of labels as `blanked` leaves them."""
    found = ~np.isnan(labels) if np.issubdtype(labels.dtype, np.floating) else labels != _ABSENT_CLASS
    return np.asarray(found, np.bool_)


def roster(persons: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first row of every person, in the order of their names; the person's place in it, of every row)."""
    _, first, place = np.unique(np.asarray(persons), return_index=True, return_inverse=True)
    return first.astype(np.int64), place.ravel().astype(np.int64)


def of_persons(persons: ArrayLike, most: int, counts: NDArray[np.bool_] | None = None) -> Table:
    """A unit a person, in the order of their names, of the rows that count; the first `most` of them.

    Guarantee: a person's unit depends on the person's own rows alone, its place on the names alone, and a person
    none of whose rows counts has one.
    """
    first, place = roster(persons)
    rows = np.arange(len(place)) if counts is None else np.flatnonzero(counts)
    order = rows[np.argsort(place[rows], kind="stable")]
    starts = np.searchsorted(place[order], np.arange(len(first)))
    number = np.arange(len(order)) - starts[place[order]]
    table = np.full((len(first), most), -1, np.int64)
    kept = number < most
    table[place[order][kept], number[kept]] = order[kept]
    return table


def in_a_row(records: int, most: int) -> Table:
    """Units of `most` consecutive records each; a rest that fills none is left out."""
    return np.arange(records // most * most, dtype=np.int64).reshape(-1, most)


def secret_order(key: bytes, units: int) -> NDArray[np.int64]:
    """A permutation of `units`, uniformly random for anybody without the `key` of a run, (units,).

    Guarantee: it follows from the key and the number of units.  So whoever is exchanged for somebody else, under
    whatever name, the places of all others have the same law, and may be given away.
    """
    coins = KeyedCoins(derive_key(key, "order of persons"))
    high, low = (coins.numbers(units, 2**32, 0, t) for t in (0, 1))
    return np.lexsort((low, high)).astype(np.int64)
