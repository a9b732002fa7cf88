"""RoundSteps on 64-bit integers that has the same bits on every machine.

`scaled` multiplies by a coefficient, a multiple of 2^-31: an exact product and one rounding.  `packed` and
`sum_of` are for masked sums, which travel in words of w bits: the low w/8 bytes of each, which the server adds
modulo 2^w.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, RunError

Ints = NDArray[np.int64]

FRACTION_BITS = 31
ONE = 1 << FRACTION_BITS
"""The coefficient 1."""
LIMIT = 1 << 61
"""Bound on the absolute value of every integer that is scaled."""

_LOW = np.int64(ONE - 1)


def coefficient(value: float) -> int:
    """`value` in [0, 1] as the nearest multiple of 2^-31, counted in them: it defines the mechanism."""
    if not 0.0 <= value <= 1.0:
        raise InputError(f"coefficient = {value}: coefficients of an integer strategy lie between 0 and 1")
    return round(Fraction(value) * ONE)


def rounded(value: float) -> float:
    """The multiple of 2^-31 that `coefficient` means; exactly a float."""
    return coefficient(value) / ONE


def scaled(values: Ints, multiplier: int, extra: int = 0) -> Ints:
    """⌊values · multiplier / 2^(31 + extra) + ½⌋, exactly, entry by entry.

    |values| < 2^61, 0 ≤ multiplier ≤ 2^31, 0 ≤ extra < 30.  The product has up to 92 bits, so `values` is taken
    apart as high · 2^31 + low.

    Guarantee: results of two arguments differ by what the real products differ by, ± less than 1.
    """
    high, low = values >> FRACTION_BITS, values & _LOW
    if extra == 0:
        low *= multiplier
        low += ONE >> 1
        low >>= FRACTION_BITS
        high *= multiplier
        high += low
        return high
    low *= multiplier
    low >>= FRACTION_BITS
    high *= multiplier
    high += low
    high += 1 << (extra - 1)
    high >>= extra
    return high


def scaled_bound(bound: int, multiplier: int, extra: int = 0) -> int:
    """A bound on |scaled(values, multiplier, extra)| for |values| ≤ `bound`, in Python integers."""
    return -(-bound * multiplier >> (FRACTION_BITS + extra)) + 1


def squarings(multiplier: int, count: int) -> tuple[int, ...]:
    """Coefficients of λ, λ², λ⁴, … (`count` of them), λ = multiplier / 2^31, rounded from 192 binary digits."""
    digits = 192
    power, found = multiplier << (digits - FRACTION_BITS), []
    half = 1 << (digits - FRACTION_BITS - 1)
    for _ in range(count):
        found.append((power + half) >> (digits - FRACTION_BITS))
        power = power * power >> digits
    return tuple(found)


Words = NDArray[np.uint64]
_LITTLE = np.dtype("<u8")


def packed(noisy: Ints, mask: Words, word: int) -> bytes:
    """A silo's y (any shape), plus its mask of that shape, as words of `word` bits (8 to 64), little-endian."""
    words = (noisy.view(np.uint64) + mask).astype(_LITTLE)
    return words.reshape(-1, 1).view(np.uint8)[:, : word // 8].tobytes()


def sum_of(messages: Sequence[bytes], word: int, shape: tuple[int, ...]) -> Ints:
    """The sum of all silos' y, exact if it lies within ±2^(word-1); RunError for a message of another length.

    Beyond, it wraps: the model is wrong then, not the noise smaller, since the residue is a function of the sum.
    """
    width, count = word // 8, int(np.prod(shape))
    total = np.zeros(count, np.uint64)
    for silo, message in enumerate(messages):
        if len(message) != width * count:
            raise RunError(f"message {silo} has {len(message)} bytes, expected {width * count}")
        padded = np.zeros((count, 8), np.uint8)
        padded[:, :width] = np.frombuffer(message, np.uint8).reshape(count, width)
        total += padded.view(_LITTLE).ravel().astype(np.uint64)
    unused = 64 - word
    signed: Ints = (total << np.uint64(unused)).view(np.int64) >> np.int64(unused)
    return signed.reshape(shape)
