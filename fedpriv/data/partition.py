"""How records are spread over silos: public choices, made from the scenario's seed.

`silo_sizes` says how many records each silo gets, without a look at any record: batch sizes enter the public plan.
A partition then takes (labels, sizes, seed, and its own setting) and returns each silo's record numbers, in the
order in which it reads them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.randomness import public_generator

Shares = list[NDArray[np.int64]]
_BALANCING_PASSES = 200


def silo_sizes(records: int, silos: int, skew: float | None, seed: int, at_least: int = 1) -> tuple[int, ...]:
    """How many of `records` each silo gets: equal (the remainder is left out), or skewed.

    `skew` is the concentration of a symmetric Dirichlet distribution over silos: small is uneven; every silo gets
    `at_least` records, and a skewed federation uses all of them.  InputError if there are too few records.
    """
    if silos < 1 or at_least < 1:
        raise InputError(f"{silos} silos of at least {at_least} records: both numbers must be at least 1")
    if silos * at_least > records:
        raise InputError(
            f"{silos} silos of {at_least} records need {silos} * {at_least} = {silos * at_least} records, "
            f"but there are {records}"
        )
    if skew is None:
        return (records // silos,) * silos
    shares = public_generator(seed, "silo sizes").dirichlet(np.full(silos, skew))
    sizes = at_least + _rounded(shares * (records - silos * at_least))
    return tuple(sizes.tolist())


def iid(labels: NDArray[np.int64], sizes: Sequence[int], seed: int) -> Shares:
    """A uniformly random permutation of the records, cut into silos.

    Guarantee: no record is given twice.  InputError if there are too few.
    """
    _check(len(labels), sizes)
    order = public_generator(seed, "partition").permutation(len(labels))
    return _cut(order, sizes)


def dirichlet(labels: NDArray[np.int64], sizes: Sequence[int], seed: int, concentration: float) -> Shares:
    """Label skew: each silo's mixture of labels is drawn from a symmetric Dirichlet distribution.

    Hsu, Qi & Brown 2019, with the silos' sizes kept: the mixtures are balanced against the labels that there are
    (alternating scaling of rows and columns) before they are rounded.  Small `concentration`: few labels a silo.

    Guarantee: no record is given twice.  InputError if there are too few.
    """
    _check(len(labels), sizes)
    generator = public_generator(seed, "partition", "dirichlet")
    classes, counts = np.unique(labels, return_counts=True)
    pools = [generator.permutation(np.flatnonzero(labels == label)).tolist() for label in classes]
    mixtures = generator.dirichlet(np.full(len(classes), concentration), size=len(sizes)) + 1e-12
    return _dealt(pools, mixtures, sizes, counts, generator)


def alike(labels: NDArray[np.int64], sizes: Sequence[int], seed: int, like: Sequence[NDArray[np.int64]]) -> Shares:
    """Records whose labels each silo has about as often as among its own in `like`: a silo's test records.

    Guarantee: no record is given twice.  InputError if there are too few.
    """
    _check(len(labels), sizes)
    generator = public_generator(seed, "partition", "alike")
    classes, counts = np.unique(labels, return_counts=True)
    pools = [generator.permutation(np.flatnonzero(labels == label)).tolist() for label in classes]
    mixtures = np.array([[np.mean(own == label) for label in classes] for own in like]) + 1e-12
    return _dealt(pools, mixtures, sizes, counts, generator)


def _dealt(
    pools: list[list[int]],
    mixtures: NDArray[np.float64],
    sizes: Sequence[int],
    counts: NDArray[np.int64],
    generator: np.random.Generator,
) -> Shares:
    """Records out of the pools of each label, by mixtures that are balanced against the labels that there are."""
    share_read = np.float64(sum(sizes) / counts.sum())
    wanted = _balanced(mixtures, np.array(sizes, np.float64), share_read * counts)
    shares = []
    for row, size in zip(wanted, sizes, strict=True):
        take = np.minimum(_rounded(row * (size / row.sum())), [len(pool) for pool in pools])
        while (short := size - int(take.sum())) > 0:  # a pool ran out: the fullest gives the rest
            spare = np.array([len(pool) for pool in pools]) - take
            take[np.argmax(spare)] += min(short, int(spare.max()))
        share = np.array([pool.pop() for pool, count in zip(pools, take, strict=True) for _ in range(count)])
        shares.append(generator.permutation(share))
    return shares


def shards(labels: NDArray[np.int64], sizes: Sequence[int], seed: int, per_silo: int) -> Shares:
    """Label shards: records sorted by label, cut into `per_silo` pieces a silo, the pieces dealt out at random.

    McMahan et al. 2017, section 3 (there 2 shards a client).

    Guarantee: no record is given twice.  InputError if there are too few, or fewer in a silo than shards.
    """
    _check(len(labels), sizes)
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


def by_site(sites: NDArray[np.int64], sizes: Sequence[int], seed: int) -> Shares:
    """Each record to the silo of its site, in a uniformly random order; what is beyond a silo's size is left out.

    Guarantee: no record is given twice, and none to another site's silo.  InputError if a site has too few.
    """
    shares = []
    for silo, size in enumerate(sizes):
        own = np.flatnonzero(sites == silo)
        _check(len(own), [size])
        shares.append(public_generator(seed, "partition", "site", str(silo)).permutation(own)[:size])
    return shares


def _balanced(
    mixtures: NDArray[np.float64], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The matrix nearest to `mixtures`, by scaling rows and columns, with the given row and column sums."""
    matrix = mixtures.copy()
    for _ in range(_BALANCING_PASSES):
        matrix *= (columns / matrix.sum(axis=0))[None, :]
        matrix *= (rows / matrix.sum(axis=1))[:, None]
    return matrix


def _rounded(amounts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers with the sum of `amounts`, rounded: the largest remainders are rounded up."""
    whole = np.floor(amounts).astype(np.int64)
    short = round(float(amounts.sum())) - int(whole.sum())
    whole[np.argsort(whole - amounts, kind="stable")[:short]] += 1
    return whole


def _cut(order: NDArray[np.int64], sizes: Sequence[int]) -> Shares:
    return np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])


def _check(records: int, sizes: Sequence[int]) -> None:
    if not sizes or min(sizes) < 1:
        raise InputError(f"silos of {list(sizes)} records: at least one silo, and one record in each")
    if sum(sizes) > records:
        raise InputError(f"{len(sizes)} silos need {sum(sizes)} records in all, but there are {records}")
