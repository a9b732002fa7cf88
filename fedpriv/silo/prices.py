"""Prices of a silo's part in a plan: the stream that is charged, and its cost to a lifetime budget."""

from dataclasses import dataclass
from functools import lru_cache

from fedpriv.accounting.budget import ApproximateGDP, Price, slack_of
from fedpriv.accounting.curves import LEAST_DELTA
from fedpriv.accounting.guarantees import Guarantee
from fedpriv.claims.ledger import ReleaseStream, releases_of, stream_of
from fedpriv.core.errors import InputError
from fedpriv.core.figures import upper_figure
from fedpriv.noise.trust import Trust
from fedpriv.participation.secret import SecretOrder
from fedpriv.plan.plan import Plan


@dataclass(frozen=True)
class Cost:
    """Guarantee of a run, from which its price at any slack follows."""

    guarantee: Guarantee | None
    """Guarantee of the charged stream, or None without noise."""
    overflow: float = 0.0
    """Share of the slack for rounds that draw more records than a batch can hold."""

    def at(self, slack: float) -> Price:
        """Return the price at a slack, or None for a run without noise, which exceeds every budget.

        A guarantee that is a μ needs no slack and ignores it.  InputError if another one needs more slack.
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


def priced_stream(plan: Plan, silo: int, trust: Trust, allowed_trust: Trust) -> ReleaseStream:
    """Return the stream for which a silo is charged.

    Args:
        plan: Plan of the run.
        silo: Number of the silo.
        trust: The run's trust setting.
        allowed_trust: The trust setting that the silo's policy allows.

    Returns:
        The silo's own messages, or the release made of all silos' messages if the silo trusts whoever makes it.
    """
    if trust.charged_alone(allowed_trust):
        return stream_of(plan, silo, plan.schedule.rounds)
    (stream,) = releases_of(plan, plan.schedule.rounds)  # a server's noisy means, or sums of masked messages
    return stream


def cost_of(plan: Plan, guarantee: Guarantee | None, silo: int) -> Cost:
    """Return the cost of one silo's part in a plan whose charged stream has `guarantee`."""
    participation = plan.schedule
    if guarantee is None or not isinstance(participation, SecretOrder):
        return Cost(guarantee)
    return Cost(guarantee, slack_of(participation.capacity(plan.batch_sizes[silo]), participation.rounds))


def prices_of(plan: Plan, silo: int, slack: float) -> list[Price]:
    """Return the possible prices of a silo's part in a plan at a slack.

    The first is that of the silo's own messages.  If the run has one release for all silos, its price follows.
    """
    releases = releases_of(plan, plan.schedule.rounds)
    streams = [stream_of(plan, silo, plan.schedule.rounds), *(releases if len(releases) == 1 else ())]
    return [cost_of(plan, stream.guarantee, silo).at(slack) for stream in streams]
