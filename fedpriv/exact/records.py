"""From a query and a silo's records to the exact sum of their integers: the only way from one to the other.

Whoever releases integers (a guard, a silo of an integer simulation, an audit) comes through here, so that all of
them compute the same bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.exact.chunks import Columns, chunk_rows, increment_sum, outer_sum_of
from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.rank_one import rank_one_suits
from fedpriv.objectives import Objective, Outer, Records

_OUT_OF_BOUNDS = 1 << 17  # of what `integer_residuals` takes: such a record is zeros


def integer_sum(
    objective: Objective,
    points: Sequence[Tensor],
    coefficients: Sequence[float],
    clip: float,
    records: Records | None,
    held: int,
    norm: int,
    factor: float,
    least: int = 0,
) -> Ints:
    """Σ_b k_b, (d,) int64: the clipped increments of a round's records on the run's lattice, added exactly.

    `objective` is that of the round's slots (`at`), `points` (d,) and `coefficients` are the increment's, `clip`
    its norm bound in real units; `norm` is K, the bound in units of the lattice, and `factor` units per unit of an
    increment (`Lattice.norm`, `Lattice.factor`; both divided by the batches that a round reads).  `held` are the
    most records that any round of this silo is made to hold; None for records are zeros.  A round of fewer than
    `least` takes as much work as one of so many.

    Guarantee: one record moves the sum by at most `norm` under zero-out and by 2 `norm` under replace-one,
    whatever bits the points have and whatever the objective computes or raises for a record; its integers depend
    on its own row, its place and public values alone.  How they are computed, and in which shapes, is public.
    """
    if records is None:
        return np.zeros(objective.dimension, np.int64)
    asked = [point.clone() for point in points]  # torch's own memory is aligned, and products may round by that
    rows = chunk_rows(max(objective.dimension, asked[0].numel()), objective.evaluations(len(points)), held)
    columns, dummy = _columns(records), _columns(dummy_of(records))
    outer = objective.outer

    def per_record(chunk: Columns) -> NDArray[np.floating]:
        some, places = _batch(chunk)
        return objective.per_record(asked, coefficients, some, places, clip).numpy()

    if outer is None or not rank_one_suits(norm, outer.largest):
        return increment_sum(per_record, columns, dummy, rows, norm, factor, objective.dimension, least)

    def residuals(chunk: Columns) -> NDArray[np.floating]:
        some, _ = _batch(chunk)
        return outer.residuals(asked, coefficients, some).numpy()

    integers = _integer_features(records, outer)
    return outer_sum_of(
        residuals, columns, dummy, integers, rows, norm, factor / outer.levels, outer.classes, least
    )


def dummy_of(records: Records) -> Records:
    """One public record that can stand where none is: zeros, in the shape and the types of `records`."""
    return Records(*(torch.zeros((1, *column.shape[1:]), dtype=column.dtype) for column in records))


def _columns(records: Records) -> Columns:
    """Features, labels and places."""
    return *(column.numpy() for column in records), np.arange(len(records.labels))


def _batch(chunk: Columns) -> tuple[Records, Tensor]:
    """The chunk in memory of torch's own."""
    features, labels, places = (torch.from_numpy(column).clone() for column in chunk)
    return Records(features, labels), places


def _integer_features(records: Records, outer: Outer) -> NDArray[np.int64]:
    """Features in whole multiples of 1/levels; what is no number, or none that fits, becomes one out of bounds."""
    scaled = (records.features.double() * outer.levels).round()
    fits = scaled.abs() <= outer.largest  # false for NaN
    return scaled.where(fits, float(_OUT_OF_BOUNDS)).to(torch.int64).numpy()
