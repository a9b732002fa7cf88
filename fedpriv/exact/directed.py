"""Square roots of rationals as floats on the safe side, proven by comparing squares in integers."""

import math
from fractions import Fraction


def sqrt_above(value: Fraction) -> float:
    """The smallest float whose square is at least `value` ≥ 0, which may be anything with a float as its root."""
    root = _near(value)
    while Fraction(root) ** 2 < value:
        root = math.nextafter(root, math.inf)
    while root > 0.0 and Fraction(lower := math.nextafter(root, 0.0)) ** 2 >= value:
        root = lower
    return root


def at_least(value: Fraction) -> float:
    """The smallest float that is not below `value`."""
    near = float(value)
    return near if Fraction(near) >= value else math.nextafter(near, math.inf)


def _near(value: Fraction) -> float:
    """Within a few units in the last place; no overflow for numbers whose root is a float."""
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(float(value / Fraction(4) ** shift)), shift)
