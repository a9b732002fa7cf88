"""Sensitivity for Toeplitz C with coefficients c_0 ≥ c_1 ≥ … ≥ 0, exact wherever that is known.

Sources: Kalinin & Lampert 2024, Theorem 2: for equal clips and any separated participation the earliest pattern,
rounds 1, 1 + separation, …, is the worst (in a fixed order it is so because a later start only cuts columns off).
Choquette-Choo et al. 2023: columns that do not overlap add their squares.
"""

import math
from collections.abc import Callable

import numpy as np

from fedpriv.mechanisms.base import Sensitivity
from fedpriv.mechanisms.columns import Columns, toeplitz_columns
from fedpriv.mechanisms.sensitivity import series
from fedpriv.mechanisms.sensitivity.participation import heaviest_pattern, record_squared_norms
from fedpriv.mechanisms.sensitivity.row_bound import tightened
from fedpriv.mechanisms.workload import Floats, Workload
from fedpriv.participation.separated import Separated


def of_series(workload: Workload, coefficients: Floats) -> Sensitivity:
    """`certified` for c_0 … up to the last that matters, at most `workload.block` of them."""

    def within(clips: Floats, rounds_per_epoch: int) -> Floats:
        return series.record_squared_norms(coefficients[: len(clips)], clips, rounds_per_epoch)

    return certified(workload, lambda: coefficients, toeplitz_columns(coefficients, workload), within)


def certified(
    workload: Workload,
    coefficients: Callable[[], Floats],
    columns: Columns,
    within: Callable[[Floats, int], Floats],
) -> Sensitivity:
    """The exact worst case where one is known, else the smallest of three bounds.

    `coefficients()`: c_0 … up to the last that matters, at most T; `within(clips, rounds_per_epoch)`: squared
    norms of the records of a fixed order in one period.
    """
    squared_norms = workload.clips**2 * columns.squared_norms
    if workload.order.single_pass:
        return Sensitivity(math.sqrt(float(np.max(squared_norms))), True, "one participation: largest column norm")
    if isinstance(workload.order, Separated):
        found = _separated(workload, workload.order, coefficients(), columns.squared_norms)
        return tightened(found, columns.inner, workload)
    if workload.period is None and workload.equal_clips:
        return _earliest(
            workload, coefficients(), columns.squared_norms, workload.order.rounds_per_epoch, workload.rounds
        )
    worst = float(np.max(record_squared_norms(workload, columns.squared_norms, within)))
    return Sensitivity(math.sqrt(worst), True, "every record of the fixed order")


def _separated(workload: Workload, pattern: Separated, coefficients: Floats, columns: Floats) -> Sensitivity:
    squared_norms = workload.clips**2 * columns
    if workload.period is None:
        earliest = _earliest(workload, coefficients, columns, pattern.min_separation, pattern.most)
        if workload.equal_clips:
            return earliest
        if len(coefficients) <= pattern.min_separation:
            worst = heaviest_pattern(squared_norms, pattern)
            return Sensitivity(math.sqrt(worst), True, "no two participations overlap: squares add up")
    triangle = heaviest_pattern(np.sqrt(squared_norms), pattern)
    if workload.period is None and earliest.value < triangle:
        return Sensitivity(earliest.value, False, "unequal clips, as if all were the largest")
    return Sensitivity(triangle, False, "triangle inequality over the heaviest pattern")


def _earliest(
    workload: Workload, coefficients: Floats, columns: Floats, gap: int, max_participations: int
) -> Sensitivity:
    """The largest clip in rounds 1, 1 + gap, …, not more than may be: clip · ‖Σ_k C_{1 + k gap}‖.  O(T)."""
    rounds = workload.rounds
    if len(coefficients) <= gap:
        norm = math.sqrt(float(np.sum(columns[::gap][:max_participations])))
    else:
        participations = -(-rounds // gap)
        shifted = np.zeros((participations, gap))
        shifted.ravel()[: len(coefficients)] = coefficients
        moved = np.cumsum(shifted, axis=0)
        if max_participations < participations:
            moved[max_participations:] -= moved[:-max_participations].copy()
        norm = float(np.linalg.norm(moved.ravel()[:rounds]))
    return Sensitivity(float(np.max(workload.clips)) * norm, True, "equal clips: the earliest pattern")
