"""What runs cost a silo's lifetime budget: (μ, δ₀), by this installation's accounting.

An exact μ has slack 0.  A run whose records take part in secret has a curve of (ε, δ), and is charged the μ that
holds but for a probability of its slack, of which the policy says how much a run may use up.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fedpriv.accounting.capacity import slack_of
from fedpriv.accounting.curves import LEAST_DELTA
from fedpriv.accounting.guarantees import GaussianDP, Guarantee, Sampled
from fedpriv.accounting.lifetime import Budget, Price, price
from fedpriv.accounting.relation import relation_named
from fedpriv.accounting.slack import ApproximateGDP, charge_of, composed
from fedpriv.errors import InputError
from fedpriv.figures import lower_figure, upper_figure
from fedpriv.participation.secret_order import SecretOrder
from fedpriv.privacy.ledger import ReleaseStream
from fedpriv.privacy.trust import Trust
from fedpriv.privacy.unit import RECORD, unit_named
from fedpriv.running.plan import Plan


class Charge(NamedTuple):
    """What the ledger has of a run: its scenario as canonical JSON, and what it was charged."""

    cell: str
    mu: float
    """inf for a run without noise."""
    slack: float

    @property
    def words(self) -> str:
        """As a refusal says it."""
        return f"it was charged {upper_figure(self.mu)}"


@dataclass(frozen=True)
class Cost:
    """What a run promises, of which follows what it costs at any slack."""

    guarantee: Guarantee | None
    """None without noise."""
    overflow: float = 0.0
    """Of the slack, for rounds that draw more records than a round is made to hold."""

    def at(self, slack: float) -> Price:
        """The price, at a `slack` for runs that need one; None, more than any budget, for a run without noise.

        InputError for a slack that is too small.
        """
        match self.guarantee:
            case None:
                return None
            case GaussianDP(mu):
                return ApproximateGDP(mu)
            case sampled:
                if not (rest := (slack - self.overflow) * (1.0 - 1e-12)) >= LEAST_DELTA:
                    raise InputError(
                        f"allow.slack_per_run = {slack:g}: a run of this length needs "
                        f"{upper_figure(self.overflow, 2)} of it for rounds that draw very many "
                        f"records, and {LEAST_DELTA:g} on top"
                    )
                return ApproximateGDP(_mu_of(sampled, rest), slack)


@lru_cache(maxsize=64)
def _mu_of(guarantee: Sampled, slack: float) -> float:
    return charge_of(guarantee, slack).mu


def priced_stream(plan: Plan, silo: int, asked: Trust, allowed: Trust) -> ReleaseStream:
    """What a silo is charged for: its own messages, or what is left of them where it trusts others so far."""
    if asked.private_messages or asked.trust_level > allowed.trust_level:
        return plan.stream_of(silo, plan.schedule.rounds)
    (stream,) = plan.releases(plan.schedule.rounds)  # noisy means, or sums of masked messages
    return stream


def cost_of(plan: Plan, guarantee: Guarantee | None, silo: int) -> Cost:
    """What one silo's part in a plan costs, whose releases promise `guarantee`."""
    order = plan.schedule
    if guarantee is None or not isinstance(order, SecretOrder):
        return Cost(guarantee)
    return Cost(guarantee, slack_of(order.capacity(plan.batch_sizes[silo]), order.rounds))


def spent(charges: Sequence[Charge], relation: str, unit: str = RECORD.name) -> list[Price]:
    """What runs of the past cost a budget with neighbours that differ in one `unit` under `relation`.

    Guarantee: a run that was charged for other neighbours costs what is known of these.  Units of replace-one, and
    a part of one, are two steps of zero-out apart, which doubles an exact μ; of a sampled run nothing is known
    then, and nothing of a run whose unit is a part of `unit`.
    """
    return [_spent(each, relation, unit) for each in charges]


def _spent(charge: Charge, relation: str, unit: str) -> Price:
    if math.isinf(charge.mu):
        return None
    try:
        asked = json.loads(charge.cell)["privacy"]
        charged, of = relation_named(asked["relation"]), unit_named(asked.get("unit", RECORD.name))
    except (ValueError, KeyError, TypeError, AttributeError, InputError):
        return None  # of whom it was is not known any more
    if not of.covers(unit_named(unit)):
        return None
    exchanged = relation_named(relation) == "replace-one" or of.name != unit
    steps = 2 if exchanged and charged == "zero-out" else 1
    return price(ApproximateGDP(charge.mu, charge.slack), steps)


def refusal(budget: Budget, before: Sequence[Price], asked: Price) -> str | None:
    """Why a run does not fit into a budget beside those before it; None if it does."""
    if budget.refusal(before, asked) is None:
        return None
    total = together([*before, asked])
    return f"the run costs {words(asked)}, with all before {_bare(total)}; the budget is {_limit(budget)}"


def together(prices: Sequence[Price]) -> Price:
    """All of them; None if one of them is more than any budget."""
    known = [each for each in prices if each is not None]
    if len(known) < len(prices):
        return None
    return composed(known) if sum(each.slack for each in known) < 1.0 else None


def words(asked: Price) -> str:
    """A price as a person reads it."""
    return f"mu = {_bare(asked)}"


def _limit(budget: Budget) -> str:
    """A limit rounds down: it has `ROUNDING` on top of what a policy says."""
    return lower_figure(budget.mu) + (f" with slack {lower_figure(budget.slack, 3)}" if budget.slack else "")


def _bare(cost: Price) -> str:
    if cost is None:
        return "inf"
    return upper_figure(cost.mu) + (f" with slack {upper_figure(cost.slack, 3)}" if cost.slack else "")
