"""The square-root factorization of a decayed prefix sum, and its banded form.

C is the lower-triangular Toeplitz matrix of the first `bands` coefficients of (1 - decay·x)^(-1/2), B = A C^-1.
With bands ≥ T it is the square-root factorization A = C C itself, and needs all T vectors; with few bands it
streams in O(bands · d).  bands = 1 is noise on the increments (C = I).

Sources: see `series`; Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization", for streaming.

Streaming C^-1 z where C, or its inverse, has a few diagonals, and summing it with decay.

The banded inverse square root: C^-1 has the first `bands` coefficients of (1 - decay·x)^(1/2).

It remembers as many vectors as the banded square root, and its C reaches over all rounds.  A baseline: with as
many vectors `BufferedToeplitz` adds less noise.

Source: Kalinin, McKenna, Upadhyay & Lampert 2025, "Back to Square Roots: An Optimal Bound on the Matrix
Factorization Error for Multi-Epoch Differentially Private SGD".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, Field

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED
from fedpriv.noise import sensitivity as nonincreasing
from fedpriv.noise import series
from fedpriv.noise import toeplitz as band_stream
from fedpriv.noise.mechanism import (
    Blocks,
    Columns,
    Mechanism,
    MechanismState,
    Sensitivity,
    check_matches,
    toeplitz_columns,
)
from fedpriv.noise.workload import Floats, Workload, powers

if TYPE_CHECKING:
    from torch import Tensor


def noise(
    state: MechanismState, fresh: "Tensor", decay: float, weights: Sequence[float], *, of_rows: bool
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
    return noise, (noise, *(row if of_rows else fresh, *past)[: len(weights)])


def memory_vectors(bands: int, rounds: int) -> int:
    """The most vectors of the state: the last noise, and one a round up to bands - 1."""
    return min(bands, rounds + 1)


_COMPARED = (1, 8, 64)
_MOST_VECTORS = 1_000_000  # beyond, a state of T vectors is no choice for anyone


class BandedOptions(BaseModel):
    """What a scenario can say of it."""

    bands: Annotated[int, Field(ge=1, le=1024)] = Field(
        16,
        description='diagonals of C for mechanism = "banded", of its inverse for "bisr"; a round takes as many '
        "vector additions",
    )


@dataclass(frozen=True)
class BandedSquareRoot(Mechanism):
    """Noise C^-1 z on the increments, summed like them; C has `bands` diagonals.

    Guarantee: C ≥ 0 with nonincreasing coefficients, so the worst record of a fixed order, and of separated
    participations with equal clips or a separation of at least `bands`, is charged exactly.
    """

    name: ClassVar[str] = "banded"
    words: ClassVar[str] = "Gaussian noise correlated over the rounds (banded matrix factorization)"

    decay: float = field(default=1.0, metadata=SHARED)
    bands: int = 16

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay = {self.decay}: the decay of a running sum lies between 0 and 1")
        if self.bands < 1:
            raise InputError(f"bands = {self.bands}: C has at least one band, its diagonal")

    @classmethod
    def of(cls, workload: Workload, options: BandedOptions) -> Self:
        return cls(workload.decay, options.bands)

    @classmethod
    def comparisons(cls, workload: Workload, options: BandedOptions) -> dict[str, Self]:
        """A few widths, and the square root itself, which would store T vectors: what memory can buy."""
        several = [cls(workload.decay, bands) for bands in _COMPARED if bands < workload.rounds]
        found = {one.label: one for one in several}
        if workload.rounds <= _MOST_VECTORS:
            found["square root"] = cls(workload.decay, workload.rounds)
        return found

    @property
    def label(self) -> str:
        return f"banded ({self.bands})"

    def options(self) -> dict[str, Any]:
        return {"bands": self.bands}

    def certified(self, workload: Workload) -> Sensitivity:
        check_matches(workload, self.decay, None)
        return nonincreasing.of_series(workload, self._strategy(workload.rounds))

    def columns(self, workload: Workload) -> Columns:
        check_matches(workload, self.decay, None)
        return toeplitz_columns(self._strategy(workload.rounds), workload)

    @property
    def fresh_std(self) -> float:
        """C has a diagonal of ones, and so has B."""
        return 1.0

    def blocks(self, workload: Workload) -> Blocks:
        check_matches(workload, self.decay, None)
        bands = min(self.bands, workload.rounds)
        squares = series.column_squared_norms(series.square_root(self.decay, bands), workload.rounds)
        return Blocks(bands, np.sqrt(squares))

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, self.decay, None)
        return np.cumsum(self.noise_series(workload) ** 2)

    def noise_series(self, workload: Workload) -> Floats:
        return self._noise_series(workload.rounds)

    def memory_vectors(self, workload: Workload) -> int:
        return band_stream.memory_vectors(self.bands, workload.rounds)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the last noise and the last bands - 1 rows of C^-1 z, latest first."""
        return band_stream.noise(state, fresh, self.decay, self._weights, of_rows=True)

    def noise_rounds(
        self, state: MechanismState, t: int, fresh: "Tensor"
    ) -> tuple[list["Tensor"], MechanismState]:
        """`noise` of the rounds t, t+1, …, by matrix products over blocks of `bands` rounds.

        Equal to `noise` up to the order of its sums.
        """
        import torch  # already there: `fresh` is a tensor

        noises: list[Tensor] = []
        for start in range(0, len(fresh), self.bands):
            block = fresh[start : start + self.bands]
            past = state[1:]
            from_past, from_fresh = (block.new_tensor(rows[: len(block)]) for rows in self._block_answers)
            increments = torch.tensordot(from_fresh[:, : len(block)], block, 1)
            if past:
                increments += torch.tensordot(from_past[:, : len(past)], torch.stack(past), 1)
            rows = increments.unbind()
            for row in rows:
                state = (row.add(state[0], alpha=self.decay) if state else row,)
                noises.append(state[0])
            state = (noises[-1], *(*reversed(rows), *past)[: self.bands - 1])
        return noises, state

    @cached_property
    def _block_answers(self) -> tuple[Floats, Floats]:
        """Rows of C^-1 z from the rows before the block, and from the block's fresh vectors."""
        coefficients = self._strategy(self.bands)
        inverted = series.inverse(coefficients, self.bands)
        return series.history_response(coefficients, inverted), series.lower_toeplitz(inverted)

    @cached_property
    def _weights(self) -> list[float]:
        """Of the last rows of C^-1 z in the next one."""
        weights: list[float] = (-self._strategy(self.bands)[1:]).tolist()
        return weights

    def _strategy(self, rounds: int) -> Floats:
        return series.square_root(self.decay, min(self.bands, rounds))

    def _noise_series(self, rounds: int) -> Floats:
        """The coefficients of B = A C^-1."""
        coefficients = self._strategy(rounds)
        if self.bands >= rounds:
            return coefficients
        return series.inverse(np.convolve(coefficients, [1.0, -self.decay]), rounds)


_INVERSE_SQUARE_ROOT_COMPARED = 4
_ROUNDING = 1e-12


@dataclass(frozen=True)
class BandedInverseSquareRoot(Mechanism):
    """Noise on the increments is z_t - (a few earlier vectors, weighted), and is summed like the increments.

    Guarantee: C^-1 = I - (coefficients ≥ 0), so C ≥ 0, and every record of a fixed order is charged exactly.
    Separated participations rest on coefficients that never increase, which is checked, not proved.
    """

    name: ClassVar[str] = "bisr"
    words: ClassVar[str] = "Gaussian noise correlated over the rounds (banded inverse matrix factorization)"

    decay: float = field(default=1.0, metadata=SHARED)
    bands: int = 4

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay = {self.decay}: the decay of a running sum lies between 0 and 1")
        if self.bands < 1:
            raise InputError(f"bands = {self.bands}: C^-1 has at least one band, its diagonal")

    @classmethod
    def of(cls, workload: Workload, options: BandedOptions) -> Self:
        return cls(workload.decay, options.bands)

    @classmethod
    def comparisons(cls, workload: Workload, options: BandedOptions) -> dict[str, Self]:
        one = cls(workload.decay, min(_INVERSE_SQUARE_ROOT_COMPARED, workload.rounds))
        return {one.label: one}

    def options(self) -> dict[str, Any]:
        return {"bands": self.bands}

    @property
    def label(self) -> str:
        return f"{self.name} ({self.bands})"

    def certified(self, workload: Workload) -> Sensitivity:
        """InputError if the coefficients of C should ever increase: then the worst pattern is not known."""
        check_matches(workload, self.decay, None)
        return nonincreasing.of_series(workload, self._strategy(workload.rounds))

    def columns(self, workload: Workload) -> Columns:
        check_matches(workload, self.decay, None)
        return toeplitz_columns(self._strategy(workload.rounds), workload)

    @property
    def fresh_std(self) -> float:
        """B has a diagonal of ones."""
        return 1.0

    def variance(self, workload: Workload) -> Floats:
        return np.cumsum(self.noise_series(workload) ** 2)

    def noise_series(self, workload: Workload) -> Floats:
        check_matches(workload, self.decay, None)
        row = np.zeros(workload.rounds)
        for lag, weight in enumerate(self._inverse[: workload.rounds]):
            row[lag:] += weight * powers(self.decay, workload.rounds - lag)
        return row

    def memory_vectors(self, workload: Workload) -> int:
        return band_stream.memory_vectors(self.bands, workload.rounds)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the last noise and the last bands - 1 fresh vectors, latest first."""
        return band_stream.noise(state, fresh, self.decay, self._inverse[1:], of_rows=False)

    def _strategy(self, rounds: int) -> Floats:
        coefficients = series.inverse(np.array(self._inverse[:rounds]), rounds)
        highest = np.maximum.accumulate(np.abs(coefficients[::-1]))[::-1]  # the least series above it that falls
        if np.max(highest - coefficients) > _ROUNDING:
            raise InputError(
                f"bands = {self.bands}, decay = {self.decay}: the coefficients of C increase over {rounds} "
                "rounds, and its worst participation is not known; take another number of bands"
            )
        return highest

    @cached_property
    def _inverse(self) -> list[float]:
        """The coefficients of C^-1."""
        lags = np.arange(1, self.bands, dtype=np.float64)
        coefficients: list[float] = [1.0, *np.cumprod(self.decay * (lags - 1.5) / lags).tolist()]
        return coefficients
