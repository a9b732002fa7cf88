"""Factors D_t that lengthen short columns of C: for late clips that are raised, or late noise that shrinks.

C diag(D) with clips s is C with clips s · D, so one D serves both: clip S · D_t at the same noise
(`late_clip = "column"`), or the noise of increment t divided by D_t (`BufferedToeplitz.column_scale`).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.mechanisms.workload import Floats, Workload
from fedpriv.participation.fixed_order import Schedule

_STEPS = 1000
_SETTLED = 1e-12

Inner = Callable[[NDArray[np.int64]], Floats]
"""⟨C_i, C_j⟩ ≥ 0 of some rounds, counted from 0: (n,) -> (n, n)."""


def column_scale(squared_norms: Floats, workload: Workload) -> Floats:
    """D for one participation of every record: all columns, times their clips, become as long as the longest.

    `squared_norms` are the squared column norms of C, (T,).  Every D_t is at least 1.

    Guarantee: the worst record costs what it cost without D, whatever the clips are.
    """
    if not workload.schedule.single_pass:
        raise InputError("column scale: records take part more than once; their scale is fixed_order_scale")
    lengths = workload.clips * np.sqrt(squared_norms)
    return np.asarray(np.max(lengths) / lengths, np.float64)


def fixed_order_scale(inner: Inner, workload: Workload) -> Floats:
    """D for several passes in a fixed order with equal clips: of every record the largest Π D_t; (T,).

    Some factors are below 1: late clips are not only raised, clips are redistributed over a record's rounds.

    Guarantee: every record costs what the worst one cost without D.
    """
    schedule, rounds = workload.schedule, workload.rounds
    if not isinstance(schedule, Schedule) or np.any(workload.clips != workload.clips[0]):
        raise InputError("column scale: several passes need a fixed order and the same clip in every round")
    own = [
        np.arange(place, rounds, schedule.rounds_per_epoch)
        for place in range(min(schedule.rounds_per_epoch, rounds))
    ]
    products = [inner(held) for held in own]
    squared_norm = max(float(np.sum(product)) for product in products)
    scale = np.empty(rounds)
    for held, product in zip(own, products, strict=True):
        scale[held] = _of_record(product, squared_norm)
    return scale


def toeplitz_inner(coefficients: Floats, rounds: int) -> Inner:
    """Of a lower-triangular Toeplitz C with these coefficients, 0 beyond their end."""
    series = np.zeros(rounds)
    series[: len(coefficients)] = coefficients[:rounds]
    sums: dict[int, Floats] = {}

    def inner(held: NDArray[np.int64]) -> Floats:
        later, lag = np.maximum.outer(held, held), np.abs(np.subtract.outer(held, held))
        products = np.empty(lag.shape)
        for distance in np.unique(lag).tolist():
            if distance not in sums:
                sums[distance] = np.cumsum(series[: rounds - distance] * series[distance:])
            here = lag == distance
            products[here] = sums[distance][rounds - 1 - later[here]]
        return products

    return inner


def _of_record(inner: Floats, squared_norm: float) -> Floats:
    """1/D_i is proportional to Σ_j ⟨C_i, C_j⟩ D_j where Σ log D is the largest at one squared norm."""
    scale = np.ones(len(inner))
    for _ in range(_STEPS):
        following = np.sqrt(scale / (inner @ scale))
        settled = np.max(np.abs(following / scale - 1.0)) <= _SETTLED
        scale = following
        if settled:
            break
    return np.asarray(scale * np.sqrt(squared_norm / (scale @ inner @ scale)), np.float64)
