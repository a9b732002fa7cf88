"""The columns of C, and factors D_t that lengthen short ones: late clips that rise, or late noise that shrinks.

C diag(D) with clips s is C with clips s · D, so one D serves both: clip S · D_t at the same noise
(`late_clip = "column"`), or the noise of increment t divided by D_t (`BufferedToeplitz.column_scale`).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.mechanisms.sensitivity import series
from fedpriv.mechanisms.workload import Floats, Workload
from fedpriv.participation.fixed_order import Schedule

_STEPS = 1000
_SETTLED = 1e-12
_MOST_TIMES = 2000  # of one record: its inner products are the square of that

Inner = Callable[[NDArray[np.int64]], Floats]
"""⟨C_i, C_j⟩ ≥ 0 of some rounds, counted from 0: (n,) -> (n, n)."""


class Columns(NamedTuple):
    """What the certificates ask of C: squared column norms (T,), and inner products of columns."""

    squared_norms: Floats
    inner: Inner


def raised(columns: Columns, workload: Workload) -> Floats:
    """D_t by which the clips of `workload` can be multiplied at the same sensitivity; (T,).

    InputError where no such factors are known: sums that restart, participations in no fixed order, several passes
    with unequal clips.
    """
    if workload.period is not None:
        raise InputError('late_clip = "column": the sums restart, and no factors are known for them')
    if workload.order.single_pass:
        return column_scale(columns.squared_norms, workload)
    return fixed_order_scale(columns.inner, workload)


def column_scale(squared_norms: Floats, workload: Workload) -> Floats:
    """D for one participation of every record: all columns, times their clips, become as long as the longest.

    `squared_norms` are the squared column norms of C, (T,).  Every D_t is at least 1.

    Guarantee: the worst record costs what it cost without D, whatever the clips are.
    """
    if not workload.order.single_pass:
        raise InputError("column scale: records take part more than once; their scale is fixed_order_scale")
    squares = squared_norms if workload.equal_clips else workload.clips**2 * squared_norms
    return np.asarray(np.sqrt(np.max(squares) / squares), np.float64)


def fixed_order_scale(inner: Inner, workload: Workload) -> Floats:
    """D for several passes in a fixed order with equal clips: of every record the largest Π D_t; (T,).

    Some factors are below 1: late clips are not only raised, clips are redistributed over a record's rounds.

    Guarantee: every record costs what the worst one cost without D.
    """
    schedule, rounds = workload.schedule, workload.rounds
    if not isinstance(schedule, Schedule) or not workload.equal_clips:
        raise InputError("column scale: several passes need a fixed order and the same clip in every round")
    if rounds > _MOST_TIMES * schedule.rounds_per_epoch:
        raise InputError(f"column scale: records take part more than {_MOST_TIMES} times")
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


def toeplitz_columns(coefficients: Floats, workload: Workload) -> Columns:
    """Of a lower-triangular Toeplitz C with these coefficients, 0 beyond their end, restarted with the sums."""
    full, rest = divmod(workload.rounds, workload.block)
    of_full = series.column_squared_norms(coefficients[: workload.block], workload.block)
    of_rest = [series.column_squared_norms(coefficients[:rest], rest)] if rest else []
    squared_norms = np.concatenate([np.tile(of_full, full), *of_rest])
    return Columns(squared_norms, toeplitz_inner(coefficients, workload.rounds, workload.period))


def toeplitz_inner(coefficients: Floats, rounds: int, block: int | None = None) -> Inner:
    """Of a lower-triangular Toeplitz C with these coefficients, 0 beyond their end; `block` rounds per restart."""
    length = rounds if block is None else min(block, rounds)
    padded = np.zeros(length)
    padded[: len(coefficients)] = coefficients[:length]
    sums: dict[int, Floats] = {}

    def inner(held: NDArray[np.int64]) -> Floats:
        start = held // length * length
        last = np.minimum(start + length, rounds) - 1 - held  # rounds of the block that follow
        fewer, lag = np.minimum.outer(last, last).ravel(), np.abs(np.subtract.outer(held, held)).ravel()
        lag[np.not_equal.outer(start, start).ravel()] = length  # of two blocks: nothing in common
        products, order = np.zeros(lag.shape), np.argsort(lag, kind="stable")
        distances, firsts = np.unique(lag[order], return_index=True)
        for distance, here in zip(distances.tolist(), np.split(order, firsts[1:]), strict=True):
            if distance == length:
                break
            if distance not in sums:
                sums[distance] = np.cumsum(padded[: length - distance] * padded[distance:])
            products[here] = sums[distance][fewer[here]]
        return products.reshape(len(held), len(held))

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
