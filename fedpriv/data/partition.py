"""Partition records over silos, and split them into training and test parts.

A partition or split follows from public randomness, and some partitions also from the records' labels.

`silo_sizes` computes the number of records of each silo without reading a record, because batch sizes are public.
A `partition_…` function returns the row indices of each silo, in the silo's order of records.

`split_rows` gives each row of a file a place, its position in the training part, in the test part, or in both.
The place of a row does not depend on its content, such as a missing value.  A row that has a place and does not
count has features of zeros there, and the label -1, or NaN in a regression.

`draw_split` draws other splits than the published one, to show how far a comparison depends on the split.  A unit
is a person if the data name persons, and else a record.
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
"""Public seed of redrawn splits, which differ by their numbers, and of spared training records."""
_MAX_RARE_COUNT = 2
"""Number of units with one label up to which units are drawn without stratification."""


def draw_split(data: Dataset, number: int) -> Dataset:
    """Draw another public split into a training and a test part.

    If both parts have the same rows of a file, rows stay where they are, and the split changes which of them
    count.  Otherwise the records of both parts are joined, and those that count are drawn anew.  At each site the
    test part keeps its number of units.

    Guarantee: no record counts in both parts, and no person at a site has records that count in both parts.

    Args:
        data: Data set with its published split.  Its `raw_cells` stay as they are, and are not split anew.
        number: Number of the split, 1 or more, from which the public randomness follows.

    Raises:
        InputError: Records are drawn anew, and persons or sites are known for training records only.
    """
    train_counts, test_counts = counted_mask(data.train_labels), counted_mask(data.test_labels)
    if data.row_indices is not None and np.array_equal(np.sort(data.row_indices[0]), np.sort(data.row_indices[1])):
        # `test_index` maps a training row to the test row of the same row of the file, and `train_index` back.
        test_index = np.argsort(data.row_indices[1])[np.argsort(np.argsort(data.row_indices[0]))]
        images = np.where(
            _broadcast_mask(train_counts, data.train_images), data.train_images, data.test_images[test_index]
        )
        labels = np.where(
            _broadcast_mask(train_counts, data.train_labels), data.train_labels, data.test_labels[test_index]
        )
        is_counted = train_counts | test_counts[test_index]
        was_test = test_counts[test_index]
        is_drawn = _draw_records(data, labels, is_counted, was_test, "split", number)
        train, test = is_counted & ~is_drawn, is_drawn
        train_index = np.argsort(test_index)
        return dataclasses.replace(
            data,
            train_images=_blank_images(images, train),
            train_labels=blank_labels(labels, train),
            test_images=_blank_images(images, test)[train_index],
            test_labels=blank_labels(labels, test)[train_index],
        )
    if data.persons is not None or (data.sites is not None and len(data.sites.test) != len(data.test_labels)):
        raise InputError(
            f"data.split: the persons or sites of the test records of {data.name} are not known; leave it out"
        )
    images = np.concatenate([data.train_images, data.test_images])
    labels = np.concatenate([data.train_labels, data.test_labels])
    sites = None if data.sites is None else np.concatenate([data.sites.train, data.sites.test])
    is_counted, was_test = counted_mask(labels), np.arange(len(labels)) >= len(data.train_labels)
    all_sites = None if data.sites is None or sites is None else Sites(data.sites.names, sites, sites)
    is_drawn = _draw_records(
        dataclasses.replace(data, sites=all_sites), labels, is_counted, was_test & is_counted, "split", number
    )
    is_test = is_drawn | (was_test & ~is_counted)  # a row that does not count stays in its part
    test_rows, train_rows = np.flatnonzero(is_test), np.flatnonzero(~is_test)
    train_rows = train_rows[
        public_generator(_RESPLIT_SEED, "order of split", str(number)).permutation(len(train_rows))
    ]
    return dataclasses.replace(
        data,
        train_images=images[train_rows],
        train_labels=labels[train_rows],
        test_images=images[test_rows],
        test_labels=labels[test_rows],
        sites=None
        if all_sites is None
        else Sites(all_sites.names, all_sites.train[train_rows], all_sites.test[test_rows]),
        row_indices=None,
    )


def blank_training_share(data: Dataset, share: float) -> Dataset:
    """Replace a share of the training records by zeros in the same places.

    The records are drawn in whole units, and stratified by class where that is possible.

    Args:
        data: Data set.  Its `raw_cells` stay as they are.
        share: Share of the training records, or of the persons if the data name persons, above 0 and at most 1,
            rounded to the inverse of an integer.  The share of one site may differ.

    Returns:
        The data set, in which the labels of the drawn records are those of records that do not count
        (`blank_labels`).
    """
    is_counted = counted_mask(data.train_labels)
    units = np.arange(len(is_counted)) if data.persons is None else index_persons(data.persons)[1]
    # A site spares as many units as it has among every round(1 / share)-th one in a random order.
    unit_order = public_generator(_RESPLIT_SEED, "spared").permutation(len(np.unique(units)))
    is_spared = _draw_records(
        data,
        data.train_labels,
        is_counted,
        is_counted & (unit_order % round(1.0 / share) == 0)[units],
        "spared",
        0,
    )
    return dataclasses.replace(
        data,
        train_images=_blank_images(data.train_images, is_counted & ~is_spared),
        train_labels=blank_labels(data.train_labels, is_counted & ~is_spared),
    )


def _draw_records(
    data: Dataset,
    labels: NDArray[Any],
    is_counted: NDArray[np.bool_],
    quota: NDArray[np.bool_],
    purpose: str,
    number: int,
) -> NDArray[np.bool_]:
    """Draw a mask of counted records, (n,), with as many units at each site as `quota` has there.

    A unit is a person's counted records at the site, or one counted record if the data name no persons.  Units are
    drawn whole, and stratified by the label of their first record where that is possible.

    Args:
        data: Data set, for the site (`sites.train`) and the person of each of the n records.
        labels: Labels of the records, (n,) or (n, ...).
        is_counted: Mask of the records that count, (n,).
        quota: Mask of records, (n,), for the number of units to draw at each site.
        purpose: Name of the draw, from which its public randomness follows.
        number: Number of the draw, likewise.
    """
    sites = np.zeros(len(labels), np.int64) if data.sites is None else data.sites.train
    persons = None if data.persons is None else np.unique(data.persons, return_inverse=True)[1].ravel()
    is_drawn = np.zeros(len(labels), np.bool_)
    for site in np.unique(sites[is_counted]):
        site_rows = np.flatnonzero(is_counted & (sites == site))
        units = (
            np.arange(len(site_rows)) if persons is None else np.unique(persons[site_rows], return_inverse=True)[1]
        )
        first_rows = np.unique(units, return_index=True)[1]
        unit_count = len(np.unique(units[quota[site_rows]]))
        generator = public_generator(_RESPLIT_SEED, purpose, str(number), str(site))
        is_drawn[
            site_rows[np.isin(units, _draw_stratified(labels[site_rows][first_rows], unit_count, generator))]
        ] = True
    return is_drawn


def _draw_stratified(labels: NDArray[Any], count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw `count` indices into `labels`, stratified by class if that is possible.

    A stratified draw has count · (share of the class) indices of each class, rounded to integers of the sum
    `count`.  The draw is not stratified if a class occurs at most twice, or if labels are real numbers or several
    for a record.

    Args:
        labels: Labels to draw from, (n,) or (n, ...).
        count: Number of indices, at most n.
        generator: Randomness of the draw.

    Returns:
        Indices, (count,).
    """
    has_classes = labels.dtype.kind == "i" and labels.ndim == 1
    classes, counts = (
        np.unique(labels, return_counts=True) if has_classes else (labels[:1], np.array([len(labels)]))
    )
    order = generator.permutation(len(labels))
    if not has_classes or counts.min() <= _MAX_RARE_COUNT:
        return order[:count]
    quotas = counts * (count / len(labels))
    amounts = np.floor(quotas).astype(np.int64)
    # The largest remainders are rounded up, and ties are broken at random.
    amounts[
        np.argsort(-(quotas - amounts + 1e-9 * generator.random(len(amounts))))[: count - int(amounts.sum())]
    ] += 1
    return np.concatenate(
        [order[labels[order] == label][:size] for label, size in zip(classes, amounts, strict=True)]
    )


def _broadcast_mask(mask: NDArray[np.bool_], images: NDArray[Any]) -> NDArray[np.bool_]:
    return mask.reshape(-1, *[1] * (images.ndim - 1))


def _blank_images(images: NDArray[Any], is_counted: NDArray[np.bool_]) -> NDArray[Any]:
    blanked = images.copy()
    blanked[~is_counted] = 0
    return blanked


UnitTable = NDArray[np.int64]
"""Row indices of the records of each unit, (units, max_records), filled up with -1."""
_ABSENT_CLASS = -1
_SPLIT_SEED = 0
"""Public seed of a table's split into training and test rows, unless a column marks the test rows."""


@dataclass(frozen=True)
class SplitRows:
    """Rows of a file that have a place in one part of its split, training or test."""

    row_indices: NDArray[np.int64]
    """Row numbers in the file, (n,), in its order or that of `reorder`.  The numbers depend on no cell."""
    is_counted: NDArray[np.bool_]
    """Mask of the rows that count, (n,).  The mask is as secret as the records."""

    def take(self, features: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the features and labels of this part, with zeros for a row that does not count.

        Guarantee: of a row that does not count, the result holds this fact and nothing of its cells.

        Args:
            features: Features of every row of the file.
            labels: Labels of every row of the file.  The label of a row that does not count becomes no class, or
                no number (`blank_labels`).
        """
        return self.zero_uncounted(features[self.row_indices]), blank_labels(
            labels[self.row_indices], self.is_counted
        )

    def zero_uncounted(self, values: NDArray[Any]) -> NDArray[Any]:
        """Overwrite the rows of `values` that do not count by zeros, and return `values`, (n, ...)."""
        if not self.is_counted.all():
            values[~self.is_counted] = 0
        return values

    def reorder(self, order: NDArray[np.int64]) -> "SplitRows":
        """Return the rows in another order, which `order` gives as indices into this part."""
        return SplitRows(self.row_indices[order], self.is_counted[order])


@dataclass(frozen=True)
class TableSplit:
    """Places of a file's rows in the training and in the test part."""

    train: SplitRows
    """Rows of the training part."""
    test: SplitRows
    """Rows of the test part.  Both parts may have the same rows, which then count in one of them at most."""


def split_rows(
    complete: NDArray[np.bool_],
    is_test: NDArray[np.bool_] | None,
    persons: Sequence[str] | None,
    test_share: float,
) -> TableSplit:
    """Split the rows of a file into a training and a test part.

    The test rows are chosen in one of three ways:

    1. If `is_test` is given, they are the rows that it marks.
    2. Otherwise, if `persons` is given, they are the rows of the persons that `choose_test_rows` chooses.
    3. Otherwise they are drawn at random by their row numbers.

    In the first two cases every row has a place in both parts, and counts in one of them at most, so that places
    do not depend on cells.  In the third case a row has a place in one part only.

    Guarantee: `row_indices` of both parts follow from the number of rows, from `test_share` and from which
    arguments are given.  In which part a row counts follows from its own cells, its row number, `test_share` and
    which arguments are given.

    Args:
        complete: Mask of the rows that count in the part that they are in, (rows,).
        is_test: Mask of the rows that the file marks as test rows, (rows,), or None.
        persons: Name of each row's person, or None.
        test_share: Probability that a person or a row is in the test part, without effect if `is_test` is given.
    """
    is_test = choose_test_rows(persons, test_share) if is_test is None and persons is not None else is_test
    all_rows = np.arange(len(complete))
    if is_test is not None:
        return TableSplit(SplitRows(all_rows, complete & ~is_test), SplitRows(all_rows, complete & is_test))
    is_drawn = public_generator(_SPLIT_SEED, "test rows").random(len(complete)) < test_share
    train, test = all_rows[~is_drawn], all_rows[is_drawn]
    return TableSplit(SplitRows(train, complete[train]), SplitRows(test, complete[test]))


def choose_test_rows(persons: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Mark the rows of the persons whose public hash, a number in 0 … 1, is below the share, (rows,).

    Guarantee: all rows of a person are in one part, which depends on the person's name and the share alone.
    """
    key, threshold = seed_key(_SPLIT_SEED, "test persons"), int(share * 2.0**64)
    is_test = {
        name: int.from_bytes(hashlib.sha256(key + name.encode()).digest()[:8], "big") < threshold
        for name in set(persons)
    }
    return np.array([is_test[name] for name in persons], np.bool_)


def blank_labels(labels: NDArray[Any], is_counted: NDArray[np.bool_]) -> NDArray[Any]:
    """Replace the labels of rows that do not count by -1, or by NaN if labels are floats.

    Args:
        labels: Signed integers or floats, (n, ...).
        is_counted: Mask of the rows that count, (n,).
    """
    absent: float = np.nan if np.issubdtype(labels.dtype, np.floating) else _ABSENT_CLASS
    return np.where(is_counted.reshape(-1, *[1] * (labels.ndim - 1)), labels, np.array(absent, labels.dtype))


def counted_mask(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the mask of the rows that count, (n,), of labels (n, ...) that `blank_labels` returned."""
    is_present = ~np.isnan(labels) if np.issubdtype(labels.dtype, np.floating) else labels != _ABSENT_CLASS
    return np.asarray(is_present.any(axis=tuple(range(1, labels.ndim))), np.bool_)


def index_persons(persons: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the persons in the order of their names.

    Returns:
        The first row of every person, (persons,), and the number of every row's person, (rows,).
    """
    _, first_rows, person_index = np.unique(np.asarray(persons), return_index=True, return_inverse=True)
    return first_rows.astype(np.int64), person_index.ravel().astype(np.int64)


def group_by_person(
    persons: ArrayLike, max_records: int, is_counted: NDArray[np.bool_] | None = None
) -> UnitTable:
    """Group the rows that count into one unit for each person, in the order of the names.

    Guarantee: a person's unit depends on the person's own rows alone, and its place on the names alone.  A person
    none of whose rows counts has a unit, too, which is filled with -1.

    Args:
        persons: Name of each row's person.
        max_records: Most records of a unit, which are the person's first rows that count.
        is_counted: Mask of the rows that count, or None if all count.

    Returns:
        Row indices of each person, (persons, max_records), in the order of the rows and filled up with -1.
    """
    first_rows, person_index = index_persons(persons)
    rows = np.arange(len(person_index)) if is_counted is None else np.flatnonzero(is_counted)
    order = rows[np.argsort(person_index[rows], kind="stable")]
    # Position of each row among the rows of its person that count.
    position = (
        np.arange(len(order))
        - np.searchsorted(person_index[order], np.arange(len(first_rows)))[person_index[order]]
    )
    table = np.full((len(first_rows), max_records), -1, np.int64)
    fits = position < max_records
    table[person_index[order][fits], position[fits]] = order[fits]
    return table


def group_consecutive(records: int, unit_size: int) -> UnitTable:
    """Group records into units of `unit_size` consecutive ones, without a remainder that fills no unit.

    Returns:
        Row indices of the units, (units, unit_size).

    Example:
        >>> group_consecutive(records=5, unit_size=2).tolist()
        [[0, 1], [2, 3]]
    """
    return np.arange(records // unit_size * unit_size, dtype=np.int64).reshape(-1, unit_size)


def secret_permutation(key: bytes, units: int) -> NDArray[np.int64]:
    """Return a permutation of the units, (units,), uniformly random to a party without the key of the run.

    The permutation sorts numbers of 128 bits.  It is uniform unless two of them are equal, which happens with a
    probability of at most units² / 2^129.

    Guarantee: the permutation follows from the key and the number of units.  So if one person is exchanged for
    another, under any name, the places of all other persons have the same distribution, and may be revealed.
    """
    randomness = SamplingRandomness(derive_key(key, "order of persons"))
    # With 96 bits, a tie among 400,000 units would be likelier than 2^-60, up to which a guard's claim holds.
    digits = [randomness.numbers(units, 2**32, 0, t) for t in range(4)]
    return np.lexsort(digits[::-1]).astype(np.int64)  # the last key of `lexsort` counts first


SiloRows = list[NDArray[np.int64]]
_BALANCING_PASSES = 200


def silo_sizes(records: int, silos: int, skew: float | None, seed: int, min_size: int = 1) -> tuple[int, ...]:
    """Return the number of records of each silo, equal or skewed.

    With a skew, a silo has `min_size` records and its share of the others by a Dirichlet distribution, so that all
    records are used.  Without one all silos have the same size, and the remainder is left out.

    Args:
        records: Number of records to distribute.
        silos: Number of silos.
        skew: Concentration of the symmetric Dirichlet distribution over silos, above 0 and finite, where a small
            one is uneven, or None for equal silos.
        seed: Public seed of the distribution, 0 or more.
        min_size: Fewest records of a silo.

    Raises:
        InputError: There are too few records, or `silos` or `min_size` is below 1.

    Example:
        >>> silo_sizes(records=10, silos=3, skew=None, seed=0)
        (3, 3, 3)
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
    """Cut a uniformly random permutation of the records into silos.

    Guarantee: no record is given twice.

    Args:
        labels: Labels of all records, (n,), of which only the number counts.
        sizes: Number of records of each silo.
        seed: Public seed.

    Raises:
        InputError: There are too few records or no silos, or a silo has no record.

    Example:
        >>> [len(rows) for rows in partition_iid(np.zeros(10, np.int64), sizes=[3, 4], seed=0)]
        [3, 4]
    """
    _check_sizes(len(labels), sizes)
    return np.split(
        public_generator(seed, "partition").permutation(len(labels))[: sum(sizes)], np.cumsum(sizes)[:-1]
    )


def partition_dirichlet(
    labels: NDArray[np.int64], sizes: Sequence[int], seed: int, concentration: float
) -> SiloRows:
    """Partition with label skew, by a mixture of labels from a Dirichlet distribution for each silo.

    The method is that of Hsu, Qi & Brown 2019 with a symmetric distribution, but silos have the given sizes, to
    which the mixtures are scaled (`_deal_records`).

    Guarantee: no record is given twice.

    Args:
        labels: Class of each record, (n,), or number, where each different number is a class, and NaN another one.
        sizes: Number of records of each silo.
        seed: Public seed.
        concentration: Concentration of the distribution, above 0.  A small one gives a silo few labels.

    Raises:
        InputError: There are too few records or no silos, or a silo has no record.
    """
    _check_sizes(len(labels), sizes)
    generator = public_generator(seed, "partition", "dirichlet")
    classes, class_indices, counts = np.unique(labels, return_inverse=True, return_counts=True)
    pools = [generator.permutation(np.flatnonzero(class_indices == row)).tolist() for row in range(len(classes))]
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
    """Partition test records so that a silo's labels are about as frequent as in its training records.

    Guarantee: no record is given twice.

    Args:
        labels: Class or number of each record, (n,).
        sizes: Number of records of each silo.
        seed: Public seed.
        like: Labels of the training records of each silo, which has at least one.  NaN is like no label.

    Raises:
        InputError: There are too few records or no silos, or a silo has no record.
    """
    _check_sizes(len(labels), sizes)
    generator = public_generator(seed, "partition", "alike")
    classes, class_indices, counts = np.unique(labels, return_inverse=True, return_counts=True)
    pools = [generator.permutation(np.flatnonzero(class_indices == row)).tolist() for row in range(len(classes))]
    return _deal_records(
        pools,
        np.array([[np.mean(silo_labels == label) for label in classes] for silo_labels in like]) + 1e-12,
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
    """Draw each silo's records from one pool for each label, by balanced mixtures (silos, labels).

    The mixtures say how frequent labels should be at each silo.  Their rows are scaled to the sizes of the silos,
    and their columns to the frequencies of the labels.  A row then has the silo's expected number of records of
    each label, which is rounded.  If a pool runs out, the silo takes the rest from the fullest pools.

    Args:
        pools: Row indices of the records of each label, in random order.  Records that are drawn are removed.
        mixtures: Share of each label at each silo, above 0.
        sizes: Number of records of each silo.
        counts: Number of records of each label, (labels,).
        generator: Public randomness, for the order of a silo's records.

    Returns:
        Row indices of each silo.
    """
    expected_counts = _balance_margins(
        mixtures, np.array(sizes, np.float64), np.float64(sum(sizes) / counts.sum()) * counts
    )
    shares = []
    for expected, size in zip(expected_counts, sizes, strict=True):
        draw_counts = np.minimum(_round_amounts(expected * (size / expected.sum())), [len(pool) for pool in pools])
        while (shortage := size - int(draw_counts.sum())) > 0:  # a pool ran out
            leftover = np.array([len(pool) for pool in pools]) - draw_counts
            draw_counts[np.argmax(leftover)] += min(shortage, int(leftover.max()))
        share = np.array(
            [pool.pop() for pool, count in zip(pools, draw_counts, strict=True) for _ in range(count)]
        )
        shares.append(generator.permutation(share))
    return shares


def partition_shards(labels: NDArray[np.int64], sizes: Sequence[int], seed: int, per_silo: int) -> SiloRows:
    """Sort records by label, cut them into `per_silo` shards for each silo, and deal the shards at random.

    A shard is here a piece of consecutive records, and the shards of a silo have equal lengths, up to one record.
    The records are a random choice of as many as the silos take.  The order of a silo's records is random.

    Source: McMahan et al. 2017, section 3, who assign 2 shards to a client.

    Guarantee: no record is given twice.

    Args:
        labels: Class of each record, (n,), or number, where NaN comes last.
        sizes: Number of records of each silo.
        seed: Public seed.
        per_silo: Number of shards of a silo, 1 or more.

    Raises:
        InputError: There are too few records or no silos, `per_silo` is below 1, or a silo has fewer records than
            shards.
    """
    _check_sizes(len(labels), sizes)
    if per_silo < 1 or per_silo > min(sizes):
        raise InputError(
            f"data.shards = {per_silo}: a silo has {min(sizes)} records, and a shard holds at least one"
        )
    generator = public_generator(seed, "partition", "shards")
    selection = np.sort(generator.permutation(len(labels))[: sum(sizes)])
    by_label = selection[np.argsort(labels[selection], kind="stable")]
    pieces = [  # silo and length of each shard
        (silo, size // per_silo + (shard < size % per_silo))
        for silo, size in enumerate(sizes)
        for shard in range(per_silo)
    ]
    silo_pieces: list[list[NDArray[np.int64]]] = [[] for _ in sizes]
    start = 0
    for piece in generator.permutation(len(pieces)):
        silo, length = pieces[piece]
        silo_pieces[silo].append(by_label[start : start + length])
        start += length
    return [generator.permutation(np.concatenate(share)) for share in silo_pieces]


def partition_by_site(sites: NDArray[np.int64], sizes: Sequence[int], seed: int) -> SiloRows:
    """Draw each silo's records from those of its site, in a uniformly random order.

    Guarantee: no record is given twice, and no record goes to another site's silo.

    Args:
        sites: Number of each record's site, (n,), which is its silo's number.
        sizes: Number of records of each silo.
        seed: Public seed.

    Raises:
        InputError: A site has too few records, or a size is below 1.
    """
    shares = []
    for silo, size in enumerate(sizes):
        site_rows = np.flatnonzero(sites == silo)
        _check_sizes(len(site_rows), [size])
        shares.append(public_generator(seed, "partition", "site", str(silo)).permutation(site_rows)[:size])
    return shares


def _balance_margins(
    mixtures: NDArray[np.float64], row_sums: NDArray[np.float64], column_sums: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Scale columns and rows of `mixtures` in turn, so that their sums approach the given ones."""
    matrix = mixtures.copy()
    for _ in range(_BALANCING_PASSES):
        matrix *= (column_sums / matrix.sum(axis=0))[None, :]
        matrix *= (row_sums / matrix.sum(axis=1))[:, None]
    return matrix


def _round_amounts(amounts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round amounts down, and as many of the largest remainders up as their rounded sum needs."""
    result = np.floor(amounts).astype(np.int64)
    result[np.argsort(result - amounts, kind="stable")[: round(float(amounts.sum())) - int(result.sum())]] += 1
    return result


def _check_sizes(records: int, sizes: Sequence[int]) -> None:
    """Check that there is a silo, that each silo has a record, and that there are enough records for all.

    Raises:
        InputError: One of these is not so.
    """
    if not sizes or min(sizes) < 1:
        raise InputError(f"silos of {list(sizes)} records: at least one silo, and one record in each")
    if sum(sizes) > records:
        raise InputError(f"{len(sizes)} silos need {sum(sizes)} records in all, but there are {records}")
