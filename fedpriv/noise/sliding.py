"""The noise of Algorithm 2 as the paper has it: sums over the last N rounds, in windows that slide.

Tran & Cutkosky 2022, Algorithm 2 and its reconstruction, streamed: the window's noise and the prefix's noise obey
two recursions with a lag of N rounds.  The sensitivity of differences rests on how far queries move
(`check_movement`): silos and simulations check it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from fedpriv.core.errors import RunError
from fedpriv.core.replicates import Scalar
from fedpriv.noise import tree as nodes
from fedpriv.noise.differences import THREE_TREES_DESCRIPTION, DifferenceTrees, NodeGroups
from fedpriv.noise.mechanism import MechanismState
from fedpriv.noise.series import Floats, Workload
from fedpriv.noise.tree import BinaryTree, Node

if TYPE_CHECKING:
    from torch import Tensor


TreeKind = Literal["residual", "gradient", "difference"]


class _SlidingState(NamedTuple):
    """After round t: the r tree's stack, the last N noises of prefixes and of windows, the nodes still needed."""

    stack: tuple["Tensor", ...]
    prefixes: tuple["Tensor", ...]
    windows: tuple["Tensor", ...]
    gradient: dict[Node, "Tensor"]
    difference: dict[Node, "Tensor"]


@dataclass(frozen=True)
class SlidingDifferences(DifferenceTrees):
    """Algorithm 2's noise; the fresh vectors of round t belong to `fresh_nodes(t)`, which all end at t.

    Memory: at most 2N running noises and the nodes of the last N rounds.
    """

    name: ClassVar[str] = "sliding-differences"
    words: ClassVar[str] = f"{THREE_TREES_DESCRIPTION}, over sliding windows"

    def squared_norms(self, workload: Workload) -> NodeGroups:
        ends_of = [
            (
                level,
                nodes.used_ends(workload.rounds, self.rounds_per_epoch, level),
                nodes.used_ends(workload.rounds, self.rounds_per_epoch, level, earliest=2 * self.rounds_per_epoch),
            )
            for level in range(self._levels)
        ]
        gradient, difference = workload.clips**2, np.full(workload.rounds, self.difference**2)
        early, late, changed = np.zeros((3, self.rounds_per_epoch))
        for level, ends, of_differences in ends_of:
            is_early = ends <= 2 * self.rounds_per_epoch
            early += self._node_squared_norms(ends[is_early], level, gradient)
            late += self._node_squared_norms(ends[~is_early], level, gradient)
            changed += self._node_squared_norms(of_differences, level, difference)
        return NodeGroups(early, late, changed, self.residual_squared_norms(workload))

    def variance(self, workload: Workload) -> Floats:
        """(1-α)^{2q'N} of the base prefix, S² of the base window, S_i² of the others: as three moments."""
        self.check_workload(workload)
        rounds, rounds_per_epoch, stay = workload.rounds, self.rounds_per_epoch, 1.0 - self.mixing
        over_epoch = self.decay**rounds_per_epoch
        gradient = nodes.window_variances(rounds, rounds_per_epoch, self.decay, self.std_early, self.std_late)
        changed = nodes.window_variances(
            rounds,
            rounds_per_epoch,
            self.decay,
            self.std_difference,
            self.std_difference,
            earliest=2 * rounds_per_epoch,
        )
        prefix, window, both = gradient.copy(), gradient.copy(), gradient.copy()  # variances, and covariance
        both[: rounds_per_epoch - 1] = window[: rounds_per_epoch - 1] = 0.0
        for t in range(rounds_per_epoch + 1, rounds + 1):
            now, before = t - 1, t - 1 - rounds_per_epoch
            if t < 2 * rounds_per_epoch:
                prefix[now] += over_epoch**2 * prefix[before]
                continue
            window[now] = stay**2 * (window[before] + changed[now]) + self.mixing**2 * gradient[now]
            carried = over_epoch * stay * both[before]
            both[now] = carried + window[now]
            prefix[now] = over_epoch**2 * prefix[before] + window[now] + 2.0 * carried
        return prefix + self.std_residual**2 * nodes.row_squared_norms(rounds, self.decay)

    def memory_vectors(self, workload: Workload) -> int:
        return max(self._part_ends(t)[-1] for t in range(1, workload.rounds + 1))

    def draws(self, t: int) -> int:
        return len(self.fresh_nodes(t))

    def fresh_nodes(self, t: int) -> tuple[tuple[TreeKind, int], ...]:
        """Tree and level of the node that each fresh vector of round t belongs to."""
        lowest = (t & -t).bit_length() - 1
        levels = range(min(lowest + 1, self._levels))
        found: list[tuple[TreeKind, int]] = [("residual", lowest)] if self.rounds_per_epoch > 1 else []
        found += [("gradient", level) for level in levels]
        found += [("difference", level) for level in levels if t - (1 << level) >= self.rounds_per_epoch]
        return tuple(found)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        rounds_per_epoch, stay = self.rounds_per_epoch, 1.0 - self.mixing
        before = self._unpack_state(state, t - 1)
        std_gradient = self.std_early if t <= 2 * rounds_per_epoch else self.std_late
        gradient, difference, stack, residual = before.gradient, before.difference, before.stack, None
        for (tree, level), vector in zip(self.fresh_nodes(t), fresh, strict=True):
            if tree == "gradient":
                gradient[level, t] = std_gradient * vector
            elif tree == "difference":
                difference[level, t] = self.std_difference * vector
            else:
                residual, stack = BinaryTree(self.decay).noise(stack, t, self.std_residual * vector)
        prefix = window = self._sum_nodes(gradient, max(1, t - rounds_per_epoch + 1), t)
        if t >= 2 * rounds_per_epoch:
            change = self._sum_nodes(difference, t - rounds_per_epoch + 1, t)
            prefix = window = stay * (before.windows[0] + change) + self.mixing * window
        if t > rounds_per_epoch:
            prefix = window + self.decay**rounds_per_epoch * before.prefixes[0]
        ended = (window,) if t >= rounds_per_epoch else ()
        after = (
            *stack,
            *(*before.prefixes, prefix)[-rounds_per_epoch:],
            *(*before.windows, *ended)[-rounds_per_epoch:],
            *(gradient[node] for node in self._live_nodes(t, 1)),
            *(difference[node] for node in self._live_nodes(t, rounds_per_epoch + 1)),
        )
        return prefix if residual is None else prefix + residual, after

    @property
    def _levels(self) -> int:
        return self.rounds_per_epoch.bit_length()

    def _node_squared_norms(self, ends: nodes.Ends, level: int, squares: Floats) -> Floats:
        return nodes.node_squared_norms(ends, level, self.rounds_per_epoch, self.decay, squares)

    def _sum_nodes(self, of_nodes: Mapping[Node, "Tensor"], first: int, last: int) -> "Tensor":
        earliest, *rest = nodes.cover(first, last)
        total = self.decay ** (last - earliest[1]) * of_nodes[earliest]
        for node in rest:
            total = total.add(of_nodes[node], alpha=self.decay ** (last - node[1]))
        return total

    def _live_nodes(self, t: int, first: int) -> Iterator[Node]:
        """Nodes that ended by round t and lie in the window of round t+1, none of them before round `first`."""
        start = max(first, t - self.rounds_per_epoch + 2)
        for level in range(self._levels):
            length = 1 << level
            earliest = -(-(start - 1) // length) * length + length
            yield from ((level, end) for end in range(earliest, t + 1, length))

    def _part_ends(self, t: int) -> tuple[int, int, int, int, int]:
        """Where each part of the state after round t ends."""
        stack = t.bit_count() if self.rounds_per_epoch > 1 else 0
        prefixes = stack + min(t, self.rounds_per_epoch)
        ended = prefixes + min(max(0, t - self.rounds_per_epoch + 1), self.rounds_per_epoch)
        gradient = ended + len(list(self._live_nodes(t, 1)))
        return (
            stack,
            prefixes,
            ended,
            gradient,
            gradient + len(list(self._live_nodes(t, self.rounds_per_epoch + 1))),
        )

    def _unpack_state(self, state: MechanismState, t: int) -> _SlidingState:
        stack, prefixes, ended, gradient, _ = self._part_ends(t)
        return _SlidingState(
            state[:stack],
            state[stack:prefixes],
            state[prefixes:ended],
            dict(zip(self._live_nodes(t, 1), state[ended:gradient], strict=True)),
            dict(zip(self._live_nodes(t, self.rounds_per_epoch + 1), state[gradient:], strict=True)),
        )


def check_movement(bound: Scalar, before: "Tensor", query: "Tensor", where: str) -> None:
    """RunError if a query (..., d) is farther than `bound` from the one before it.

    Guarantee: the distance is that of the two vectors as they are, computed in float64.
    """
    import torch

    moved = torch.linalg.vector_norm(query.double() - before.double(), dim=-1, keepdim=True)
    limit = torch.as_tensor(bound, dtype=torch.float64, device=moved.device).expand(moved.shape)
    over = ~(moved <= limit)  # true for NaN
    if bool(over.any()):
        raise RunError(
            f"{where}: the query moved by {float(moved[over][0]):.9g}, more than the {float(limit[over][0]):.9g} "
            "that this run's privacy rests on"
        )
