"""The binary tree over the rounds of one period: which nodes are released, and what they cost and add.

Only left children are ever used by prefix sums; exactly one of them ends at each t, the node
[t - lowbit(t) + 1, t].  Its value is Σ keep^(t-i) s_i over its rounds, so C[t, i] = keep^(t-i) there, and the
prefix [1, t] is composed of the node ending at t and the prefix [1, t - lowbit(t)] decayed by keep^lowbit(t).

Sources: Dwork, Naor, Pitassi & Rothblum 2010; Honaker 2015; with decay: Tran & Cutkosky 2022, Algorithm 1.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedpriv.mechanisms.workload import Floats

Energies = Callable[[int, float], Floats]
"""Squared norms for a period of so many rounds under a decay."""


def levels(rounds: int) -> int:
    """Levels of the tree, ⌊log2 T⌋ + 1: also the number of nodes that hold round 1."""
    return rounds.bit_length()


def column_energies(rounds: int, keep: float) -> Floats:
    """Squared norms of the columns of C: Σ keep^{2(z-i)} over released nodes [y, z] that hold round i; (T,).

    With keep = 1 this is the number of those nodes.  Built by doubling: in a block of 2^(k+1) rounds the left
    half is a released node of its own, the right half is not.  O(T).
    """
    pieces = []
    inside = np.zeros(1)
    decays = _powers(keep**2, 1 << (levels(rounds) - 1))
    for level in range(levels(rounds)):
        node = decays[: 1 << level][::-1]
        if rounds >> level & 1:
            pieces.append(inside + node)
        if rounds >> level > 1:
            inside = np.concatenate([inside + node, inside])
    return np.concatenate(pieces[::-1])


def row_energies(rounds: int, keep: float) -> Floats:
    """Squared norms of the rows of B: the noise variance of every prefix at unit node variance; (T,).  O(T)."""
    energies = np.zeros(1)
    decays = _powers(keep**2, 1 << (levels(rounds) - 1))
    while len(energies) <= rounds:
        energies = np.concatenate([energies, energies + decays[: len(energies)]])
    return energies[1 : rounds + 1]


def record_energies(clips: Floats, places: int, keep: float) -> Floats:
    """Energies of the records of a fixed order, Σ_nodes (Σ_{its rounds in the node} clip_i keep^(z-i))².

    Shape (min(places, T),).  O(T log T).
    """
    rounds = len(clips)
    count = min(places, rounds)
    energies = np.zeros(count)
    for level in range(levels(rounds)):
        length = 1 << level
        nodes = np.arange(0, rounds // length, 2)
        held = nodes[:, None] * length + np.arange(length)  # (nodes, length): the rounds of each, from 0
        moved = clips[held] * _powers(keep, length)[::-1]
        if length > places:
            key = np.arange(len(nodes))[:, None] * places + held % places
            moved = np.bincount(key.ravel(), moved.ravel(), len(nodes) * places).reshape(len(nodes), places)
            held = np.broadcast_to(np.arange(places), moved.shape)
        energies += np.bincount((held % places).ravel(), (moved**2).ravel(), count)
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


def separated_energy(rounds: int, keep: float, times: int, separation: int) -> float:
    """An upper bound of a record's energy at clip 1 for any pattern of `times` rounds `separation` apart.

    In a node of length n it weighs at most κ(n) = Σ_{j < min(times, ⌈n / separation⌉)} keep^(j separation).  The
    nodes of one level are disjoint and each of its rounds weighs at most 1, so the squares of a level sum to at
    most κ(n) min(times, κ(n) · nodes).
    """
    total = 0.0
    for level in range(levels(rounds)):
        length = 1 << level
        visits = min(times, -(-length // separation))
        weight = float(np.sum(_powers(keep**separation, visits)))
        nodes = (rounds // length + 1) // 2
        total += weight * min(times, weight * nodes)
    return total


def _first_visit(node: NDArray[np.int64], places: int) -> NDArray[np.bool_]:
    """Whether a record's previous round, `places` before, lies in another node; shape (T,)."""
    previous = np.full(len(node), -1)
    previous[places:] = node[: max(0, len(node) - places)]
    return np.asarray(previous != node)


def _powers(base: float, count: int) -> Floats:
    """base^0 … base^(count-1), with 0^0 = 1; by doubling, faster than one power an entry."""
    powers = np.ones(1)
    while len(powers) < count:
        powers = np.concatenate([powers, powers * base ** len(powers)])
    return powers[:count]
