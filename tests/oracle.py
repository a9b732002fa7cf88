"""DP-μ²-FL written out literally, line by line from the paper, in NumPy float64: shares no code with fedpriv.

Only the records and the standard normal vectors are handed in.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def dp_mu2_fl(
    features: NDArray[np.float64],
    labels: NDArray[np.int64],
    classes: int,
    diameter: float,
    rho: float,
    trusted: bool,
    normal: Callable[[int, int], Vector],
) -> Vector:
    """x_T of Algorithm 1 (untrusted) or 2 (trusted) with the paper's σ, η and S.

    `features` (M, T, f) and `labels` (M, T): silo i uses record t in round t.  `normal(i, t)` is the standard
    normal vector of silo i (or of the server, i = -1) in round t.
    """
    silos, rounds, width = features.shape
    dimension = classes * width
    gradient_bound = np.sqrt(2.0) * np.sqrt(width)  # G = √2 max‖z‖, pixels in [0, 1] and a bias
    smoothness = width / 2.0  # L = max‖z‖²/2
    clip = gradient_bound + 2 * smoothness * diameter  # S = G + 2LD
    sigma = 2 * clip * np.sqrt(rounds) / (rho * silos if trusted else rho)
    scale = rho * diameter * (silos if trusted else np.sqrt(silos))
    step = min(scale / (2 * clip * rounds * np.sqrt(dimension)), 1 / (4 * smoothness * rounds))

    def gradient(x: Vector, z: Vector, label: int) -> Vector:
        logits = x.reshape(classes, width) @ z
        exponentials = np.exp(logits - logits.max())
        residual = exponentials / exponentials.sum()
        residual[label] -= 1.0
        return np.outer(residual, z).ravel()

    x = x_before = w = np.zeros(dimension)
    sums = np.zeros((silos, dimension))
    for t in range(1, rounds + 1):
        received = np.zeros(dimension)
        for i in range(silos):
            z, label = features[i, t - 1], labels[i, t - 1]
            sums[i] += t * gradient(x, z, label) - (t - 1) * gradient(x_before, z, label)
            received += sums[i] if trusted else sums[i] + sigma * normal(i, t)
        mean = received / silos
        if trusted:
            mean = mean + sigma * normal(-1, t)
        if t == rounds:
            return x
        w = w - step * mean
        norm = np.linalg.norm(w)
        if norm > diameter / 2:
            w = w * (diameter / 2) / norm
        a = 2 / (t + 2)
        x_before, x = x, (1 - a) * x + a * w
    raise AssertionError("no rounds")
