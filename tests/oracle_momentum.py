"""Tran & Cutkosky's two algorithms node by node, and their node sets: NumPy float64, no code of fedpriv.

Rounds count from 1; `rounds_per_epoch` is N.  Node (level, index) is the interval
[index 2^level + 1, (index + 1) 2^level].
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Interval = tuple[int, int]
Gradient = Callable[[int, Vector], Vector]
"""g_t(w) from (t, w)."""
NodeNoise = Callable[[int, int, int], Vector]
"""ζ from (tree, level, index); trees are numbered A1 = 0, G = 1, Δ = 2, r = 3."""


def compose(first: int, last: int) -> list[Interval]:
    """COMPOSE: the dyadic cover of [first, last] from left to right; [] if it is empty."""
    cover = []
    while first <= last:
        length = 1
        while (first - 1) % (2 * length) == 0 and first + 2 * length - 1 <= last:
            length *= 2
        cover.append((first, first + length - 1))
        first += length
    return cover


def level(node: Interval) -> int:
    return (node[1] - node[0] + 1).bit_length() - 1


def noise_of(noise: NodeNoise, tree: int, node: Interval) -> Vector:
    return noise(tree, level(node), (node[0] - 1) >> level(node))


def prefix_nodes(rounds: int) -> set[Interval]:
    """Released by a tree over prefixes: Algorithm 1's, and the r tree of Algorithm 2."""
    return {node for t in range(1, rounds + 1) for node in compose(1, t)}


def gradient_nodes(rounds: int, rounds_per_epoch: int) -> set[Interval]:
    return {node for t in range(1, rounds + 1) for node in compose(max(1, t - rounds_per_epoch + 1), t)}


def difference_nodes(rounds: int, rounds_per_epoch: int) -> set[Interval]:
    return {node for t in range(2 * rounds_per_epoch, rounds + 1) for node in compose(t - rounds_per_epoch + 1, t)}


def squared_norms(
    nodes: Iterable[Interval], rounds_per_epoch: int, decay: float, weight: Callable[[int], float] = lambda _t: 1.0
) -> Vector:
    """W of the record in each place: Σ_nodes (Σ_{its rounds t in the node} weight(t) decay^(z-t))²."""
    found = np.zeros(rounds_per_epoch)
    for y, z in nodes:
        seen = np.zeros(rounds_per_epoch)
        for t in range(y, z + 1):
            seen[(t - 1) % rounds_per_epoch] += weight(t) * decay ** (z - t)
        found += seen**2
    return found


class Step(NamedTuple):
    """One step: the exact momentum along the noisy run, what is released, the next iterate."""

    momentum: Vector
    released: Vector
    after: Vector


def move(point: Vector, released: Vector, step: float) -> Vector:
    norm = np.linalg.norm(released)
    return point - step * released / norm if norm else point


def tree_run(
    start: Vector, gradient: Gradient, noise: NodeNoise, rounds: int, alpha: float, step: float, std: float
) -> list[Step]:
    """Algorithm 1 with `std` on every node."""
    steps: list[Step] = []
    point, momentum = start, np.zeros_like(start)
    for t in range(1, rounds + 1):
        momentum = (1 - alpha) * momentum + alpha * gradient(t, point)
        added = sum((1 - alpha) ** (t - z) * noise_of(noise, 0, (y, z)) for y, z in compose(1, t))
        released = momentum + std * added
        point = move(point, released, step)
        steps.append(Step(momentum, released, point))
    return steps


class Stds(NamedTuple):
    """Node standard deviations of Algorithm 2."""

    early: float
    late: float
    difference: float
    residual: float


def reduced_run(
    start: Vector,
    gradient: Gradient,
    noise: NodeNoise,
    rounds: int,
    rounds_per_epoch: int,
    alpha: float,
    mixing: float,
    step: float,
    stds: Stds,
) -> list[Step]:
    """Algorithm 2, literally: three arrays of noisy nodes, and the reconstruction from them."""
    decay, stay = 1 - alpha, 1 - mixing
    arrays: dict[str, dict[Interval, Vector]] = {"G": {}, "D": {}, "r": {}}
    terms: dict[str, dict[int, Vector]] = {"G": {}, "D": {}, "r": {}}
    trees = {"G": 1, "D": 2, "r": 3}

    def std(name: str, z: int) -> float:
        if name == "G":
            return stds.early if z <= 2 * rounds_per_epoch else stds.late
        return stds.difference if name == "D" else stds.residual

    def window(name: str, first: int, last: int) -> Vector:
        found = np.zeros_like(start)
        for y, z in compose(first, last):
            found = found + decay ** (last - z) * arrays[name][y, z]
        return found

    def reconstruction(t: int) -> Vector:
        whole, rest = divmod(t, rounds_per_epoch)
        total = decay ** (whole * rounds_per_epoch) * window("G", 1, rest)
        mixed = [0.0]
        for i in range(1, whole + 1):
            mixed.append(stay * mixed[-1] + decay ** (rounds_per_epoch * (i - 1)))
        if whole >= 1:
            total = total + mixed[whole] * window("G", rest + 1, rest + rounds_per_epoch)
        for i in range(1, whole):
            at = (t - i * rounds_per_epoch + 1, t - (i - 1) * rounds_per_epoch)
            total = total + mixed[i] * (stay * window("D", *at) + mixing * window("G", *at))
        return np.asarray(alpha * (total + window("r", 1, t)))

    steps: list[Step] = []
    point, momentum = start, np.zeros_like(start)
    anchor = before = start
    for t in range(1, rounds + 1):
        if (t - 1) % rounds_per_epoch == 0:
            before, anchor = anchor, point
        terms["G"][t] = gradient(t, anchor)
        terms["r"][t] = gradient(t, point) - terms["G"][t]
        if t > rounds_per_epoch:
            terms["D"][t] = terms["G"][t] - gradient(t, before)
        momentum = decay * momentum + alpha * gradient(t, point)
        length = 1
        while t % length == 0:
            node = (t - length + 1, t)
            for name in ("G", "D", "r"):
                if name == "D" and node[0] <= rounds_per_epoch:
                    continue
                exact = sum(decay ** (t - i) * terms[name][i] for i in range(node[0], t + 1))
                arrays[name][node] = exact + std(name, t) * noise_of(noise, trees[name], node)
            length *= 2
        released = reconstruction(t)
        point = move(point, released, step)
        steps.append(Step(momentum, released, point))
    return steps


GOLDEN_PLACES, GOLDEN_ROUNDS, GOLDEN_ALPHA, GOLDEN_STEP, GOLDEN_MIXING = 5, 13, 0.25, 0.1, 0.3
GOLDEN_START = np.array([1.0, -0.5])
GOLDEN_STDS = Stds(0.05, 0.08, 0.02, 0.03)
GOLDEN_RECORDS = np.array([[np.cos(i), np.sin(2 * i + 1)] for i in range(GOLDEN_PLACES)]) / np.sqrt(2)


def golden_gradient(t: int, point: Vector) -> Vector:
    """tanh(⟨w, x⟩) x of the record in the place of round t, in fixed order."""
    x = GOLDEN_RECORDS[(t - 1) % GOLDEN_PLACES]
    return np.asarray(np.tanh(point @ x) * x)


def golden_noise(tree: int, level: int, index: int) -> Vector:
    return np.sin(1.0 + 3 * tree + 5 * level + 7 * index + 11 * np.arange(2.0))
