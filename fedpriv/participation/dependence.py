"""Facts on which a record's increment may depend, declared by parts and limited by whom they serve.

Amplification by secret sampling presumes that the sum of the others is the same whether or not a record takes
part; a unit's clip presumes that nothing of another unit enters it.  Neither can be seen in a formula of noise, so
every objective and every view of one declares what its increments depend on (`Objective.dependence`), and every
participation and unit says what it allows (`allowed`).  `check_dependence` compares them when a run is planned.
"""

import enum
from typing import Any

from fedpriv.core.errors import InputError


class Dependence(enum.Flag):
    """Facts that decide a record's increment, beside the query and public numbers of the run."""

    RECORD = enum.auto()
    """The record's own content."""
    ROW = enum.auto()
    """Its row index in the silo."""
    ROUND = enum.auto()
    """The number of the round."""
    SILO = enum.auto()
    """The number of the silo."""
    POSITION = enum.auto()
    """Its position among the records that the round reads, or how many these are."""
    BATCH = enum.auto()
    """Content of other records of the same batch; of a unit's batch those are its own."""
    UNKNOWN = enum.auto()
    """Anything else: the part declares nothing."""


OWN = Dependence.RECORD | Dependence.ROW | Dependence.ROUND | Dependence.SILO
"""A record and its name: nothing of who else takes part."""
KNOWN = OWN | Dependence.POSITION
"""What is fixed where everybody knows who takes part."""
UNDECLARED = ~Dependence(0)

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
    """The dependence that an objective declares; everything for one that declares none."""
    found: Any = getattr(part, "dependence", UNDECLARED)
    return found if isinstance(found, Dependence) else UNDECLARED


def check_dependence(part: object, allowed: Dependence, asker: str) -> None:
    """Refuse an objective whose increments depend on more than `allowed`.

    Args:
        part: The objective, with its views.
        allowed: What `asker` allows an increment to depend on.
        asker: The participation or unit that limits it, as a scenario writes it.

    Raises:
        InputError: `part` declares more, or nothing; the line names both parts.
    """
    excess = declared_dependence(part) & ~allowed
    if not excess:
        return
    reason = ", ".join(text for fact, text in _TEXTS.items() if fact in excess)
    if Dependence.UNKNOWN in excess:
        reason = "facts that it does not declare (its attribute `dependence`)"
    raise InputError(
        f"{asker} does not go with {_cause(part, allowed)}, in which a record's increment depends on {reason}; "
        "leave out one of the two"
    )


def _cause(part: Any, allowed: Dependence) -> str:
    """The name of the innermost view that brings in what is not allowed."""
    while (base := getattr(part, "base", None)) is not None and declared_dependence(base) & ~allowed:
        part = base
    return getattr(part, "title", "") or type(part).__name__
