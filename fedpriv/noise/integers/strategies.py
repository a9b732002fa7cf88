"""What a strategy on integers is: a streaming C with int64 state, its rounding, and how far its numbers can reach.

    y_t = (C s)_t + z_t,   z_t from D(scale_t σ)^d

is all that may ever leave; everything after it, B included, is a function of y.  Where C has coefficients other
than 0 and 1 its products are rounded to integers, and neighbours may round apart: `Group.difference` bounds that.

C = A: the running sums themselves, for independent noise on each.

The binary tree: (C s)_t is the node that ends at t, a binary counter of decayed node sums.

C is diagonal: noise on the increments themselves.

C of `AlignedDifferences` on increments whose parts are clipped apart: one node sum for every fresh vector.

The parts r, G and Δ of a round (split_sum.py) go into three trees: r into one over the whole run, G and Δ into one
that restarts every epoch.  What the mechanism does with the nodes' values is B.

Banded Toeplitz C: sums of the last increments, which are kept as they are, so that roundings never add up.

A strategy's state as bytes: a header of three numbers, then the vectors, little-endian.
"""

import itertools
import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.integers.fixed_point import ONE, Ints, scaled, scaled_bound, squarings

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


@dataclass(frozen=True)
class IntegerPrefix(IntegerStrategy):
    """q_t = ⌊decay · q_{t-1}⌉ + s_t; `decay` counts multiples of 2^-31, sums restart every `period` rounds.

    Roundings of neighbours differ by 1 a round at most, and decay like the sums: by 1 / (1 - decay) in all.
    """

    decay: int
    period: int | None = None

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        return (Group(rounds, 1.0, accumulated(self.decay, rounds)),)

    def reach(self, loads: Sequence[Load]) -> Reach:
        total = largest = 0
        for t, (load,) in enumerate(loads, start=1):
            total = load if restarts(t, self.period) else self._decayed_bound(total) + load
            largest = max(largest, total)
        return Reach(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the last sum; none for decay 0."""
        if self.decay == 0:
            return sums, ()
        if not state or restarts(t, self.period):
            return sums, (sums,)
        total = (state[0] if self.decay == ONE else scaled(state[0], self.decay)) + sums
        return total, (total,)

    def _decayed_bound(self, bound: int) -> int:
        if self.decay == 0:
            return 0
        return bound if self.decay == ONE else scaled_bound(bound, self.decay)


@dataclass(frozen=True)
class IntegerScheduled(IntegerPrefix):
    """The same sums, with noise of a size of its own in every round."""

    sizes: tuple[float, ...] = ()

    def scales(self, t: int) -> tuple[float, ...]:
        return (self.sizes[t - 1],)

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        ((_, _, difference),) = super().groups(rounds, participations)
        return tuple(Group(count, size, difference) for size, count in Counter(self.sizes[:rounds]).items())


def accumulated(decay: int, rounds: int) -> Fraction:
    """min(rounds, 1 / (1 - decay)): what roundings of at most 1 a round add up to; 0 where nothing is rounded."""
    if decay in (0, ONE):
        return Fraction(0)
    return min(Fraction(rounds), Fraction(ONE, ONE - decay))


_LEVELS = 48


@dataclass(frozen=True)
class IntegerTree(IntegerStrategy):
    """`decay` counts multiples of 2^-31; a node is its left half, decayed over the right one, plus that.

    The decay over 2^l rounds is decay^(2^l), rounded to a multiple of 2^-31 of its own.  A left half is rounded
    when it is merged, and neighbours round apart only where it holds one of the record's rounds: once a level and
    participation at most.
    """

    decay: int
    period: int | None = None

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        block = rounds if self.period is None else min(self.period, rounds)
        levels = block.bit_length() - 1
        exact = self.decay in (0, ONE)
        return (Group(rounds, 1.0, Fraction(0 if exact else levels * participations)),)

    def reach(self, loads: Sequence[Load]) -> Reach:
        stack: list[int] = []
        largest = 0
        for t, (load,) in enumerate(loads, start=1):
            if restarts(t, self.period):
                stack = []
            node = load
            for level in range(_merged(self._place(t))):
                node += scaled_bound(stack.pop(), self._decays[level])
            stack.append(node)
            largest = max(largest, node)
        return Reach(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the nodes of the set bits of t's place in its period, longest first."""
        kept = [] if restarts(t, self.period) else list(state)
        node = sums
        for level in range(_merged(self._place(t))):
            left, decay = kept.pop(), self._decays[level]
            node = (left if decay == ONE else scaled(left, decay)) + node
        return node, (*kept, node)

    def state_length(self, t: int) -> int:
        """How many vectors the state after round t ≥ 0 holds."""
        return self._place(t).bit_count() if t else 0

    def _place(self, t: int) -> int:
        return t if self.period is None else (t - 1) % self.period + 1

    @cached_property
    def _decays(self) -> tuple[int, ...]:
        return squarings(self.decay, _LEVELS)


def _merged(place: int) -> int:
    """How many left halves the node that ends at `place` swallows: its level."""
    return (place & -place).bit_length() - 1


_NONE = Fraction(0)


@dataclass(frozen=True)
class IntegerLeaf(IntegerStrategy):
    """s_t itself, with noise `first` times as large in the first of every `period` rounds as in the others."""

    first: float = 1.0
    period: int | None = None

    def scales(self, t: int) -> tuple[float, ...]:
        return (self.first if restarts(t, self.period) else 1.0,)

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        starts = 1 if self.period is None else -(-rounds // self.period)
        firsts = Group(starts, self.first, _NONE)
        return (firsts, Group(rounds - starts, 1.0, _NONE)) if rounds > starts else (firsts,)

    def reach(self, loads: Sequence[Load]) -> Reach:
        largest = max(load for (load,) in loads)
        return Reach(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        return sums, ()


@dataclass(frozen=True)
class IntegerAligned(IntegerStrategy):
    """Epochs of `rounds_per_epoch` rounds; `std_*` are the noises of the groups of nodes, as in
    `AlignedDifferences`.

    Round t takes, stacked in this order, r (if rounds_per_epoch > 1), G, and from the second epoch on Δ.
    """

    decay: int
    rounds_per_epoch: int
    std_early: float
    std_late: float
    std_difference: float
    std_residual: float

    def __post_init__(self) -> None:
        if self.rounds_per_epoch < 1:
            raise InputError(f"rounds_per_epoch = {self.rounds_per_epoch}: an epoch has 1 or more rounds")

    def draws(self, t: int) -> int:
        return 1 + int(self.rounds_per_epoch > 1) + int(t > self.rounds_per_epoch)

    def scales(self, t: int) -> tuple[float, ...]:
        residual = (self.std_residual,) if self.rounds_per_epoch > 1 else ()
        return (
            *residual,
            *((self.std_early,) if t <= self.rounds_per_epoch else (self.std_late, self.std_difference)),
        )

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        """A record is in every epoch's trees once."""
        early = min(rounds, self.rounds_per_epoch)
        ((_, _, within),) = self._epoch_tree.groups(rounds, 1)
        found = [Group(early, self.std_early, within)]
        if rounds > early:
            found += [
                Group(rounds - early, self.std_late, within),
                Group(rounds - early, self.std_difference, within),
            ]
        if self.rounds_per_epoch > 1:
            ((_, _, whole),) = self._residual_tree.groups(rounds, participations)
            found.append(Group(rounds, self.std_residual, whole))
        return tuple(found)

    def reach(self, loads: Sequence[Load]) -> Reach:
        own = int(self.rounds_per_epoch > 1)
        whole = self._residual_tree.reach([load[:1] for load in loads]) if own else Reach(0, 0)
        gradients = self._epoch_tree.reach([load[own : own + 1] for load in loads])
        changes = self._epoch_tree.reach([load[own + 1 :] or (0,) for load in loads])
        return Reach(*(max(bounds) for bounds in zip(whole, gradients, changes, strict=True)))

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the stacks of the three trees.

        Guarantee: r is taken as 0 in the first round of an epoch, where accounting charges nothing for it.
        """
        parts, stacks = list(sums), self._stacks(state, t - 1)
        if self.rounds_per_epoch > 1 and (t - 1) % self.rounds_per_epoch == 0:
            parts[0] = np.zeros_like(parts[0])
        trees = (self._residual_tree, self._epoch_tree, self._epoch_tree)[int(self.rounds_per_epoch == 1) :]
        stepped = [tree.step(stack, t, part) for tree, stack, part in zip(trees, stacks, parts, strict=False)]
        return np.stack([node for node, _ in stepped]), tuple(v for _, stack in stepped for v in stack)

    def _stacks(self, state: IntState, t: int) -> list[IntState]:
        """The parts of the state after round t, one for every tree: of r (if N > 1), of G and of Δ."""
        sizes = [self._residual_tree.state_length(t)] if self.rounds_per_epoch > 1 else []
        sizes += [
            self._epoch_tree.state_length(t),
            self._epoch_tree.state_length(t) if t > self.rounds_per_epoch else 0,
        ]
        ends = list(itertools.accumulate(sizes))
        return [state[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    @cached_property
    def _residual_tree(self) -> IntegerTree:
        return IntegerTree(self.decay)

    @cached_property
    def _epoch_tree(self) -> IntegerTree:
        return IntegerTree(self.decay, self.rounds_per_epoch)


@dataclass(frozen=True)
class IntegerBanded(IntegerStrategy):
    """s_t + Σ_j ⌊c_j s_{t-j}⌉; `coefficients` c_1, c_2, … count multiples of 2^-31, c_0 = 1 is left out.

    Each of the products is rounded for itself, so neighbours differ by 1 a band beside the diagonal.
    """

    coefficients: tuple[int, ...]

    def __post_init__(self) -> None:
        falling = all(
            after <= before for before, after in zip((ONE, *self.coefficients), self.coefficients, strict=False)
        )
        if not falling or any(c < 0 for c in self.coefficients):
            raise InputError("coefficients of a banded strategy start with 1, never rise and are 0 or more")

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        return (Group(rounds, 1.0, Fraction(min(len(self.coefficients), rounds))),)

    def reach(self, loads: Sequence[Load]) -> Reach:
        largest = 0
        past: list[int] = []
        for (load,) in loads:
            products = map(scaled_bound, past, self.coefficients)
            largest = max(largest, load + sum(products))
            past = [load, *past][: len(self.coefficients)]
        return Reach(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the last increments, latest first: one fewer than there are bands."""
        if not self.coefficients:
            return sums, ()
        total = sums.copy()
        for past, coefficient in zip(state, self.coefficients, strict=False):
            total += scaled(past, coefficient)
        return total, (sums, *state)[: len(self.coefficients)]


_HEADER = struct.Struct("<4sQQ")
_MARK = b"int1"
_LITTLE = np.dtype("<i8")


def pack(state: IntState) -> bytes:
    """Vectors of one shape (d,), any number of them."""
    size = state[0].size if state else 0
    return b"".join((_HEADER.pack(_MARK, len(state), size), *(v.astype(_LITTLE).tobytes() for v in state)))


def unpack(packed: bytes) -> IntState:
    """The state over the packed bytes, without copies: nobody writes into it.  RunError for other bytes."""
    if len(packed) < _HEADER.size:
        raise RunError("the strategy's state is cut off")
    mark, count, size = _HEADER.unpack_from(packed)
    if mark != _MARK or len(packed) != _HEADER.size + math.prod((count, size, _LITTLE.itemsize)):
        raise RunError("the strategy's state is cut off, or is something else")
    values: Ints = np.frombuffer(packed, _LITTLE, offset=_HEADER.size).astype(np.int64, copy=False)
    return tuple(values.reshape(count, size)) if count else ()
