"""Tables of participations, and rounds that are drawn for every record without secrecy.

The tables map names to classes.  `DrawnOrder` is the base class of distributions of rounds that users add, and of
clients that come by themselves (`ClientAvailability`).  A record takes part in a limited number of rounds, which
lie a smallest distance or more apart.  A batch is a fixed number of rows, and sampling randomness is random bits
that follow from a key.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, WrapValidator

from fedpriv.core.errors import InputError, RunError, refuse
from fedpriv.core.extensions import load_extensions, note_table_change
from fedpriv.core.random import SamplingRandomness
from fedpriv.participation.orders import (
    FixedOrder,
    FreshOrder,
    MinSeparation,
    Participation,
    ParticipationKeys,
    Phases,
    PublicRounds,
)
from fedpriv.participation.secret import BalancedSubsampling, PoissonSampling, RandomAllocation

if TYPE_CHECKING:
    from fedpriv.participation.orders import Participation


@dataclass(frozen=True)
class DrawnOrder(PublicRounds, MinSeparation):
    """Rounds that are drawn for every record, and are no secret.

    A user's distribution is a subclass with a method `rounds_of`.

    Guarantee: accounting is that of `MinSeparation`.  It holds for every pattern of at most `max_participations`
    rounds, `min_separation` or more apart, also for a pattern that an adversary knows or chooses.  `select_rows`
    refuses rounds that are no such pattern, if `rounds_of` is a pure function.
    """

    title: ClassVar[str]

    rounds_per_epoch: int
    """Number of rounds of one pass.

    A silo holds as many batches.  A round should read as many records as one batch in expectation, since its sum
    is divided by the size of a batch, however many records are drawn.
    """

    @classmethod
    def from_schedule(cls, order: "Participation", keys: ParticipationKeys) -> Self:
        """Build the participation with the limits of `keys`.

        Without `max_participations` a record takes part at most as often as the order reads it, where an epoch
        that ends early counts as whole.  Without `min_separation` it may take part in any rounds.

        Args:
            order: Public order.
            keys: Keys of the scenario for participation.

        Raises:
            InputError: `keys.groups` is not 1, or a limit is below 1 (0 for `min_separation` counts as 1).
        """
        keys.refuse_groups(cls.name)
        passes = -(-order.rounds // order.rounds_per_epoch)
        max_participations = passes if keys.max_participations is None else keys.max_participations
        return cls(order.rounds, max_participations, keys.min_separation or 1, order.rounds_per_epoch)

    def rounds_of(self, count: int, silo: int, coins: SamplingRandomness) -> NDArray[np.int64]:
        """Return the rounds in which each row of a silo's order takes part.

        The method is called in every round, and has to be a pure function of its arguments.

        Args:
            count: Number of rows.
            silo: Number of the silo.
            coins: Sampling randomness of the silo.

        Returns:
            Integers (count, n): the rounds of each row, from 1, filled up with 0 to the same number n for all
            rows.
        """
        raise NotImplementedError

    @property
    def batches_per_silo(self) -> int:
        return self.rounds_per_epoch

    def truncate(self, rounds: int) -> Self:
        """Return the participation in a run that stopped after `rounds` ≥ 1 rounds."""
        return dataclasses.replace(self, rounds=rounds)

    def expected_batches(self, t: int) -> int:
        """Return 1, the batch by whose size a sum is divided, however many records are expected."""
        return 1

    def max_batches(self, t: int) -> int:
        """Return the number of all batches, since all records can come at once."""
        return self.rounds_per_epoch

    def select_rows(
        self, t: int, batch: int, silo: int, randomness: Callable[[], SamplingRandomness]
    ) -> NDArray[np.int64]:
        """Return the numbers of the rows that `rounds_of` draws for round t, (B,), in ascending order.

        Since `rounds_of` is a user's method, its rounds are checked: at most `max_rounds_per_record` for a row,
        `min_separation` or more apart, as is charged.

        Args:
            t: Round, from 1.
            batch: Number of records of a batch.
            silo: Number of the silo.
            randomness: Function that returns the silo's own sampling randomness.

        Raises:
            RunError: The array has another shape, a number is no integer from 0 to `rounds`, or a row has more
                rounds, or closer ones, than is charged.
            ValueError: Round t does not exist, or `rounds_of` returns rows of different lengths.
        """
        self.check_round(t)
        count = self.batches_per_silo * batch
        # (rows, n): after the sort, a row has its zeros first, and then each round beside the next one.
        rounds = np.sort(np.atleast_2d(self.rounds_of(count, silo, randomness())), axis=1)
        earlier, later = rounds[:, :-1], rounds[:, 1:]
        if (
            rounds.shape[:1] != (count,)
            or rounds.ndim != 2
            or not np.issubdtype(rounds.dtype, np.integer)
            or np.any((rounds < 0) | (rounds > self.rounds))
            or np.any(np.count_nonzero(rounds, axis=1) > self.max_rounds_per_record)
            or np.any((earlier > 0) & (later - earlier < self.min_separation))
        ):
            raise RunError(
                f'federation.sampling = "{self.name}": the rounds it draws are not what is charged, at most '
                f"{self.max_rounds_per_record} of 1 … {self.rounds} for a record, {self.min_separation} or more "
                "apart"
            )
        return np.flatnonzero(np.any(rounds == t, axis=1))

    def check_round(self, t: int) -> None:
        """Check that round t exists.

        Raises:
            ValueError: Round t is not one of 1 … `rounds`.
        """
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")

    @property
    def words(self) -> str:
        clause = (
            f"takes part at most {self.max_rounds_per_record} times, {self.min_separation} or more rounds apart"
        )
        return "takes part at most once" if self.max_rounds_per_record == 1 else clause


@dataclass(frozen=True)
class ClientAvailability(DrawnOrder):
    """Clients that decide when they answer, each with a timer.

    A client may answer again `min_separation` rounds after it answered, and at most `max_participations` times.
    The clients that come in one round are its cohort.

    A simulation draws for each client a residue modulo `min_separation`.  The client can come in rounds of this
    residue, and comes in each with probability `min_separation` / `rounds_per_epoch` until it has come
    `max_participations` times.

    Raises:
        InputError: A number is below 1, or `min_separation` is above `rounds_per_epoch`.

    Guarantee: accounting is that of `MinSeparation`, which holds for every pattern that keeps the timers, whoever
    knows or chooses it.  The decision to come may depend on public facts and on the client alone, not on the data
    of other clients.
    """

    name: ClassVar[str] = "available"
    title: ClassVar[str] = "availability with a minimum separation"
    client_initiated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds_per_epoch < self.min_separation:
            raise InputError(
                f"federation.min_separation = {self.min_separation}: clients that wait so long give cohorts of at "
                f"most 1/{self.min_separation} of them, and federation.cohort is 1/{self.rounds_per_epoch}"
            )

    @classmethod
    def from_schedule(cls, order: "Participation", keys: ParticipationKeys) -> Self:
        """Build the participation with `min_separation`, which is required.

        `max_participations` is at most the number of times that a client can answer in the run.

        Args:
            order: Public order, of which the numbers of rounds are taken.
            keys: Keys of the scenario for participation, with a `min_separation` of 1 or more.

        Raises:
            InputError: `min_separation` is missing, below 1 or too large, `max_participations` is below 1, or
                `keys.groups` is not 1.
        """
        keys.refuse_groups(cls.name)
        if not keys.min_separation:
            raise InputError(
                'federation.min_separation: sampling = "available" needs it, the least number of rounds from one '
                "answer of a client to its next"
            )
        # A client cannot answer more often in the run, whatever the scenario allows.
        round_limit = -(-order.rounds // keys.min_separation)
        max_participations = (
            round_limit if keys.max_participations is None else min(round_limit, keys.max_participations)
        )
        return cls(order.rounds, max_participations, keys.min_separation, order.rounds_per_epoch)

    def select_rows(
        self, t: int, batch: int, silo: int, randomness: Callable[[], SamplingRandomness]
    ) -> NDArray[np.int64]:
        """Return the numbers of the clients that come in round t, (B,), in ascending order.

        A client comes in round t if t has the client's residue, round t is drawn for the client, and fewer than
        `max_participations` earlier rounds of the residue were drawn for the client.

        Args:
            t: Round, from 1.
            batch: Number of clients of a batch.
            silo: Number of the pool of clients.
            randomness: Function that returns the pool's own sampling randomness.

        Raises:
            ValueError: Round t does not exist.
        """
        self.check_round(t)
        sampling_randomness, count = randomness(), self.batches_per_silo * batch
        separation, probability = self.min_separation, self.min_separation / self.rounds_per_epoch
        # Computed again in every round, so that nothing is stored between rounds.
        has_residue = sampling_randomness.numbers(count, separation, silo, 0) == t % separation
        participation_counts = np.zeros(count, np.int64)
        # Count earlier rounds that were drawn.  In the first rounds there are too few of them to reach the limit.
        if self.max_participations < -(-t // separation):
            for earlier_round in range(t - separation, 0, -separation):
                participation_counts += sampling_randomness.bernoulli(count, probability, silo, earlier_round)
        is_drawn = sampling_randomness.bernoulli(count, probability, silo, t)
        return np.flatnonzero(has_residue & is_drawn & (participation_counts < self.max_participations))

    @property
    def words(self) -> str:
        return f"{super().words}, when it is there"


SELECTABLE_PARTICIPATIONS: Mapping[str, type[Participation]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (FixedOrder, PoissonSampling, RandomAllocation, BalancedSubsampling, ClientAvailability)
    }
)
"""Participations that a scenario can name as `federation.sampling`."""

PARTICIPATIONS: Mapping[str, type[Participation]] = MappingProxyType(
    {**SELECTABLE_PARTICIPATIONS, FreshOrder.name: FreshOrder, Phases.name: Phases}
)
"""Participations of fedpriv."""

USER_PARTICIPATIONS: dict[str, type[Participation]] = {}
"""Participations of extensions."""

_FIXED_MEMBERS = (
    *("guarantee", "distance", "public_order", "guarantee_for_mu", "calibrated_mu", "secret"),
    *("allowed_dependence", "max_rounds_per_record", "single_pass", "truncate", "select_rows"),
    *("expected_batches", "max_batches", "batches_per_silo"),
)
_IMPORT_HINT = "; for one of your own, name the file that adds it in FEDPRIV_IMPORT"


def add_participation(kind: type[DrawnOrder]) -> None:
    """Add a user's participation under its name, or replace the user's participation of that name.

    Guarantee: the charge, and the check that the charge covers a record's rounds, are those of `DrawnOrder`, as
    far as the attributes and the fields of the class show.

    Args:
        kind: Frozen dataclass, a subclass of `DrawnOrder`, with a `title`, and with a `name` of lower-case
            letters, digits and dashes, which does not begin with a dash.

    Raises:
        InputError: The class is no subclass of `DrawnOrder`, has no such name or no title, has the name of a
            participation of fedpriv, or overrides a member that the charge rests on.
    """
    if DrawnOrder not in getattr(kind, "__mro__", ()) or kind is DrawnOrder:
        raise InputError(
            f"add_participation: expected a subclass of DrawnOrder, found {kind!r}; see docs/participation.md"
        )
    name = getattr(kind, "name", "")
    if not (isinstance(name, str) and re.fullmatch(r"[a-z0-9][a-z0-9-]*", name)) or not getattr(kind, "title", ""):
        raise InputError(
            f"add_participation: {kind.__name__} has the name {name!r}: needed are a `title`, and a `name` of "
            "lower-case letters, digits and dashes, without a dash in front"
        )
    if name in PARTICIPATIONS:
        raise InputError(f"add_participation: {name!r} is a participation of fedpriv; give yours another name")
    # Members are compared with those of `DrawnOrder` without calling them.  A field whose default is the member of
    # `DrawnOrder` would give instances another one.
    overridden = [
        member
        for member in _FIXED_MEMBERS
        if inspect.getattr_static(kind, member) is not inspect.getattr_static(DrawnOrder, member)
        or member in getattr(kind, "__dataclass_fields__", {}).keys() - DrawnOrder.__dataclass_fields__.keys()
    ]
    if overridden:
        raise InputError(
            f"add_participation: {kind.__name__} has a {overridden[0]!r} of its own; what a run is charged is "
            "DrawnOrder's, and yours are rounds_of, from_schedule, title and words, among others"
        )
    USER_PARTICIPATIONS[name] = kind
    note_table_change()


def lookup_sampling_class(name: str) -> type[Participation] | None:
    """Return the class of the value `name` of `federation.sampling`, or None without such a class.

    Raises:
        InputError: The name is not in the tables, and an extension cannot be imported.
    """
    if name not in PARTICIPATIONS and name not in USER_PARTICIPATIONS:
        load_extensions()
    return SELECTABLE_PARTICIPATIONS.get(name) or USER_PARTICIPATIONS.get(name)


def find_sampling_class(name: str) -> type[Participation]:
    """Return the class of the value `name` of `federation.sampling`.

    Raises:
        InputError: There is no such class, or an extension cannot be imported.
    """
    if (kind := lookup_sampling_class(name)) is None:
        raise InputError(
            f"sampling = {name!r}: accepted are "
            f"{', '.join(map(repr, (*SELECTABLE_PARTICIPATIONS, *USER_PARTICIPATIONS)))}"
        )
    return kind


def make_participation(name: str, order: Participation, keys: ParticipationKeys) -> Participation:
    """Build the participation called `name` from the declared order.

    A user's class has to build an object of itself, with as many rounds and rounds per epoch as the order, which
    equals the object that is read back from its data.

    Args:
        name: Name of `federation.sampling`.
        order: Public order that the scenario declares.
        keys: Further keys of [federation].

    Raises:
        InputError: There is no participation of this name, it refuses the order or the keys, a user's class
            builds something that does not fit, or an extension cannot be imported.
    """
    kind = find_sampling_class(name)
    result = kind.from_schedule(order, keys)
    if name in SELECTABLE_PARTICIPATIONS:
        return result
    if type(result) is not kind:
        raise InputError(f'federation.sampling = "{name}": its from_schedule makes a {type(result).__name__}')
    if (result.rounds, result.rounds_per_epoch) != (order.rounds, order.rounds_per_epoch):
        raise InputError(
            f'federation.sampling = "{name}": {result.rounds} rounds and {result.rounds_per_epoch} an epoch, and '
            f"the scenario has {order.rounds} and {order.rounds_per_epoch}"
        )
    with suppress(TypeError, KeyError):
        if participation_from_data(json.loads(json.dumps(result.to_data()))) == result:
            return result
    raise InputError(
        f'federation.sampling = "{name}": what it writes (to_data) is not what it is read as (from_data); its '
        "fields are numbers, text, and tuples of them"
    )


def _accept_user_name(name: Any, default_validator: Any) -> Any:
    """Return a name that an extension added, and validate other names by `default_validator`.

    The error of `default_validator` lists the names of fedpriv.
    """
    if isinstance(name, str) and name not in PARTICIPATIONS and lookup_sampling_class(name) is not None:
        return name
    return default_validator(name)


if TYPE_CHECKING:
    SamplingName = str
else:
    SamplingName = Annotated[
        Literal[tuple(SELECTABLE_PARTICIPATIONS)], WrapValidator(_accept_user_name), PlainSerializer(str)
    ]


def participation_from_data(data: Mapping[str, Any]) -> Participation:
    """Build a participation from the data of `Participation.to_data`.

    Raises:
        InputError: There is no participation of that name, it refuses its numbers, or an extension cannot be
            imported.
        KeyError or TypeError: The data lack a key, or have a key or a type that the participation does not take.
        ValueError: `batch_counts` of a fixed order do not fit its rounds.
    """
    name, settings = data["name"], {key: value for key, value in data.items() if key != "name"}
    refuse(
        {
            f"ledger: sampling {name!r} with {key} = {settings[key]!r}: expected a whole number above 0": (
                type(settings[key]) is not int or settings[key] < 1
            )
            for key in ("rounds", "rounds_per_epoch", "groups", "max_participations", "min_separation")
            if key in settings
        }
    )
    if (kind := PARTICIPATIONS.get(name) or lookup_sampling_class(name)) is None:
        raise InputError(f"ledger: sampling {name!r} is none of {', '.join(PARTICIPATIONS)}{_IMPORT_HINT}")
    return kind.from_data(settings)
