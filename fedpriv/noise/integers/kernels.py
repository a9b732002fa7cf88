"""Loops over values that numba compiles where it is installed (`pip install 'fedpriv[fast]'`).

Without it they are plain Python with the same results, only slower.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fedpriv.noise.integers.fixed_point import Ints

Words = NDArray[np.uint64]
Code = TypeVar("Code", bound=Callable[..., object])


@cache
def machine_code(function: Code) -> Code | None:
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
        return cast(Code, numba.njit(function, cache=True, nogil=True))
    except RuntimeError:  # no folder that can be written
        return cast(Code, numba.njit(function, nogil=True))


def numbered(counters: Words, places: Ints, first: int) -> None:
    """Set the lower halves of the counters (2 n, 2) of n values: blocks `first` + 2 place, and the next."""
    for k in range(len(places)):
        block = np.uint64(first) + np.uint64(places[k] << 1)
        counters[2 * k, 1] = block
        counters[2 * k + 1, 1] = block + np.uint64(1)


def attempts(
    words: Words,
    places: Ints,
    high: Words,
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
