"""From an exact sum and its noise to what leaves: float64 all the way, and one rounding at the end.

Floating-point noise carries marks of the generator in its lowest bits (Mironov 2012), and a sum that is rounded
before its noise is added moves by more than its records did.  What leaves is therefore a multiple of a public unit
far below the noise: a function of the noisy sum that forgets the lowest bits of both.
"""

import math

import torch
from torch import Tensor

_DIGITS = 20
"""Binary digits of one standard deviation that leave: a millionth of it is rounded away."""
MOST_DEVIATIONS = 2.0**30
"""The largest sum, in standard deviations of its noise: then 22 digits of float64 lie below the unit."""


def released(noisy: Tensor, std: float, dtype: torch.dtype) -> Tensor:
    """`noisy` (d,), a float64 sum with noise of at least `std` > 0 in it, as it leaves: rounded, then of `dtype`.

    Guarantee: what leaves is a function of round(noisy / unit) for the public unit 2^(floor(log2 std) - 20).
    """
    unit = math.ldexp(1.0, math.frexp(std)[1] - 1 - _DIGITS)
    return ((noisy / unit).round() * unit).to(dtype)
