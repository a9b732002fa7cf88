"""Toeplitz strategies: banded square roots of the sums, banded inverses, and one that restarts.

| mechanism | C |
|---|---|
| banded | the first `bands` coefficients of (1 - decay·x)^(-1/2) |
| bisr | C^-1 has the first `bands` coefficients of (1 - decay·x)^(1/2) |
| anchored | diag(1/anchor, C') in every period, C' the square root of the prefix sums of its other rounds |

A forms the running sums, with decay and T rounds, of the sums s of increments, the clipped contributions of a
round's records.  x delays by one round.  B = A C^-1, so that B z is the noise for fresh normal vectors z, and a
record is charged the distance by which it moves C s.  With `bands` = T, "banded" is the square-root factorization
A = C C.  A round of "banded" and "bisr" takes O(bands · d) for vectors of d values.

"anchored" is for sums that restart and records that are read once.  The first round of a period, its anchor,
releases the whole sum anew, later rounds add differences.  Anchors and differences have separate noise.

Sources: Fichtenberger, Henzinger & Upadhyay 2023 and Kalinin & Lampert 2024 for square roots; Choquette-Choo et
al. 2023, "(Amplified) banded matrix factorization", for streaming; Kalinin, McKenna, Upadhyay & Lampert 2025,
"Back to Square Roots: An Optimal Bound on the Matrix Factorization Error for Multi-Epoch Differentially Private
SGD".
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
        """Return the first coefficients of C, at most `count`, with zeros beyond their end."""
        raise NotImplementedError

    def noise_row(self, count: int) -> Floats:
        """Return the first `count` coefficients of B = A C^-1."""
        raise NotImplementedError

    def check_workload(self, workload: Workload) -> None:
        """Check that the mechanism factors the workload.

        Raises:
            InputError: The mechanism does not factor it.
        """
        check_matches(workload, self.decay, None)

    def certified(self, workload: Workload) -> Sensitivity:
        self.check_workload(workload)
        return nonincreasing.sensitivity_from_series(workload, self.strategy_series(workload.rounds))

    def columns(self, workload: Workload) -> Columns:
        self.check_workload(workload)
        return toeplitz_columns(self.strategy_series(workload.rounds), workload)

    @property
    def fresh_std(self) -> float:
        """Diagonal of B, which is 1 like that of C."""
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
    """Return row t of B z and the next state, for a banded C or C^-1.

    Row t of C^-1 z is v_t = z_t + Σ_j weights[j-1] · past_{t-j}, and the noise is n_t = v_t + decay · n_{t-1}.
    Past vectors are earlier rows v_t if C is banded (`keep_rows`), and earlier fresh vectors z_t if C^-1 is
    banded.  The state holds the last noise, and then past vectors, latest first.

    Args:
        state: State before round t, empty before round 1.
        fresh: Fresh vector z_t.
        decay: Decay of the running sums.
        weights: Weights of earlier vectors, latest first, (bands - 1,).
        keep_rows: Whether the past vectors are rows of C^-1 z.
    """
    if not state:  # in round 1 the noise and the row of C^-1 z are the fresh vector
        return fresh, (fresh, fresh)[: 1 + len(weights)]
    past_vectors = state[1:]
    row = fresh.clone()
    for weight, vector in zip(weights, past_vectors, strict=False):
        row.add_(vector, alpha=weight)
    noise = row.add(state[0], alpha=decay)
    return noise, (noise, *(row if keep_rows else fresh, *past_vectors)[: len(weights)])


_COMPARED_BANDS = (1, 8, 64)
"""Numbers of bands in a comparison."""
_MAX_VECTORS = 1_000_000
"""Most rounds T for which a comparison has a mechanism with T vectors of state."""


class BandedOptions(BaseModel):
    """Keys of a scenario for banded mechanisms."""

    bands: Annotated[int, Field(ge=1, le=1024)] = Field(
        16,
        description='diagonals of C for mechanism = "banded", of its inverse for "bisr"; a round takes as many '
        "vector additions",
    )


@dataclass(frozen=True)
class _Banded(Toeplitz):
    """Base class of mechanisms with `bands` diagonals, of C or of its inverse."""

    decay: float = field(default=1.0, metadata=SHARED)
    """Decay of the running sums per round."""
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
        """Most vectors in the state: the last noise, and one for each past round, up to bands - 1."""
        return min(self.bands, workload.rounds + 1)


@dataclass(frozen=True)
class BandedSquareRoot(_Banded):
    """Noise C^-1 z on the increments, summed like them, for a C with `bands` diagonals.

    Guarantee: C ≥ 0 with nonincreasing coefficients, so the worst record of a fixed order, and of separated
    participations with equal clips or a separation of at least `bands`, is charged exactly.

    Example:
        >>> from fedpriv.participation.orders import FixedOrder
        >>> workload = Workload(FixedOrder(rounds=8, rounds_per_epoch=8), decay=1.0, clips=np.ones(8))
        >>> mechanism = BandedSquareRoot.of(workload, BandedOptions(bands=3))
        >>> round(mechanism.certified(workload).value, 4), mechanism.memory_vectors(workload)
        (1.1792, 3)
    """

    name: ClassVar[str] = "banded"
    words: ClassVar[str] = "Gaussian noise correlated over the rounds (banded matrix factorization)"

    @classmethod
    def comparisons(cls, workload: Workload, options: BandedOptions) -> dict[str, Self]:
        """Return mechanisms of 1, 8 and 64 bands, as far as these are below T, and the square root itself.

        The square root, with bands = T, would store T vectors, and is left out beyond a million rounds.
        """
        banded = [cls(workload.decay, bands) for bands in _COMPARED_BANDS if bands < workload.rounds]
        mechanisms = {mechanism.label: mechanism for mechanism in banded}
        if workload.rounds <= _MAX_VECTORS:
            mechanisms["square root"] = cls(workload.decay, workload.rounds)
        return mechanisms

    def blocks(self, workload: Workload) -> ColumnBlocks:
        self.check_workload(workload)
        coefficients = self.strategy_series(workload.rounds)
        squares = series.column_squared_norms(coefficients, workload.rounds)
        return ColumnBlocks(len(coefficients), np.sqrt(squares))

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Return the noise of round t and the next state.

        The state holds the last noise and up to bands - 1 rows of C^-1 z, latest first.
        """
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
        """Weights of the last rows of C^-1 z in the next one."""
        return list((-self.strategy_series(self.bands)[1:]).tolist())


@dataclass(frozen=True)
class RoundedBanded(BandedSquareRoot):
    """Banded square root whose C has the coefficients `multiples` / 2^31.

    As data it is a `BandedSquareRoot`, whose `integer` returns it again.

    Guarantee: rounding keeps the coefficients ≥ 0 and never increasing, so the worst record is charged as exactly
    as without rounding.
    """

    @cached_property
    def multiples(self) -> tuple[int, ...]:
        """Coefficients c_0, c_1, … in multiples of 2^-31."""
        return tuple(to_coefficient(value) for value in series.square_root(self.decay, self.bands).tolist())

    def strategy_series(self, count: int) -> Floats:
        return np.array(self.multiples[:count]) / COEFFICIENT_ONE

    def noise_row(self, count: int) -> Floats:
        return series.inverse(np.convolve(self.strategy_series(count), [1.0, -self.decay]), count)


@dataclass(frozen=True)
class IntegerBanded(IntegerStrategy):
    """C of `RoundedBanded` on integers: s_t + Σ_j ⌊c_j s_{t-j}⌉.

    `coefficients` are c_1, c_2, … in multiples of 2^-31, without c_0 = 1.  Each product is rounded, which changes
    the difference of neighbours by at most 1 for each band beside the diagonal.
    """

    coefficients: tuple[int, ...]

    def __post_init__(self) -> None:
        is_falling = all(
            coefficient <= coefficient_before
            for coefficient_before, coefficient in zip(
                (COEFFICIENT_ONE, *self.coefficients), self.coefficients, strict=False
            )
        )
        if not is_falling or any(value < 0 for value in self.coefficients):
            raise InputError("coefficients of a banded strategy start with 1, never rise and are 0 or more")

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        return (NoiseGroup(rounds, 1.0, Fraction(min(len(self.coefficients), rounds))),)

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        max_bound, past_loads = 0, list[int]()
        for (load,) in loads:
            max_bound = max(max_bound, load + sum(map(scale_bound, past_loads, self.coefficients)))
            past_loads = [load, *past_loads][: len(self.coefficients)]
        return IntegerBounds(max_bound, max_bound)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """Return (C s)_t = s_t + Σ_j ⌊c_j s_{t-j}⌉ and the next state, for sums s_t, int64, of any shape.

        The state, empty before round 1, holds s_{t-1}, s_{t-2}, …, at most as many as there are coefficients.
        """
        if not self.coefficients:
            return sums, ()
        total = sums.copy()
        for past_sums, multiple in zip(state, self.coefficients, strict=False):
            total += scale_integers(past_sums, multiple)
        return total, (sums, *state)[: len(self.coefficients)]


_COMPARED_INVERSE_BANDS = 4
"""Number of bands of C^-1 in a comparison."""
_ROUNDING = 1e-12
"""Largest increase of the coefficients of C that counts as rounding."""


@dataclass(frozen=True)
class BandedInverseSquareRoot(_Banded):
    """Noise z_t minus a few weighted earlier vectors on the increments, summed like them.

    Guarantee: C^-1 = I - N with N ≥ 0, so C ≥ 0, and the worst record of a fixed order is charged exactly.
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
        """Return the noise of round t and the next state.

        The state holds the last noise and up to bands - 1 fresh vectors, latest first.
        """
        return _noise_step(state, fresh, self.decay, self._inverse_coefficients[1:], keep_rows=False)

    def noise_row(self, count: int) -> Floats:
        row = np.zeros(count)
        for lag, weight in enumerate(self._inverse_coefficients[:count]):
            row[lag:] += weight * powers(self.decay, count - lag)
        return row

    def strategy_series(self, count: int) -> Floats:
        """Return the first `count` coefficients of C, rounded up to a series that never increases.

        A coefficient that rounding errors put below a later one, by at most 1e-12, is raised.

        Args:
            count: Number of coefficients.

        Raises:
            InputError: A coefficient is below a later one by more, so that the worst pattern is not known.
        """
        coefficients = series.inverse(np.array(self._inverse_coefficients[:count]), count)
        upper_bounds = np.maximum.accumulate(np.abs(coefficients[::-1]))[::-1]  # least falling series above it
        if np.max(upper_bounds - coefficients) > _ROUNDING:
            raise InputError(
                f"bands = {self.bands}, decay = {self.decay}: the coefficients of C increase over {count} "
                "rounds, and its worst participation is not known; take another number of bands"
            )
        return upper_bounds

    def integer(self, workload: Workload) -> Factorization:
        raise InputError(
            'mechanism = "bisr": only the inverse of its C has a few bands, so that C on integers would feed its '
            "own rounded outputs back, and how far neighbours round apart is not bounded here; use "
            '"blt" or "banded"'
        )

    @cached_property
    def _inverse_coefficients(self) -> list[float]:
        """Coefficients of C^-1."""
        lags = np.arange(1, self.bands, dtype=np.float64)
        return [1.0, *np.cumprod(self.decay * (lags - 1.5) / lags).tolist()]


_MAX_PERIOD = 1024
"""Most rounds of a period, which are as many as the vectors in the state at its end."""


@dataclass(frozen=True)
class AnchoredSquareRoot(Mechanism):
    """Noise that restarts with every period, with separate noise of the period's first round, its anchor.

    All releases of the period contain the anchor's noise.

    Guarantee: in one pass a record is in one round.  At an anchor it moves C s by at most its clip over `anchor`,
    elsewhere by at most its clip times the norm of its column of C', which ends with the period; the worst record
    is charged, exactly, for any clips, if every round reads records.
    """

    name: ClassVar[str] = "anchored"
    words: ClassVar[str] = (
        "Gaussian noise of each anchor's own, and correlated noise on the changes between anchors"
    )

    period: int
    """Rounds of a period, the anchor included."""
    anchor: float = 1.0
    """Ratio of the standard deviations of an anchor's noise and of the fresh noise of other rounds."""

    def __post_init__(self) -> None:
        if not 1 <= self.period <= _MAX_PERIOD:
            raise InputError(f"period = {self.period}: from 1 to {_MAX_PERIOD} rounds, as many vectors are kept")
        if not 0.0 < self.anchor < math.inf:
            raise InputError(f"anchor = {self.anchor}: a ratio of two noises is a finite number above 0")

    @classmethod
    def with_equal_cost(cls, period: int, anchor_clip: float, clip: float) -> Self:
        """Return the mechanism in which an anchor costs as much as the first difference of a full period.

        The costs are those of the records of the two rounds.  For period 1, which has no differences, `anchor` is
        `anchor_clip` / `clip`.

        Args:
            period: Rounds of a period, the anchor included.
            anchor_clip: Clip norm of an anchor.
            clip: Clip norm of other rounds, above 0.

        Raises:
            InputError: The period or the ratio of the noises is out of its range.
        """
        unsized = cls(period)
        norm = unsized._column_norms(period - 1)[0] if period > 1 else 1.0
        return dataclasses.replace(unsized, anchor=anchor_clip / (clip * float(norm)))

    def certified(self, workload: Workload) -> Sensitivity:
        """Return the sensitivity of one pass, the largest clip_t · n_t over the rounds t.

        n_t is 1 / `anchor` in the first round of a period, the anchor.  Otherwise it is the norm of the round's
        column of C', the square root of the prefix sums of the period's other rounds.

        Args:
            workload: Workload that restarts every `period` rounds, with decay 1.

        Raises:
            InputError: Participation is secret, has fresh permutations or is no single pass, or the mechanism does
                not factor the workload.
        """
        check_matches(workload, 1.0, self.period)
        if not workload.public_order.single_pass:
            raise InputError(f"mechanism = {self.name!r}: its certificate is for records that are read once")
        displacements = tile_periods(
            workload, lambda rounds: np.concatenate([[1.0 / self.anchor], self._column_norms(rounds - 1)])
        )
        max_displacement = float(np.max(workload.clips * displacements))
        return Sensitivity(
            max_displacement, True, "one participation: an anchor's own noise, or the longest column"
        )

    @property
    def fresh_std(self) -> float:
        return min(1.0, self.anchor)

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, 1.0, self.period)
        row_variances = (
            np.concatenate([[0.0], np.cumsum(self._change_noise_series[: self.period - 1] ** 2)]) + self.anchor**2
        )
        return tile_periods(workload, lambda rounds: row_variances[:rounds])

    @property
    def worst_variance(self) -> float:
        """Noise variance of the last round of a full period, for fresh vectors of variance 1."""
        return self.anchor**2 + float(np.sum(self._change_noise_series[: self.period - 1] ** 2))

    def memory_vectors(self, workload: Workload) -> int:
        return min(self.period, workload.rounds + (workload.rounds > 1))  # a lone anchor has one vector

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Return the noise of round t and the next state.

        The noise of an anchor is `anchor` times its fresh vector.  A later round of the period has this noise plus
        that of a full square root on the changes since the anchor.  The state holds the anchor's noise, and the
        square root's state.
        """
        if not state or (t - 1) % self.period == 0:
            noise = fresh * self.anchor
            return noise, (noise,)
        changes, next_state = self._change_noise.noise(state[1:], t, fresh)
        return state[0] + changes, (state[0], *next_state)

    @cached_property
    def _change_noise(self) -> BandedSquareRoot:
        return BandedSquareRoot(1.0, max(1, self.period - 1))

    @cached_property
    def _change_noise_series(self) -> Floats:
        """Coefficients of B', the noise on changes, with B' = C' since C' C' is the matrix of prefix sums."""
        return series.square_root(1.0, max(1, self.period - 1))

    def _column_norms(self, rounds: int) -> Floats:
        """Compute the norms of the columns of C' for `rounds` rounds after an anchor, (rounds,)."""
        if rounds < 1:
            return np.zeros(0)
        return np.sqrt(series.column_squared_norms(series.square_root(1.0, rounds), rounds))
