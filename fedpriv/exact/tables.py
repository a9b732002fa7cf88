"""What the discrete Gaussian's sampler knows about one σ, computed in integers: the same on every platform."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError

Words = NDArray[np.uint64]

COLUMNS = 512
LEAST_SIGMA, MOST_SIGMA = 16.0, 2.0**48
_WEIGHT_BITS = 192
_THRESHOLD_BITS = 128
_GUARD_BITS = 96
_WORD = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Table:
    """Magnitudes are m · step + j, m the number of a column: step = 2^low_bits with 16 ≤ σ / step < 32.

    Vose's alias table of the weights exp(-(m step)² / 2σ²): column c stands for itself where a uniform of 128
    bits is below its threshold, in two words, and for `alias[c]` elsewhere.
    """

    sigma: Fraction
    low_bits: int
    high: Words
    low: Words
    alias: NDArray[np.int64]
    quotient: float
    """1 / 2σ², rounded: for predictions."""

    @property
    def step(self) -> int:
        return 1 << self.low_bits

    def accepts(self, column: int, low_part: int, uniform: int) -> bool:
        """Whether `uniform` < 2^128 exp(-low_part (2 column step + low_part) / 2σ²), decided in integers."""
        exponent = Fraction(low_part * (2 * column * self.step + low_part)) / (2 * self.sigma**2)
        return uniform < exp_fixed(exponent, _THRESHOLD_BITS)


@lru_cache(maxsize=64)  # of a pure function: one table takes some ten milliseconds
def table_of(sigma: float) -> Table:
    """The table for 16 ≤ σ < 2^48; InputError for another σ.  A float is a rational: σ is not rounded."""
    if not LEAST_SIGMA <= sigma < MOST_SIGMA:
        raise InputError(f"sigma = {sigma}: discrete Gaussian noise takes 16 ≤ sigma < 2^48 units of the lattice")
    low_bits = max(0, math.frexp(sigma)[1] - 5)
    exact = Fraction(sigma)
    variances = 2 * exact**2
    weights = [exp_fixed(Fraction((m << low_bits) ** 2) / variances, _WEIGHT_BITS) for m in range(COLUMNS)]
    thresholds, alias = _alias(weights)
    high = np.array([threshold >> 64 for threshold in thresholds], np.uint64)
    low = np.array([threshold & _WORD for threshold in thresholds], np.uint64)
    return Table(exact, low_bits, high, low, np.array(alias, np.int64), 1.0 / float(variances))


def exp_fixed(exponent: Fraction, bits: int) -> int:
    """2^bits exp(-exponent) for exponent ≥ 0, rounded down, off by less than 1 + 2^-60.

    Taylor's series of exp(-exponent / 2^h) in integers with 96 more bits, squared h times.
    """
    if exponent > 2 * bits:
        return 0
    halvings = math.ceil(exponent).bit_length() + 8
    scale = bits + _GUARD_BITS
    one = 1 << scale
    small = (exponent.numerator << scale) // (exponent.denominator << halvings)  # below 2^-7
    total = term = one
    order = 0
    while term:
        order += 1
        term = (term * small >> scale) // order
        total += -term if order & 1 else term
    for _ in range(halvings):
        total = total * total >> scale
    return total >> _GUARD_BITS


def _alias(weights: list[int]) -> tuple[list[int], list[int]]:
    """Thresholds ⌊2^128 q⌋ and aliases of every column (Vose 1991); a full column is its own alias."""
    count, total = len(weights), sum(weights)
    left = [weight * count for weight in weights]
    small = [column for column in range(count) if left[column] < total]
    large = [column for column in range(count) if left[column] >= total]
    full = 1 << _THRESHOLD_BITS
    thresholds, alias = [full - 1] * count, list(range(count))
    while small and large:
        column, giver = small.pop(), large[-1]
        thresholds[column], alias[column] = (left[column] << _THRESHOLD_BITS) // total, giver
        left[giver] -= total - left[column]
        if left[giver] < total:
            small.append(large.pop())
    return thresholds, alias
