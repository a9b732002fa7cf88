"""Records' increments as integer vectors of bounded norm: truncation towards zero, then a check in integers.

|trunc x| ≤ |x| in every coordinate, so no norm grows: one record moves a sum by at most K under zero-out and 2K
under replace-one, with no √d/2 for the rounding, no secret coins and no redraw.  The bias is at most √d / K of the
clip.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.exact.fixed_point import Ints

Floats = NDArray[np.float64]

ALLOWANCE = 2.0**-30
"""Of a float64 sum of squares, relatively: its error is below 2^-30 with blocks of 2^22 values."""
_BLOCK = 1 << 22
_MOST_NORM = 1 << 53


def integers(increments: NDArray[np.floating], norm: int, factor: float) -> Ints:
    """Rows (b, d), float32 or float64, as int64 rows (b, d) of Euclidean norm at most `norm` = K < 2^53 each.

    A row is multiplied by `factor`, units of the lattice per unit of an increment, or by less where that would
    exceed K (1 - 2^-30), and truncated towards zero; a row with a value that is not finite becomes zeros.

    Guarantee: Σ k² ≤ K² for every row, exactly, whatever bits come in and whatever flags arithmetic runs under;
    and row b depends on row b of `increments` alone.  Proof: entries that pass the last check are integers of at
    most 2^53, and the float64 sum of their squares errs by less than a relative 2^-30.
    """
    check_norm(norm)
    with np.errstate(all="ignore"):
        shrunk, exponent = shrunk_rows(increments)
        size = np.sqrt(squared_norms(shrunk))
        values = shrunk
        values *= scale_of(size, exponent, norm, factor)[:, None]
        np.trunc(values, out=values)
        fits = fit(values, norm) & (squared_norms(values) <= most_square(norm))
        np.copyto(values, 0.0, where=~fits[:, None])  # before any cast: NaN has no integer
    return values.astype(np.int64)


def check_norm(norm: int) -> None:
    if not 1 <= norm < _MOST_NORM:
        raise ValueError(f"norm = {norm}: from 1 to below 2^53")


def shrunk_rows(rows: NDArray[np.floating]) -> tuple[Floats, NDArray[np.int32]]:
    """Rows times 2^-e, so that no square over- or underflows, and e (b,); zeros for rows that are not finite."""
    values = torch.empty(rows.shape, dtype=torch.float64).numpy()  # aligned: sums may round by their address
    values[...] = rows
    top = _largest(values)
    finite = top < np.inf  # False for NaN
    exponent = np.where(finite, np.frexp(np.where(finite, top, 0.0))[1], 0).astype(np.int32)
    values[~finite] = 0.0
    half = -exponent // 2  # 2^-e itself may be out of range; in two steps nothing gets lost that would not be
    values *= np.ldexp(1.0, half)[:, None]
    values *= np.ldexp(1.0, -exponent - half)[:, None]
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


def scale_of(size: Floats, exponent: NDArray[np.int32], norm: int, factor: float) -> Floats:
    """What shrunk rows of norms `size` (b,) are multiplied by: factor · 2^e, or less: for norms K (1 - 2^-30)."""
    goal = norm * (1.0 - ALLOWANCE)
    wanted = np.ldexp(factor, np.minimum(exponent, 1000))
    return np.asarray(np.minimum(goal / np.where(size > 0.0, size, 1.0), wanted), np.float64)


def fit(values: Floats, norm: int) -> NDArray[np.bool_]:
    """Rows whose entries all lie within ±K; False for NaN."""
    return np.asarray(_largest(values) <= norm, np.bool_)


def _largest(values: Floats) -> Floats:
    """max |·| of every row (b,), NaN if there is one, without a copy."""
    return np.asarray(np.maximum(values.max(axis=-1, initial=0.0), -values.min(axis=-1, initial=0.0)), np.float64)


def most_square(norm: int) -> float:
    """K² (1 - 2^-30): float64 sums of squares up to here belong to norms of at most K."""
    return float(norm) ** 2 * (1.0 - ALLOWANCE)
