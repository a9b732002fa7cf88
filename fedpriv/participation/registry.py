"""The table of participations: a line each, and those that others add.

JSON form, rates, accounting and words of a participation are in its own file.
"""

import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import PlainSerializer, WrapValidator

from fedpriv.core.errors import InputError
from fedpriv.core.extensions import changed, load_extensions
from fedpriv.participation.drawn import Available, DrawnOrder
from fedpriv.participation.orders import Participation, ParticipationKeys, Phases, Schedule
from fedpriv.participation.secret import Allocation, Balanced, Poisson

CHOSEN: Mapping[str, type[Participation]] = MappingProxyType(
    {kind.name: kind for kind in (Schedule, Poisson, Allocation, Balanced, Available)}
)
"""Those that a scenario names as `federation.sampling`."""

PARTICIPATIONS: Mapping[str, type[Participation]] = MappingProxyType({**CHOSEN, Phases.name: Phases})
"""fedpriv's own: read-only, so that an extension cannot replace one."""

ADDED: dict[str, type[Participation]] = {}
"""Those of others."""

_OURS = (
    *("guarantee", "distance", "known", "promised", "charged", "secret", "allowed"),
    *("most", "single_pass", "first", "rows"),
)
_ADD_IT = "; for one of your own, name the file that adds it in FEDPRIV_IMPORT"


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
        for member in _OURS
        if inspect.getattr_static(kind, member) is not inspect.getattr_static(DrawnOrder, member)
    ]
    if theirs:
        raise InputError(
            f"add_participation: {kind.__name__} has a {theirs[0]!r} of its own; what a run is charged is "
            "DrawnOrder's, and yours are rounds_of, from_schedule, title and words"
        )
    ADDED[name] = kind
    changed()


def sampling_named(name: str) -> type[Participation] | None:
    """The class of that name for `federation.sampling`; extensions are imported for a name that is not known."""
    if name not in PARTICIPATIONS and name not in ADDED:
        load_extensions()
    return CHOSEN.get(name) or ADDED.get(name)


def sampling_of(name: str) -> type[Participation]:
    """The class of that name; InputError if there is none."""
    if (kind := sampling_named(name)) is None:
        raise InputError(f"sampling = {name!r}: accepted are {', '.join(map(repr, (*CHOSEN, *ADDED)))}")
    return kind


def sampled(name: str, order: Participation, keys: ParticipationKeys) -> Participation:
    """The participation that `name` makes of the declared `order`.

    InputError for one that `participation_from` would not give back, or that reads otherwise many records.
    """
    kind = sampling_of(name)
    found = kind.from_schedule(order, keys)
    if name in CHOSEN:
        return found
    if type(found) is not kind:
        raise InputError(f'federation.sampling = "{name}": its from_schedule makes a {type(found).__name__}')
    if (found.rounds, found.rounds_per_epoch) != (order.rounds, order.rounds_per_epoch):
        raise InputError(
            f'federation.sampling = "{name}": {found.rounds} rounds and {found.rounds_per_epoch} an epoch, and '
            f"the scenario has {order.rounds} and {order.rounds_per_epoch}"
        )
    with suppress(TypeError):
        if participation_from(json.loads(json.dumps(found.as_data()))) == found:
            return found
    raise InputError(
        f'federation.sampling = "{name}": what it writes (as_data) is not what it is read as (from_data); its '
        "fields are numbers, text, and tuples of them"
    )


def _added(name: Any, otherwise: Any) -> Any:
    """One's own name as it is; `otherwise` says which ones fedpriv has."""
    if isinstance(name, str) and name not in PARTICIPATIONS and sampling_named(name) is not None:
        return name
    return otherwise(name)


if TYPE_CHECKING:
    SamplingName = str
else:
    SamplingName = Annotated[Literal[tuple(CHOSEN)], WrapValidator(_added), PlainSerializer(str)]


def participation_from(data: Mapping[str, Any]) -> Participation:
    """The participation that `Participation.as_data` wrote; InputError if there is none of that name."""
    settings = dict(data)
    name = settings.pop("name")
    if (kind := PARTICIPATIONS.get(name) or sampling_named(name)) is None:
        raise InputError(f"ledger: sampling {name!r} is none of {', '.join(PARTICIPATIONS)}{_ADD_IT}")
    return kind.from_data(settings)
