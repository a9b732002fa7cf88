"""Toeplitz strategies: square roots of the sums with few diagonals, their inverses, and one that restarts.

| mechanism | C | with `bands` |
|---|---|---|
| banded | first coefficients of (1 - decay·x)^(-1/2) | T: the square-root factorization A = C C; 1: C = I |
| bisr | C^-1 has the first coefficients of (1 - decay·x)^(1/2) | C reaches over all rounds |
| anchored | diag(1/anchor, C') in every period, C' the square root of the period's other rounds | |

B = A C^-1.  The first two stream in O(bands · d): they form C^-1 z from a few earlier vectors, and sum it with
decay.  "bisr" is a baseline: with as many vectors `BufferedToeplitz` adds less noise.

"anchored" is for sums that restart, read once: the first round of a period releases everything anew, later rounds
add differences.  A tree charges a record of an anchor and one of a difference alike; here each has noise of its
own, as large as it needs.

On integers the banded C takes sums of the last increments, which are kept as they are, so that roundings never add
up; its coefficients are multiples of 2^-31, in C, B and the sensitivity alike.

Sources: see `series`; Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization", for streaming;
Kalinin, McKenna, Upadhyay & Lampert 2025, "Back to Square Roots: An Optimal Bound on the Matrix Factorization
Error for Multi-Epoch Differentially Private SGD".
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, Field

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED
from fedpriv.noise import sensitivity as nonincreasing
from fedpriv.noise import series
from fedpriv.noise.integers.fixed_point import COEFFICIENT_ONE, Ints, scale_bound, scale_integers, to_coefficient
from fedpriv.noise.integers.strategies import IntegerBounds, IntegerStrategy, IntState, LoadBounds, NoiseGroup
from fedpriv.noise.mechanism import (
    ColumnBlocks,
    Columns,
    Factorization,
    Mechanism,
    MechanismState,
    Sensitivity,
    check_matches,
    toeplitz_columns,
)
from fedpriv.noise.series import Floats, Workload, powers, tile_periods

if TYPE_CHECKING:
    from torch import Tensor


class Toeplitz(Mechanism):
    """Noise C^-1 z on the increments, summed like them, for a Toeplitz C ≥ 0 with ones on its diagonal.

    C has coefficients that never increase, and the sums never restart.
    """

    decay: float

    def strategy_series(self, count: int) -> Floats:
        """The coefficients of C that are not 0, at most `count`."""
        raise NotImplementedError

    def noise_row(self, count: int) -> Floats:
        """The first `count` coefficients of B = A C^-1."""
        raise NotImplementedError

    def check_workload(self, workload: Workload) -> None:
        """InputError for a workload that the mechanism does not factor."""
        check_matches(workload, self.decay, None)

    def certified(self, workload: Workload) -> Sensitivity:
        self.check_workload(workload)
        return nonincreasing.sensitivity_from_series(workload, self.strategy_series(workload.rounds))

    def columns(self, workload: Workload) -> Columns:
        self.check_workload(workload)
        return toeplitz_columns(self.strategy_series(workload.rounds), workload)

    @property
    def fresh_std(self) -> float:
        """C has a diagonal of ones, and so has B."""
        return 1.0

    def variance(self, workload: Workload) -> Floats:
        self.check_workload(workload)
        return np.cumsum(self.noise_row(workload.rounds) ** 2)

    def noise_series(self, workload: Workload) -> Floats | None:
        self.check_workload(workload)
        return self.noise_row(workload.rounds)


def _noise_step(
    state: MechanismState, fresh: "Tensor", decay: float, weights: Sequence[float], *, keep_rows: bool
) -> tuple["Tensor", MechanismState]:
    """Row t of B z and the next state, which holds the last noise and `len(weights)` vectors, latest first.

    They are the last rows of C^-1 z (`of_rows`: C is banded) or the last fresh vectors (C^-1 is banded), and
    `weights` is what each adds to this round's row.
    """
    if not state:
        return fresh, (fresh, fresh)[: 1 + len(weights)]
    past = state[1:]
    row = fresh.clone()
    for weight, earlier in zip(weights, past, strict=False):
        row.add_(earlier, alpha=weight)
    noise = row.add(state[0], alpha=decay)
    return noise, (noise, *(row if keep_rows else fresh, *past)[: len(weights)])


_COMPARED_BANDS = (1, 8, 64)
_MAX_VECTORS = 1_000_000  # beyond, a state of T vectors is no choice for anyone


class BandedOptions(BaseModel):
    """Keys of a scenario for it."""

    bands: Annotated[int, Field(ge=1, le=1024)] = Field(
        16,
        description='diagonals of C for mechanism = "banded", of its inverse for "bisr"; a round takes as many '
        "vector additions",
    )


@dataclass(frozen=True)
class _Banded(Toeplitz):
    """Base class of both: `bands` diagonals, of C or of its inverse."""

    decay: float = field(default=1.0, metadata=SHARED)
    bands: int = 16

    def __post_init__(self) -> None:
        if self.bands < 1:
            raise InputError(f"bands = {self.bands}: at least one is needed, the diagonal")

    @classmethod
    def of(cls, workload: Workload, options: BandedOptions) -> Self:
        return cls(workload.decay, options.bands)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.bands})"

    def options(self) -> dict[str, Any]:
        return {"bands": self.bands}

    def memory_vectors(self, workload: Workload) -> int:
        """The last noise, and one a round up to bands - 1."""
        return min(self.bands, workload.rounds + 1)


@dataclass(frozen=True)
class BandedSquareRoot(_Banded):
    """Noise C^-1 z on the increments, summed like them; C has `bands` diagonals.

    Guarantee: C ≥ 0 with nonincreasing coefficients, so the worst record of a fixed order, and of separated
    participations with equal clips or a separation of at least `bands`, is charged exactly.
    """

    name: ClassVar[str] = "banded"
    words: ClassVar[str] = "Gaussian noise correlated over the rounds (banded matrix factorization)"

    @classmethod
    def comparisons(cls, workload: Workload, options: BandedOptions) -> dict[str, Self]:
        """A few widths, and the square root itself, which would store T vectors: what memory can buy."""
        several = [cls(workload.decay, bands) for bands in _COMPARED_BANDS if bands < workload.rounds]
        found = {one.label: one for one in several}
        if workload.rounds <= _MAX_VECTORS:
            found["square root"] = cls(workload.decay, workload.rounds)
        return found

    def blocks(self, workload: Workload) -> ColumnBlocks:
        self.check_workload(workload)
        bands = min(self.bands, workload.rounds)
        squares = series.column_squared_norms(series.square_root(self.decay, bands), workload.rounds)
        return ColumnBlocks(bands, np.sqrt(squares))

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the last noise and the last bands - 1 rows of C^-1 z, latest first."""
        return _noise_step(state, fresh, self.decay, self._weights, keep_rows=True)

    def strategy_series(self, count: int) -> Floats:
        return series.square_root(self.decay, min(self.bands, count))

    def noise_row(self, count: int) -> Floats:
        coefficients = self.strategy_series(count)
        if self.bands >= count:
            return coefficients
        return series.inverse(np.convolve(coefficients, [1.0, -self.decay]), count)

    def integer(self, workload: Workload) -> Factorization:
        exact = RoundedBanded(self.decay, min(self.bands, workload.rounds))
        return Factorization(IntegerBanded(exact.multiples[1:]), exact, workload)

    @cached_property
    def _weights(self) -> list[float]:
        """Of the last rows of C^-1 z in the next one."""
        return list((-self.strategy_series(self.bands)[1:]).tolist())


@dataclass(frozen=True)
class RoundedBanded(BandedSquareRoot):
    """`BandedSquareRoot` whose C has the coefficients `multiples` / 2^31.

    Guarantee: rounding keeps them falling and ≥ 0, so the worst record is charged as exactly as without it.
    """

    @cached_property
    def multiples(self) -> tuple[int, ...]:
        """c_0, c_1, …, counted in 2^-31."""
        return tuple(to_coefficient(value) for value in series.square_root(self.decay, self.bands).tolist())

    def strategy_series(self, count: int) -> Floats:
        return np.array(self.multiples[:count]) / COEFFICIENT_ONE

    def noise_row(self, count: int) -> Floats:
        return series.inverse(np.convolve(self.strategy_series(count), [1.0, -self.decay]), count)


@dataclass(frozen=True)
class IntegerBanded(IntegerStrategy):
    """s_t + Σ_j ⌊c_j s_{t-j}⌉; `coefficients` c_1, c_2, … count multiples of 2^-31, c_0 = 1 is left out.

    Each of the products is rounded for itself, so neighbours differ by 1 a band beside the diagonal.
    """

    coefficients: tuple[int, ...]

    def __post_init__(self) -> None:
        falling = all(
            after <= before
            for before, after in zip((COEFFICIENT_ONE, *self.coefficients), self.coefficients, strict=False)
        )
        if not falling or any(c < 0 for c in self.coefficients):
            raise InputError("coefficients of a banded strategy start with 1, never rise and are 0 or more")

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        return (NoiseGroup(rounds, 1.0, Fraction(min(len(self.coefficients), rounds))),)

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        largest, past = 0, list[int]()
        for (load,) in loads:
            largest = max(largest, load + sum(map(scale_bound, past, self.coefficients)))
            past = [load, *past][: len(self.coefficients)]
        return IntegerBounds(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the last increments, latest first: one fewer than there are bands."""
        if not self.coefficients:
            return sums, ()
        total = sums.copy()
        for past, multiple in zip(state, self.coefficients, strict=False):
            total += scale_integers(past, multiple)
        return total, (sums, *state)[: len(self.coefficients)]


_COMPARED_INVERSE_BANDS = 4
_ROUNDING = 1e-12


@dataclass(frozen=True)
class BandedInverseSquareRoot(_Banded):
    """Noise on the increments is z_t - (a few earlier vectors, weighted), and is summed like the increments.

    Guarantee: C^-1 = I - (coefficients ≥ 0), so C ≥ 0, and every record of a fixed order is charged exactly.
    Separated participations rest on coefficients that never increase, which is checked, not proved.
    """

    name: ClassVar[str] = "bisr"
    words: ClassVar[str] = "Gaussian noise correlated over the rounds (banded inverse matrix factorization)"

    bands: int = 4

    @classmethod
    def comparisons(cls, workload: Workload, options: BandedOptions) -> dict[str, Self]:
        one = cls(workload.decay, min(_COMPARED_INVERSE_BANDS, workload.rounds))
        return {one.label: one}

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the last noise and the last bands - 1 fresh vectors, latest first."""
        return _noise_step(state, fresh, self.decay, self._inverse_coefficients[1:], keep_rows=False)

    def noise_row(self, count: int) -> Floats:
        row = np.zeros(count)
        for lag, weight in enumerate(self._inverse_coefficients[:count]):
            row[lag:] += weight * powers(self.decay, count - lag)
        return row

    def strategy_series(self, count: int) -> Floats:
        """InputError if the coefficients of C should ever increase: then the worst pattern is not known."""
        coefficients = series.inverse(np.array(self._inverse_coefficients[:count]), count)
        highest = np.maximum.accumulate(np.abs(coefficients[::-1]))[::-1]  # the least series above it that falls
        if np.max(highest - coefficients) > _ROUNDING:
            raise InputError(
                f"bands = {self.bands}, decay = {self.decay}: the coefficients of C increase over {count} "
                "rounds, and its worst participation is not known; take another number of bands"
            )
        return highest

    def integer(self, workload: Workload) -> Factorization:
        raise InputError(
            'mechanism = "bisr": only the inverse of its C has a few bands, so that C on integers would feed its '
            "own rounded outputs back, and how far neighbours round apart is not bounded here; use "
            '"blt" or "banded"'
        )

    @cached_property
    def _inverse_coefficients(self) -> list[float]:
        """The coefficients of C^-1."""
        lags = np.arange(1, self.bands, dtype=np.float64)
        return [1.0, *np.cumprod(self.decay * (lags - 1.5) / lags).tolist()]


_MAX_PERIOD = 1024  # as many vectors are kept


@dataclass(frozen=True)
class AnchoredSquareRoot(Mechanism):
    """`anchor` times as much noise in an anchor's round as is fresh in others, which stays until the next one.

    Guarantee: in one pass a record is in one round.  At an anchor it moves C s by its clip over `anchor`,
    elsewhere by its clip times the norm of its column of C', which ends with the period; the worst record is
    charged, exactly, for any clips.
    """

    name: ClassVar[str] = "anchored"
    words: ClassVar[str] = (
        "Gaussian noise of every anchor's own, and correlated noise on the changes between anchors"
    )

    period: int
    anchor: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.period <= _MAX_PERIOD:
            raise InputError(f"period = {self.period}: from 1 to {_MAX_PERIOD} rounds, as many vectors are kept")
        if not 0.0 < self.anchor < math.inf:
            raise InputError(f"anchor = {self.anchor}: a ratio of two noises is a finite number above 0")

    @classmethod
    def with_equal_cost(cls, period: int, anchor_clip: float, clip: float) -> Self:
        """Size the anchor so that its record costs what the first difference of a period costs."""
        plain = cls(period)
        longest = plain._column_norms(period - 1)[0] if period > 1 else 1.0
        return dataclasses.replace(plain, anchor=anchor_clip / (clip * float(longest)))

    def certified(self, workload: Workload) -> Sensitivity:
        check_matches(workload, 1.0, self.period)
        if not workload.public_order.single_pass:
            raise InputError(f"mechanism = {self.name!r}: its certificate is for records that are read once")
        moved = tile_periods(
            workload, lambda rounds: np.concatenate([[1.0 / self.anchor], self._column_norms(rounds - 1)])
        )
        worst = float(np.max(workload.clips * moved))
        return Sensitivity(worst, True, "one participation: an anchor's own noise, or the longest column")

    @property
    def fresh_std(self) -> float:
        return min(1.0, self.anchor)

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, 1.0, self.period)
        rows = (
            np.concatenate([[0.0], np.cumsum(self._inverse_coefficients[: self.period - 1] ** 2)]) + self.anchor**2
        )
        return tile_periods(workload, lambda rounds: rows[:rounds])

    @property
    def worst_variance(self) -> float:
        """Of the last round of a period."""
        return self.anchor**2 + float(np.sum(self._inverse_coefficients[: self.period - 1] ** 2))

    def memory_vectors(self, workload: Workload) -> int:
        return 1 + min(max(self.period - 1, 0), workload.rounds)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the anchor's noise, and that of the square root since."""
        if not state or (t - 1) % self.period == 0:
            noise = fresh * self.anchor
            return noise, (noise,)
        changes, after = self._change_noise.noise(state[1:], t, fresh)
        return state[0] + changes, (state[0], *after)

    @cached_property
    def _change_noise(self) -> BandedSquareRoot:
        return BandedSquareRoot(1.0, max(1, self.period - 1))

    @cached_property
    def _inverse_coefficients(self) -> Floats:
        """B' = A C'^-1 is the square root itself."""
        return series.square_root(1.0, max(1, self.period - 1))

    def _column_norms(self, rounds: int) -> Floats:
        """Norms of the columns of C' over so many rounds."""
        if rounds < 1:
            return np.zeros(0)
        return np.sqrt(series.column_squared_norms(series.square_root(1.0, rounds), rounds))
