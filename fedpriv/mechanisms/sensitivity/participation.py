"""From the columns of C to the record that can move C s the most.

Let u_i be a record's increments in the rounds S in which it takes part, ‖u_i‖ ≤ clip_i.  Then

    ‖Σ_{i∈S} u_i ⊗ C_i‖² = Σ_{i,j∈S} ⟨u_i, u_j⟩ ⟨C_i, C_j⟩ ≤ Σ_{i,j∈S} clip_i clip_j |⟨C_i, C_j⟩|

and every mechanism here has C ≥ 0, so that the bound is attained by increments of one direction: it is the exact
sensitivity, in any dimension, also when increments depend on earlier releases.  An *energy* is such a square.
"""

from collections.abc import Callable

import numpy as np

from fedpriv.mechanisms.workload import Floats, Separated, Workload


def record_energies(workload: Workload, columns: Floats, within: Callable[[Floats, int], Floats]) -> Floats:
    """The energy of the record in each place of a fixed order, shape (places,).

    `columns` holds the squared norms of the columns of C, shape (T,).  `within(clips, places)` gives the energies
    of the first min(places, len(clips)) records of one period that starts with place 0; it is asked only where a
    record takes part more than once in a period.  Different periods have no column of C in common.
    """
    if isinstance(workload.order, Separated):
        raise TypeError("a separated participation has no places")
    single = workload.clips**2 * columns
    if workload.order.single_pass:  # in phases too, whose empty rounds only add places nobody is in
        return single
    places = min(workload.order.places, workload.rounds)
    if places >= workload.block:
        by_place = np.bincount(np.arange(workload.rounds) % places, single, places)
        return np.asarray(by_place, np.float64)
    energies = np.zeros(places)
    for start in range(0, workload.rounds, workload.block):
        of_period = within(workload.clips[start : start + workload.block], places)
        energies[(start + np.arange(len(of_period))) % places] += of_period
    return energies


def heaviest_pattern(weights: Floats, pattern: Separated) -> float:
    """The largest sum of weights ≥ 0 over the rounds of one allowed pattern.

    Dynamic programming over the last round of the pattern; for weights that never increase the earliest pattern
    is the heaviest.
    """
    gap = pattern.separation
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
