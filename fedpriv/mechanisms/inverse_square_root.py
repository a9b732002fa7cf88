"""The banded inverse square root: C^-1 has the first `bands` coefficients of (1 - decay·x)^(1/2).

It remembers as many vectors as the banded square root, and its C reaches over all rounds.  A baseline: with as
many vectors `BufferedToeplitz` adds less noise.

Source: Kalinin, McKenna, Upadhyay & Lampert 2025, "Back to Square Roots: An Optimal Bound on the Matrix
Factorization Error for Multi-Epoch Differentially Private SGD".
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedpriv.errors import InputError
from fedpriv.mechanisms.base import Mechanism, MechanismState, Sensitivity, check_matches
from fedpriv.mechanisms.sensitivity import nonincreasing, series
from fedpriv.mechanisms.workload import Floats, Workload, powers
from fedpriv.replicates.columns import SHARED

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = 1e-12


@dataclass(frozen=True)
class BandedInverseSquareRoot(Mechanism):
    """Noise on the increments is z_t - (a few earlier vectors, weighted), and is summed like the increments.

    Guarantee: C^-1 = I - (coefficients ≥ 0), so C ≥ 0, and every record of a fixed order is charged exactly.
    Separated participations rest on coefficients that never increase, which is checked, not proved.
    """

    name: ClassVar[str] = "inverse-square-root"
    words: ClassVar[str] = "Gaussian noise correlated over the rounds (banded inverse matrix factorization)"

    decay: float = field(default=1.0, metadata=SHARED)
    bands: int = 4

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay = {self.decay}: the decay of a running sum lies between 0 and 1")
        if self.bands < 1:
            raise InputError(f"bands = {self.bands}: C^-1 has at least one band, its diagonal")

    def certified(self, workload: Workload) -> Sensitivity:
        """InputError if the coefficients of C should ever increase: then the worst pattern is not known."""
        check_matches(workload, self.decay, None)
        coefficients = self._strategy(workload.rounds)
        columns = series.column_squared_norms(coefficients, workload.rounds)

        def within(clips: Floats, rounds_per_epoch: int) -> Floats:
            return series.record_squared_norms(coefficients, clips, rounds_per_epoch)

        return nonincreasing.certified(workload, lambda: coefficients, columns, within)

    @property
    def fresh_std(self) -> float:
        """B has a diagonal of ones."""
        return 1.0

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, self.decay, None)
        row = np.zeros(workload.rounds)
        for lag, weight in enumerate(self._inverse[: workload.rounds]):
            row[lag:] += weight * powers(self.decay, workload.rounds - lag)
        return np.cumsum(row**2)

    def memory_vectors(self, workload: Workload) -> int:
        return min(self.bands, workload.rounds + 1)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the last noise and the last bands - 1 fresh vectors, latest first."""
        if not state:
            return fresh, (fresh, fresh)[: self.bands]
        past = state[1:]
        increment = fresh.clone()
        for weight, earlier in zip(self._inverse[1:], past, strict=False):
            increment.add_(earlier, alpha=weight)
        noise = increment.add_(state[0], alpha=self.decay)
        return noise, (noise, *(fresh, *past)[: self.bands - 1])

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
