"""The banded square root with coefficients that are multiples of 2^-31, in C, B and the sensitivity alike."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedpriv.exact.fixed_point import ONE, coefficient
from fedpriv.mechanisms.base import Sensitivity, check_matches
from fedpriv.mechanisms.sensitivity import nonincreasing, series
from fedpriv.mechanisms.toeplitz import BandedSquareRoot
from fedpriv.mechanisms.workload import Floats, Workload


@dataclass(frozen=True)
class RoundedBanded(BandedSquareRoot):
    """`BandedSquareRoot` whose C has the coefficients `multiples` / 2^31.

    Guarantee: rounding keeps them falling and ≥ 0, so the worst record is charged as exactly as without it.
    """

    @cached_property
    def multiples(self) -> tuple[int, ...]:
        """c_0, c_1, …, counted in 2^-31."""
        return tuple(coefficient(value) for value in series.square_root(self.decay, self.bands).tolist())

    def certified(self, workload: Workload) -> Sensitivity:
        check_matches(workload, self.decay, None)
        return toeplitz_certified(np.array(self._coefficients[: workload.rounds]), workload)

    @cached_property
    def _coefficients(self) -> list[float]:
        return [multiple / ONE for multiple in self.multiples]

    @cached_property
    def _block_answers(self) -> tuple[Floats, Floats]:
        coefficients = np.array(self._coefficients)
        inverted = series.inverse(coefficients, self.bands)
        return series.history_response(coefficients, inverted), series.lower_toeplitz(inverted)

    def _noise_series(self, rounds: int) -> Floats:
        coefficients = np.array(self._coefficients[:rounds])
        return series.inverse(np.convolve(coefficients, [1.0, -self.decay]), rounds)


def toeplitz_certified(coefficients: Floats, workload: Workload) -> Sensitivity:
    """The sensitivity of the Toeplitz C of these nonincreasing coefficients ≥ 0, (up to T,), without restarts."""
    columns = series.column_squared_norms(coefficients, workload.rounds)

    def within(clips: Floats, rounds_per_epoch: int) -> Floats:
        return series.record_squared_norms(coefficients, clips, rounds_per_epoch)

    return nonincreasing.certified(workload, lambda: coefficients, columns, within)
