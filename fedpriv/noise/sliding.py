"""Noise of Algorithm 2 as in the paper: sums over the last N rounds, in windows that slide.

Source: Tran & Cutkosky 2022, Algorithm 2 and its reconstruction, streamed.  N is `rounds_per_epoch`.  Gradients,
their differences between epochs, and the residual r (the change of the gradient since the start of the epoch) have
a binary tree each.  A window is the last N rounds up to t, or rounds 1 … t before round N.  G_t and Δ_t are the
noise of the gradient tree and of the difference tree in this window, each the decayed sum of the noise of the
nodes that make up the window.  A node is a pair (level, end): the 2^level rounds up to `end`.  A sum is multiplied
by `decay` in every round.  The estimate of a window's sum is, with weight `mixing`, the sum of its gradients, and
otherwise the estimate of one epoch before plus the differences.  w_t is the noise of this estimate, and p_t that
of the estimate of the prefix, rounds 1 … t:

    w_t = G_t                                             before round 2N
    w_t = (1 - mixing) (w_{t-N} + Δ_t) + mixing G_t       from round 2N on
    p_t = w_t + decay^N p_{t-N}                           p_t = w_t in the first N rounds

A release has the noise p_t and, if N > 1, the noise of the residual tree.  The sensitivity of differences rests on
how far queries move (`check_movement`).
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
"""Tree of a node: of r, of G, or of Δ, as in `differences`."""


class _SlidingState(NamedTuple):
    """State after round t.

    | field | meaning |
    |---|---|
    | `stack` | stack of the r tree |
    | `prefixes`, `windows` | noise of the last prefixes and full windows, at most N of each, oldest first |
    | `gradient`, `difference` | noise of the nodes of G and of Δ that `_live_nodes` yields |
    """

    stack: tuple["Tensor", ...]
    prefixes: tuple["Tensor", ...]
    windows: tuple["Tensor", ...]
    gradient: dict[Node, "Tensor"]
    difference: dict[Node, "Tensor"]


@dataclass(frozen=True)
class SlidingDifferences(DifferenceTrees):
    """Noise of Algorithm 2, whose fresh vectors of round t belong to `fresh_nodes(t)`, which all end at t."""

    name: ClassVar[str] = "sliding-differences"
    words: ClassVar[str] = f"{THREE_TREES_DESCRIPTION}, over sliding windows"

    def squared_norms(self, workload: Workload) -> NodeGroups:
        """Add up each position's squared displacements over all used nodes, (N,) for each group of nodes.

        A position is that of a record in every epoch of a fixed order, and its displacement of a node the distance
        by which it can move the node.  Used nodes of gradients are part of some window, and those of differences
        of one that ends at round 2N or later.  Gradient nodes that end up to round 2N are early.

        Args:
            workload: Workload with the clips and the fixed order.
        """
        ends_by_level = [
            (
                level,
                nodes.used_ends(workload.rounds, self.rounds_per_epoch, level),
                nodes.used_ends(workload.rounds, self.rounds_per_epoch, level, earliest=2 * self.rounds_per_epoch),
            )
            for level in range(self._levels)
        ]
        gradient, difference = workload.clips**2, np.full(workload.rounds, self.difference**2)
        early_norms, late_norms, difference_norms = np.zeros((3, self.rounds_per_epoch))
        for level, ends, difference_ends in ends_by_level:
            is_early = ends <= 2 * self.rounds_per_epoch
            early_norms += self._node_squared_norms(ends[is_early], level, gradient)
            late_norms += self._node_squared_norms(ends[~is_early], level, gradient)
            difference_norms += self._node_squared_norms(difference_ends, level, difference)
        return NodeGroups(early_norms, late_norms, difference_norms, self.residual_squared_norms(workload))

    def variance(self, workload: Workload) -> Floats:
        """Compute the noise variance of every release per coordinate, (T,).

        The variances of p_t and w_t and their covariance follow by a recursion with a lag of N rounds, since G_t
        and Δ_t are independent of the noise up to round t - N.  The variance of the residual tree is added.
        For N = 1 `std_residual` has to be 0, as `calibrate_trees` sets it.

        Args:
            workload: Workload with the rounds.

        Raises:
            InputError: `check_workload` refuses the workload.
        """
        self.check_workload(workload)
        rounds, rounds_per_epoch, retention = workload.rounds, self.rounds_per_epoch, 1.0 - self.mixing
        epoch_decay = self.decay**rounds_per_epoch
        gradient = nodes.window_variances(rounds, rounds_per_epoch, self.decay, self.std_early, self.std_late)
        difference = nodes.window_variances(
            rounds,
            rounds_per_epoch,
            self.decay,
            self.std_difference,
            self.std_difference,
            earliest=2 * rounds_per_epoch,
        )
        # Before round 2N window noise is G_t.  No recursion reads the windows that end before round N.
        prefix, window, covariance = gradient.copy(), gradient.copy(), gradient.copy()
        covariance[: rounds_per_epoch - 1] = window[: rounds_per_epoch - 1] = 0.0
        for t in range(rounds_per_epoch + 1, rounds + 1):
            index, index_before = t - 1, t - 1 - rounds_per_epoch  # of round t, and one epoch before
            if t < 2 * rounds_per_epoch:
                prefix[index] += epoch_decay**2 * prefix[index_before]
                continue
            window[index] = (
                retention**2 * (window[index_before] + difference[index]) + self.mixing**2 * gradient[index]
            )
            # Covariance of decay^N p_{t-N} with w_t, by the part (1 - mixing) w_{t-N} of w_t.
            past_covariance = epoch_decay * retention * covariance[index_before]
            covariance[index] = past_covariance + window[index]
            prefix[index] = epoch_decay**2 * prefix[index_before] + window[index] + 2.0 * past_covariance
        return prefix + self.std_residual**2 * nodes.row_squared_norms(rounds, self.decay)

    def memory_vectors(self, workload: Workload) -> int:
        return max(self._part_ends(t)[-1] for t in range(1, workload.rounds + 1))

    def draws(self, t: int) -> int:
        return len(self.fresh_nodes(t))

    def fresh_nodes(self, t: int) -> tuple[tuple[TreeKind, int], ...]:
        """Return the tree and the level of the node to which each fresh vector of round t belongs.

        The nodes end at t.  The first one, if N > 1, is of the residual tree, with the level of the largest power
        of 2 that divides t.  Nodes of the gradient tree follow, one for each level whose length 2^level ≤ N
        divides t.  Then come nodes of the difference tree, for those of these levels whose node begins after the
        first epoch.
        """
        lowest = (t & -t).bit_length() - 1
        levels = range(min(lowest + 1, self._levels))
        fresh: list[tuple[TreeKind, int]] = [("residual", lowest)] if self.rounds_per_epoch > 1 else []
        fresh += [("gradient", level) for level in levels]
        fresh += [("difference", level) for level in levels if t - (1 << level) >= self.rounds_per_epoch]
        return tuple(fresh)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Return the noise of round t and the next state.

        The noise is p_t of the module's recursions plus that of the residual tree, if N > 1.  Gradient nodes that
        end up to round 2N have noise of `std_early`, and later ones of `std_late`.  `_SlidingState` has the parts
        of the state.

        Args:
            state: State before round t, a flat tuple of vectors.
            t: Round, from 1.
            fresh: Fresh vectors, stacked in the order of `fresh_nodes(t)`.
        """
        rounds_per_epoch, retention = self.rounds_per_epoch, 1.0 - self.mixing
        state_before = self._unpack_state(state, t - 1)
        std_gradient = self.std_early if t <= 2 * rounds_per_epoch else self.std_late
        gradient, difference, stack, residual = (
            state_before.gradient,
            state_before.difference,
            state_before.stack,
            None,
        )
        for (tree, level), vector in zip(self.fresh_nodes(t), fresh, strict=True):
            if tree == "gradient":
                gradient[level, t] = std_gradient * vector
            elif tree == "difference":
                difference[level, t] = self.std_difference * vector
            else:
                residual, stack = BinaryTree(self.decay).noise(stack, t, self.std_residual * vector)
        # w_t from the window's nodes, and from w_{t-N}, the oldest window of the state, and p_t likewise.
        prefix = window = self._sum_nodes(gradient, max(1, t - rounds_per_epoch + 1), t)
        if t >= 2 * rounds_per_epoch:
            change = self._sum_nodes(difference, t - rounds_per_epoch + 1, t)
            prefix = window = retention * (state_before.windows[0] + change) + self.mixing * window
        if t > rounds_per_epoch:
            prefix = window + self.decay**rounds_per_epoch * state_before.prefixes[0]
        full_windows = (window,) if t >= rounds_per_epoch else ()
        next_state = (
            *stack,
            *(*state_before.prefixes, prefix)[-rounds_per_epoch:],
            *(*state_before.windows, *full_windows)[-rounds_per_epoch:],
            *(gradient[node] for node in self._live_nodes(t, 1)),
            *(difference[node] for node in self._live_nodes(t, rounds_per_epoch + 1)),
        )
        return prefix if residual is None else prefix + residual, next_state

    @property
    def _levels(self) -> int:
        return self.rounds_per_epoch.bit_length()

    def _node_squared_norms(self, ends: nodes.Ends, level: int, squares: Floats) -> Floats:
        return nodes.node_squared_norms(ends, level, self.rounds_per_epoch, self.decay, squares)

    def _sum_nodes(self, node_noise: Mapping[Node, "Tensor"], first: int, last: int) -> "Tensor":
        (level, end), *later_nodes = nodes.cover(first, last)
        total = self.decay ** (last - end) * node_noise[level, end]
        for level, end in later_nodes:
            total = total.add(node_noise[level, end], alpha=self.decay ** (last - end))
        return total

    def _live_nodes(self, t: int, first: int) -> Iterator[Node]:
        """Yield the nodes (level, end) in the window of round t+1 that ended by round t, level by level.

        None of these nodes begins before round `first`.  The state after round t stores their noise.
        """
        start = max(first, t - self.rounds_per_epoch + 2)
        for level in range(self._levels):
            length = 1 << level
            earliest = -(-(start - 1) // length) * length + length
            yield from ((level, end) for end in range(earliest, t + 1, length))

    def _part_ends(self, t: int) -> tuple[int, int, int, int, int]:
        """Return the end of each part of the state after round t, counted in vectors.

        The parts are those of `_SlidingState`, in their order.
        """
        stack = t.bit_count() if self.rounds_per_epoch > 1 else 0
        prefixes = stack + min(t, self.rounds_per_epoch)
        windows = prefixes + min(max(0, t - self.rounds_per_epoch + 1), self.rounds_per_epoch)
        gradient = windows + len(list(self._live_nodes(t, 1)))
        return (
            stack,
            prefixes,
            windows,
            gradient,
            gradient + len(list(self._live_nodes(t, self.rounds_per_epoch + 1))),
        )

    def _unpack_state(self, state: MechanismState, t: int) -> _SlidingState:
        stack, prefixes, windows, gradient, _ = self._part_ends(t)
        return _SlidingState(
            state[:stack],
            state[stack:prefixes],
            state[prefixes:windows],
            dict(zip(self._live_nodes(t, 1), state[windows:gradient], strict=True)),
            dict(zip(self._live_nodes(t, self.rounds_per_epoch + 1), state[gradient:], strict=True)),
        )


def check_movement(bound: Scalar, query_before: "Tensor", query: "Tensor", message_start: str) -> None:
    """Check that a query moved by at most a bound since the round before, in Euclidean distance.

    Guarantee: the distance is that of the two vectors as they are, computed in float64.

    Args:
        bound: Largest allowed distance, a number, or (..., 1) with one for each leading index.
        query_before: Query of the round before, (..., d).
        query: Query, (..., d).
        message_start: Beginning of the error message.

    Raises:
        RunError: A distance is above its bound, or the distance or the bound is NaN.
    """
    import torch

    distances = torch.linalg.vector_norm(query.double() - query_before.double(), dim=-1, keepdim=True)
    limit = torch.as_tensor(bound, dtype=torch.float64, device=distances.device).expand(distances.shape)
    is_above = ~(distances <= limit)  # True for NaN
    if bool(is_above.any()):
        raise RunError(
            f"{message_start}: the query moved by {float(distances[is_above][0]):.9g}, more than the "
            f"{float(limit[is_above][0]):.9g} that this run's privacy rests on"
        )
