"""The binary tree over the rounds of one period: which nodes are released, and what they cost and add.

Only left children are ever used by prefix sums; exactly one of them ends at each t, the node
[t - lowbit(t) + 1, t].  Its value is Σ keep^(t-i) s_i over its rounds, so C[t, i] = keep^(t-i) there, and the
prefix [1, t] is composed of the node ending at t and the prefix [1, t - lowbit(t)] decayed by keep^lowbit(t).

Sources: Dwork, Naor, Pitassi & Rothblum 2010; Honaker 2015; with decay: Tran & Cutkosky 2022, Algorithm 1.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedpriv.mechanisms.workload import Floats, geometric_sums, powers

Energies = Callable[[int, float], Floats]
"""Squared norms for a period of so many rounds under a decay."""


def levels(rounds: int) -> int:
    """Levels of the tree, ⌊log2 T⌋ + 1: also the number of nodes that hold round 1."""
    return rounds.bit_length()


def column_energies(rounds: int, keep: float, longest: int | None = None) -> Floats:
    """Squared norms of the columns of C: Σ keep^{2(z-i)} over released nodes [y, z] that hold round i; (T,).

    With keep = 1 this is the number of those nodes.  Nodes of more than `longest` rounds are left out.  Built by
    doubling: in a block of 2^(k+1) rounds the left half is a released node of its own, the right half is not.
    O(T).
    """
    pieces = []
    inside = np.zeros(1)
    decays = powers(keep**2, 1 << (levels(rounds) - 1))
    for level in range(levels(rounds)):
        length = 1 << level
        counted = inside + decays[:length][::-1] if longest is None or length <= longest else inside
        if rounds & length:
            pieces.append(counted)
        if rounds >> level > 1:
            inside = np.concatenate([counted, inside])
    return np.concatenate(pieces[::-1])


def inner(rounds: int, block: int, keep: float) -> Callable[[NDArray[np.int64]], Floats]:
    """⟨C_i, C_j⟩ of some rounds, counted from 0, (n,) -> (n, n), for trees that restart every `block` rounds.

    The sum over released nodes [y, z] that hold both i and j of keep^(z-i) keep^(z-j).
    """

    def products(held: NDArray[np.int64]) -> Floats:
        start = held // block * block
        place, length = held - start, np.minimum(block, rounds - start)
        found = np.zeros((len(held), len(held)))
        for level in range(levels(min(block, rounds))):
            node = place >> level
            released = (node % 2 == 0) & ((node + 1) << level <= length)
            until = ((node + 1) << level) - 1 - place
            weight = np.where(released, float(keep) ** until, 0.0)
            same = np.equal.outer(node, node) & np.equal.outer(start, start)
            found += np.where(same, np.outer(weight, weight), 0.0)
        return found

    return products


def row_energies(rounds: int, keep: float) -> Floats:
    """Squared norms of the rows of B: the noise variance of every prefix at unit node variance; (T,).  O(T)."""
    energies = np.zeros(1)
    decays = powers(keep**2, 1 << (levels(rounds) - 1))
    while len(energies) <= rounds:
        energies = np.concatenate([energies, energies + decays[: len(energies)]])
    return energies[1 : rounds + 1]


def record_energies(clips: Floats, places: int, keep: float) -> Floats:
    """Energies of the records of a fixed order, Σ_nodes (Σ_{its rounds in the node} clip_i keep^(z-i))².

    Shape (min(places, T),).  A node of at most `places` rounds holds a record once; the longer ones are summed
    level by level, in O(T log(T / places)), or O(T) for equal clips.
    """
    rounds = len(clips)
    places = min(places, rounds)
    once = clips**2 * column_energies(rounds, keep, longest=places)
    energies = np.asarray(np.bincount(np.arange(rounds) % places, once, places), np.float64)
    equal = bool(np.all(clips == clips[0]))
    for level in range(places.bit_length(), levels(rounds)):
        if equal:
            energies += clips[0] ** 2 * _equal_level(rounds, 1 << level, places, keep)
        else:
            energies += _level(clips, 1 << level, places, keep)
    return energies


def _level(clips: Floats, length: int, places: int, keep: float) -> Floats:
    """What the released nodes of `length` > `places` rounds add to each record's energy; (places,)."""
    nodes = np.arange(0, len(clips) // length, 2)
    held = nodes[:, None] * length + np.arange(length)  # (nodes, length): the rounds of each, from 0
    moved = clips[held] * powers(keep, length)[::-1]
    key = np.arange(len(nodes))[:, None] * places + held % places
    sums = np.bincount(key.ravel(), moved.ravel(), len(nodes) * places)
    return np.asarray(np.sum(sums.reshape(len(nodes), places) ** 2, axis=0))


def _equal_level(rounds: int, length: int, places: int, keep: float) -> Floats:
    """`_level` for clips of 1: what a node sees of a record depends on their distance modulo `places` alone."""
    distance = np.arange(places, dtype=np.float64)  # from a record's last round in the node to the node's end
    visits = (length - 1 - distance) // places + 1
    seen = (powers(keep, places) * geometric_sums(keep**places, visits)) ** 2
    ends = (np.arange(0, rounds // length, 2) + 1) * length - 1
    energies = np.zeros(places)
    for end, count in zip(*np.unique(ends % places, return_counts=True), strict=True):
        energies += count * np.roll(seen[::-1], end + 1)  # place p lies (end - p) mod places before the end
    return energies


def record_counts(rounds: int, places: int) -> Floats:
    """How many released nodes hold a record of a fixed order, for the record in each place; shape (places,)."""
    start = np.arange(1, rounds + 1)
    counts = np.zeros(min(places, rounds))
    for level in range(levels(rounds)):
        node = (start - 1) >> level
        released = (node % 2 == 0) & ((node + 1) << level <= rounds)
        first = start[released & _first_visit(node, places)]
        counts += np.bincount((first - 1) % places, minlength=len(counts))
    return counts


def separated_energy(rounds: int, block: int, keep: float, times: int, separation: int) -> float:
    """An upper bound of a record's energy at clip 1 for any pattern of `times` rounds `separation` apart.

    In a node of n rounds it weighs at most κ(n) = Σ_{j < min(times, ⌈n / separation⌉)} keep^(j separation).  The
    nodes of one level are disjoint and each of its rounds weighs at most 1, so the squares of a level sum to at
    most κ(n) min(times, κ(n) · nodes).  A new tree starts every `block` rounds.
    """
    full, rest = divmod(rounds, block)
    total = 0.0
    for level in range(levels(block)):
        length = 1 << level
        visits = min(times, -(-length // separation))
        weight = float(geometric_sums(keep**separation, np.array([float(visits)]))[0])
        nodes = full * ((block // length + 1) // 2) + (rest // length + 1) // 2
        total += weight * min(times, weight * nodes)
    return total


def _first_visit(node: NDArray[np.int64], places: int) -> NDArray[np.bool_]:
    """Whether a record's previous round, `places` before, lies in another node; shape (T,)."""
    previous = np.full(len(node), -1)
    previous[places:] = node[: max(0, len(node) - places)]
    return np.asarray(previous != node)
