"""From scores with known worlds to a lower bound on the Gaussian-DP parameter, with confidence.

A μ-GDP release lets no test have errors with Φ⁻¹(1 - FPR) - Φ⁻¹(FNR) > μ (Dong, Roth & Su 2022).  So upper bounds
on both error rates of any test give a lower bound on μ (Nasr et al. 2023, "Tight auditing of differentially
private machine learning", section on Gaussian DP); and since worlds are chosen by fair coins, no test is right
with a probability above Φ(μ/2), so that a lower bound on that probability gives another.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

Scores = NDArray[np.float64]

QUANTILES = np.linspace(0.005, 0.995, 199)
LEARNING = 4  # one trial in so many chooses the threshold


class Errors(NamedTuple):
    """What a test did in both worlds, an entry a threshold: wrong guesses, and of how many trials."""

    alarms: NDArray[np.int64]
    misses: NDArray[np.int64]
    without: int
    present: int


def mu_lower_bound(scores: Scores, present: NDArray[np.bool_], failure: float) -> float:
    """A μ that the release exceeds, but for a probability of at most `failure`; 0 if nothing can be said.

    `scores` (n,) are large where the canary is `present` (n,).  The threshold with the best bound is chosen on
    the first quarter of the trials, and the bound that counts is that of the others at this one threshold.

    Guarantee: trials are independent, their coins are fair, and the others are not looked at before the threshold
    is fixed.
    """
    first = len(scores) // LEARNING
    candidates = np.quantile(scores[:first], QUANTILES)
    promised = _bounds(errors_at(candidates, scores[:first], present[:first]), failure)
    chosen = candidates[[int(np.argmax(promised))]]
    return bound_at(float(chosen[0]), scores[first:], present[first:], failure)


def bound_at(threshold: float, scores: Scores, present: NDArray[np.bool_], failure: float) -> float:
    """As above, at a threshold that was fixed without a look at these trials; for few of them."""
    return max(0.0, float(_bounds(errors_at(np.array([threshold]), scores, present), failure)[0]))


def errors_at(thresholds: Scores, scores: Scores, present: NDArray[np.bool_]) -> Errors:
    """The errors of a test that says "present" above each of `thresholds`."""
    with_canary, without = np.sort(scores[present]), np.sort(scores[~present])
    return Errors(
        len(without) - np.searchsorted(without, thresholds, "right"),
        np.searchsorted(with_canary, thresholds, "right"),
        len(without),
        len(with_canary),
    )


def _bounds(errors: Errors, failure: float) -> Scores:
    """The larger of both bounds at each threshold; half of `failure` for each."""
    highest_alarms = upper_rates(errors.alarms, errors.without, failure / 4)
    highest_misses = upper_rates(errors.misses, errors.present, failure / 4)
    by_rates = -special.ndtri(highest_alarms) - special.ndtri(highest_misses)
    wrong = upper_rates(errors.alarms + errors.misses, errors.without + errors.present, failure / 2)
    bounds: Scores = np.maximum(by_rates, -2.0 * special.ndtri(wrong))
    return bounds


def upper_rates(events: NDArray[np.int64], trials: int, failure: float) -> Scores:
    """Clopper & Pearson: rates that are exceeded with probability at most `failure`; 1 if every trial was one."""
    rates = special.betainccinv(events + 1.0, np.maximum(trials - events, 1.0), failure)
    return np.where(events >= trials, 1.0, rates)
