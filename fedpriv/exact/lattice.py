"""The lattice of a run: multiples of a unit u, a power of 2, on which clips are whole: public before round 1."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.errors import InputError

MOST_KAPPA = 36
"""The largest clip is 2^36 to 2^37 units, unless sums, noise or words need it to be less."""
_LEAST_CLIP, _MOST_CLIP = 2.0**-40, 2.0**40


@dataclass(frozen=True)
class Lattice:
    """Multiples of 2^`exponent`."""

    exponent: int

    @property
    def unit(self) -> float:
        """u."""
        return math.ldexp(1.0, self.exponent)

    def norm(self, clip: float) -> int:
        """K = ⌊clip / u⌋, exactly."""
        return math.floor(math.ldexp(clip, -self.exponent))

    def factor(self, batches: int = 1) -> float:
        """Units per unit of an increment, in a round that reads so many batches and whose sum is divided by them.

        The clip that K belongs to has the same divisor in it.
        """
        return math.ldexp(1.0 / batches, -self.exponent)


def lattice_for(clips: Sequence[float], kappa: int) -> Lattice:
    """u = 2^(⌊log2 of the largest clip⌋ - `kappa`); InputError for clips outside of 2^-40 … 2^40."""
    low, high = min(clips), max(clips)
    if not _LEAST_CLIP <= low <= high <= _MOST_CLIP:
        raise InputError(f"clips from {low:g} to {high:g}: integers need them to lie between 2^-40 and 2^40")
    return Lattice(math.frexp(high)[1] - 1 - kappa)
