"""What a stream of releases promises: an exact μ, or a curve of (ε, δ).

A privacy target as a person states it, in any of four currencies.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting import renyi as rdp
from fedpriv.accounting import renyi as zcdp
from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.gaussian import check_mu
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.accounting.renyi import mu_of_zcdp
from fedpriv.core.errors import InputError
from fedpriv.core.figures import epsilon_words, upper_figure


@dataclass(frozen=True)
class EpsilonDelta:
    """(ε, δ)-DP by the two named routes, and between them what a Rényi accountant would say."""

    delta: float
    exact: float
    """The smallest ε, from the Gaussian trade-off curve."""
    rdp: float
    paper: float
    """ε = ρ + 2√(ρ ln(1/δ)), the formula the papers print."""


@dataclass(frozen=True)
class GaussianDP:
    """Exact μ-GDP: the whole transcript is as hard to tell apart as N(0, 1) from N(μ, 1)."""

    mu: float

    kind: ClassVar[str] = "gaussian-dp"

    def __post_init__(self) -> None:
        check_mu(self.mu)

    @property
    def zcdp(self) -> float:
        """ρ = μ²/2 of zero-concentrated DP."""
        return zcdp.zcdp_of(self.mu)

    def epsilon_delta(self, delta: float) -> EpsilonDelta:
        return EpsilonDelta(
            delta=delta,
            exact=gdp.epsilon_of(self.mu, delta),
            rdp=rdp.epsilon_of(self.mu, delta),
            paper=zcdp.paper_epsilon(self.mu, delta),
        )

    def epsilon_of(self, delta: float) -> float:
        """The smallest ε for which (ε, `delta`)-DP holds."""
        return gdp.epsilon_of(self.mu, delta)

    def statement(self, delta: float) -> str:
        """The guarantee as a person reads it."""
        pair = self.epsilon_delta(delta)
        return (
            f"{upper_figure(self.mu, 6)}-GDP ({upper_figure(self.zcdp, 6)}-zCDP), hence "
            f"{epsilon_words(pair.exact, delta, 6)} by the exact conversion, {upper_figure(pair.paper, 6)} by the "
            "papers' formula"
        )


Sampled = PoissonGaussian | AllocatedGaussian
"""What secret participation promises."""

Guarantee = GaussianDP | Sampled
"""What a stream of releases promises: an exact μ, or a curve of (ε, δ) that no μ describes."""

Promise = TypeVar("Promise", bound=Guarantee, covariant=True)


def weakest(guarantees: Sequence[Guarantee]) -> Guarantee:
    """The guarantee that all of them give, of one or more; InputError where they cannot be compared."""
    gaussian = [each for each in guarantees if isinstance(each, GaussianDP)]
    sampled = [each for each in guarantees if not isinstance(each, GaussianDP)]
    if gaussian and not sampled:
        return max(gaussian, key=lambda each: each.mu)
    if gaussian or len({dataclasses.replace(each, noise_multiplier=1.0) for each in sampled}) > 1:
        raise InputError("a run is sampled throughout, in one way and at one rate for all rounds, or not at all")
    return min(sampled, key=lambda each: each.noise_multiplier)


DEFAULT_DELTA = 1e-5
"""At which ε is printed if nobody says otherwise."""


def target_mu(
    mu: float | None = None,
    zcdp: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> float:
    """The Gaussian-DP parameter of the one target given: μ, zCDP's ρ, or ε together with δ (exact conversion).

    Raises InputError unless exactly one of the three is given and lies in its range.
    """
    if sum(value is not None for value in (mu, zcdp, epsilon)) != 1:
        raise InputError("privacy target: give exactly one of mu, zcdp, or epsilon with delta")
    if mu is not None:
        return check_mu(mu)
    if zcdp is not None:
        return mu_of_zcdp(zcdp)
    if delta is None:
        raise InputError(f"epsilon = {epsilon}: an epsilon is a target only together with a delta, e.g. 1e-6")
    assert epsilon is not None
    return gdp.mu_of(epsilon, delta)
