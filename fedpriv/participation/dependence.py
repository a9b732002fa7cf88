"""Facts on which a record's increment depends, and a check of them against participation and unit.

Two guarantees rest on premises that no formula of noise shows:

* Amplification by secret sampling presumes that the sum of the other increments is the same whether or not a
  record takes part.
* The clip of a unit's increment presumes that nothing of another unit enters this increment.

So each objective, and each view of one, declares what its increments depend on (`Objective.dependence`).  Each
participation and each unit has a limit (its attribute `allowed`).  `check_dependence` compares declarations with
limits when a run is planned.
"""

import enum
from typing import Any

from fedpriv.core.errors import InputError


class Dependence(enum.Flag):
    """Facts that decide a record's increment, apart from the query and the run's public numbers."""

    RECORD = enum.auto()
    """The record's own content."""
    ROW = enum.auto()
    """The record's row index in the silo."""
    ROUND = enum.auto()
    """The number of the round."""
    SILO = enum.auto()
    """The number of the silo."""
    POSITION = enum.auto()
    """The record's position among the records that the round reads, or the number of these records."""
    BATCH = enum.auto()
    """Content of other records in the same batch.

    If a batch holds the records of one unit, the other records belong to this unit, too.
    """
    UNKNOWN = enum.auto()
    """Anything else, for a part that declares nothing."""


OWN = Dependence.RECORD | Dependence.ROW | Dependence.ROUND | Dependence.SILO
"""Facts of the record, its silo and the round, independent of the other records that take part."""
KNOWN = OWN | Dependence.POSITION
"""Facts that are fixed where everybody knows which records take part."""
UNDECLARED = ~Dependence(0)
"""Union of all facts, the dependence of a part that declares nothing."""

_TEXTS = {
    Dependence.RECORD: "its content",
    Dependence.ROW: "its row in the silo",
    Dependence.ROUND: "the round",
    Dependence.SILO: "the silo",
    Dependence.POSITION: "its position among the records that are read",
    Dependence.BATCH: "other records of the batch",
    Dependence.UNKNOWN: "facts that are not declared",
}


def declared_dependence(part: object) -> Dependence:
    """Return the dependence that an objective declares, or `UNDECLARED` if it declares none."""
    declared: Any = getattr(part, "dependence", UNDECLARED)
    return declared if isinstance(declared, Dependence) else UNDECLARED


def check_dependence(part: object, allowed_dependence: Dependence, limiting_part: str) -> None:
    """Refuse an objective whose increments depend on more than `allowed_dependence`.

    Args:
        part: The objective, with its views.
        allowed_dependence: Facts on which an increment may depend under `limiting_part`.
        limiting_part: The participation or unit that sets the limit, as a scenario writes it.

    Raises:
        InputError: `part` declares more, or nothing.  The message names both parts.
    """
    excess = declared_dependence(part) & ~allowed_dependence
    if not excess:
        return
    reason = ", ".join(text for fact, text in _TEXTS.items() if fact in excess)
    if Dependence.UNKNOWN in excess:
        reason = "facts that it does not declare (its attribute `dependence`)"
    raise InputError(
        f"{limiting_part} does not go with {_name_of_cause(part, allowed_dependence)}, in which a record's "
        f"increment depends on {reason}; leave out one of the two"
    )


def _name_of_cause(part: Any, allowed_dependence: Dependence) -> str:
    """Return the name of the innermost objective or view that depends on more than is allowed."""
    while (base := getattr(part, "base", None)) is not None and declared_dependence(base) & ~allowed_dependence:
        part = base
    return getattr(part, "title", "") or type(part).__name__
