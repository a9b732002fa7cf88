"""Single-epoch algorithms written out literally in NumPy float64: shares no code with fedpriv.

Choquette-Choo, Ganesh & Thakurta 2025, Algorithm 1 and its variants, counted from 0 as the paper does; tree noise
is drawn node by node and added up over the binary expansion of the prefix.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Gradient = Callable[[Vector, Vector, int], Vector]
"""The gradient of one record at a point: (point, features, label)."""


def softmax_gradient(classes: int) -> Gradient:
    def gradient(point: Vector, features: Vector, label: int) -> Vector:
        logits = point.reshape(classes, -1) @ features
        residual = np.exp(logits - logits.max())
        residual /= residual.sum()
        residual[label] -= 1.0
        return np.outer(residual, features).ravel()

    return gradient


def clipped(vector: Vector, bound: float) -> Vector:
    return vector * min(1.0, bound / max(float(np.linalg.norm(vector)), 1e-300))


def tree_noise(prefix: int, node: Callable[[int], Vector]) -> Vector:
    """The noise of the prefix [1, prefix]; `node(z)` is the noise of the released node that ends at z."""
    total = np.zeros_like(node(prefix))
    while prefix:
        total += node(prefix)
        prefix -= prefix & -prefix
    return total


def project(point: Vector, radius: float) -> Vector:
    norm = np.linalg.norm(point)
    return point if norm <= radius else point * (radius / norm)


def accelerated(
    silos: list[list[tuple[Vector, int]]],
    rounds: int,
    gradient: Gradient,
    start: Vector,
    clip: float,
    beta: float,
    radius: float,
    std: list[float],
    normal: Callable[[int, int], Vector],
    recursive: bool = True,
    coupled: bool = True,
) -> Vector:
    """y_T.  `silos[i]` holds silo i's records in order; `std[i]` is its node noise, std[-1] the server's.

    `normal(i, z)` is the standard normal vector of owner i (the server is -1) for the node that ends at z.
    recursive = False releases each batch gradient once with noise of its own; coupled = False is plain projected
    descent with step 1/β.
    """
    batches = [len(records) // rounds for records in silos]
    total = sum(batches)
    x = x_before = y = z = start
    sums = np.zeros_like(start)
    for t in range(rounds):
        now, before = t + 1.0, float(t)
        increment = np.zeros_like(start)
        for records, batch in zip(silos, batches, strict=True):
            for features, label in records[t * batch : (t + 1) * batch]:
                if recursive:
                    change = now * gradient(x, features, label) - before * gradient(x_before, features, label)
                else:
                    change = gradient(x, features, label)
                increment += clipped(change, clip)
        sums = (sums if recursive else 0.0) + increment / total
        noise = np.zeros_like(start)
        for owner, scale in zip([*range(len(silos)), -1], std, strict=True):
            share = 1.0 if owner < 0 else batches[owner] / total
            if scale and recursive:
                noise += share * scale * tree_noise(t + 1, lambda node, owner=owner: normal(owner, node))
            elif scale:
                noise += share * scale * normal(owner, t + 1)
        estimate = (sums + noise) / now if recursive else sums + noise
        x_before = x
        if not coupled:
            x = y = project(x - estimate / beta, radius)
            continue
        z = project(z - now * estimate / beta, radius)
        y = project(x - estimate / beta, radius)
        tau = 2.0 / (t + 3)
        x = (1 - tau) * y + tau * z
    return y
