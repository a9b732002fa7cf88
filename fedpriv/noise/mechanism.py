"""A mechanism adds correlated Gaussian noise to a stream of running sums, in floats and on integers.

One algebra for all: the running sums are A s, where row t of the lower-triangular workload A holds the decays
and s the increments.  A mechanism is a factorization A = B C; it releases A s + B z with independent Gaussian
z_t, which is post-processing of C s + z.  Streaming, one fresh vector z_t comes in each round and row t of B z
goes out.  A mechanism is one file: its noise (B), its certificate (how far one record can move C s), and C on
integers, if it has one.

Factors D_t lengthen short columns of C: late clips that rise, or late noise that shrinks.  C diag(D) with clips s
is C with clips s · D, so one D serves both: clip S · D_t at the same noise (`late_clip = "column"`), or the noise
of increment t divided by D_t (`BufferedToeplitz.column_scale`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.noise import series
from fedpriv.noise.integers.strategies import IntegerStrategy, Lattice, participations_per_record
from fedpriv.noise.series import Floats, Workload, tile_periods
from fedpriv.participation.orders import FixedOrder

if TYPE_CHECKING:  # the algebra and the command line start without torch
    from torch import Tensor


_MAX_STEPS = 1000
_SETTLED_CHANGE = 1e-12
_MAX_PARTICIPATIONS = 2000  # of one record: its inner products are the square of that

InnerProducts = Callable[[NDArray[np.int64]], Floats]
"""⟨C_i, C_j⟩ ≥ 0 of some rounds, counted from 0: (n,) -> (n, n)."""


class Columns(NamedTuple):
    """Facts about C that certificates need: squared column norms (T,), and inner products of columns."""

    squared_norms: Floats
    inner: InnerProducts


def clip_multipliers(columns: Columns, workload: Workload) -> Floats:
    """D_t by which the clips of `workload` can be multiplied at the same sensitivity; (T,).

    InputError where no such factors are known: sums that restart, participations in no fixed order, several passes
    with unequal clips.
    """
    if workload.period is not None:
        raise InputError('late_clip = "column": the sums restart, and no factors are known for them')
    if workload.public_order.single_pass:
        return column_scale(columns.squared_norms, workload)
    return fixed_order_scale(columns.inner, workload)


def column_scale(squared_norms: Floats, workload: Workload) -> Floats:
    """D for one participation of every record: all columns, times their clips, become as long as the longest.

    `squared_norms` are the squared column norms of C, (T,).  Every D_t is at least 1.

    Guarantee: the worst record costs what it cost without D, whatever the clips are.
    """
    if not workload.public_order.single_pass:
        raise InputError("column scale: records take part more than once; their scale is fixed_order_scale")
    squares = squared_norms if workload.equal_clips else workload.clips**2 * squared_norms
    return np.asarray(np.sqrt(np.max(squares) / squares), np.float64)


def fixed_order_scale(inner: InnerProducts, workload: Workload) -> Floats:
    """D for several passes in a fixed order with equal clips: of every record the largest Π D_t; (T,).

    Some factors are below 1: late clips are not only raised, clips are redistributed over a record's rounds.

    Guarantee: every record costs what the worst one cost without D.
    """
    schedule, rounds = workload.schedule, workload.rounds
    if not isinstance(schedule, FixedOrder) or not workload.equal_clips:
        raise InputError("column scale: several passes need a fixed order and the same clip in every round")
    if rounds > _MAX_PARTICIPATIONS * schedule.rounds_per_epoch:
        raise InputError(f"column scale: records take part more than {_MAX_PARTICIPATIONS} times")
    own = [
        np.arange(place, rounds, schedule.rounds_per_epoch)
        for place in range(min(schedule.rounds_per_epoch, rounds))
    ]
    products = [inner(held) for held in own]
    squared_norm = max(float(np.sum(product)) for product in products)
    scale = np.empty(rounds)
    for held, product in zip(own, products, strict=True):
        scale[held] = _record_scale(product, squared_norm)
    return scale


def toeplitz_columns(coefficients: Floats, workload: Workload) -> Columns:
    """Of a lower-triangular Toeplitz C with these coefficients, 0 beyond their end, restarted with the sums."""
    squared_norms = tile_periods(
        workload, lambda rounds: series.column_squared_norms(coefficients[:rounds], rounds)
    )
    return Columns(squared_norms, toeplitz_inner(coefficients, workload.rounds, workload.period))


def toeplitz_inner(coefficients: Floats, rounds: int, block: int | None = None) -> InnerProducts:
    """Of a lower-triangular Toeplitz C with these coefficients, 0 beyond their end; `block` rounds per restart."""
    length = rounds if block is None else min(block, rounds)
    padded = np.zeros(length)
    padded[: len(coefficients)] = coefficients[:length]
    sums: dict[int, Floats] = {}

    def inner(held: NDArray[np.int64]) -> Floats:
        start = held // length * length
        last = np.minimum(start + length, rounds) - 1 - held  # rounds of the block that follow
        fewer, lag = np.minimum.outer(last, last).ravel(), np.abs(np.subtract.outer(held, held)).ravel()
        lag[np.not_equal.outer(start, start).ravel()] = length  # of two blocks: nothing in common
        products, order = np.zeros(lag.shape), np.argsort(lag, kind="stable")
        distances, firsts = np.unique(lag[order], return_index=True)
        for distance, here in zip(distances.tolist(), np.split(order, firsts[1:]), strict=True):
            if distance == length:
                break
            if distance not in sums:
                sums[distance] = np.cumsum(padded[: length - distance] * padded[distance:])
            products[here] = sums[distance][fewer[here]]
        return products.reshape(len(held), len(held))

    return inner


def _record_scale(inner: Floats, squared_norm: float) -> Floats:
    """1/D_i is proportional to Σ_j ⟨C_i, C_j⟩ D_j where Σ log D is the largest at one squared norm."""
    scale = np.ones(len(inner))
    for _ in range(_MAX_STEPS):
        following = np.sqrt(scale / (inner @ scale))
        settled = np.max(np.abs(following / scale - 1.0)) <= _SETTLED_CHANGE
        scale = following
        if settled:
            break
    return np.asarray(scale * np.sqrt(squared_norm / (scale @ inner @ scale)), np.float64)


MechanismState = tuple["Tensor", ...]
"""A flat tuple of vectors shaped like the fresh ones, its length a function of t: silos store it as it is."""


class Sensitivity(NamedTuple):
    """Distance that one record can move C s, and the reason."""

    value: float
    exact: bool
    """Whether the distance is attained; otherwise `value` is an upper bound."""
    reason: str


class ColumnBlocks(NamedTuple):
    """The columns of a C whose columns each reach over few rounds."""

    bands: int
    """Column t has entries in rounds t … t + bands - 1 only."""
    norms: Floats
    """Their l2 norms, shape (T,)."""


class Mechanism(Protocol):
    """A streaming factorization of the workload: a frozen dataclass, of which `registry` has a line."""

    name: ClassVar[str]
    """In scenarios, ledgers and reports."""
    words: ClassVar[str]
    """Words of a report for its noise."""
    movement: float | None = None
    """The sensitivity holds if queries move by at most this a round, which silos check; None: for any queries."""

    fades: ClassVar[bool] = False
    """Whether C ≥ 0 has no end to its bands and its columns fade: `columns` says by how much two overlap."""

    @property
    def assumption(self) -> str | None:
        """Assumption of the sensitivity about the loss and the arithmetic, as a sentence; None: nothing at all.

        Guarantee: where it is None, the sensitivity rests on clipping alone.  A silo that is to promise something
        whatever it is asked takes no other mechanism.
        """
        return None

    @property
    def fresh_std(self) -> float:
        """A lower bound of the standard deviation that a round's fresh vectors add to its row of B z, for unit z.

        0 where a mechanism does not say better: then nothing is known of what is new in a release.
        """
        return 0.0

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        """The mechanism for a workload, with the `MechanismOptions` of a scenario; InputError if it takes more."""
        raise InputError(f"mechanism = {cls.name!r}: it belongs to one algorithm and cannot be chosen")

    @classmethod
    def comparisons(cls, workload: Workload, options: Any) -> dict[str, Self]:
        """Those worth a line in a comparison, by `label`; `options` are the defaults."""
        one = cls.of(workload, options)
        return {one.label: one}

    def options(self) -> dict[str, Any]:
        """The keys of a scenario, beside the name, from which `of` makes it again; numbers as JSON has them."""
        return {}

    def columns(self, workload: Workload) -> Columns:
        """Facts about the columns of C; InputError if none are known."""
        raise InputError(f"mechanism = {self.name!r}: the columns of its strategy matrix are not known")

    @property
    def label(self) -> str:
        """The name with what tells two of a kind apart."""
        return self.name

    def as_data(self) -> dict[str, Any]:
        """Plain data, from which `registry.mechanism_from` makes it again."""
        data: Any = self
        return {"name": self.name, **dataclasses.asdict(data)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_data`, whose name is left out: fields are numbers, text, and tuples of them."""
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})

    def certified(self, workload: Workload) -> Sensitivity:
        """`sensitivity` together with its certificate."""
        ...

    def charged_sensitivity(self, workload: Workload) -> Sensitivity:
        """`certified`, or less where that charges more than a record can move C s, as a paper's constants do."""
        return self.certified(workload)

    def sensitivity(self, workload: Workload) -> float:
        """The l2 distance by which one record can move C s, if zero-out moves its increment by its clip norm.

        Noise z_t ~ N(0, σ² I) then gives exactly (sensitivity / σ)-GDP under zero-out and (2 sensitivity / σ)
        under replace-one, for everything released over the whole run.
        """
        return self.certified(workload).value

    def blocks(self, workload: Workload) -> ColumnBlocks | None:
        """The columns of C, where what an increment moves ends after a few rounds; None where it may not.

        Guarantee: increments of rounds that lie `bands` or more apart move disjoint blocks of C s, one whose
        column has norm n by n times its own norm.  That is what secret participation amplifies.
        """
        return None

    def variance(self, workload: Workload) -> Floats:
        """The noise variance of every release per coordinate, for fresh vectors of variance 1; shape (T,)."""
        ...

    def noise_series(self, workload: Workload) -> Floats | None:
        """b_0 … b_{T-1} if row t of B z is Σ_j b_j z_{t-j}, one fresh vector a round; None if it is not."""
        return None

    def mean_variance(self, workload: Workload) -> float:
        """`variance` averaged over the rounds."""
        return float(np.mean(self.variance(workload)))

    def memory_vectors(self, workload: Workload) -> int:
        """The most vectors that a state holds."""
        ...

    def draws(self, t: int) -> int | None:
        """Number of fresh vectors that round t takes, public: nodes 0, 1, … of the owner's stream of noise.

        None stands for one that is handed over as it is; several come stacked on a first axis.
        """
        return None

    def start(self) -> MechanismState:
        """The state before round 1."""
        return ()

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Row t of B z and the next state, from this round's fresh vector z_t (any leading axes) or `draws(t)`.

        The noise returned may be part of the state, or `fresh` itself: do not write into it.
        """
        ...

    def integer(self, workload: Workload) -> "Factorization":
        """C on integers, with B and the sensitivity of the same coefficients, for a workload in real units.

        Decays become multiples of 2^-31.  InputError for a mechanism whose claim is one about real-valued
        gradients: one that rests on how far queries move, on contraction, or on windows of sums, which rounding
        takes apart; and for one whose C has no exact form.
        """
        raise InputError(f"{type(self).__name__}: its noise cannot be added to integers; use another mechanism")


@dataclass(frozen=True)
class Factorization:
    """A factorization A = B C with C on integers.

    `workload` has the clips in real units, and the decay that `strategy` has; `mechanism` supplies B and the
    sensitivity, for the coefficients that `strategy` has.
    """

    strategy: IntegerStrategy
    mechanism: Mechanism
    workload: Workload
    sensitivity_factor: Fraction = Fraction(1)
    """Factor of the sensitivity where the strategy's coefficients are the mechanism's only nearly."""

    has_parts: ClassVar[bool] = False
    """Whether an increment's parts are clipped apart, and a round takes a vector for each."""

    def part_clips(self, t: int) -> tuple[float, ...]:
        """The norm bound of one record in each vector of round t, in real units."""
        return (float(self.workload.clips[t - 1]),)

    def increment_scale(self, t: int) -> float:
        """Factor of increments of round t, and of their clips, before they become integers."""
        return 1.0

    def sensitivity_in_units(self, lattice: Lattice) -> float:
        """The sensitivity of C for integers of norm K_t under zero-out, in units."""
        return self._sensitivity_in_units(self.mechanism, lattice)

    @property
    def max_participations(self) -> int:
        """In how many rounds a record takes part at most."""
        return participations_per_record(self.workload)

    def _sensitivity_in_units(self, mechanism: Mechanism, lattice: Lattice) -> float:
        norms = np.array([float(lattice.norm(clip)) for clip in self.workload.clips.tolist()])
        return mechanism.sensitivity(dataclasses.replace(self.workload, clips=norms))


def check_matches(workload: Workload, decay: float, period: int | None) -> None:
    """Refuse a workload that a mechanism built for another decay or period would not factor."""
    if workload.decay != decay:
        raise InputError(f"the mechanism is built for decay = {decay}, the workload has decay = {workload.decay}")
    if workload.period != period:
        raise InputError(
            f"the mechanism is built for period = {period}, the workload has period = {workload.period}"
        )
