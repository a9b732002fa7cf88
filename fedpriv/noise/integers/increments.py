"""Records' increments as integer vectors of bounded norm: truncation towards zero, then a check in integers.

|trunc x| ≤ |x| in every coordinate, so no norm grows: one record moves a sum by at most K under zero-out and 2K
under replace-one, with no √d/2 for the rounding, no secret coins and no redraw.  The bias is at most √d / K of the
clip.

The gradient of a loss of linear scores is residual ⊗ features, of which d values a record are never made.  With
features that are integers x (bytes of an image and a 1, say) and a residual truncated to integers r, the increment
r ⊗ x is an integer vector of norm ‖r‖ ‖x‖, and sums over records are one matrix product, exact in float64 while no
partial sum reaches 2^53.  Residuals follow from scores in integers, so that all of it has the same bits on every
processor.

`integer_sum` is the only way from a query and a silo's records to the exact sum of their integers: a guard, a silo
of an integer simulation and an audit all come through it, and compute the same bits.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.loss.alone import (
    MIN_WEIGHT_BITS,
    aligned_copy,
    evaluate_per_record,
    integer_scores,
    sum_columns,
    weight_bits,
)
from fedpriv.loss.objective import (
    SUMMED_BY_CELL,
    Batch,
    Objective,
    OuterProduct,
    Query,
    Records,
    fast_paths,
    is_shipped,
)
from fedpriv.noise.integers.fixed_point import Ints

Floats = NDArray[np.float64]

NORM_ALLOWANCE = 2.0**-30
"""Of a float64 sum of squares, relatively: its error is below 2^-30 with blocks of 2^22 values."""
_BLOCK = 1 << 22
_CHUNK_VALUES = 1 << 15
"""Values of a row between one pass and the next: they stay in the second-level cache."""
_MAX_NORM = 1 << 53


def truncate_increments(increments: NDArray[np.floating], norm: int, factor: float) -> Ints:
    """Rows (b, d), float32 or float64, as int64 rows (b, d) of Euclidean norm at most `norm` = K < 2^53 each.

    A row is multiplied by `factor`, units of the lattice per unit of an increment, or by less where that would
    exceed K (1 - 2^-30), and truncated towards zero; a row with a value that is not finite becomes zeros.

    Guarantee: Σ k² ≤ K² for every row, exactly, whatever bits come in and whatever flags arithmetic runs under;
    and row b depends on row b of `increments` alone.  Proof: entries that pass the last check are integers of at
    most 2^53, and the float64 sum of their squares errs by less than a relative 2^-30.
    """
    values, fits = _truncate_rows(increments, norm, factor)
    np.copyto(values, 0.0, where=~fits[:, None])  # before any cast: NaN has no integer
    return values.astype(np.int64)


def add_truncated(total: Ints, increment: Floats, norm: int, factor: float, counts: bool) -> None:
    """Add what `integers` makes of one increment (d,) to `total` (d,), or zeros if it does not count.

    The increment is written into, so that no vector of memory is taken beside these two.  It lies in aligned
    memory, as `each_alone` gives it: sums may round by their address.

    Guarantee: the same integers as those of `integers`, whatever `total` is.
    """
    (values,), (fits,) = _truncate_rows(increment[None], norm, factor, out=increment[None])
    for start in range(0, len(total), _CHUNK_VALUES):
        part = values[start : start + _CHUNK_VALUES]
        np.copyto(part, 0.0, where=not (fits and counts))
        total[start : start + _CHUNK_VALUES] += part.astype(np.int64)


def _truncate_rows(
    increments: NDArray[np.floating], norm: int, factor: float, out: Floats | None = None
) -> tuple[Floats, NDArray[np.bool_]]:
    """Rows (b, d) truncated, in float64, in `out` if given, and which (b,) are integers of norm K."""
    check_norm(norm)
    with np.errstate(all="ignore"):
        values, exponent = shrink_rows(increments, out)
        scale = row_scales(np.sqrt(squared_norms(values)), exponent, norm, factor)
        fits = np.ones(len(values), np.bool_)
        for start in range(0, values.shape[-1], _CHUNK_VALUES):
            part = values[:, start : start + _CHUNK_VALUES]
            part *= scale[:, None]
            np.trunc(part, out=part)
            fits &= fits_norm(part, norm)
        return values, fits & (squared_norms(values) <= max_squared_norm(norm))


def check_norm(norm: int) -> None:
    if not 1 <= norm < _MAX_NORM:
        raise ValueError(f"norm = {norm}: from 1 to below 2^53")


def shrink_rows(rows: NDArray[np.floating], out: Floats | None = None) -> tuple[Floats, NDArray[np.int32]]:
    """Rows times 2^-e, so that no square over- or underflows, and e (b,); zeros for rows that are not finite.

    They are written into `out`, which may be `rows`, or into memory of their own, aligned: sums may round by their
    address.
    """
    values = torch.empty(rows.shape, dtype=torch.float64).numpy() if out is None else out
    top = _row_maxima(rows)
    finite = top < np.inf  # False for NaN
    exponent = np.where(finite, np.frexp(np.where(finite, top, 0.0))[1], 0).astype(np.int32)
    half = -exponent // 2  # 2^-e itself may be out of range; in two steps nothing gets lost that would not be
    for start in range(0, rows.shape[-1], _CHUNK_VALUES):
        part = values[:, start : start + _CHUNK_VALUES]
        np.multiply(rows[:, start : start + _CHUNK_VALUES], np.ldexp(1.0, half)[:, None], out=part)
        part *= np.ldexp(1.0, -exponent - half)[:, None]
    values[~finite] = 0.0
    return values, exponent


def squared_norms(rows: Floats) -> Floats:
    """Σ of squares of every row (b,): within a relative 2^-30 of the truth for d ≤ 2^42, in any order of sums.

    γ_n = n 2^-53 / (1 - n 2^-53) with n ≤ 2^22 + 1 for a block of 2^22 values and its squares, plus one a block.
    """
    total = np.einsum("bd,bd->b", rows[:, :_BLOCK], rows[:, :_BLOCK])
    for start in range(_BLOCK, rows.shape[-1], _BLOCK):
        block = rows[:, start : start + _BLOCK]
        total += np.einsum("bd,bd->b", block, block)
    return np.asarray(total, np.float64)


def row_scales(size: Floats, exponent: NDArray[np.int32], norm: int, factor: float) -> Floats:
    """The factor for shrunk rows of norms `size` (b,): factor · 2^e, or less, for norms K (1 - 2^-30)."""
    goal = norm * (1.0 - NORM_ALLOWANCE)
    wanted = np.ldexp(factor, np.minimum(exponent, 1000))
    return np.asarray(np.minimum(goal / np.where(size > 0.0, size, 1.0), wanted), np.float64)


def fits_norm(values: Floats, norm: int) -> NDArray[np.bool_]:
    """Rows whose entries all lie within ±K; False for NaN."""
    return np.asarray(_row_maxima(values) <= norm, np.bool_)


def _row_maxima(values: NDArray[np.floating]) -> Floats:
    """max |·| of every row (b,), NaN if there is one, without a copy."""
    high, low = values.max(axis=-1, initial=0.0), values.min(axis=-1, initial=0.0)
    return np.asarray(np.maximum(high, -low), np.float64)


def max_squared_norm(norm: int) -> float:
    """K² (1 - 2^-30): float64 sums of squares up to here belong to norms of at most K."""
    return float(norm) ** 2 * (1.0 - NORM_ALLOWANCE)


_EXACT_LIMIT = 1 << 53
_MIN_RESIDUAL = 1 << 16
_MAX_FEATURE = 1 << 16
_MAX_FEATURE_COUNT = 1 << 20
MAX_CHUNK_VALUES = 1 << 20
"""Features that are looked at together."""


def suits_rank_one(norm: int, outer: OuterProduct, features: int) -> bool:
    """Whether residuals keep 16 bits, K / `outer.largest` ≥ 2^16, and weights of `features` features 20 bits.

    Where they do not, materialise the increments and use `integers`.
    """
    return (
        weight_bits(features, outer.max_feature_norm) >= MIN_WEIGHT_BITS
        and norm >= _MIN_RESIDUAL * outer.max_feature_norm
    )


def sum_rank_one(
    outer: OuterProduct,
    points: Sequence[NDArray[np.floating]],
    coefficients: Sequence[float],
    features: NDArray[np.floating],
    labels: NDArray[np.int64],
    norm: int,
    factor: float,
) -> Ints:
    """Σ_b r_b ⊗ x_b, (classes · f,) int64, of records with `features` (B, f) and `labels` (B,).

    r_b is Σ_k coefficients[k] · slopes at points[k], truncated to the lattice of K = `norm` and `factor` units per
    unit of an increment.  A record with a feature that is not finite, or beyond `outer.largest` levels, adds 0.

    Guarantee: one record moves the sum by at most `norm` under zero-out and 2 `norm` under replace-one, and what
    it adds is a function of its own row, the query and public numbers, with the same bits on every processor,
    whatever bits the points have: only IEEE operations in a written order and sums of integers below 2^53 come
    between the record and its integers.
    """
    width = features.shape[1]
    bits, rows = weight_bits(width, outer.max_feature_norm), max(1, MAX_CHUNK_VALUES // width)
    total = np.zeros(outer.classes * width, np.int64)
    for start in range(0, len(labels), rows):
        x, own = _round_features(features[start : start + rows], outer), labels[start : start + rows]
        residuals = np.zeros((len(own), outer.classes))
        with np.errstate(all="ignore"):
            for point, coefficient in zip(points, coefficients, strict=True):
                scores = integer_scores(point, outer.classes, x, outer.denominator, bits)
                residuals = residuals + outer.residuals(scores, own) * coefficient
        whole = x.astype(np.int64)
        total += sum_outer_products(
            integer_residuals(residuals, whole, norm, factor / outer.denominator), whole, norm
        )
    return total


def _round_features(features: NDArray[np.floating], outer: OuterProduct) -> Floats:
    """Features in whole multiples of 1/levels, (B, f); zeros for a record with one that does not fit."""
    with np.errstate(all="ignore"):
        scaled = np.rint(features.astype(np.float64) * outer.denominator)
        fits = np.abs(scaled).max(axis=-1, initial=0.0) <= outer.max_feature_norm  # False for NaN
    return np.where(np.asarray(fits)[:, None], scaled, 0.0)


def integer_residuals(
    residuals: NDArray[np.floating], features: NDArray[np.integer], norm: int, factor: float
) -> Floats:
    """Integers r (b, c), as float64, such that ‖r_b‖ ‖x_b‖ ≤ K = `norm` for features x (b, f) of at most ±2^16.

    `factor` are units of the lattice per unit of residual ⊗ x: features that stand for x / 255 count 1/255 here.
    Residuals that are not finite become zeros, and so do rows with features beyond the bound.

    Guarantee: Σ over the d = c · f values of r_b ⊗ x_b of their squares is at most K², exactly, as for `integers`,
    and row b depends on row b of the arguments alone.
    """
    check_norm(norm)
    squares = _feature_squares(features)
    with np.errstate(all="ignore"):
        values, exponent = shrink_rows(residuals)
        size = np.sqrt(sum_columns(values * values)) * np.sqrt(np.maximum(squares, 0.0))
        values *= row_scales(size, exponent, norm, factor)[:, None]
        np.trunc(values, out=values)
        fits = (
            fits_norm(values, norm)
            & (sum_columns(values * values) * squares <= max_squared_norm(norm))
            & (squares >= 0.0)
        )
        return np.where(fits[:, None], values, 0.0)


def sum_outer_products(residuals: Floats, features: NDArray[np.integer], norm: int) -> Ints:
    """Σ_b r_b ⊗ x_b, flat (c · f,) int64, for what `integer_residuals` gave: exact.

    Every product and every partial sum over `rows` records is at most rows · K < 2^53 in absolute value, so that
    float64 adds them without rounding in any order.  The whole sum has to stay below 2^63.
    """
    check_norm(norm)
    rows = (_EXACT_LIMIT - 1) // norm
    total = np.zeros((residuals.shape[1], features.shape[1]), np.int64)
    for start in range(0, len(residuals), rows):
        part = features[start : start + rows].astype(np.float64)
        total += np.matmul(residuals[start : start + rows].T, part).astype(np.int64)
    return total.ravel()


def _feature_squares(features: NDArray[np.integer]) -> Floats:
    """‖x_b‖² (b,), exact below 2^53; -1 where a feature is out of bounds, so that the row becomes zeros."""
    if features.shape[1] > _MAX_FEATURE_COUNT:
        raise ValueError(f"{features.shape[1]} features: at most 2^20, so that their squares add up exactly")
    values = features.astype(np.float64)
    squares = np.einsum("bf,bf->b", values, values)
    return np.where(np.abs(values).max(axis=-1, initial=0.0) <= _MAX_FEATURE, squares, -1.0)


def sum_integer_increments(
    objective: Objective,
    query: Query,
    clip: float,
    records: Records | None,
    norm: int,
    factor: float,
    min_calls: int = 0,
    is_counted: NDArray[np.bool_] | None = None,
    row_indices: NDArray[np.int64] | None = None,
) -> Ints:
    """Σ_b k_b, (d,) int64: the clipped increments of a round's records on the run's lattice, added exactly.

    `objective` is that of the round's slots (`at`), the points of `query` are (d,), `clip` is the increment's norm
    bound in real units; `norm` is K, the bound in units of the lattice, and `factor` units per unit of an
    increment (`Lattice.norm`, `Lattice.factor`; both divided by the batches that a round reads).  None for records
    are zeros.  A round of fewer than `least` records takes as much work as one of so many.  `counts`, (B,), says
    which records are more than a place: others add zeros, and take as much work; None: all.  `rows`, (B,), are
    row indices of the records in their silo; None: row 0 for each, for objectives that key nothing by it.

    Guarantee: one record moves the sum by at most `norm` under zero-out and by 2 `norm` under replace-one,
    whatever bits the points have and whatever the objective computes or raises for a record; its integers depend
    on its own content, its row index and public values alone, whoever else is read.  Increments that are outer
    products have the same bits on every processor (`linear_sum`); counts are added cell by cell
    (`ADDED_WHOLE`); others are computed for one record after another, each in a batch of one.
    """
    if records is None:
        return np.zeros(objective.dimension, np.int64)
    # torch's own memory is aligned, and products may round by that
    asked = query._replace(points=[aligned_copy(point) for point in query.points])
    there = np.ones(len(records.labels), np.bool_) if is_counted is None else is_counted
    is_whole = type(objective) in SUMMED_BY_CELL and is_shipped(type(objective))
    if is_whole and np.isfinite(whole := sum(query.coefficients) * factor):
        whole_sum: Ints = cast(Any, objective).sum_integer_vectors(
            records.features.double().numpy(), there, norm, whole
        )
        return whole_sum
    outer = fast_paths(objective).outer

    def of_one(features: Tensor, label: Tensor, row: Tensor) -> Tensor:
        alone = Batch(Records(features, label), torch.ones(1, dtype=torch.float64))
        return objective.per_record(asked, alone, row, clip)

    if outer is not None and suits_rank_one(norm, outer, records.features.shape[-1]):
        at, seen = (
            [point.numpy() for point in asked.points],
            np.where(there[:, None], records.features.numpy(), 0.0),
        )
        features, labels = _pad_rows(seen, min_calls), _pad_rows(records.labels.numpy(), min_calls)
        return sum_rank_one(outer, at, query.coefficients, features, labels, norm, factor)
    total = np.zeros(objective.dimension, np.int64)
    nothing = torch.zeros(1, 1, dtype=torch.float64).expand(1, objective.dimension)  # takes no memory
    names = torch.zeros(len(there), dtype=torch.int64) if row_indices is None else torch.from_numpy(row_indices)
    first_row = torch.zeros(1, dtype=torch.int64)
    alone = evaluate_per_record(
        of_one, (*records, names), nothing, (*make_dummy_record(records), first_row), min_calls
    )
    for counting, increment in zip(_pad_rows(there, min_calls).tolist(), alone, strict=True):
        add_truncated(total, increment.numpy()[0], norm, factor, counting)
    return total


def make_dummy_record(records: Records) -> Records:
    """One public record that can stand where none is: zeros, in the shape and the types of `records`."""
    return Records(*(torch.zeros((1, *column.shape[1:]), dtype=column.dtype) for column in records))


def _pad_rows(column: NDArray[Any], least: int) -> NDArray[Any]:
    """`column` with rows of zeros behind it, `least` in all: records without features, which add nothing."""
    return np.concatenate([column, np.zeros((max(0, least - len(column)), *column.shape[1:]), column.dtype)])
