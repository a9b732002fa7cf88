"""Lifetime budgets: the charge of a run, and the decision whether one more run fits.

A run's charge is a pair (μ, δ₀), defined below.  Its price is the charge in the budget's neighbouring relation and
unit of protection, or None if no such pair is known.  A curve δ(ε) is an upper bound of the smallest δ for which
the run is (ε, δ)-DP.

**Rule.**  √Σμ² ≤ budget and Σδ₀ ≤ slack, over all runs on the same data, also if each run is chosen after the
releases of earlier ones (a privacy filter; Smith & Thakurta 2022 and Koskela, Tobaben & Honkela 2023 for Gaussian
DP).  Sums are exact, over the decimal numbers that the floats print as.

**Charge.**  A run with public participation is charged its μ.  With secret participation, where the units of a
round are drawn at random and nobody who sees the releases learns which, no small μ describes the run: far in the
tail its δ(ε) is too large.  It is charged a μ with a *slack* δ₀.  The run is (μ, δ₀)-GDP if in both directions,
for every ε ≥ 0,

    δ(ε) ≤ (1 - δ₀) δ_μ(ε) + δ₀

where δ_μ is the curve of N(0, 1) against N(μ, 1).  Runs compose, adaptive or not, to (√Σμ², Σδ₀).  Proof:
docs/proofs/slack.md.

**Capacity.**  The number of units that a secret round draws depends on the data, and the time of a reply can
reveal it.  A capacity is a public number of rows to evaluate in its place.  `overflow_slack` is the slack for
rounds that draw more.

Sources: Dong, Roth & Su 2022 for μ-GDP and Blackwell's theorem; the pair with a slack is an own construction.
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
    MAX_EPSILON,
    Curve,
    check_resolvable_delta,
    epsilon_at,
    group_mu,
    lower_gaussian_curve,
)
from fedpriv.accounting.gaussian import check_delta, check_mu, check_positive, smallest_safe
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_upper

_GRID_POINTS = 8192  # values of ε at which the inequality is certified
_ACCURACY, _MAX_MU = 1e-6, 1e3  # relative width at which the search for μ ends, and a limit on the μ that it tries
_MIN_SQUARE = Fraction(1, 2**900)


@dataclass(frozen=True)
class ApproximateGDP:
    """(μ, δ₀)-GDP: μ-GDP, except that anything may be revealed with probability δ₀.

    Guarantee: `epsilon_of` and `delta_of` hold for every mechanism with δ(ε) ≤ (1 - δ₀) δ_μ(ε) + δ₀ in both
    directions, for every ε ≥ 0, with δ_μ the curve of μ-GDP.

    Raises:
        InputError: μ is negative or not finite, or the slack is not in [0, 1).

    Example:
        >>> charge = ApproximateGDP(mu=1.0, slack=1e-7)
        >>> round(charge.epsilon_of(1e-5), 3), charge.description
        (4.38, '1 with slack 1e-07')
    """

    mu: float
    """Parameter μ, 0 or more."""
    slack: float = 0.0
    """Slack δ₀."""

    kind: ClassVar[str] = "approximate-gaussian-dp"

    def __post_init__(self) -> None:
        check_mu(self.mu)
        if not 0.0 <= self.slack < 1.0:
            raise InputError(f"slack = {self.slack}: a probability, 0 or more and below 1, e.g. 1e-7")

    def delta_of(self, epsilon: float) -> float:
        """Return the smallest δ for which (`epsilon`, δ)-DP follows, rounded up."""
        return min(
            1.0,
            math.nextafter(
                gdp.delta_of(self.mu, epsilon) * (1.0 - self.slack) * (1.0 + 1e-15) + self.slack, math.inf
            ),
        )

    def epsilon_of(self, delta: float) -> float:
        """Return the smallest ε for which (ε, `delta`)-DP follows, or infinity.

        The result is infinity if `delta` is at most the slack, for μ = 0 as well.
        """
        gaussian_delta = (check_delta(delta) - self.slack) / (1.0 - self.slack) * (1.0 - 1e-15)
        return math.inf if gaussian_delta <= 0.0 else gdp.epsilon_of(self.mu, gaussian_delta)

    @property
    def description(self) -> str:
        """Text for a price, such as "0.3742 with slack 1e-07"."""
        return format_upper(self.mu) + (f" with slack {format_upper(self.slack, 3)}" if self.slack else "")


def min_mu(curve: Curve, slack: float) -> float:
    """Return about the smallest μ for which every mechanism with `curve` is (μ, `slack`)-GDP.

    Guarantee: at points ε_0 = 0 < … < ε_m, curve(ε_i) ≤ (1 - δ₀) δ_μ(ε_{i+1}) + δ₀ for all i < m, and curve(ε_m) ≤
    δ₀, with δ_μ the curve of μ-GDP.  As δ of the mechanism and δ_μ both fall, the inequality δ(ε) ≤ (1 - δ₀)
    δ_μ(ε) + δ₀ holds between the points and beyond the last.

    Args:
        curve: Upper bound of δ in both directions, for an array of ε.
        slack: δ₀, from 1e-10 to below 1.

    Raises:
        InputError: The slack is out of its range, the curve is above it at ε = 700 (`curves.MAX_EPSILON`), or none
            of the μ = 1, 2, 4, …, 512 with which the search begins is certified.
    """
    check_resolvable_delta(slack)
    max_epsilon = epsilon_at(curve, slack)
    if math.isinf(max_epsilon):
        raise InputError(
            f"slack = {slack}: the delta of this run is above it at epsilon = {MAX_EPSILON:g}; it needs a larger "
            "slack, or more noise"
        )
    if max_epsilon == 0.0:
        return 0.0
    epsilons = np.linspace(0.0, max_epsilon, _GRID_POINTS)
    slack_below = slack * (1.0 - 1e-15)  # at most the decimal number that `slack` prints as
    required_deltas = (curve(epsilons) - slack_below) / (1.0 - slack_below)

    # Between two points, δ of the mechanism is largest at the lower one, and δ_μ is smallest at the upper one.
    def is_certified(mu: float) -> bool:
        if mu > _MAX_MU:
            raise InputError(f"slack = {slack}: no mu can be certified; this run needs more noise")
        return bool(np.all(required_deltas[:-1] * (1.0 + 1e-12) <= lower_gaussian_curve(mu)(epsilons[1:])))

    return smallest_safe(is_certified, 1.0, tolerance=_ACCURACY)


def compose_charges(charges: Sequence[ApproximateGDP]) -> ApproximateGDP:
    """Return the charge of all runs together, (√Σμ², Σδ₀), rounded up.

    Guarantee: all releases together are (√Σμ², Σδ₀)-GDP, also for runs chosen adaptively, each after the releases
    of the runs before, if the charges were fixed before the first run.  If charges are chosen adaptively as well,
    the guarantee is that of a budget which was fixed before the first run and holds them all (`LifetimeBudget`).

    Args:
        charges: Charges of the runs.

    Raises:
        InputError: The slacks add up to 1 or more, or √Σμ² is too large for a float.

    Example:
        >>> compose_charges([ApproximateGDP(3.0, 1e-8), ApproximateGDP(4.0, 1e-8)])
        ApproximateGDP(mu=5.0, slack=2e-08)
    """
    return ApproximateGDP(_root_above(sum_squares(charges)), _float_above(sum_slacks(charges)))


def sum_squares(charges: Sequence[ApproximateGDP]) -> Fraction:
    """Return Σμ² of the decimal numbers that each μ prints as (`exact_decimal`), exactly."""
    return sum((exact_decimal(charge.mu) ** 2 for charge in charges), Fraction(0))


def sum_slacks(charges: Sequence[ApproximateGDP]) -> Fraction:
    """Return Σδ₀ of the decimal numbers that each slack prints as (`exact_decimal`), exactly."""
    return sum((exact_decimal(charge.slack) for charge in charges), Fraction(0))


def exact_decimal(value: float) -> Fraction:
    """Return the decimal number that `value` prints as, so that three slacks of 1e-8 add up to 3e-8.

    Example:
        >>> exact_decimal(0.1)
        Fraction(1, 10)
    """
    return Fraction(repr(float(value)))


def approximate_root(square: Fraction) -> float:
    """Return √square to within a few units in the last place, or infinity if the root fits no float."""
    shift = 0 if square > _MIN_SQUARE else 600
    shift = shift if square < 1 / _MIN_SQUARE else -600
    return math.sqrt(float(square * Fraction(4) ** shift)) * 2.0**-shift


def _root_above(square: Fraction) -> float:
    """Return a float close to √square whose decimal number has a square of at least `square`, or infinity."""
    root = approximate_root(square)
    while math.isfinite(root) and exact_decimal(root) ** 2 < square:
        root = math.nextafter(root, math.inf)
    return root


def _float_above(exact: Fraction) -> float:
    total = float(exact)
    return total if exact_decimal(total) >= exact else math.nextafter(total, math.inf)


Price = ApproximateGDP | None
"""Price of a run, or None if no bound of it is known, which exceeds every budget."""


@dataclass(frozen=True)
class LifetimeBudget:
    """Largest charge that all runs on the same data may have together.

    Guarantee: as long as every run is admitted before its first release, all releases together are (`mu`,
    `slack`)-GDP, whoever chooses the runs, and whatever releases they have seen before.

    Raises:
        InputError: μ is not a finite number above 0, or the slack is not in [0, 1).

    Example:
        >>> budget = LifetimeBudget(mu=1.0)
        >>> budget.why_over_budget([ApproximateGDP(0.6)], ApproximateGDP(0.8)) is None
        True
        >>> budget.remaining([ApproximateGDP(0.6)]).mu
        0.8
    """

    mu: float
    slack: float = 0.0
    """Largest Σδ₀ of all runs."""

    def __post_init__(self) -> None:
        check_positive("budget", self.mu)
        ApproximateGDP(self.mu, self.slack)

    def why_over_budget(self, prices: Iterable[Price], price: Price) -> str | None:
        """Return the reason to refuse a run, or None if it fits.

        A run fits if Σμ² over all runs, this one included, is at most the square of the budget's μ, and Σδ₀ at
        most its slack.  No run fits if its price, or an earlier one, is None.

        Args:
            prices: Prices of the earlier runs.
            price: Price of the run.
        """
        if price is None:
            return "nothing is known about what this run would cost"
        earlier_prices = list(prices)
        earlier_charges = [earlier_price for earlier_price in earlier_prices if earlier_price is not None]
        if len(earlier_charges) < len(earlier_prices):
            return "an earlier run on this data has a cost that nothing is known about"
        charges = [*earlier_charges, price]
        if (square := sum_squares(charges)) > exact_decimal(self.mu) ** 2:
            return (
                f"all runs together would have mu = {format_upper(_root_above(square), 6)}, more than the budget "
                f"of {format_upper(self.mu, 6)}"
            )
        if sum_slacks(charges) > exact_decimal(self.slack):
            return (
                f"all runs together would have slack = {format_upper(float(sum_slacks(charges)), 3)}, more than "
                f"the budget's {format_upper(self.slack, 3)}; each run with secret participation needs some"
            )
        return None

    def remaining(self, prices: Iterable[Price]) -> ApproximateGDP | None:
        """Return the largest charge that one more run may have, rounded down, or None.

        Its μ is √(budget² - Σμ²), and its slack the budget's less Σδ₀.  The result is None if the earlier runs,
        of these `prices`, exceed the budget, or the price of one is None.
        """
        earlier_prices = list(prices)
        earlier_charges = [price for price in earlier_prices if price is not None]
        square, slack = (
            exact_decimal(self.mu) ** 2 - sum_squares(earlier_charges),
            exact_decimal(self.slack) - sum_slacks(earlier_charges),
        )
        if len(earlier_charges) < len(earlier_prices) or square < 0 or slack < 0:
            return None
        return ApproximateGDP(_root_below(square), _float_below(slack))


def price_at_distance(charge: ApproximateGDP, distance: int = 1) -> Price:
    """Return the price of a run for a budget with another neighbouring relation or unit.

    Guarantee: a run without slack costs distance · μ, rounded up, whichever rounds its units take part in.  For a
    run with slack and a distance above 1 no (μ, δ₀) is known, and no budget covers it.

    Args:
        charge: Charge of the run for its own neighbours.
        distance: Number of steps, each from a data set to a neighbour of the run's kind, that lead to a neighbour
            of the budget's kind.  It is k if a unit of the budget holds k units of the run, and 2k if the run was
            charged under zero-out and the budget is under replace-one.

    Returns:
        The price, or None if no bound of it is known.

    Raises:
        InputError: `distance` is below 1, or distance · μ is too large for a float.

    Example:
        >>> round(price_at_distance(ApproximateGDP(0.5), distance=2).mu, 6)
        1.0
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
# Least relative margin, and margin for each unit.  `bdtrc` errs by 2e-8 for 10^7 units and by 8e-6 for 2 · 10^9.
_ROUNDING_MARGINS = 1e-6, 1e-14


@dataclass(frozen=True)
class Capacity:
    """Public number of rows of a round, and the probability that it draws more units.

    Guarantee: in each round at most `row_count` units are drawn, except with probability `overflow_probability` at
    most, for a capacity from `find_capacity`.
    """

    row_count: int
    overflow_probability: float


def find_capacity(units: int, rate: float) -> Capacity:
    """Return the smallest capacity whose overflow probability, rounded up, is 2^-40 at most.

    A round draws every unit independently, so that the number of units drawn is binomial.  For 2^31 units or more
    the capacity is all of them.

    Args:
        units: Number of units that could be drawn.
        rate: Probability with which each of them is drawn, 1/T for an allocation to T rounds.

    Raises:
        InputError: There are no units, or `rate` is no probability above 0.

    Example:
        >>> find_capacity(units=1000, rate=0.1).row_count
        173
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
    """Return the slack of a run for the rounds that exceed their capacity, the union bound, rounded up.

    Args:
        round_capacity: Capacity of every round.
        rounds: Number of rounds, 1 or more.

    Raises:
        InputError: `rounds` is below 1.
    """
    if rounds < 1:
        raise InputError(f"rounds = {rounds}: there is 1 round or more")
    return round_capacity.overflow_probability * rounds * (1.0 + 1e-15)


def _overflow_probability(rows: int, units: int, rate: float) -> float:
    """Return P(Binomial(units, rate) > rows), rounded up."""
    return (
        0.0
        if rows >= units
        else float(bdtrc(rows, units, rate)) * (1.0 + max(_ROUNDING_MARGINS[0], _ROUNDING_MARGINS[1] * units))
        + math.ulp(0.0)
    )
