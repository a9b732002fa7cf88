"""Whether one more run fits into a lifetime budget.

The rule: √Σμ² ≤ budget and Σδ₀ ≤ slack, over all runs on the same data, in exact arithmetic of the decimals that
these numbers print as (they are within a relative 1e-16 of the floats).  It holds for runs
that are chosen adaptively: whoever picks a run after having seen what the earlier ones released gains nothing (a
privacy filter; Smith & Thakurta 2022 and Koskela, Tobaben & Honkela 2023 for Gaussian DP).  Composed privacy
loss distributions do not: "the run together with the ones before is (ε, δ)-DP" may hold for each run that could
be picked and fail for the choice between them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from fedpriv.accounting.checks import check_positive
from fedpriv.accounting.groups import mu_together
from fedpriv.accounting.slack import ApproximateGDP, composed, decimal, near_root, slacks, squares
from fedpriv.errors import InputError
from fedpriv.figures import upper_figure

Price = ApproximateGDP | None
"""What a run costs; None is more than any budget: nothing can be said about it."""


@dataclass(frozen=True)
class Budget:
    """What all runs on the same data may cost together.

    Guarantee: as long as every run is admitted before its first release, everything released is (`mu`,
    `slack`)-GDP, whoever chooses the runs and after seeing whatever was released.
    """

    mu: float
    slack: float = 0.0
    """Σδ₀ of sampled runs; 0 admits none of them."""

    def __post_init__(self) -> None:
        check_positive("budget", self.mu)
        ApproximateGDP(self.mu, self.slack)

    def refusal(self, spent: Iterable[Price], asked: Price) -> str | None:
        """Why a run that costs `asked` does not fit beside what was `spent`; None if it does."""
        if asked is None:
            return "nothing is known about what this run would cost"
        before = list(spent)
        known = [each for each in before if each is not None]
        if len(known) < len(before):
            return "an earlier run on this data has a cost that nothing is known about"
        everything = [*known, asked]
        if squares(everything) > decimal(self.mu) ** 2:
            total = composed(everything) if slacks(everything) < 1 else asked
            return f"it would make mu = {upper_figure(total.mu, 6)} of a budget of {upper_figure(self.mu, 6)}"
        if slacks(everything) > decimal(self.slack):
            return (
                f"it would make slack = {upper_figure(float(slacks(everything)), 3)} of "
                f"{upper_figure(self.slack, 3)}; a run with secret participation needs some"
            )
        return None

    def left(self, spent: Iterable[Price]) -> ApproximateGDP | None:
        """What one more run may cost, rounded down; None if earlier runs leave nothing, or cannot be priced."""
        before = list(spent)
        known = [each for each in before if each is not None]
        square = decimal(self.mu) ** 2 - squares(known)
        rest = decimal(self.slack) - slacks(known)
        if len(known) < len(before) or square < 0 or rest < 0:
            return None
        return ApproximateGDP(_root_below(square), _float_below(rest))


def price(charge: ApproximateGDP, distance: int = 1) -> Price:
    """What a run costs a budget with other neighbours than the run was charged for.

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
    return ApproximateGDP(mu_together(charge.mu, distance)) if charge.slack == 0.0 else None


def _root_below(square: Fraction) -> float:
    root = near_root(square)
    while decimal(root) ** 2 > square:
        root = math.nextafter(root, 0.0)
    return root


def _float_below(exact: Fraction) -> float:
    value = float(exact)
    return value if decimal(value) <= exact else math.nextafter(value, 0.0)
