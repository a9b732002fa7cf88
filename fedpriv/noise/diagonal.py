"""Mechanisms with a diagonal B or C: fresh noise on every sum, on every increment, or at phase ends.

| mechanism | B | C | source |
|---|---|---|---|
| independent | I | A | Reshef & Levy 2024, Algorithms 1 and 2, where records are read once |
| scheduled | diag(d) | diag(1/d) A | Reshef & Levy 2024, any schedule σ_t: ρ = 2S √(Σ_t 1/σ_t²) |
| leaf | A C^-1 | diag(1/noise) | Kornowski, Liu & Talwar, Algorithm 4 |

A is the matrix of running sums, (A s)_t = s_t + decay (A s)_(t-1), or s_t where the sums begin or restart.  The
noise of round t is (B z)_t for fresh vectors z, and a record is charged for the distance by which it moves C s.
s_t is the sum of the increments of round t, the contributions of its records, each of norm clip_t at most.  In a
fixed order a record takes part every `rounds_per_epoch` rounds, in separated participations in rounds that are far
enough apart, and in a single pass once.  d_t and noise_t are sizes of the noise of round t, in multiples of fresh
vectors, and S is the clip.

A workload has the decay, the clip of every round, the rounds in which records take part, and the period after
which the sums restart, if they do.

A schedule can add less noise to early sums than to late ones, which pays if the output weighs early sums more.
Leaf noise is added to every increment, and accumulates over a period with the increments.

`PhaseEnds` is for runs that release the end of each phase only.  Its price rests on contraction within a phase,
and it is no factorization A = B C.  Sources: Feldman, Koren & Talwar 2020, section 4, and for the contraction
Hardt, Recht & Singer 2016, Lemma 3.7: for a convex loss of smoothness L, the gradient step w ↦ Π_K(w - η ∇f(w))
with η ≤ 2/L moves no two points apart.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from fedpriv.core.errors import InputError, refuse
from fedpriv.core.replicates import SHARED
from fedpriv.noise import sensitivity as nonincreasing
from fedpriv.noise.integers.fixed_point import (
    COEFFICIENT_ONE,
    Ints,
    round_coefficient,
    scale_bound,
    scale_integers,
    to_coefficient,
)
from fedpriv.noise.integers.strategies import (
    IntegerBounds,
    IntegerStrategy,
    IntState,
    LoadBounds,
    NoiseGroup,
    accumulated_rounding,
    check_decay,
)
from fedpriv.noise.mechanism import (
    ColumnBlocks,
    Columns,
    Factorization,
    Mechanism,
    MechanismState,
    Sensitivity,
    check_matches,
    toeplitz_inner,
)
from fedpriv.noise.sensitivity import heaviest_pattern, tighten_sensitivity
from fedpriv.noise.series import Floats, Workload, geometric_sums, is_restart, powers
from fedpriv.participation.orders import MinSeparation, Phases

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class IndependentGaussian(Mechanism):
    """Fresh noise of equal size in every round.

    Guarantee: a record that takes part in round τ moves the sum of each round t ≥ τ of the same period by
    decay^(t-τ) times its increment.  All increments of the record are added up, and the worst record is charged:
    exactly, or for separated participations and in phases exactly or by an upper bound.  For a single pass with
    clip S, decay 1 and no restarts this is S√T: σ = 2S√T/ρ under replace-one, the paper's σ² = 4S²T/ρ².

    Example:
        >>> from fedpriv.participation.orders import FixedOrder
        >>> workload = Workload(FixedOrder(rounds=8, rounds_per_epoch=8), decay=1.0, clips=np.ones(8))
        >>> round(IndependentGaussian().certified(workload).value, 4)
        2.8284
    """

    name: ClassVar[str] = "independent"
    words: ClassVar[str] = "independent Gaussian noise in every round"

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        return cls()

    def certified(self, workload: Workload) -> Sensitivity:
        def squared_norms_in_period(clips: Floats, rounds_per_epoch: int) -> Floats:
            return _record_squared_norms(clips, rounds_per_epoch, workload.decay)

        def coefficients() -> Floats:
            return powers(workload.decay, workload.rounds)

        return nonincreasing.certify_toeplitz(
            workload, coefficients, self.columns(workload), squared_norms_in_period
        )

    def columns(self, workload: Workload) -> Columns:
        inner = toeplitz_inner(
            powers(workload.decay, workload.rounds_per_period), workload.rounds, workload.period
        )
        return Columns(_column_squared_norms(workload), inner)

    @property
    def fresh_std(self) -> float:
        return 1.0

    def blocks(self, workload: Workload) -> ColumnBlocks | None:
        """Return blocks of one band for decay 0, where C is the identity, else None."""
        return ColumnBlocks(1, np.ones(workload.rounds)) if workload.decay == 0.0 else None

    def variance(self, workload: Workload) -> Floats:
        return np.ones(workload.rounds)

    def noise_series(self, workload: Workload) -> Floats:
        return np.asarray(np.eye(1, workload.rounds)[0])

    def memory_vectors(self, workload: Workload) -> int:
        return 0

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        return fresh, state

    def integer(self, workload: Workload) -> Factorization:
        workload = replace(workload, decay=round_coefficient(workload.decay))
        return Factorization(IntegerPrefix(to_coefficient(workload.decay), workload.period), self, workload)


def _column_squared_norms(workload: Workload) -> Floats:
    """Return Σ_{t≥τ} decay^{2(t-τ)} up to the end of τ's period, for every τ, (rounds,)."""
    if workload.period is None:
        return geometric_sums(workload.decay**2, np.arange(workload.rounds, 0.0, -1.0))
    rounds = np.arange(workload.rounds, dtype=np.float64)
    ends = np.minimum((rounds // workload.rounds_per_period + 1) * workload.rounds_per_period, workload.rounds)
    return geometric_sums(workload.decay**2, ends - rounds)


def _record_squared_norms(clips: Floats, rounds_per_epoch: int, decay: float) -> Floats:
    """Return the squared distance by which each record of a fixed order moves A s within one period.

    Between two rounds of a record the displacement of the running sum only decays, so that its values in those
    rounds are enough: y_k = clip_k + decay^rounds_per_epoch y_{k-1} in the record's k-th round.  The squares of
    the displacements from this round until the record's next one, or until the period ends, add up to y_k² times
    a geometric sum.

    Args:
        clips: Clip of every round of the period, (rounds,).
        rounds_per_epoch: Rounds between two participations of a record.
        decay: Decay of the running sum.

    Returns:
        (min(rounds_per_epoch, rounds),), one value for each position of an epoch.
    """
    rounds = len(clips)
    rounds_per_epoch = min(rounds_per_epoch, rounds)
    epochs = -(-rounds // rounds_per_epoch)
    displacements = np.zeros((epochs, rounds_per_epoch))
    displacements.ravel()[:rounds] = clips
    row_shift, shift_factor = 1, decay**rounds_per_epoch
    while row_shift < epochs:  # after each pass a row holds the last 2·row_shift terms of the recursion
        displacements[row_shift:] += shift_factor * displacements[:-row_shift]
        row_shift, shift_factor = 2 * row_shift, shift_factor**2
    remaining_rounds = np.minimum(
        rounds_per_epoch,
        rounds - np.arange(epochs * rounds_per_epoch, dtype=np.float64).reshape(epochs, rounds_per_epoch),
    )
    return np.asarray(
        np.sum(displacements**2 * geometric_sums(decay**2, np.maximum(remaining_rounds, 0.0)), axis=0)
    )


@dataclass(frozen=True)
class IntegerPrefix(IntegerStrategy):
    """C = A on integers: q_t = ⌊c · q_{t-1}⌉ + s_t, restarted every `period` rounds if it is not None.

    The decay c is `decay` multiples of 2^-31.  Roundings of neighbours differ by at most 1 a round, and the
    differences decay like the sums, so that they add up to at most 1 / (1 - c) for 0 < c < 1.
    """

    decay: int
    period: int | None = None

    def __post_init__(self) -> None:
        check_decay(self.decay)

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        return (NoiseGroup(rounds, 1.0, accumulated_rounding(self.decay, rounds)),)

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        total = largest = 0
        for t, (load,) in enumerate(loads, start=1):
            total = load if is_restart(t, self.period) else self._decayed_bound(total) + load
            largest = max(largest, total)
        return IntegerBounds(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """Return q_t and the next state, which holds q_t, or nothing for decay 0.

        In round 1, and in every round in which the sums restart, q_t is s_t.

        Args:
            state: State before round t, empty before round 1.
            t: Round, from 1.
            sums: Sums s_t of round t, int64 of any shape.
        """
        if self.decay == 0:
            return sums, ()
        if not state or (self.period is not None and (t - 1) % self.period == 0):
            return sums, (sums,)
        total = (state[0] if self.decay == COEFFICIENT_ONE else scale_integers(state[0], self.decay)) + sums
        return total, (total,)

    def _decayed_bound(self, bound: int) -> int:
        if self.decay == 0:
            return 0
        return bound if self.decay == COEFFICIENT_ONE else scale_bound(bound, self.decay)


_MAX_SIZE_RATIO = 1e6
"""Largest ratio of two sizes.

Beyond it, one round's noise comes close to the float32 rounding of another's.
"""

_Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ScheduledOptions(BaseModel):
    """Scenario keys of scheduled noise, whose sizes are fitted before the run if they are left out."""

    noise_sizes: Annotated[tuple[_Size, ...], Field(max_length=1_000_000, strict=False)] = Field(
        (),
        description='for mechanism = "scheduled": how large the noise of every round is beside the others, a '
        "number per round; fitted if left out",
    )


@dataclass(frozen=True)
class ScheduledGaussian(Mechanism):
    """Fresh noise in every round, `sizes[t-1]` times as large in round t.

    Guarantee: a record that takes part in round τ moves the sum of each round t ≥ τ by decay^(t-τ) times its
    increment.  The squares of its displacements, each over the squared size of the round, add up.  The worst
    record of a fixed order is charged, exactly, for any clips: with one pass, decay 1 and clip S that is S √(Σ_t
    1/d_t²).  Separated participations and phases are charged exactly or by an upper bound.  Sums that restart are
    refused.
    """

    name: ClassVar[str] = "scheduled"
    words: ClassVar[str] = "independent Gaussian noise in every round, of sizes that are fixed before the first"

    sizes: tuple[float, ...] = field(metadata=SHARED)
    """Sizes d_1 … d_T of the noise of every planned round, as factors of the fresh noise."""
    decay: float = field(default=1.0, metadata=SHARED)
    """Decay of the running sum, 0 to 1."""

    def __post_init__(self) -> None:
        if not self.sizes or not all(0.0 < size < math.inf for size in self.sizes):
            raise InputError("noise_sizes: a finite number above 0 is needed for every round")
        if max(self.sizes) > _MAX_SIZE_RATIO * min(self.sizes):
            raise InputError(f"noise_sizes: the largest is at most {_MAX_SIZE_RATIO:g} times the smallest")

    @classmethod
    def of(cls, workload: Workload, options: ScheduledOptions) -> Self:
        """Return the mechanism of the sizes in `options`.

        Raises:
            InputError: There are no sizes, or not one for every round, or the largest is more than 1e6 times the
                smallest.
        """
        if not options.noise_sizes:
            raise InputError(
                f"mechanism = {cls.name!r}: its sizes are fitted before a run starts and sent as numbers, and "
                "here are none; give noise_sizes"
            )
        if len(options.noise_sizes) != workload.rounds:
            raise InputError(
                f"noise_sizes has {len(options.noise_sizes)} numbers, and there are {workload.rounds} rounds: "
                "give one for each"
            )
        return cls(options.noise_sizes, workload.decay)

    @classmethod
    def comparisons(cls, workload: Workload, options: Any) -> dict[str, Self]:
        """Return no comparisons, because their sizes have to be fitted first."""
        return {}

    def options(self) -> dict[str, Any]:
        return {"noise_sizes": list(self.sizes)}

    def certified(self, workload: Workload) -> Sensitivity:
        """Return the sensitivity, exact for one pass whose rounds all read records, and for a fixed order.

        For separated participations the sum of clip_τ ‖C_τ‖ over the heaviest pattern of rounds τ, with column
        C_τ of C, is a bound, which a search may replace by the exact sensitivity or a smaller bound.
        """
        self._check_workload(workload)
        order = workload.public_order
        if order.single_pass:
            squares = workload.clips**2 * self.columns(workload).squared_norms
            return Sensitivity(math.sqrt(float(np.max(squares))), True, "one participation: largest column norm")
        if isinstance(order, MinSeparation):
            columns = self.columns(workload)
            bound = heaviest_pattern(workload.clips * np.sqrt(columns.squared_norms), order)
            sensitivity = Sensitivity(bound, False, "triangle inequality over the heaviest pattern")
            return tighten_sensitivity(sensitivity, columns.inner, workload)
        first_rounds = range(min(order.rounds_per_epoch, workload.rounds))
        max_squared_norm = max(
            self._squared_norm(workload, slice(first_round, None, order.rounds_per_epoch))
            for first_round in first_rounds
        )
        return Sensitivity(math.sqrt(max_squared_norm), True, "every record of the fixed order")

    def columns(self, workload: Workload) -> Columns:
        """Return norms and inner products of the columns of C, whose entries are C[t, i] = decay^(t-i) / d_t.

        ⟨C_i, C_j⟩ is decay^|i-j| times the squared norm of the later one of the two columns.
        """
        self._check_workload(workload)
        inverse_squares = self._inverse_squares(workload.rounds)
        squares = np.empty(workload.rounds)
        squared_norm = 0.0
        # ‖C_i‖² = 1/d_i² + decay² ‖C_(i+1)‖², from the last round backwards.
        for index in range(workload.rounds - 1, -1, -1):
            squared_norm = squares[index] = inverse_squares[index] + self.decay**2 * squared_norm

        def inner(rounds: NDArray[np.int64]) -> Floats:
            lags = np.abs(np.subtract.outer(rounds, rounds)).astype(np.float64)
            return np.asarray(self.decay**lags * squares[np.maximum.outer(rounds, rounds)])

        return Columns(squares, inner)

    @property
    def fresh_std(self) -> float:
        return min(self.sizes)

    def blocks(self, workload: Workload) -> ColumnBlocks | None:
        """Return blocks of one band for decay 0, where C is diagonal, else None."""
        self._check_workload(workload)
        return ColumnBlocks(1, 1.0 / np.array(self.sizes[: workload.rounds])) if self.decay == 0.0 else None

    def variance(self, workload: Workload) -> Floats:
        self._check_workload(workload)
        return np.array(self.sizes[: workload.rounds]) ** 2

    def memory_vectors(self, workload: Workload) -> int:
        return 0

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        if t > len(self.sizes):
            raise InputError(f"round {t}: noise_sizes is planned for {len(self.sizes)} rounds")
        return fresh * self.sizes[t - 1], state

    def integer(self, workload: Workload) -> Factorization:
        decay = round_coefficient(self.decay)
        strategy = IntegerScheduled(to_coefficient(decay), workload.period, self.sizes)
        return Factorization(strategy, replace(self, decay=decay), replace(workload, decay=decay))

    def _squared_norm(self, workload: Workload, rounds: slice) -> float:
        """Return the squared distance Σ_t y_t² / d_t² by which a record that takes part in `rounds` moves C s.

        y_t is the record's displacement of the running sum: decay y_(t-1) + clip_t in its own rounds, and decay
        y_(t-1) in others.

        Args:
            workload: Running sums and clips.
            rounds: Slice of the record's rounds, as indices from 0.
        """
        increments = np.zeros(workload.rounds)
        increments[rounds] = workload.clips[rounds]
        if self.decay == 1.0:
            displacements = np.cumsum(increments)
        else:
            displacements = np.array(
                list(accumulate(increments.tolist(), lambda total, value: self.decay * total + value))
            )
        return float(np.sum(displacements**2 * self._inverse_squares(workload.rounds)))

    def _inverse_squares(self, rounds: int) -> Floats:
        return np.asarray(1.0 / np.array(self.sizes[:rounds]) ** 2)

    def _check_workload(self, workload: Workload) -> None:
        check_matches(workload, self.decay, None)
        if workload.rounds > len(self.sizes):
            raise InputError(
                f"noise_sizes is planned for {len(self.sizes)} rounds, the workload has {workload.rounds}"
            )


@dataclass(frozen=True)
class IntegerScheduled(IntegerPrefix):
    """C = A on integers, with noise of a separate size in every round."""

    sizes: tuple[float, ...] = ()
    """Size of the noise of each round, as in `ScheduledGaussian`."""

    def noise_scales(self, t: int) -> tuple[float, ...]:
        return (self.sizes[t - 1],)

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        ((_, _, difference),) = super().noise_groups(rounds, participations)
        return tuple(NoiseGroup(count, size, difference) for size, count in Counter(self.sizes[:rounds]).items())


@dataclass(frozen=True)
class LeafGaussian(Mechanism):
    """Fresh noise on every increment, `first` times as large in the first round of a period or a run.

    Guarantee: a record moves the increments of its own rounds only.  For any participation, the square of the
    distance by which a record can move C s is exactly the sum of (clip_t / noise_t)² over these rounds, where
    noise_t is `first` in the first round of a period, and else 1.
    """

    name: ClassVar[str] = "leaf"
    words: ClassVar[str] = "Gaussian noise on every change of the running sum, which adds up from anchor to anchor"

    decay: float = field(default=1.0, metadata=SHARED)
    """Decay of the running sum, with which the noise decays, too."""
    period: int | None = None
    """Rounds after which the running sum restarts, or None if it never does."""
    first: float = field(default=1.0, metadata=SHARED)
    """Ratio of the noise in the first round of a period, or of the run, to that of other rounds."""

    def __post_init__(self) -> None:
        if not 0.0 < self.first < math.inf:
            raise InputError(f"first = {self.first}: a ratio of two noises is a finite number above 0")

    def certified(self, workload: Workload) -> Sensitivity:
        """Return √(Σ (clip_t / noise_t)²) over the rounds t of the worst record."""
        check_matches(workload, self.decay, self.period)
        order, squared_norms = workload.public_order, (workload.clips / self._noise_scales(workload)) ** 2
        if isinstance(order, MinSeparation):
            max_squared_norm = heaviest_pattern(squared_norms, order)
        else:
            positions = np.arange(workload.rounds) % (
                workload.rounds if order.single_pass else order.rounds_per_epoch
            )
            max_squared_norm = float(np.max(np.bincount(positions, squared_norms)))
        return Sensitivity(math.sqrt(max_squared_norm), True, "increments are independent: squares add up")

    @property
    def fresh_std(self) -> float:
        return min(1.0, self.first)

    def blocks(self, workload: Workload) -> ColumnBlocks:
        """Return blocks of one band, since C is diagonal with the inverse sizes of the noise."""
        check_matches(workload, self.decay, self.period)
        return ColumnBlocks(1, 1.0 / self._noise_scales(workload))

    def variance(self, workload: Workload) -> Floats:
        """Return the variance v_t of the accumulated noise of every round, (rounds,).

        v_t = noise_t² + decay² v_(t-1), without the second term in the first round of a period.
        """
        check_matches(workload, self.decay, self.period)
        variances = np.empty(workload.rounds)
        variance = 0.0
        for index, scale in enumerate(self._noise_scales(workload)):
            variance = scale**2 + (0.0 if index % workload.rounds_per_period == 0 else self.decay**2 * variance)
            variances[index] = variance
        return variances

    def memory_vectors(self, workload: Workload) -> int:
        return 1

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Return the noise of the sum of round t, and the next state, which holds this noise."""
        is_first_round = not state or (self.period is not None and (t - 1) % self.period == 0)
        noise = fresh * self.first if is_first_round else fresh.add(state[0], alpha=self.decay)
        return noise, (noise,)

    def integer(self, workload: Workload) -> Factorization:
        return Factorization(IntegerLeaf(self.first, self.period), self, workload)

    def _noise_scales(self, workload: Workload) -> Floats:
        scales = np.ones(workload.rounds)
        scales[:: workload.rounds_per_period] = self.first
        return scales


_NO_ROUNDING = Fraction(0)


@dataclass(frozen=True)
class IntegerLeaf(IntegerStrategy):
    """C on integers that returns s_t itself, for noise on every increment.

    The noise is `first` times as large in the first of every `period` rounds, or of all rounds, as in the others.
    """

    first: float = 1.0
    period: int | None = None

    def noise_scales(self, t: int) -> tuple[float, ...]:
        return (self.first if is_restart(t, self.period) else 1.0,)

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        restart_count = 1 if self.period is None else -(-rounds // self.period)
        restarts = NoiseGroup(restart_count, self.first, _NO_ROUNDING)
        return (
            (restarts, NoiseGroup(rounds - restart_count, 1.0, _NO_ROUNDING))
            if rounds > restart_count
            else (restarts,)
        )

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        largest = max(load for (load,) in loads)
        return IntegerBounds(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        return sums, ()


@dataclass(frozen=True)
class PhaseEnds(Mechanism):
    """Fresh noise in the empty round that ends a phase, none in its gradient rounds.

    `largest_step` is the largest step of any phase.  `smoothness` and `lipschitz` are constants of every loss.

    Guarantee: every record belongs to one phase.  A record with gradient at most C in a batch of B moves the
    iterate after its round by at most step · C/B under zero-out (twice that under replace-one).  Later rounds of
    the phase do not move the two trajectories apart, so that this bounds the move of the phase's average iterate,
    too.  In units of the step, step · C/B is the record's weight times its clip, and noise in these units is
    charged with it.  The bound holds for convex, smooth losses whose gradients the clip never changes (a clipped
    gradient step is no contraction), and for the phase starts and the output only: the queries inside a phase are
    not private.
    """

    name: ClassVar[str] = "phase-ends"
    words: ClassVar[str] = "Gaussian noise on the point that ends a phase, the only one that is published"
    protects_queries: ClassVar[bool] = False

    phases: Phases
    """Schedule of the phases."""
    largest_step: float
    smoothness: float
    lipschitz: float

    @property
    def assumption(self) -> str:
        return (
            "The claim rests on a convex, smooth and Lipschitz loss and on steps in exact arithmetic: what "
            "happens within a phase is bounded by contraction, not by clipping."
        )

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "phases": Phases(tuple(data["phases"]["lengths"]))})

    def certified(self, workload: Workload) -> Sensitivity:
        """Return the largest clip as the sensitivity, which is a bound, in units of the step.

        Raises:
            InputError: The contraction argument does not apply to this workload, step or clip.
        """
        min_clip = float(np.min(workload.clips))
        refuse(
            {
                "noise at the ends of phases: the schedule must be the mechanism's own phases": (
                    workload.public_order != self.phases
                ),
                f"noise at the ends of phases needs plain gradients, decay = 0; got {workload.decay}": (
                    workload.decay != 0.0
                ),
                f"step = {self.largest_step:g}: the phased method is private only for finite steps up to "
                f"2 / smoothness = {2.0 / self.smoothness if self.smoothness else math.inf:g}": (
                    not self.largest_step * self.smoothness <= 2.0
                ),
                f"clip = {min_clip:g}: the phased method is private only if clipping never bites, so the clip "
                f"must be the Lipschitz constant {self.lipschitz:g} or more": not min_clip >= self.lipschitz,
            }
        )
        return Sensitivity(float(np.max(workload.clips)), False, "contraction: convex, smooth, one phase a record")

    def variance(self, workload: Workload) -> Floats:
        return np.array([float(self.phases.batch_index(t) is None) for t in range(1, workload.rounds + 1)])

    def memory_vectors(self, workload: Workload) -> int:
        return 0

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        return (fresh if self.phases.batch_index(t) is None else fresh.new_zeros(fresh.shape)), state
