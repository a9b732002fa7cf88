"""The table of mechanisms: a line each, and those that others add.

Name, words, options, JSON form, certificate and the integer half of a mechanism are in its own file.

Measure the price of a mechanism of one's own from what it streams; its class is never believed.

B is what `noise` makes of one unit vector a round, and C = B^-1 A: no certificate may be below what the columns of
that C cost.  This is a check of the class, since code can do anything to other vectors.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
from pydantic import ConfigDict, Field, PlainSerializer, WrapValidator

from fedpriv.core.errors import InputError
from fedpriv.core.extensions import load_extensions, note_table_change
from fedpriv.core.figures import format_lower, format_upper
from fedpriv.noise.buffered import BufferedOptions, BufferedToeplitz, LambdaCgd
from fedpriv.noise.diagonal import (
    IndependentGaussian,
    LeafGaussian,
    PhaseEnds,
    ScheduledGaussian,
    ScheduledOptions,
)
from fedpriv.noise.differences import AlignedDifferences
from fedpriv.noise.mechanism import Columns, Factorization, Mechanism
from fedpriv.noise.sensitivity import of_columns
from fedpriv.noise.series import Floats, Workload
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.toeplitz import (
    AnchoredSquareRoot,
    BandedInverseSquareRoot,
    BandedOptions,
    BandedSquareRoot,
    RoundedBanded,
)
from fedpriv.noise.tree import BinaryTree, PaperTree

MAX_ROUNDS = 2000
"""T² numbers are measured."""
_ROUNDING = 1e-6
"""Relative: more than a certificate in floats and a solved triangle differ by."""


def check_mechanism_claims(mechanism: Mechanism, workload: Workload) -> None:
    """InputError for a mechanism that does not do what it says of itself in a workload, as far as can be measured.

    Guarantee: what passes has a certificate that is not below the sensitivity of C = B^-1 A, for the B that its
    `noise` applies to unit vectors, and is asked in public orders, for any queries.
    """
    name = f"mechanism {mechanism.name!r}"
    if getattr(workload.schedule, "secret", False):
        raise InputError(f"{name}: secret participation is accounted for with fedpriv's own mechanisms only")
    if mechanism.movement is not None or mechanism.assumption is not None:
        raise InputError(f"{name}: a mechanism of one's own promises its privacy for any queries and any loss")
    if workload.rounds > MAX_ROUNDS:
        raise InputError(
            f"{name}: what a mechanism of one's own costs is measured, for at most {MAX_ROUNDS} rounds; here are "
            f"{workload.rounds}"
        )
    rows, most = _noise_matrix(cast(Any, mechanism), workload.rounds)
    fresh = np.diag(rows)
    if np.any(np.triu(rows, 1)) or not np.all(fresh > 0.0):
        raise InputError(f"{name}: row t of B z adds a multiple above 0 of z_t, and no later vector")
    if mechanism.fresh_std > float(np.min(fresh)) * (1.0 + _ROUNDING):
        adds = format_lower(float(np.min(fresh)))
        raise InputError(f"{name}: fresh_std = {format_upper(mechanism.fresh_std)}, and a round adds {adds}")
    if most > (said := mechanism.memory_vectors(workload)):
        raise InputError(f"{name}: memory_vectors = {said}, and a state holds {most}")
    c: Floats = np.linalg.solve(rows, _prefix_sum_matrix(workload)).astype(np.float64)
    products = Columns(np.sum(c**2, axis=0), lambda held: np.abs(c[:, held].T @ c[:, held]))
    moved = of_columns(products, workload).value
    charged = min(mechanism.certified(workload).value, mechanism.charged_sensitivity(workload).value)
    if not charged >= moved * (1.0 - _ROUNDING):
        raise InputError(
            f"{name}: its certificate says that a record moves C s by {charged:.6g} at most, and what it streams "
            f"is moved by {moved:.6g}"
        )


def _prefix_sum_matrix(workload: Workload) -> Floats:
    """A, (T, T)."""
    rounds = np.arange(workload.rounds)
    lag = np.subtract.outer(rounds, rounds)
    same = np.equal.outer(rounds // workload.rounds_per_period, rounds // workload.rounds_per_period)
    return np.where((lag >= 0) & same, float(workload.decay) ** np.maximum(lag, 0), 0.0)


@lru_cache(maxsize=4)
def _noise_matrix(mechanism: Mechanism, rounds: int) -> tuple[Floats, int]:
    """B, (T, T), of unit vectors that `noise` gets; and the most vectors that a state holds."""
    import torch

    state, rows, most = mechanism.start(), np.zeros((rounds, rounds)), 0
    for t, fresh in enumerate(torch.eye(rounds, dtype=torch.float64), start=1):
        if mechanism.draws(t) is not None:
            raise InputError(f"mechanism {mechanism.name!r}: a mechanism of one's own takes one vector a round")
        row, state = mechanism.noise(state, t, fresh)
        rows[t - 1], most = row.numpy(), max(most, len(state))
    return rows, most


SELECTABLE_MECHANISMS: tuple[type[Mechanism], ...] = (
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

_ALGORITHM_MECHANISMS: tuple[type[Mechanism], ...] = (
    LeafGaussian,
    AnchoredSquareRoot,
    PaperTree,
    PhaseEnds,
    SlidingDifferences,
    AlignedDifferences,
)
MECHANISMS: Mapping[str, type[Mechanism]] = MappingProxyType(
    {kind.name: kind for kind in (*SELECTABLE_MECHANISMS, *_ALGORITHM_MECHANISMS)}
)
"""fedpriv's own: read-only, so that an extension cannot replace one."""
_BUILT_IN = frozenset({*MECHANISMS.values(), RoundedBanded})
USER_MECHANISMS: dict[str, type[Mechanism]] = {}
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
    USER_MECHANISMS[name] = kind
    note_table_change()


def lookup_mechanism_class(name: str) -> type[Mechanism] | None:
    """The class of that name, one's own included; extensions are imported for a name that is not known here."""
    if name not in MECHANISMS and name not in USER_MECHANISMS and name != AUTO:
        load_extensions()
    return MECHANISMS.get(name) or USER_MECHANISMS.get(name)


class MechanismOptions(BandedOptions, BufferedOptions, ScheduledOptions):
    """Keys of a scenario for the mechanisms it names, all in one; each mechanism reads its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_vectors: Annotated[int, Field(ge=0, le=64)] = Field(
        4, description='the most vectors that what "auto" chooses, or "blt" fits, keeps from round to round'
    )


def _accept_user_name(name: Any, otherwise: Any) -> Any:
    """One's own name as it is; `otherwise` says which ones fedpriv has."""
    if (
        isinstance(name, str)
        and name not in MECHANISMS
        and name != AUTO
        and lookup_mechanism_class(name) is not None
    ):
        return name
    return otherwise(name)


if TYPE_CHECKING:
    ChosenName = str
else:
    ChosenName = Annotated[
        Literal[(*(kind.name for kind in SELECTABLE_MECHANISMS), AUTO)],
        WrapValidator(_accept_user_name),
        PlainSerializer(str),
    ]


def needs_fit(name: str, options: MechanismOptions) -> bool:
    """Whether numbers have to be fitted before `chosen_mechanism` can make it."""
    if name == ScheduledGaussian.name:
        return not options.noise_sizes
    return name == AUTO or (name in (LambdaCgd.name, BufferedToeplitz.name) and not options.theta)


def make_mechanism(name: str, workload: Workload, options: MechanismOptions) -> Mechanism:
    """The mechanism that a person named; InputError if there is none, or it cannot be chosen."""
    if name == AUTO:
        raise InputError(
            'mechanism = "auto": it is fitted before a run starts, and what is sent then names the mechanism and '
            "its numbers; nothing is fitted here"
        )
    if (kind := lookup_mechanism_class(name)) is None:
        raise InputError(
            f"mechanism = {name!r}: accepted are {', '.join(repr(kind.name) for kind in SELECTABLE_MECHANISMS)}"
        )
    roots = options.model_fields_set & BufferedOptions.model_fields.keys()
    if roots and not issubclass(kind, BufferedToeplitz):
        raise InputError(f'{min(roots)} is for mechanism = "blt" or "lambda-cgd", not for {name!r}')
    if options.noise_sizes and kind is not ScheduledGaussian:
        raise InputError(f'noise_sizes is for mechanism = "scheduled", not for {name!r}')
    return kind.of(workload, options)


def mechanism_from_data(data: Mapping[str, Any]) -> Mechanism:
    """The mechanism that `Mechanism.as_data` wrote; InputError if there is none of that name."""
    settings = dict(data)
    name = settings.pop("name")
    if (kind := lookup_mechanism_class(name)) is None:
        raise InputError(f"ledger: mechanism {name!r} is none of {', '.join(MECHANISMS)}{_IMPORT_HINT}")
    return kind.from_data(settings)


_IMPORT_HINT = "; for one of your own, name the file that adds it in FEDPRIV_IMPORT"


def check_readable(mechanism: Mechanism, workload: Workload, algorithm: str) -> None:
    """InputError for a mechanism that `mechanism_from` would not give back, or that is not what it says.

    A name alone says nothing: the class that a name is read as has to be the one that makes the noise.
    """
    if type(mechanism) in _BUILT_IN:
        return
    kind = type(mechanism)
    if USER_MECHANISMS.get(mechanism.name) is not kind:
        raise InputError(
            f"algorithm.name = {algorithm!r}: its mechanism {kind.__name__} is none of fedpriv's, and its run "
            f"could not be read back; add it with fedpriv.add_mechanism({kind.__name__}), or take one of "
            f"{', '.join(MECHANISMS)}"
        )
    try:
        again = mechanism_from_data(json.loads(json.dumps(mechanism.as_data())))
        same = again == mechanism and hash(again) == hash(mechanism)
    except TypeError:
        same = False
    if not same:
        raise InputError(
            f"mechanism {mechanism.name!r}: what it writes (as_data) is not what it is read as (from_data); its "
            "fields are numbers, text, and tuples of them"
        )
    check_mechanism_claims(mechanism, workload)


def integer_form(mechanism: Mechanism, workload: Workload) -> Factorization:
    """The integer half of a mechanism; InputError if it has none.

    Guarantee: it is that of a class of fedpriv, whose file proves its sensitivity.
    """
    if type(mechanism) not in _BUILT_IN:
        raise InputError(
            f"mechanism {mechanism.name!r} is none of fedpriv's, and those alone run on integers: take one, or "
            "floating point in a simulation"
        )
    return mechanism.integer(workload)
