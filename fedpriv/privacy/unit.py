"""Whose contribution is clipped and counted: its words, how records make one up, and what it weighs.

A unit is a row of a batch: it is clipped as a whole and takes part as a whole, and denominators count units.  The
ledger, the claim, a silo's policy, the audit and the reports say which one they speak of by this value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedpriv.errors import InputError


@dataclass(frozen=True)
class Unit:
    """Neighbouring data sets differ in one of these.

    | field | meaning |
    |---|---|
    | `name` | as scenarios, policies and ledgers write it |
    | `words` | what a claim is of: "one record of a silo" |
    | `noun` | one of them in a sentence: "record" |
    | `records` | the most records that make one up in a round |
    | `presumes` | what a claim takes for granted about them, a sentence or two |
    """

    name: str
    words: str
    noun: str
    records: int
    presumes: str

    def in_silo(self, batch: int) -> float:
        """The weight of one unit's clipped contribution in a silo's mean over `batch` of them.

        Guarantee: the denominator is public; who takes part does not move it, nor how many records they have.
        """
        return 1.0 / batch

    def in_mean(self, weights: Sequence[float], batches: Sequence[int]) -> float:
        """The largest weight of one unit in the weighted mean over silos: max p_i / B_i.

        Guarantee: a unit's records are in one silo.
        """
        return max(weight / batch for weight, batch in zip(weights, batches, strict=True))


RECORD = Unit(
    name="record",
    words="one record of a silo",
    noun="record",
    records=1,
    presumes="A record belongs to one silo. A person with several records is protected less: k records multiply μ "
    "by at most k.",
)

UNITS = {unit.name: unit for unit in (RECORD,)}

if TYPE_CHECKING:
    UnitName = str
else:
    UnitName = Literal[tuple(UNITS)]


def unit_named(name: str) -> Unit:
    """InputError if there is none of that name."""
    if name not in UNITS:
        raise InputError(f"unit = {name!r}: accepted are {', '.join(map(repr, UNITS))}")
    return UNITS[name]
