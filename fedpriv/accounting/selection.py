"""Price of publishing the best of a random number of private runs, and nothing of the others.

Source: Papernot & Steinke 2022, "Hyperparameter Tuning with Rényi Differential Privacy" (ICLR), Theorem 2 for the
truncated negative binomial law of the number K of runs, Theorem 6 for the Poisson law.  With runs that are
(λ, λμ²/2)-Rényi DP for every order λ, as μ-GDP runs are, and ρ = μ²/2,

    Theorem 2:  ε'(λ) = λρ + (1 + η) min over λ^ ≥ 1 of ((λ^ - 1)ρ + ln(1/γ)/λ^) + ln E[K] / (λ - 1)
    Theorem 6:  ε'(λ) = λρ + E[K] δ(ln(1 + 1/(λ - 1))) + ln E[K] / (λ - 1)

where δ(ε) is the run's own curve.  The minimum is 2√(ρ ln(1/γ)) - ρ, at λ^ = √(ln(1/γ)/ρ), or ln(1/γ) where that
λ^ is below 1.  `then` adds the Rényi curve of releases that come after the choice and may depend on it.

For the negative binomial law there is a bound from the run's own curve δ(ε), too, and the smaller one counts:
with m = E[K], for every ε₁ ≥ 0 and ε ≥ ε₂,

    δ'(ε) ≤ m δ(ε - ε₂),   ε₂ = (1 + η) ln(e^ε₁ + δ(ε₁) (1 - γ)/γ).

*Proof.* Let p and q be the densities of a run's release y on two neighbours, a and b the probabilities of a
better one (a public uniform number beside y breaks ties).  The best of K has the density p w(a) and q w(b), with
w(a) = G'(1 - a) = m (γ/(γ + (1 - γ) a))^(1+η) ≤ m, G the generating function of K.  "Better than y" is an event,
so b ≤ e^ε₁ a + δ(ε₁), and with c = (1 - γ)/γ

    w(a)/w(b) = ((1 + c b)/(1 + c a))^(1+η) ≤ ((1 + c δ(ε₁) + e^ε₁ c a)/(1 + c a))^(1+η) ≤ e^ε₂.

So p w(a) - e^ε q w(b) ≤ w(a) (p - e^(ε - ε₂) q) ≤ m (p - e^(ε - ε₂) q)+, whose integral is m δ(ε - ε₂).
Releases after the choice multiply p and q by their densities given y and leave w alone: δ is then that of the run
and of them together. ∎  (After Koskela, Redberg & Wang 2024, "Privacy profiles for private selection".)
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting import curves
from fedpriv.accounting.gaussian import check_delta, check_mu, check_positive, compose, epsilon_of
from fedpriv.accounting.renyi import MAX_ORDER_EXCESS, MIN_ORDER_EXCESS, renyi_to_epsilons, zcdp_of
from fedpriv.core.errors import InputError

_GRID_POINTS = 4001
_REFINEMENTS = 2
_MAX_TRIALS = 1e6
_ROUNDING = 1e-12  # of ε₂
_MEAN_MARGIN = 1e-7  # relative: what rounding of γ moves E[K] by, most where it is nearly 1
_MIN_LOG_ARGUMENT = 1e-300
_MIN_ETA = 1e-6  # below, γ^-η - 1 has no digits left, and 0 is the same law but for as much


class RunCountDistribution(Protocol):
    """The law of the number of runs."""

    @property
    def mean(self) -> float:
        """E[K]."""
        ...

    @property
    def description(self) -> str:
        """As a report says it."""
        ...

    def renyi_constant(self, mu: float, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the choice adds to a μ-GDP run's Rényi curve at orders 1 + `excess`, ln E[K]/(λ - 1) apart."""
        ...

    def epsilon_shift(self, mu: float) -> float:
        """ε₂ of the bound from a μ-GDP run's curve, rounded up; infinite where there is none."""
        ...

    def draw(self, generator: np.random.Generator) -> int:
        """K."""
        ...


@dataclass(frozen=True)
class NegativeBinomialRunCount:
    """Truncated to 1, 2, …: η = 0 is the logarithmic law, η = 1 the geometric one.

    P[K = k] is proportional to (1 - γ)^k Π_{l < k} (l + η)/(l + 1), with γ such that E[K] is `mean`.
    A small η costs less privacy, and more often tries few settings.
    """

    mean: float
    eta: float = 0.0

    def __post_init__(self) -> None:
        _check_mean(self.mean, min_mean=1.0)
        if not (self.eta == 0.0 or _MIN_ETA <= self.eta <= 100.0):
            raise InputError(
                f"eta = {self.eta}: of the truncated negative binomial law 0, or a number from {_MIN_ETA:g} to 100"
            )

    @property
    def description(self) -> str:
        return f"a truncated negative binomial number of runs, {self.mean:g} on average (eta = {self.eta:g})"

    @property
    def gamma(self) -> float:
        """γ, rounded down, so that ln(1/γ) is not too small."""
        low, high = 0.0, min(1.0, 2.0 * (1.0 + self.eta) / self.mean)
        while high - low > 1e-15 * high:
            middle = 0.5 * (low + high)
            if middle in (low, high):
                break
            low, high = (low, middle) if negative_binomial_mean(self.eta, middle) < self.mean else (middle, high)
        return low

    def renyi_constant(self, mu: float, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        zcdp, log = zcdp_of(mu), -math.log(self.gamma)
        least = 2.0 * math.sqrt(zcdp * log) - zcdp if log >= zcdp else log
        return np.full_like(excess, (1.0 + self.eta) * least)

    def epsilon_shift(self, mu: float) -> float:
        odds, curve = (1.0 - self.gamma) / self.gamma, curves.gaussian_curve(mu)
        most = math.log1p(odds * float(curve(np.zeros(1))[0]))  # of ε₁ = 0: no larger ε₁ gives less
        tried = np.linspace(0.0, most, _GRID_POINTS)
        found = float(
            np.min(
                np.logaddexp(
                    tried, math.log(max(odds, _MIN_LOG_ARGUMENT)) + np.log(curve(tried) + _MIN_LOG_ARGUMENT)
                )
            )
        )
        return (1.0 + self.eta) * min(most, found) * (1.0 + _ROUNDING) + _ROUNDING

    def draw(self, generator: np.random.Generator) -> int:
        """By inverting the distribution function, one k after another."""
        gamma, left, k = self.gamma, float(generator.random()), 1
        if self.mean == 1.0:
            return 1
        start = -1.0 / math.log(gamma) if self.eta == 0.0 else self.eta / (gamma**-self.eta - 1.0)
        chance = start * (1.0 - gamma)
        while left > chance and chance > 0.0:
            left -= chance
            chance *= (1.0 - gamma) * (k + self.eta) / (k + 1.0)
            k += 1
        return k


@dataclass(frozen=True)
class PoissonRunCount:
    """K may be 0: then nothing is chosen."""

    mean: float

    def __post_init__(self) -> None:
        _check_mean(self.mean, min_mean=1.0)

    @property
    def description(self) -> str:
        return f"a Poisson number of runs, {self.mean:g} on average"

    def renyi_constant(self, mu: float, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        """The run's δ at the largest ε that Theorem 6 allows for an order."""
        return self.mean * curves.gaussian_curve(mu)(np.log1p(1.0 / excess))

    def epsilon_shift(self, mu: float) -> float:
        return math.inf

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.poisson(self.mean))


@dataclass(frozen=True)
class PrivateSelection:
    """The best of K runs that are `mu`-GDP each, whose settings and score are published and no other's.

    Guarantee: `epsilon_of` holds for what is published of the chosen run, if the score that it was chosen by is a
    part of what the run releases, K is drawn independently of the data and stays secret, and the settings of every
    run are drawn from one public law.  `then` is the μ of further releases, run with the chosen settings.
    """

    mu: float
    run_count: RunCountDistribution
    later_mu: float = 0.0

    def __post_init__(self) -> None:
        check_positive("mu", check_mu(self.mu))
        check_mu(self.later_mu)

    def epsilon_of(self, delta: float) -> float:
        """An ε for which (ε, `delta`)-DP holds: the smaller of two bounds."""
        return min(self.epsilon_by_orders(delta), self.epsilon_by_curve(delta))

    def epsilon_by_curve(self, delta: float) -> float:
        """The bound from the run's own curve; infinite for a law that has none."""
        shift = self.run_count.epsilon_shift(self.mu)
        if math.isinf(shift):
            return math.inf
        whole = compose([self.mu, self.later_mu])
        return (epsilon_of(whole, check_delta(delta) / (self.run_count.mean * (1.0 + _MEAN_MARGIN))) + shift) * (
            1.0 + 1e-15
        )

    def epsilon_by_orders(self, delta: float) -> float:
        """The least over Rényi orders; the conversion is that of `rdp`."""
        log_delta = math.log(check_delta(delta))
        low, high = math.log(MIN_ORDER_EXCESS), math.log(MAX_ORDER_EXCESS)
        for _ in range(1 + _REFINEMENTS):
            grid = np.linspace(low, high, _GRID_POINTS)
            values = renyi_to_epsilons(np.exp(grid), self.renyi(np.exp(grid)), log_delta)
            best, width = grid[int(np.argmin(values))], (high - low) / (_GRID_POINTS - 1)
            low, high = best - width, best + width
        return max(0.0, float(np.min(values)))

    def renyi(self, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        """The Rényi curve at orders 1 + `excess`, each above 0."""
        zcdp = zcdp_of(self.mu) + zcdp_of(self.later_mu)
        found = (
            (1.0 + excess) * zcdp
            + self.run_count.renyi_constant(self.mu, excess)
            + math.log(self.run_count.mean) / excess
        )
        return np.asarray(found, np.float64)


def negative_binomial_mean(eta: float, gamma: float) -> float:
    """E[K] of the truncated negative binomial law, 0 < γ < 1, η ≥ 0."""
    if eta == 0.0:
        return (1.0 / gamma - 1.0) / -math.log(gamma)
    return eta * (1.0 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))


def _check_mean(mean: float, min_mean: float) -> None:
    if not (math.isfinite(mean) and min_mean <= mean <= _MAX_TRIALS):
        raise InputError(f"trials = {mean}: on average from {min_mean:g} to {_MAX_TRIALS:g} runs are tried")
