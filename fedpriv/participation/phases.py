"""One pass in phases, each of which ends with a round that reads nothing."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from fedpriv.errors import InputError
from fedpriv.participation.public_order import PublicOrder


@dataclass(frozen=True)
class Phases(PublicOrder):
    """Fixed order, read once, in phases: phase i has `lengths[i-1]` gradient rounds and then one empty round.

    An empty round uses no records: what is added up in it is 0, and what is released in it is noise alone.

    Guarantee: every record takes part in exactly one round of one phase.
    """

    name: ClassVar[str] = "phases"

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(f"lengths = {self.lengths}: there is a phase at least, each of 1 or more rounds")

    @property
    def rounds(self) -> int:
        return self.rounds_per_epoch + len(self.lengths)

    @property
    def rounds_per_epoch(self) -> int:
        """How many batches are read; fewer than there are rounds."""
        return sum(self.lengths)

    @property
    def single_pass(self) -> bool:
        return True

    def first(self, rounds: int) -> "Phases":
        """The whole schedule: a run that stopped early is charged for all of it."""
        if not 0 <= rounds <= self.rounds:
            raise ValueError(f"{rounds} rounds of {self.rounds}")
        return self

    def phase(self, t: int) -> int:
        """The phase, from 1, that round t (from 1) belongs to; the empty round belongs to the phase it ends."""
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        return next(phase for phase, end in enumerate(self._ends, start=1) if t <= end)

    def place(self, t: int) -> int | None:
        """Which batch of the silo's order, counted from 0, round t uses; None in an empty round."""
        return None if t in self._ends else t - self.phase(t)

    def batches(self, t: int) -> range:
        """As for a `Schedule`; none in an empty round."""
        place = self.place(t)
        return range(0) if place is None else range(place, place + 1)

    @property
    def batches_held(self) -> int:
        """How many batches a silo's order has."""
        return self.rounds_per_epoch

    @property
    def _ends(self) -> tuple[int, ...]:
        """The empty rounds."""
        return tuple(itertools.accumulate(length + 1 for length in self.lengths))

    def as_data(self) -> dict[str, Any]:
        return {"name": self.name, "lengths": list(self.lengths)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        return cls(tuple(data["lengths"]))
