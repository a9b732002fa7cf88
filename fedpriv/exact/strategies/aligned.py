"""C of `AlignedDifferences` on increments whose parts are clipped apart: one node sum for every fresh vector.

The parts r, G and Δ of a round (split_sum.py) go into three trees: r into one over the whole run, G and Δ into one
that restarts every epoch.  What the mechanism does with the nodes' values is B.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedpriv.errors import InputError
from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.strategies.base import Group, IntegerStrategy, IntState, Load, Reach
from fedpriv.exact.strategies.tree import IntegerTree


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
