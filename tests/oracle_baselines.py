"""Baselines of docs/baselines.md written out literally in NumPy float64, counted from 1; no code of fedpriv.

`batches[t-1]` holds the records of all silos in round t; every silo has the same weight.  `fresh(t)` is the noise
vector of round t as it enters the mean over silos; under the tree it is that of the released node that ends at t.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tests.oracle_single_epoch import Gradient, Vector, clipped, project, tree_noise

Batch = Sequence[tuple[Vector, int]]
Fresh = Callable[[int], Vector]


def mean(batch: Batch, increment: Callable[[Vector, int], Vector], clip: float) -> Vector:
    return np.mean([clipped(increment(features, label), clip) for features, label in batch], axis=0)


def online_to_batch(
    batches: Sequence[Batch],
    gradient: Gradient,
    start: Vector,
    clip: float,
    step: float,
    radius: float,
    fresh: Fresh,
) -> Vector:
    """x_T with weights t²: increments t² ∇f(x_t) - (t-1)² ∇f(x_{t-1}), clipped to C t, summed under the tree."""
    w = x = x_before = start
    total, weighted, weights = np.zeros_like(start), start.copy(), 1.0
    for t, batch in enumerate(batches, start=1):

        def increment(z: Vector, label: int, t: int = t, x: Vector = x, before: Vector = x_before) -> Vector:
            return t**2 * gradient(x, z, label) - (t - 1) ** 2 * gradient(before, z, label)

        total = total + mean(batch, increment, clip * t)
        if t == len(batches):
            break
        w = project(w - step * (total + tree_noise(t, fresh)), radius)
        weighted, weights = weighted + (t + 1) ** 2 * w, weights + (t + 1) ** 2
        x_before, x = x, weighted / weights
    return x


def dp_ftrl(
    batches: Sequence[Batch],
    gradient: Gradient,
    start: Vector,
    clip: float,
    step: float,
    momentum: float,
    fresh: Fresh,
) -> Vector:
    """w_{T+1} = w_1 - η m_T, m_t = γ m_{t-1} + noisy sum of all gradients."""
    w, velocity, total = start, np.zeros_like(start), np.zeros_like(start)
    for t, batch in enumerate(batches, start=1):
        total = total + mean(batch, lambda z, label, w=w: gradient(w, z, label), clip)
        velocity = momentum * velocity + total + tree_noise(t, fresh)
        w = start - step * velocity
    return w


def phased_sgd(
    batches: Sequence[Batch],
    gradient: Gradient,
    start: Vector,
    clip: float,
    step: float,
    radius: float,
    fresh: Fresh,
) -> Vector:
    """The start after the last phase; phase i has ⌊T/2^i⌋ rounds, and its noise comes in the round after them."""
    used, t, phase = 0, 0, 0
    while (length := len(batches) // 2 ** (phase + 1)) > 0:
        phase += 1
        w, queried = start, []
        for batch in batches[used : used + length]:
            queried.append(w)
            slope = mean(batch, lambda z, label, w=w: gradient(w, z, label), clip)
            w = project(w - step / 4**phase * slope, radius)
        used, t = used + length, t + length + 1
        start = project(np.mean(queried, axis=0) - step / 4**phase * fresh(t), radius)
    return start
