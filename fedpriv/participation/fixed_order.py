"""Every record once an epoch, in the same order."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

from fedpriv.participation.public_order import PublicOrder


@dataclass(frozen=True)
class Schedule(PublicOrder):
    """Fixed order: every silo reads its batches in order, `rounds` / `rounds_per_epoch` times over, one batch a
    round.

    With rounds_per_epoch == rounds each record takes part in exactly one round (single pass).  A single pass
    may read
    several batches in some rounds: `reads` says how many in each, and is empty where it is one everywhere.

    Guarantee: the records read in round p+1 ≤ rounds_per_epoch take part in rounds p+1, p+1+rounds_per_epoch, …
    and in no other.
    """

    name: ClassVar[str] = "fixed"

    rounds: int
    rounds_per_epoch: int
    reads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.reads and not (len(self.reads) == self.rounds == self.rounds_per_epoch and min(self.reads) >= 1):
            raise ValueError(
                f"reads: {self.rounds} rounds of a single pass need as many numbers of batches, 1 or more"
            )

    def batches(self, t: int) -> range:
        """Which batches of the silo's order, counted from 0, round t (from 1) uses; they follow one another."""
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        if self.reads:
            return range(self._before[t - 1], self._before[t])
        place = (t - 1) % self.rounds_per_epoch
        return range(place, place + 1)

    @property
    def batches_held(self) -> int:
        """How many batches a silo's order has."""
        return sum(self.reads) if self.reads else self.rounds_per_epoch

    @property
    def single_pass(self) -> bool:
        return self.rounds_per_epoch >= self.rounds

    def first(self, rounds: int) -> "Schedule":
        """What a run that stopped after so many rounds has read, for its accountant: not how many batches."""
        return Schedule(rounds, self.rounds_per_epoch)

    @cached_property
    def _before(self) -> list[int]:
        return [0, *itertools.accumulate(self.reads)]

    def as_data(self) -> dict[str, Any]:
        return {"name": self.name, "rounds": self.rounds, "rounds_per_epoch": self.rounds_per_epoch}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["rounds"], data["rounds_per_epoch"])
