"""Which record a nonincreasing Toeplitz C charges most: its clips in its own rounds, 0 elsewhere."""

import numpy as np

from fedpriv.mechanisms import Separated, Workload
from fedpriv.mechanisms.sensitivity import series
from fedpriv.mechanisms.workload import Floats


def worst_record(coefficients: Floats, workload: Workload) -> Floats:
    """The record u that makes ‖C u‖ the sensitivity, shape (T,).

    For separated participations with unequal clips it is a stand-in that is charged more than any pattern: the
    largest clip in the earliest rounds.  Fits need no more; what they find is certified afterwards.
    """
    schedule, clips = workload.schedule, workload.clips
    record = np.zeros(workload.rounds)
    if schedule.single_pass:
        worst = int(np.argmax(clips**2 * series.column_squared_norms(coefficients, workload.rounds)))
        record[worst] = clips[worst]
    elif isinstance(schedule, Separated):
        record[:: schedule.min_separation] = np.max(clips)
        record[schedule.most * schedule.min_separation :] = 0.0
    else:
        first = 0
        if not np.all(clips == clips[0]):
            first = int(np.argmax(series.record_squared_norms(coefficients, clips, schedule.rounds_per_epoch)))
        record[first :: schedule.rounds_per_epoch] = clips[first :: schedule.rounds_per_epoch]
    return record
