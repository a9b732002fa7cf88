"""Privacy of publishing only the best of a random number of private runs.

Source: Papernot & Steinke 2022, "Hyperparameter Tuning with Rényi Differential Privacy" (ICLR), Theorem 2 for a
truncated negative binomial number K of runs, Theorem 6 for a Poisson number.  With runs that are (λ, λμ²/2)-Rényi
DP for every order λ, as μ-GDP runs are, and ρ = μ²/2,

    Theorem 2:  ε'(λ) = λρ + (1 + η) min over λ^ ≥ 1 of ((λ^ - 1)ρ + ln(1/γ)/λ^) + ln E[K] / (λ - 1)
    Theorem 6:  ε'(λ) = λρ + E[K] δ(ln(1 + 1/(λ - 1))) + ln E[K] / (λ - 1)

where δ(ε) is the run's own curve, and η ≥ 0 and 0 < γ < 1 are the parameters of the negative binomial
distribution.  The minimum is 2√(ρ ln(1/γ)) - ρ, at λ^ = √(ln(1/γ)/ρ), or ln(1/γ) if this λ^ is below 1.
`later_mu` adds the Rényi curve of releases that come after the choice and may depend on it.

There is a bound from the run's own curve δ(ε), too, and the smaller bound counts.  With m = E[K],
T(a) = Φ(Φ^-1(a) + μ), the largest probability on a neighbour of an event that has probability a, and
c = (1 - γ)/γ, for every ε ≥ ε₂,

    δ'(ε) ≤ m δ(ε - ε₂),   ε₂ = (1 + η) max over a of ln((1 + c T(a)) / (1 + c a))   negative binomial
                           ε₂ = m max over a of (T(a) - a) = m (2Φ(μ/2) - 1)        Poisson

Releases after the choice are covered if δ is the curve of a run together with them.  The form m δ(ε - ε₂) is
that of Koskela, Redberg & Wang 2024, "Privacy profiles for private selection".  Proof: docs/proofs/selection.md.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from fedpriv.accounting import curves
from fedpriv.accounting.gaussian import check_delta, check_mu, check_positive, compose, epsilon_of
from fedpriv.accounting.renyi import MAX_ORDER_EXCESS, MIN_ORDER_EXCESS, renyi_to_epsilons, zcdp_of
from fedpriv.core.errors import InputError

_GRID_POINTS = 4001
_REFINEMENTS = 2
_MAX_TRIALS = 1e6
_ROUNDING = 1e-12  # margin of ε₂
_MEAN_MARGIN = 1e-7  # relative error of E[K] from rounding of γ, largest if γ is nearly 1
_ROOT_ERROR = 1e-10  # of the search for ε₂, in z
_MIN_ETA = 1e-6  # for a smaller η above 0, γ^-η - 1 loses digits, and η = 0 is nearly the same distribution


class RunCountDistribution(Protocol):
    """Distribution of the number K of runs."""

    @property
    def mean(self) -> float:
        """E[K]."""
        ...

    @property
    def description(self) -> str:
        """Description of the distribution in a report."""
        ...

    def renyi_constant(self, mu: float, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the price of the choice at orders 1 + `excess`, (n,), without ln E[K]/(λ - 1).

        The price is added to the Rényi curve of a μ-GDP run.
        """
        ...

    def epsilon_shift(self, mu: float) -> float:
        """Return ε₂ of the bound from a μ-GDP run's curve, rounded up."""
        ...

    def draw(self, generator: np.random.Generator) -> int:
        """Draw K."""
        ...


@dataclass(frozen=True)
class NegativeBinomialRunCount:
    """Negative binomial distribution, truncated to 1, 2, …: logarithmic for η = 0, geometric for η = 1.

    P[K = k] is proportional to (1 - γ)^k Π_{0 < l < k} (l + η)/(l + 1), with γ such that E[K] is `mean`.  With a
    smaller η, a choice costs less privacy, and K is more often small.

    Raises:
        InputError: The mean or η is out of its range.

    Example:
        >>> round(NegativeBinomialRunCount(mean=10.0).gamma, 4)
        0.0269
    """

    mean: float
    """E[K], from 1 to a million."""
    eta: float = 0.0
    """Parameter η, 0 or from 1e-6 to 100."""

    def __post_init__(self) -> None:
        _check_mean(self.mean, min_mean=1.0)
        if not (self.eta == 0.0 or _MIN_ETA <= self.eta <= 100.0):
            raise InputError(
                f"eta = {self.eta}: for a truncated negative binomial number of runs it is 0, or from "
                f"{_MIN_ETA:g} to 100"
            )

    @property
    def description(self) -> str:
        return f"a truncated negative binomial number of runs, {self.mean:g} on average (eta = {self.eta:g})"

    @property
    def gamma(self) -> float:
        """γ at which E[K] is `mean`, by bisection.

        E[K] falls with γ.  The lower end of the last interval is returned, so that ln(1/γ) is not too small.
        """
        low, high = 0.0, min(1.0, 2.0 * (1.0 + self.eta) / self.mean)
        while high - low > 1e-15 * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if negative_binomial_mean(self.eta, middle) < self.mean else (middle, high)
        return low

    def renyi_constant(self, mu: float, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        zcdp, log_inverse_gamma = zcdp_of(mu), -math.log(self.gamma)
        minimum = (
            2.0 * math.sqrt(zcdp * log_inverse_gamma) - zcdp if log_inverse_gamma >= zcdp else log_inverse_gamma
        )
        return np.full_like(excess, (1.0 + self.eta) * minimum)

    def epsilon_shift(self, mu: float) -> float:
        """Return ε₂ of the bound from a μ-GDP run's curve, rounded up.

        Let r(z) be the logarithm in ε₂ at a = Φ(z).  It has one maximum, at the root z* of r(z) + μ z + μ²/2,
        where it is -μ z* - μ²/2 (docs/proofs/selection.md).  A z below the root gives an upper bound.
        """
        from scipy.optimize import brentq  # slow to import

        odds = (1.0 - self.gamma) / self.gamma
        root: float = brentq(
            lambda z: np.log1p(odds * ndtr(z + mu)) - np.log1p(odds * ndtr(z)) + mu * (z + mu / 2.0),
            -mu / 2.0 * (1.0 + 1e-9) - math.log1p(odds) / mu - 1.0,  # less than the other end at every scale
            -mu / 2.0,
            xtol=_ROOT_ERROR,
        )
        max_log_ratio = min(math.log1p(odds), -mu * (root + mu / 2.0 - 2.0 * _ROOT_ERROR * (1.0 - root)))
        return (1.0 + self.eta) * max_log_ratio * (1.0 + _ROUNDING) + _ROUNDING

    def draw(self, generator: np.random.Generator) -> int:
        """Draw K by inverting the distribution function at a uniform number.

        Raises:
            OverflowError: γ^-η is no float, as for a mean of a million and η = 100.
        """
        gamma, remainder, k = self.gamma, float(generator.random()), 1
        if self.mean == 1.0:  # γ is 1 but for rounding
            return 1
        # P[K = 1], and in the loop P[K = k].  Rounding may leave a remainder when the probability has become 0.
        first_factor = -1.0 / math.log(gamma) if self.eta == 0.0 else self.eta / (gamma**-self.eta - 1.0)
        probability = first_factor * (1.0 - gamma)
        while remainder > probability and probability > 0.0:
            remainder -= probability
            probability *= (1.0 - gamma) * (k + self.eta) / (k + 1.0)
            k += 1
        return k


@dataclass(frozen=True)
class PoissonRunCount:
    """Poisson distribution.  K may be 0, and then nothing is chosen.

    Raises:
        InputError: The mean is out of its range.
    """

    mean: float
    """E[K], from 1 to a million."""

    def __post_init__(self) -> None:
        _check_mean(self.mean, min_mean=1.0)

    @property
    def description(self) -> str:
        return f"a Poisson number of runs, {self.mean:g} on average"

    def renyi_constant(self, mu: float, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return E[K] times the run's δ at the largest ε that Theorem 6 allows for an order."""
        return self.mean * curves.gaussian_curve(mu)(np.log1p(1.0 / excess))

    def epsilon_shift(self, mu: float) -> float:
        return self.mean * math.erf(mu / math.sqrt(8.0)) * (1.0 + _ROUNDING)

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.poisson(self.mean))


@dataclass(frozen=True)
class PrivateSelection:
    """Choice of the best of K runs that are `mu`-GDP each.

    Nothing of the other runs is published.

    Guarantee: `epsilon_of` holds for everything that is published of the chosen run and for the later releases, if
    the score that it was chosen by is a part of the run's releases, K is drawn independently of the data and stays
    secret, and the settings of every run are drawn from one public distribution.

    Raises:
        InputError: μ is not a finite number above 0, or `later_mu` is out of its range.

    Example:
        >>> choice = PrivateSelection(mu=0.5, run_count=NegativeBinomialRunCount(mean=10.0))
        >>> round(choice.epsilon_of(1e-5), 3)
        2.938
    """

    mu: float
    """μ of each run, its score included."""
    run_count: RunCountDistribution
    """Distribution of the number K of runs."""
    later_mu: float = 0.0
    """μ of later releases with the chosen settings, or 0 if there are none."""

    def __post_init__(self) -> None:
        check_positive("mu", check_mu(self.mu))
        check_mu(self.later_mu)

    def epsilon_of(self, delta: float) -> float:
        """Return an ε for which (ε, `delta`)-DP holds, the smaller of two bounds."""
        return min(self.epsilon_by_orders(delta), self.epsilon_by_curve(delta))

    def epsilon_by_curve(self, delta: float) -> float:
        """Return the bound from the curve of one run together with the later releases.

        The bound is ε₂ plus the ε at which this curve is δ/E[K].
        """
        max_delta = check_delta(delta) / (self.run_count.mean * (1.0 + _MEAN_MARGIN))
        return (
            epsilon_of(compose([self.mu, self.later_mu]), max_delta) + self.run_count.epsilon_shift(self.mu)
        ) * (1.0 + 1e-15)

    def epsilon_by_orders(self, delta: float) -> float:
        """Return about the smallest bound of ε at δ over Rényi orders λ, at least 0.

        The bound at λ is ε'(λ) + ln((λ - 1)/λ) - (ln δ + ln λ)/(λ - 1), for ε' of the module's docstring.  The
        smallest value on a grid of ln(λ - 1) is refined twice, on grids around it.
        """
        log_delta = math.log(check_delta(delta))
        low, high = math.log(MIN_ORDER_EXCESS), math.log(MAX_ORDER_EXCESS)
        for _ in range(1 + _REFINEMENTS):
            grid = np.linspace(low, high, _GRID_POINTS)  # of ln(λ - 1), while both functions below take λ - 1
            values = renyi_to_epsilons(np.exp(grid), self.renyi(np.exp(grid)), log_delta)
            best, width = grid[int(np.argmin(values))], (high - low) / (_GRID_POINTS - 1)
            low, high = best - width, best + width
        return max(0.0, float(np.min(values)))

    def renyi(self, excess: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the Rényi curve at orders 1 + `excess`, each `excess` above 0, (n,)."""
        zcdp = zcdp_of(self.mu) + zcdp_of(self.later_mu)
        curve = (
            (1.0 + excess) * zcdp
            + self.run_count.renyi_constant(self.mu, excess)
            + math.log(self.run_count.mean * (1.0 + _MEAN_MARGIN)) / excess
        )
        return np.asarray(curve, np.float64)


def negative_binomial_mean(eta: float, gamma: float) -> float:
    """Return E[K] of the truncated negative binomial distribution, 0 < γ < 1, η ≥ 0.

    Args:
        eta: η ≥ 0, where 0 is the logarithmic distribution.
        gamma: γ, strictly between 0 and 1.

    Example:
        >>> round(negative_binomial_mean(eta=1.0, gamma=0.1), 6)
        10.0
    """
    if eta == 0.0:
        return (1.0 / gamma - 1.0) / -math.log(gamma)
    return eta * (1.0 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))


def _check_mean(mean: float, min_mean: float) -> None:
    if not (math.isfinite(mean) and min_mean <= mean <= _MAX_TRIALS):
        raise InputError(f"trials = {mean}: on average from {min_mean:g} to {_MAX_TRIALS:g} runs are tried")
