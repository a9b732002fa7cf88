"""The law of the privacy loss when one of several rounds, drawn uniformly, stays secret.

Sources: Feldman & Shenfeld 2025 ("Privacy amplification by random allocation"); Chua et al. 2024 (balls and bins);
the numerics are an own construction, after the convex order of ratios.

One epoch of T rounds, noise multiplier z.  With and without the unit, what is released is dominated by

    P = (1/T) Σ N(e_i, z² I)   and   Q = N(0, z² I),   dP/dQ = (Y_1 + … + Y_T)/T,   Y_i = exp(Z_i/z - 1/(2z²)),

with Z_i independent standard normal under Q.  For a run whose increments depend on earlier releases the ratio is
Σ y_i / T, where y_i, given the past, has mean 1 and lies below Y in convex order; so do the sums, and H_ε(P‖Q),
H_ε(Q‖P) are expectations of convex functions of the ratio.  For the same reason **moving each Y to its two
neighbours on a grid, its mean kept, only raises δ**: what is computed here is an upper bound on every grid, and
the smallest over several grids is one, too.  A known round would give the Gaussian mechanism, hence another
bound.
"""

import math

import numpy as np
from scipy.special import ndtr, ndtri

from fedpriv.accounting.curves import Floats, as_floats
from fedpriv.accounting.losses import Losses

_MOST_LOG = 600.0  # of a grid's end: e^600 is still a float when it is squared with what it is multiplied by


def end_of_grid(multiplier: float, bins: int, tail: float, narrow: bool = False) -> float:
    """Where a grid for Σ Y may end: about `tail` of it lies beyond under P.  A choice, no bound rests on it.

    `narrow`: for sums that hardly vary, where much noise makes every Y nearly 1.
    """
    of_one = math.exp(min(_MOST_LOG, (0.5 / multiplier - float(ndtri(tail))) / multiplier))
    if narrow:
        spread = math.sqrt(bins * math.expm1(min(_MOST_LOG, multiplier**-2)))
        return bins + of_one + 10.0 * spread
    return max(of_one, 4.0 * bins) + 4.0 * bins


def grid_masses(multiplier: float, spacing: float, size: int) -> Floats:
    """The law of Y on 0, h, …, (size - 1)h with h = `spacing`; what lies beyond the grid is missing.

    Guarantee: Y moved to its two neighbours with its mean kept, so that the law on the whole grid is above Y in
    convex order.
    """
    points = spacing * np.arange(size + 1)
    with np.errstate(divide="ignore"):
        logs = multiplier * np.log(points)
    half = 0.5 / multiplier
    puts = points * ndtr(half + logs) - ndtr(-half + logs)  # E (x - Y)+
    calls = ndtr(half - logs) - points * ndtr(-half - logs)  # E (Y - x)+
    masses = np.empty(size)
    masses[0] = puts[1]
    masses[1:] = np.where(
        points[1:-1] <= 1.0,
        puts[:-2] - 2.0 * puts[1:-1] + puts[2:],
        calls[:-2] - 2.0 * calls[1:-1] + calls[2:],
    )
    return np.maximum(masses / spacing, 0.0)


def losses_when_removed(multiplier: float, bins: int, size: int, top: float) -> Losses:
    """The law of ln dP/dQ under P, with the ratio's sum Σ Y on a grid of `size` points up to `top`.

    Guarantee: an upper bound of H_ε(P‖Q); mass beyond the grid counts as infinite.
    """
    spacing = top / size
    masses = grid_masses(multiplier, spacing, size)
    sums = spacing * np.arange(size)
    law = _sum_law(_power(masses, bins - 1), sums * masses) if bins > 1 else sums * masses
    return Losses(np.log(sums[1:] / bins), law[1:], max(0.0, 1.0 - float(np.sum(law))))


def losses_when_added(multiplier: float, bins: int, size: int, cap: float) -> Losses:
    """The law of ln dQ/dP under Q, with the ratio on a grid of `size` points up to `cap`.

    Guarantee: an upper bound of H_ε(Q‖P); mass beyond the grid has ratios above `cap`, and counts as at `cap`.
    """
    spacing = cap * bins / size
    law = _power(grid_masses(multiplier, spacing, size), bins)
    ratios = (cap / size) * np.arange(1, size + 1)
    masses = np.append(law[1:], max(0.0, 1.0 - float(np.sum(law))))
    return Losses(-np.log(ratios[::-1]), masses[::-1], float(law[0]))


def _sum_law(first: Floats, second: Floats) -> Floats:
    """The law of a sum of two independent numbers on one grid, cut to its size.  Nothing wraps around."""
    size = len(first)
    from scipy import fft  # a twentieth of the start of a command that needs none

    length = fft.next_fast_len(2 * size, real=True)
    product = fft.rfft(first, length) * fft.rfft(second, length)
    return as_floats(np.maximum(fft.irfft(product, length)[:size], 0.0))


def _power(masses: Floats, times: int) -> Floats:
    """The law of the sum of `times` ≥ 1 independent numbers, cut to the grid: by repeated squaring."""
    result: Floats | None = None
    while True:
        if times & 1:
            result = masses if result is None else _sum_law(result, masses)
        times >>= 1
        if not times:
            assert result is not None
            return result
        masses = _sum_law(masses, masses)
