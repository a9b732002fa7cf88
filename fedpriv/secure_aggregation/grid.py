"""A simulation's real vectors as integers modulo 2^64, which can be added under masks.

A simulation in floating point protects nobody: this is how its masked messages are added at all.  What guards mask
are integers from the record on (fedpriv/exact/words.py), and nothing is rounded after the noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError, RunError

Words = NDArray[np.uint64]

_LARGEST = 2.0**62
"""Of one encoded value, in units; beyond what plans allow and noise can reach."""
_ROOM = 2.0**48
"""The most units that records can contribute: then a silo's float64 holds digits of its noise below the grid."""


@dataclass(frozen=True)
class Grid:
    """Multiples of `unit`, a power of 2, as integers modulo 2^64.

    Sums are right as long as they lie within ±2^63 units.  A sum beyond would wrap: that would make the model
    wrong, not the noise smaller, since the residue is a function of the sum.
    """

    unit: float

    def encode(self, values: NDArray[np.float64]) -> Words:
        """`values` (d,) rounded to the grid, (d,); RunError for values that are not finite or absurdly large."""
        scaled = np.floor(values / self.unit + 0.5)  # halves go up: rounding and whole shifts must commute
        if not np.all(np.abs(scaled) < _LARGEST):
            raise RunError("the release has values that are not finite, or outside of what can be added")
        return scaled.astype(np.int64).view(np.uint64)

    def decode_sum(self, messages: Sequence[Words]) -> NDArray[np.float64]:
        """The sum (d,) of all silos' encoded messages, each (d,)."""
        total: Words = np.zeros_like(messages[0])
        for message in messages:
            total += message  # unsigned: modulo 2^64
        return total.view(np.int64).astype(np.float64) * self.unit


def grid_for(share: float, digits: int, largest: float) -> Grid:
    """The grid for messages with noise of standard deviation `share` > 0 in every silo's part of the mean.

    Half of the `digits` binary digits in which noise is drawn lie above the unit and half below it: the rounding
    adds less than 2^-24 to the variance.  `largest` bounds every coordinate of the sum of all silos' vectors
    without noise; InputError where that does not fit.
    """
    unit = 2.0 ** math.floor(math.log2(share) - digits // 2)
    if largest > unit * _ROOM:
        raise InputError(
            f"secure aggregation: sums of up to {largest:.3g}, with noise of {share:.3g} in each silo, do "
            'not fit on a grid; use run.dtype = "float32", fewer rounds or more noise'
        )
    return Grid(unit)
