"""Increments of records as integer vectors of bounded norm: truncated, then checked again.

An increment is a record's clipped contribution, in R^d, to the sum of a round.  It is multiplied by a factor
(units of the lattice, the multiples of one number, per unit of an increment) and truncated to integers of
Euclidean norm at most K, the clip in units of the lattice.  A record thus moves a sum by at most K if neighbours
differ by its presence (zero-out), and by at most 2K if it is exchanged (replace-one).  Truncation towards zero
enlarges no coordinate, so it needs no larger norm, as rounding would.  Proof: docs/proofs/truncation.md.

The gradient of a loss of linear scores is the outer product residual ⊗ features, with the derivatives of the loss
by the scores as residual.  With integer features x and a residual truncated to integers r, the increment r ⊗ x is
an integer vector of norm ‖r‖ ‖x‖, and a sum over records is a matrix product, exact in float64 below 2^53.
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
from fedpriv.noise.integers.fixed_point import (
    Ints,
    add_scaled,
    are_moderate,
    compiled_or,
    sum_truncated_squares,
)

Floats = NDArray[np.float64]

NORM_ALLOWANCE = 2.0**-30
"""Bound of the relative error of a float64 sum of at most 2^42 squares, in blocks of 2^22."""
_BLOCK = 1 << 22
"""Values whose squares are summed at a time."""
_CHUNK_VALUES = 1 << 15
"""Values of a row in a chunk, few enough for the second-level cache of a processor."""
_MAX_NORM = 1 << 53
_MODERATE = 2.0**-440, 2.0**60
"""Bounds of absolute values whose squares, and those of their quotients, are normal numbers."""


def add_truncated(total: Ints, increment: Floats, norm: int, factor: float, counts: bool) -> None:
    """Truncate an increment to integers of norm at most K, and add them to a sum if it counts.

    The increment is multiplied by `factor`, or by less if its norm would exceed K (1 - 2^-30), and truncated
    towards zero.  An increment with a value that is not finite becomes zeros.  It must lie in memory that is
    aligned as that of torch, since sums may round by their address.

    Guarantee: Σ k² ≤ K² for the added integers k, exactly, whatever bits come in and whatever flags arithmetic
    runs under.  They are a function of the increment, `norm` and `factor`, the same whatever `total` is, and
    whether loops are compiled or not.

    Args:
        total: Sum, (d,), which is changed.
        increment: (d,).
        norm: K, from 1 to below 2^53.
        factor: Units of the lattice per unit of an increment.
        counts: Whether the increment counts.

    Raises:
        ValueError: K is not from 1 to below 2^53.

    Example:
        >>> total = np.zeros(2, np.int64)
        >>> add_truncated(total, np.array([1.9, -1.9]), norm=10, factor=1.0, counts=True)
        >>> total.tolist()
        [1, -1]
    """
    check_norm(norm)
    (values, exponent), size = (increment[None], np.zeros(1, np.int32)), len(increment)
    with np.errstate(all="ignore"):
        # Squares of very large values would overflow, and those of very small ones would be 0.  So the increment
        # is divided by a power of two, 2^exponent, before its norm is computed.  Within the bounds of `_MODERATE`
        # that would change no bit of the result, and is left out.
        if not compiled_or(are_moderate, lambda *_: False, size)(increment, *_MODERATE):
            values, exponent = shrink_rows(values)
        (scale,) = row_scales(np.sqrt(squared_norms(values)), exponent, norm, factor).tolist()
        # A sum up to the bound proves a norm of at most K.  Any order of additions gives the same decision, since
        # the scale leaves room for the errors of both sums.
        sum_squares = compiled_or(sum_truncated_squares, _sum_truncated_squares, size, "reassoc")
        square = sum(sum_squares(values[0, start : start + _BLOCK], scale) for start in range(0, size, _BLOCK))
        # An increment that does not count takes as long as another.
        added_scale = scale if square <= max_squared_norm(norm) and counts else 0.0
        compiled_or(add_scaled, _add_scaled, size)(total, values[0], added_scale)


def _sum_truncated_squares(values: Floats, scale: float) -> float:
    """Sum squares like `fixed_point.sum_truncated_squares`, with NumPy."""
    parts = (
        np.trunc(values[start : start + _CHUNK_VALUES] * scale) for start in range(0, len(values), _CHUNK_VALUES)
    )
    return float(sum(np.einsum("d,d->", part, part) for part in parts))


def _add_scaled(total: Ints, values: Floats, scale: float) -> None:
    """Add integers like `fixed_point.add_scaled`, with NumPy."""
    for start in range(0, len(total), _CHUNK_VALUES):
        part = slice(start, start + _CHUNK_VALUES)
        total[part] += (values[part] * scale).astype(np.int64)


def check_norm(norm: int) -> None:
    """Check that K is from 1 to below 2^53.

    Raises:
        ValueError: K is not in this range.
    """
    if not 1 <= norm < _MAX_NORM:
        raise ValueError(f"norm = {norm}: from 1 to below 2^53")


def shrink_rows(rows: NDArray[np.floating]) -> tuple[Floats, NDArray[np.int32]]:
    """Multiply rows by 2^-e so that no sum of squares over- or underflows.

    e is chosen for each row so that its largest absolute value then lies in [½, 1).  A row of zeros has e = 0.

    Args:
        rows: (b, d), float32 or float64.

    Returns:
        The multiplied rows in float64, with zeros for a row that has a value that is not finite, and e, (b,).
    """
    # Aligned memory, since sums may round by their address.
    values = torch.empty(rows.shape, dtype=torch.float64).numpy()
    top = _row_maxima(rows)
    is_finite = top < np.inf  # False for NaN
    exponent = np.where(is_finite, np.frexp(np.where(is_finite, top, 0.0))[1], 0).astype(np.int32)
    half_shift = -exponent // 2  # in two steps, because 2^-e may be out of range; they lose no more than one step
    np.multiply(rows, np.ldexp(1.0, half_shift)[:, None], out=values)
    values *= np.ldexp(1.0, -exponent - half_shift)[:, None]
    values[~is_finite] = 0.0
    return values, exponent


def squared_norms(rows: Floats) -> Floats:
    """Sum the squares of every row, (b, d) -> (b,), within a relative 2^-30 for d ≤ 2^42.

    The sum of a row must neither over- nor underflow.  Squares are summed in blocks of 2^22 columns, which bounds
    the rounding error in any order of additions.
    """
    total = np.einsum("bd,bd->b", rows[:, :_BLOCK], rows[:, :_BLOCK])
    for start in range(_BLOCK, rows.shape[-1], _BLOCK):
        block = rows[:, start : start + _BLOCK]
        total += np.einsum("bd,bd->b", block, block)
    return np.asarray(total, np.float64)


def row_scales(norms: Floats, exponent: NDArray[np.int32], norm: int, factor: float) -> Floats:
    """Compute each shrunk row's factor: `factor` · 2^e, or less for a norm of at most K (1 - 2^-30).

    Args:
        norms: Norms of the shrunk rows, (b,).
        exponent: e of each row, (b,).
        norm: K.
        factor: Units of the lattice per unit of an increment.

    Returns:
        (b,).
    """
    target_norm = norm * (1.0 - NORM_ALLOWANCE)
    # With a lattice's factor, rows of 2^1000 and more are limited by K, whatever their exponent.
    full_scale = np.ldexp(factor, np.minimum(exponent, 1000))
    return np.asarray(np.minimum(target_norm / np.where(norms > 0.0, norms, 1.0), full_scale), np.float64)


def _row_maxima(values: NDArray[np.floating]) -> Floats:
    """Compute max |·| of every row, (b,), NaN if the row has one, without a copy."""
    maxima, minima = values.max(axis=-1, initial=0.0), values.min(axis=-1, initial=0.0)
    return np.asarray(np.maximum(maxima, -minima), np.float64)


def max_squared_norm(norm: int) -> float:
    """Bound K² (1 - 2^-30), up to which a float64 sum of squares proves a norm of at most K."""
    return float(norm) ** 2 * (1.0 - NORM_ALLOWANCE)


_EXACT_LIMIT = 1 << 53
_MIN_RESIDUAL = 1 << 16
_MAX_FEATURE = 1 << 16
_MAX_FEATURE_COUNT = 1 << 20
MAX_CHUNK_VALUES = 1 << 20
"""Most features that are processed together."""


def suits_rank_one(norm: int, outer: OuterProduct, features: int) -> bool:
    """Whether increments can be formed as outer products of integers with enough bits.

    Residuals need 16 bits, K / `max_feature_norm` ≥ 2^16, and the model's weights 20 bits (`weight_bits`).  More
    than 2^20 features are too many (`integer_residuals`).

    Args:
        norm: K.
        outer: Outer products of the objective.
        features: Number of features.
    """
    return (
        features <= _MAX_FEATURE_COUNT
        and weight_bits(features, outer.max_feature_norm) >= MIN_WEIGHT_BITS
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
    """Sum the integer increments r_b ⊗ x_b over records b, (classes · f,) int64.

    This is for losses of linear scores, whose gradient is residual ⊗ features.  x_b, (f,), are the features in
    multiples of 1/denominator, rounded to integers.  r_b, (classes,), is Σ_k coefficients[k] · residuals at
    points[k], scaled to the lattice and truncated to integers with ‖r_b‖ ‖x_b‖ ≤ K.  A record with a feature that
    is not finite, or an entry of x_b beyond ±`outer.max_feature_norm` or ±2^16, adds 0.

    Guarantee: if `outer.residuals` computes every record's row from this row alone and in the written order, then,
    whatever bits the points have, one record moves the sum by at most `norm` under zero-out and 2 `norm` under
    replace-one, and what it adds is a function of its own row, the query and public numbers, with the same bits on
    every processor.  Only IEEE operations in a written order and sums of integers below 2^53 come between the
    record and its integers.

    Args:
        outer: Outer products of the objective.
        points: Points of the query, each (classes · f,).
        coefficients: Coefficient of each point.
        features: Real features, (B, f).
        labels: Classes, (B,).
        norm: K, from 1 to below 2^53, for which `suits_rank_one` holds.
        factor: Units of the lattice per unit of an increment.

    Raises:
        ValueError: Records are to be summed with K out of this range, or with more than 2^20 features.
    """
    # Chunks of records bound the memory.
    feature_count = features.shape[1]
    bits, chunk_rows = (
        weight_bits(feature_count, outer.max_feature_norm),
        max(1, MAX_CHUNK_VALUES // feature_count),
    )
    total = np.zeros(outer.classes * feature_count, np.int64)
    for start in range(0, len(labels), chunk_rows):
        x, chunk_labels = (
            _round_features(features[start : start + chunk_rows], outer),
            labels[start : start + chunk_rows],
        )
        residuals = np.zeros((len(chunk_labels), outer.classes))
        with np.errstate(all="ignore"):
            for point, coefficient in zip(points, coefficients, strict=True):
                scores = integer_scores(point, outer.classes, x, outer.denominator, bits)
                residuals = residuals + outer.residuals(scores, chunk_labels) * coefficient
        integers = x.astype(np.int64)
        total += sum_outer_products(
            integer_residuals(residuals, integers, norm, factor / outer.denominator), integers, norm
        )
    return total


def _round_features(features: NDArray[np.floating], outer: OuterProduct) -> Floats:
    """Round features to multiples of 1/denominator and return the integers, (B, f).

    A record with an integer beyond ±`outer.max_feature_norm`, or a feature that is not finite, becomes zeros.
    """
    with np.errstate(all="ignore"):
        scaled = np.rint(features.astype(np.float64) * outer.denominator)
        is_within = np.abs(scaled).max(axis=-1, initial=0.0) <= outer.max_feature_norm  # False for NaN
    return np.where(np.asarray(is_within)[:, None], scaled, 0.0)


def integer_residuals(
    residuals: NDArray[np.floating], features: NDArray[np.integer], norm: int, factor: float
) -> Floats:
    """Truncate residuals of b records and c classes to integers r with ‖r_b‖ ‖x_b‖ ≤ K.

    Residuals are multiplied by `factor`, or by less to limit ‖r_b‖ ‖x_b‖ to K (1 - 2^-30), and truncated towards
    zero.  A record with a residual that is not finite, or a feature beyond ±2^16, gets zeros.

    Guarantee: Σ over the d = c · f values of r_b ⊗ x_b of their squares is at most K², exactly, and row b depends
    on row b of the arguments alone.

    Args:
        residuals: Derivatives of the loss by the scores, (b, c), for at most 2^22 classes.
        features: Integer features x, (b, f).
        norm: K.
        factor: Units of the lattice per unit of residual ⊗ x.

    Returns:
        Integers as float64, (b, c).

    Raises:
        ValueError: K is not from 1 to below 2^53, or there are more than 2^20 features.
    """
    check_norm(norm)
    squares = _feature_squares(features)
    with np.errstate(all="ignore"):
        values, exponent = shrink_rows(residuals)
        norms = np.sqrt(sum_columns(values * values)) * np.sqrt(np.maximum(squares, 0.0))
        values *= row_scales(norms, exponent, norm, factor)[:, None]
        np.trunc(values, out=values)
        is_within = (
            (_row_maxima(values) <= norm)  # False for NaN
            & (sum_columns(values * values) * squares <= max_squared_norm(norm))
            & (squares >= 0.0)
        )
        return np.where(is_within[:, None], values, 0.0)


def sum_outer_products(residuals: Floats, features: NDArray[np.integer], norm: int) -> Ints:
    """Sum r_b ⊗ x_b over the records b exactly, flat (c · f,) int64.

    The whole sum has to stay below 2^63.

    Args:
        residuals: Integers r with ‖r_b‖ ‖x_b‖ ≤ K, (b, c), from `integer_residuals`.
        features: Integer features, (b, f).
        norm: K.

    Raises:
        ValueError: K is not from 1 to below 2^53.
    """
    check_norm(norm)
    # An entry of r_b ⊗ x_b is at most K, so that sums over `rows` records stay below 2^53, exact in float64.
    rows = (_EXACT_LIMIT - 1) // norm
    total = np.zeros((residuals.shape[1], features.shape[1]), np.int64)
    for start in range(0, len(residuals), rows):
        part = features[start : start + rows].astype(np.float64)
        total += np.matmul(residuals[start : start + rows].T, part).astype(np.int64)
    return total.ravel()


def _feature_squares(features: NDArray[np.integer]) -> Floats:
    """Compute ‖x_b‖², (b,), exact below 2^53.

    A row with a feature out of bounds gets -1, so that the row becomes zeros.

    Raises:
        ValueError: There are more than 2^20 features, whose squares would not add up exactly.
    """
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
    """Sum the clipped increments of a round's records, each as integers of the run's lattice, (d,) int64.

    Where the objective allows it, increments are counted by cell, as entries of tables (`SUMMED_BY_CELL`), or
    formed as outer products of integers (`suits_rank_one`).  Otherwise they are computed as vectors, one record
    after another, each in a batch of one.

    Guarantee: for an objective that keeps nothing between calls, and residuals as `sum_rank_one` needs them, one
    record moves the sum by at most `norm` under zero-out and by 2 `norm` under replace-one, whatever bits the
    points have, and whatever `per_record` computes, or raises as an Exception or SystemExit, for a record.  The
    record's integers depend on its own content, its row index and public values alone, whoever else is read.
    Increments that are outer products have the same bits on every processor (`sum_rank_one`).

    Args:
        objective: Objective for the batch layout of the round (`for_batch`).
        query: Points (d,) at which gradients are taken, and the coefficients with which they are added.
        clip: Norm bound of an increment in real units.
        records: Records of the round, or None for a sum of zeros.
        norm: K, the norm bound in units of the lattice.
        factor: Units of the lattice per unit of an increment.
        min_calls: Number of records up to which dummy records are added, so that the time tells less of the number
            of real ones.  Counts by cell take none.
        is_counted: Mask (B,) of the records that count, or None if all count.  Others add zeros.
        row_indices: Row indices (B,) of the records in their silo, or None if the objective does not depend on
            them.

    Raises:
        ValueError: K is not from 1 to below 2^53 where vectors or outer products are summed.
    """
    if records is None:
        return np.zeros(objective.dimension, np.int64)
    # Products may round by the alignment of memory.
    aligned_query = query._replace(points=[aligned_copy(point) for point in query.points])
    counts_mask = np.ones(len(records.labels), np.bool_) if is_counted is None else is_counted
    # Counts by cell.
    is_whole = type(objective) in SUMMED_BY_CELL and is_shipped(type(objective))
    if is_whole and np.isfinite(scale := sum(query.coefficients) * factor):
        whole_sum: Ints = cast(Any, objective).sum_integer_vectors(
            records.features.double().numpy(), counts_mask, norm, scale
        )
        return whole_sum
    outer = fast_paths(objective).outer

    def compute(features: Tensor, label: Tensor, row: Tensor) -> Tensor:
        batch = Batch(Records(features, label), torch.ones(1, dtype=torch.float64))
        return objective.per_record(aligned_query, batch, row, clip)

    # Outer products: records that do not count have features of 0, and so an increment of 0.
    if outer is not None and suits_rank_one(norm, outer, records.features.shape[-1]):
        points, counted_features = (
            [point.numpy() for point in aligned_query.points],
            np.where(counts_mask[:, None], records.features.numpy(), 0.0),
        )
        features, labels = _pad_rows(counted_features, min_calls), _pad_rows(records.labels.numpy(), min_calls)
        return sum_rank_one(outer, points, query.coefficients, features, labels, norm, factor)
    # Vectors: one record after another, in a batch of one each.  One on which the objective raises adds zeros.
    total = np.zeros(objective.dimension, np.int64)
    fallback = torch.zeros(1, 1, dtype=torch.float64).expand(1, objective.dimension)  # takes no memory
    indices = (
        torch.zeros(len(counts_mask), dtype=torch.int64) if row_indices is None else torch.from_numpy(row_indices)
    )
    first_row = torch.zeros(1, dtype=torch.int64)
    increments = evaluate_per_record(
        compute, (*records, indices), fallback, (*make_dummy_record(records), first_row), min_calls
    )
    for is_counted_row, increment in zip(_pad_rows(counts_mask, min_calls).tolist(), increments, strict=True):
        add_truncated(total, increment.numpy()[0], norm, factor, is_counted_row)
    return total


def make_dummy_record(records: Records) -> Records:
    """Return a public record of zeros in the shape and types of `records`."""
    return Records(*(torch.zeros((1, *column.shape[1:]), dtype=column.dtype) for column in records))


def _pad_rows(column: NDArray[Any], min_rows: int) -> NDArray[Any]:
    """Append rows of zeros, records without features that add nothing, up to `min_rows` rows."""
    return np.concatenate([column, np.zeros((max(0, min_rows - len(column)), *column.shape[1:]), column.dtype)])
