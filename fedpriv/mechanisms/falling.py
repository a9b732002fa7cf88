"""Sensitivity under any separated participation, for Toeplitz C with coefficients c_0 ≥ c_1 ≥ … ≥ 0.

Source: Kalinin & Lampert 2024, Theorem 2: for equal clips the earliest pattern, rounds 1, 1 + separation, …, is
the worst.  Choquette-Choo et al. 2023: columns that no two of which overlap add their squares.
"""

import math
from collections.abc import Callable

import numpy as np

from fedpriv.mechanisms.base import Sensitivity
from fedpriv.mechanisms.participation import earliest_pattern, heaviest_pattern
from fedpriv.mechanisms.workload import Floats, Separated, Workload


def certified(
    workload: Workload,
    pattern: Separated,
    columns: Floats,
    support: int,
    within: Callable[[Floats, int], Floats],
) -> Sensitivity:
    """The exact worst case where one is known, else the smaller of two bounds.

    `columns`: squared column norms of C (T,); `support`: the number of non-zero coefficients of C;
    `within(clips, places)`: energies of the records of a fixed order.
    """
    energies = workload.clips**2 * columns
    if pattern.most == 1:
        return Sensitivity(math.sqrt(float(np.max(energies))), True, "one participation: largest column norm")
    if support <= pattern.separation and workload.period is None:
        worst = heaviest_pattern(energies, pattern)
        return Sensitivity(math.sqrt(worst), True, "no two participations overlap: squares add up")
    triangle = heaviest_pattern(np.sqrt(energies), pattern)
    if workload.period is not None:
        return Sensitivity(triangle, False, "triangle inequality over the heaviest pattern")
    equal = float(np.max(workload.clips)) * math.sqrt(
        float(within(earliest_pattern(pattern), pattern.separation)[0])
    )
    if np.all(workload.clips == workload.clips[0]):
        return Sensitivity(equal, True, "equal clips, falling coefficients: the earliest pattern")
    return Sensitivity(min(triangle, equal), False, "unequal clips: largest clip or triangle inequality")
