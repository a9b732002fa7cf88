"""Accelerated-DP-SRGD and what it is compared with, written out literally in NumPy float64: no code of fedpriv.

Softmax regression on `features[i]` (T, B_i, f) and `labels[i]` (T, B_i): silo i uses its batch t of B_i records in
round t, every record once, and the mean is over all records of a round.  `normal(i, t)` is the standard normal
vector of silo i (or of the server, i = -1) that is fresh in round t; under the tree it belongs to the one released
node that ends at t.  `trusted`: the server adds noise of standard deviation unit / B, B = Σ B_i, per node to the
mean over records; else every silo adds noise of unit / B_i to the mean over its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Normal = Callable[[int, int], Vector]


@dataclass(frozen=True)
class Setup:
    """Records, norm bound on one record's increment, and who adds how much noise."""

    features: Sequence[NDArray[np.float64]]
    labels: Sequence[NDArray[np.int64]]
    classes: int
    clip: float
    unit: float
    trusted: bool
    normal: Normal

    @property
    def rounds(self) -> int:
        return len(self.features[0])

    @property
    def dimension(self) -> int:
        return self.classes * self.features[0].shape[-1]

    def gradient(self, x: Vector, z: Vector, label: int) -> Vector:
        logits = x.reshape(self.classes, -1) @ z
        exponentials = np.exp(logits - logits.max())
        residual = exponentials / exponentials.sum()
        residual[label] -= 1.0
        return np.outer(residual, z).ravel()

    @property
    def batch(self) -> int:
        """B."""
        return sum(features.shape[1] for features in self.features)

    def mean_increment(self, t: int, terms: Sequence[tuple[float, Vector]], growth: int = 0) -> Vector:
        """The mean over all records of round t of Σ_k c_k ∇f(x_k; record), each clipped; terms are (c_k, x_k)."""
        total = np.zeros(self.dimension)
        clip = self.clip * t**growth
        for features, labels in zip(self.features, self.labels, strict=True):
            for z, label in zip(features[t - 1], labels[t - 1], strict=True):
                increment = np.zeros(self.dimension)
                for coefficient, x in terms:
                    increment = increment + coefficient * self.gradient(x, z, label)
                norm = np.linalg.norm(increment)
                if norm > clip:
                    increment = increment * (clip / norm)
                total += increment
        return total / self.batch

    def fresh(self, t: int) -> Vector:
        """The noise vector of round t as it enters the mean over silos."""
        if self.trusted:
            return self.unit / self.batch * self.normal(-1, t)
        total = np.zeros(self.dimension)
        for i, features in enumerate(self.features):
            batch = features.shape[1]
            total += batch / self.batch * (self.unit / batch) * self.normal(i, t)
        return total

    def tree_noise(self, t: int) -> Vector:
        """The noise of the prefix [1, t]: nodes from the left, lengths the powers of two in t, largest first."""
        noise, end = np.zeros(self.dimension), 0
        for level in reversed(range(t.bit_length())):
            if t >> level & 1:
                end += 2**level
                noise += self.fresh(end)
        return noise


def nodes_holding(t: int, rounds: int) -> int:
    """Released tree nodes that hold round t: the node ending at z is [z - lowbit(z) + 1, z]."""
    return sum(z - (z & -z) < t <= z for z in range(1, rounds + 1))


def ball(x: Vector, radius: float) -> Vector:
    norm = np.linalg.norm(x)
    return x if norm <= radius else x * (radius / norm)


def accelerated_dp_srgd(setup: Setup, beta: float, radius: float) -> Vector:
    """y_{T+1}."""
    x = x_before = y = z = np.zeros(setup.dimension)
    total = np.zeros(setup.dimension)
    for t in range(1, setup.rounds + 1):
        total = total + setup.mean_increment(t, [(t, x), (-(t - 1), x_before)])
        noisy = total + setup.tree_noise(t)
        z = ball(z - noisy / beta, radius)
        y = ball(x - noisy / (beta * t), radius)
        tau = 2 / (t + 2)
        x_before, x = x, (1 - tau) * y + tau * z
    return y


def unaccelerated_dp_srgd(setup: Setup, beta: float, radius: float) -> Vector:
    """x_{T+1}."""
    x = x_before = np.zeros(setup.dimension)
    total = np.zeros(setup.dimension)
    for t in range(1, setup.rounds + 1):
        total = total + setup.mean_increment(t, [(t, x), (-(t - 1), x_before)])
        noisy = total + setup.tree_noise(t)
        x_before, x = x, ball(x - noisy / (beta * t), radius)
    return x


def accelerated_independent(setup: Setup, beta: float, radius: float) -> Vector:
    """y_{T+1}, from batch gradients clipped before the weight t, each with noise of its own."""
    x = y = z = np.zeros(setup.dimension)
    for t in range(1, setup.rounds + 1):
        noisy = t * (setup.mean_increment(t, [(1, x)]) + setup.fresh(t))
        z = ball(z - noisy / beta, radius)
        y = ball(x - noisy / (beta * t), radius)
        tau = 2 / (t + 2)
        x = (1 - tau) * y + tau * z
    return y


def online_to_batch(setup: Setup, step: float, radius: float, power: int) -> Vector:
    """x_T, the average of w_1 … w_T with weights t^power."""
    w = x = x_before = np.zeros(setup.dimension)
    total = np.zeros(setup.dimension)
    weighted, weights = w.copy(), 1.0
    for t in range(1, setup.rounds + 1):
        total = total + setup.mean_increment(t, [(t**power, x), (-((t - 1) ** power), x_before)], power - 1)
        if t == setup.rounds:
            return x
        w = ball(w - step * (total + setup.tree_noise(t)), radius)
        weighted = weighted + (t + 1) ** power * w
        weights += (t + 1) ** power
        x_before, x = x, weighted / weights
    raise AssertionError("no rounds")


def dp_ftrl(setup: Setup, step: float, radius: float, momentum: float) -> Vector:
    """w_{T+1} = Π(w_1 - η m_T), m_t = γ m_{t-1} + noisy sum of all gradients."""
    w, velocity, total = (np.zeros(setup.dimension) for _ in range(3))
    for t in range(1, setup.rounds + 1):
        total = total + setup.mean_increment(t, [(1, w)])
        velocity = momentum * velocity + total + setup.tree_noise(t)
        w = ball(-step * velocity, radius)
    return w


def phased_sgd(setup: Setup, batches: int, step: float, radius: float) -> Vector:
    """The start after the last phase; phase i reads ⌊batches/2^i⌋ of them, a round each.

    Its noise comes in the round after them.
    """
    start, used, t, phase = np.zeros(setup.dimension), 0, 0, 1
    while (length := batches // 2**phase) > 0:
        w, queried = start, []
        for place in range(used + 1, used + length + 1):
            queried.append(w)
            w = ball(w - step / 4**phase * setup.mean_increment(place, [(1, w)]), radius)
        used, t = used + length, t + length + 1
        start = ball(np.mean(queried, axis=0) - step / 4**phase * setup.fresh(t), radius)
        phase += 1
    return start


def noisy_descent(setup: Setup, step: float, radius: float) -> list[Vector]:
    """x_1 … x_{T+1} of x_{t+1} = Π(x_t - η (g_t + noise)): RRSGD publishes one of the first T, DP-GD the last."""
    iterates = [np.zeros(setup.dimension)]
    for t in range(1, setup.rounds + 1):
        noisy = setup.mean_increment(t, [(1, iterates[-1])]) + setup.fresh(t)
        iterates.append(ball(iterates[-1] - step * noisy, radius))
    return iterates
