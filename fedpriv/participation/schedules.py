"""How records take part in rounds, known to everyone before the first one."""

import itertools
from dataclasses import dataclass
from functools import cached_property

from fedpriv.errors import InputError


@dataclass(frozen=True)
class Schedule:
    """Fixed order: every silo reads its batches in order, `rounds` / `places` times over, one batch a round.

    With places == rounds each record takes part in exactly one round (single pass).  A single pass may read
    several batches in some rounds: `reads` says how many in each, and is empty where it is one everywhere.

    Guarantee: the records read in round p+1 ≤ places take part in rounds p+1, p+1+places, … and in no other.
    """

    rounds: int
    places: int
    reads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.reads and not (len(self.reads) == self.rounds == self.places and min(self.reads) >= 1):
            raise ValueError(
                f"reads: {self.rounds} rounds of a single pass need as many numbers of batches, 1 or more"
            )

    def batches(self, t: int) -> range:
        """Which batches of the silo's order, counted from 0, round t (from 1) uses; they follow one another."""
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        if self.reads:
            return range(self._before[t - 1], self._before[t])
        place = (t - 1) % self.places
        return range(place, place + 1)

    @property
    def held(self) -> int:
        """How many batches a silo's order has."""
        return sum(self.reads) if self.reads else self.places

    @property
    def single_pass(self) -> bool:
        return self.places >= self.rounds

    def first(self, rounds: int) -> "Schedule":
        """What a run that stopped after so many rounds has read, for its accountant: not how many batches."""
        return Schedule(rounds, self.places)

    @cached_property
    def _before(self) -> list[int]:
        return [0, *itertools.accumulate(self.reads)]


@dataclass(frozen=True)
class Phases:
    """Fixed order, read once, in phases: phase i has `lengths[i-1]` gradient rounds and then one empty round.

    An empty round uses no records: what is added up in it is 0, and what is released in it is noise alone.

    Guarantee: every record takes part in exactly one round of one phase.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(f"lengths = {self.lengths}: there is a phase at least, each of 1 or more rounds")

    @property
    def rounds(self) -> int:
        return self.places + len(self.lengths)

    @property
    def places(self) -> int:
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
    def held(self) -> int:
        """How many batches a silo's order has."""
        return self.places

    @property
    def _ends(self) -> tuple[int, ...]:
        """The empty rounds."""
        return tuple(itertools.accumulate(length + 1 for length in self.lengths))


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: in every round each record takes part with probability 1/`places`, whatever else happens.

    A silo's sum is divided by its public expected batch, never by the number drawn.

    Guarantee: every record of every round has a coin of its own, which only the silo that holds it sees.
    """

    rounds: int
    places: int
    """Rounds of one expected pass."""

    @property
    def held(self) -> int:
        """How many expected batches a silo holds."""
        return self.places

    @property
    def rate(self) -> float:
        """q: the probability with which a record takes part in a round."""
        return 1.0 / self.places

    @property
    def single_pass(self) -> bool:
        """Never: a record may take part in any number of rounds."""
        return False

    def first(self, rounds: int) -> "Poisson":
        """What a run that stopped after so many rounds has drawn."""
        return Poisson(rounds, self.places)


FixedOrder = Schedule | Phases
"""Schedules in which it is public which records take part in which round."""

AnySchedule = FixedOrder | Poisson
