"""From scores with known worlds to a lower bound on the Gaussian-DP parameter, with confidence.

A μ-GDP release lets no test have errors with Φ⁻¹(1 - FPR) - Φ⁻¹(FNR) > μ (Dong, Roth & Su 2022).  So upper bounds
on both error rates of any test give a lower bound on μ (Nasr et al. 2023, "Tight auditing of differentially
private machine learning", section on Gaussian DP).
"""

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Scores = NDArray[np.float64]

_QUANTILES = np.linspace(0.005, 0.995, 199)


def mu_lower_bound(scores: Scores, present: NDArray[np.bool_], failure: float) -> float:
    """A μ that the release exceeds, but for a probability of at most `failure`; 0 if nothing can be said.

    `scores` (n,) are large where the canary is `present` (n,).  The threshold with the best bound is chosen on
    the first half of the trials, and the bound that counts is that of the second half at this one threshold.

    Guarantee: trials are independent, and the second half is not looked at before the threshold is fixed.
    """
    half = len(scores) // 2
    candidates = np.quantile(scores[:half], _QUANTILES)
    promised = _bounds(candidates, scores[:half], present[:half], failure)
    chosen = candidates[[int(np.argmax(promised))]]
    return max(0.0, float(_bounds(chosen, scores[half:], present[half:], failure)[0]))


def _bounds(thresholds: Scores, scores: Scores, present: NDArray[np.bool_], failure: float) -> Scores:
    """Φ⁻¹(1 - FPR) - Φ⁻¹(FNR) at each threshold, with Clopper & Pearson's upper bounds at `failure` / 2 each."""
    with_canary, without = np.sort(scores[present]), np.sort(scores[~present])
    false_alarms = len(without) - np.searchsorted(without, thresholds, "right")
    misses = np.searchsorted(with_canary, thresholds, "right")
    highest_alarms = _upper_rates(false_alarms, len(without), failure / 2)
    highest_misses = _upper_rates(misses, len(with_canary), failure / 2)
    bounds: Scores = stats.norm.isf(highest_alarms) - stats.norm.ppf(highest_misses)
    return bounds


def _upper_rates(events: NDArray[np.int64], trials: int, failure: float) -> Scores:
    """Clopper & Pearson: rates that are exceeded with probability at most `failure`; 1 if every trial was one."""
    rates = stats.beta.isf(failure, events + 1.0, np.maximum(trials - events, 1.0))
    return np.where(events >= trials, 1.0, rates)
