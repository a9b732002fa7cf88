"""Clients that come when they can, at least so many rounds apart, at most so often; the table of participations.

A participation is a line of the table.  JSON form, rates, accounting and words are in its own file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.random import KeyedCoins
from fedpriv.participation.orders import KnownRounds, Participation, ParticipationKeys, Phases, Schedule, Separated
from fedpriv.participation.secret import Allocation, Poisson

if TYPE_CHECKING:
    from fedpriv.participation.orders import Participation


@dataclass(frozen=True)
class Available(KnownRounds, Separated):
    """Every client keeps a timer: it may answer again `min_separation` rounds after it answered, and no more than
    `max_participations` times.  The server keeps nothing of any client.

    A simulation lets each client come in a residue of its own modulo `min_separation`, and there by a coin so that
    a cohort is expected; a cohort is what comes, never cut and never filled up.

    Guarantee: accounting is of `Separated`, which holds for every pattern that keeps the timers, whoever knows it
    or chooses it.  Who comes may depend on public things and on the client alone, not on the data of others.
    """

    name: ClassVar[str] = "available"
    title: ClassVar[str] = "availability with a minimum separation"
    of_clients: ClassVar[bool] = True

    rounds_per_epoch: int
    """The clients over the expected cohort."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds_per_epoch < self.min_separation:
            raise InputError(
                f"federation.min_separation = {self.min_separation}: clients that wait so long give cohorts of at "
                f"most 1/{self.min_separation} of them, and federation.cohort is 1/{self.rounds_per_epoch}"
            )

    @classmethod
    def from_schedule(cls, order: "Participation", keys: ParticipationKeys) -> Self:
        keys.without_groups(cls.name)
        if keys.min_separation is None:
            raise InputError(
                'federation.min_separation: sampling = "available" needs it, the rounds between two answers of one'
            )
        most = -(-order.rounds // keys.min_separation)
        wanted = most if keys.max_participations is None else min(most, keys.max_participations)
        return cls(order.rounds, wanted, keys.min_separation, order.rounds_per_epoch)

    @property
    def batches_held(self) -> int:
        return self.rounds_per_epoch

    def first(self, rounds: int) -> Self:
        """Participation of a client in a run that stopped after so many rounds."""
        return type(self)(rounds, self.max_participations, self.min_separation, self.rounds_per_epoch)

    def expected_batches(self, t: int) -> int:
        return 1

    def most_batches(self, t: int) -> int:
        """Everyone can come at once."""
        return self.rounds_per_epoch

    def rows(self, t: int, batch: int, silo: int, coins: Callable[[], KeyedCoins]) -> NDArray[np.int64]:
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        drawn, count = coins(), self.batches_held * batch
        gap, chance = self.min_separation, self.min_separation / self.rounds_per_epoch
        of_residue = drawn.numbers(count, gap, silo, 0) == t % gap
        before = np.zeros(count, np.int64)
        if self.max_participations < -(-t // gap):
            for earlier in range(t - gap, 0, -gap):
                before += drawn.heads(count, chance, silo, earlier)
        comes = drawn.heads(count, chance, silo, t)
        return np.flatnonzero(of_residue & comes & (before < self.max_participations))

    @property
    def words(self) -> str:
        times = (
            "once" if self.most == 1 else f"at most {self.most} times, {self.min_separation} or more rounds apart"
        )
        return f"takes part {times}, when it is there"

    def as_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rounds": self.rounds,
            "max_participations": self.max_participations,
            "min_separation": self.min_separation,
            "rounds_per_epoch": self.rounds_per_epoch,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        keys = ("rounds", "max_participations", "min_separation", "rounds_per_epoch")
        return cls(*(data[key] for key in keys))


CHOSEN: dict[str, type[Participation]] = {kind.name: kind for kind in (Schedule, Poisson, Allocation, Available)}
"""Those that a scenario names as `federation.sampling`."""

PARTICIPATIONS: dict[str, type[Participation]] = {**CHOSEN, Phases.name: Phases}

if TYPE_CHECKING:
    SamplingName = str
else:
    SamplingName = Literal[tuple(CHOSEN)]


def participation_from(data: Mapping[str, Any]) -> Participation:
    """The participation that `Participation.as_data` wrote; InputError if there is none of that name."""
    settings = dict(data)
    name = settings.pop("name")
    if name not in PARTICIPATIONS:
        raise InputError(f"ledger: sampling {name!r} is none of {', '.join(PARTICIPATIONS)}")
    return PARTICIPATIONS[name].from_data(settings)
