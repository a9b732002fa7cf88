"""Real vectors as integers modulo 2^64, which can be added under masks, and what the rounding costs in privacy.

M silos round their noisy vectors *before* they are added, so that the sum of what they send is not a function of
the exact sum.  It is as private all the same, up to a probability far below any that matters.  The argument, for
one coordinate and one round, in units of the grid:

1.  Silo i rounds X_i = v_i + N_i with error F_i = X_i - round(X_i).  With Y = Σ X_i, the exact noisy sum, and
    the integer A = Σ_{i<M} round(X_i):

        Σ_i round(X_i) = A + round(Y - A - Σ_{i<M} F_i) = round(Y - Σ_{i<M} F_i).

    Were the F_i uniform on the cell and independent of Y and the records, the rounded sum would be
    post-processing of Y with randomness of its own: it would keep exactly what Y keeps.
2.  They nearly are.  Write silo i's fresh noise as Z/M + W_i with Z = Σ z_i.  Gaussian noise of equal variances
    makes the deviations W independent of Z, and so of every exact noisy sum of the run, past and future (all of
    them are functions of the Z of all rounds).  Given those and all that silos drew before, (W_1, …, W_{M-1}) is
    normal with covariance r² (I - J/M), r the standard deviation of one silo's fresh part in this round's
    release, and the Fourier coefficients of the law of (F_1, …, F_{M-1}) on the torus are at most

        exp(-2π² r² (|n|² - (Σ n)²/M)) ≤ exp(-2π² r² |n|²/M),   n ∈ Z^{M-1}.

    Their sum over n ≠ 0, halved, bounds the total variation to the uniform law: `log_total_variation`.
3.  Round by round, coordinate by coordinate, the errors are replaced by uniform ones; the distances add up.

So if the exact sums are μ-GDP, the rounded sums are (ε, δ_μ(ε) + (1 + e^ε) τ)-DP, τ the total over all coordinates
and rounds.  `grid_for` keeps ln τ of each below -4,600 (10^-1997), or refuses: below what any ε and δ here is
computed to, and below the chance of guessing a key.  The argument holds for any subset of two or more silos whose
noise is not known; for a single one rounding is post-processing of its own message.

The smoothing of a Gaussian over a lattice (step 2) is the tool of Micciancio & Regev 2007, section 3; Kairouz, Liu
& Steinke 2021, Theorem 1, bound sums of discrete Gaussians by it.  Like all guarantees here it is one about real
arithmetic: see docs/privacy.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError, RunError

Words = NDArray[np.uint64]

_LARGEST = 2.0**62
"""Of one encoded value, in units; beyond what plans allow and noise can reach."""
_ROOM = 2.0**48
"""The most units that records can contribute: then a silo's float64 holds digits of its noise below the grid."""
_NEGLIGIBLE = -4600.0


@dataclass(frozen=True)
class Grid:
    """Multiples of `unit`, a power of 2, as integers modulo 2^64.

    Sums are right as long as they lie within ±2^63 units.  A sum beyond would wrap: that would make the model
    wrong, not the noise smaller, since the residue is a function of the sum.
    """

    unit: float

    def encode(self, values: NDArray[np.float64]) -> Words:
        """`values` (d,) rounded to the grid, (d,); RunError for values that are not finite or absurdly large."""
        scaled = np.floor(values / self.unit + 0.5)  # halves go up: rounding and whole shifts must commute
        if not np.all(np.abs(scaled) < _LARGEST):
            raise RunError("the release has values that are not finite, or outside of what can be added")
        return scaled.astype(np.int64).view(np.uint64)

    def decode_sum(self, messages: Sequence[Words]) -> NDArray[np.float64]:
        """The sum (d,) of all silos' encoded messages, each (d,)."""
        total: Words = np.zeros_like(messages[0])
        for message in messages:
            total += message  # unsigned: modulo 2^64
        return total.view(np.int64).astype(np.float64) * self.unit


def grid_for(fresh_std: float, silos: int, digits: int, largest: float) -> Grid:
    """The grid for messages whose fresh noise has standard deviation `fresh_std` > 0 in every silo and round.

    Half of the `digits` binary digits in which noise is drawn lie above the unit and half below it: what a
    floating-point number cannot hold is rounded away, and the rounding adds less than 2^-24 to the variance.
    `largest` bounds the absolute value of every coordinate of the sum of all silos' vectors without noise.

    Guarantee: the rounded sums keep what the exact noisy sums keep, up to 10^-1997 a coordinate and round in
    total variation (see the file's head).  InputError where that, or the room, does not suffice.
    """
    unit = 2.0 ** math.floor(math.log2(fresh_std) - digits // 2)
    if log_total_variation(fresh_std / unit, silos) > _NEGLIGIBLE:
        raise InputError(f"federation.silos = {silos}: too many for secure aggregation with {digits}-digit noise")
    if largest > unit * _ROOM:
        raise InputError(
            f"secure aggregation: sums of up to {largest:.3g}, with noise of {fresh_std:.3g} in each silo, do "
            'not fit on a grid; use run.dtype = "float32", fewer rounds or more noise'
        )
    return Grid(unit)


def log_total_variation(ratio: float, silos: int) -> float:
    """ln of a bound on the distance of M ≥ 2 silos' rounding errors to uniform ones, of one coordinate and round.

    `ratio` is r, the standard deviation of a silo's fresh noise in units of the grid.  With q = exp(-2π² r²/M):

        ½ Σ_{n ≠ 0} q^{|n|²} ≤ ½ ((1 + 2q/(1 - q))^{M-1} - 1) ≤ ½ (exp(2q (M - 1)/(1 - q)) - 1),

    and the last is at most 2q (M - 1)/(1 - q) where that is at most 1.
    """
    exponent = 2.0 * math.pi**2 * ratio**2 / silos
    log_sum = math.log(2.0 * (silos - 1)) - exponent - math.log(-math.expm1(-exponent))
    return log_sum if log_sum <= 0.0 else 0.0  # a total variation is 1 at most
