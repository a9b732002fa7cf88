"""From the columns of C to the record that can move C s the most.

Let u_i be a record's increments in the rounds S in which it takes part, ‖u_i‖ ≤ clip_i.  Then

    ‖Σ_{i∈S} u_i ⊗ C_i‖² = Σ_{i,j∈S} ⟨u_i, u_j⟩ ⟨C_i, C_j⟩ ≤ Σ_{i,j∈S} clip_i clip_j |⟨C_i, C_j⟩|

and every mechanism here has C ≥ 0, so that the bound is attained by increments of one direction: it is the exact
sensitivity, in any dimension, also when increments depend on earlier releases.  The squared norm of a record is
such a square.
"""

from collections.abc import Callable

import numpy as np

from fedpriv.mechanisms.workload import Floats, Workload
from fedpriv.participation.separated import Separated


def record_squared_norms(workload: Workload, columns: Floats, within: Callable[[Floats, int], Floats]) -> Floats:
    """The squared norm of the record in each place of a fixed order, shape (rounds_per_epoch,).

    `columns` holds the squared norms of the columns of C, shape (T,).  `within(clips, rounds_per_epoch)` gives
    those of the first min(rounds_per_epoch, len(clips)) records of one period that starts with place 0; it is
    asked only where a record takes part more than once in a period.  Different periods have no column of C in
    common.
    """
    if isinstance(workload.order, Separated):
        raise TypeError("a separated participation has no order")
    single = workload.clips**2 * columns
    if workload.order.single_pass:  # in phases too, whose empty rounds only add places nobody is in
        return single
    rounds_per_epoch = min(workload.order.rounds_per_epoch, workload.rounds)
    if rounds_per_epoch >= workload.block:
        by_place = np.bincount(np.arange(workload.rounds) % rounds_per_epoch, single, rounds_per_epoch)
        return np.asarray(by_place, np.float64)
    squared_norms = np.zeros(rounds_per_epoch)
    for start in range(0, workload.rounds, workload.block):
        of_period = within(workload.clips[start : start + workload.block], rounds_per_epoch)
        squared_norms[(start + np.arange(len(of_period))) % rounds_per_epoch] += of_period
    return squared_norms


def heaviest_pattern(weights: Floats, pattern: Separated) -> float:
    """The largest sum of weights ≥ 0 over the rounds of one allowed pattern.

    Dynamic programming over the last round of the pattern; for weights that never increase the earliest pattern
    is the heaviest.
    """
    gap = pattern.min_separation
    if np.all(weights[1:] <= weights[:-1]):
        return float(np.sum(weights[::gap][: pattern.most]))
    best = np.zeros(len(weights) + 1)  # best[i]: the heaviest pattern within the first i rounds
    for _ in range(pattern.most):
        with_last = weights.copy()
        with_last[gap:] += best[1 : max(1, len(weights) - gap + 1)]
        better = np.maximum.accumulate(np.concatenate([[0.0], with_last]))
        if np.array_equal(better, best):
            break
        best = better
    return float(best[-1])
