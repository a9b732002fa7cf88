"""Mechanisms whose B or C is diagonal: fresh noise on every sum, or on every increment.

| mechanism | B | C | source |
|---|---|---|---|
| independent | I | A | Reshef & Levy 2024, Algorithms 1 and 2 (single pass); any declared participation |
| scheduled | diag(d) | diag(1/d) A | Reshef & Levy 2024, any schedule σ_t: ρ = 2S √(Σ_t 1/σ_t²) |
| leaf | A C^-1 | diag(1/noise) | Kornowski, Liu & Talwar, Algorithm 4 |

Independent and scheduled noise keep nothing from round to round; where an output weighs early sums more than late
ones, less noise in those is less noise in the output.  Of "leaf" every increment gets its own noise, and the noisy
increment is what is added to the running sum, so the noise accumulates over a period.

Noise at the ends of phases, by contraction: only the end of a phase leaves the curator.

Source: Feldman, Koren & Talwar 2020, section 4; the contraction is Hardt, Recht & Singer 2016, Lemma 3.7: for a
convex loss of smoothness L, the gradient step w ↦ Π_K(w - η ∇f(w)) with η ≤ 2/L moves no two points apart.
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

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED
from fedpriv.noise import sensitivity as nonincreasing
from fedpriv.noise.integers.fixed_point import ONE, Ints, coefficient, rounded, scaled, scaled_bound
from fedpriv.noise.integers.strategies import (
    Group,
    IntegerStrategy,
    IntState,
    Load,
    Reach,
    accumulated,
    check_decay,
)
from fedpriv.noise.mechanism import (
    Blocks,
    Columns,
    Factored,
    Mechanism,
    MechanismState,
    Sensitivity,
    check_matches,
    toeplitz_inner,
)
from fedpriv.noise.sensitivity import heaviest_pattern, tightened
from fedpriv.noise.series import Floats, Workload, geometric_sums, powers, restarts
from fedpriv.participation.orders import Phases, Separated

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class IndependentGaussian(Mechanism):
    """Fresh noise in every round, whatever was released before.

    Guarantee: a record that takes part in round τ moves the sums of rounds τ, τ+1, … of its period by
    decay^(t-τ) times its increment; all its increments are added up, and the worst record is charged.
    For a single pass with clip S and decay 1 this is S√T: σ = 2S√T/ρ under replace-one, the paper's
    σ² = 4S²T/ρ².
    """

    name: ClassVar[str] = "independent"
    words: ClassVar[str] = "independent Gaussian noise in every round"

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        return cls()

    def certified(self, workload: Workload) -> Sensitivity:
        def within(clips: Floats, rounds_per_epoch: int) -> Floats:
            return _record_squared_norms(clips, rounds_per_epoch, workload.decay)

        def coefficients() -> Floats:
            return powers(workload.decay, workload.rounds)

        return nonincreasing.certified(workload, coefficients, self.columns(workload), within)

    def columns(self, workload: Workload) -> Columns:
        inner = toeplitz_inner(powers(workload.decay, workload.block), workload.rounds, workload.period)
        return Columns(_column_squared_norms(workload), inner)

    @property
    def fresh_std(self) -> float:
        return 1.0

    def blocks(self, workload: Workload) -> Blocks | None:
        """C = A, which is the identity for decay 0; with any other an increment stays in all later sums."""
        return Blocks(1, np.ones(workload.rounds)) if workload.decay == 0.0 else None

    def variance(self, workload: Workload) -> Floats:
        return np.ones(workload.rounds)

    def noise_series(self, workload: Workload) -> Floats:
        return np.asarray(np.eye(1, workload.rounds)[0])

    def memory_vectors(self, workload: Workload) -> int:
        return 0

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        return fresh, state

    def integer(self, workload: Workload) -> Factored:
        workload = replace(workload, decay=rounded(workload.decay))
        return Factored(IntegerPrefix(coefficient(workload.decay), workload.period), self, workload)


def _column_squared_norms(workload: Workload) -> Floats:
    """Σ_{t≥τ} decay^{2(t-τ)} up to the end of τ's period, for every τ."""
    if workload.period is None:
        return geometric_sums(workload.decay**2, np.arange(workload.rounds, 0.0, -1.0))
    rounds = np.arange(workload.rounds, dtype=np.float64)
    ends = np.minimum((rounds // workload.block + 1) * workload.block, workload.rounds)
    return geometric_sums(workload.decay**2, ends - rounds)


def _record_squared_norms(clips: Floats, rounds_per_epoch: int, decay: float) -> Floats:
    """Squared norms of the records of a fixed order within one period, without a T × T matrix: O(T log T).

    Between two rounds of a record what it moved only decays, so it is enough to know it in those rounds:
    y_k = clip_k + decay^rounds_per_epoch y_{k-1}.
    """
    rounds = len(clips)
    rounds_per_epoch = min(rounds_per_epoch, rounds)
    epochs = -(-rounds // rounds_per_epoch)
    moved = np.zeros((epochs, rounds_per_epoch))
    moved.ravel()[:rounds] = clips
    shift, over_epoch = 1, decay**rounds_per_epoch
    while shift < epochs:  # after each pass a row holds the last 2·shift terms of the recursion
        moved[shift:] += over_epoch * moved[:-shift]
        shift, over_epoch = 2 * shift, over_epoch**2
    until_next = np.minimum(
        rounds_per_epoch,
        rounds - np.arange(epochs * rounds_per_epoch, dtype=np.float64).reshape(epochs, rounds_per_epoch),
    )
    return np.asarray(np.sum(moved**2 * geometric_sums(decay**2, np.maximum(until_next, 0.0)), axis=0))


@dataclass(frozen=True)
class IntegerPrefix(IntegerStrategy):
    """q_t = ⌊decay · q_{t-1}⌉ + s_t; `decay` counts multiples of 2^-31, sums restart every `period` rounds.

    Roundings of neighbours differ by 1 a round at most, and decay like the sums: by 1 / (1 - decay) in all.
    """

    decay: int
    period: int | None = None

    def __post_init__(self) -> None:
        check_decay(self.decay)

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        return (Group(rounds, 1.0, accumulated(self.decay, rounds)),)

    def reach(self, loads: Sequence[Load]) -> Reach:
        total = largest = 0
        for t, (load,) in enumerate(loads, start=1):
            total = load if restarts(t, self.period) else self._decayed_bound(total) + load
            largest = max(largest, total)
        return Reach(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the last sum; none for decay 0."""
        if self.decay == 0:
            return sums, ()
        if not state or (self.period is not None and (t - 1) % self.period == 0):
            return sums, (sums,)
        total = (state[0] if self.decay == ONE else scaled(state[0], self.decay)) + sums
        return total, (total,)

    def _decayed_bound(self, bound: int) -> int:
        if self.decay == 0:
            return 0
        return bound if self.decay == ONE else scaled_bound(bound, self.decay)


_MOST_APART = 1e6
"""Largest ratio of two sizes: beyond, one round's noise is lost in the rounding of another's."""

_Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ScheduledOptions(BaseModel):
    """Keys of a scenario for it; without sizes they are fitted before the run, and sent as numbers."""

    noise_sizes: Annotated[tuple[_Size, ...], Field(max_length=1_000_000, strict=False)] = Field(
        (),
        description='for mechanism = "scheduled": how large the noise of every round is beside the others, a '
        "number per round; fitted if left out",
    )


@dataclass(frozen=True)
class ScheduledGaussian(Mechanism):
    """Fresh noise in every round, `sizes[t-1]` times as large in round t.

    Guarantee: a record that takes part in round τ moves the sums of rounds τ, τ+1, … by decay^(t-τ) times its
    increment; the squares of what it moved, over the squared sizes, add up.  The worst record of a fixed order is
    charged, exactly, for any clips: with one pass, decay 1 and clip S that is S √(Σ_t 1/d_t²).  Separated
    participations are bounded.  Sums that restart are refused.
    """

    name: ClassVar[str] = "scheduled"
    words: ClassVar[str] = "independent Gaussian noise in every round, of sizes that are fixed before the first"

    sizes: tuple[float, ...] = field(metadata=SHARED)
    """d_1 … d_T of every planned round."""
    decay: float = field(default=1.0, metadata=SHARED)

    def __post_init__(self) -> None:
        if not self.sizes or not all(0.0 < size < math.inf for size in self.sizes):
            raise InputError("noise_sizes: a finite number above 0 is needed for every round")
        if max(self.sizes) > _MOST_APART * min(self.sizes):
            raise InputError(f"noise_sizes: the largest is at most {_MOST_APART:g} times the smallest")

    @classmethod
    def of(cls, workload: Workload, options: ScheduledOptions) -> Self:
        """The mechanism of given sizes; InputError for none: a plan never fits."""
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
        """None: a comparison fits the sizes first."""
        return {}

    def options(self) -> dict[str, Any]:
        return {"noise_sizes": list(self.sizes)}

    def certified(self, workload: Workload) -> Sensitivity:
        self._check(workload)
        order = workload.order
        if order.single_pass:
            squares = workload.clips**2 * self.columns(workload).squared_norms
            return Sensitivity(math.sqrt(float(np.max(squares))), True, "one participation: largest column norm")
        if isinstance(order, Separated):
            columns = self.columns(workload)
            triangle = heaviest_pattern(workload.clips * np.sqrt(columns.squared_norms), order)
            found = Sensitivity(triangle, False, "triangle inequality over the heaviest pattern")
            return tightened(found, columns.inner, workload)
        places = range(min(order.rounds_per_epoch, workload.rounds))
        worst = max(self._squared_norm(workload, slice(place, None, order.rounds_per_epoch)) for place in places)
        return Sensitivity(math.sqrt(worst), True, "every record of the fixed order")

    def columns(self, workload: Workload) -> Columns:
        """⟨C_i, C_j⟩ = decay^|i-j| Σ_{t ≥ max(i, j)} decay^{2 (t - max(i, j))} / d_t²."""
        self._check(workload)
        inverse = self._inverse_squares(workload.rounds)
        squares = np.empty(workload.rounds)
        total = 0.0
        for place in range(workload.rounds - 1, -1, -1):
            total = squares[place] = inverse[place] + self.decay**2 * total

        def inner(held: NDArray[np.int64]) -> Floats:
            apart = np.abs(np.subtract.outer(held, held)).astype(np.float64)
            return np.asarray(self.decay**apart * squares[np.maximum.outer(held, held)])

        return Columns(squares, inner)

    @property
    def fresh_std(self) -> float:
        return min(self.sizes)

    def blocks(self, workload: Workload) -> Blocks | None:
        """C is diagonal for decay 0; with any other an increment stays in all later sums."""
        self._check(workload)
        return Blocks(1, 1.0 / np.array(self.sizes[: workload.rounds])) if self.decay == 0.0 else None

    def variance(self, workload: Workload) -> Floats:
        self._check(workload)
        return np.array(self.sizes[: workload.rounds]) ** 2

    def memory_vectors(self, workload: Workload) -> int:
        return 0

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        if t > len(self.sizes):
            raise InputError(f"round {t}: noise_sizes is planned for {len(self.sizes)} rounds")
        return fresh * self.sizes[t - 1], state

    def integer(self, workload: Workload) -> Factored:
        decay = rounded(self.decay)
        strategy = IntegerScheduled(coefficient(decay), workload.period, self.sizes)
        return Factored(strategy, replace(self, decay=decay), replace(workload, decay=decay))

    def _squared_norm(self, workload: Workload, held: slice) -> float:
        """Of the record of the rounds `held`: what it moved so far only decays between them."""
        own = np.zeros(workload.rounds)
        own[held] = workload.clips[held]
        if self.decay == 1.0:
            moved = np.cumsum(own)
        else:
            moved = np.array(list(accumulate(own.tolist(), lambda total, value: self.decay * total + value)))
        return float(np.sum(moved**2 * self._inverse_squares(workload.rounds)))

    def _inverse_squares(self, rounds: int) -> Floats:
        return np.asarray(1.0 / np.array(self.sizes[:rounds]) ** 2)

    def _check(self, workload: Workload) -> None:
        check_matches(workload, self.decay, None)
        if workload.rounds > len(self.sizes):
            raise InputError(
                f"noise_sizes is planned for {len(self.sizes)} rounds, the workload has {workload.rounds}"
            )


@dataclass(frozen=True)
class IntegerScheduled(IntegerPrefix):
    """The same sums, with noise of a size of its own in every round."""

    sizes: tuple[float, ...] = ()

    def scales(self, t: int) -> tuple[float, ...]:
        return (self.sizes[t - 1],)

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        ((_, _, difference),) = super().groups(rounds, participations)
        return tuple(Group(count, size, difference) for size, count in Counter(self.sizes[:rounds]).items())


@dataclass(frozen=True)
class LeafGaussian(Mechanism):
    """Fresh noise on every increment, `first` times as large in the first round of a period as in the others.

    Guarantee: a record moves the increments of its own rounds only; their squared clips over squared noises add
    up, exactly, for any participation.
    """

    name: ClassVar[str] = "leaf"
    words: ClassVar[str] = "Gaussian noise on every change of the running sum, which adds up from anchor to anchor"

    decay: float = field(default=1.0, metadata=SHARED)
    period: int | None = None
    first: float = field(default=1.0, metadata=SHARED)

    def __post_init__(self) -> None:
        if not 0.0 < self.first < math.inf:
            raise InputError(f"first = {self.first}: a ratio of two noises is a finite number above 0")

    def certified(self, workload: Workload) -> Sensitivity:
        check_matches(workload, self.decay, self.period)
        squared_norms = (workload.clips / self._scales(workload)) ** 2
        if isinstance(workload.order, Separated):
            worst = heaviest_pattern(squared_norms, workload.order)
        else:
            epoch = min(workload.order.rounds_per_epoch, workload.rounds)
            worst = float(np.max(np.bincount(np.arange(workload.rounds) % epoch, squared_norms, epoch)))
        return Sensitivity(math.sqrt(worst), True, "increments are independent: squares add up")

    @property
    def fresh_std(self) -> float:
        return min(1.0, self.first)

    def blocks(self, workload: Workload) -> Blocks:
        """C is diagonal: the inverse noises."""
        check_matches(workload, self.decay, self.period)
        return Blocks(1, 1.0 / self._scales(workload))

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, self.decay, self.period)
        variances = np.empty(workload.rounds)
        total = 0.0
        for place, scale in enumerate(self._scales(workload)):
            total = scale**2 + (0.0 if place % workload.block == 0 else self.decay**2 * total)
            variances[place] = total
        return variances

    def memory_vectors(self, workload: Workload) -> int:
        return 1

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the noise of the last sum."""
        anew = not state or (self.period is not None and (t - 1) % self.period == 0)
        noise = fresh * self.first if anew else fresh.add(state[0], alpha=self.decay)
        return noise, (noise,)

    def integer(self, workload: Workload) -> Factored:
        return Factored(IntegerLeaf(self.first, self.period), self, workload)

    def _scales(self, workload: Workload) -> Floats:
        scales = np.ones(workload.rounds)
        scales[:: workload.block] = self.first
        return scales


_NONE = Fraction(0)


@dataclass(frozen=True)
class IntegerLeaf(IntegerStrategy):
    """s_t itself, with noise `first` times as large in the first of every `period` rounds as in the others."""

    first: float = 1.0
    period: int | None = None

    def scales(self, t: int) -> tuple[float, ...]:
        return (self.first if restarts(t, self.period) else 1.0,)

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        starts = 1 if self.period is None else -(-rounds // self.period)
        firsts = Group(starts, self.first, _NONE)
        return (firsts, Group(rounds - starts, 1.0, _NONE)) if rounds > starts else (firsts,)

    def reach(self, loads: Sequence[Load]) -> Reach:
        largest = max(load for (load,) in loads)
        return Reach(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        return sums, ()


@dataclass(frozen=True)
class PhaseEnds(Mechanism):
    """Fresh noise in the empty round that ends a phase, none in its gradient rounds.

    `largest_step` is the step of the first phase, `smoothness` and `lipschitz` are those of every record's loss.

    Guarantee: records are behind one phase each.  A record with gradient at most C in a batch of B moves the
    iterate after its round by step · C/B under zero-out (twice that under replace-one), later rounds of the
    phase do not move the two trajectories apart, so the phase's average iterate moves by at most step · C/B: in
    units of the step, by the record's weight times its clip, which is what noise in those units is charged with.
    This holds for convex, smooth losses whose gradients the clip never touches (a clipped gradient step is no
    contraction), and for the phase starts and the output only: the queries inside a phase are not private.
    """

    name: ClassVar[str] = "phase-ends"
    words: ClassVar[str] = "Gaussian noise on the point that ends a phase, the only one that is published"

    phases: Phases
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
        """InputError unless the contraction argument applies to this workload, step and clip."""
        if workload.order != self.phases:
            raise InputError("noise at the ends of phases: the schedule must be the mechanism's own phases")
        if workload.decay != 0.0:
            raise InputError(f"noise at the ends of phases needs plain gradients, decay = 0; got {workload.decay}")
        if not self.largest_step * self.smoothness <= 2.0:
            raise InputError(
                f"step = {self.largest_step:g}: the phased method is private only for steps up to "
                f"2 / smoothness = {2.0 / self.smoothness:g}"
            )
        if not float(np.min(workload.clips)) >= self.lipschitz:
            raise InputError(
                f"clip = {float(np.min(workload.clips)):g}: the phased method is private only if clipping never "
                f"bites, so the clip must be the Lipschitz constant {self.lipschitz:g} or more"
            )
        return Sensitivity(float(np.max(workload.clips)), False, "contraction: convex, smooth, one phase a record")

    def variance(self, workload: Workload) -> Floats:
        return np.array([float(self.phases.place(t) is None) for t in range(1, workload.rounds + 1)])

    def memory_vectors(self, workload: Workload) -> int:
        return 0

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        return (fresh if self.phases.place(t) is None else fresh.new_zeros(fresh.shape)), state
