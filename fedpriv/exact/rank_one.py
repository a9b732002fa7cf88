"""Increments that are outer products, residual ⊗ features, of integer features: d values a record are never made.

The gradient of a loss of linear scores is residual ⊗ features.  With features that are integers x (bytes of an
image and a 1, say) and a residual truncated to integers r, the increment r ⊗ x is an integer vector of norm ‖r‖
‖x‖, and sums over records are one matrix product, exact in float64 while no partial sum reaches 2^53.
"""

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
    squared_norms,
)

_EXACT = 1 << 53
_LEAST_RESIDUAL = 1 << 16
_MOST_FEATURE = 1 << 16
_MOST_FEATURES = 1 << 20


def rank_one_suits(norm: int, largest: int) -> bool:
    """Whether residuals keep 16 bits or more: K / `largest` ≥ 2^16, `largest` a public bound of ‖x‖ in integers.

    Where they do not, materialise the increments and use `integers`.
    """
    return norm >= _LEAST_RESIDUAL * largest


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
        size = np.sqrt(squared_norms(values)) * np.sqrt(np.maximum(squares, 0.0))
        values *= scale_of(size, exponent, norm, factor)[:, None]
        np.trunc(values, out=values)
        fits = fit(values, norm) & (squared_norms(values) * squares <= most_square(norm)) & (squares >= 0.0)
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
        total += (residuals[start : start + rows].T @ part).astype(np.int64)
    return total.ravel()


def _feature_squares(features: NDArray[np.integer]) -> Floats:
    """‖x_b‖² (b,), exact below 2^53; -1 where a feature is out of bounds, so that the row becomes zeros."""
    if features.shape[1] > _MOST_FEATURES:
        raise ValueError(f"{features.shape[1]} features: at most 2^20, so that their squares add up exactly")
    values = features.astype(np.float64)
    squares = np.einsum("bf,bf->b", values, values)
    bounded = np.abs(values).max(axis=-1, initial=0.0) <= _MOST_FEATURE
    return np.where(bounded, squares, -1.0)
