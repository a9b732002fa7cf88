"""The table of mechanisms: a line each.  Name, words, options, JSON form and certificate are in its own file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field

from fedpriv.core.errors import InputError
from fedpriv.noise.anchored import AnchoredSquareRoot
from fedpriv.noise.buffered import BufferedOptions, BufferedToeplitz, LambdaCgd
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian, ScheduledGaussian, ScheduledOptions
from fedpriv.noise.differences import AlignedDifferences
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.phased import PhaseEnds
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.toeplitz import BandedInverseSquareRoot, BandedOptions, BandedSquareRoot
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
MECHANISMS = {kind.name: kind for kind in (*CHOSEN, *_OF_ONE_ALGORITHM)}


class MechanismOptions(BandedOptions, BufferedOptions, ScheduledOptions):
    """What scenarios can say of the mechanisms they name, all in one; each reads its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_vectors: Annotated[int, Field(ge=0, le=64)] = Field(
        4, description='the most vectors that what "auto" chooses, or "blt" fits, keeps from round to round'
    )


if TYPE_CHECKING:
    ChosenName = str
else:
    ChosenName = Literal[(*(kind.name for kind in CHOSEN), AUTO)]


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
    if name not in MECHANISMS:
        raise InputError(f"mechanism = {name!r}: accepted are {', '.join(repr(kind.name) for kind in CHOSEN)}")
    kind, roots = MECHANISMS[name], options.model_fields_set & BufferedOptions.model_fields.keys()
    if roots and not issubclass(kind, BufferedToeplitz):
        raise InputError(f'{min(roots)} is for mechanism = "blt" or "lambda-cgd", not for {name!r}')
    if options.noise_sizes and kind is not ScheduledGaussian:
        raise InputError(f'noise_sizes is for mechanism = "scheduled", not for {name!r}')
    return kind.of(workload, options)


def mechanism_from(data: Mapping[str, Any]) -> Mechanism:
    """The mechanism that `Mechanism.as_data` wrote; InputError if there is none of that name."""
    settings = dict(data)
    name = settings.pop("name")
    known = {**MECHANISMS, **{kind.__name__: kind for kind in MECHANISMS.values()}}  # fedpriv 0.1 wrote classes
    if name not in known:
        raise InputError(f"ledger: mechanism {name!r} is none of {', '.join(MECHANISMS)}")
    return known[name].from_data(settings)


def check_known(mechanism: Mechanism, algorithm: str) -> None:
    """InputError for a mechanism that `mechanism_from` would not give back: its claims could not be read again.

    A name alone says nothing: the class that a name of ours is read as has to be the one that makes the noise.
    """
    if type(mechanism) not in MECHANISMS.values():
        raise InputError(
            f"algorithm.name = {algorithm!r}: its mechanism {type(mechanism).__name__} is none of fedpriv's, and "
            f"its run could not be read back; today these can: {', '.join(MECHANISMS)}"
        )
