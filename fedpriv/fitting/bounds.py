"""Lower bounds of the noise that any mechanism leaves in what a run publishes, at sensitivity 1 and fixed clips.

A number h · (released rows) = a · (increments) with a = h A moves by Σ clip_i |a_i| if a record moves its
increments by their clips in the right directions.  A mechanism of sensitivity 1 that releases that number alone
needs at least this standard deviation.
"""

import numpy as np

from fedpriv.errors import InputError
from fedpriv.fitting.filters import ratio
from fedpriv.mechanisms.sensitivity.row_bound import heaviest_patterns
from fedpriv.mechanisms.workload import Floats, Workload
from fedpriv.participation.phases import Phases
from fedpriv.participation.separated import Separated


def on_increments(rows: Floats, decay: float) -> Floats:
    """h A for every row h; (n, T) -> (n, T)."""
    return ratio(rows[:, ::-1], zeros=(), poles=(decay,))[:, ::-1]


def lower_bounds(rows: Floats, workload: Workload) -> Floats:
    """The least standard deviation in h · (released rows) for each row h; (n, T) -> (n,)."""
    moved = np.abs(on_increments(rows, workload.decay)) * workload.clips
    schedule = workload.schedule
    if isinstance(schedule, Phases):
        raise InputError("noise of a phased run lies in its empty rounds: nothing is fitted to it")
    if isinstance(schedule, Separated):
        return heaviest_patterns(moved, schedule)
    rounds_per_epoch = min(schedule.rounds_per_epoch, workload.rounds)
    padded = np.pad(moved, ((0, 0), (0, -workload.rounds % rounds_per_epoch)))
    by_place = padded.reshape(len(rows), -1, rounds_per_epoch).sum(axis=1)
    return np.asarray(np.max(by_place, axis=1), np.float64)


def sharper_mean_bound(rows: Floats, workload: Workload, steps: int = 300) -> float:
    """A bound of the root mean square over the rows, sharper than that of their `lower_bounds`; one pass.

    For v > 0 with sum 1 every mechanism has mean variance ≥ [tr (V^½ M V^½)^½]², M the mean of a^T a with clips;
    v <- diag (V^½ M V^½)^½ climbs.  O(T³) a step: for tests and small T.
    """
    if not workload.schedule.single_pass:
        raise InputError("the sharper bound is for one participation of every record")
    moved = on_increments(rows, workload.decay) * workload.clips
    second = moved.T @ moved / len(rows)
    weights = np.full(workload.rounds, 1.0 / workload.rounds)
    best = 0.0
    for _ in range(steps):
        root = np.sqrt(weights)
        values, vectors = np.linalg.eigh(second * np.outer(root, root))
        singular = np.sqrt(np.maximum(values, 0.0))
        best = max(best, float(np.sum(singular) / np.sqrt(np.sum(weights))))
        weights = np.maximum((vectors**2) @ singular, 0.0)
    return best
