"""Binary tree mechanism with any decay, in floating point and on integers.

s_i is the sum of the increments of round i, the clipped contributions of its records.  A node stands for an
interval of rounds [y, z] and has the value Σ decay^(z-i) s_i over these rounds.  Prefix sums need left halves
only, and only these nodes are released.  One ends at each t, the node [t - lowbit(t) + 1, t], where lowbit(t) is
the largest power of 2 that divides t.  So row t of C is C[t, i] = decay^(t-i) in the rounds of this node and 0
elsewhere.  The prefix [1, t] is the node plus the prefix [1, t - lowbit(t)] decayed by decay^lowbit(t), which
gives B.  Each round takes one fresh vector, the noise of its node, and a record is charged the distance by which
it moves C s.  With a period, a new tree starts every `period` rounds.

Sources of the tree: Dwork, Naor, Pitassi & Rothblum 2010; Honaker 2015; with decay: Tran & Cutkosky 2022,
Algorithm 1.  Sources of the recursion over prefixes and of the restart: Tran & Cutkosky 2022 (Algorithm 1) and
Kornowski, Liu & Talwar (Algorithm 1), with their indices repaired.

Sums over a sliding window of N rounds are composed of nodes, too, of left and right halves.  Node (level, end) is
the interval [end - 2^level + 1, end].  `cover(a, b)` is COMPOSE of Tran & Cutkosky (NeurIPS 2022).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.replicates import SHARED
from fedpriv.noise.integers.fixed_point import (
    COEFFICIENT_ONE,
    Ints,
    repeated_squares,
    round_coefficient,
    scale_bound,
    scale_integers,
    to_coefficient,
)
from fedpriv.noise.integers.strategies import (
    IntegerBounds,
    IntegerStrategy,
    IntState,
    LoadBounds,
    NoiseGroup,
    check_decay,
    participations_per_record,
)
from fedpriv.noise.mechanism import Columns, Factorization, Mechanism, MechanismState, Sensitivity, check_matches
from fedpriv.noise.sensitivity import tighten_sensitivity
from fedpriv.noise.series import Floats, Workload, geometric_sums, is_restart, powers, tile_periods
from fedpriv.participation.orders import FreshOrder, MinSeparation

if TYPE_CHECKING:
    from torch import Tensor


def level_count(rounds: int) -> int:
    """Number of levels of the tree, ⌊log2 T⌋ + 1.

    As many released nodes hold round 1.

    Example:
        >>> [level_count(rounds) for rounds in (1, 2, 7, 8)]
        [1, 2, 3, 4]
    """
    return rounds.bit_length()


def column_squared_norms(rounds: int, decay: float) -> Floats:
    """Compute the squared norms of the columns of C, (T,), in O(T).

    Column i has Σ decay^{2(z-i)} over the released nodes [y, z] that hold round i.

    Args:
        rounds: T.
        decay: Decay per round.
    """
    # T rounds are blocks of falling lengths, the powers of 2 in T, each the left half of a larger block.  Their
    # norms are built by doubling: of a block of 2^(level + 1) rounds the left half is a node, not the right one.
    blocks, right_half = list[Floats](), np.zeros(1)
    squared_decays = powers(decay**2, 1 << (level_count(rounds) - 1))
    for level in range(level_count(rounds)):
        length = 1 << level
        left_half = right_half + squared_decays[:length][::-1]
        if rounds & length:
            blocks.append(left_half)
        if rounds >> level > 1:
            right_half = np.concatenate([left_half, right_half])
    return np.concatenate(blocks[::-1])


def tree_inner_products(rounds: int, block: int, decay: float) -> Callable[[NDArray[np.int64]], Floats]:
    """Return a function that computes inner products of columns of C.

    ⟨C_i, C_j⟩ is the sum of decay^(z-i) decay^(z-j) over the released nodes [y, z] that hold both i and j.  No
    node reaches over a block.

    Args:
        rounds: T.
        block: Rounds after which a new tree starts.
        decay: Decay per round.

    Returns:
        Function of some rounds, counted from 0: (n,) -> (n, n).
    """

    def products(columns: NDArray[np.int64]) -> Floats:
        """Compute the inner products of some columns, (n,) -> (n, n), level by level."""
        block_starts = columns // block * block
        positions, block_lengths = columns - block_starts, np.minimum(block, rounds - block_starts)
        inner_products = np.zeros((len(columns), len(columns)))
        for level in range(level_count(min(block, rounds))):
            nodes = positions >> level  # (n,), number of the node of this level that holds each round
            # Released nodes are left halves, and end within their block.
            released = (nodes % 2 == 0) & ((nodes + 1) << level <= block_lengths)
            distances = ((nodes + 1) << level) - 1 - positions
            weights = np.where(released, float(decay) ** distances, 0.0)
            same_node = np.equal.outer(nodes, nodes) & np.equal.outer(block_starts, block_starts)
            inner_products += np.where(same_node, np.outer(weights, weights), 0.0)
        return inner_products

    return products


def row_squared_norms(rounds: int, decay: float) -> Floats:
    """Compute the squared norms of the rows of B, (T,), which are noise variances of the prefixes.

    Args:
        rounds: T.
        decay: Decay of the running sums.

    Example:
        >>> row_squared_norms(7, 1.0).tolist()
        [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0]
    """
    squared_norms = np.zeros(1)
    squared_decays = powers(decay**2, 1 << (level_count(rounds) - 1))
    while len(squared_norms) <= rounds:
        squared_norms = np.concatenate([squared_norms, squared_norms + squared_decays[: len(squared_norms)]])
    return squared_norms[1 : rounds + 1]


def record_squared_norms(clips: Floats, rounds_per_epoch: int, decay: float) -> Floats:
    """Compute `visited_squared_norms` of the positions of a fixed order, in one tree over all rounds.

    Args:
        clips: Clip norm of each round, (T,).
        rounds_per_epoch: Rounds between two participations of a record.
        decay: Decay per round.

    Returns:
        (min(rounds_per_epoch, T),).
    """
    return visited_squared_norms(clips, np.arange(len(clips)) % rounds_per_epoch, len(clips), decay)


def visited_squared_norms(
    clips: Floats, visits: NDArray[np.integer], block: int, decay: float, *, all_nodes: bool = False
) -> Floats:
    """Compute the squared norm of the records of each batch in any public order, (max(visits) + 1,).

    A record's squared norm, the squared distance by which it can move the released nodes, is Σ_nodes (Σ_i clip_i
    decay^(z-i))² over its rounds i in a node that ends at z.

    Args:
        clips: Clip norm of each round, (T,).
        visits: Batch that each round reads, from 0, (T,).  The records of a batch take part in the same rounds.
        block: Rounds after which a new tree starts.
        decay: Decay per round.
        all_nodes: Whether right halves are counted, too, as the paper's constants do, although none is released.

    Example:
        >>> visited_squared_norms(np.ones(4), np.array([0, 1, 1, 0]), 4, 1.0).tolist()
        [6.0, 6.0]
    """
    rounds = np.argsort(visits, kind="stable")  # the rounds of a record lie side by side, in order
    records, sorted_clips = visits[rounds].astype(np.int64), clips[rounds]
    block_starts = rounds // block * block
    positions, block_lengths = rounds - block_starts, np.minimum(block, len(visits) - block_starts)
    squared_norms, powers = np.zeros(int(np.max(visits)) + 1), float(decay) ** np.arange(min(block, len(visits)))
    for level in range(level_count(min(block, len(visits)))):
        nodes = positions >> level
        ends = (nodes + 1) << level
        is_counted = (all_nodes | (nodes % 2 == 0)) & (ends <= block_lengths)
        displacements = sorted_clips[is_counted] * powers[(ends - 1 - positions)[is_counted]]
        node_keys = (records * len(visits) + block_starts + nodes)[is_counted]  # never decreasing
        # The entries of one record in one node lie side by side, and add up to its weight in the node.
        starts = np.flatnonzero(np.diff(node_keys, prepend=-1))
        weights = np.add.reduceat(displacements, starts)
        squared_norms += np.bincount(records[is_counted][starts], weights**2, len(squared_norms))
    return squared_norms


def separated_squared_norm(
    rounds: int, block: int, decay: float, max_participations: int, min_separation: int
) -> float:
    """Bound a record's squared norm at clip 1 over all patterns of separated participations.

    A record moves a node of n rounds by at most κ(n) = Σ_{j < min(max_participations, ⌈n / min_separation⌉)}
    decay^(j min_separation), and all nodes of a level by at most max_participations together.  So the squares of a
    level sum to at most κ(n) min(max_participations, κ(n) · nodes), where `nodes` is the number of the level's
    released nodes.

    Args:
        rounds: T.
        block: Rounds after which a new tree starts.
        decay: Decay per round.
        max_participations: Most rounds in which the record takes part.
        min_separation: Least distance of two such rounds.
    """
    full_blocks, last_block = divmod(rounds, block)
    total = 0.0
    for level in range(level_count(block)):
        length = 1 << level
        visit_count = min(max_participations, -(-length // min_separation))
        weight = float(geometric_sums(decay**min_separation, np.array([float(visit_count)]))[0])
        # Every other node of a level is a left half, the first one included.
        node_count = full_blocks * ((block // length + 1) // 2) + (last_block // length + 1) // 2
        total += weight * min(max_participations, weight * node_count)
    return total


Node = tuple[int, int]
"""Level and last round of a node."""

Ends = NDArray[np.int64]
"""Last rounds of nodes of one level, (n,)."""


def cover(first: int, last: int) -> Iterator[Node]:
    """Yield the fewest nodes that make up rounds first … last, from left to right.

    Args:
        first: First round, from 1.
        last: Last round.

    Example:
        >>> list(cover(1, 7))
        [(2, 4), (1, 6), (0, 7)]
    """
    while first <= last:
        aligned = ((first - 1) & -(first - 1)).bit_length() - 1 if first > 1 else last.bit_length()
        level = min(aligned, (last - first + 1).bit_length() - 1)
        first += 1 << level
        yield level, first - 1


def used_ends(rounds: int, rounds_per_epoch: int, level: int, earliest: int = 1) -> Ends:
    """Return the ends of a level's nodes that some window's cover uses, (n,).

    The windows are [max(1, u - N + 1), u] for u = earliest … T.  A node is in the cover of a window if the window
    contains the node, but not its parent, the node of twice its length that holds it.

    Args:
        rounds: T.
        rounds_per_epoch: N, rounds of a window.
        level: Level of the nodes, which have 2^level rounds.
        earliest: Last round u of the first window.
    """
    length = 1 << level
    if length > rounds_per_epoch:
        return np.empty(0, np.int64)
    ends = np.arange(length, rounds + 1, length)
    starts = ends - length + 1
    # The last rounds u of these windows are consecutive.  Windows contain the node if u is from its end to N - 1
    # rounds after its start.  The parent of a left child ends 2^level rounds after it, and that of a right child
    # begins as much before it.  So u comes before the end of the left child's parent, or the window begins after
    # the start of the right child's.
    is_left_child = (ends >> level) % 2 == 1
    last_windows = np.minimum(
        np.where(is_left_child, ends + length - 1, rounds), np.minimum(starts + rounds_per_epoch - 1, rounds)
    )
    first_windows = np.maximum(
        np.where(is_left_child, ends, np.maximum(ends, starts - length + rounds_per_epoch)), earliest
    )
    return np.asarray(ends[first_windows <= last_windows], np.int64)


def node_squared_norms(ends: Ends, level: int, rounds_per_epoch: int, decay: float, squares: Floats) -> Floats:
    """Sum squares[t] decay^{2(z-t)} over the rounds t of a level's nodes, for each position, (N,).

    Args:
        ends: Last round z of each node.
        level: Level of the nodes, which have at most N rounds.
        rounds_per_epoch: N.
        decay: Decay per round.
        squares: Squared norm of an increment in each round, (T,).
    """
    distances = np.arange(1 << level)
    rounds_of_nodes = (ends[:, None] - 1 - distances).ravel()  # counted from 0
    squared_decays = np.tile(powers(decay**2, 1 << level), len(ends))
    return np.asarray(
        np.bincount(
            rounds_of_nodes % rounds_per_epoch, squares[rounds_of_nodes] * squared_decays, rounds_per_epoch
        ),
        np.float64,
    )


def window_variances(
    rounds: int, rounds_per_epoch: int, decay: float, early: float, late: float, earliest: int = 1
) -> Floats:
    """Compute the noise variance of the sum over every window, (T,).

    For the window [max(1, u - N + 1), u] the variance is Σ std² decay^{2(u-z)} over the nodes of its cover, which
    end at z.

    Args:
        rounds: T.
        rounds_per_epoch: N, rounds of a window.
        decay: Decay per round.
        early: Standard deviation of nodes that end by round 2N.
        late: Standard deviation of later nodes.
        earliest: First u with a window.  The variances before are 0.
    """
    squared_decays = powers(decay**2, rounds_per_epoch)
    return np.array(
        [
            sum(
                squared_decays[u - z] * (early if z <= 2 * rounds_per_epoch else late) ** 2
                for _, z in cover(max(1, u - rounds_per_epoch + 1), u)
            )
            if u >= earliest
            else 0.0
            for u in range(1, rounds + 1)
        ]
    )


@dataclass(frozen=True)
class BinaryTree(Mechanism):
    """Noise on tree nodes: the fresh vector of round t belongs to the released node that ends at t.

    Guarantee: a record moves no released nodes but those that hold one of its rounds.  B is square and invertible,
    so counting those nodes with their decays is the exact price of all releases together, for a record whose
    rounds are known.

    Example:
        >>> from fedpriv.participation.orders import FixedOrder
        >>> workload = Workload(FixedOrder(rounds=8, rounds_per_epoch=8), decay=1.0, clips=np.ones(8))
        >>> tree = BinaryTree.of(workload, options=None)
        >>> tree.certified(workload).value, tree.variance(workload).tolist()
        (2.0, [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 1.0])
    """

    name: ClassVar[str] = "tree"
    words: ClassVar[str] = "Gaussian noise on the nodes of a binary tree over the rounds"

    decay: float = field(default=1.0, metadata=SHARED)
    """Decay of the running sums per round."""
    period: int | None = None
    """Rounds after which a new tree starts, or None for one tree."""

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        return cls(workload.decay, workload.period)

    def certified(self, workload: Workload) -> Sensitivity:
        """Compute the sensitivity by counting the released nodes that hold a record, with their decays.

        In separated participations in which a record takes part several times the count is an upper bound, which a
        search may improve.

        Raises:
            InputError: The tree does not factor the workload, or participation is secret.
        """
        check_matches(workload, self.decay, self.period)
        if isinstance(workload.schedule, FreshOrder):
            visits = workload.schedule.visits
        elif isinstance(order := workload.public_order, MinSeparation):
            columns = self.columns(workload)
            bound = self._certify_separated(workload, order, columns.squared_norms)
            return tighten_sensitivity(bound, columns.inner, workload)
        else:  # a fixed order, or phases, in which a record is read once
            rounds_per_visit = workload.rounds if order.single_pass else order.rounds_per_epoch
            visits = np.arange(workload.rounds, dtype=np.int32) % rounds_per_visit
        squared_norms = visited_squared_norms(workload.clips, visits, workload.rounds_per_period, self.decay)
        return Sensitivity(math.sqrt(float(np.max(squared_norms))), True, "released nodes that hold the record")

    def columns(self, workload: Workload) -> Columns:
        products = tree_inner_products(workload.rounds, workload.rounds_per_period, self.decay)
        return Columns(tile_periods(workload, lambda rounds: column_squared_norms(rounds, self.decay)), products)

    @property
    def fresh_std(self) -> float:
        """Standard deviation of the node that ends at t."""
        return 1.0

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, self.decay, self.period)
        return tile_periods(workload, lambda rounds: row_squared_norms(rounds, self.decay))

    def memory_vectors(self, workload: Workload) -> int:
        return (workload.rounds_per_period + 1).bit_length() - 1

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Return the noise of round t and the next state.

        The noise of the prefix [1, t] is the fresh vector, the noise of the node that ends at t, plus
        decay^lowbit(t) times the noise of the prefix [1, t - lowbit(t)].  The state holds the noise of the prefix
        [1, t] and of the shorter ones that this recursion leads to, shortest first (those that end at 4, 6 and 7
        after round 7).  With a period, t here is the position in the period.

        Args:
            state: State before round t.
            t: Round, from 1.
            fresh: Fresh vector z_t.
        """
        position = t if self.period is None else (t - 1) % self.period + 1
        if position == 1:
            return fresh, (fresh,)
        length = position & -position
        # Later rounds do not need the prefixes that end inside this node.
        left_nodes = state[: len(state) - (length.bit_length() - 1)]
        if not left_nodes:
            return fresh, (fresh,)
        noise = fresh.add(left_nodes[-1], alpha=self.decay**length)
        return noise, (*left_nodes, noise)

    def integer(self, workload: Workload) -> Factorization:
        decay = round_coefficient(self.decay)
        workload = replace(workload, decay=decay)
        strategy = IntegerTree(to_coefficient(decay), self.period)
        return Factorization(
            strategy, replace(self, decay=decay), workload, decay_rounding_factor(decay, workload)
        )

    def _certify_separated(self, workload: Workload, pattern: MinSeparation, squared_norms: Floats) -> Sensitivity:
        """Compute the sensitivity of separated participations by counting released nodes.

        The result is exact for one participation, the largest product of a column norm and its clip, and otherwise
        a bound that takes every clip for the largest (`separated_squared_norm`).

        Args:
            workload: Workload of the run.
            pattern: Its allowed patterns.
            squared_norms: Squared norms of the columns of C, (T,).
        """
        if pattern.single_pass:
            squared_norm_max = float(np.max(workload.clips**2 * squared_norms))
            return Sensitivity(math.sqrt(squared_norm_max), True, "one participation: its nodes")
        squared_norm = separated_squared_norm(
            workload.rounds,
            workload.rounds_per_period,
            self.decay,
            pattern.max_rounds_per_record,
            pattern.min_separation,
        )
        bound = float(np.max(workload.clips)) * math.sqrt(squared_norm)
        return Sensitivity(bound, False, "counted level by level, as if every clip were the largest")


@dataclass(frozen=True)
class PaperTree(BinaryTree):
    """Binary tree whose sensitivity is charged as at least `least` times the largest clip."""

    name: ClassVar[str] = "paper-tree"
    words: ClassVar[str] = (
        "Gaussian noise on the nodes of a binary tree over the rounds, sized by the paper's constants"
    )

    least: float = 0.0

    def certified(self, workload: Workload) -> Sensitivity:
        exact = super().certified(workload)
        if (paper_value := self.least * float(np.max(workload.clips))) <= exact.value:
            return exact
        return Sensitivity(paper_value, False, "the paper's count of nodes")

    def attained_sensitivity(self, workload: Workload) -> Sensitivity:
        return super().certified(workload)


_MAX_LEVELS = 48
"""Number of decay powers that are computed, decay^(2^l) for the levels l = 0, 1, …, 47."""


@dataclass(frozen=True)
class IntegerTree(IntegerStrategy):
    """C of `BinaryTree` on integers, a binary counter of decayed node sums.

    A node is its left half, decayed over the rounds of the right half, plus the right half.  The decay over 2^l
    rounds is decay^(2^l), rounded to a multiple of 2^-31.  A left half is rounded when it is merged.  Rounding
    differs between neighbours only where the left half holds one of the record's rounds: at most once a level and
    participation.
    """

    decay: int
    """Decay in multiples of 2^-31."""
    period: int | None = None
    """Rounds after which a new tree starts, or None for one tree."""

    def __post_init__(self) -> None:
        check_decay(self.decay)

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        period_length = rounds if self.period is None else min(self.period, rounds)
        levels = period_length.bit_length() - 1
        return (
            NoiseGroup(
                rounds, 1.0, Fraction(0 if self.decay in (0, COEFFICIENT_ONE) else levels * participations)
            ),
        )

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        """Bound the integers of a run by merging the bounds of nodes, as `step` merges nodes, rounded up.

        Args:
            loads: Largest absolute value of a coordinate of s_t for each round, as a tuple of one.

        Returns:
            The largest bound of a node, as the bound of outputs and of all integers on the way.
        """
        node_bounds, max_bound = list[int](), 0
        for t, (increment_bound,) in enumerate(loads, start=1):
            if is_restart(t, self.period):
                node_bounds = []
            bound = increment_bound
            for level in range(_merge_count(self._round_in_period(t))):
                bound += scale_bound(node_bounds.pop(), self._decays[level])
            node_bounds.append(bound)
            max_bound = max(max_bound, bound)
        # No integer on the way has a larger bound than the node that it ends in.
        return IntegerBounds(max_bound, max_bound)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """Return the node that ends at t and the next state, vectors of integers shaped like `sums`.

        The node begins as s_t.  Like the carry of a binary counter, it takes over the stack's last nodes, its left
        halves: node = ⌊decay^(2^l) · left half⌉ + node, for the levels l = 0, 1, … below its own.

        Args:
            state: State before round t, empty before round 1.
            t: Round, from 1.
            sums: Sums s_t of increments, int64, of any shape.
        """
        stack = [] if is_restart(t, self.period) else list(state)
        node = sums
        for level in range(_merge_count(self._round_in_period(t))):
            left_half, decay = stack.pop(), self._decays[level]
            node = (left_half if decay == COEFFICIENT_ONE else scale_integers(left_half, decay)) + node
        return node, (*stack, node)

    def state_length(self, t: int) -> int:
        """Number of vectors in the state after round t ≥ 0."""
        return self._round_in_period(t).bit_count() if t else 0

    def _round_in_period(self, t: int) -> int:
        return t if self.period is None else (t - 1) % self.period + 1

    @cached_property
    def _decays(self) -> tuple[int, ...]:
        return repeated_squares(self.decay, _MAX_LEVELS)


def _merge_count(position: int) -> int:
    """Number of left halves that the node at the end of round `position` merges, which is its level."""
    return (position & -position).bit_length() - 1


def decay_rounding_factor(decay: float, workload: Workload) -> Fraction:
    """Factor of the sensitivity that covers the rounding of a tree's decays, level by level.

    The factor is 1 + 2^-28 (⌊√T⌋ + 1) · participations, or 1 for decays of 0 and 1, which are exact.  With L =
    ⌊log2 T⌋ every entry of C is off by at most L 2^-32, in at most L + 1 nodes a participation.  A record can move
    the nodes of a tree by its largest clip at least, so that 1 + L √(L+1) 2^-32 · participations would suffice for
    each tree.

    Args:
        decay: Decay per round, a multiple of 2^-31.
        workload: Workload with its rounds and participations.
    """
    if decay in (0.0, 1.0):
        return Fraction(1)
    return 1 + Fraction((math.isqrt(workload.rounds) + 1) * participations_per_record(workload), 2**28)
