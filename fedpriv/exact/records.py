"""From a query and a silo's records to the exact sum of their integers: the only way from one to the other.

Whoever releases integers (a guard, a silo of an integer simulation, an audit) comes through here, so that all of
them compute the same bits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.exact import increments
from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.rank_one import linear_sum, rank_one_suits
from fedpriv.objectives import Objective, Records
from fedpriv.objectives.alone import each_alone, own


def integer_sum(
    objective: Objective,
    points: Sequence[Tensor],
    coefficients: Sequence[float],
    clip: float,
    records: Records | None,
    norm: int,
    factor: float,
    least: int = 0,
    counts: NDArray[np.bool_] | None = None,
) -> Ints:
    """Σ_b k_b, (d,) int64: the clipped increments of a round's records on the run's lattice, added exactly.

    `objective` is that of the round's slots (`at`), `points` (d,) and `coefficients` are the increment's, `clip`
    its norm bound in real units; `norm` is K, the bound in units of the lattice, and `factor` units per unit of an
    increment (`Lattice.norm`, `Lattice.factor`; both divided by the batches that a round reads).  None for records
    are zeros.  A round of fewer than `least` records takes as much work as one of so many.  `counts`, (B,), says
    which records are more than a place: others add zeros, and take as much work; None: all.

    Guarantee: one record moves the sum by at most `norm` under zero-out and by 2 `norm` under replace-one,
    whatever bits the points have and whatever the objective computes or raises for a record; its integers depend
    on its own row, its place and public values alone.  Increments that are outer products have the same bits on
    every processor (`linear_sum`); others are computed for one record after another, each in a batch of one.
    """
    if records is None:
        return np.zeros(objective.dimension, np.int64)
    asked = [own(point) for point in points]  # torch's own memory is aligned, and products may round by that
    there = np.ones(len(records.labels), np.bool_) if counts is None else counts
    outer = objective.outer

    def of_one(features: Tensor, label: Tensor, place: Tensor) -> Tensor:
        return objective.per_record(asked, coefficients, Records(features, label), place, clip)

    if outer is not None and rank_one_suits(norm, outer, records.features.shape[-1]):
        at, seen = [point.numpy() for point in asked], np.where(there[:, None], records.features.numpy(), 0.0)
        features, labels = _filled(seen, least), _filled(records.labels.numpy(), least)
        return linear_sum(outer, at, coefficients, features, labels, norm, factor)
    total, nothing = np.zeros(objective.dimension, np.int64), torch.zeros(1, objective.dimension).double()
    places, nowhere = torch.arange(len(records.labels)), torch.zeros(1, dtype=torch.int64)
    alone = each_alone(of_one, (*records, places), nothing, (*dummy_of(records), nowhere), least)
    for counting, increment in zip(_filled(there, least).tolist(), alone, strict=True):
        total += increments.integers(increment.numpy(), norm, factor)[0] * counting
    return total


def dummy_of(records: Records) -> Records:
    """One public record that can stand where none is: zeros, in the shape and the types of `records`."""
    return Records(*(torch.zeros((1, *column.shape[1:]), dtype=column.dtype) for column in records))


def _filled(column: NDArray[Any], least: int) -> NDArray[Any]:
    """`column` with rows of zeros behind it, `least` in all: records without features, which add nothing."""
    missing = max(0, least - len(column))
    return np.concatenate([column, np.zeros((missing, *column.shape[1:]), column.dtype)])
