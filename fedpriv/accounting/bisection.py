"""Inverting a monotone condition on the safe side."""

import math
from collections.abc import Callable


def largest_safe(safe: Callable[[float], bool], low: float) -> float:
    """The largest float > 0 found for which `safe` holds, given that it holds at `low` > 0 and fails far above.

    The value returned always satisfies `safe`, whatever rounding does to its monotonicity.
    """
    high = 2.0 * low
    while safe(high):
        low, high = high, 2.0 * high
    while low < (middle := _between(low, high)) < high:
        low, high = (middle, high) if safe(middle) else (low, middle)
    return low


def smallest_safe(safe: Callable[[float], bool], high: float, tolerance: float = 0.0) -> float:
    """The smallest float > 0 found for which `safe` holds, given that it holds somewhere above `high` > 0.

    The value returned always satisfies `safe`; it is 0 where `safe` holds there.  It is larger than a value for
    which `safe` does not hold by a relative `tolerance` at most; 0 means neighbouring floats.
    """
    if safe(0.0):
        return 0.0
    low = 0.0
    while not safe(high):
        low, high = high, 2.0 * high
    return smallest_between(safe, low, high, tolerance)


def smallest_safe_near(safe: Callable[[float], bool], start: float, factor: float, tolerance: float) -> float:
    """The same for a dear `safe`: tried in steps of `factor` > 1 away from `start` > 0, then between two."""
    low = high = start
    while not safe(high):
        low, high = high, factor * high
    while low == high or (low < start and safe(low)):
        low, high = low / factor, low
    return smallest_between(safe, low, high, tolerance)


def smallest_between(safe: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """A number up to `high` for which `safe` holds, given that it holds at `high` > `low` and not at `low`.

    Where `safe` is not monotone it is one of several edges; the value returned always satisfies `safe`.
    """
    while high > low * (1.0 + tolerance) and low < (middle := _between(low, high)) < high:
        low, high = (low, middle) if safe(middle) else (middle, high)
    return high


def _between(low: float, high: float) -> float:
    """The arithmetic middle of close numbers, the geometric one of numbers of different size."""
    if low == 0.0 or high > 2.0 * low:
        return math.sqrt(max(low, _SMALLEST)) * math.sqrt(high)
    return low + 0.5 * (high - low)


_SMALLEST = 1e-300
