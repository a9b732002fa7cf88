"""The table of participations: a line each.  JSON form, rates, accounting and words are in its own file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fedpriv.errors import InputError
from fedpriv.participation.allocation import Allocation
from fedpriv.participation.available import Available
from fedpriv.participation.base import Participation
from fedpriv.participation.fixed_order import Schedule
from fedpriv.participation.phases import Phases
from fedpriv.participation.poisson import Poisson

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
