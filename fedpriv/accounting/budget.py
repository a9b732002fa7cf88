"""Lifetime budgets: what a run is charged, and whether one more run fits.

**The rule.**  √Σμ² ≤ budget and Σδ₀ ≤ slack, over all runs on the same data, in exact arithmetic of the decimals
that these numbers print as (they are within a relative 1e-16 of the floats).  It holds for runs that are chosen
adaptively: a person who picks a run after having seen the releases of earlier ones gains nothing (a privacy
filter; Smith & Thakurta 2022 and Koskela, Tobaben & Honkela 2023 for Gaussian DP).  Composed privacy loss
distributions do not: "the run together with the ones before is (ε, δ)-DP" may hold for each run that could be
picked and fail for the choice between them.

**The charge.**  A run in public order is charged its μ.  A run with secret participation is μ-GDP for no μ below
that of the run without secrecy, as its curve returns to it far in the tail.  It is (μ, δ₀)-GDP, δ₀ the *slack*, if
in both directions, for every ε ≥ 0,

    δ(ε) ≤ (1 - δ₀) δ_μ(ε) + δ₀

where δ_μ is the curve of N(0, 1) against N(μ, 1).  The same for ε < 0 follows, as the two directions exchange.
By Blackwell's theorem the run is then a function of "told apart with probability δ₀, else N(0, 1) against N(μ,
1)", and runs compose, adaptive or not, to (√Σμ², Σδ₀), since 1 - Π(1 - δ₀) ≤ Σδ₀.

**The capacity.**  The number of units that a secret round draws depends on the data, and a silo whose answers take
longer for larger rounds tells it.  So a round evaluates a public number of rows, its capacity.  A round that draws
more processes them all, drops none, and the probability of such a round goes into the slack.

Sources: Dong, Roth & Su 2022 for μ-GDP and Blackwell's theorem; the pair with a slack is an own construction.
Gomez et al. 2025 report a μ with a regret instead, which bounds nothing at a δ far below the regret.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
from scipy.special import bdtrc

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.curves import (
    Curve,
    check_resolvable_delta,
    delta_at,
    epsilon_at,
    group_mu,
    lower_gaussian_curve,
)
from fedpriv.accounting.gaussian import check_delta, check_epsilon, check_mu, check_positive, smallest_safe
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_upper

_GRID_POINTS = 8192  # of ε at which the inequality is certified
_ACCURACY = 1e-6  # relative, of μ
_MIN_SQUARE = Fraction(1, 2**900)


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
        return math.inf if left <= 0.0 else gdp.epsilon_of(self.mu, left)

    @property
    def description(self) -> str:
        """As a price: "0.3742 with slack 1e-07"."""
        return format_upper(self.mu) + (f" with slack {format_upper(self.slack, 3)}" if self.slack else "")


def min_mu(curve: Curve, slack: float) -> float:
    """About the smallest μ for which whatever has `curve` is (μ, `slack`)-GDP; `slack` is 1e-10 or more.

    Guarantee: with ε_0 = 0 < … < ε_m, curve(ε_i) ≤ (1 - δ₀) δ_μ(ε_{i+1}) + δ₀ for all i, and curve(ε_m) ≤ δ₀.  As
    both sides fall, the inequality holds between the points and beyond the last.  InputError where the curve never
    comes down to the slack.
    """
    check_resolvable_delta(slack)
    end = epsilon_at(curve, slack)
    if math.isinf(end):
        raise InputError(f"slack = {slack}: the privacy of this run never comes down to it; take a larger one")
    if end == 0.0:
        return 0.0
    epsilons = np.linspace(0.0, end, _GRID_POINTS)
    epsilons[-1] = end
    allowed = slack * (1.0 - 1e-15)  # at most the decimal number that it prints as
    needed = (curve(epsilons) - allowed) / (1.0 - allowed)
    if delta_at(curve, end) > slack:
        raise InputError(f"slack = {slack}: the curve rises; no mu can be certified")

    def certified(mu: float) -> bool:
        return bool(np.all(needed[:-1] * (1.0 + 1e-12) <= lower_gaussian_curve(mu)(epsilons[1:])))

    return smallest_safe(certified, 1.0, tolerance=_ACCURACY)


def compose_charges(charges: Sequence[ApproximateGDP]) -> ApproximateGDP:
    """All runs together: (√Σμ², Σδ₀), rounded up.

    Guarantee: it holds for runs chosen adaptively, each after the releases of the ones before, as long as the
    sum is what was charged (`lifetime`).  InputError where the slacks add up to 1 or more.
    """
    return ApproximateGDP(_root_above(sum_squares(charges)), _float_above(sum_slacks(charges)))


def sum_squares(charges: Sequence[ApproximateGDP]) -> Fraction:
    """Σμ², exactly."""
    return sum((exact_decimal(each.mu) ** 2 for each in charges), Fraction(0))


def sum_slacks(charges: Sequence[ApproximateGDP]) -> Fraction:
    """Σδ₀, exactly."""
    return sum((exact_decimal(each.slack) for each in charges), Fraction(0))


def exact_decimal(value: float) -> Fraction:
    """The decimal number that `value` prints as, within a relative 1e-16 of it: 3 times 1e-8 is 3e-8."""
    return Fraction(repr(float(value)))


def charge_across_silos(charges: Sequence[ApproximateGDP], silos: int) -> ApproximateGDP:
    """Charge a unit that has records in at most `silos` of the streams: those where it costs most.

    Guarantee: any `silos` of the charges compose to this or less.
    """
    if silos < 1:
        raise InputError(f"shared = {silos}: a unit is in 1 silo or more")
    mus = sorted((each.mu for each in charges), reverse=True)[:silos]
    rests = sorted((each.slack for each in charges), reverse=True)[:silos]
    return compose_charges([ApproximateGDP(0.0, rest) for rest in rests] + [ApproximateGDP(mu) for mu in mus])


def approximate_root(square: Fraction) -> float:
    """√square to within a few units in the last place, also where the square is no float."""
    shift = 0 if square > _MIN_SQUARE else 600
    return math.ldexp(math.sqrt(float(square * 4**shift)), -shift)


def _root_above(square: Fraction) -> float:
    """The smallest float found whose square is at least `square`, in exact arithmetic."""
    root = approximate_root(square)
    while exact_decimal(root) ** 2 < square:
        root = math.nextafter(root, math.inf)
    return root


def _float_above(exact: Fraction) -> float:
    total = float(exact)
    return total if exact_decimal(total) >= exact else math.nextafter(total, math.inf)


Price = ApproximateGDP | None
"""Price of a run; None is more than any budget: nothing can be said about it."""


@dataclass(frozen=True)
class LifetimeBudget:
    """Most that all runs on the same data may cost together.

    Guarantee: as long as every run is admitted before its first release, everything released is (`mu`,
    `slack`)-GDP, whoever chooses the runs and after seeing whatever was released.
    """

    mu: float
    slack: float = 0.0
    """Σδ₀ of sampled runs; 0 admits none of them."""

    def __post_init__(self) -> None:
        check_positive("budget", self.mu)
        ApproximateGDP(self.mu, self.slack)

    def why_over_budget(self, spent: Iterable[Price], asked: Price) -> str | None:
        """Reason to refuse a run that costs `asked` beside what was `spent`; None if it fits."""
        if asked is None:
            return "nothing is known about what this run would cost"
        before = list(spent)
        known = [each for each in before if each is not None]
        if len(known) < len(before):
            return "an earlier run on this data has a cost that nothing is known about"
        everything = [*known, asked]
        if sum_squares(everything) > exact_decimal(self.mu) ** 2:
            total = compose_charges(everything) if sum_slacks(everything) < 1 else asked
            return f"it would make mu = {format_upper(total.mu, 6)} of a budget of {format_upper(self.mu, 6)}"
        if sum_slacks(everything) > exact_decimal(self.slack):
            return (
                f"it would make slack = {format_upper(float(sum_slacks(everything)), 3)} of "
                f"{format_upper(self.slack, 3)}; a run with secret participation needs some"
            )
        return None

    def remaining(self, spent: Iterable[Price]) -> ApproximateGDP | None:
        """Rest for one more run, rounded down; None if earlier runs leave nothing, or cannot be priced."""
        before = list(spent)
        known = [each for each in before if each is not None]
        square = exact_decimal(self.mu) ** 2 - sum_squares(known)
        rest = exact_decimal(self.slack) - sum_slacks(known)
        if len(known) < len(before) or square < 0 or rest < 0:
            return None
        return ApproximateGDP(_root_below(square), _float_below(rest))


def price_at_distance(charge: ApproximateGDP, distance: int = 1) -> Price:
    """Price of a run for a budget with other neighbours than the run was charged for.

    `distance` is how many steps between neighbours of the run lie between neighbours of the budget: k where a
    unit of the budget holds k units of the run, and twice as many where the run was charged under zero-out and
    the budget is under replace-one.

    Guarantee: an exact run costs distance · μ, however its rounds are spread; for a sampled run nothing is known
    in (μ, δ₀), and no budget covers it.
    """
    if distance < 1:
        raise InputError(f"distance = {distance}: neighbours are 1 step apart or more")
    if distance == 1:
        return charge
    return ApproximateGDP(group_mu(charge.mu, distance)) if charge.slack == 0.0 else None


def _root_below(square: Fraction) -> float:
    root = approximate_root(square)
    while exact_decimal(root) ** 2 > square:
        root = math.nextafter(root, 0.0)
    return root


def _float_below(exact: Fraction) -> float:
    value = float(exact)
    return value if exact_decimal(value) <= exact else math.nextafter(value, 0.0)


_MAX_OVERFLOW_PROBABILITY = 2.0**-40
_ROUNDING_MARGIN = 1e-6  # relative: two libraries differ by 2e-8 for ten million units


@dataclass(frozen=True)
class Capacity:
    """A public number of units of a round.

    Guarantee: fewer than `rows` + 1 of the units that could be drawn are drawn, but for a probability of
    `overflow` at most, a round.
    """

    row_count: int
    overflow_probability: float


def find_capacity(units: int, rate: float) -> Capacity:
    """The smallest number of rows that `units`, drawn independently at `rate` each, exceed with probability 2^-40.

    For an allocation to T rounds the rate is 1/T.
    """
    if units < 1 or not 0.0 < rate <= 1.0:
        raise InputError(f"capacity of {units} units at rate {rate}: 1 unit or more, a rate above 0 and at most 1")
    low, high = -1, units
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if _overflow_probability(middle, units, rate) <= _MAX_OVERFLOW_PROBABILITY
            else (middle, high)
        )
    return Capacity(high, _overflow_probability(high, units, rate))


def overflow_slack(round_capacity: Capacity, rounds: int) -> float:
    """Slack that a run needs for the rounds that overflow: the union bound, rounded up."""
    if rounds < 1:
        raise InputError(f"rounds = {rounds}: there is 1 round or more")
    return round_capacity.overflow_probability * rounds * (1.0 + 1e-15)


def _overflow_probability(rows: int, units: int, rate: float) -> float:
    """P(Binomial(units, rate) > rows), rounded up."""
    return 0.0 if rows >= units else float(bdtrc(rows, units, rate)) * (1.0 + _ROUNDING_MARGIN) + math.ulp(0.0)
