"""From scores with known worlds to what a test shows against a claim that is a curve of (ε, δ), not a μ.

A test with false alarms α and misses β is impossible under a claim with δ(ε), for both directions, unless

    β ≥ f(α) = max over ε of 1 - δ(ε) - e^ε α  and  e^-ε (1 - δ(ε) - α)

(Wasserman & Zhou 2010; Dong, Roth & Su 2022).  What was shown is Φ⁻¹(1 - α) - Φ⁻¹(β) at upper bounds of both
rates, and what the claim allows there is the same with f(α) for β: the μ of the Gaussian curve through that point,
which is another one at every α.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from fedpriv.accounting.guarantees import Sampled
from fedpriv.auditing.bounds import LEARNING, QUANTILES, Scores, errors_at, upper_rates

_EPSILONS = np.concatenate([np.linspace(0.0, 3.0, 301), np.linspace(3.0, 12.0, 181)[1:]])


class Shown(NamedTuple):
    """What a test showed at its rate of false alarms, and what the claim allows there; `test` says which."""

    mu: float
    allowed: float
    alarms: float
    misses: float
    test: str = ""

    @property
    def excess(self) -> float:
        """Above 0 the claim is refuted."""
        return self.mu - self.allowed

    def epsilon(self, delta: float) -> float:
        """The ε that it shows at δ."""
        power = 1.0 - self.misses - delta
        return float(max(0.0, np.log(power / self.alarms))) if power > 0.0 else 0.0


class Curve:
    """A claimed trade-off: the least rate of misses for every rate of false alarms."""

    def __init__(self, guarantee: Sampled) -> None:
        self._factors = np.exp(_EPSILONS)
        self._deltas = guarantee.curve(_EPSILONS)

    def least_misses(self, alarms: NDArray[np.float64]) -> NDArray[np.float64]:
        """f(α) for every α of `alarms`, rounded down to the chords of a grid of ε."""
        given = np.asarray(alarms, np.float64)[..., None]
        power = 1.0 - self._deltas - self._factors * given
        mirrored = (1.0 - self._deltas - given) / self._factors
        least: NDArray[np.float64] = np.maximum(0.0, np.maximum(power, mirrored).max(-1))
        return least


def shown(curve: Curve, scores: Scores, present: NDArray[np.bool_], failure: float, test: str = "") -> Shown:
    """What a test shows whose `scores` (n,) are large where the canary is `present` (n,).

    The threshold that exceeds the claim most is chosen on the first quarter of the trials, and what is shown is
    that of the others at this one threshold.

    Guarantee: where the claim holds, trials are independent and coins fair, `excess` is above 0 with probability
    at most `failure`.
    """
    first = len(scores) // LEARNING
    candidates = np.quantile(scores[:first], QUANTILES)
    promised = _shown_at(curve, candidates, scores[:first], present[:first], failure)
    chosen = candidates[[int(np.argmax(promised[0] - promised[1]))]]
    columns = _shown_at(curve, chosen, scores[first:], present[first:], failure)
    mu, allowed, alarms, misses = (float(column[0]) for column in columns)
    return Shown(mu, allowed, alarms, misses, test)


def _shown_at(
    curve: Curve, thresholds: Scores, scores: Scores, present: NDArray[np.bool_], failure: float
) -> tuple[Scores, Scores, Scores, Scores]:
    """Shown μ, allowed μ, and upper bounds of both error rates, at each threshold."""
    errors = errors_at(thresholds, scores, present)
    alarms = upper_rates(errors.alarms, errors.without, failure / 2)
    misses = upper_rates(errors.misses, errors.present, failure / 2)
    alarms, misses = (np.minimum(rates, 1.0 - 1e-12) for rates in (alarms, misses))
    least = np.clip(curve.least_misses(alarms), 1e-300, 1.0 - 1e-12)
    return (
        -special.ndtri(alarms) - special.ndtri(misses),
        -special.ndtri(alarms) - special.ndtri(least),
        alarms,
        misses,
    )
