"""(μ, δ₀)-GDP: a μ for runs that have none, so that a lifetime budget can be charged with them.

A run with secret participation is μ-GDP for no μ below that of the run without secrecy: far in the tail its curve
returns to it.  It is (μ, δ₀)-GDP, δ₀ the *slack*, if in both directions, for every ε ≥ 0,

    δ(ε) ≤ (1 - δ₀) δ_μ(ε) + δ₀

where δ_μ is the curve of N(0, 1) against N(μ, 1).  The same for ε < 0 follows, as the two directions exchange.
By Blackwell's theorem the run is then a function of "told apart with probability δ₀, else N(0, 1) against N(μ,
1)", and runs compose, adaptive or not, to (√Σμ², Σδ₀), since 1 - Π(1 - δ₀) ≤ Σδ₀.

Sources: Dong, Roth & Su 2022 for μ-GDP and Blackwell's theorem; the pair with a slack is an own construction.
Gomez et al. 2025 report a μ with a regret instead, which bounds nothing at a δ far below the regret.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Protocol

import numpy as np

from fedpriv.accounting import gdp
from fedpriv.accounting.bisection import smallest_safe
from fedpriv.accounting.checks import check_delta, check_epsilon, check_mu
from fedpriv.accounting.curves import Curve, check_resolved, delta_at, epsilon_at, gaussian_from_below
from fedpriv.errors import InputError
from fedpriv.figures import epsilon_words, upper_figure

_POINTS = 8192  # of ε at which the inequality is certified
_ACCURACY = 1e-6  # relative, of μ
_TINY = Fraction(1, 2**900)


@dataclass(frozen=True)
class ApproximateGDP:
    """(μ, δ₀)-GDP: with probability δ₀ anything may be told, else it is as hard as N(0, 1) against N(μ, 1).

    A run in fixed order has slack 0 and its exact μ.

    Guarantee: `epsilon_of` and `delta_of` hold for whatever satisfies the inequality above with this μ and δ₀.
    """

    mu: float
    slack: float = 0.0
    """δ₀."""

    kind: ClassVar[str] = "approximate-gaussian-dp"

    def __post_init__(self) -> None:
        check_mu(self.mu)
        if not 0.0 <= self.slack < 1.0:
            raise InputError(f"slack = {self.slack}: a probability, 0 or more and below 1, e.g. 1e-7")

    def delta_of(self, epsilon: float) -> float:
        """The δ for which (`epsilon`, δ)-DP follows."""
        within = gdp.delta_of(self.mu, check_epsilon(epsilon))
        return min(1.0, math.nextafter(within * (1.0 - self.slack) * (1.0 + 1e-15) + self.slack, math.inf))

    def epsilon_of(self, delta: float) -> float:
        """The smallest ε for which (ε, `delta`)-DP follows; inf where the slack uses up the whole `delta`."""
        left = (check_delta(delta) - self.slack) / (1.0 - self.slack) * (1.0 - 1e-15)
        if left <= 0.0:
            return math.inf
        return gdp.epsilon_of(self.mu, left)

    def statement(self, delta: float) -> str:
        """The guarantee as a person reads it."""
        mu, slack = upper_figure(self.mu, 6), upper_figure(self.slack, 3)
        epsilon = epsilon_words(self.epsilon_of(delta), delta, 6)
        if self.slack == 0.0:
            return f"{mu}-GDP, hence {epsilon}"
        return f"({mu}, {slack})-GDP: {mu}-GDP but for a probability of {slack}, hence {epsilon}"


class HasCurve(Protocol):
    """A guarantee that knows its δ for every ε."""

    @property
    def curve(self) -> Curve: ...


def charge_of(guarantee: HasCurve, slack: float) -> ApproximateGDP:
    """What a sampled run costs a lifetime budget, at the `slack` (1e-10 or more) it may use up."""
    return ApproximateGDP(smallest_mu(guarantee.curve, slack), slack)


def smallest_mu(curve: Curve, slack: float) -> float:
    """About the smallest μ for which whatever has `curve` is (μ, `slack`)-GDP; `slack` is 1e-10 or more.

    Guarantee: with ε_0 = 0 < … < ε_m, curve(ε_i) ≤ (1 - δ₀) δ_μ(ε_{i+1}) + δ₀ for all i, and curve(ε_m) ≤ δ₀.  As
    both sides fall, the inequality holds between the points and beyond the last.  InputError where the curve never
    comes down to the slack.
    """
    check_resolved(slack)
    end = epsilon_at(curve, slack)
    if math.isinf(end):
        raise InputError(f"slack = {slack}: the privacy of this run never comes down to it; take a larger one")
    if end == 0.0:
        return 0.0
    epsilons = np.linspace(0.0, end, _POINTS)
    epsilons[-1] = end
    allowed = slack * (1.0 - 1e-15)  # at most the decimal number that it prints as
    needed = (curve(epsilons) - allowed) / (1.0 - allowed)
    if delta_at(curve, end) > slack:
        raise InputError(f"slack = {slack}: the curve rises; no mu can be certified")

    def certified(mu: float) -> bool:
        given = gaussian_from_below(mu)(epsilons[1:])
        return bool(np.all(needed[:-1] * (1.0 + 1e-12) <= given))

    return smallest_safe(certified, 1.0, tolerance=_ACCURACY)


def composed(charges: Sequence[ApproximateGDP]) -> ApproximateGDP:
    """All runs together: (√Σμ², Σδ₀), rounded up.

    Guarantee: it holds for runs chosen adaptively, each after the releases of the ones before, as long as the
    sum is what was charged (`lifetime`).  InputError where the slacks add up to 1 or more.
    """
    return ApproximateGDP(_root_above(squares(charges)), _float_above(slacks(charges)))


def squares(charges: Sequence[ApproximateGDP]) -> Fraction:
    """Σμ², exactly."""
    return sum((decimal(each.mu) ** 2 for each in charges), Fraction(0))


def slacks(charges: Sequence[ApproximateGDP]) -> Fraction:
    """Σδ₀, exactly."""
    return sum((decimal(each.slack) for each in charges), Fraction(0))


def decimal(value: float) -> Fraction:
    """The decimal number that `value` prints as, within a relative 1e-16 of it: 3 times 1e-8 is 3e-8."""
    return Fraction(repr(float(value)))


def shared(charges: Sequence[ApproximateGDP], silos: int) -> ApproximateGDP:
    """What a unit pays that has records in at most `silos` of the streams: those where it costs most.

    Guarantee: any `silos` of the charges compose to this or less.
    """
    if silos < 1:
        raise InputError(f"shared = {silos}: a unit is in 1 silo or more")
    mus = sorted((each.mu for each in charges), reverse=True)[:silos]
    rests = sorted((each.slack for each in charges), reverse=True)[:silos]
    return composed([ApproximateGDP(0.0, rest) for rest in rests] + [ApproximateGDP(mu) for mu in mus])


def near_root(square: Fraction) -> float:
    """√square to within a few units in the last place, also where the square is no float."""
    shift = 0 if square > _TINY else 600
    return math.ldexp(math.sqrt(float(square * 4**shift)), -shift)


def _root_above(square: Fraction) -> float:
    """The smallest float found whose square is at least `square`, in exact arithmetic."""
    root = near_root(square)
    while decimal(root) ** 2 < square:
        root = math.nextafter(root, math.inf)
    return root


def _float_above(exact: Fraction) -> float:
    total = float(exact)
    return total if decimal(total) >= exact else math.nextafter(total, math.inf)
