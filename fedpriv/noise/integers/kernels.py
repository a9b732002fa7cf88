"""Loops over values that `fedpriv.core.machine_code` compiles: plain Python with the same results, only slower."""

import math

import numpy as np
from numpy.typing import NDArray

from fedpriv.noise.integers.fixed_point import Ints

Words = NDArray[np.uint64]


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
