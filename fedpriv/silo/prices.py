"""Prices of a silo's part in a plan: what of it is charged, and how much that takes of a lifetime budget."""

from dataclasses import dataclass
from functools import lru_cache

from fedpriv.accounting.budget import ApproximateGDP, Price, slack_of
from fedpriv.accounting.curves import LEAST_DELTA
from fedpriv.accounting.guarantees import Guarantee
from fedpriv.core.errors import InputError
from fedpriv.core.figures import upper_figure
from fedpriv.noise.trust import Trust
from fedpriv.participation.secret import SecretOrder
from fedpriv.rounds.ledger import ReleaseStream
from fedpriv.rounds.plan import Plan


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
        if self.guarantee is None:
            return None
        if self.guarantee.mu is not None:
            return self.guarantee.charge(0.0)
        if not (rest := (slack - self.overflow) * (1.0 - 1e-12)) >= LEAST_DELTA:
            raise InputError(
                f"allow.slack_per_run = {slack:g}: a run of this length needs {upper_figure(self.overflow, 2)} of "
                f"it for rounds that draw very many records, and {LEAST_DELTA:g} on top"
            )
        return ApproximateGDP(_mu_of(self.guarantee, rest), slack)


@lru_cache(maxsize=64)
def _mu_of(guarantee: Guarantee, slack: float) -> float:
    return guarantee.charge(slack).mu


def priced_stream(plan: Plan, silo: int, asked: Trust, allowed: Trust) -> ReleaseStream:
    """What a silo is charged for: its own messages, or what is left of them where it trusts others so far."""
    if asked.charged_alone(allowed):
        return plan.stream_of(silo, plan.schedule.rounds)
    (stream,) = plan.releases(plan.schedule.rounds)  # noisy means, or sums of masked messages
    return stream


def cost_of(plan: Plan, guarantee: Guarantee | None, silo: int) -> Cost:
    """What one silo's part in a plan costs, whose releases promise `guarantee`."""
    order = plan.schedule
    if guarantee is None or not isinstance(order, SecretOrder):
        return Cost(guarantee)
    return Cost(guarantee, slack_of(order.capacity(plan.batch_sizes[silo]), order.rounds))


def prices_of(plan: Plan, silo: int, slack: float) -> list[Price]:
    """Prices of a silo's part in a plan at a `slack`: of its own messages, and of what is made of them by all."""
    released = plan.releases(plan.schedule.rounds)
    streams = [plan.stream_of(silo, plan.schedule.rounds), *(released if len(released) == 1 else ())]
    return [cost_of(plan, stream.guarantee, silo).at(slack) for stream in streams]
