"""Arithmetic of 64-bit integers, and inner loops of discrete Gaussian noise and of truncation.

Three groups of functions: multiplication by a coefficient that is a multiple of 2^-31, with one rounding; packing
and adding masked messages; and loops that numba compiles if it is installed (`pip install 'fedpriv[fast]'`).  The
first two groups have the same results on every machine.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, RunError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FRACTION_BITS = 31
COEFFICIENT_ONE = 1 << FRACTION_BITS
"""Coefficient 1, in multiples of 2^-31."""
MAX_SCALED = 1 << 61
"""Number below which the absolute value of every scaled integer of a planned run lies."""

_LOW_MASK = np.int64(COEFFICIENT_ONE - 1)


def to_coefficient(value: float) -> int:
    """Round a value in [0, 1] to the nearest multiple of 2^-31, and return the multiple.

    The rounded value defines the mechanism.

    Raises:
        InputError: The value is not in [0, 1].

    Example:
        >>> to_coefficient(0.5) == COEFFICIENT_ONE // 2
        True
    """
    if not 0.0 <= value <= 1.0:
        raise InputError(f"coefficient = {value}: coefficients of an integer strategy lie between 0 and 1")
    return round(Fraction(value) * COEFFICIENT_ONE)


def round_coefficient(value: float) -> float:
    """Round a value in [0, 1] to the nearest multiple of 2^-31, which is exact in floating point.

    Raises:
        InputError: The value is not in [0, 1].
    """
    return to_coefficient(value) / COEFFICIENT_ONE


def scale_integers(values: Ints, multiplier: int, extra: int = 0) -> Ints:
    """Compute ⌊values · multiplier / 2^(31 + extra) + ½⌋ exactly, entry by entry.

    For `extra` = 0 this is c · values, rounded to an integer, with the coefficient c = multiplier / 2^31.

    Guarantee: results of two arguments differ by the difference of the real products, ± less than 1.

    Args:
        values: Integers with |values| < 2^61.
        multiplier: Coefficient in multiples of 2^-31, 0 ≤ multiplier ≤ 2^31.
        extra: Further bits to shift by, 0 ≤ extra < 30.

    Returns:
        Integers in the shape of `values`.

    Example:
        >>> scale_integers(np.array([5, -5]), COEFFICIENT_ONE // 2).tolist()
        [3, -2]
    """
    # A product can have 92 bits, so values are split into high · 2^31 + low.
    high, low = values >> FRACTION_BITS, values & _LOW_MASK
    low *= multiplier
    if extra == 0:
        low += COEFFICIENT_ONE >> 1  # adds ½, so that the shift rounds
    low >>= FRACTION_BITS
    high *= multiplier
    high += low
    if extra:  # `high` is ⌊values · multiplier / 2^31⌋
        high += 1 << (extra - 1)
        high >>= extra
    return high


def scale_bound(bound: int, multiplier: int, extra: int = 0) -> int:
    """Bound |scale_integers(values, multiplier, extra)| for |values| ≤ `bound`, in Python integers.

    Args:
        bound: Bound of the values, ≥ 0.
        multiplier: Coefficient in multiples of 2^-31.
        extra: Further bits by which the product is shifted, as in `scale_integers`.

    Returns:
        An upper bound, which may be slightly too large.
    """
    return -(-bound * multiplier >> (FRACTION_BITS + extra)) + 1


def repeated_squares(multiplier: int, count: int) -> tuple[int, ...]:
    """Compute λ, λ², λ⁴, …, λ^(2^(count-1)), each rounded to a multiple of 2^-31.

    Args:
        multiplier: λ in multiples of 2^-31, from 0 to 2^31.
        count: Number of powers.

    Returns:
        The powers in multiples of 2^-31.
    """
    digits = 192  # binary digits of the powers, of which only the returned values are rounded to 31
    power, coefficients = multiplier << (digits - FRACTION_BITS), []
    half = 1 << (digits - FRACTION_BITS - 1)
    for _ in range(count):
        coefficients.append((power + half) >> (digits - FRACTION_BITS))
        power = power * power >> digits
    return tuple(coefficients)


UnsignedInts = NDArray[np.uint64]
_LITTLE = np.dtype("<u8")


def pack_masked(noisy: Ints, mask: UnsignedInts, word: int) -> bytes:
    """Add a mask to a silo's integers and pack the sums into words, little-endian.

    Args:
        noisy: The silo's noisy integers y, of any shape.
        mask: Mask of the same shape.
        word: Bits of a word, a multiple of 8 from 8 to 64.
    """
    return (noisy.view(np.uint64) + mask).astype(_LITTLE).reshape(-1, 1).view(np.uint8)[:, : word // 8].tobytes()


def unpack_sum(messages: Sequence[bytes], word: int, shape: tuple[int, ...]) -> Ints:
    """Compute the sum of all silos' noisy integers y from their masked messages, whose masks cancel.

    The result is the true sum modulo 2^word, from -2^(word-1) to 2^(word-1) - 1.

    Args:
        messages: Output of `pack_masked` of each silo, word / 8 bytes a value.
        word: Bits of a word, a multiple of 8 from 8 to 64.
        shape: Shape of y.

    Returns:
        Sum of y, in this shape.

    Raises:
        RunError: A message has a length other than word / 8 bytes a value.
    """
    word_bytes, count = word // 8, int(np.prod(shape))
    total = np.zeros(count, np.uint64)
    for silo, message in enumerate(messages):
        if len(message) != word_bytes * count:
            raise RunError(f"message {silo} has {len(message)} bytes, expected {word_bytes * count}")
        padded_words = np.zeros((count, 8), np.uint8)
        padded_words[:, :word_bytes] = np.frombuffer(message, np.uint8).reshape(count, word_bytes)
        total += padded_words.view(_LITTLE).ravel().astype(np.uint64)
    unused_bits = 64 - word
    # The shift to the left puts the word's sign bit in place, and the one to the right copies it.
    signed: Ints = (total << np.uint64(unused_bits)).view(np.int64) >> np.int64(unused_bits)
    return signed.reshape(shape)


FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


@cache
def compile_function(function: FunctionT, *fast_flags: str) -> FunctionT | None:
    """Return a function that numba compiles at its first call, or None if numba cannot be imported.

    The compiled code is cached on disk where a folder for it is writable.

    Args:
        function: Function of numbers and arrays.
        fast_flags: LLVM's fast-math flags, such as "reassoc", which lets additions change their order.
    """
    try:
        import numba
    except ImportError:
        return None
    try:
        return cast(FunctionT, numba.njit(function, cache=True, nogil=True, fastmath=set(fast_flags)))
    except RuntimeError:  # no folder is writable
        return cast(FunctionT, numba.njit(function, nogil=True, fastmath=set(fast_flags)))


MIN_COMPILED_VALUES = 1 << 12
"""Fewest values for which compiled code is worth its import."""


def compiled_or(
    function: FunctionT, plain: Callable[..., Any], size: int, *fast_flags: str
) -> FunctionT | Callable[..., Any]:
    """Return `function` compiled with these flags, or `plain` for less than 4,096 values or without numba."""
    return (size >= MIN_COMPILED_VALUES and compile_function(function, *fast_flags)) or plain


def set_counters(counters: UnsignedInts, places: Ints, first: int) -> None:
    """Set the block numbers in the AES counters (2 n, 2) of n values, in column 1.

    Value k gets the blocks of numbers `first` + 2 places[k] and `first` + 2 places[k] + 1.  Column 0 stays.

    Args:
        counters: Counters of two blocks a value, (2 n, 2), which are changed.
        places: Index of every value, (n,).
        first: Number of the block of place 0.
    """
    for k in range(len(places)):
        block = np.uint64(first) + np.uint64(places[k] << 1)
        counters[2 * k, 1] = block
        counters[2 * k + 1, 1] = block + np.uint64(1)


def attempt_values(
    random_words: UnsignedInts,
    high: UnsignedInts,
    alias: Ints,
    low_bits: int,
    quotient: float,
    band: float,
    start: int,
    values: Ints,
    retries: Ints,
) -> int:
    """Make one attempt to draw each of n values of the discrete Gaussian D(σ).

    An attempt is a step of rejection sampling.  It proposes a sign and a magnitude a = m 2^k + j.  m is drawn with
    weights exp(-(m 2^k)² / 2σ²) from an alias table of 512 columns: m is a random column if word 0 is below the
    column's threshold, and the column's alias otherwise.  Word 1 has the column (upper 9 bits), the sign (next
    bit) and the uniform j (lowest k bits).  The proposal is accepted with probability exp(-x), x = j (2 m 2^k + j)
    / 2σ², for which word 2 is the uniform.  So accepted magnitudes have weights exp(-a² / 2σ²).  -0 is refused, so
    that 0 counts once.

    Args:
        random_words: Random words of 64 bits of each value, (n, 4).
        high: Upper 64 bits of the columns' thresholds, (512,).
        alias: Alias of each column, (512,).
        low_bits: k, bits of the lower part j of a magnitude.
        quotient: 1 / 2σ².
        band: Distance of the uniform from exp(-x) below which floating point cannot decide.
        start: Index of the first value.
        values: Proposals, accepted or not, (n,), which are written.
        retries: Buffer of n indices or more, which gets the index of each refused value, and ~index for undecided
            ones: within `band`, or with word 0 equal to the threshold's upper bits.

    Returns:
        Number of indices written to `retries`.
    """
    exponents, uncertain_count, retry_count = np.empty(len(values)), 0, 0
    low_mask = (np.uint64(1) << np.uint64(low_bits)) - np.uint64(1)
    # Accepts most attempts without an exponential, since 1 - x ≤ exp(-x).  A loop without calls is faster.
    for k in range(len(values)):
        threshold_word, picks = random_words[k, 0], random_words[k, 1]
        column = picks >> np.uint64(55)
        threshold, alias_column = high[column], alias[column]
        # Arithmetic, since a branch would be mispredicted.
        magnitude_column = alias_column + (np.int64(column) - alias_column) * np.int64(threshold_word < threshold)
        low = np.int64(picks & low_mask)
        base = magnitude_column << low_bits
        magnitude = base + low
        sign = -np.int64((picks >> np.uint64(54)) & np.uint64(1))
        values[k] = (magnitude ^ sign) - sign
        exponent = np.float64(low) * np.float64(base + magnitude) * quotient
        is_sure = np.float64(random_words[k, 2]) * 2.0**-64 + exponent < 1.0 - band
        if not (is_sure and magnitude != 0 and threshold_word != threshold):
            retries[uncertain_count] = k
            exponents[uncertain_count] = exponent
            uncertain_count += 1
    for index in range(uncertain_count):
        k = retries[index]
        picks = random_words[k, 1]
        margin = np.float64(random_words[k, 2]) * 2.0**-64 - math.exp(-exponents[index])
        is_undecided = random_words[k, 0] == high[picks >> np.uint64(55)] or abs(margin) < band
        if is_undecided or margin >= 0.0 or (values[k] == 0 and picks >> np.uint64(54) & np.uint64(1)):
            retries[retry_count] = ~(start + k) if is_undecided else start + k
            retry_count += 1
    return retry_count


def are_moderate(values: Floats, smallest: float, largest: float) -> bool:
    """Whether all absolute values are 0, or from `smallest` to `largest`, which no NaN is.

    Args:
        values: (n,).
        smallest: Bound above 0.
        largest: Finite bound.
    """
    result = True
    for k in range(len(values)):
        size = abs(values[k])
        result &= (size == 0.0) | ((smallest <= size) & (size <= largest))
    return result


def sum_truncated_squares(values: Floats, scale: float) -> float:
    """Sum the squares of trunc(values · scale), in any order of additions.

    Args:
        values: (n,).
        scale: Factor.
    """
    total = 0.0
    for k in range(len(values)):
        integer = np.trunc(values[k] * scale)
        total += integer * integer
    return total


def add_scaled(total: Ints, values: Floats, scale: float) -> None:
    """Add values · scale, truncated towards zero, to a sum.

    Args:
        total: Sum, (n,), which is changed.
        values: (n,), whose products with `scale` lie between ±2^63.
        scale: Factor.
    """
    for k in range(len(total)):
        total[k] += np.int64(values[k] * scale)
