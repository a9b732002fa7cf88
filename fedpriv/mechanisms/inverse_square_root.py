"""The banded inverse square root: C^-1 has the first `bands` coefficients of (1 - decay·x)^(1/2).

It remembers as many vectors as the banded square root, and its C reaches over all rounds.  A baseline: with as
many vectors `BufferedToeplitz` adds less noise.

Source: Kalinin, McKenna, Upadhyay & Lampert 2025, "Back to Square Roots: An Optimal Bound on the Matrix
Factorization Error for Multi-Epoch Differentially Private SGD".
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from fedpriv.errors import InputError
from fedpriv.mechanisms import band_stream
from fedpriv.mechanisms.base import Mechanism, MechanismState, Sensitivity, check_matches
from fedpriv.mechanisms.columns import Columns, toeplitz_columns
from fedpriv.mechanisms.sensitivity import nonincreasing, series
from fedpriv.mechanisms.toeplitz import BandedOptions
from fedpriv.mechanisms.workload import Floats, Workload, powers
from fedpriv.replicates.columns import SHARED

if TYPE_CHECKING:
    from torch import Tensor

_COMPARED = 4
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
        one = cls(workload.decay, min(_COMPARED, workload.rounds))
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
