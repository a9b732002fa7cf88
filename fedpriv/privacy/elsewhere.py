"""A first step that a run uses and has not taken: it is charged, and every view of the run says so."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedpriv.accounting.relation import moved_by
from fedpriv.mechanisms import IndependentGaussian
from fedpriv.participation.fixed_order import Schedule
from fedpriv.privacy.ledger import FIRST_STEP, ReleaseStream

ELSEWHERE = "elsewhere"
"""The owner of a first step that is charged, and not released by the run that has it in its ledger."""
STEP_ELSEWHERE = (
    "The columns of numbers were scaled by means and deviations that the scenario gives, and that no release of "
    "this run is the source of: the figures charge them as a first step elsewhere, with the whole share of the "
    "budget that data.scale sets aside. Means that were read off the records in any other way are not covered."
)
"""What is said of every claim with such a step in it."""


def charged_elsewhere(releases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a ledger, as data, charges a step that the run did not release."""
    return any(release["owner"] == ELSEWHERE for release in releases)


def with_other_step(streams: Sequence[ReleaseStream], beside: float) -> tuple[ReleaseStream, ...]:
    """The ledger of a run whose promise has a first step beside the rounds, of μ = `beside` if it is above 0.

    Guarantee: a run that uses what a first step gave is charged for one: for the step that it took, if that is
    in the ledger, and else for a Gaussian release elsewhere of the whole μ that was set aside for it.
    """
    noisy = [stream for stream in streams if stream.std]
    if not beside or not noisy or any(stream.step == FIRST_STEP for stream in streams):
        return tuple(streams)
    once, relation, unit = Schedule(1, 1), noisy[0].relation, noisy[0].unit
    std = moved_by(relation, 1.0, 1.0) / beside
    other = ReleaseStream(
        ELSEWHERE, IndependentGaussian(), once, 0.0, (1.0,), 1.0, relation, std, unit=unit, step=FIRST_STEP
    )
    return (other, *streams)
