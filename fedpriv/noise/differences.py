"""Noise of three trees, for momentum-tree-reduced and momentum-tree-aligned.

Source: Tran & Cutkosky, Momentum Aggregation for Private Non-convex ERM (NeurIPS 2022), Algorithm 2, with its
errata (docs/momentum.md).  The increment of round t is g_t(w_t): g_t is the gradient on the round's batch, and w_t
the query, the point at which silos compute it.  An epoch has N rounds, and in a fixed order a record takes part in
the same one of them in every epoch, its position.  Every increment is split at v_q, the query at the start of its
epoch q:

    G_t = g_t(v_q),   Δ_t = g_t(v_q) - g_t(v_{q-1}),   r_t = g_t(w_t) - g_t(v_q)

The sums of G are estimated as (1 - γ) (last epoch's estimate + sum of Δ) + γ (sum of G), with a mixing weight γ
between 0 and 1.  Differences of gradients are often smaller than gradients, and then need less noise.  In a fixed
order, where no part is clipped, the estimate without noise is plain momentum, and the three trees (of G, Δ and r)
are formed for the noise only.  A node of a tree is the decayed sum of an interval of rounds (`tree`).  The nodes
form four groups, each with one standard deviation:

| group | nodes | one record moves a part G_t, Δ_t or r_t by at most (zero-out) |
|---|---|---|
| early | of G that end in the first two epochs (`AlignedDifferences`: in the first epoch) | clip |
| late | of the other G | clip |
| difference | of Δ | `difference` |
| residual | of r | `residual` · (rounds since the epoch began), or `residual` if r is clipped |

In the first round of an epoch r is 0.

`AlignedDifferences` is a variant of ours, whose trees of G and Δ lie inside epochs, while the tree of r spans the
run.  The paper composes the sum of G up to round t from windows of N rounds, which slide over epoch boundaries.
The variant composes it from prefixes of single epochs q = 0, 1, …, the first p rounds of an epoch, p = 1 … N:

    Q_{q,p} = (1 - γ) (Q_{q-1,p} + prefix of Δ) + γ (prefix of G),   Q_{0,p} = prefix of G
    sum of G up to t = Q_{q,p} + Σ_{k<q} decay^{p + (q-1-k) N} Q_{k,N}

One tree of N leaves serves G and Δ in all epochs: the node that ends at position p keeps a filtered noise of both
from epoch to epoch.

A release is the noisy running sum of a round.  A displacement is the distance by which one record moves a node.
Fresh vectors are independent normal vectors, drawn for each round.  A workload has the decay of the running sums,
the clip of every round and the rounds in which records take part.

On integers the parts r, G and Δ of a round go into three trees.  C maps the parts to the nodes' values, and B maps
these values to the releases.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from fedpriv.core.errors import InputError, refuse
from fedpriv.core.replicates import SHARED
from fedpriv.noise import tree as nodes
from fedpriv.noise.integers.fixed_point import Ints, round_coefficient, to_coefficient
from fedpriv.noise.integers.strategies import (
    IntegerBounds,
    IntegerStrategy,
    IntState,
    Lattice,
    LoadBounds,
    NoiseGroup,
)
from fedpriv.noise.mechanism import Factorization, Mechanism, MechanismState, Sensitivity, check_matches
from fedpriv.noise.series import Floats, Workload
from fedpriv.noise.tree import BinaryTree, IntegerTree, cover, decay_rounding_factor
from fedpriv.participation.orders import FixedOrder

if TYPE_CHECKING:
    from torch import Tensor


THREE_TREES_DESCRIPTION = (
    "Gaussian noise on three trees: of gradients, of their changes between epochs, and of those within one"
)


class NodeGroups(NamedTuple):
    """Values of each record in each group of nodes of the module's table, (N,) a group.

    Entry i is for the record at position i = 0, 1, … of an epoch of N rounds.
    """

    early: Floats
    """Nodes of G that end early."""
    late: Floats
    """Other nodes of G."""
    difference: Floats
    """Nodes of Δ."""
    residual: Floats
    """Nodes of r."""


@dataclass(frozen=True)
class DifferenceTrees(Mechanism):
    """Noise of three trees, with a standard deviation for each group of nodes.

    | field | meaning |
    |---|---|
    | `rounds_per_epoch` | N: rounds of an epoch |
    | `mixing` | γ, the weight of new sums of G against those carried over from the last epoch |
    | `difference`, `residual` | bounds of the module's table, for one record's part under zero-out |
    | `movement` | bound of ‖w_{t+1} - w_t‖ that both bounds rest on, or None if the bounds are clip norms |
    | `decay` | decay of the running sums per round |
    | `std_*` | standard deviation of a node's noise in each group, in multiples of that of the fresh vectors |
    | `least` | least sensitivity that is charged, in clips, for noise sized by the paper, or 0 |

    Guarantee: for queries that move by at most `movement` a round (any queries for None), one record moves each
    part of its rounds by no more than the bound of the module's table, whatever was released before.  It moves a
    node by no more than the decayed sum of these bounds over its rounds in the node.  The squares of these sums
    over `std_*`², summed over every released node that holds the record, are at most the square of the sensitivity
    (adaptive composition of Gaussian mechanisms), and equal to it for the worst record unless `least` is larger.
    """

    rounds_per_epoch: int
    mixing: float
    difference: float
    residual: float
    movement: float | None = field()
    decay: float = field(default=1.0, metadata=SHARED)
    std_early: float = 1.0
    std_late: float = 1.0
    std_difference: float = 1.0
    std_residual: float = 1.0
    least: float = 0.0

    def squared_norms(self, workload: Workload) -> NodeGroups:
        """Compute each record's squared displacement in each group of nodes.

        This is the sum of squares of the distances by which the record moves the group's nodes, not divided by the
        variance of their noise.

        Args:
            workload: Workload with the clips and the fixed order.
        """
        raise NotImplementedError

    @property
    def stds(self) -> tuple[float, float, float, float]:
        return self.std_early, self.std_late, self.std_difference, self.std_residual

    @property
    def assumption(self) -> str | None:
        """Smoothness assumption if queries' movement bounds the differences, or None if they are clipped."""
        if self.movement is None:
            return None
        return (
            "The claim rests on the loss's smoothness and on gradients in exact arithmetic: differences of "
            "gradients are not clipped, they are bounded by how far queries move."
        )

    @property
    def clipped_parts(self) -> tuple[float, ...]:  # type: ignore[override]
        """Clip norms of Δ and r, or () if queries' movement bounds them."""
        return (self.difference, self.residual) if self.movement is None else ()

    @property
    def fresh_std(self) -> float:
        """Standard deviation of the r tree's node that ends at t, or 0 for epochs of one round."""
        return self.std_residual if self.rounds_per_epoch > 1 else 0.0

    def certified(self, workload: Workload) -> Sensitivity:
        charge = self.attained_sensitivity(workload)
        return charge._replace(value=max(charge.value, self.least * float(np.max(workload.clips))))

    def attained_sensitivity(self, workload: Workload) -> Sensitivity:
        """Compute the sensitivity by counting nodes, without `least`.

        The square of the sensitivity is the largest Σ_k (squared displacement in group k) / std_k² over the
        records, k = early, late, difference, residual.

        Args:
            workload: Workload with the clips and the fixed order.

        Returns:
            Sensitivity relative to the standard deviation of fresh vectors, in the unit of the clips, as a bound.

        Raises:
            InputError: `check_workload` refuses the workload, or a released group of nodes has no noise or an
                infinite one.
        """
        self.check_workload(workload)
        total = np.zeros(self.rounds_per_epoch)
        for squared_norms, std in zip(self.squared_norms(workload), self.stds, strict=True):
            if not 0.0 < std < math.inf and np.any(squared_norms):
                raise InputError(
                    f"{type(self).__name__}: a released group of nodes has no noise, or more than any number holds"
                )
            total += squared_norms / std**2 if std > 0.0 else 0.0
        value = math.sqrt(float(np.max(total)))
        bound_text = "clipped differences" if self.movement is None else f"steps of at most {self.movement:g}"
        return Sensitivity(value, False, f"released nodes of three trees that hold the record; {bound_text}")

    def check_workload(self, workload: Workload) -> None:
        """Check that the trees factor the workload and that their bounds are usable.

        The order has to be fixed, with N batches in every epoch.  In others Δ would be a difference between
        gradients of different records.

        Args:
            workload: Workload of the run.

        Raises:
            InputError: The decay or the order is another one, sums restart, γ is not strictly between 0 and 1, a
                bound is not above 0, or `difference` or `residual` is not finite.
        """
        check_matches(workload, self.decay, None)
        refuse(
            {
                f"differences between epochs need one order of {self.rounds_per_epoch} batches in every epoch: "
                "with fresh permutations they are differences between records": (
                    not isinstance(workload.public_order, FixedOrder)
                    or workload.public_order.rounds_per_epoch != self.rounds_per_epoch
                ),
                f"mixing = {self.mixing}: γ lies strictly between 0 and 1": not 0.0 < self.mixing < 1.0,
                "the noise rests on a bound of the loss's smoothness, and none is known for this model; use "
                "momentum-tree-aligned with algorithm.difference_clip and algorithm.residual_clip": (
                    not (math.isfinite(self.difference) and math.isfinite(self.residual))
                ),
                "bounds on differences and on the movement must be above 0": (
                    min(self.difference, self.residual) <= 0.0
                    or (self.movement is not None and self.movement <= 0.0)
                ),
            }
        )

    def residual_squared_norms(self, workload: Workload) -> Floats:
        """Compute each record's squared displacement in the r tree, which spans the whole run, (N,).

        Entry i is for the record at position i = 0, 1, … of an epoch.  In its rounds r moves by at most `residual`
        · i if queries' movement bounds it, and by `residual` if r is clipped and i > 0.
        """
        rounds_since_anchor = np.arange(workload.rounds) % self.rounds_per_epoch
        max_distance = self.rounds_per_epoch if self.movement is not None else 1
        displacements = self.residual * np.minimum(rounds_since_anchor, max_distance).astype(np.float64)
        squared_norms = np.zeros(self.rounds_per_epoch)
        record_norms = nodes.record_squared_norms(displacements, self.rounds_per_epoch, self.decay)
        squared_norms[: len(record_norms)] = record_norms
        return squared_norms


Trees = TypeVar("Trees", bound=DifferenceTrees)


def calibrate_trees(trees: Trees, workload: Workload, shares: Literal["best", "equal"]) -> Trees:
    """Return the trees with the standard deviation √(M_k / λ_k) / (largest clip) of each group of nodes.

    M_k is the largest squared displacement of a record in group k = early, late, difference, residual.  A group
    with M_k = 0 gets the standard deviation 0.  The shares λ_k of the groups sum to 1.  The sensitivity, the root
    of the largest sum of (squared displacement) / std_k² of a record, is then at most the largest clip, up to
    rounding.

    Args:
        trees: Trees with any standard deviations.
        workload: Workload of the run.
        shares: "equal" for equal λ_k of the groups with M_k > 0.  "best" for the least mean variance, λ_k ∝
            √(A_k M_k), where A_k is the mean variance of the releases if group k alone has noise, of standard
            deviation 1.

    Raises:
        InputError: The method `check_workload` of the trees refuses the workload.
    """
    trees.check_workload(workload)
    worst_norms = np.array([float(np.max(squared_norms)) for squared_norms in trees.squared_norms(workload)])
    share_weights = (
        np.sqrt(np.array([with_stds(trees, unit).mean_variance(workload) for unit in np.eye(4)]) * worst_norms)
        if shares == "best"
        else (worst_norms > 0.0).astype(float)
    )
    shares_of_groups = share_weights / np.sum(share_weights)
    with np.errstate(divide="ignore"):  # `attained_sensitivity` refuses the infinite size of a share of 0
        return with_stds(
            trees,
            np.sqrt(np.divide(worst_norms, shares_of_groups, out=np.zeros(4), where=worst_norms > 0.0))
            / float(np.max(workload.clips)),
        )


def size_by_paper(trees: Trees, workload: Workload, sigma_mu: float) -> Trees:
    """Set the standard deviations of nodes to those that Algorithm 2 states.

    These are √V_{≤2N} for early nodes, √V_{>2N} for late nodes, and `difference` / (2 clip) · √V_{>2N} for nodes
    of Δ and of r, with the largest clip (`paper_window_counts` for V).  `difference` includes the smoothness
    constant L, which the algorithm's box omits, and α is 1 minus the decay.

    Args:
        trees: Trees with a bound of the queries' movement.
        workload: Workload of the run.
        sigma_mu: σμ, the paper's noise multiplier times the GDP parameter μ that it is calibrated to.

    Returns:
        The same trees with these standard deviations, in multiples of that of fresh vectors, and `least` = 2 σμ.

    Raises:
        InputError: Differences are clipped, the trees refuse the workload (`check_workload`), α is below 1/N, or
            N < 6 (`paper_window_counts`).
    """
    trees.check_workload(workload)
    if trees.movement is None:
        raise InputError('calibration = "paper" knows no clipped differences; use calibration = "exact"')
    if trees.decay > 1.0 - 1.0 / trees.rounds_per_epoch + 1e-12:
        raise InputError(f'calibration = "paper" needs alpha of at least 1/N = 1/{trees.rounds_per_epoch}')
    early, late = map(math.sqrt, paper_window_counts(workload.rounds, trees.rounds_per_epoch))
    difference = trees.difference / (2.0 * float(np.max(workload.clips))) * late
    paper_trees = with_stds(trees, np.array([early, late, difference, difference]))
    return dataclasses.replace(paper_trees, least=2.0 * sigma_mu)


def paper_window_counts(rounds: int, rounds_per_epoch: int) -> tuple[float, float]:
    """Compute V_{≤2N} = 3 log2 N and V_{>2N} = 4 (T/N) log2 N of Algorithm 2.

    These are the paper's bounds on the number of nodes that hold one record: of G's nodes that end by round 2N,
    and of all later nodes.

    Args:
        rounds: T, rounds of the run.
        rounds_per_epoch: N.

    Raises:
        InputError: N < 6.  At N = 2 the first count is too small.  At N = 1 both are 0, which is no noise.
    """
    if rounds_per_epoch < 6:
        raise InputError(
            f"{rounds_per_epoch} rounds an epoch: the paper's constants of Algorithm 2 hold from 6 on; "
            'use calibration = "exact"'
        )
    return 3.0 * math.log2(rounds_per_epoch), 4.0 * rounds / rounds_per_epoch * math.log2(rounds_per_epoch)


def with_stds(trees: Trees, stds: Floats) -> Trees:
    """Return the trees with these standard deviations (4,), in the order of `NodeGroups`.

    Args:
        trees: Trees.
        stds: Standard deviations relative to the fresh vectors, (4,).
    """
    early, late, difference, residual = map(float, stds)
    return dataclasses.replace(
        trees, std_early=early, std_late=late, std_difference=difference, std_residual=residual
    )


@dataclass(frozen=True)
class AlignedDifferences(DifferenceTrees):
    """Noise of three trees, those of G and Δ inside epochs and that of r over the whole run.

    The noise of G and Δ follows the module's recursion for Q.  A round takes one fresh vector for the r tree (if
    N > 1), one for G, and from the second epoch on one for Δ.
    """

    name: ClassVar[str] = "aligned-differences"
    words: ClassVar[str] = f"{THREE_TREES_DESCRIPTION}, aligned with epochs"

    def squared_norms(self, workload: Workload) -> NodeGroups:
        """Add up each record's squared displacements in the four groups of nodes, (N,) a group.

        The trees of G and of Δ cover one epoch each, so that their squares add up over the epochs.

        Args:
            workload: Workload with the clips.
        """
        early, late, difference = np.zeros((3, self.rounds_per_epoch))
        for start in range(0, workload.rounds, self.rounds_per_epoch):
            clips = workload.clips[start : start + self.rounds_per_epoch]
            column_norms = nodes.column_squared_norms(len(clips), self.decay)
            # The first epoch has no earlier query, and so no differences.
            if start == 0:
                early[: len(column_norms)] += clips**2 * column_norms
            else:
                late[: len(column_norms)] += clips**2 * column_norms
                difference[: len(column_norms)] += self.difference**2 * column_norms
        return NodeGroups(early, late, difference, self.residual_squared_norms(workload))

    def variance(self, workload: Workload) -> Floats:
        """Compute the noise variance of every release per coordinate, epoch by epoch, (T,).

        The release at position p of an epoch has three noises: n, the filtered noise of the nodes of prefix p; c,
        the noise carried over from earlier epochs, decayed by decay^p; and, if N > 1, the noise of the r tree,
        independent of n and c.  n and c are correlated, because both may contain noise of the same nodes.  The
        variances are for fresh vectors of variance 1.
        """
        self.check_workload(workload)
        # n and c are weighted sums of noises of nodes.  Their variances and covariance are node_variance,
        # past_variance and covariance times sums over nodes: of squared weights in prefix p (row_norms[p-1]), of
        # squared weights in a whole epoch (row_norms[-1], decayed by p rounds), and of products of both weights
        # (overlaps[p-1]).
        rounds_per_epoch, decay, retention = self.rounds_per_epoch, self.decay, 1.0 - self.mixing
        row_norms = nodes.row_squared_norms(rounds_per_epoch, decay)
        positions = np.arange(1, rounds_per_epoch + 1)
        epoch_ends = {end for _, end in cover(1, rounds_per_epoch)}
        overlaps = [
            sum(decay ** (2 * p + rounds_per_epoch - 2 * end) for _, end in cover(1, p) if end in epoch_ends)
            for p in range(1, rounds_per_epoch + 1)
        ]
        epochs = -(-workload.rounds // rounds_per_epoch)
        node_variance, past_variance, covariance, rows = self.std_early**2, 0.0, 0.0, list[Floats]()
        for epoch in range(epochs):
            if epoch:
                # The last epoch's n joins c, and a node of the new n keeps the share 1 - γ of its last noise.
                past_variance = (
                    decay ** (2 * rounds_per_epoch) * past_variance
                    + node_variance
                    + 2.0 * decay**rounds_per_epoch * covariance
                )
                covariance = retention * (decay**rounds_per_epoch * covariance + node_variance)
                # The filter of a node, from epoch to epoch: (1 - γ) (last noise + that of Δ) + γ (noise of G).
                node_variance = (
                    retention**2 * (node_variance + self.std_difference**2) + (self.mixing * self.std_late) ** 2
                )
            past_in_rows = decay ** (2 * positions) * row_norms[-1] * past_variance
            rows.append(node_variance * row_norms + past_in_rows + 2.0 * covariance * np.array(overlaps))
        total = np.concatenate(rows)[: workload.rounds]
        return total + self.fresh_std**2 * nodes.row_squared_norms(workload.rounds, decay)

    def memory_vectors(self, workload: Workload) -> int:
        return max(sum(self._state_sizes(t)) for t in range(1, workload.rounds + 1))

    def draws(self, t: int) -> int:
        return 1 + int(self.rounds_per_epoch > 1) + int(t > self.rounds_per_epoch)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Return the noise of round t and the next state.

        The state is a flat tuple of vectors in three parts:

        * the stack of the r tree, the noise of prefixes of the run, shortest first, or nothing if N = 1,
        * a ring, the filtered noise of the nodes at the last N positions, oldest first,
        * the epoch's stack, the noise of prefixes of the current epoch, shortest first, each including earlier
          epochs.  After the first epoch its first vector is the noise of all complete epochs.

        Args:
            state: State before round t.
            t: Round, from 1.
            fresh: Fresh vectors, stacked: for r (if N > 1), for G, and from the second epoch on for Δ.
        """
        stack_size, ring_size, _ = self._state_sizes(t - 1)
        stack, ring, epoch_stack = (
            state[:stack_size],
            state[stack_size : stack_size + ring_size],
            state[stack_size + ring_size :],
        )
        vectors, residual = list(fresh), None
        if self.rounds_per_epoch > 1:
            residual, stack = BinaryTree(self.decay).noise(stack, t, self.std_residual * vectors.pop(0))
        if t <= self.rounds_per_epoch:
            node_noise = self.std_early * vectors[0]
        else:  # ring[0] is the noise of the same position one epoch ago
            updated_noise = ring[0] + self.std_difference * vectors[1]
            node_noise = (1.0 - self.mixing) * updated_noise + self.mixing * (self.std_late * vectors[0])
        position = (t - 1) % self.rounds_per_epoch + 1
        length = position & -position
        # Prefix p is the node that ends at p, of `length` rounds, plus the prefix before the node.
        left_nodes = epoch_stack[: len(epoch_stack) - (length.bit_length() - 1)]
        noise = node_noise.add(left_nodes[-1], alpha=self.decay**length) if left_nodes else node_noise
        next_epoch_stack = (noise,) if position == self.rounds_per_epoch else (*left_nodes, noise)
        next_state = (*stack, *(*ring, node_noise)[-self.rounds_per_epoch :], *next_epoch_stack)
        return noise if residual is None else noise + residual, next_state

    def integer(self, workload: Workload) -> Factorization:
        """Build the factorization with a decay that is a multiple of 2^-31.

        Bounds that rest on how far queries move do not hold for parts that are rounded to integers, so that the
        parts have to be clipped.

        Raises:
            InputError: Differences are not clipped.
        """
        if self.movement is not None:
            raise InputError(
                "AlignedDifferences: bounds that rest on how far queries move are no bounds of integers; use "
                "algorithm.difference_clip and algorithm.residual_clip"
            )
        decay = round_coefficient(self.decay)
        trees, workload = dataclasses.replace(self, decay=decay), dataclasses.replace(workload, decay=decay)
        strategy = IntegerAligned(to_coefficient(decay), trees.rounds_per_epoch, *trees.stds)
        return DifferenceFactorization(
            strategy, trees, workload, decay_rounding_factor(decay, workload), trees=trees
        )

    def _state_sizes(self, t: int) -> tuple[int, int, int]:
        """Vectors in each part of the state after round t: r stack, ring, epoch stack."""
        return (
            t.bit_count() if self.rounds_per_epoch > 1 else 0,
            min(t, self.rounds_per_epoch),
            int(t >= self.rounds_per_epoch) + (t % self.rounds_per_epoch).bit_count(),
        )


@dataclass(frozen=True)
class DifferenceFactorization(Factorization):
    """Factorization of increments whose parts r, G and Δ are clipped separately.

    A round's fresh vectors come in the same order as the parts: r if N > 1, G, and from the second epoch on Δ.
    """

    trees: AlignedDifferences = dataclasses.field(kw_only=True)
    """Trees with their bounds of r and Δ, which are clip norms in real units, and with a rounded decay."""

    def part_clips(self, t: int) -> tuple[float, ...]:
        return (
            *((self.trees.residual,) if self.trees.rounds_per_epoch > 1 else ()),
            float(self.workload.clips[t - 1]),
            *((self.trees.difference,) if t > self.trees.rounds_per_epoch else ()),
        )

    def sensitivity_in_units(self, lattice: Lattice) -> float:
        difference, residual = (float(lattice.norm(clip)) for clip in (self.trees.difference, self.trees.residual))
        return self._sensitivity_in_units(
            dataclasses.replace(self.trees, difference=difference, residual=residual), lattice
        )


@dataclass(frozen=True)
class IntegerAligned(IntegerStrategy):
    """C of `AlignedDifferences` on integers.

    C consists of a tree of r over the whole run, and of trees of G and of Δ that restart every epoch.  Round t
    takes, stacked in this order, r (if rounds_per_epoch > 1), G, and from the second epoch on Δ.

    | field | meaning |
    |---|---|
    | `decay` | decay, in multiples of 2^-31 |
    | `rounds_per_epoch` | N: rounds of an epoch |
    | `std_*` | noise of each group of nodes, in multiples of that of fresh vectors |
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

    def noise_scales(self, t: int) -> tuple[float, ...]:
        return (
            *((self.std_residual,) if self.rounds_per_epoch > 1 else ()),
            *((self.std_early,) if t <= self.rounds_per_epoch else (self.std_late, self.std_difference)),
        )

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        """Return the released nodes in groups of equal noise: early and late ones of G, those of Δ and of r.

        An epoch holds a record once, so that roundings are bounded for one participation in the trees of G and Δ.

        Args:
            rounds: Number of rounds of the run.
            participations: Most rounds of one record.
        """
        early = min(rounds, self.rounds_per_epoch)
        ((_, _, epoch_roundings),) = self._epoch_tree.noise_groups(rounds, 1)
        groups = [NoiseGroup(early, self.std_early, epoch_roundings)]
        if rounds > early:
            groups += [
                NoiseGroup(rounds - early, std, epoch_roundings) for std in (self.std_late, self.std_difference)
            ]
        if self.rounds_per_epoch > 1:
            ((_, _, run_roundings),) = self._residual_tree.noise_groups(rounds, participations)
            groups.append(NoiseGroup(rounds, self.std_residual, run_roundings))
        return tuple(groups)

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        gradient_index = int(self.rounds_per_epoch > 1)
        residuals = (
            self._residual_tree.bound_integers([load[:1] for load in loads])
            if gradient_index
            else IntegerBounds(0, 0)
        )
        gradients = self._epoch_tree.bound_integers([load[gradient_index : gradient_index + 1] for load in loads])
        changes = self._epoch_tree.bound_integers([load[gradient_index + 1 :] or (0,) for load in loads])
        return IntegerBounds(*(max(bounds) for bounds in zip(residuals, gradients, changes, strict=True)))

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """Return the nodes that end at t, one for each part, and the next state.

        The state consists of the stacks of the trees of r (if N > 1), G and (from the second epoch on) Δ, one
        after the other.  A stack holds the nodes that later rounds may merge, longest first.

        Args:
            state: State before round t.
            t: Round, from 1.
            sums: Sums of the round's parts r (if N > 1), G, and from the second epoch on Δ: (parts, d), in units
                of the lattice.

        Returns:
            Nodes (parts, d), and the state.

        Guarantee: r is taken as 0 in the first round of an epoch, where accounting charges nothing for r.
        """
        parts, stacks = list(sums), self._unpack_stacks(state, t - 1)
        if self.rounds_per_epoch > 1 and (t - 1) % self.rounds_per_epoch == 0:
            parts[0] = np.zeros_like(parts[0])
        # The trees of r (if N > 1), G and Δ.  The first epoch has no part Δ, so that its tree is left out.
        trees = (self._residual_tree, self._epoch_tree, self._epoch_tree)[int(self.rounds_per_epoch == 1) :]
        results = [tree.step(stack, t, part) for tree, stack, part in zip(trees, stacks, parts, strict=False)]
        return np.stack([node for node, _ in results]), tuple(vector for _, stack in results for vector in stack)

    def _unpack_stacks(self, state: IntState, t: int) -> list[IntState]:
        """Split the state after round t into the stacks of the trees of r (if N > 1), G and Δ."""
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
