"""Whose contribution is clipped and counted: its words, how records make one up, and what it weighs.

A unit is a row of a batch: it is clipped as a whole and takes part as a whole, and denominators count units.  The
ledger, the claim, a silo's policy, the audit and the reports say which one they speak of by this value.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedpriv.errors import InputError

_BELOW = 1.0 - 1e-15


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
    | `shared` | the most silos in which one has records |
    """

    name: str
    words: str
    noun: str
    records: int
    presumes: str
    shared: int = 1

    def in_silo(self, batch: int) -> float:
        """The weight of one unit's clipped contribution in a silo's mean over `batch` of them.

        Guarantee: the denominator is public; who takes part does not move it, nor how many records they have.
        """
        return 1.0 / batch

    def in_mean(self, weights: Sequence[float], batches: Sequence[int]) -> float:
        """The largest weight of one unit in the weighted mean over silos: the `shared` largest p_i / B_i.

        Guarantee: a unit has records in at most `shared` silos.
        """
        each = (weight / batch for weight, batch in zip(weights, batches, strict=True))
        return math.fsum(sorted(each, reverse=True)[: self.shared])

    def of_one_silo(self, mu: float) -> float:
        """The μ of every silo's own stream with which a unit has `mu` over all: μ/√s, rounded down.

        Guarantee: the streams of `shared` silos compose to `mu` or less.
        """
        return mu if self.shared == 1 else mu / math.sqrt(self.shared) * _BELOW

    def covers(self, other: "Unit") -> bool:
        """Whether what one of `other` contributes is a part of what one of these does."""
        order = list(UNITS)
        return other.name in order and self.name in order and order.index(other.name) <= order.index(self.name)

    def as_data(self) -> Any:
        """Plain data, from which `unit_from` makes it again."""
        if self.records == self.shared == 1:
            return self.name
        return {"name": self.name, "records": self.records, "shared": self.shared}


RECORD = Unit(
    name="record",
    words="one record of a silo",
    noun="record",
    records=1,
    presumes="A record belongs to one silo. A person with several records is protected less.",
)
USER = Unit(
    name="user",
    words="all records of one person in one silo, at most {records} a round",
    noun="person",
    records=1,
    presumes="A silo knows which of its records are of one person. The most silos in which one has any: {shared}.",
)
CLIENT = Unit(
    name="client",
    words="everything one client holds, at most {records} records a round",
    noun="client",
    records=1,
    presumes="A client holds its own records and nobody else's. A person with several clients is protected less.",
)

UNITS = {unit.name: unit for unit in (RECORD, USER, CLIENT)}
"""From the smallest to the largest."""

if TYPE_CHECKING:
    UnitName = str
else:
    UnitName = Literal[tuple(UNITS)]


def unit_named(name: str, records: int = 1, shared: int = 1) -> Unit:
    """The unit of up to `records` records a round, in up to `shared` silos; InputError if there is none such."""
    if name not in UNITS:
        raise InputError(f"unit = {name!r}: accepted are {', '.join(map(repr, UNITS))}")
    if min(records, shared) < 1 or (name == RECORD.name and max(records, shared) > 1):
        raise InputError(
            f"unit = {name!r} of {records} records in {shared} silos: a record is one in one silo, persons and "
            "clients have 1 or more"
        )
    if name == RECORD.name:
        return RECORD
    kind = UNITS[name]
    words, presumes = (text.format(records=records, shared=shared) for text in (kind.words, kind.presumes))
    return dataclasses.replace(kind, records=records, shared=shared, words=words, presumes=presumes)


def unit_from(data: str | Mapping[str, Any]) -> Unit:
    """The inverse of `Unit.as_data`; InputError for what is no unit."""
    return unit_named(data) if isinstance(data, str) else unit_named(data["name"], data["records"], data["shared"])
