"""What a theorem asks for at a scenario's numbers, to be held beside what the scenario uses."""

from collections.abc import Mapping
from typing import NamedTuple

from fedpriv.theory.conditions import Condition


class Prescription(NamedTuple):
    """The numbers of one theorem; none where it cannot be evaluated, and then `refusal` says why."""

    theorem: str
    numbers: Mapping[str, float]
    """By the names that runs use: rounds, batch, clip, noise std, and the fields of the optimizer."""
    conditions: tuple[Condition, ...] = ()
    assumption: str = ""
    """What no number can show."""
    refusal: str | None = None
    """Why a scenario cannot run with these numbers, on one line; None if it can."""
