"""The binary tree mechanism with any decay, streamed with one fresh vector a round.

Sources: see `nodes`; the recursion over prefixes and the restart every `period` rounds are those of
Tran & Cutkosky 2022 (Algorithm 1) and Kornowski, Liu & Talwar (Algorithm 1), with their indices repaired.

On integers (C s)_t is the node that ends at t, a binary counter of decayed node sums.  `PaperTree` adds more noise
than exact counting asks for: as much as a paper's theorem.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from fedpriv.core.replicates import SHARED
from fedpriv.noise import nodes
from fedpriv.noise import sensitivity as participation
from fedpriv.noise.integers.fixed_point import ONE, Ints, coefficient, rounded, scaled, scaled_bound, squarings
from fedpriv.noise.integers.strategies import (
    Group,
    IntegerStrategy,
    IntState,
    Load,
    Reach,
    check_decay,
    participations_of,
)
from fedpriv.noise.mechanism import Columns, Factored, Mechanism, MechanismState, Sensitivity, check_matches
from fedpriv.noise.sensitivity import tightened
from fedpriv.noise.workload import Floats, Workload, per_period, restarts
from fedpriv.participation.orders import Separated

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BinaryTree(Mechanism):
    """Noise on tree nodes; the fresh vector of round t belongs to the released node that ends at t.

    Guarantee: a record moves exactly the released nodes that hold one of its rounds.  B is square and
    invertible, so counting those nodes with their decays is the exact price of everything released.
    """

    name: ClassVar[str] = "tree"
    words: ClassVar[str] = "Gaussian noise on the nodes of a binary tree over the rounds"

    decay: float = field(default=1.0, metadata=SHARED)
    period: int | None = None

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        return cls(workload.decay, workload.period)

    def certified(self, workload: Workload) -> Sensitivity:
        check_matches(workload, self.decay, self.period)
        columns = self.columns(workload)
        if isinstance(workload.order, Separated):
            found = self._separated(workload, workload.order, columns.squared_norms)
            return tightened(found, columns.inner, workload)

        def within(clips: Floats, rounds_per_epoch: int) -> Floats:
            return nodes.record_squared_norms(clips, rounds_per_epoch, self.decay)

        squared_norms = participation.record_squared_norms(workload, columns.squared_norms, within)
        return Sensitivity(math.sqrt(float(np.max(squared_norms))), True, "released nodes that hold the record")

    def columns(self, workload: Workload) -> Columns:
        inner = nodes.inner(workload.rounds, workload.block, self.decay)
        return Columns(per_period(workload, lambda rounds: nodes.column_squared_norms(rounds, self.decay)), inner)

    @property
    def fresh_std(self) -> float:
        """Of the node that ends at t, which every release has fresh."""
        return 1.0

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, self.decay, self.period)
        return per_period(workload, lambda rounds: nodes.row_squared_norms(rounds, self.decay))

    def memory_vectors(self, workload: Workload) -> int:
        return (workload.block + 1).bit_length() - 1

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the noise of the prefixes that end at the set bits of t, longest node first."""
        place = t if self.period is None else (t - 1) % self.period + 1
        if place == 1:
            return fresh, (fresh,)
        length = place & -place
        kept = state[: len(state) - (length.bit_length() - 1)]
        if not kept:
            return fresh, (fresh,)
        noise = fresh.add(kept[-1], alpha=self.decay**length)
        return noise, (*kept, noise)

    def integer(self, workload: Workload) -> Factored:
        decay = rounded(self.decay)
        workload = replace(workload, decay=decay)
        strategy = IntegerTree(coefficient(decay), self.period)
        return Factored(strategy, replace(self, decay=decay), workload, level_spread(decay, workload))

    def _separated(self, workload: Workload, pattern: Separated, columns: Floats) -> Sensitivity:
        if pattern.single_pass:
            worst = float(np.max(workload.clips**2 * columns))
            return Sensitivity(math.sqrt(worst), True, "one participation: its nodes")
        squared_norm = nodes.separated_squared_norm(
            workload.rounds, workload.block, self.decay, pattern.most, pattern.min_separation
        )
        bound = float(np.max(workload.clips)) * math.sqrt(squared_norm)
        return Sensitivity(bound, False, "counted level by level, as if every clip were the largest")


@dataclass(frozen=True)
class PaperTree(BinaryTree):
    """A tree whose sensitivity is charged as at least `least` times the largest clip."""

    name: ClassVar[str] = "paper-tree"
    words: ClassVar[str] = (
        "Gaussian noise on the nodes of a binary tree over the rounds, sized by the paper's constants"
    )

    least: float = 0.0

    def certified(self, workload: Workload) -> Sensitivity:
        exact = super().certified(workload)
        if (charged := self.least * float(np.max(workload.clips))) <= exact.value:
            return exact
        return Sensitivity(charged, False, "the paper's count of nodes")

    def counted(self, workload: Workload) -> Sensitivity:
        return super().certified(workload)


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

    def __post_init__(self) -> None:
        check_decay(self.decay)

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
        """Number of vectors in the state after round t ≥ 0."""
        return self._place(t).bit_count() if t else 0

    def _place(self, t: int) -> int:
        return t if self.period is None else (t - 1) % self.period + 1

    @cached_property
    def _decays(self) -> tuple[int, ...]:
        return squarings(self.decay, _LEVELS)


def _merged(place: int) -> int:
    """Level of the node that ends at `place`: the number of left halves that it merges."""
    return (place & -place).bit_length() - 1


def level_spread(decay: float, workload: Workload) -> Fraction:
    """1 + 2^-28 √T · participations, rounded up, where a tree's decays are rounded level by level.

    With L = ⌊log2 T⌋ levels every entry of C is off by at most L 2^-32, in at most L + 1 nodes a participation,
    and the sensitivity is at least the record's largest norm: L √(L+1) 2^-32 · participations would do.
    """
    if decay in (0.0, 1.0):
        return Fraction(1)
    return 1 + Fraction((math.isqrt(workload.rounds) + 1) * participations_of(workload), 2**28)
