"""Mechanisms: correlated Gaussian noise on a stream of running sums, in floats and on integers.

s_t is the sum of the increments of round t, the clipped contributions of its records.  The running sums are A s,
where row t of the lower-triangular workload A holds the decays.  Most mechanisms factor A = B C, and release
A s + B z with independent Gaussian z_t, which is post-processing of C s + z.  A record is charged the distance by
which it can move C s, the sensitivity, and `Mechanism.certified` states it.

Factors D_1 … D_T scale the columns of C, so that every record costs as much as the worst one.  One D serves two
purposes: clips of S_t · D_t in place of the clips S_t of rounds t at the same noise (`late_clip = "column"`), or
the noise of increment t divided by D_t at the same clips (`BufferedToeplitz.column_scale`).
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
"""Most steps of the fixed-point iteration for a record's factors."""
_SETTLED_CHANGE = 1e-12
"""Relative change of the factors at which the iteration ends."""
_MAX_PARTICIPATIONS = 2000
"""Most rounds of one record for which factors are computed.

The matrix of a record's inner products has an entry for every pair of its rounds.
"""

InnerProducts = Callable[[NDArray[np.int64]], Floats]
"""Function that computes ⟨C_i, C_j⟩ ≥ 0 of some rounds, counted from 0: (n,) -> (n, n)."""


class Columns(NamedTuple):
    """Norms and inner products of the columns of C, from which sensitivities are computed."""

    squared_norms: Floats
    """Squared column norms, (T,)."""
    inner: InnerProducts
    """Inner products of columns."""


def clip_multipliers(columns: Columns, workload: Workload) -> Floats:
    """Compute factors D_t of the clips that leave the sensitivity unchanged, (T,).

    With a clip of S_t · D_t in every round t in place of S_t, every record can move C s as far as the worst record
    without factors.

    Args:
        columns: Columns of the mechanism's C.
        workload: Workload with the clips and the participations.

    Raises:
        InputError: No such factors are known for this workload.
    """
    if workload.period is not None:
        raise InputError('late_clip = "column": the sums restart, and no factors are known for them')
    if workload.public_order.single_pass:
        return column_scale(columns.squared_norms, workload)
    return fixed_order_scale(columns.inner, workload)


def column_scale(squared_norms: Floats, workload: Workload) -> Floats:
    """Compute D ≥ 1 for a single participation of every record, (T,).

    Every column of C diag(D), times its clip, is as long as the longest column of C, times its clip.

    Guarantee: the sensitivity is what it was without D, up to rounding, whatever the clips are.

    Args:
        squared_norms: Squared column norms of C, (T,).
        workload: Workload with the clips.

    Raises:
        InputError: Records take part more than once, in secret, or in fresh permutations.
    """
    if not workload.public_order.single_pass:
        raise InputError("column scale: records take part more than once; their scale is fixed_order_scale")
    squared_displacements = squared_norms if workload.equal_clips else workload.clips**2 * squared_norms
    return np.asarray(np.sqrt(np.max(squared_displacements) / squared_displacements), np.float64)


def fixed_order_scale(inner: InnerProducts, workload: Workload) -> Floats:
    """Compute factors D of the clips for several passes in a fixed order with equal clips, (T,).

    With D a record's squared distance is Σ_ij D_i D_j ⟨C_i, C_j⟩ over its rounds i and j, at clip 1.  Among the
    factors that make this distance the same for every record, as large as the worst one without D, D has the
    largest product Π D_i for each record.

    Guarantee: every record costs what the worst one cost without D, up to rounding.

    Args:
        inner: Inner products of the columns of C.
        workload: Workload with a fixed order and equal clips.

    Raises:
        InputError: The order is not fixed, clips differ, or a record takes part in more than 2,000 rounds.
    """
    # Records at different positions of an epoch share no round, so that each position has its own factors.
    schedule, rounds = workload.schedule, workload.rounds
    if not isinstance(schedule, FixedOrder) or not workload.equal_clips:
        raise InputError("column scale: several passes need a fixed order and the same clip in every round")
    if rounds > _MAX_PARTICIPATIONS * schedule.rounds_per_epoch:
        raise InputError(f"column scale: records take part more than {_MAX_PARTICIPATIONS} times")
    record_rounds = [
        np.arange(position, rounds, schedule.rounds_per_epoch)
        for position in range(min(schedule.rounds_per_epoch, rounds))
    ]
    products = [inner(rounds_of_record) for rounds_of_record in record_rounds]
    squared_norm = max(float(np.sum(product)) for product in products)
    scale = np.empty(rounds)
    for rounds_of_record, product in zip(record_rounds, products, strict=True):
        scale[rounds_of_record] = _record_scale(product, squared_norm)
    return scale


def toeplitz_columns(coefficients: Floats, workload: Workload) -> Columns:
    """Return the columns of a lower-triangular Toeplitz C that restarts with the sums.

    Args:
        coefficients: First column of C, with zeros beyond its end.
        workload: Workload with the number of rounds and the period.
    """
    squared_norms = tile_periods(
        workload, lambda rounds: series.column_squared_norms(coefficients[:rounds], rounds)
    )
    return Columns(squared_norms, toeplitz_inner(coefficients, workload.rounds, workload.period))


def toeplitz_inner(coefficients: Floats, rounds: int, block: int | None = None) -> InnerProducts:
    """Return a function that computes inner products of columns of a lower-triangular Toeplitz C.

    ⟨C_i, C_j⟩ = Σ_{k < n} c_k c_{k+|i-j|}, where n is the number of rounds from the later one of i and j to the
    end of its block or of the run, both included.  It is 0 for columns of different blocks.

    Args:
        coefficients: First column of C, with zeros beyond its end.
        rounds: T.
        block: Rounds after which C restarts, or None if it does not.

    Returns:
        Function of some rounds, counted from 0: (n,) -> (n, n).
    """
    length = rounds if block is None else min(block, rounds)
    first_column = np.zeros(length)
    first_column[: len(coefficients)] = coefficients[:length]
    partial_sums: dict[int, Floats] = {}

    def inner(columns: NDArray[np.int64]) -> Floats:
        """Compute the inner products of some columns, (n,) -> (n, n), from the partial sums of each lag."""
        block_starts = columns // length * length
        rounds_after = np.minimum(block_starts + length, rounds) - 1 - columns  # rounds of the block that follow
        # Pairs of columns, flat (n²,): Σ c_k c_{k+lag} over k = 0 … the rounds after the later one of the pair.
        min_rounds_after, lags = (
            np.minimum.outer(rounds_after, rounds_after).ravel(),
            np.abs(np.subtract.outer(columns, columns)).ravel(),
        )
        lags[np.not_equal.outer(block_starts, block_starts).ravel()] = length  # of two blocks: the product is 0
        products, order = np.zeros(lags.shape), np.argsort(lags, kind="stable")
        distinct_lags, first_indices = np.unique(lags[order], return_index=True)
        for lag_value, entries in zip(distinct_lags.tolist(), np.split(order, first_indices[1:]), strict=True):
            if lag_value == length:  # the largest lag
                break
            if lag_value not in partial_sums:
                partial_sums[lag_value] = np.cumsum(first_column[: length - lag_value] * first_column[lag_value:])
            products[entries] = partial_sums[lag_value][min_rounds_after[entries]]
        return products.reshape(len(columns), len(columns))

    return inner


def _record_scale(inner: Floats, squared_norm: float) -> Floats:
    """Compute the factors D of one record's n rounds with the largest Π D_i, (n,).

    D is constrained to Σ_ij X_ij D_i D_j = `squared_norm`.  At the maximum 1/D_i is proportional to Σ_j X_ij D_j,
    which the iteration D_i ← √(D_i / Σ_j X_ij D_j) solves up to a common factor.

    Args:
        inner: Inner products X_ij = ⟨C_i, C_j⟩ of the record's columns, (n, n).
        squared_norm: Squared distance by which the record moves C s with D, at clip 1.
    """
    scale = np.ones(len(inner))
    for _ in range(_MAX_STEPS):
        next_scale = np.sqrt(scale / (inner @ scale))
        is_settled = np.max(np.abs(next_scale / scale - 1.0)) <= _SETTLED_CHANGE
        scale = next_scale
        if is_settled:
            break
    return np.asarray(scale * np.sqrt(squared_norm / (scale @ inner @ scale)), np.float64)


MechanismState = tuple["Tensor", ...]
"""State between rounds, a flat tuple of vectors, each shaped like one fresh vector.

The number of vectors is a function of t.
"""


class Sensitivity(NamedTuple):
    """Distance by which one record can move C s."""

    value: float
    """Distance in the unit of the clips, relative to fresh vectors of standard deviation 1."""
    exact: bool
    """Whether a record attains the distance, or in phases would attain it in a round that reads none.

    Otherwise `value` is an upper bound.
    """
    reason: str
    """Description of the way in which `value` was computed, for reports."""


class ColumnBlocks(NamedTuple):
    """Columns of a C whose columns each have entries in few rounds."""

    bands: int
    """Number of bands b: column t has entries in rounds t … t + b - 1 only."""
    norms: Floats
    """l2 norms of the columns, (T,)."""


class Mechanism(Protocol):
    """Noise on a stream of running sums: a frozen dataclass with a line in `registry`.

    Most classes are streaming factorizations A = B C of the workload A.
    """

    name: ClassVar[str]
    """Name in scenarios, ledgers and reports."""
    words: ClassVar[str]
    """Description of the noise for reports."""
    movement: float | None = None
    """Largest distance of consecutive queries for which the sensitivity holds, or None for any queries."""

    clipped_parts: tuple[float, ...] = ()
    """Clip norms of the further parts of an increment, or () if it is clipped as a whole."""

    protects_queries: ClassVar[bool] = True
    """True if every query is post-processing of noisy sums, so that it may be broadcast."""

    fades: ClassVar[bool] = False
    """True for a C ≥ 0 whose columns never grow and may go on to the end of the run.

    The overlap of two rounds of a record then follows from the inner products of `columns`.
    """

    @property
    def assumption(self) -> str | None:
        """Assumption of the sensitivity about the loss and the arithmetic, as a sentence, or None.

        Guarantee: where `assumption` is None, the sensitivity rests on clipping alone.
        """
        return None

    @property
    def fresh_std(self) -> float:
        """Lower bound of the noise that a round's own fresh vectors add to its row of B z, for unit z.

        It is a standard deviation, or 0 for a mechanism that states no bound.
        """
        return 0.0

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        """Build the mechanism for a workload.

        Args:
            workload: Workload of the run.
            options: `MechanismOptions` of the scenario.

        Raises:
            InputError: The options lack numbers that the mechanism needs, or have numbers that do not fit, or the
                mechanism cannot be chosen in a scenario.
        """
        raise InputError(f"mechanism = {cls.name!r}: it belongs to one algorithm and cannot be chosen")

    @classmethod
    def comparisons(cls, workload: Workload, options: Any) -> dict[str, Self]:
        """Return the variants that are worth a line in a comparison, by the name of the line.

        Args:
            workload: Workload of the run.
            options: Default `MechanismOptions`.
        """
        one = cls.of(workload, options)
        return {one.label: one}

    def options(self) -> dict[str, Any]:
        """Return the scenario keys, without the name, from which `of` rebuilds the mechanism, as plain data."""
        return {}

    def columns(self, workload: Workload) -> Columns:
        """Return norms and inner products of the columns of C.

        Raises:
            InputError: They are not known.
        """
        raise InputError(f"mechanism = {self.name!r}: the columns of its strategy matrix are not known")

    @property
    def label(self) -> str:
        """Name with the numbers that distinguish mechanisms of one kind."""
        return self.name

    def as_data(self) -> dict[str, Any]:
        """Convert to plain data for JSON, the inverse of `registry.mechanism_from_data`."""
        data: Any = self
        return {"name": self.name, **dataclasses.asdict(data)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Build the mechanism from the output of `as_data` without its name.

        Args:
            data: Fields, which are numbers, texts, and tuples or lists of them.
        """
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})

    def certified(self, workload: Workload) -> Sensitivity:
        """Return the sensitivity and the way in which it was computed."""
        ...

    def attained_sensitivity(self, workload: Workload) -> Sensitivity:
        """Return `certified` without the surcharge by which a paper's constants exceed the sensitivity of C s."""
        return self.certified(workload)

    def sensitivity(self, workload: Workload) -> float:
        """Compute the l2 distance by which one record can move C s, or an upper bound of it.

        Zero-out is presumed to move each increment of the record by at most its clip norm.  Noise z_t ~ N(0, σ² I)
        then gives μ-GDP for all releases of the run together, with μ = sensitivity / σ under zero-out and μ = 2
        sensitivity / σ under replace-one.  No smaller μ holds if the sensitivity is exact and increments can have
        any direction.
        """
        return self.certified(workload).value

    def blocks(self, workload: Workload) -> ColumnBlocks | None:
        """Return bands and norms of the columns of C, or None if C has no last band or states none.

        Guarantee: increments of rounds that lie `bands` or more apart move disjoint blocks of C s, and an
        increment whose column has norm n moves its block by n times the increment's own norm.
        """
        return None

    def variance(self, workload: Workload) -> Floats:
        """Compute the noise variance of every release per coordinate, for fresh vectors of variance 1, (T,)."""
        ...

    def noise_series(self, workload: Workload) -> Floats | None:
        """Return b_0 … b_{T-1} if row t of B z is Σ_j b_j z_{t-j} with one fresh vector a round.

        The result is None for a mechanism that states no such series.
        """
        return None

    def mean_variance(self, workload: Workload) -> float:
        """Average `variance` over the rounds."""
        return float(np.mean(self.variance(workload)))

    def memory_vectors(self, workload: Workload) -> int:
        """Most vectors that a state holds."""
        ...

    def draws(self, t: int) -> int | None:
        """Number of fresh vectors of round t, stacked on a first axis, or None for one without this axis."""
        return None

    def start(self) -> MechanismState:
        """Return the state before round 1."""
        return ()

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Compute row t of B z and the next state.

        Callers must not write into the noise, which may be part of the next state, or `fresh` itself.

        Args:
            state: State before round t.
            t: Round, counted from 1.
            fresh: Fresh vector z_t, with any leading axes, or `draws(t)` of them, stacked.
        """
        ...

    def integer(self, workload: Workload) -> "Factorization":
        """Build the factorization with C on integers, with coefficients that are multiples of 2^-31.

        Args:
            workload: Workload in real units.

        Raises:
            InputError: C has no exact form, or the sensitivity does not hold for gradients that are rounded.
        """
        raise InputError(f"{type(self).__name__}: its noise cannot be added to integers; use another mechanism")


@dataclass(frozen=True)
class Factorization:
    """Factorization A = B C with C on integers.

    | field | meaning |
    |---|---|
    | `strategy` | C on integers |
    | `mechanism` | B and the sensitivity, for the coefficients of `strategy` |
    | `workload` | workload with clips in real units and the decay that `mechanism` has |
    """

    strategy: IntegerStrategy
    mechanism: Mechanism
    workload: Workload
    sensitivity_factor: Fraction = Fraction(1)
    """Factor of the sensitivity for coefficients of `strategy` that only approximate those of `mechanism`."""

    def part_clips(self, t: int) -> tuple[float, ...]:
        """Return the norm bound of one record in each vector of round t, in real units."""
        return (float(self.workload.clips[t - 1]),)

    def increment_scale(self, t: int) -> float:
        """Factor of round t's increments, and of their clips, before they become integers."""
        return 1.0

    def sensitivity_in_units(self, lattice: Lattice) -> float:
        """Compute the sensitivity of C under zero-out for integers of norm K_t, in units of the lattice."""
        return self._sensitivity_in_units(self.mechanism, lattice)

    @property
    def max_participations(self) -> int:
        """Most rounds in which a record takes part."""
        return participations_per_record(self.workload)

    def _sensitivity_in_units(self, mechanism: Mechanism, lattice: Lattice) -> float:
        norms = np.array([float(lattice.norm(clip)) for clip in self.workload.clips.tolist()])
        return mechanism.sensitivity(dataclasses.replace(self.workload, clips=norms))


def check_matches(workload: Workload, decay: float, period: int | None) -> None:
    """Refuse a workload that a mechanism for another decay or period does not factor.

    Args:
        workload: Workload of the run.
        decay: Decay of the mechanism.
        period: Period of the mechanism, or None without restarts.

    Raises:
        InputError: The decay or the period differs.
    """
    if workload.decay != decay:
        raise InputError(f"the mechanism is built for decay = {decay}, the workload has decay = {workload.decay}")
    if workload.period != period:
        raise InputError(
            f"the mechanism is built for period = {period}, the workload has period = {workload.period}"
        )
