"""C is diagonal: noise on the increments themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.strategies.base import Group, IntegerStrategy, IntState, Load, Reach, restarts

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
