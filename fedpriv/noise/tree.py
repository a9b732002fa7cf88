"""The binary tree mechanism with any decay, streamed with one fresh vector a round.

Sources: below; the recursion over prefixes and the restart every `period` rounds are those of
Tran & Cutkosky 2022 (Algorithm 1) and Kornowski, Liu & Talwar (Algorithm 1), with their indices repaired.

On integers (C s)_t is the node that ends at t, a binary counter of decayed node sums.  `PaperTree` adds more noise
than exact counting asks for: as much as a paper's theorem.

The binary tree over the rounds of one period: which nodes are released, and what they cost and add.

Only left children are ever used by prefix sums; exactly one of them ends at each t, the node
[t - lowbit(t) + 1, t].  Its value is Σ decay^(t-i) s_i over its rounds, so C[t, i] = decay^(t-i) there, and the
prefix [1, t] is composed of the node ending at t and the prefix [1, t - lowbit(t)] decayed by decay^lowbit(t).

Sources: Dwork, Naor, Pitassi & Rothblum 2010; Honaker 2015; with decay: Tran & Cutkosky 2022, Algorithm 1.

Sums over a sliding window of N rounds are composed of tree nodes too.  Node (level, end) is the interval [end -
2^level + 1, end].  `cover(a, b)` is COMPOSE of Tran & Cutkosky (NeurIPS 2022).  Of the nodes that a window can
hold some are never used: only those in the cover of some window are released, and only they cost anything.
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
from fedpriv.noise import sensitivity as participation
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
from fedpriv.participation.orders import MinSeparation

if TYPE_CHECKING:
    from torch import Tensor


def level_count(rounds: int) -> int:
    """Levels of the tree, ⌊log2 T⌋ + 1: also the number of nodes that hold round 1."""
    return rounds.bit_length()


def column_squared_norms(rounds: int, decay: float, max_length: int | None = None) -> Floats:
    """Squared norms of the columns of C: Σ decay^{2(z-i)} over released nodes [y, z] that hold round i; (T,).

    With decay = 1 this is the number of those nodes.  Nodes of more than `longest` rounds are left out.  Built by
    doubling: in a block of 2^(k+1) rounds the left half is a released node of its own, the right half is not.
    O(T).
    """
    pieces, inside = list[Floats](), np.zeros(1)
    decays = powers(decay**2, 1 << (level_count(rounds) - 1))
    for level in range(level_count(rounds)):
        length = 1 << level
        counted = inside + decays[:length][::-1] if max_length is None or length <= max_length else inside
        if rounds & length:
            pieces.append(counted)
        if rounds >> level > 1:
            inside = np.concatenate([counted, inside])
    return np.concatenate(pieces[::-1])


def tree_inner_products(rounds: int, block: int, decay: float) -> Callable[[NDArray[np.int64]], Floats]:
    """⟨C_i, C_j⟩ of some rounds, counted from 0, (n,) -> (n, n), for trees that restart every `block` rounds.

    The sum over released nodes [y, z] that hold both i and j of decay^(z-i) decay^(z-j).
    """

    def products(held: NDArray[np.int64]) -> Floats:
        start = held // block * block
        place, length = held - start, np.minimum(block, rounds - start)
        found = np.zeros((len(held), len(held)))
        for level in range(level_count(min(block, rounds))):
            node = place >> level
            released = (node % 2 == 0) & ((node + 1) << level <= length)
            until = ((node + 1) << level) - 1 - place
            weight = np.where(released, float(decay) ** until, 0.0)
            same = np.equal.outer(node, node) & np.equal.outer(start, start)
            found += np.where(same, np.outer(weight, weight), 0.0)
        return found

    return products


def row_squared_norms(rounds: int, decay: float) -> Floats:
    """Squared norms of the rows of B: the noise variance of every prefix at unit node variance; (T,).  O(T)."""
    squared_norms = np.zeros(1)
    decays = powers(decay**2, 1 << (level_count(rounds) - 1))
    while len(squared_norms) <= rounds:
        squared_norms = np.concatenate([squared_norms, squared_norms + decays[: len(squared_norms)]])
    return squared_norms[1 : rounds + 1]


def record_squared_norms(clips: Floats, rounds_per_epoch: int, decay: float) -> Floats:
    """Squared norms of the records of a fixed order, Σ_nodes (Σ_{its rounds in the node} clip_i decay^(z-i))².

    Shape (min(rounds_per_epoch, T),).  A node of at most `rounds_per_epoch` rounds holds a record once; the
    longer ones are summed level by level, in O(T log(T / rounds_per_epoch)), or O(T) for equal clips.
    """
    rounds = len(clips)
    rounds_per_epoch = min(rounds_per_epoch, rounds)
    once = clips**2 * column_squared_norms(rounds, decay, max_length=rounds_per_epoch)
    squared_norms = np.asarray(
        np.bincount(np.arange(rounds) % rounds_per_epoch, once, rounds_per_epoch), np.float64
    )
    equal = bool(np.all(clips == clips[0]))
    for length in (1 << level for level in range(rounds_per_epoch.bit_length(), level_count(rounds))):
        squared_norms += (
            clips[0] ** 2 * _equal_clip_squared_norms(rounds, length, rounds_per_epoch, decay)
            if equal
            else _level_squared_norms(clips, length, rounds_per_epoch, decay)
        )
    return squared_norms


def _level_squared_norms(clips: Floats, length: int, rounds_per_epoch: int, decay: float) -> Floats:
    """Each record's squared norm in the released nodes of `length` rounds, more than an epoch; (N,)."""
    nodes = np.arange(0, len(clips) // length, 2)
    held = nodes[:, None] * length + np.arange(length)  # (nodes, length): the rounds of each, from 0
    moved = clips[held] * powers(decay, length)[::-1]
    key = np.arange(len(nodes))[:, None] * rounds_per_epoch + held % rounds_per_epoch
    sums = np.bincount(key.ravel(), moved.ravel(), len(nodes) * rounds_per_epoch)
    return np.asarray(np.sum(sums.reshape(len(nodes), rounds_per_epoch) ** 2, axis=0))


def _equal_clip_squared_norms(rounds: int, length: int, rounds_per_epoch: int, decay: float) -> Floats:
    """`_level` for clips of 1: what a node sees of a record depends on their distance modulo an epoch alone."""
    distance = np.arange(
        rounds_per_epoch, dtype=np.float64
    )  # from a record's last round in the node to the node's end
    visits = (length - 1 - distance) // rounds_per_epoch + 1
    seen = (powers(decay, rounds_per_epoch) * geometric_sums(decay**rounds_per_epoch, visits)) ** 2
    ends = (np.arange(0, rounds // length, 2) + 1) * length - 1
    squared_norms = np.zeros(rounds_per_epoch)
    for end, count in zip(*np.unique(ends % rounds_per_epoch, return_counts=True), strict=True):
        squared_norms += count * np.roll(
            seen[::-1], end + 1
        )  # place p lies (end - p) mod rounds_per_epoch before the end
    return squared_norms


def separated_squared_norm(
    rounds: int, block: int, decay: float, max_participations: int, min_separation: int
) -> float:
    """An upper bound of a record's squared norm at clip 1 for any pattern of `max_participations` rounds
    `min_separation` apart.

    In a node of n rounds it weighs at most κ(n) = Σ_{j < min(max_participations, ⌈n / separation⌉)} decay^(j
    separation).  The
    nodes of one level are disjoint and each of its rounds weighs at most 1, so the squares of a level sum to at
    most κ(n) min(max_participations, κ(n) · nodes).  A new tree starts every `block` rounds.
    """
    full, rest = divmod(rounds, block)
    total = 0.0
    for level in range(level_count(block)):
        length = 1 << level
        visits = min(max_participations, -(-length // min_separation))
        weight = float(geometric_sums(decay**min_separation, np.array([float(visits)]))[0])
        nodes = full * ((block // length + 1) // 2) + (rest // length + 1) // 2
        total += weight * min(max_participations, weight * nodes)
    return total


Node = tuple[int, int]
"""Level and end."""

Ends = NDArray[np.int64]


def cover(first: int, last: int) -> Iterator[Node]:
    """The fewest nodes that make up rounds first … last, from left to right; none if first > last."""
    while first <= last:
        aligned = ((first - 1) & -(first - 1)).bit_length() - 1 if first > 1 else last.bit_length()
        level = min(aligned, (last - first + 1).bit_length() - 1)
        first += 1 << level
        yield level, first - 1


def used_ends(rounds: int, rounds_per_epoch: int, level: int, earliest: int = 1) -> Ends:
    """Where the nodes of `level` end that are in the cover of [max(1, u - N + 1), u] for some u = earliest … T.

    A node is in a cover if the window holds it, but not its parent.
    """
    length = 1 << level
    if length > rounds_per_epoch:
        return np.empty(0, np.int64)
    ends = np.arange(length, rounds + 1, length)
    starts = ends - length + 1
    left = (ends >> level) % 2 == 1
    latest = np.minimum(
        np.where(left, ends + length - 1, rounds), np.minimum(starts + rounds_per_epoch - 1, rounds)
    )
    soonest = np.maximum(np.where(left, ends, np.maximum(ends, starts - length + rounds_per_epoch)), earliest)
    return np.asarray(ends[soonest <= latest], np.int64)


def node_squared_norms(ends: Ends, level: int, rounds_per_epoch: int, decay: float, squares: Floats) -> Floats:
    """Σ over nodes of at most N rounds of squares[t] decay^{2(z-t)} for the record in each place; (N,).

    Such a node holds a record at most once.  `squares` are the squared norms of an increment in every round, (T,).
    """
    before_end = np.arange(1 << level)
    held = (ends[:, None] - 1 - before_end).ravel()  # rounds counted from 0
    decays = np.tile(powers(decay**2, 1 << level), len(ends))
    return np.asarray(np.bincount(held % rounds_per_epoch, squares[held] * decays, rounds_per_epoch), np.float64)


def window_variances(
    rounds: int, rounds_per_epoch: int, decay: float, early: float, late: float, earliest: int = 1
) -> Floats:
    """Σ std² decay^{2(u-z)} over the cover of [max(1, u - N + 1), u], for every u; 0 before `earliest`; (T,).

    Nodes that end by round 2N have standard deviation `early`, later ones `late`.
    """
    decays = powers(decay**2, rounds_per_epoch)
    return np.array(
        [
            sum(
                decays[u - z] * (early if z <= 2 * rounds_per_epoch else late) ** 2
                for _, z in cover(max(1, u - rounds_per_epoch + 1), u)
            )
            if u >= earliest
            else 0.0
            for u in range(1, rounds + 1)
        ]
    )


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
        if isinstance(workload.public_order, MinSeparation):
            found = self._certify_separated(workload, workload.public_order, columns.squared_norms)
            return tighten_sensitivity(found, columns.inner, workload)

        def within(clips: Floats, rounds_per_epoch: int) -> Floats:
            return record_squared_norms(clips, rounds_per_epoch, self.decay)

        squared_norms = participation.record_squared_norms(workload, columns.squared_norms, within)
        return Sensitivity(math.sqrt(float(np.max(squared_norms))), True, "released nodes that hold the record")

    def columns(self, workload: Workload) -> Columns:
        products = tree_inner_products(workload.rounds, workload.rounds_per_period, self.decay)
        return Columns(tile_periods(workload, lambda rounds: column_squared_norms(rounds, self.decay)), products)

    @property
    def fresh_std(self) -> float:
        """Of the node that ends at t, which every release has fresh."""
        return 1.0

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, self.decay, self.period)
        return tile_periods(workload, lambda rounds: row_squared_norms(rounds, self.decay))

    def memory_vectors(self, workload: Workload) -> int:
        return (workload.rounds_per_period + 1).bit_length() - 1

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

    def integer(self, workload: Workload) -> Factorization:
        decay = round_coefficient(self.decay)
        workload = replace(workload, decay=decay)
        strategy = IntegerTree(to_coefficient(decay), self.period)
        return Factorization(
            strategy, replace(self, decay=decay), workload, decay_rounding_factor(decay, workload)
        )

    def _certify_separated(self, workload: Workload, pattern: MinSeparation, columns: Floats) -> Sensitivity:
        if pattern.single_pass:
            worst = float(np.max(workload.clips**2 * columns))
            return Sensitivity(math.sqrt(worst), True, "one participation: its nodes")
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

    def charged_sensitivity(self, workload: Workload) -> Sensitivity:
        return super().certified(workload)


_MAX_LEVELS = 48


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

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        block = rounds if self.period is None else min(self.period, rounds)
        levels = block.bit_length() - 1
        return (
            NoiseGroup(
                rounds, 1.0, Fraction(0 if self.decay in (0, COEFFICIENT_ONE) else levels * participations)
            ),
        )

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        stack, largest = list[int](), 0
        for t, (load,) in enumerate(loads, start=1):
            if is_restart(t, self.period):
                stack = []
            node = load
            for level in range(_merge_count(self._round_in_period(t))):
                node += scale_bound(stack.pop(), self._decays[level])
            stack.append(node)
            largest = max(largest, node)
        return IntegerBounds(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the nodes of the set bits of t's place in its period, longest first."""
        kept = [] if is_restart(t, self.period) else list(state)
        node = sums
        for level in range(_merge_count(self._round_in_period(t))):
            left, decay = kept.pop(), self._decays[level]
            node = (left if decay == COEFFICIENT_ONE else scale_integers(left, decay)) + node
        return node, (*kept, node)

    def state_length(self, t: int) -> int:
        """Number of vectors in the state after round t ≥ 0."""
        return self._round_in_period(t).bit_count() if t else 0

    def _round_in_period(self, t: int) -> int:
        return t if self.period is None else (t - 1) % self.period + 1

    @cached_property
    def _decays(self) -> tuple[int, ...]:
        return repeated_squares(self.decay, _MAX_LEVELS)


def _merge_count(place: int) -> int:
    """Level of the node that ends at `place`: the number of left halves that it merges."""
    return (place & -place).bit_length() - 1


def decay_rounding_factor(decay: float, workload: Workload) -> Fraction:
    """1 + 2^-28 √T · participations, rounded up, where a tree's decays are rounded level by level.

    With L = ⌊log2 T⌋ levels every entry of C is off by at most L 2^-32, in at most L + 1 nodes a participation,
    and the sensitivity is at least the record's largest norm: L √(L+1) 2^-32 · participations would do.
    """
    if decay in (0.0, 1.0):
        return Fraction(1)
    return 1 + Fraction((math.isqrt(workload.rounds) + 1) * participations_per_record(workload), 2**28)
