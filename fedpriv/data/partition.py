"""Partition records over silos, by public choices from the scenario's seed, and give every record its place.

`silo_sizes` says how many records each silo gets, without a look at any record: batch sizes enter the public plan.
A partition then takes (labels, sizes, seed, and its own setting) and returns each silo's record numbers, in the
order in which it reads them.

Places are decided here for simulations, shards and guards alike.  A row of a file has its place for good.  What a
row holds (a missing value, a cell of the column `split`, whose record it is) never moves a row, not even itself: a
row that does not count where it has a place is a zero there.  A rule that looks at no cell, the seeded coins of
`test_share` by the number of a row, may leave rows out.

A person is one unit whatever the person's rows are, and also if none of them counts.  Persons stand in the order
of their names, so that rows move nobody; a guard reads them in a secret order of its own, so that names do not.

Draw a data set's training and test records anew, and spare some of the training records: public choices.

A published split is one of many.  How far a comparison depends on it is seen by drawing others, of the same sizes:
site by site where the data have sites, stratified by label where every label that occurs does more than twice, and
by person where the data say whose a record is.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.random import SamplingRandomness, derive_key, public_generator, seed_key
from fedpriv.data.own import Dataset, Sites

_RESPLIT_SEED = 0
"""The public seed of all splits; their numbers tell them apart."""
_MAX_RARE_COUNT = 2
"""A label that occurs so often, or less, is not shared out."""


def draw_split(data: Dataset, number: int) -> Dataset:
    """The records of both parts, dealt out anew by the public split `number`, 1 or more; sizes stay.

    Guarantee: no record is in both parts, and no person.  InputError where persons of the test part are not known.
    """
    train_counts, test_counts = counted_mask(data.train_labels), counted_mask(data.test_labels)
    if data.row_indices is not None and np.array_equal(np.sort(data.row_indices[0]), np.sort(data.row_indices[1])):
        # For every training place, the test place of the same row.
        back = np.argsort(data.row_indices[1])[np.argsort(np.argsort(data.row_indices[0]))]
        images = np.where(
            _broadcast_mask(train_counts, data.train_images), data.train_images, data.test_images[back]
        )
        labels = np.where(
            _broadcast_mask(train_counts, data.train_labels), data.train_labels, data.test_labels[back]
        )
        known = train_counts | test_counts[back]
        tests = test_counts[back]
        aside = _draw_records(data, labels, known, tests, "split", number)
        train, test = known & ~aside, aside
        forth = np.argsort(back)
        return dataclasses.replace(
            data,
            train_images=_blank_images(images, train),
            train_labels=blank_labels(labels, train),
            test_images=_blank_images(images, test)[forth],
            test_labels=blank_labels(labels, test)[forth],
        )
    if data.persons is not None:
        raise InputError(f"data.split: whose the test records of {data.name} are is not known; leave it out")
    images = np.concatenate([data.train_images, data.test_images])
    labels = np.concatenate([data.train_labels, data.test_labels])
    sites = None if data.sites is None else np.concatenate([data.sites.train, data.sites.test])
    known, tests = counted_mask(labels), np.arange(len(labels)) >= len(data.train_labels)
    named = None if data.sites is None or sites is None else Sites(data.sites.names, sites, sites)
    aside = _draw_records(dataclasses.replace(data, sites=named), labels, known, tests & known, "split", number)
    out = aside | (tests & ~known)
    chosen, others = np.flatnonzero(out), np.flatnonzero(~out)
    others = others[public_generator(_RESPLIT_SEED, "order of split", str(number)).permutation(len(others))]
    return dataclasses.replace(
        data,
        train_images=images[others],
        train_labels=labels[others],
        test_images=images[chosen],
        test_labels=labels[chosen],
        sites=None if named is None else Sites(named.names, named.train[others], named.test[chosen]),
        row_indices=None,
    )


def blank_training_share(data: Dataset, share: float) -> Dataset:
    """The data with a `share` of the training records, drawn like a split, as zeros that keep their places."""
    known = counted_mask(data.train_labels)
    units = round(1.0 / share)
    generator = public_generator(_RESPLIT_SEED, "spared")
    aside = _draw_records(
        data, data.train_labels, known, known & (generator.permutation(len(known)) % units == 0), "spared", 0
    )
    return dataclasses.replace(
        data,
        train_images=_blank_images(data.train_images, known & ~aside),
        train_labels=blank_labels(data.train_labels, known & ~aside),
    )


def _draw_records(
    data: Dataset, labels: NDArray[Any], known: NDArray[np.bool_], quota: NDArray[np.bool_], why: str, number: int
) -> NDArray[np.bool_]:
    """Choose records of `known` to put aside, site by site as many units as `quota` has, (n,)."""
    sites = np.zeros(len(labels), np.int64) if data.sites is None else data.sites.train
    persons = None if data.persons is None else np.unique(data.persons, return_inverse=True)[1].ravel()
    aside = np.zeros(len(labels), np.bool_)
    for site in np.unique(sites[known]):
        here = np.flatnonzero(known & (sites == site))
        units = np.arange(len(here)) if persons is None else np.unique(persons[here], return_inverse=True)[1]
        first = np.unique(units, return_index=True)[1]
        many = len(np.unique(units[quota[here]]))
        generator = public_generator(_RESPLIT_SEED, why, str(number), str(site))
        aside[here[np.isin(units, _draw_stratified(labels[here][first], many, generator))]] = True
    return aside


def _draw_stratified(labels: NDArray[Any], many: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """`many` places of `labels`, each label with its share of them; any where a label is rare, or a number."""
    classes = labels.dtype.kind == "i" and labels.ndim == 1  # several labels of a record are no stratum
    kinds, counts = np.unique(labels, return_counts=True) if classes else (labels[:1], np.array([len(labels)]))
    order = generator.permutation(len(labels))
    if not classes or counts.min() <= _MAX_RARE_COUNT:
        return order[:many]
    wanted = counts * (many / len(labels))
    whole = np.floor(wanted).astype(np.int64)
    whole[np.argsort(-(wanted - whole + 1e-9 * generator.random(len(whole))))[: many - int(whole.sum())]] += 1
    return np.concatenate([order[labels[order] == kind][:size] for kind, size in zip(kinds, whole, strict=True)])


def _broadcast_mask(mask: NDArray[np.bool_], images: NDArray[Any]) -> NDArray[np.bool_]:
    return mask.reshape(-1, *[1] * (images.ndim - 1))


def _blank_images(images: NDArray[Any], counts: NDArray[np.bool_]) -> NDArray[Any]:
    kept = images.copy()
    kept[~counts] = 0
    return kept


UnitTable = NDArray[np.int64]
"""Record numbers (units, most): those of a unit in the order of the file, filled up with -1."""
_ABSENT_CLASS = -1
_SPLIT_SEED = 0
"""The public seed of every table's split into training and test."""


@dataclass(frozen=True)
class SplitRows:
    """The rows of a file that have a place in one part of it, training or test."""

    row_indices: NDArray[np.int64]
    """Their numbers in the file, in its order; for no cell of the file are they others."""
    is_counted: NDArray[np.bool_]
    """Which of them count: as secret as the records."""

    def take(self, features: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The part's features and labels, of arrays with every row of the file; zeros where a row does not count.

        Guarantee: a row that does not count leaves nothing of its cells.
        """
        return self.zero_uncounted(features[self.row_indices]), blank_labels(
            labels[self.row_indices], self.is_counted
        )

    def zero_uncounted(self, kept: NDArray[Any]) -> NDArray[Any]:
        """`kept`, what its rows hold, with zeros written where a row does not count."""
        if not self.is_counted.all():
            kept[~self.is_counted] = 0
        return kept

    def reorder(self, order: NDArray[np.int64]) -> "SplitRows":
        return SplitRows(self.row_indices[order], self.is_counted[order])


@dataclass(frozen=True)
class TableSplit:
    """The places of a file's rows."""

    train: SplitRows
    test: SplitRows


def split_rows(
    complete: NDArray[np.bool_], said: NDArray[np.bool_] | None, persons: Sequence[str] | None, test_share: float
) -> TableSplit:
    """Of rows that are `complete` or not: tests are those `said`, or of the `persons` put aside, or by place.

    Guarantee: `rows` of both parts follow from the number of rows and from which arguments are given, and whether
    a row counts from its own cells and its place.
    """
    said = choose_test_rows(persons, test_share) if said is None and persons is not None else said
    everywhere = np.arange(len(complete))
    if said is not None:
        return TableSplit(SplitRows(everywhere, complete & ~said), SplitRows(everywhere, complete & said))
    aside = public_generator(_SPLIT_SEED, "test rows").random(len(complete)) < test_share
    train, test = everywhere[~aside], everywhere[aside]
    return TableSplit(SplitRows(train, complete[train]), SplitRows(test, complete[test]))


def choose_test_rows(persons: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Find the persons whose rows are for testing: a keyed public hash of the person is below the share.

    Guarantee: all rows of a person are in one part, which depends on the name alone.
    """
    key, below = seed_key(_SPLIT_SEED, "test persons"), int(share * 2.0**64)
    fallen = {
        name: int.from_bytes(hashlib.sha256(key + name.encode()).digest()[:8], "big") < below
        for name in set(persons)
    }
    return np.array([fallen[name] for name in persons], np.bool_)


def blank_labels(labels: NDArray[Any], counts: NDArray[np.bool_]) -> NDArray[Any]:
    """Labels of which those of rows that do not count are no class, or no number."""
    absent: float = np.nan if np.issubdtype(labels.dtype, np.floating) else _ABSENT_CLASS
    return np.where(counts.reshape(-1, *[1] * (labels.ndim - 1)), labels, np.array(absent, labels.dtype))


def counted_mask(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Find the rows that count, of labels (n, ...) as `blanked` leaves them."""
    found = ~np.isnan(labels) if np.issubdtype(labels.dtype, np.floating) else labels != _ABSENT_CLASS
    return np.asarray(found if labels.ndim == 1 else found.reshape(len(labels), -1).any(axis=1), np.bool_)


def index_persons(persons: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first row of every person, in the order of their names; the person's place in it, of every row)."""
    _, first, place = np.unique(np.asarray(persons), return_index=True, return_inverse=True)
    return first.astype(np.int64), place.ravel().astype(np.int64)


def group_by_person(persons: ArrayLike, most: int, counts: NDArray[np.bool_] | None = None) -> UnitTable:
    """A unit a person, in the order of their names, of the rows that count; the first `most` of them.

    Guarantee: a person's unit depends on the person's own rows alone, its place on the names alone, and a person
    none of whose rows counts has one.
    """
    first, place = index_persons(persons)
    rows = np.arange(len(place)) if counts is None else np.flatnonzero(counts)
    order = rows[np.argsort(place[rows], kind="stable")]
    number = np.arange(len(order)) - np.searchsorted(place[order], np.arange(len(first)))[place[order]]
    table = np.full((len(first), most), -1, np.int64)
    kept = number < most
    table[place[order][kept], number[kept]] = order[kept]
    return table


def group_consecutive(records: int, most: int) -> UnitTable:
    """Units of `most` consecutive records each; a rest that fills none is left out."""
    return np.arange(records // most * most, dtype=np.int64).reshape(-1, most)


def secret_permutation(key: bytes, units: int) -> NDArray[np.int64]:
    """A permutation of `units`, uniformly random for anybody without the `key` of a run, (units,).

    Guarantee: it follows from the key and the number of units.  So whoever is exchanged for somebody else, under
    whatever name, the places of all others have the same law, and may be given away.
    """
    coins = SamplingRandomness(derive_key(key, "order of persons"))
    high, low = (coins.numbers(units, 2**32, 0, t) for t in (0, 1))
    return np.lexsort((low, high)).astype(np.int64)


SiloRows = list[NDArray[np.int64]]
_BALANCING_PASSES = 200


def silo_sizes(records: int, silos: int, skew: float | None, seed: int, min_size: int = 1) -> tuple[int, ...]:
    """Number of `records` for each silo: equal (the remainder is left out), or skewed.

    `skew` is the concentration of a symmetric Dirichlet distribution over silos: small is uneven; every silo gets
    `at_least` records, and a skewed federation uses all of them.  InputError if there are too few records.
    """
    if silos < 1 or min_size < 1:
        raise InputError(f"{silos} silos of at least {min_size} records: both numbers must be at least 1")
    if silos * min_size > records:
        raise InputError(
            f"{silos} silos of {min_size} records need {silos} * {min_size} = {silos * min_size} records, "
            f"but there are {records}"
        )
    if skew is None:
        return (records // silos,) * silos
    shares = public_generator(seed, "silo sizes").dirichlet(np.full(silos, skew))
    return tuple((min_size + _round_amounts(shares * (records - silos * min_size))).tolist())


def partition_iid(labels: NDArray[np.int64], sizes: Sequence[int], seed: int) -> SiloRows:
    """A uniformly random permutation of the records, cut into silos.

    Guarantee: no record is given twice.  InputError if there are too few.
    """
    _check_sizes(len(labels), sizes)
    return np.split(
        public_generator(seed, "partition").permutation(len(labels))[: sum(sizes)], np.cumsum(sizes)[:-1]
    )


def partition_dirichlet(
    labels: NDArray[np.int64], sizes: Sequence[int], seed: int, concentration: float
) -> SiloRows:
    """Label skew: each silo's mixture of labels is drawn from a symmetric Dirichlet distribution.

    Hsu, Qi & Brown 2019, with the silos' sizes kept: the mixtures are balanced against the labels that there are
    (alternating scaling of rows and columns) before they are rounded.  Small `concentration`: few labels a silo.

    Guarantee: no record is given twice.  InputError if there are too few.
    """
    _check_sizes(len(labels), sizes)
    generator = public_generator(seed, "partition", "dirichlet")
    classes, counts = np.unique(labels, return_counts=True)
    pools = [generator.permutation(np.flatnonzero(labels == label)).tolist() for label in classes]
    return _deal_records(
        pools,
        generator.dirichlet(np.full(len(classes), concentration), size=len(sizes)) + 1e-12,
        sizes,
        counts,
        generator,
    )


def partition_alike(
    labels: NDArray[np.int64], sizes: Sequence[int], seed: int, like: Sequence[NDArray[np.int64]]
) -> SiloRows:
    """Records whose labels each silo has about as often as among its own in `like`: a silo's test records.

    Guarantee: no record is given twice.  InputError if there are too few.
    """
    _check_sizes(len(labels), sizes)
    generator = public_generator(seed, "partition", "alike")
    classes, counts = np.unique(labels, return_counts=True)
    pools = [generator.permutation(np.flatnonzero(labels == label)).tolist() for label in classes]
    return _deal_records(
        pools,
        np.array([[np.mean(own == label) for label in classes] for own in like]) + 1e-12,
        sizes,
        counts,
        generator,
    )


def _deal_records(
    pools: list[list[int]],
    mixtures: NDArray[np.float64],
    sizes: Sequence[int],
    counts: NDArray[np.int64],
    generator: np.random.Generator,
) -> SiloRows:
    """Records out of the pools of each label, by mixtures that are balanced against the labels that there are."""
    wanted = _balance_margins(
        mixtures, np.array(sizes, np.float64), np.float64(sum(sizes) / counts.sum()) * counts
    )
    shares = []
    for row, size in zip(wanted, sizes, strict=True):
        take = np.minimum(_round_amounts(row * (size / row.sum())), [len(pool) for pool in pools])
        while (short := size - int(take.sum())) > 0:  # a pool ran out: the fullest gives the rest
            spare = np.array([len(pool) for pool in pools]) - take
            take[np.argmax(spare)] += min(short, int(spare.max()))
        share = np.array([pool.pop() for pool, count in zip(pools, take, strict=True) for _ in range(count)])
        shares.append(generator.permutation(share))
    return shares


def partition_shards(labels: NDArray[np.int64], sizes: Sequence[int], seed: int, per_silo: int) -> SiloRows:
    """Label shards: records sorted by label, cut into `per_silo` pieces a silo, the pieces dealt out at random.

    McMahan et al. 2017, section 3 (there 2 shards a client).

    Guarantee: no record is given twice.  InputError if there are too few, or fewer in a silo than shards.
    """
    _check_sizes(len(labels), sizes)
    if per_silo < 1 or per_silo > min(sizes):
        raise InputError(
            f"data.shards = {per_silo}: a silo has {min(sizes)} records, and a shard holds at least one"
        )
    generator = public_generator(seed, "partition", "shards")
    chosen = np.sort(generator.permutation(len(labels))[: sum(sizes)])
    by_label = chosen[np.argsort(labels[chosen], kind="stable")]
    pieces = [
        (silo, size // per_silo + (place < size % per_silo))
        for silo, size in enumerate(sizes)
        for place in range(per_silo)
    ]
    held: list[list[NDArray[np.int64]]] = [[] for _ in sizes]
    start = 0
    for piece in generator.permutation(len(pieces)):
        silo, length = pieces[piece]
        held[silo].append(by_label[start : start + length])
        start += length
    return [generator.permutation(np.concatenate(share)) for share in held]


def partition_by_site(sites: NDArray[np.int64], sizes: Sequence[int], seed: int) -> SiloRows:
    """Each record to the silo of its site, in a uniformly random order; what is beyond a silo's size is left out.

    Guarantee: no record is given twice, and none to another site's silo.  InputError if a site has too few.
    """
    shares = []
    for silo, size in enumerate(sizes):
        own = np.flatnonzero(sites == silo)
        _check_sizes(len(own), [size])
        shares.append(public_generator(seed, "partition", "site", str(silo)).permutation(own)[:size])
    return shares


def _balance_margins(
    mixtures: NDArray[np.float64], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The matrix nearest to `mixtures`, by scaling rows and columns, with the given row and column sums."""
    matrix = mixtures.copy()
    for _ in range(_BALANCING_PASSES):
        matrix *= (columns / matrix.sum(axis=0))[None, :]
        matrix *= (rows / matrix.sum(axis=1))[:, None]
    return matrix


def _round_amounts(amounts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers with the sum of `amounts`, rounded: the largest remainders are rounded up."""
    whole = np.floor(amounts).astype(np.int64)
    whole[np.argsort(whole - amounts, kind="stable")[: round(float(amounts.sum())) - int(whole.sum())]] += 1
    return whole


def _check_sizes(records: int, sizes: Sequence[int]) -> None:
    if not sizes or min(sizes) < 1:
        raise InputError(f"silos of {list(sizes)} records: at least one silo, and one record in each")
    if sum(sizes) > records:
        raise InputError(f"{len(sizes)} silos need {sum(sizes)} records in all, but there are {records}")
