"""Kaplan–Meier curves from noisy sums of events and of censored records, with bands for the noise.

With d_b events and c_b censored records in bin b, and l_i = d_i + c_i records that leave in bin i, where one more
bin has the records that leave behind the last edge:

    R_b = Σ_{i ≥ b} l_i - c_b/2,   h_b = d_b/R_b,   S = Π (1 - h),   Λ = -log S

The band is that of Λ, by the score test (Wilson 1927, for counts).  Its ends solve

    (Λ̂ - Λ)² = 1.96² (v + u Λ)

v is the variance of the noise in Λ̂, by the delta method.  u Λ is the variance of sampling at the Λ that is tested.
u is the mean of 1/R_b so far.  If Λ̂ is above 3 deviations of the noise, and Greenwood's variance over Λ̂ is larger
than this mean, u is the former.

Where noise dominates, the band is the interval of log S, cut at S = 1.  Before the first event it still has a
length.  The interval of log(-log S) covers less in these cases, down to nothing.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.addons.statistics.indicators import summing

Z = 1.959963984540054
"""Half the length of a 95 % interval, in standard errors."""
_MIN_AT_RISK = 4.0
"""Fewest records at risk for which a curve is shown, in standard errors of their number."""
_MIN_HAZARD = 3.0
"""Smallest Λ̂ for which Greenwood's variance is used, in standard deviations of its noise."""
Floats = NDArray[np.float64]


class SurvivalBands(NamedTuple):
    """Survival curves with bands, (..., bins), at the upper edges of bins, and numbers at risk at first."""

    start: Floats
    """Number at risk at the start of each curve, (...)."""
    start_error: float
    """Standard deviation of the noise in `start`."""
    values: Floats
    low: Floats
    high: Floats
    known: NDArray[np.bool_]
    """Masks, true up to the last edge at which more than 4 standard errors are at risk."""


def survival_bands(released: Floats, std: float) -> SurvivalBands:
    """Compute the curves and bands of released sums.

    Args:
        released: Two "suffix" blocks of `indicators`, (..., 2 bins + 1): first the events of the
            bins, then the censored records of the bins and of the one behind them.
        std: Standard deviation of the noise in each coordinate.
    """
    bins = released.shape[-1] // 2
    tail_events, tail_censored = np.zeros((bins + 1, 2 * bins + 1)), np.zeros((bins + 1, 2 * bins + 1))
    # Row b adds up the events, or the censored records, of bin b and all bins behind it.
    tail_events[:bins, :bins], tail_censored[:, bins:] = summing(bins).T, summing(bins + 1).T
    event_weights = tail_events[:-1] - tail_events[1:]
    risk_weights = tail_events[:-1] + (tail_censored[:-1] + tail_censored[1:]) / 2.0
    start_weights = tail_events[0] + tail_censored[0]
    at_risk = released @ risk_weights.T
    is_shown = np.logical_and.accumulate(
        at_risk > _MIN_AT_RISK * std * np.linalg.norm(risk_weights, axis=1), axis=-1
    )
    at_risk = np.where(is_shown, at_risk, 1.0)  # any positive number, since these bins are not shown
    hazard = released @ event_weights.T / at_risk
    bounded_hazard = hazard.clip(0.0, 1.0 - 1e-9)
    log_slope = 1.0 / (at_risk * (1.0 - bounded_hazard))
    noise_weights = np.cumsum(log_slope[..., None] * (event_weights - hazard[..., None] * risk_weights), axis=-2)
    noise_std = std * np.linalg.norm(noise_weights, axis=-1)
    survival = np.cumprod(np.maximum(0.0, 1.0 - hazard), axis=-1)
    cumulative_hazard = -np.log(np.where(survival > 0.0, survival, 1.0))
    mean_inverse_risk = np.cumsum(1.0 / at_risk, axis=-1) / np.arange(1, bins + 1)
    is_clear = cumulative_hazard > _MIN_HAZARD * noise_std
    greenwood_ratio = np.cumsum(bounded_hazard * log_slope, axis=-1) / np.where(is_clear, cumulative_hazard, 1.0)
    sampling = Z**2 * np.where(is_clear, np.maximum(mean_inverse_risk, greenwood_ratio), mean_inverse_risk)
    centre = cumulative_hazard + sampling / 2.0
    half_length = np.sqrt((Z * noise_std) ** 2 + np.maximum(0.0, sampling * (cumulative_hazard + sampling / 4.0)))
    values = np.minimum.accumulate(np.minimum(1.0, survival), axis=-1)
    is_positive = survival > 0.0
    low = np.where(is_positive, np.exp(-(centre + half_length)), 0.0)
    high = np.where(is_positive, np.exp(-np.maximum(0.0, centre - half_length)), 1.0)
    return SurvivalBands(
        released @ start_weights,
        float(std * np.linalg.norm(start_weights)),
        values,
        np.minimum(low, values),
        np.maximum(high, values),
        is_shown,
    )
