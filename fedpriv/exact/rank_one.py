"""Increments that are outer products, residual ⊗ features, of integer features: d values a record are never made.

The gradient of a loss of linear scores is residual ⊗ features.  With features that are integers x (bytes of an
image and a 1, say) and a residual truncated to integers r, the increment r ⊗ x is an integer vector of norm ‖r‖
‖x‖, and sums over records are one matrix product, exact in float64 while no partial sum reaches 2^53.
Residuals follow from scores in integers (`written_order`), so that all of it has the same bits on every processor.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.increments import (
    Floats,
    check_norm,
    fit,
    most_square,
    scale_of,
    shrunk_rows,
)
from fedpriv.objectives import Outer
from fedpriv.objectives.written_order import LEAST_BITS, scores_of, sum_in_order, weight_bits

_EXACT = 1 << 53
_LEAST_RESIDUAL = 1 << 16
_MOST_FEATURE = 1 << 16
_MOST_FEATURES = 1 << 20
VALUES_TOGETHER = 1 << 20
"""Features that are looked at together."""


def rank_one_suits(norm: int, outer: Outer, features: int) -> bool:
    """Whether residuals keep 16 bits, K / `outer.largest` ≥ 2^16, and weights of `features` features 20 bits.

    Where they do not, materialise the increments and use `integers`.
    """
    enough = weight_bits(features, outer.largest) >= LEAST_BITS
    return enough and norm >= _LEAST_RESIDUAL * outer.largest


def linear_sum(
    outer: Outer,
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
    bits, rows = weight_bits(width, outer.largest), max(1, VALUES_TOGETHER // width)
    total = np.zeros(outer.classes * width, np.int64)
    for start in range(0, len(labels), rows):
        x, own = _whole_features(features[start : start + rows], outer), labels[start : start + rows]
        residuals = np.zeros((len(own), outer.classes))
        with np.errstate(all="ignore"):
            for point, coefficient in zip(points, coefficients, strict=True):
                scores = scores_of(point, outer.classes, x, outer.levels, bits)
                residuals = residuals + outer.slopes(scores, own) * coefficient
        whole = x.astype(np.int64)
        total += outer_sum(integer_residuals(residuals, whole, norm, factor / outer.levels), whole, norm)
    return total


def _whole_features(features: NDArray[np.floating], outer: Outer) -> Floats:
    """Features in whole multiples of 1/levels, (B, f); zeros for a record with one that does not fit."""
    with np.errstate(all="ignore"):
        scaled = np.rint(features.astype(np.float64) * outer.levels)
        fits = np.abs(scaled).max(axis=-1, initial=0.0) <= outer.largest  # False for NaN
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
        values, exponent = shrunk_rows(residuals)
        size = np.sqrt(sum_in_order(values * values)) * np.sqrt(np.maximum(squares, 0.0))
        values *= scale_of(size, exponent, norm, factor)[:, None]
        np.trunc(values, out=values)
        fits = (
            fit(values, norm) & (sum_in_order(values * values) * squares <= most_square(norm)) & (squares >= 0.0)
        )
        return np.where(fits[:, None], values, 0.0)


def outer_sum(residuals: Floats, features: NDArray[np.integer], norm: int) -> Ints:
    """Σ_b r_b ⊗ x_b, flat (c · f,) int64, for what `integer_residuals` gave: exact.

    Every product and every partial sum over `rows` records is at most rows · K < 2^53 in absolute value, so that
    float64 adds them without rounding in any order.  The whole sum has to stay below 2^63.
    """
    check_norm(norm)
    rows = (_EXACT - 1) // norm
    total = np.zeros((residuals.shape[1], features.shape[1]), np.int64)
    for start in range(0, len(residuals), rows):
        part = features[start : start + rows].astype(np.float64)
        total += np.matmul(residuals[start : start + rows].T, part).astype(np.int64)
    return total.ravel()


def _feature_squares(features: NDArray[np.integer]) -> Floats:
    """‖x_b‖² (b,), exact below 2^53; -1 where a feature is out of bounds, so that the row becomes zeros."""
    if features.shape[1] > _MOST_FEATURES:
        raise ValueError(f"{features.shape[1]} features: at most 2^20, so that their squares add up exactly")
    values = features.astype(np.float64)
    squares = np.einsum("bf,bf->b", values, values)
    bounded = np.abs(values).max(axis=-1, initial=0.0) <= _MOST_FEATURE
    return np.where(bounded, squares, -1.0)
