"""The banded square root with coefficients that are multiples of 2^-31, in C, B and the sensitivity alike."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedpriv.exact.fixed_point import ONE, coefficient
from fedpriv.mechanisms.sensitivity import series
from fedpriv.mechanisms.toeplitz import BandedSquareRoot
from fedpriv.mechanisms.workload import Floats


@dataclass(frozen=True)
class RoundedBanded(BandedSquareRoot):
    """`BandedSquareRoot` whose C has the coefficients `multiples` / 2^31.

    Guarantee: rounding keeps them falling and ≥ 0, so the worst record is charged as exactly as without it.
    """

    @cached_property
    def multiples(self) -> tuple[int, ...]:
        """c_0, c_1, …, counted in 2^-31."""
        return tuple(coefficient(value) for value in series.square_root(self.decay, self.bands).tolist())

    def _strategy(self, rounds: int) -> Floats:
        return np.array(self.multiples[:rounds]) / ONE

    def _noise_series(self, rounds: int) -> Floats:
        return series.inverse(np.convolve(self._strategy(rounds), [1.0, -self.decay]), rounds)
