"""C = A: the running sums themselves, for independent noise on each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fedpriv.exact.fixed_point import ONE, Ints, scaled, scaled_bound
from fedpriv.exact.strategies.base import Group, IntegerStrategy, IntState, Load, Reach, restarts


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
