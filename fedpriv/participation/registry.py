"""The table of participations: a line each, and those that others add.

JSON form, rates, accounting and words of a participation are in its own file.

Rounds that are drawn for every record and are no secret: laws of one's own, clients that come by themselves.

`DrawnOrder` is the base class of both: it accounts for them as for any rounds that keep a distance.
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

from fedpriv.core.errors import InputError, RunError
from fedpriv.core.extensions import load_extensions, note_table_change
from fedpriv.core.random import SamplingRandomness
from fedpriv.participation.orders import (
    FixedOrder,
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
    """Rounds that a law draws for every record; a law of one's own is a subclass with `rounds_of`.

    Guarantee: accounting is that of `Separated`: it holds for every pattern of at most `max_participations`
    rounds, `min_separation` or more apart, also one that an adversary knows or chooses.  `rows` refuses rounds
    that are no such pattern.
    """

    title: ClassVar[str]

    rounds_per_epoch: int
    """Rounds of one pass: a silo holds as many batches, and a round reads one of them, expected."""

    @classmethod
    def from_schedule(cls, order: "Participation", keys: ParticipationKeys) -> Self:
        """As often as the order reads a record, in any rounds, unless `keys` say otherwise."""
        keys.refuse_groups(cls.name)
        passes = -(-order.rounds // order.rounds_per_epoch)
        most = passes if keys.max_participations is None else keys.max_participations
        return cls(order.rounds, most, keys.min_separation or 1, order.rounds_per_epoch)

    def rounds_of(self, count: int, silo: int, coins: SamplingRandomness) -> NDArray[np.int64]:
        """The rounds, from 1, of the rows 0 … count-1 of a silo's order; shape (count, n), and 0 for none.

        A pure function of its arguments, asked anew in every round.
        """
        raise NotImplementedError

    @property
    def batches_per_silo(self) -> int:
        return self.rounds_per_epoch

    def truncate(self, rounds: int) -> Self:
        """Participation in a run that stopped after so many rounds."""
        return dataclasses.replace(self, rounds=rounds)

    def expected_batches(self, t: int) -> int:
        return 1

    def max_batches(self, t: int) -> int:
        """Everyone can come at once."""
        return self.rounds_per_epoch

    def select_rows(
        self, t: int, batch: int, silo: int, coins: Callable[[], SamplingRandomness]
    ) -> NDArray[np.int64]:
        """RunError where a row's rounds are more, or closer together, than what is charged."""
        self.check_round(t)
        count = self.batches_per_silo * batch
        found = np.sort(self.rounds_of(count, silo, coins()), axis=1)
        earlier, later = found[:, :-1], found[:, 1:]
        if (
            found.shape[0] != count
            or not np.issubdtype(found.dtype, np.integer)
            or np.any((found < 0) | (found > self.rounds))
            or np.any(np.count_nonzero(found, axis=1) > self.max_rounds_per_record)
            or np.any((earlier > 0) & (later - earlier < self.min_separation))
        ):
            raise RunError(
                f'federation.sampling = "{self.name}": the rounds it draws are not what is charged, at most '
                f"{self.max_rounds_per_record} of 1 … {self.rounds} for a record, {self.min_separation} or more "
                "apart"
            )
        return np.flatnonzero(np.any(found == t, axis=1))

    def check_round(self, t: int) -> None:
        """ValueError for a round that is not there."""
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")

    @property
    def words(self) -> str:
        apart = (
            f"takes part at most {self.max_rounds_per_record} times, {self.min_separation} or more rounds apart"
        )
        return "takes part once" if self.max_rounds_per_record == 1 else apart


@dataclass(frozen=True)
class ClientAvailability(DrawnOrder):
    """Every client keeps a timer: it may answer again `min_separation` rounds after it answered, and no more than
    `max_participations` times.  The server keeps nothing of any client.

    A simulation lets each client come in a residue of its own modulo `min_separation`, and there by a coin so that
    a cohort is expected; a cohort is what comes, never cut and never filled up.

    Guarantee: accounting is of `Separated`, which holds for every pattern that keeps the timers, whoever knows it
    or chooses it.  Who comes may depend on public things and on the client alone, not on the data of others.
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
        keys.refuse_groups(cls.name)
        if keys.min_separation is None:
            raise InputError(
                'federation.min_separation: sampling = "available" needs it, the rounds between two answers of one'
            )
        most = -(-order.rounds // keys.min_separation)
        wanted = most if keys.max_participations is None else min(most, keys.max_participations)
        return cls(order.rounds, wanted, keys.min_separation, order.rounds_per_epoch)

    def select_rows(
        self, t: int, batch: int, silo: int, coins: Callable[[], SamplingRandomness]
    ) -> NDArray[np.int64]:
        """Those who come in round t, without the other rounds: only the earlier ones of their residue count."""
        self.check_round(t)
        drawn, count = coins(), self.batches_per_silo * batch
        gap, chance = self.min_separation, self.min_separation / self.rounds_per_epoch
        of_residue = drawn.numbers(count, gap, silo, 0) == t % gap
        before = np.zeros(count, np.int64)
        if self.max_participations < -(-t // gap):
            for earlier in range(t - gap, 0, -gap):
                before += drawn.bernoulli(count, chance, silo, earlier)
        comes = drawn.bernoulli(count, chance, silo, t)
        return np.flatnonzero(of_residue & comes & (before < self.max_participations))

    @property
    def words(self) -> str:
        return f"{super().words}, when it is there"


SELECTABLE_PARTICIPATIONS: Mapping[str, type[Participation]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (FixedOrder, PoissonSampling, RandomAllocation, BalancedSubsampling, ClientAvailability)
    }
)
"""Those that a scenario names as `federation.sampling`."""

PARTICIPATIONS: Mapping[str, type[Participation]] = MappingProxyType(
    {**SELECTABLE_PARTICIPATIONS, Phases.name: Phases}
)
"""fedpriv's own: read-only, so that an extension cannot replace one."""

USER_PARTICIPATIONS: dict[str, type[Participation]] = {}
"""Those of others."""

_FIXED_MEMBERS = (
    *("guarantee", "distance", "public_order", "guarantee_for_mu", "calibrated_mu", "secret"),
    *("allowed_dependence", "max_rounds_per_record", "single_pass", "truncate", "select_rows"),
)
_IMPORT_HINT = "; for one of your own, name the file that adds it in FEDPRIV_IMPORT"


def add_participation(kind: type[DrawnOrder]) -> None:
    """Give a participation of one's own its name: scenarios can then ask for it, and their runs be read back.

    `kind` is a frozen dataclass that follows `DrawnOrder`; one's own participation of that name is replaced.
    InputError for the name of one of fedpriv's, or for another class.

    Guarantee: what is charged, and the check that a record's rounds keep to it, are those of `DrawnOrder`.
    """
    if DrawnOrder not in getattr(kind, "__mro__", ()) or kind is DrawnOrder:
        raise InputError(
            f"add_participation: expected a class that follows DrawnOrder, found {kind!r}; docs/participation.md"
        )
    name = getattr(kind, "name", "")
    if name in PARTICIPATIONS:
        raise InputError(f"add_participation: {name!r} is a participation of fedpriv; give yours another name")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) or not getattr(kind, "title", ""):
        raise InputError(
            f"add_participation: {kind.__name__} has the name {name!r}: needed are a `title`, and a `name` of "
            "lower-case letters, digits and dashes"
        )
    theirs = [
        member
        for member in _FIXED_MEMBERS
        if inspect.getattr_static(kind, member) is not inspect.getattr_static(DrawnOrder, member)
    ]
    if theirs:
        raise InputError(
            f"add_participation: {kind.__name__} has a {theirs[0]!r} of its own; what a run is charged is "
            "DrawnOrder's, and yours are rounds_of, from_schedule, title and words"
        )
    USER_PARTICIPATIONS[name] = kind
    note_table_change()


def lookup_sampling_class(name: str) -> type[Participation] | None:
    """The class of that name for `federation.sampling`; extensions are imported for a name that is not known."""
    if name not in PARTICIPATIONS and name not in USER_PARTICIPATIONS:
        load_extensions()
    return SELECTABLE_PARTICIPATIONS.get(name) or USER_PARTICIPATIONS.get(name)


def find_sampling_class(name: str) -> type[Participation]:
    """The class of that name; InputError if there is none."""
    if (kind := lookup_sampling_class(name)) is None:
        raise InputError(
            f"sampling = {name!r}: accepted are "
            f"{', '.join(map(repr, (*SELECTABLE_PARTICIPATIONS, *USER_PARTICIPATIONS)))}"
        )
    return kind


def make_participation(name: str, order: Participation, keys: ParticipationKeys) -> Participation:
    """The participation that `name` makes of the declared `order`.

    InputError for one that `participation_from` would not give back, or that reads otherwise many records.
    """
    kind = find_sampling_class(name)
    found = kind.from_schedule(order, keys)
    if name in SELECTABLE_PARTICIPATIONS:
        return found
    if type(found) is not kind:
        raise InputError(f'federation.sampling = "{name}": its from_schedule makes a {type(found).__name__}')
    if (found.rounds, found.rounds_per_epoch) != (order.rounds, order.rounds_per_epoch):
        raise InputError(
            f'federation.sampling = "{name}": {found.rounds} rounds and {found.rounds_per_epoch} an epoch, and '
            f"the scenario has {order.rounds} and {order.rounds_per_epoch}"
        )
    with suppress(TypeError):
        if participation_from_data(json.loads(json.dumps(found.to_data()))) == found:
            return found
    raise InputError(
        f'federation.sampling = "{name}": what it writes (as_data) is not what it is read as (from_data); its '
        "fields are numbers, text, and tuples of them"
    )


def _accept_user_name(name: Any, otherwise: Any) -> Any:
    """One's own name as it is; `otherwise` says which ones fedpriv has."""
    if isinstance(name, str) and name not in PARTICIPATIONS and lookup_sampling_class(name) is not None:
        return name
    return otherwise(name)


if TYPE_CHECKING:
    SamplingName = str
else:
    SamplingName = Annotated[
        Literal[tuple(SELECTABLE_PARTICIPATIONS)], WrapValidator(_accept_user_name), PlainSerializer(str)
    ]


def participation_from_data(data: Mapping[str, Any]) -> Participation:
    """The participation that `Participation.as_data` wrote; InputError if there is none of that name."""
    settings = dict(data)
    name = settings.pop("name")
    if (kind := PARTICIPATIONS.get(name) or lookup_sampling_class(name)) is None:
        raise InputError(f"ledger: sampling {name!r} is none of {', '.join(PARTICIPATIONS)}{_IMPORT_HINT}")
    return kind.from_data(settings)
