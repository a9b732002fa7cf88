"""A bound for separated participations with unequal clips, close to exact, for Toeplitz C ≥ 0.

With X_ij = clip_i clip_j ⟨C_i, C_j⟩ ≥ 0 a record that takes part in the rounds S moves C s by at most

    √ Σ_{i∈S} Σ_{j∈S} X_ij ≤ √ max_S Σ_{i∈S} ρ_i,    ρ_i = max_S Σ_{j∈S} X_ij

where S runs over the allowed patterns: a heaviest pattern for each row, and one more over what they weigh.
"""

import math

import numpy as np

from fedpriv.mechanisms.sensitivity.participation import heaviest_pattern
from fedpriv.mechanisms.workload import Floats, Separated, Workload

MOST_ROUNDS = 2000  # beyond, T² numbers are too much work for a few percent


def row_bound(coefficients: Floats, workload: Workload, pattern: Separated) -> float:
    """The bound, in the units of C s; `coefficients` of C ≥ 0, zero beyond their end.

    Guarantee: no pattern of `pattern`, no signs and no directions of increments move C s farther.
    """
    weights = _inner_products(coefficients, workload) * np.outer(workload.clips, workload.clips)
    return math.sqrt(heaviest_pattern(heaviest_patterns(weights, pattern), pattern))


def heaviest_patterns(weights: Floats, pattern: Separated) -> Floats:
    """`participation.heaviest_pattern` of every row of `weights` ≥ 0; (n, T) -> (n,)."""
    gap, (rows, rounds) = pattern.min_separation, weights.shape
    best = np.zeros((rows, rounds + 1))  # best[:, i]: the heaviest pattern within the first i rounds
    for _ in range(pattern.most):
        with_last = weights.copy()
        with_last[:, gap:] += best[:, 1 : max(1, rounds - gap + 1)]
        best[:, 1:] = np.maximum.accumulate(with_last, axis=1)
    return best[:, -1]


def _inner_products(coefficients: Floats, workload: Workload) -> Floats:
    """⟨C_i, C_j⟩, shape (T, T); 0 for rounds of two periods."""
    rounds, block = workload.rounds, workload.block
    series = np.zeros(block)
    series[: len(coefficients)] = coefficients[:block]
    products = np.zeros((rounds, rounds))
    for start in range(0, rounds, block):
        length = min(block, rounds - start)
        inside = products[start : start + length, start : start + length]
        for lag in range(length):
            shared = np.cumsum(series[: length - lag] * series[lag:length])[::-1]
            place = np.arange(length - lag)
            inside[place, place + lag] = inside[place + lag, place] = shared
    return products
