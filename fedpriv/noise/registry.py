"""The table of mechanisms: a line each, and those that others add.

Name, words, options, JSON form, certificate and the integer half of a mechanism are in its own file.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainSerializer, WrapValidator

from fedpriv.core.errors import InputError
from fedpriv.core.extensions import changed, load_extensions
from fedpriv.noise.buffered import BufferedOptions, BufferedToeplitz, LambdaCgd
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian, ScheduledGaussian, ScheduledOptions
from fedpriv.noise.differences import AlignedDifferences
from fedpriv.noise.measured import check_noise
from fedpriv.noise.mechanism import Factored, Mechanism
from fedpriv.noise.phased import PhaseEnds
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.toeplitz import (
    AnchoredSquareRoot,
    BandedInverseSquareRoot,
    BandedOptions,
    BandedSquareRoot,
    RoundedBanded,
)
from fedpriv.noise.tree import BinaryTree, PaperTree
from fedpriv.noise.workload import Workload

CHOSEN: tuple[type[Mechanism], ...] = (
    IndependentGaussian,
    ScheduledGaussian,
    BinaryTree,
    BandedSquareRoot,
    BandedInverseSquareRoot,
    LambdaCgd,
    BufferedToeplitz,
)
"""Those that a scenario can name: `of` builds them from any workload."""

AUTO = "auto"
"""No mechanism: a fit replaces it by one of them, with its numbers, before round 1."""

_OF_ONE_ALGORITHM: tuple[type[Mechanism], ...] = (
    LeafGaussian,
    AnchoredSquareRoot,
    PaperTree,
    PhaseEnds,
    SlidingDifferences,
    AlignedDifferences,
)
MECHANISMS: Mapping[str, type[Mechanism]] = MappingProxyType(
    {kind.name: kind for kind in (*CHOSEN, *_OF_ONE_ALGORITHM)}
)
"""fedpriv's own: read-only, so that an extension cannot replace one."""
_OURS = frozenset({*MECHANISMS.values(), RoundedBanded})
ADDED: dict[str, type[Mechanism]] = {}
"""Those of others."""


def add_mechanism(kind: type[Mechanism]) -> None:
    """Give a mechanism of one's own its name: scenarios can then ask for it, and runs with it can be read back.

    `kind` is a frozen dataclass that follows `Mechanism`, with fields of numbers, text and tuples.  One's own
    mechanism of that name is replaced; InputError for the name of one of fedpriv's, or for another class.
    """
    if Mechanism not in getattr(kind, "__mro__", ()) or not dataclasses.is_dataclass(kind):
        raise InputError(
            f"add_mechanism: expected a class of mechanisms, found {kind!r}; docs/adding-a-mechanism.md"
        )
    name = getattr(kind, "name", "")
    if name in {*MECHANISMS, AUTO}:
        raise InputError(f"add_mechanism: {name!r} is a mechanism of fedpriv; give yours another name")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) or not getattr(kind, "words", ""):
        raise InputError(
            f"add_mechanism: {kind.__name__} has the name {name!r}: needed are `words`, and a `name` of "
            "lower-case letters, digits and dashes"
        )
    ADDED[name] = kind
    changed()


def mechanism_named(name: str) -> type[Mechanism] | None:
    """The class of that name, one's own included; extensions are imported for a name that is not known here."""
    if name not in MECHANISMS and name not in ADDED and name != AUTO:
        load_extensions()
    return MECHANISMS.get(name) or ADDED.get(name)


class MechanismOptions(BandedOptions, BufferedOptions, ScheduledOptions):
    """Keys of a scenario for the mechanisms it names, all in one; each mechanism reads its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_vectors: Annotated[int, Field(ge=0, le=64)] = Field(
        4, description='the most vectors that what "auto" chooses, or "blt" fits, keeps from round to round'
    )


def _added(name: Any, otherwise: Any) -> Any:
    """One's own name as it is; `otherwise` says which ones fedpriv has."""
    if isinstance(name, str) and name not in MECHANISMS and name != AUTO and mechanism_named(name) is not None:
        return name
    return otherwise(name)


if TYPE_CHECKING:
    ChosenName = str
else:
    ChosenName = Annotated[
        Literal[(*(kind.name for kind in CHOSEN), AUTO)], WrapValidator(_added), PlainSerializer(str)
    ]


def unfitted(name: str, options: MechanismOptions) -> bool:
    """Whether numbers have to be fitted before `chosen_mechanism` can make it."""
    if name == ScheduledGaussian.name:
        return not options.noise_sizes
    return name == AUTO or (name in (LambdaCgd.name, BufferedToeplitz.name) and not options.theta)


def chosen_mechanism(name: str, workload: Workload, options: MechanismOptions) -> Mechanism:
    """The mechanism that a person named; InputError if there is none, or it cannot be chosen."""
    if name == AUTO:
        raise InputError(
            'mechanism = "auto": it is fitted before a run starts, and what is sent then names the mechanism and '
            "its numbers; nothing is fitted here"
        )
    if (kind := mechanism_named(name)) is None:
        raise InputError(f"mechanism = {name!r}: accepted are {', '.join(repr(kind.name) for kind in CHOSEN)}")
    roots = options.model_fields_set & BufferedOptions.model_fields.keys()
    if roots and not issubclass(kind, BufferedToeplitz):
        raise InputError(f'{min(roots)} is for mechanism = "blt" or "lambda-cgd", not for {name!r}')
    if options.noise_sizes and kind is not ScheduledGaussian:
        raise InputError(f'noise_sizes is for mechanism = "scheduled", not for {name!r}')
    return kind.of(workload, options)


def mechanism_from(data: Mapping[str, Any]) -> Mechanism:
    """The mechanism that `Mechanism.as_data` wrote; InputError if there is none of that name."""
    settings = dict(data)
    name = settings.pop("name")
    if (kind := mechanism_named(name)) is None:
        raise InputError(f"ledger: mechanism {name!r} is none of {', '.join(MECHANISMS)}{_ADD_IT}")
    return kind.from_data(settings)


_ADD_IT = "; for one of your own, name the file that adds it in FEDPRIV_IMPORT"


def check_known(mechanism: Mechanism, workload: Workload, algorithm: str) -> None:
    """InputError for a mechanism that `mechanism_from` would not give back, or that is not what it says.

    A name alone says nothing: the class that a name is read as has to be the one that makes the noise.
    """
    if type(mechanism) in _OURS:
        return
    kind = type(mechanism)
    if ADDED.get(mechanism.name) is not kind:
        raise InputError(
            f"algorithm.name = {algorithm!r}: its mechanism {kind.__name__} is none of fedpriv's, and its run "
            f"could not be read back; add it with fedpriv.add_mechanism({kind.__name__}), or take one of "
            f"{', '.join(MECHANISMS)}"
        )
    try:
        again = mechanism_from(json.loads(json.dumps(mechanism.as_data())))
        same = again == mechanism and hash(again) == hash(mechanism)
    except TypeError:
        same = False
    if not same:
        raise InputError(
            f"mechanism {mechanism.name!r}: what it writes (as_data) is not what it is read as (from_data); its "
            "fields are numbers, text, and tuples of them"
        )
    check_noise(mechanism, workload)


def integer_form(mechanism: Mechanism, workload: Workload) -> Factored:
    """The integer half of a mechanism; InputError if it has none.

    Guarantee: it is that of a class of fedpriv, whose file proves its sensitivity.
    """
    if type(mechanism) not in _OURS:
        raise InputError(
            f"mechanism {mechanism.name!r} is none of fedpriv's, and those alone run on integers: take one, or "
            "floating point in a simulation"
        )
    return mechanism.integer(workload)
