"""Participation of a silo's records in rounds: its protocol, public orders, and allowed dependence.

A silo is a party that holds records, and a batch a fixed number of consecutive rows of its order.  An increment is
a record's clipped contribution to a round's sum.

| class | order |
|---|---|
| `FixedOrder` | batches one after the other, in the same order in every epoch |
| `FreshOrder` | batches one after the other, in every epoch in a new public permutation |
| `MinSeparation` | any rounds that keep a distance, for accounting |
| `Phases` | one pass in phases, each of which ends with a round that reads nothing |

**Dependence.**  Amplification by secret sampling assumes that the sum of the other increments is the same whether
or not a record takes part.  The clip of an increment assumes that no data of another person or client enters it.
So an objective, or a view (an objective that wraps another one, its `base`), declares the facts that its
increments depend on.  `check_dependence` compares this declaration with the limit of a participation or of a unit
of protection.
"""

import dataclasses
import enum
import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.gaussian import Relation
from fedpriv.accounting.guarantees import GaussianDP, Guarantee
from fedpriv.core.errors import InputError
from fedpriv.core.random import SamplingRandomness, public_generator

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
    """Other facts, for an objective that declares nothing."""


OWN_FACTS = Dependence.RECORD | Dependence.ROW | Dependence.ROUND | Dependence.SILO
"""Facts of the record, its silo and the round, independent of the other records that take part."""
PUBLIC_ORDER_FACTS = OWN_FACTS | Dependence.POSITION
"""Facts that are fixed if everybody knows which records take part."""
UNDECLARED = ~Dependence(0)
"""Union of all facts, the dependence of an objective that declares nothing."""

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

    A dependence is a set of facts that decide a record's increment, such as the record's content or its position
    among the records that are read.

    Guarantee: a view of an objective that declares nothing depends on undeclared facts, and one of an objective
    that declares positions depends on positions, whatever the view declares.

    Args:
        part: The objective, or a view, which wraps the objective `base`.
    """
    declared: Any = getattr(part, "dependence", UNDECLARED)
    # A `base` with increments of its own is an objective.
    base = getattr(part, "base", None)
    if isinstance(declared, Dependence):
        # A view declares anew all facts but these two, which it cannot remove.
        inner = declared_dependence(base) if hasattr(base, "increment") else Dependence(0)
        return declared | inner & (Dependence.POSITION | Dependence.UNKNOWN)
    return UNDECLARED


def check_dependence(part: object, allowed_dependence: Dependence, limiting_part: str) -> None:
    """Refuse an objective whose increments depend on more than `allowed_dependence`.

    Args:
        part: The objective, with its views.
        allowed_dependence: Facts on which an increment may depend under `limiting_part`.
        limiting_part: The participation or unit that sets the limit, as a scenario writes it.

    Raises:
        InputError: `part` declares more, or declares nothing while the limit leaves out a fact.
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
    """Return the name of the objective or view that is the cause of an excess.

    The search goes on from a view to the objective `base` while this objective depends on too much as well.
    """
    while hasattr(base := getattr(part, "base", None), "increment") and (
        declared_dependence(base) & ~allowed_dependence
    ):
        part = base
    return getattr(part, "title", "") or type(part).__name__


@dataclass(frozen=True)
class ParticipationKeys:
    """Keys of [federation] that only some participations take, with defaults for missing keys."""

    groups: int = 1
    """Number of groups of records, where two groups never take part in the same round."""
    min_separation: int | None = None
    """Smallest distance of two rounds of a record or client, or None if it is not set."""
    max_participations: int | None = None
    """Most rounds of a record or client, or None if it is not set."""

    def refuse_timers(self, name: str) -> None:
        """Refuse `min_separation` and `max_participations`, for a participation that takes neither.

        Args:
            name: Name of the participation in the message.

        Raises:
            InputError: One of these keys is set.
        """
        for key in ("min_separation", "max_participations"):
            if (value := getattr(self, key)) is not None:
                raise InputError(
                    f"federation.{key} = {value}: it is for clients that come by themselves, and for a "
                    f'participation of your own; with sampling = "{name}" leave it out, or set sampling = '
                    '"available"'
                )

    def refuse_groups(self, name: str) -> None:
        """Refuse groups, which only secret participations have.

        Args:
            name: Name of the participation in the message.

        Raises:
            InputError: The number of groups is not 1.
        """
        if self.groups != 1:
            raise InputError(
                f"federation.groups = {self.groups}: groups are for records that take part in secret; with "
                f'sampling = "{name}" leave them out'
            )


RowSelection = slice | NDArray[np.int64]
"""Rows of a silo's order, as row indices (B,) or as a slice, which selects records without a copy."""


def as_row_indices(rows: RowSelection) -> NDArray[np.int64]:
    """Return the row indices (B,) of a selection from `Participation.select_rows`.

    Example:
        >>> as_row_indices(slice(2, 5)).tolist()
        [2, 3, 4]
    """
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


class ReleasedSums(Protocol):
    """Running sums that are released with noise, as accounting reads them.

    A distance is a Euclidean norm for a record of weight 1 under zero-out, relative to noise vectors of standard
    deviation 1.  `displacement` converts it to the record's weight and to the neighbouring relation.
    """

    def sensitivity(self) -> float:
        """Return the distance by which one record can move the whole stream of releases, with public rounds."""
        ...

    def block_displacement(self, groups: int) -> float:
        """Return the distance by which one record can move the releases through any single one of its rounds.

        Args:
            groups: Least distance of two rounds of one record, in rounds.

        Raises:
            InputError: Displacements through different rounds would overlap, or have no end.
        """
        ...

    def displacement_and_overlap(self, groups: int) -> tuple[float, float]:
        """Return the distance of `block_displacement`, and the largest overlap of two rounds of one record.

        The overlap of two rounds is the inner product of the record's displacements through each of them, divided
        by the square of the distance.  It is 0 if no rounds overlap.

        Args:
            groups: Least distance of two rounds of one record, in rounds.

        Raises:
            InputError: Rounds overlap, and no bound of the overlap can be computed.
        """
        ...

    def fading_overlaps(self, groups: int, bins: int) -> "FadingOverlaps | None":
        """Return a bound of the overlaps of a record's rounds, or None if there are none or no bound is known.

        Overlaps are those of `displacement_and_overlap`.  The bound falls with the distance of two rounds.

        Args:
            groups: Distance of two consecutive rounds in which a record may take part.
            bins: Number of rounds of an epoch in which a record may take part.

        Raises:
            InputError: `displacement_and_overlap` refuses the sums.
        """
        ...

    def displacement(self, distance: float) -> float:
        """Return `distance` times the record's weight and the largest movement of its increment, in clips.

        This movement is 1 under zero-out, and under replace-one 2 or a smaller proved bound.
        """
        ...

    @property
    def relation(self) -> Relation: ...


class Participation(Protocol):
    """Participation of records in rounds, a frozen dataclass."""

    name: ClassVar[str]
    """Name in scenarios and ledgers."""
    title: ClassVar[str]
    """Name in a report."""
    secret: ClassVar[bool]
    """Secrecy of rounds: True if only the silo that holds a record may know the record's rounds."""
    client_initiated: ClassVar[bool]
    """Initiative: True if participants decide when they take part, as clients that come by themselves do."""
    allowed_dependence: ClassVar[Dependence]
    """Facts on which a record's increment may depend without invalidating the guarantee."""

    @classmethod
    def from_schedule(cls, order: "Participation", keys: ParticipationKeys) -> "Participation":
        """Build this participation from the public `order` that a scenario declares.

        Args:
            order: Public order.
            keys: Keys of the scenario for participation.

        Raises:
            InputError: The participation does not take one of the `keys`, or the order or a value does not fit.
        """
        ...

    def __hash__(self) -> int: ...

    @property
    def rounds(self) -> int: ...

    @property
    def rounds_per_epoch(self) -> int:
        """Number of rounds with records in one pass, expected if sampled."""
        ...

    @property
    def batches_per_silo(self) -> int:
        """Number of batches that a silo holds."""
        ...

    @property
    def single_pass(self) -> bool:
        """Whether it is certain, and public, that no record takes part twice.

        Secret participations return False, even if every record takes part once.
        """
        ...

    def truncate(self, rounds: int) -> Self:
        """Return the participation that the accountant charges for a run that stopped after `rounds` rounds.

        It may be the whole participation.
        """
        ...

    def expected_batches(self, t: int) -> int:
        """Return the number of batches of a silo that round t reads, expected if sampled.

        The number is 0 in a round without records.
        """
        ...

    def max_batches(self, t: int) -> int:
        """Return the largest number of batches of a silo that round t can read."""
        ...

    def select_rows(
        self, t: int, batch: int, silo: int, randomness: Callable[[], SamplingRandomness]
    ) -> RowSelection:
        """Return the rows of a silo's order that round t reads.

        Args:
            t: Round, from 1.
            batch: Number of records of a batch.
            silo: Number of the silo.
            randomness: Function that returns the silo's own sampling randomness.

        Raises:
            ValueError: Round t does not exist.
        """
        ...

    def guarantee(self, sums: ReleasedSums, std: float) -> Guarantee:
        """Return the guarantee to every record for running sums that are released with noise.

        Args:
            sums: Running sums that are released.
            std: Standard deviation, above 0, of the independent noise vectors from which the mechanism makes its
                noise.

        Raises:
            InputError: The sums cannot be accounted for.
        """
        ...

    def distance(self, sums: ReleasedSums) -> float:
        """Return the distance by which noise is sized, an argument of `ReleasedSums.displacement`.

        For public rounds it bounds how far a record moves the whole stream, and for secret ones how far it moves
        the releases through any single one of its rounds, divided by 2 under replace-one.

        Raises:
            InputError: There is no such distance for these sums.
        """
        ...

    @property
    def public_order(self) -> "Participation":
        """Public order for which noise is fitted and μ is stated (`guarantee_for_mu`).

        The order is the participation itself if rounds are public, and a single pass if they are secret.
        """
        ...

    def guarantee_for_mu(self, mu: float, relation: Relation) -> Guarantee:
        """Return the guarantee to every record for noise that is μ-GDP in the order `public_order`.

        Args:
            mu: μ in that order, above 0.
            relation: Neighbouring relation.
        """
        ...

    def calibrated_mu(self, sums: ReleasedSums, mu: float, delta: float) -> float:
        """Return about the largest μ' whose noise has at most the ε of μ-GDP at δ.

        The noise of μ' has standard deviation `sums.displacement(distance(sums))` / μ'.  Secret participations
        return 10 at most.

        Args:
            sums: Running sums that are released.
            mu: μ of the target, above 0.
            delta: δ at which ε is compared.

        Raises:
            InputError: The sums cannot be accounted for, no noise reaches the target, or a number is out of its
                range.
        """
        ...

    @property
    def words(self) -> str:
        """Clause of a report on the participation of a record, which follows "each record"."""
        ...

    def to_data(self) -> dict[str, Any]:
        """Return plain data, from which `registry.participation_from_data` builds it again for accounting."""
        ...

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Build the participation from the data of `to_data`, without the name."""
        ...


class PlainDataclass:
    """Base of frozen dataclasses of numbers, text, and tuples of them, converted to plain data and back."""

    name: ClassVar[str]

    def to_data(self) -> dict[str, Any]:
        data: Any = self
        return {"name": self.name, **dataclasses.asdict(data)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


class PublicRounds(PlainDataclass):
    """Participation whose rounds are no secret.

    Guarantee: all releases together are μ-GDP for every record, without a δ.  μ is the distance by which one
    record can move the whole stream of releases, for its weight and the neighbouring relation
    (`ReleasedSums.displacement`), divided by the standard deviation of the noise.
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
    """Public order, in which round t reads `batches(t)` of a silo's order."""

    if TYPE_CHECKING:  # subclasses have fields or properties; a dataclass would take these for defaults

        @property
        def rounds(self) -> int: ...

        @property
        def rounds_per_epoch(self) -> int: ...

    title: ClassVar[str] = "fixed order"

    @property
    def batches_per_silo(self) -> int:
        """Number of batches in a silo's order."""
        return self.rounds_per_epoch

    @property
    def single_pass(self) -> bool:
        return self.rounds_per_epoch >= self.rounds

    @classmethod
    def from_schedule(cls, order: "Participation", keys: ParticipationKeys) -> "Participation":
        keys.refuse_groups("fixed")
        keys.refuse_timers("fixed")
        return order

    def batches(self, t: int) -> range:
        """Return the consecutive batches of the silo's order, counted from 0, that round t (from 1) reads."""
        raise NotImplementedError

    def expected_batches(self, t: int) -> int:
        return len(self.batches(t))

    def max_batches(self, t: int) -> int:
        return len(self.batches(t))

    def select_rows(self, t: int, batch: int, silo: int, randomness: Callable[[], SamplingRandomness]) -> slice:
        batches = self.batches(t)
        return slice(batches.start * batch, batches.stop * batch)

    @property
    def words(self) -> str:
        epoch_count, extra_rounds = divmod(self.rounds, self.rounds_per_epoch)
        if self.single_pass:
            return "is read at most once" if self.rounds_per_epoch > self.rounds else "is read once"
        return (
            f"is read {epoch_count} or {epoch_count + 1} times" if extra_rounds else f"is read {epoch_count} times"
        )


@dataclass(frozen=True)
class FixedOrder(PublicOrder):
    """Fixed order: every silo reads its batches in order, epoch after epoch.

    With rounds_per_epoch == rounds each batch is read in exactly one round (single pass).  A round reads one
    batch, unless a single pass has `batch_counts`, the number of batches of every round.

    Guarantee: the records that are read in round p ≤ `rounds_per_epoch` take part in those of the rounds p,
    p + rounds_per_epoch, p + 2 rounds_per_epoch, … that are at most `rounds`, and in no other.

    Raises:
        ValueError: `batch_counts` is not empty, and `rounds_per_epoch` is not `rounds`, or `batch_counts` has not
            one number of 1 or more for every round.

    Example:
        >>> order = FixedOrder(rounds=6, rounds_per_epoch=3)
        >>> [list(order.batches(t)) for t in range(1, 7)]
        [[0], [1], [2], [0], [1], [2]]
    """

    name: ClassVar[str] = "fixed"

    rounds: int
    rounds_per_epoch: int
    batch_counts: tuple[int, ...] = ()
    seed: int = dataclasses.field(default=0, compare=False, repr=False)
    """Public seed of the run, from which an algorithm may draw another order."""

    def __post_init__(self) -> None:
        if self.batch_counts and not (
            len(self.batch_counts) == self.rounds == self.rounds_per_epoch and min(self.batch_counts) >= 1
        ):
            raise ValueError(
                f"reads: {self.rounds} rounds of a single pass need as many numbers of batches, 1 or more"
            )

    def batches(self, t: int) -> range:
        """Return the consecutive batches of the silo's order, counted from 0, that round t (from 1) reads.

        The range has one batch, or `batch_counts[t - 1]` batches if these are given.

        Raises:
            ValueError: Round t does not exist.
        """
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        if self.batch_counts:
            return range(self._batch_offsets[t - 1], self._batch_offsets[t])
        index = (t - 1) % self.rounds_per_epoch
        return range(index, index + 1)

    @property
    def batches_per_silo(self) -> int:
        """Number of batches in a silo's order."""
        return sum(self.batch_counts) if self.batch_counts else self.rounds_per_epoch

    def truncate(self, rounds: int) -> "FixedOrder":
        """Return the first `rounds` rounds, without `batch_counts` and `seed`, which no accountant needs."""
        return FixedOrder(rounds, self.rounds_per_epoch)

    @cached_property
    def _batch_offsets(self) -> list[int]:
        """First batch of every round, and the number of all batches, (rounds + 1,)."""
        return [0, *itertools.accumulate(self.batch_counts)]

    def to_data(self) -> dict[str, Any]:
        """Return plain data without `batch_counts` and `seed`, which no accountant needs."""
        return {"name": self.name, "rounds": self.rounds, "rounds_per_epoch": self.rounds_per_epoch}


_MAX_FRESH_ROUNDS = 2**20
"""Most rounds of a run or of an epoch in fresh permutations, which are stored as 4 bytes a round."""


@dataclass(frozen=True)
class FreshOrder(PublicOrder):
    """Fresh permutations: in every epoch the silos read their batches in a new public permutation.

    The permutations are drawn from the public `seed` and are the same for all silos.  `digest` is the SHA-256 of
    the permutations, in hexadecimal.  If it is empty, it is computed.

    Guarantee: the permutations follow from `seed` and `rounds_per_epoch` alone, so that the first rounds of a
    longer run read the same batches; an order with another `digest` than its permutations' does not exist.

    Raises:
        InputError: A number is no integer in its range, or `digest` is not that of the permutations.

    Example:
        >>> order = FreshOrder(rounds=6, rounds_per_epoch=3, seed=1)
        >>> [order.batches(t).start for t in range(1, 7)]
        [1, 2, 0, 2, 1, 0]
    """

    name: ClassVar[str] = "fresh"
    title: ClassVar[str] = "fresh permutations"

    rounds: int
    rounds_per_epoch: int
    seed: int
    digest: str = ""

    def __post_init__(self) -> None:
        """Check the numbers and a given digest, or compute the digest."""
        lengths = self.rounds, self.rounds_per_epoch
        # Rounds from 1 to a limit, since the permutations stay in memory, and a seed from 0.
        if {*map(type, (*lengths, self.seed))} != {int} or not (
            min(*lengths, self.seed + 1) >= 1 and max(lengths) <= _MAX_FRESH_ROUNDS
        ):
            raise InputError(
                f"fresh permutations of {self.rounds} rounds, {self.rounds_per_epoch} an epoch, from seed "
                f"{self.seed}: rounds are 1 to {_MAX_FRESH_ROUNDS:,}, and a seed is 0 or more, all whole numbers"
            )
        computed_digest = self._permutations[1]
        if self.digest not in ("", computed_digest):
            raise InputError(
                f"order_digest: the permutations of seed {self.seed} for {self.rounds} rounds, "
                f"{self.rounds_per_epoch} an epoch, have the digest {computed_digest}, not {self.digest!r:.100}"
            )
        # The class is frozen.
        object.__setattr__(self, "digest", computed_digest)

    @property
    def visits(self) -> NDArray[np.int32]:
        """Batch of the silo's order, counted from 0, that each round reads, (rounds,)."""
        return self._permutations[0][: self.rounds]

    def batches(self, t: int) -> range:
        """Return the batch of the silo's order, counted from 0, that round t (from 1) reads, as a range.

        Raises:
            ValueError: Round t does not exist.
        """
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        index = int(self.visits[t - 1])
        return range(index, index + 1)

    def truncate(self, rounds: int) -> "FreshOrder":
        """Return the first `rounds` ≥ 1 rounds, with the digest of the permutations that they reach."""
        return FreshOrder(rounds, self.rounds_per_epoch, self.seed)

    @property
    def _permutations(self) -> tuple[NDArray[np.int32], str]:
        """Permutations of all epochs that the rounds reach, and their digest."""
        return _draw_permutations(self.seed, self.rounds_per_epoch, -(-self.rounds // self.rounds_per_epoch))


@lru_cache(maxsize=8)
def _draw_permutations(seed: int, size: int, count: int) -> tuple[NDArray[np.int32], str]:
    """Draw permutations of 0 … size - 1 from a public seed, (count · size,), and their digest.

    A permutation sorts raw 64-bit words of Philox, which are the same in every version of NumPy.
    """
    sort_keys = public_generator(seed, "fresh permutations").bit_generator.random_raw(count * size)
    permutations = np.argsort(sort_keys.reshape(count, size), axis=1, kind="stable").astype(np.int32).ravel()
    permutations.flags.writeable = False
    return permutations, hashlib.sha256(permutations.astype("<i4").tobytes()).hexdigest()


@dataclass(frozen=True)
class MinSeparation:
    """Any participation of a record in few rounds that keep a distance.

    A record takes part in at most `max_participations` of `rounds` rounds, at least `min_separation` rounds apart.

    Guarantee: its accounting holds for every such pattern, also for a pattern that an adversary chooses.

    Raises:
        InputError: A number is below 1.

    Example:
        >>> MinSeparation(rounds=10, max_participations=5, min_separation=4).max_rounds_per_record
        3
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
        """Largest number of rounds of a record: `max_participations`, or fewer if the run has too few rounds."""
        return min(self.max_participations, -(-self.rounds // self.min_separation))

    @property
    def single_pass(self) -> bool:
        return self.max_rounds_per_record == 1


@dataclass(frozen=True)
class Phases(PublicOrder):
    """Fixed order, read once, in phases that end with an empty round.

    Phase i has `lengths[i-1]` gradient rounds and then one empty round.  An empty round uses no records: its sum
    of increments is 0, and its release is noise alone.

    Guarantee: every record takes part in exactly one round of one phase.

    Raises:
        InputError: There is no phase, or one whose length is no whole number of rounds from 1.

    Example:
        >>> phases = Phases((2, 1))
        >>> [phases.batch_index(t) for t in range(1, phases.rounds + 1)]
        [0, 1, None, 2, None]
    """

    name: ClassVar[str] = "phases"

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or not all(type(length) is int and length >= 1 for length in self.lengths):
            raise InputError(f"lengths = {self.lengths}: expected one phase or more, each of 1 or more rounds")

    @property
    def rounds(self) -> int:
        return self.rounds_per_epoch + len(self.lengths)

    @property
    def rounds_per_epoch(self) -> int:
        """Number of batches that are read, which is less than the number of rounds."""
        return sum(self.lengths)

    @property
    def single_pass(self) -> bool:
        return True

    def truncate(self, rounds: int) -> "Phases":
        """Return the whole schedule, since a run that stopped early is charged for all of it.

        Raises:
            ValueError: `rounds` is negative or above the number of rounds.
        """
        if not 0 <= rounds <= self.rounds:
            raise ValueError(f"{rounds} rounds of {self.rounds}")
        return self

    def phase(self, t: int) -> int:
        """Return the phase, from 1, that round t (from 1) belongs to.

        The empty round belongs to the phase that it ends.

        Raises:
            ValueError: Round t does not exist.
        """
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        return next(phase for phase, end in enumerate(self._empty_rounds, start=1) if t <= end)

    def batch_index(self, t: int) -> int | None:
        """Return the batch of the silo's order, counted from 0, that round t reads, or None in an empty round.

        Raises:
            ValueError: Round t does not exist.
        """
        return None if t in self._empty_rounds else t - self.phase(t)

    def batches(self, t: int) -> range:
        """Return the batch that round t (from 1) reads as a range, which is empty in an empty round.

        Raises:
            ValueError: Round t does not exist.
        """
        index = self.batch_index(t)
        return range(0) if index is None else range(index, index + 1)

    @property
    def _empty_rounds(self) -> tuple[int, ...]:
        """Numbers of the empty rounds, one for every phase, in order."""
        return tuple(itertools.accumulate(length + 1 for length in self.lengths))
