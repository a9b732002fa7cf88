"""Fixed-point arithmetic on 64-bit integers that has the same bits on every machine.

`scaled` multiplies by a coefficient, a multiple of 2^-31: an exact product and one rounding.  `packed` and
`sum_of` are for masked sums, which travel in words of w bits: the low w/8 bytes of each, which the server adds
modulo 2^w.

Loops over values that numba compiles where it is installed (`pip install 'fedpriv[fast]'`).

Without it they are plain Python with the same results, only slower.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, RunError

Ints = NDArray[np.int64]

FRACTION_BITS = 31
COEFFICIENT_ONE = 1 << FRACTION_BITS
"""The coefficient 1."""
MAX_SCALED = 1 << 61
"""Bound on the absolute value of every integer that is scaled."""

_LOW_MASK = np.int64(COEFFICIENT_ONE - 1)


def to_coefficient(value: float) -> int:
    """`value` in [0, 1] as the nearest multiple of 2^-31, counted in them: it defines the mechanism."""
    if not 0.0 <= value <= 1.0:
        raise InputError(f"coefficient = {value}: coefficients of an integer strategy lie between 0 and 1")
    return round(Fraction(value) * COEFFICIENT_ONE)


def round_coefficient(value: float) -> float:
    """The multiple of 2^-31 that `coefficient` means; exactly a float."""
    return to_coefficient(value) / COEFFICIENT_ONE


def scale_integers(values: Ints, multiplier: int, extra: int = 0) -> Ints:
    """⌊values · multiplier / 2^(31 + extra) + ½⌋, exactly, entry by entry.

    |values| < 2^61, 0 ≤ multiplier ≤ 2^31, 0 ≤ extra < 30.  The product has up to 92 bits, so `values` is taken
    apart as high · 2^31 + low.

    Guarantee: results of two arguments differ by what the real products differ by, ± less than 1.
    """
    high, low = values >> FRACTION_BITS, values & _LOW_MASK
    if extra == 0:
        low *= multiplier
        low += COEFFICIENT_ONE >> 1
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


def scale_bound(bound: int, multiplier: int, extra: int = 0) -> int:
    """A bound on |scaled(values, multiplier, extra)| for |values| ≤ `bound`, in Python integers."""
    return -(-bound * multiplier >> (FRACTION_BITS + extra)) + 1


def repeated_squares(multiplier: int, count: int) -> tuple[int, ...]:
    """Coefficients of λ, λ², λ⁴, … (`count` of them), λ = multiplier / 2^31, rounded from 192 binary digits."""
    digits = 192
    power, found = multiplier << (digits - FRACTION_BITS), []
    half = 1 << (digits - FRACTION_BITS - 1)
    for _ in range(count):
        found.append((power + half) >> (digits - FRACTION_BITS))
        power = power * power >> digits
    return tuple(found)


UnsignedInts = NDArray[np.uint64]
_LITTLE = np.dtype("<u8")


def pack_masked(noisy: Ints, mask: UnsignedInts, word: int) -> bytes:
    """A silo's y (any shape), plus its mask of that shape, as words of `word` bits (8 to 64), little-endian."""
    return (noisy.view(np.uint64) + mask).astype(_LITTLE).reshape(-1, 1).view(np.uint8)[:, : word // 8].tobytes()


def unpack_sum(messages: Sequence[bytes], word: int, shape: tuple[int, ...]) -> Ints:
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


FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


@cache
def compile_function(function: FunctionT) -> FunctionT | None:
    """`function` compiled, with the same results; None where numba is not installed.

    Kept on disk where the package lies or in the user's cache, where one of them can be written; else compiled in
    every process anew, which takes some seconds.  Floating point stays what IEEE 754 says: no operation is
    reordered, and none is contracted with another.
    """
    try:
        import numba
    except ImportError:
        return None
    try:
        return cast(FunctionT, numba.njit(function, cache=True, nogil=True))
    except RuntimeError:  # no folder that can be written
        return cast(FunctionT, numba.njit(function, nogil=True))


def set_counters(counters: UnsignedInts, places: Ints, first: int) -> None:
    """Set the lower halves of the counters (2 n, 2) of n values: blocks `first` + 2 place, and the next."""
    for k in range(len(places)):
        block = np.uint64(first) + np.uint64(places[k] << 1)
        counters[2 * k, 1] = block
        counters[2 * k + 1, 1] = block + np.uint64(1)


def attempt_values(
    words: UnsignedInts,
    places: Ints,
    high: UnsignedInts,
    alias: Ints,
    low_bits: int,
    quotient: float,
    band: float,
    out: Ints,
    again: Ints,
) -> int:
    """An attempt of the discrete Gaussian at each of n `places`, from their words (n, 4), into `out`[place].

    `again`, of n places or more, gets those that are refused, as they are, and as ~place those that only integers
    can decide: ties with a threshold, and uniforms within `band` of the bound.  How many is what comes back.
    1 - x ≤ exp(-x) accepts nearly all that are accepted.
    """
    count = 0
    last = (np.uint64(1) << np.uint64(low_bits)) - np.uint64(1)
    for k in range(len(places)):
        word, picks = words[k, 0], words[k, 1]
        column = picks >> np.uint64(55)
        limit, other = high[column], alias[column]
        chosen = other + (np.int64(column) - other) * np.int64(word < limit)  # a branch would be guessed wrong
        low = np.int64(picks & last)
        base = chosen << low_bits
        magnitude = base + low
        sign = -np.int64((picks >> np.uint64(54)) & np.uint64(1))
        out[places[k]] = (magnitude ^ sign) - sign
        exponent = np.float64(low) * np.float64(base + magnitude) * quotient
        uniform = np.float64(words[k, 2]) * 2.0**-64
        tied = word == limit
        if uniform + exponent < 1.0 - band and magnitude != 0 and not tied:
            continue
        margin = uniform - math.exp(-exponent)
        if tied or abs(margin) < band:
            again[count] = ~places[k]
            count += 1
        elif margin >= 0.0 or (magnitude == 0 and sign != 0):
            again[count] = places[k]
            count += 1
    return count
