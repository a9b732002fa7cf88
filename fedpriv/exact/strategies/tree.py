"""The binary tree: (C s)_t is the node that ends at t, a binary counter of decayed node sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from fedpriv.exact.fixed_point import ONE, Ints, scaled, scaled_bound, squarings
from fedpriv.exact.strategies.base import Group, IntegerStrategy, IntState, Load, Reach, restarts

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
