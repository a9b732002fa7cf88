"""What a strategy on integers is: a streaming C with int64 state, its rounding, and how far its numbers can reach.

    y_t = (C s)_t + z_t,   z_t from D(scale_t σ)^d

is all that may ever leave; everything after it, B included, is a function of y.  Where C has coefficients other
than 0 and 1 its products are rounded to integers, and neighbours may round apart: `Group.difference` bounds that.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np

from fedpriv.exact.fixed_point import Ints

IntState = tuple[Ints, ...]
"""Vectors shaped like a round's sums, their number a function of the round."""

Load = tuple[int, ...]
"""A bound on every coordinate of the sums of one round, one number for each vector that it takes."""


class Group(NamedTuple):
    """Fresh vectors of one size of noise."""

    vectors: int
    """How many of them the run has."""
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
        """How many vectors a round takes and gives, stacked; None for one that is not, as in `Mechanism`."""
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


def restarts(t: int, period: int | None) -> bool:
    """Whether the sums start anew in round t."""
    return t == 1 or (period is not None and (t - 1) % period == 0)
