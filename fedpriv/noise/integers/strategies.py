"""A mechanism on integers: a lattice, a streaming C with int64 state, and its sensitivity.

    y_t = (C s)_t + z_t,   z_t from D(scale_t σ)^d

is all that may ever leave; everything after it, B included, is a function of y.  Where C has coefficients other
than 0 and 1 its products are rounded to integers, and neighbours may round apart: `Group.difference` bounds that.

`Mechanism.integer` gives a `Factored`; the `IntegerStrategy` of every mechanism is in the mechanism's own file.
A strategy's state as bytes: a header of three numbers, then the vectors, little-endian.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np

from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.integers.fixed_point import ONE, Ints
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Separated

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


IntState = tuple[Ints, ...]
"""Vectors shaped like a round's sums, their number a function of the round."""

Load = tuple[int, ...]
"""A bound on every coordinate of the sums of one round, one number for each vector that it takes."""


class Group(NamedTuple):
    """Fresh vectors of one size of noise."""

    vectors: int
    """Number of them in the run."""
    scale: float
    """Their noise in multiples of σ."""
    difference: Fraction
    """e: by how much one coordinate of (C s)_t can differ between neighbours beyond what C says, from rounding."""


class Reach(NamedTuple):
    """Bounds over the whole run, in units of the lattice."""

    outputs: int
    """R: of every coordinate of (C s)_t."""
    inside: int
    """Of every integer that is computed on the way, which has to stay below 2^61."""


class IntegerStrategy(Protocol):
    """A streaming C on integers; t counts from 1, rounds come in order, a missed round's sums are zeros.

    Guarantee: for neighbouring streams of sums, with rows of C as exact multiples of 2^-31, the difference of what
    `step` gives is C times the difference of the sums, ± at most `Group.difference` in every coordinate.
    """

    def draws(self, t: int) -> int | None:
        """Number of vectors that a round takes and gives, stacked; None for one that is not, as in `Mechanism`."""
        return None

    def scales(self, t: int) -> tuple[float, ...]:
        """Of the noise of each vector of round t, in multiples of σ: what y_t is divided by on its way into B."""
        return (1.0,)

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        """All fresh vectors of a run in which a record takes part in at most so many rounds."""
        ...

    def reach(self, loads: Sequence[Load]) -> Reach:
        """Bounds for a run with these loads, computed in Python integers."""
        ...

    def start(self) -> IntState:
        """The state before round 1."""
        return ()

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """(C s)_t, shaped like `sums`: (..., d), or (draws, ..., d); and the next state.

        `sums` are round t's, bounded by its load.  They may become part of the state, and so may what comes back:
        do not write into either.
        """
        ...


def skipped(
    strategy: IntegerStrategy, state: IntState, first: int, last: int, size: int
) -> tuple[list[Ints], IntState]:
    """(C s)_t of the missed rounds first … last (none if first > last), where s = 0, and the state after."""
    outputs = []
    for t in range(first, last + 1):
        count = strategy.draws(t)
        zeros = np.zeros(size if count is None else (count, size), np.int64)
        output, state = strategy.step(state, t, zeros)
        outputs.append(output)
    return outputs, state


def check_decay(decay: int) -> None:
    """InputError for a decay, counted in 2^-31, that is none."""
    if not 0 <= decay <= ONE:
        raise InputError(f"decay = {decay} / 2^31: sums decay by a factor from 0 to 1")


def accumulated(decay: int, rounds: int) -> Fraction:
    """min(rounds, 1 / (1 - decay)): what roundings of at most 1 a round add up to; 0 where nothing is rounded."""
    if decay in (0, ONE):
        return Fraction(0)
    return min(Fraction(rounds), Fraction(ONE, ONE - decay))


def participations_of(workload: Workload) -> int:
    """In how many rounds of the workload a record takes part at most."""
    schedule = workload.schedule
    if schedule.single_pass:
        return 1
    return schedule.most if isinstance(schedule, Separated) else -(-schedule.rounds // schedule.rounds_per_epoch)


_HEADER = struct.Struct("<4sQQ")
_MARK = b"int1"
_LITTLE = np.dtype("<i8")


def pack(state: IntState) -> bytes:
    """Vectors of one shape (d,), any number of them."""
    size = state[0].size if state else 0
    return b"".join((_HEADER.pack(_MARK, len(state), size), *(v.astype(_LITTLE).tobytes() for v in state)))


def unpack(packed: bytes) -> IntState:
    """Read the state over the packed bytes, without copies: do not write into it.  RunError for other bytes."""
    if len(packed) < _HEADER.size:
        raise RunError("the strategy's state is cut off")
    mark, count, size = _HEADER.unpack_from(packed)
    if mark != _MARK or len(packed) != _HEADER.size + math.prod((count, size, _LITTLE.itemsize)):
        raise RunError("the strategy's state is cut off, or is something else")
    values: Ints = np.frombuffer(packed, _LITTLE, offset=_HEADER.size).astype(np.int64, copy=False)
    return tuple(values.reshape(count, size)) if count else ()
