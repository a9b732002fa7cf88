"""Participation: which of a silo's records take part in which round; the orders that are public.

`Participation` is the protocol of all of them, `ParticipationKeys` the keys of [federation] that only some take.
`KnownRounds` and `PublicOrder` are the base classes where rounds are no secret (`drawn` has one for laws that draw
the rounds of every record):

| class | order |
|---|---|
| `Schedule` | every record once an epoch, in the same order |
| `Separated` | any rounds that keep a distance; for accounting |
| `Phases` | one pass in phases, each of which ends with a round that reads nothing |

Facts on which a record's increment depends, and a check of them against participation and unit.

Two guarantees rest on premises that no formula of noise shows:

* Amplification by secret sampling presumes that the sum of the other increments is the same whether or not a
  record takes part.
* The clip of a unit's increment presumes that nothing of another unit enters this increment.

So each objective, and each view of one, declares what its increments depend on (`Objective.dependence`).  Each
participation and each unit has a limit (its attribute `allowed`).  `check_dependence` compares declarations with
limits when a run is planned.
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.gaussian import Relation
from fedpriv.accounting.guarantees import GaussianDP, Guarantee
from fedpriv.core.errors import InputError
from fedpriv.core.random import SamplingRandomness

if TYPE_CHECKING:
    from fedpriv.accounting.chain import FadingOverlaps


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


OWN_FACTS = Dependence.RECORD | Dependence.ROW | Dependence.ROUND | Dependence.SILO
"""Facts of the record, its silo and the round, independent of the other records that take part."""
PUBLIC_ORDER_FACTS = OWN_FACTS | Dependence.POSITION
"""Facts that are fixed where everybody knows which records take part."""
UNDECLARED = ~Dependence(0)
"""Union of all facts, the dependence of a part that declares nothing."""

_FACT_TEXTS = {
    Dependence.RECORD: "its content",
    Dependence.ROW: "its row in the silo",
    Dependence.ROUND: "the round",
    Dependence.SILO: "the silo",
    Dependence.POSITION: "its position among the records that are read",
    Dependence.BATCH: "other records of the batch",
    Dependence.UNKNOWN: "facts that are not declared",
}


def declared_dependence(part: object) -> Dependence:
    """Return the dependence that an objective declares, or `UNDECLARED` if it declares none.

    Guarantee: a view of a part that declares nothing, or positions, depends on these, whatever the view declares.
    """
    declared: Any = getattr(part, "dependence", UNDECLARED)
    base = getattr(part, "base", None)
    if isinstance(declared, Dependence):
        inner = declared_dependence(base) if hasattr(base, "per_record") else Dependence(0)
        return declared | inner & (Dependence.POSITION | Dependence.UNKNOWN)
    return UNDECLARED


def check_dependence(part: object, allowed_dependence: Dependence, limiting_part: str) -> None:
    """Refuse an objective whose increments depend on more than `allowed_dependence`.

    Args:
        part: The objective, with its views.
        allowed_dependence: Facts on which an increment may depend under `limiting_part`.
        limiting_part: The participation or unit that sets the limit, as a scenario writes it.

    Raises:
        InputError: `part` declares more, or nothing.  The message names both parts.
    """
    if excess := declared_dependence(part) & ~allowed_dependence:
        reason = (
            "facts that it does not declare (its attribute `dependence`)"
            if Dependence.UNKNOWN in excess
            else ", ".join(text for fact, text in _FACT_TEXTS.items() if fact in excess)
        )
        raise InputError(
            f"{limiting_part} does not go with {_name_of_cause(part, allowed_dependence)}, in which a record's "
            f"increment depends on {reason}; leave out one of the two"
        )


def _name_of_cause(part: Any, allowed_dependence: Dependence) -> str:
    """Return the name of the innermost objective or view that depends on more than is allowed."""
    while (base := getattr(part, "base", None)) is not None and declared_dependence(base) & ~allowed_dependence:
        part = base
    return getattr(part, "title", "") or type(part).__name__


@dataclass(frozen=True)
class ParticipationKeys:
    """Keys of [federation] that only some participations take; what is left out is not given."""

    groups: int = 1
    min_separation: int | None = None
    max_participations: int | None = None

    def refuse_timers(self, name: str) -> None:
        """InputError for the keys of clients that come by themselves, which participation `name` has not."""
        for key in ("min_separation", "max_participations"):
            if (value := getattr(self, key)) is not None:
                raise InputError(
                    f"federation.{key} = {value}: it is for clients that come by themselves; with sampling = "
                    f'"{name}" leave it out, or set sampling = "available"'
                )

    def refuse_groups(self, name: str) -> None:
        """InputError for groups, which only secret participations have."""
        if self.groups != 1:
            raise InputError(
                f"federation.groups = {self.groups}: groups are for records that take part in secret; with "
                f'sampling = "{name}" leave them out'
            )


RowSelection = slice | NDArray[np.int64]
"""Rows of a silo's order; a slice reads without a copy."""


def as_row_indices(rows: RowSelection) -> NDArray[np.int64]:
    """Row indices (B,) of what `Participation.rows` gave."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


class ReleasedSums(Protocol):
    """The running sums that are released with noise, as accounting asks about them."""

    def sensitivity(self) -> float:
        """Distance that one record can move all that is released, where its rounds are public."""
        ...

    def block_displacement(self, groups: int) -> float:
        """Distance that one record, there or not, can move what is released of any one of its rounds.

        Its rounds lie `groups` or more apart.  InputError where what they move would overlap.
        """
        ...

    def displacement_and_overlap(self, groups: int) -> tuple[float, float]:
        """That distance also where its rounds overlap, and by which share of its square two of them do at most."""
        ...

    def fading_overlaps(self, groups: int, bins: int) -> "FadingOverlaps | None":
        """How overlaps of its rounds fade, `bins` an epoch, in parts of the square; None if unknown."""
        ...

    def displacement(self, distance: float) -> float:
        """Such a distance with the record's weight and the neighbouring relation in it."""
        ...

    @property
    def relation(self) -> Relation: ...


class Participation(Protocol):
    """A frozen dataclass, of which `registry` has a line, or that `add_participation` gave a name."""

    name: ClassVar[str]
    """In scenarios and ledgers."""
    title: ClassVar[str]
    """Name in a report."""
    secret: ClassVar[bool]
    """Whether only the silo that holds a record may know in which rounds it takes part."""
    client_initiated: ClassVar[bool]
    """Whether those who take part decide when: clients of a pool, and no records of a silo."""
    allowed_dependence: ClassVar[Dependence]
    """Facts on which a record's increment may depend, for the guarantee to hold."""

    @classmethod
    def from_schedule(cls, order: "Participation", keys: ParticipationKeys) -> "Participation":
        """Build this sampling from the public `order` that a scenario declares.

        InputError for `keys` that it does not take.
        """
        ...

    @property
    def rounds(self) -> int: ...

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds of one pass, expected if sampled."""
        ...

    @property
    def batches_per_silo(self) -> int:
        """Number of batches that a silo holds."""
        ...

    @property
    def single_pass(self) -> bool:
        """Whether no record takes part twice."""
        ...

    def truncate(self, rounds: int) -> Self:
        """Participation in a run that stopped after so many rounds, for its accountant."""
        ...

    def expected_batches(self, t: int) -> int:
        """Number of batches of a silo that round t reads, expected if sampled; 0 in a round without records."""
        ...

    def max_batches(self, t: int) -> int:
        """Largest number of batches that it can read."""
        ...

    def select_rows(self, t: int, batch: int, silo: int, coins: Callable[[], SamplingRandomness]) -> RowSelection:
        """The rows that round t reads of a silo's order, with `batch` records a batch; the silo's own `coins`."""
        ...

    def guarantee(self, sums: ReleasedSums, std: float) -> Guarantee:
        """Guarantee to every record of `sums` with noise of standard deviation `std` > 0 on their fresh vectors.

        InputError for sums that cannot be accounted for.
        """
        ...

    def distance(self, sums: ReleasedSums) -> float:
        """Distance that noise is measured by, before `sums.moved`; InputError if there is no such thing."""
        ...

    @property
    def public_order(self) -> "Participation":
        """Public order in which a record moves as much as it does for an observer who knows its rounds."""
        ...

    def guarantee_for_mu(self, mu: float, relation: Relation) -> Guarantee:
        """Guarantee to every record where one in the order `known` is promised `mu` > 0."""
        ...

    def calibrated_mu(self, sums: ReleasedSums, mu: float, delta: float) -> float:
        """μ' so that noise of `sums.moved(distance)` / μ' gives what μ-GDP gives at δ."""
        ...

    @property
    def words(self) -> str:
        """Words of a report for what a record does."""
        ...

    def to_data(self) -> dict[str, Any]:
        """Plain data, from which `registry.participation_from` makes it again."""
        ...

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_data`, whose name is left out."""
        ...


class PlainDataclass:
    """A frozen dataclass of numbers, text, and tuples of them, as plain data and back."""

    name: ClassVar[str]

    def to_data(self) -> dict[str, Any]:
        data: Any = self
        return {"name": self.name, **dataclasses.asdict(data)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


class PublicRounds(PlainDataclass):
    """Rounds that are no secret.

    Guarantee: all that is released is exactly μ-GDP for every record, by how far one can move the whole stream.
    """

    secret: ClassVar[bool] = False
    client_initiated: ClassVar[bool] = False
    allowed_dependence: ClassVar[Dependence] = PUBLIC_ORDER_FACTS

    def guarantee(self, sums: ReleasedSums, std: float) -> GaussianDP:
        return GaussianDP(sums.displacement(self.distance(sums)) / std)

    def distance(self, sums: ReleasedSums) -> float:
        return sums.sensitivity()

    @property
    def public_order(self) -> Self:
        return self

    def guarantee_for_mu(self, mu: float, relation: Relation) -> GaussianDP:
        return GaussianDP(mu)

    def calibrated_mu(self, sums: ReleasedSums, mu: float, delta: float) -> float:
        return mu


class PublicOrder(PublicRounds):
    """Round t reads `batches(t)` of a silo's order."""

    if TYPE_CHECKING:  # fields of dataclasses, or properties: a dataclass would take these for defaults

        @property
        def rounds(self) -> int: ...

        @property
        def rounds_per_epoch(self) -> int: ...

        @property
        def batches_per_silo(self) -> int: ...

        @property
        def single_pass(self) -> bool: ...

    title: ClassVar[str] = "fixed order"

    @classmethod
    def from_schedule(cls, order: "Participation", keys: ParticipationKeys) -> "Participation":
        keys.refuse_groups("fixed")
        keys.refuse_timers("fixed")
        return order

    def batches(self, t: int) -> range:
        """Batches of the silo's order, counted from 0, that round t (from 1) uses; they follow one another."""
        raise NotImplementedError

    def expected_batches(self, t: int) -> int:
        return len(self.batches(t))

    def max_batches(self, t: int) -> int:
        return len(self.batches(t))

    def select_rows(self, t: int, batch: int, silo: int, coins: Callable[[], SamplingRandomness]) -> slice:
        batches = self.batches(t)
        return slice(batches.start * batch, batches.stop * batch)

    @property
    def words(self) -> str:
        times, cut = divmod(self.rounds, self.rounds_per_epoch)
        if self.single_pass:
            return "is read once"
        return f"is read {times} times, or once more" if cut else f"is read {times} times"


@dataclass(frozen=True)
class FixedOrder(PublicOrder):
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
    batch_counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.batch_counts and not (
            len(self.batch_counts) == self.rounds == self.rounds_per_epoch and min(self.batch_counts) >= 1
        ):
            raise ValueError(
                f"reads: {self.rounds} rounds of a single pass need as many numbers of batches, 1 or more"
            )

    def batches(self, t: int) -> range:
        """Batches of the silo's order, counted from 0, that round t (from 1) uses; they follow one another."""
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        if self.batch_counts:
            return range(self._batch_offsets[t - 1], self._batch_offsets[t])
        place = (t - 1) % self.rounds_per_epoch
        return range(place, place + 1)

    @property
    def batches_per_silo(self) -> int:
        """Number of batches in a silo's order."""
        return sum(self.batch_counts) if self.batch_counts else self.rounds_per_epoch

    @property
    def single_pass(self) -> bool:
        return self.rounds_per_epoch >= self.rounds

    def truncate(self, rounds: int) -> "FixedOrder":
        """Participation in a run that stopped after so many rounds, for its accountant: not how many batches."""
        return FixedOrder(rounds, self.rounds_per_epoch)

    @cached_property
    def _batch_offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.batch_counts)]

    def to_data(self) -> dict[str, Any]:
        """Without `reads`, which no accountant asks for."""
        return {"name": self.name, "rounds": self.rounds, "rounds_per_epoch": self.rounds_per_epoch}


@dataclass(frozen=True)
class MinSeparation:
    """Any participation of a record in at most `max_participations` of `rounds` rounds, at least
    `min_separation` rounds apart.

    Guarantee: what is accounted for it holds for every such pattern, also one chosen by an adversary.
    """

    rounds: int
    max_participations: int
    min_separation: int

    def __post_init__(self) -> None:
        if min(self.rounds, self.max_participations, self.min_separation) < 1:
            raise InputError(
                f"rounds = {self.rounds}, max_participations = {self.max_participations}, "
                f"min_separation = {self.min_separation}: all are 1 or more"
            )

    @property
    def max_rounds_per_record(self) -> int:
        """Largest number of rounds of a record: `max_participations`, or fewer if the rounds do not suffice."""
        return min(self.max_participations, -(-self.rounds // self.min_separation))

    @property
    def single_pass(self) -> bool:
        return self.max_rounds_per_record == 1


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
        """Number of batches that are read; fewer than there are rounds."""
        return sum(self.lengths)

    @property
    def single_pass(self) -> bool:
        return True

    def truncate(self, rounds: int) -> "Phases":
        """The whole schedule: a run that stopped early is charged for all of it."""
        if not 0 <= rounds <= self.rounds:
            raise ValueError(f"{rounds} rounds of {self.rounds}")
        return self

    def phase(self, t: int) -> int:
        """The phase, from 1, that round t (from 1) belongs to; the empty round belongs to the phase it ends."""
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        return next(phase for phase, end in enumerate(self._empty_rounds, start=1) if t <= end)

    def batch_index(self, t: int) -> int | None:
        """Batch of the silo's order, counted from 0, that round t uses; None in an empty round."""
        return None if t in self._empty_rounds else t - self.phase(t)

    def batches(self, t: int) -> range:
        """As for a `Schedule`; none in an empty round."""
        place = self.batch_index(t)
        return range(0) if place is None else range(place, place + 1)

    @property
    def batches_per_silo(self) -> int:
        """Number of batches in a silo's order."""
        return self.rounds_per_epoch

    @property
    def _empty_rounds(self) -> tuple[int, ...]:
        """The empty rounds."""
        return tuple(itertools.accumulate(length + 1 for length in self.lengths))
