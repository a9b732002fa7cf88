"""The sizes of scheduled noise that serve what a run publishes best, in closed form.

With fresh noise d_t z_t the objective is Σ_t d_t² w_t, w_t the squared weight of round t in all rows, and a record
that has moved the sum of round t by m_t is charged Σ_t m_t²/d_t².  By Cauchy and Schwarz the least product is
(Σ_t m_t √w_t)², at d_t² = m_t / √w_t.
"""

import numpy as np

from fedpriv.fitting.objective import Objective
from fedpriv.mechanisms import ScheduledGaussian, Separated, Workload
from fedpriv.mechanisms.workload import Floats

_LEAST = 1e-3
"""Of the largest √w: a round that hardly weighs gets much noise, not any amount of it."""


def fitted_sizes(objective: Objective) -> ScheduledGaussian:
    """The best sizes where one record moves every sum the most: prefix sums, equal clips; elsewhere nearly so."""
    workload = objective.workload
    weights = np.sqrt(np.sum(objective.rows**2, axis=0))
    weights = np.maximum(weights, _LEAST * np.max(weights))
    sizes = np.sqrt(most_moved(workload) / weights)
    return ScheduledGaussian(tuple((sizes / sizes[0]).tolist()), workload.decay)


def most_moved(workload: Workload) -> Floats:
    """How far some record can have moved the sum of every round; (T,).

    The record of round t has moved it by its clips, decayed by whole epochs; any other by what it moved, decayed.
    """
    order, rounds = workload.order, workload.rounds
    epoch, last = rounds, rounds
    if not order.single_pass:
        epoch = order.min_separation if isinstance(order, Separated) else order.rounds_per_epoch
        last = order.most * epoch if isinstance(order, Separated) else rounds
    clips, decay = workload.clips.tolist(), workload.decay
    own, most = list[float](), list[float]()
    for t, clip in enumerate(clips):
        own.append(clip + (decay**epoch * own[t - epoch] if t >= epoch else 0.0))
        if t >= last:  # a record that comes back no more
            own[t] -= decay**last * clips[t - last]
        most.append(max(own[t], decay * most[t - 1] if t else 0.0))
    return np.array(most)
