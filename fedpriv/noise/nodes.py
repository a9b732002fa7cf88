"""The binary tree over the rounds of one period: which nodes are released, and what they cost and add.

Only left children are ever used by prefix sums; exactly one of them ends at each t, the node
[t - lowbit(t) + 1, t].  Its value is Σ decay^(t-i) s_i over its rounds, so C[t, i] = decay^(t-i) there, and the
prefix [1, t] is composed of the node ending at t and the prefix [1, t - lowbit(t)] decayed by decay^lowbit(t).

Sources: Dwork, Naor, Pitassi & Rothblum 2010; Honaker 2015; with decay: Tran & Cutkosky 2022, Algorithm 1.

Sums over a sliding window of N rounds are composed of tree nodes too.  Node (level, end) is the interval [end -
2^level + 1, end].  `cover(a, b)` is COMPOSE of Tran & Cutkosky (NeurIPS 2022).  Of the nodes that a window can
hold some are never used: only those in the cover of some window are released, and only they cost anything.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fedpriv.noise.workload import Floats, geometric_sums, powers


def levels(rounds: int) -> int:
    """Levels of the tree, ⌊log2 T⌋ + 1: also the number of nodes that hold round 1."""
    return rounds.bit_length()


def column_squared_norms(rounds: int, decay: float, longest: int | None = None) -> Floats:
    """Squared norms of the columns of C: Σ decay^{2(z-i)} over released nodes [y, z] that hold round i; (T,).

    With decay = 1 this is the number of those nodes.  Nodes of more than `longest` rounds are left out.  Built by
    doubling: in a block of 2^(k+1) rounds the left half is a released node of its own, the right half is not.
    O(T).
    """
    pieces = []
    inside = np.zeros(1)
    decays = powers(decay**2, 1 << (levels(rounds) - 1))
    for level in range(levels(rounds)):
        length = 1 << level
        counted = inside + decays[:length][::-1] if longest is None or length <= longest else inside
        if rounds & length:
            pieces.append(counted)
        if rounds >> level > 1:
            inside = np.concatenate([counted, inside])
    return np.concatenate(pieces[::-1])


def inner(rounds: int, block: int, decay: float) -> Callable[[NDArray[np.int64]], Floats]:
    """⟨C_i, C_j⟩ of some rounds, counted from 0, (n,) -> (n, n), for trees that restart every `block` rounds.

    The sum over released nodes [y, z] that hold both i and j of decay^(z-i) decay^(z-j).
    """

    def products(held: NDArray[np.int64]) -> Floats:
        start = held // block * block
        place, length = held - start, np.minimum(block, rounds - start)
        found = np.zeros((len(held), len(held)))
        for level in range(levels(min(block, rounds))):
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
    decays = powers(decay**2, 1 << (levels(rounds) - 1))
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
    once = clips**2 * column_squared_norms(rounds, decay, longest=rounds_per_epoch)
    squared_norms = np.asarray(
        np.bincount(np.arange(rounds) % rounds_per_epoch, once, rounds_per_epoch), np.float64
    )
    equal = bool(np.all(clips == clips[0]))
    for level in range(rounds_per_epoch.bit_length(), levels(rounds)):
        if equal:
            squared_norms += clips[0] ** 2 * _equal_level(rounds, 1 << level, rounds_per_epoch, decay)
        else:
            squared_norms += _level(clips, 1 << level, rounds_per_epoch, decay)
    return squared_norms


def _level(clips: Floats, length: int, rounds_per_epoch: int, decay: float) -> Floats:
    """Each record's squared norm in the released nodes of `length` rounds, more than an epoch; (N,)."""
    nodes = np.arange(0, len(clips) // length, 2)
    held = nodes[:, None] * length + np.arange(length)  # (nodes, length): the rounds of each, from 0
    moved = clips[held] * powers(decay, length)[::-1]
    key = np.arange(len(nodes))[:, None] * rounds_per_epoch + held % rounds_per_epoch
    sums = np.bincount(key.ravel(), moved.ravel(), len(nodes) * rounds_per_epoch)
    return np.asarray(np.sum(sums.reshape(len(nodes), rounds_per_epoch) ** 2, axis=0))


def _equal_level(rounds: int, length: int, rounds_per_epoch: int, decay: float) -> Floats:
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
    for level in range(levels(block)):
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


def visits(ends: Ends, level: int, rounds_per_epoch: int, decay: float, squares: Floats) -> Floats:
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
