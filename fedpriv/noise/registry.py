"""Table of mechanisms, by name: those of fedpriv, and those that users add.

A mechanism adds noise B z to running sums A s, where s are the sums of a round's clipped contributions and
z are fresh vectors of noise.  With A = B C, its sensitivity is the largest distance by which one record moves C s.
Its certificate states the sensitivity.  A user's mechanism is checked before a run (`check_mechanism_claims`).
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
from pydantic import ConfigDict, Field, PlainSerializer, WrapValidator

from fedpriv.core.errors import InputError, refuse
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
"""Most rounds T of a mechanism that is measured, which takes T² numbers."""
_ROUNDING = 1e-6
"""Relative tolerance for the rounding of certificates, of B and of the solution C of B C = A."""


def check_mechanism_claims(mechanism: Mechanism, workload: Workload) -> None:
    """Check a user's mechanism against its own noise, measured on unit vectors.

    These are checked:

    * B, measured from `noise`, is lower-triangular, with a diagonal above 0 and of at least `fresh_std`.
    * A round takes one fresh vector, and a state holds at most `memory_vectors` vectors.
    * `movement` and `assumption` are None, and `clipped_parts` is empty.
    * `certified` and `attained_sensitivity` are at least the sensitivity of C = B^-1 A, or a bound of it where the
      sensitivity is not known exactly.

    Comparisons with `fresh_std` and with the sensitivity allow for a relative 1e-6 of rounding.

    Guarantee: in a public order, for any queries, and for the clips and the rounds of the workload, a mechanism
    that passes has a certificate that is not below the sensitivity of C = B^-1 A by more than a relative 1e-6, for
    the B that its `noise` applies to unit vectors and the C that floating point finds by forward substitution.

    Args:
        mechanism: Mechanism of a user.
        workload: Running sums, with public participation and at most 2,000 rounds.

    Raises:
        InputError: A claim is wrong or cannot be measured, or the workload has secret participation or too many
            rounds.
    """
    from scipy.linalg import solve_triangular  # the command line starts without it

    name = f"mechanism {mechanism.name!r}"
    refuse(
        {
            f"{name}: secret participation is accounted for with fedpriv's own mechanisms only": (
                getattr(workload.schedule, "secret", False)
            ),
            f"{name}: a mechanism of one's own promises its privacy for any queries and any loss": (
                mechanism.movement is not None or mechanism.assumption is not None
            ),
            f"{name}: a mechanism of one's own is for increments that are clipped as a whole": (
                bool(mechanism.clipped_parts)
            ),
            f"{name}: what a mechanism of one's own costs is measured, for at most {MAX_ROUNDS} rounds; here are "
            f"{workload.rounds}": workload.rounds > MAX_ROUNDS,
        }
    )
    rows, state_length = _noise_matrix(cast(Any, mechanism), workload.rounds)
    diagonal = np.diag(rows)
    if np.any(np.triu(rows, 1)) or not np.all(diagonal > 0.0):
        raise InputError(f"{name}: row t of B z adds a multiple above 0 of z_t, and no later vector")
    if not mechanism.fresh_std <= float(np.min(diagonal)) * (1.0 + _ROUNDING):
        min_fresh_text = format_lower(float(np.min(diagonal)))
        raise InputError(
            f"{name}: fresh_std = {format_upper(mechanism.fresh_std)}, and a round adds {min_fresh_text}"
        )
    if state_length > (memory_vectors := mechanism.memory_vectors(workload)):
        raise InputError(f"{name}: memory_vectors = {memory_vectors}, and a state holds {state_length}")
    c: Floats = solve_triangular(rows, _prefix_sum_matrix(workload), lower=True, check_finite=False)
    products = Columns(np.sum(c**2, axis=0), lambda rounds: np.abs(c[:, rounds].T @ c[:, rounds]))
    displacement = of_columns(products, workload).value if np.all(np.isfinite(products.squared_norms)) else np.inf
    # NaN of either one is refused.
    claim = np.minimum(mechanism.certified(workload).value, mechanism.attained_sensitivity(workload).value)
    if not claim >= displacement * (1.0 - _ROUNDING):
        raise InputError(
            f"{name}: its certificate says that a record moves C s by {claim:.6g} at most, and what it streams "
            f"is moved by {displacement:.6g}"
        )


def _prefix_sum_matrix(workload: Workload) -> Floats:
    """Return A, (T, T)."""
    rounds = np.arange(workload.rounds)
    lag = np.subtract.outer(rounds, rounds)
    in_same_period = np.equal.outer(rounds // workload.rounds_per_period, rounds // workload.rounds_per_period)
    return np.where((lag >= 0) & in_same_period, float(workload.decay) ** np.maximum(lag, 0), 0.0)


def _noise_matrix(mechanism: Mechanism, rounds: int) -> tuple[Floats, int]:
    """Measure B, (T, T), by running `noise` on unit vectors, and the most vectors of a state.

    Round t of `rounds` = T gets the unit vector e_t as its fresh vector, so that its noise is row t of B.

    Raises:
        InputError: A round takes stacked fresh vectors (`draws` is not None).
    """
    import torch

    state, rows, max_state_length = mechanism.start(), np.zeros((rounds, rounds)), 0
    for t, fresh in enumerate(torch.eye(rounds, dtype=torch.float64), start=1):
        if mechanism.draws(t) is not None:
            raise InputError(f"mechanism {mechanism.name!r}: a mechanism of one's own takes one vector a round")
        row, state = mechanism.noise(state, t, fresh)
        rows[t - 1], max_state_length = row.numpy(), max(max_state_length, len(state))
    return rows, max_state_length


SELECTABLE_MECHANISMS: tuple[type[Mechanism], ...] = (
    IndependentGaussian,
    ScheduledGaussian,
    BinaryTree,
    BandedSquareRoot,
    BandedInverseSquareRoot,
    LambdaCgd,
    BufferedToeplitz,
)
"""Mechanisms of fedpriv that a scenario can name, since `of` builds them from a workload and options."""

AUTO = "auto"
"""Name for which a fit before round 1 substitutes one of `SELECTABLE_MECHANISMS`, with its numbers."""

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
"""Mechanisms of fedpriv by name, read-only so that an extension cannot replace one."""
_BUILT_IN = frozenset({*MECHANISMS.values(), RoundedBanded})
USER_MECHANISMS: dict[str, type[Mechanism]] = {}
"""Mechanisms of users by name."""


def add_mechanism(kind: type[Mechanism]) -> None:
    """Add a mechanism to the table, for scenarios that name it and for reading back runs with it.

    A user's mechanism of the same name is replaced.

    Args:
        kind: Frozen dataclass and subclass of `Mechanism`, with fields of numbers, text and tuples.

    Raises:
        InputError: The name is one of fedpriv's or "auto", is empty, has other characters than a-z, 0-9 and -, or
            begins with -, or the class neither is a dataclass nor has one as a base, is no subclass of
            `Mechanism`, or has no description (`words`).
    """
    if Mechanism not in getattr(kind, "__mro__", ()) or not dataclasses.is_dataclass(kind):
        raise InputError(
            f"add_mechanism: expected a class of mechanisms, found {kind!r}; docs/adding-a-mechanism.md"
        )
    name = getattr(kind, "name", "")
    if name in {*MECHANISMS, AUTO}:
        raise InputError(f"add_mechanism: {name!r} is a mechanism of fedpriv; give yours another name")
    if (
        not isinstance(name, str)
        or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name)
        or not getattr(kind, "words", "")
    ):
        raise InputError(
            f"add_mechanism: {kind.__name__} has the name {name!r}: needed are `words`, and a `name` of "
            "lower-case letters, digits and dashes, without a dash in front"
        )
    USER_MECHANISMS[name] = kind
    note_table_change()


def lookup_mechanism_class(name: str) -> type[Mechanism] | None:
    """Return the mechanism class of a name, or None.

    Extensions are imported for a name that is not in the table yet, except for "auto".

    Raises:
        InputError: The import of an extension fails.
    """
    if name not in MECHANISMS and name not in USER_MECHANISMS and name != AUTO:
        load_extensions()
    return MECHANISMS.get(name) or USER_MECHANISMS.get(name)


class MechanismOptions(BandedOptions, BufferedOptions, ScheduledOptions):
    """Keys of a scenario for its mechanism, in one model."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_vectors: Annotated[int, Field(ge=0, le=64)] = Field(
        4,
        description='most vectors of noise from round to round, for "auto", and for "blt" and "lambda-cgd" '
        "without theta",
    )


def _accept_user_name(name: Any, next_validator: Any) -> Any:
    """Accept a name that a user added, and leave others to the next validator."""
    if (
        isinstance(name, str)
        and name not in MECHANISMS
        and name != AUTO
        and lookup_mechanism_class(name) is not None
    ):
        return name
    return next_validator(name)


if TYPE_CHECKING:
    ChosenName = str
else:
    ChosenName = Annotated[
        Literal[(*(kind.name for kind in SELECTABLE_MECHANISMS), AUTO)],
        WrapValidator(_accept_user_name),
        PlainSerializer(str),
    ]


def needs_fit(name: str, options: MechanismOptions) -> bool:
    """Whether numbers have to be fitted before `make_mechanism` can build the mechanism.

    Args:
        name: Name of a mechanism in a scenario.
        options: Mechanism keys of the scenario.

    Example:
        >>> needs_fit("lambda-cgd", MechanismOptions()), needs_fit("tree", MechanismOptions())
        (True, False)
    """
    if name == ScheduledGaussian.name:
        return not options.noise_sizes
    return name == AUTO or (name in (LambdaCgd.name, BufferedToeplitz.name) and not options.theta)


def make_mechanism(name: str, workload: Workload, options: MechanismOptions) -> Mechanism:
    """Build the mechanism that a scenario names with numbers that need no fit (`needs_fit`).

    Args:
        name: Name of the mechanism.
        workload: Running sums.
        options: Options of the scenario.

    Raises:
        InputError: The name is "auto" or unknown, or of a mechanism that cannot be chosen, numbers are missing or
            do not fit, or keys of buffered or scheduled noise are given for another mechanism.

    Example:
        >>> from fedpriv.participation.orders import FixedOrder
        >>> workload = Workload(FixedOrder(8, 8), decay=1.0, clips=np.ones(8))
        >>> mechanism = make_mechanism("tree", workload, MechanismOptions())
        >>> mechanism.certified(workload).value
        2.0
    """
    if name == AUTO:
        raise InputError(
            'mechanism = "auto": it is fitted before a run starts, and what is sent then names the mechanism and '
            "its numbers; nothing is fitted here"
        )
    if (kind := lookup_mechanism_class(name)) is None or kind in _ALGORITHM_MECHANISMS:
        raise InputError(
            f"mechanism = {name!r}: {'it belongs to one algorithm; ' if kind else ''}accepted are "
            f"{', '.join(repr(kind.name) for kind in (*SELECTABLE_MECHANISMS, *USER_MECHANISMS.values()))}"
        )
    roots = options.model_fields_set & BufferedOptions.model_fields.keys()
    if roots and not issubclass(kind, BufferedToeplitz):
        raise InputError(f'{min(roots)} is for mechanism = "blt" or "lambda-cgd", not for {name!r}')
    if options.noise_sizes and kind is not ScheduledGaussian:
        raise InputError(f'noise_sizes is for mechanism = "scheduled", not for {name!r}')
    return kind.of(workload, options)


def mechanism_from_data(data: Mapping[str, Any]) -> Mechanism:
    """Build a mechanism from the output of `Mechanism.as_data`, as a ledger stores it.

    Args:
        data: "name" and the fields of the mechanism's class.

    Raises:
        InputError: No mechanism has this name, or the class refuses a number.
        TypeError: A field is missing, unknown or of another type.
        KeyError: There is no "name", or "phase-ends" has no "phases" with "lengths".
    """
    settings = dict(data)
    name = settings.pop("name")
    if (kind := lookup_mechanism_class(name)) is None:
        raise InputError(f"ledger: mechanism {name!r} is none of {', '.join(MECHANISMS)}{_IMPORT_HINT}")
    return kind.from_data(settings)


_IMPORT_HINT = "; for one of your own, name the file that adds it in FEDPRIV_IMPORT"


def check_readable(mechanism: Mechanism, workload: Workload, algorithm: str) -> None:
    """Check that a user's mechanism can be read back from a ledger, and that its claims hold.

    Mechanisms of fedpriv pass.  A user's class has to be in the table under its name, to survive a round trip
    through JSON with its certificate, and to pass `check_mechanism_claims`.

    Args:
        mechanism: Mechanism of the run.
        workload: Running sums.
        algorithm: Name of the algorithm, for messages.

    Raises:
        InputError: The mechanism does not pass.
    """
    if (kind := type(mechanism)) in _BUILT_IN:
        return
    if USER_MECHANISMS.get(mechanism.name) is not kind:
        raise InputError(
            f"algorithm.name = {algorithm!r}: its mechanism {kind.__name__} is none of fedpriv's, and its run "
            f"could not be read back; add it with fedpriv.add_mechanism({kind.__name__}), or take one of "
            f"{', '.join(MECHANISMS)}"
        )
    check_mechanism_claims(mechanism, workload)
    try:
        read_back = mechanism_from_data(json.loads(json.dumps(mechanism.as_data())))
        # Attributes that no field gives are lost, and `==` need not see them.
        is_same = (read_back, hash(read_back), read_back.certified(workload)) == (
            mechanism,
            hash(mechanism),
            mechanism.certified(workload),
        )
    except TypeError:
        is_same = False
    if not is_same:
        raise InputError(
            f"mechanism {mechanism.name!r}: what it writes (as_data) is not what it is read as (from_data); its "
            "fields are numbers, text, and tuples of them"
        )


def integer_form(mechanism: Mechanism, workload: Workload) -> Factorization:
    """Return the factorization with C on integers.

    Guarantee: the factorization is that of a class of fedpriv.

    Args:
        mechanism: Mechanism of the run.
        workload: Running sums in real units.

    Raises:
        InputError: The mechanism is none of fedpriv's, or has no integer form.
    """
    if type(mechanism) not in _BUILT_IN:
        raise InputError(
            f"mechanism {mechanism.name!r} is none of fedpriv's, and those alone run on integers: take one, or "
            "floating point in a simulation"
        )
    return mechanism.integer(workload)
