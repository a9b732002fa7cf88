"""Second routes to the privacy of random allocation: quadrature in few rounds, Monte Carlo in many.

W = (Y_1 + … + Y_T)/T with Y = exp(Z/z - 1/(2z²)); H_ε(P‖Q) = E(W - e^ε)+ and H_ε(Q‖P) = E(1 - e^ε W)+ under Q.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Floats = NDArray[np.float64]


def normal_rule(points: int) -> tuple[Floats, Floats]:
    """Abscissas and weights of the trapezoid rule for a standard normal.

    Exact to rounding for what is smooth on its scale; E(Y - x)+ bends sharply near x = 0 where z is small.
    """
    grid = np.linspace(-12.0, 12.0, points)
    return grid, np.exp(-0.5 * grid**2) / math.sqrt(2.0 * math.pi) * (grid[1] - grid[0])


def call(x: Floats, z: float) -> Floats:
    """E(Y - x)+ for any real x."""
    logs = z * np.log(np.maximum(x, 1e-300))
    return np.where(x > 0.0, ndtr(0.5 / z - logs) - x * ndtr(-0.5 / z - logs), 1.0 - x)


def put(x: Floats, z: float) -> Floats:
    """E(x - Y)+ for any real x."""
    return call(x, z) - 1.0 + x


def of_two_rounds(z: float, epsilon: float) -> tuple[float, float]:
    """(removed, added) for T = 2, by quadrature over the first round."""
    grid, weights = normal_rule(480_001)
    first = np.exp(grid / z - 0.5 / z**2)
    removed = float(weights @ call(2.0 * math.exp(epsilon) - first, z)) / 2.0
    added = math.exp(epsilon) / 2.0 * float(weights @ put(2.0 * math.exp(-epsilon) - first, z))
    return removed, added


def of_three_rounds(z: float, epsilon: float) -> tuple[float, float]:
    """(removed, added) for T = 3, by quadrature over two rounds."""
    grid, weights = normal_rule(1201)
    y = np.exp(grid / z - 0.5 / z**2)
    sums = y[:, None] + y[None, :]
    removed = weights @ call(3.0 * math.exp(epsilon) - sums, z) @ weights / 3.0
    added = math.exp(epsilon) / 3.0 * (weights @ put(3.0 * math.exp(-epsilon) - sums, z) @ weights)
    return float(removed), float(added)


def removed_by_sampling(z: float, rounds: int, epsilon: float, samples: int, seed: int) -> tuple[float, float]:
    """An unbiased estimate of H_ε(P‖Q) and its standard error.

    T rounds are exchangeable: δ = T · E[(W - e^ε)+; Z_T is the largest].  Given the others, with sum S and largest
    M, this is T · ((S/T - e^ε) Φ(-z*) + Φ(1/z - z*)/T), z* the larger of M and of where S + Y = T e^ε.
    """
    draw = np.random.default_rng(seed)
    values = []
    for start in range(0, samples, 20_000):
        normal = draw.standard_normal((min(20_000, samples - start), rounds - 1))
        sums = np.exp(normal / z - 0.5 / z**2).sum(1)
        left = rounds * math.exp(epsilon) - sums
        crossing = np.where(left > 0.0, z * (np.log(np.maximum(left, 1e-300)) + 0.5 / z**2), -np.inf)
        last = np.maximum(crossing, normal.max(1))
        values.append(rounds * ((sums / rounds - math.exp(epsilon)) * ndtr(-last) + ndtr(1.0 / z - last) / rounds))
    all_values = np.concatenate(values)
    return float(all_values.mean()), float(all_values.std() / math.sqrt(len(all_values)))


def call_of_both(x: Floats, z: float, epsilon: float) -> Floats:
    """E(D - x)+ for D = Y - e^ε Y', Y' = exp(-Z/z - 1/(2z²)) of the same Z; for any real x."""
    half, factor = 0.5 / z**2, math.exp(epsilon)
    at = z * np.log(_both_ratio(x * math.exp(half), factor))
    return ndtr(1.0 / z - at) - factor * ndtr(-1.0 / z - at) - x * ndtr(-at)


def _both_ratio(lifted: Floats, factor: float) -> Floats:
    """w > 0 with w - factor/w = `lifted`."""
    size = np.sqrt(lifted**2 + 4.0 * factor) + np.abs(lifted)
    return np.where(lifted >= 0.0, 0.5 * size, 2.0 * factor / size)


def both_of(normal: Floats, z: float, epsilon: float) -> Floats:
    """D at these Z."""
    return np.exp(normal / z - 0.5 / z**2) - np.exp(epsilon - normal / z - 0.5 / z**2)


def replaced_in_two_rounds(z: float, epsilon: float) -> float:
    """E(D_1 + D_2)+ / 2 by quadrature over the first round."""
    grid, weights = normal_rule(48_001)
    return float(weights @ call_of_both(-both_of(grid, z, epsilon), z, epsilon)) / 2.0


def replaced_in_three_rounds(z: float, epsilon: float) -> float:
    """E(D_1 + D_2 + D_3)+ / 3 by quadrature over two rounds."""
    grid, weights = normal_rule(601)
    first = both_of(grid, z, epsilon)
    return float(weights @ call_of_both(-(first[:, None] + first[None, :]), z, epsilon) @ weights) / 3.0


def replaced_by_sampling(z: float, rounds: int, epsilon: float, samples: int, seed: int) -> tuple[float, float]:
    """An unbiased estimate of E(D_1 + … + D_T)+ / T and its standard error: that of `removed_by_sampling`."""
    normal = np.random.default_rng(seed).standard_normal((samples, rounds - 1))
    sums, factor = both_of(normal, z, epsilon).sum(1), math.exp(epsilon)
    crossing = z * np.log(_both_ratio(-sums * math.exp(0.5 / z**2), factor))
    last = np.maximum(crossing, normal.max(1))
    values = sums * ndtr(-last) + ndtr(1.0 / z - last) - factor * ndtr(-1.0 / z - last)
    return float(values.mean()), float(values.std() / math.sqrt(samples))
