"""Noise of three trees, for momentum-tree-reduced and -aligned: groups of nodes, what they cost, one mechanism.

Source: Tran & Cutkosky, Momentum Aggregation for Private Non-convex ERM (NeurIPS 2022), Algorithm 2, with its
errata (docs/momentum.md).  Every increment is split at v_q, the query at the start of its epoch q:

    G_t = g_t(v_q),   Δ_t = g_t(v_q) - g_t(v_{q-1}),   r_t = g_t(w_t) - g_t(v_q)

and the sums of G are estimated as (1 - γ) (last epoch's estimate + sum of Δ) + γ (sum of G).  Differences are
smaller than gradients: that is where less noise is needed.  In a fixed order the exact part of all this adds up
to plain momentum, so that only the noise is computed from the three trees.

| group | nodes | one record moves an increment by |
|---|---|---|
| early | of G that end in the first two epochs | clip |
| late | of the other G | clip |
| difference | of Δ | `difference` |
| residual | of r | `residual` · (rounds since the epoch began), or `residual` if increments are clipped |

`AlignedDifferences` is a variant of Algorithm 2's noise with trees inside each epoch; ours, not the paper's.  The
paper composes the sums of the last N rounds from windows that slide over epoch boundaries.  Here the sums of
G and of Δ are prefixes of their own epoch, over the places p = 1 … N:

    Q_{q,p} = (1 - γ) (Q_{q-1,p} + prefix of Δ) + γ (prefix of G),   Q_{0,p} = prefix of G
    sum of G up to t = Q_{q,p} + Σ_{k<q} decay^{p + (q-1-k) N} Q_{k,N}

which one tree of N leaves serves: the node that ends at place p keeps a filtered noise from epoch to epoch.  A
record is in fewer nodes, the state is one ring of N vectors, and the noise is 15–23 % less.

On integers the parts r, G and Δ of a round go into three trees: r into one over the whole run, G and Δ into one
that restarts every epoch.  What the mechanism does with the nodes' values is B.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from fedpriv.core.errors import InputError
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
    """One value for every group of nodes."""

    early: Floats
    late: Floats
    difference: Floats
    residual: Floats


@dataclass(frozen=True)
class DifferenceTrees(Mechanism):
    """Noise of three trees; `std_*` are the groups' standard deviations relative to the fresh vectors.

    | field | meaning |
    |---|---|
    | `rounds_per_epoch` | N: rounds of an epoch |
    | `mixing` | γ |
    | `difference`, `residual` | see the table above, for zero-out and before the batch mean |
    | `movement` | the bound on ‖w_{t+1} - w_t‖ they rest on; None if they are clip norms |
    | `least` | the sensitivity charged is at least so many clips: noise sized by the paper, not by counting |

    Guarantee: for queries that move by at most `movement` a round, one record moves a node by no more than its
    group says, whatever was released before; its squares over `std_*`², summed over every released node that
    holds the record, are the square of the sensitivity (adaptive composition of Gaussian mechanisms).
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
        """For the record in each place, what it moves each group's nodes by, squared and summed; each (N,)."""
        raise NotImplementedError

    @property
    def stds(self) -> tuple[float, float, float, float]:
        return self.std_early, self.std_late, self.std_difference, self.std_residual

    @property
    def assumption(self) -> str | None:
        """The smoothness, where differences are bounded by how far queries move; None where they are clipped."""
        if self.movement is None:
            return None
        return (
            "The claim rests on the loss's smoothness and on gradients in exact arithmetic: differences of "
            "gradients are not clipped, they are bounded by how far queries move."
        )

    @property
    def fresh_std(self) -> float:
        """Of the r tree's node that ends at t; an epoch of one round has no r tree."""
        return self.std_residual if self.rounds_per_epoch > 1 else 0.0

    def certified(self, workload: Workload) -> Sensitivity:
        counted = self.charged_sensitivity(workload)
        return counted._replace(value=max(counted.value, self.least * float(np.max(workload.clips))))

    def charged_sensitivity(self, workload: Workload) -> Sensitivity:
        self.check_workload(workload)
        total = np.zeros(self.rounds_per_epoch)
        for squared_norms, std in zip(self.squared_norms(workload), self.stds, strict=True):
            if not 0.0 < std < math.inf and np.any(squared_norms):
                raise InputError(
                    f"{type(self).__name__}: a released group of nodes has no noise, or more than any number holds"
                )
            total += squared_norms / std**2 if std > 0.0 else 0.0
        value = math.sqrt(float(np.max(total)))
        why = "clipped differences" if self.movement is None else f"steps of at most {self.movement:g}"
        return Sensitivity(value, False, f"released nodes of three trees that hold the record; {why}")

    def check_workload(self, workload: Workload) -> None:
        """InputError for a workload that the trees would not factor, or numbers that bound nothing."""
        check_matches(workload, self.decay, None)
        if (
            not isinstance(workload.public_order, FixedOrder)
            or workload.public_order.rounds_per_epoch != self.rounds_per_epoch
        ):
            raise InputError(
                f"differences between epochs need one order of {self.rounds_per_epoch} batches in every epoch: "
                "with fresh permutations they are differences between records"
            )
        if not 0.0 < self.mixing < 1.0:
            raise InputError(f"mixing = {self.mixing}: γ lies strictly between 0 and 1")
        if not (math.isfinite(self.difference) and math.isfinite(self.residual)):
            raise InputError(
                "its privacy rests on a bound of the loss's smoothness, and none is known for this model; use "
                "momentum-tree-aligned with algorithm.difference_clip and algorithm.residual_clip"
            )
        if min(self.difference, self.residual) <= 0.0 or (self.movement is not None and self.movement <= 0.0):
            raise InputError("bounds on differences and on the movement must be above 0")

    def residual_squared_norms(self, workload: Workload) -> Floats:
        """Of the r tree, which spans the whole run: (N,)."""
        since_anchor = np.arange(workload.rounds) % self.rounds_per_epoch
        farthest = self.rounds_per_epoch if self.movement is not None else 1
        moved = self.residual * np.minimum(since_anchor, farthest).astype(np.float64)
        found = np.zeros(self.rounds_per_epoch)
        held = nodes.record_squared_norms(moved, self.rounds_per_epoch, self.decay)
        found[: len(held)] = held
        return found


Trees = TypeVar("Trees", bound=DifferenceTrees)


def calibrate_trees(trees: Trees, workload: Workload, shares: Literal["best", "equal"]) -> Trees:
    """Set the group standard deviations D_k √(W_k / λ_k), in multiples of the clip.

    `shares` says how the loss is split: "equal" over all groups that are released, or "best" for the least mean
    variance, λ_k ∝ √(A_k D_k² W_k) with A_k what the group adds to it at standard deviation 1.
    """
    trees.check_workload(workload)
    worst = np.array([float(np.max(squared_norms)) for squared_norms in trees.squared_norms(workload)])
    wanted = (worst > 0.0).astype(float)
    if shares == "best":
        added = [with_stds(trees, unit).mean_variance(workload) for unit in np.eye(4)]
        wanted = np.sqrt(np.array(added) * worst)
    clip = float(np.max(workload.clips))
    split = wanted / np.sum(wanted)
    with np.errstate(divide="ignore"):  # a share that underflowed to 0: refused with the workload
        return with_stds(trees, np.sqrt(np.divide(worst, split, out=np.zeros(4), where=worst > 0.0)) / clip)


def size_by_paper(trees: Trees, workload: Workload, sigma_mu: float) -> Trees:
    """Set the node standard deviations of Algorithm 2 (L put back): 2h σ √V_{≤2N}, …

    `sigma_mu` is σμ, the paper's noise multiplier times the GDP parameter that it is calibrated to give; its own
    count, ρ = 2/σ², is σμ = 2.

    InputError where its constants are too small (N < 6), where they need α ≥ 1/N, or if differences are clipped.
    """
    trees.check_workload(workload)
    if trees.movement is None:
        raise InputError('calibration = "paper" knows no clipped differences; use calibration = "exact"')
    if trees.decay > 1.0 - 1.0 / trees.rounds_per_epoch + 1e-12:
        raise InputError(f'calibration = "paper" needs alpha of at least 1/N = 1/{trees.rounds_per_epoch}')
    early, late = map(math.sqrt, paper_window_counts(workload.rounds, trees.rounds_per_epoch))
    difference = trees.difference / (2.0 * float(np.max(workload.clips))) * late
    sized = with_stds(trees, np.array([early, late, difference, difference]))
    return dataclasses.replace(sized, least=2.0 * sigma_mu)


def paper_window_counts(rounds: int, rounds_per_epoch: int) -> tuple[float, float]:
    """V_{≤2N} = 3 log2 N and V_{>2N} = 4 (T/N) log2 N of Algorithm 2.

    InputError for N < 6: the first is too small there, at N = 1 both are 0, no noise at all.
    """
    if rounds_per_epoch < 6:
        raise InputError(
            f"{rounds_per_epoch} rounds an epoch: the paper's constants of Algorithm 2 hold from 6 on; "
            'use calibration = "exact"'
        )
    return 3.0 * math.log2(rounds_per_epoch), 4.0 * rounds / rounds_per_epoch * math.log2(rounds_per_epoch)


def with_stds(trees: Trees, stds: Floats) -> Trees:
    early, late, difference, residual = map(float, stds)
    return dataclasses.replace(
        trees, std_early=early, std_late=late, std_difference=difference, std_residual=residual
    )


@dataclass(frozen=True)
class AlignedDifferences(DifferenceTrees):
    """Fresh vectors of a round: of the r tree (if N > 1), of G, and from the second epoch on of Δ."""

    name: ClassVar[str] = "aligned-differences"
    words: ClassVar[str] = f"{THREE_TREES_DESCRIPTION}, aligned with epochs"

    def squared_norms(self, workload: Workload) -> NodeGroups:
        early, late, changed = np.zeros((3, self.rounds_per_epoch))
        for start in range(0, workload.rounds, self.rounds_per_epoch):
            clips = workload.clips[start : start + self.rounds_per_epoch]
            held = nodes.column_squared_norms(len(clips), self.decay)
            if start == 0:
                early[: len(held)] += clips**2 * held
            else:
                late[: len(held)] += clips**2 * held
                changed[: len(held)] += self.difference**2 * held
        return NodeGroups(early, late, changed, self.residual_squared_norms(workload))

    def variance(self, workload: Workload) -> Floats:
        """By epochs: variances and covariance of the nodes' filtered noise n and of what earlier epochs left, c.

        The nodes of prefix p and those of the whole epoch overlap: there n and c are correlated.
        """
        self.check_workload(workload)
        rounds_per_epoch, decay, stay = self.rounds_per_epoch, self.decay, 1.0 - self.mixing
        within = nodes.row_squared_norms(rounds_per_epoch, decay)
        place = np.arange(1, rounds_per_epoch + 1)
        whole = {end for _, end in cover(1, rounds_per_epoch)}
        shared = [
            sum(decay ** (2 * p + rounds_per_epoch - 2 * end) for _, end in cover(1, p) if end in whole)
            for p in range(1, rounds_per_epoch + 1)
        ]
        epochs = -(-workload.rounds // rounds_per_epoch)
        filtered, left, both, rows = self.std_early**2, 0.0, 0.0, list[Floats]()
        for epoch in range(epochs):
            if epoch:
                left = decay ** (2 * rounds_per_epoch) * left + filtered + 2.0 * decay**rounds_per_epoch * both
                both = stay * (decay**rounds_per_epoch * both + filtered)
                filtered = stay**2 * (filtered + self.std_difference**2) + (self.mixing * self.std_late) ** 2
            carried = decay ** (2 * place) * within[-1] * left
            rows.append(filtered * within + carried + 2.0 * both * np.array(shared))
        total = np.concatenate(rows)[: workload.rounds]
        return total + self.std_residual**2 * nodes.row_squared_norms(workload.rounds, decay)

    def memory_vectors(self, workload: Workload) -> int:
        return max(sum(self._state_sizes(t)) for t in range(1, workload.rounds + 1))

    def draws(self, t: int) -> int:
        return 1 + int(self.rounds_per_epoch > 1) + int(t > self.rounds_per_epoch)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state: the r tree's stack, the filtered noise of the last N places, the epoch's stack.

        The bottom of the epoch's stack is what all earlier epochs left, decayed to the end of the last one.
        """
        stacked, ringed, _ = self._state_sizes(t - 1)
        stack, ring, within = state[:stacked], state[stacked : stacked + ringed], state[stacked + ringed :]
        vectors, residual = list(fresh), None
        if self.rounds_per_epoch > 1:
            residual, stack = BinaryTree(self.decay).noise(stack, t, self.std_residual * vectors.pop(0))
        if t <= self.rounds_per_epoch:
            own = self.std_early * vectors[0]
        else:
            changed = ring[0] + self.std_difference * vectors[1]
            own = (1.0 - self.mixing) * changed + self.mixing * (self.std_late * vectors[0])
        place = (t - 1) % self.rounds_per_epoch + 1
        length = place & -place
        kept = within[: len(within) - (length.bit_length() - 1)]
        noise = own.add(kept[-1], alpha=self.decay**length) if kept else own
        epoch = (noise,) if place == self.rounds_per_epoch else (*kept, noise)
        after = (*stack, *(*ring, own)[-self.rounds_per_epoch :], *epoch)
        return noise if residual is None else noise + residual, after

    def integer(self, workload: Workload) -> Factorization:
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
        """Vectors of each part of the state after round t."""
        return (
            t.bit_count() if self.rounds_per_epoch > 1 else 0,
            min(t, self.rounds_per_epoch),
            int(t >= self.rounds_per_epoch) + (t % self.rounds_per_epoch).bit_count(),
        )


@dataclass(frozen=True)
class DifferenceFactorization(Factorization):
    """Of increments whose parts are clipped apart: r, G and Δ, in the order of the fresh vectors."""

    has_parts: ClassVar[bool] = True

    trees: AlignedDifferences = dataclasses.field(kw_only=True)

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

    def noise_scales(self, t: int) -> tuple[float, ...]:
        return (
            *((self.std_residual,) if self.rounds_per_epoch > 1 else ()),
            *((self.std_early,) if t <= self.rounds_per_epoch else (self.std_late, self.std_difference)),
        )

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        """A record is in every epoch's trees once."""
        early = min(rounds, self.rounds_per_epoch)
        ((_, _, within),) = self._epoch_tree.noise_groups(rounds, 1)
        found = [NoiseGroup(early, self.std_early, within)]
        if rounds > early:
            found += [NoiseGroup(rounds - early, std, within) for std in (self.std_late, self.std_difference)]
        if self.rounds_per_epoch > 1:
            ((_, _, whole),) = self._residual_tree.noise_groups(rounds, participations)
            found.append(NoiseGroup(rounds, self.std_residual, whole))
        return tuple(found)

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        own = int(self.rounds_per_epoch > 1)
        whole = self._residual_tree.bound_integers([load[:1] for load in loads]) if own else IntegerBounds(0, 0)
        gradients = self._epoch_tree.bound_integers([load[own : own + 1] for load in loads])
        changes = self._epoch_tree.bound_integers([load[own + 1 :] or (0,) for load in loads])
        return IntegerBounds(*(max(bounds) for bounds in zip(whole, gradients, changes, strict=True)))

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the stacks of the three trees.

        Guarantee: r is taken as 0 in the first round of an epoch, where accounting charges nothing for it.
        """
        parts, stacks = list(sums), self._unpack_stacks(state, t - 1)
        if self.rounds_per_epoch > 1 and (t - 1) % self.rounds_per_epoch == 0:
            parts[0] = np.zeros_like(parts[0])
        trees = (self._residual_tree, self._epoch_tree, self._epoch_tree)[int(self.rounds_per_epoch == 1) :]
        stepped = [tree.step(stack, t, part) for tree, stack, part in zip(trees, stacks, parts, strict=False)]
        return np.stack([node for node, _ in stepped]), tuple(v for _, stack in stepped for v in stack)

    def _unpack_stacks(self, state: IntState, t: int) -> list[IntState]:
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
