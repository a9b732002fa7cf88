"""Kaplan–Meier's curve from noisy sums of events and censored records, with bands that have the noise in them.

With events d_b and censored c_b of bin b, and l_i all that leave in bin i or beyond:

    R_b = Σ_{i ≥ b} l_i - c_b/2,   h_b = d_b/R_b,   S = Π (1 - h),   Λ = -log S

The band is that of Λ, by the score test (Wilson 1927, for counts): its ends solve

    (Λ̂ - Λ)² = 1.96² (v + u Λ)

v is the variance of the noise in Λ̂, by the delta method.  u Λ is that of sampling at the Λ that is tested: u is
the mean of 1/R_b so far, or Greenwood's variance over Λ̂ where that is more and Λ̂ is above 3 deviations of the
noise.  Where noise rules this is the interval of log S, cut at S = 1; where no event was seen it still has a
length.  The interval of log(-log S) covers less there, down to nothing.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.loss.indicators import summing

Z = 1.959963984540054
"""Standard errors of half an interval of 95 %."""
_LEAST = 4.0
"""Standard errors of the number at risk below which a curve ends."""
_CLEAR = 3.0
"""Deviations of noise above which Greenwood's variance is believed."""
Floats = NDArray[np.float64]


class SurvivalBands(NamedTuple):
    """Curves at the upper edges of the bins, each (..., bins), and the numbers at risk at their beginning."""

    start: Floats
    """(...)."""
    start_error: float
    """Deviation of the noise in `start`."""
    values: Floats
    low: Floats
    high: Floats
    known: NDArray[np.bool_]
    """Whether more than 4 standard errors were at risk up to this edge."""


def survival_bands(released: Floats, std: float) -> SurvivalBands:
    """The curves of released sums (..., 2 bins + 1), whose coordinates have noise of deviation `std` each."""
    bins = released.shape[-1] // 2
    of_died, of_gone = np.zeros((bins + 1, 2 * bins + 1)), np.zeros((bins + 1, 2 * bins + 1))
    of_died[:bins, :bins], of_gone[:, bins:] = summing(bins).T, summing(bins + 1).T  # suffix sums of noise
    of_events = of_died[:-1] - of_died[1:]
    of_risk = of_died[:-1] + (of_gone[:-1] + of_gone[1:]) / 2.0
    of_start = of_died[0] + of_gone[0]
    at_risk = released @ of_risk.T
    known = np.logical_and.accumulate(at_risk > _LEAST * std * np.linalg.norm(of_risk, axis=1), axis=-1)
    at_risk = np.where(known, at_risk, 1.0)  # what is not known is not shown
    hazard = released @ of_events.T / at_risk
    inside = hazard.clip(0.0, 1.0 - 1e-9)
    by_hazard = 1.0 / (at_risk * (1.0 - inside))
    moved = np.cumsum(by_hazard[..., None] * (of_events - hazard[..., None] * of_risk), axis=-2)
    noise = std * np.linalg.norm(moved, axis=-1)
    survival = np.cumprod(np.maximum(0.0, 1.0 - hazard), axis=-1)
    total = -np.log(np.where(survival > 0.0, survival, 1.0))
    by_count = np.cumsum(1.0 / at_risk, axis=-1) / np.arange(1, bins + 1)
    clear = total > _CLEAR * noise
    greenwood = np.cumsum(inside * by_hazard, axis=-1) / np.where(clear, total, 1.0)
    unit = Z**2 * np.where(clear, np.maximum(by_count, greenwood), by_count)
    middle = total + unit / 2.0
    half = np.sqrt((Z * noise) ** 2 + np.maximum(0.0, unit * (total + unit / 4.0)))
    values = np.minimum.accumulate(np.minimum(1.0, survival), axis=-1)
    there = survival > 0.0
    low = np.where(there, np.exp(-(middle + half)), 0.0)
    high = np.where(there, np.exp(-np.maximum(0.0, middle - half)), 1.0)
    return SurvivalBands(
        released @ of_start,
        float(std * np.linalg.norm(of_start)),
        values,
        np.minimum(low, values),
        np.maximum(high, values),
        known,
    )
