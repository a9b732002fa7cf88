"""A bound for separated participations with unequal clips, close to exact, for C ≥ 0.

With X_ij = clip_i clip_j ⟨C_i, C_j⟩ ≥ 0 a record that takes part in the rounds S moves C s by at most

    √ Σ_{i∈S} Σ_{j∈S} X_ij ≤ √ max_S Σ_{i∈S} ρ_i,    ρ_i = max_S Σ_{j∈S} X_ij

where S runs over the allowed patterns: a heaviest pattern for each row, and one more over what they weigh.
"""

import math

import numpy as np

from fedpriv.mechanisms.base import Sensitivity
from fedpriv.mechanisms.columns import Inner
from fedpriv.mechanisms.sensitivity.participation import heaviest_pattern
from fedpriv.mechanisms.workload import Floats, Workload
from fedpriv.participation.separated import Separated

MOST_ROUNDS = 2000  # beyond, T² numbers are too much work for a few percent


def tightened(found: Sensitivity, inner: Inner, workload: Workload) -> Sensitivity:
    """`found`, or the row-wise bound where that is smaller: for a bound of separated participations.

    Guarantee: what is exact stays as it is, and a bound is replaced by a bound.
    """
    schedule = workload.schedule
    if found.exact or not isinstance(schedule, Separated) or workload.rounds > MOST_ROUNDS:
        return found
    by_rows = row_bound(inner, workload, schedule)
    if by_rows >= found.value:
        return found
    return Sensitivity(by_rows, False, "the heaviest pattern of every row, over the heaviest pattern")


def row_bound(inner: Inner, workload: Workload, pattern: Separated) -> float:
    """The bound, in the units of C s, for the inner products of the columns of C ≥ 0.

    Guarantee: no pattern of `pattern`, no signs and no directions of increments move C s farther.
    """
    weights = inner(np.arange(workload.rounds)) * np.outer(workload.clips, workload.clips)
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
