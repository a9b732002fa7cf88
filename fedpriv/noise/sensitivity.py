"""Sensitivity: the most that one record can move C s, from the columns of C; exact wherever that is known.

Let u_i be a record's increments in the rounds S in which it takes part, ‖u_i‖ ≤ clip_i.  Then

    ‖Σ_{i∈S} u_i ⊗ C_i‖² = Σ_{i,j∈S} ⟨u_i, u_j⟩ ⟨C_i, C_j⟩ ≤ Σ_{i,j∈S} clip_i clip_j |⟨C_i, C_j⟩|

and every mechanism here has C ≥ 0, so that the bound is attained by increments of one direction: it is the exact
sensitivity, in any dimension, also when increments depend on earlier releases.  The squared norm of a record is
such a square.

For Toeplitz C with coefficients c_0 ≥ c_1 ≥ … ≥ 0, equal clips and any separated participation the earliest
pattern, rounds 1, 1 + separation, …, is the worst (Kalinin & Lampert 2024, Theorem 2; in a fixed order it is so
because a later start only cuts columns off).  Columns that do not overlap add their squares (Choquette-Choo et al.
2023).

With unequal clips, and for trees, the worst pattern is searched for.  With X_ij = clip_i clip_j ⟨C_i, C_j⟩ ≥ 0 a
record that takes part in the rounds S moves C s by at most

    √ Σ_{i∈S} Σ_{j∈S} X_ij ≤ √ max_S Σ_{i∈S} ρ_i,    ρ_i = max_S Σ_{j∈S} X_ij

where S runs over the allowed patterns: a heaviest pattern for each row, and one more over what they weigh.  The
search (`farthest_pattern`) fixes the last rounds of S one after another, the most promising first, and bounds what
the earlier ones can add in the same way; it ends where a whole pattern promises most, which is then the worst, or
after so many steps with the largest promise, a bound.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count, islice

import numpy as np

from fedpriv.noise import series
from fedpriv.noise.mechanism import Columns, InnerProducts, Sensitivity, toeplitz_columns
from fedpriv.noise.series import Floats, Workload
from fedpriv.participation.orders import MinSeparation


def record_squared_norms(workload: Workload, columns: Floats, within: Callable[[Floats, int], Floats]) -> Floats:
    """The squared norm of the record in each place of a fixed order, shape (rounds_per_epoch,).

    `columns` holds the squared norms of the columns of C, shape (T,).  `within(clips, rounds_per_epoch)` gives
    those of the first min(rounds_per_epoch, len(clips)) records of one period that starts with place 0; it is
    asked only where a record takes part more than once in a period.  Different periods have no column of C in
    common.
    """
    if isinstance(workload.public_order, MinSeparation):
        raise TypeError("a separated participation has no order")
    single = workload.clips**2 * columns
    if workload.public_order.single_pass:  # in phases too, whose empty rounds only add places nobody is in
        return single
    rounds_per_epoch = min(workload.public_order.rounds_per_epoch, workload.rounds)
    if rounds_per_epoch >= workload.rounds_per_period:
        by_place = np.bincount(np.arange(workload.rounds) % rounds_per_epoch, single, rounds_per_epoch)
        return np.asarray(by_place, np.float64)
    squared_norms = np.zeros(rounds_per_epoch)
    for start in range(0, workload.rounds, workload.rounds_per_period):
        of_period = within(workload.clips[start : start + workload.rounds_per_period], rounds_per_epoch)
        squared_norms[(start + np.arange(len(of_period))) % rounds_per_epoch] += of_period
    return squared_norms


def heaviest_pattern(weights: Floats, pattern: MinSeparation) -> float:
    """The largest sum of weights ≥ 0 over the rounds of one allowed pattern.

    Dynamic programming over the last round of the pattern; for weights that never increase the earliest pattern
    is the heaviest.
    """
    gap = pattern.min_separation
    if np.all(weights[1:] <= weights[:-1]):
        return float(np.sum(weights[::gap][: pattern.max_rounds_per_record]))
    best = np.zeros(len(weights) + 1)  # best[i]: the heaviest pattern within the first i rounds
    for _ in range(pattern.max_rounds_per_record):
        with_last = weights.copy()
        with_last[gap:] += best[1 : max(1, len(weights) - gap + 1)]
        better = np.maximum.accumulate(np.concatenate([[0.0], with_last]))
        if np.array_equal(better, best):
            break
        best = better
    return float(best[-1])


MAX_ROUNDS = 2000  # beyond, T² numbers are too much work for a few percent
_MAX_STEPS = 400  # of a search: a choice


def tighten_sensitivity(found: Sensitivity, inner: InnerProducts, workload: Workload) -> Sensitivity:
    """`found`, or what rows say where that is smaller: for a bound of separated participations.

    Guarantee: what is exact stays as it is, and a bound is replaced by a bound.
    """
    schedule = workload.schedule
    if found.exact or not isinstance(schedule, MinSeparation) or workload.rounds > MAX_ROUNDS:
        return found
    by_rows = sensitivity_from_rows(inner, workload, schedule)
    return by_rows if by_rows.exact or by_rows.value < found.value else found


def sensitivity_from_rows(inner: InnerProducts, workload: Workload, pattern: MinSeparation) -> Sensitivity:
    """The smaller of both bounds, in the units of C s, for the inner products of the columns of C ≥ 0.

    Guarantee: no pattern of `pattern`, no signs and no directions of increments move C s farther; where it says
    exact, a pattern moves it as far.
    """
    weights = inner(np.arange(workload.rounds)) * np.outer(workload.clips, workload.clips)
    searched, attained = farthest_pattern(weights, pattern)
    if attained:
        return Sensitivity(math.sqrt(searched), True, "the worst pattern, by search")
    by_rows = heaviest_pattern(heaviest_patterns(weights, pattern), pattern)
    words = "the heaviest pattern of every row, over the heaviest pattern"
    return Sensitivity(math.sqrt(min(searched, by_rows)), False, words)


def farthest_pattern(weights: Floats, pattern: MinSeparation) -> tuple[float, bool]:
    """An upper bound of Σ_{i,j∈S} X_ij over the allowed patterns S, and whether one attains it; X = `weights` ≥ 0.

    A step fixes the latest rounds of S, one more than the step that it follows.  An earlier round i with at most k
    rounds before it adds X_ii, twice X_ij for each j that is fixed, and at most twice the heaviest pattern of k
    rounds before it in its own row; the heaviest chain of such rounds is found by dynamic programming.

    Guarantee: what is left to be tried promises at least its worst pattern, and the largest promise is returned.
    """
    turned, gap, rounds = (
        weights[::-1, ::-1],
        pattern.min_separation,
        len(weights),
    )  # earlier rounds come later here
    own, tail = np.diag(turned), np.zeros(rounds + gap)
    alone = _single_round_bounds(np.triu(turned, gap), own, pattern)

    def promises(cross: Floats, left: int) -> Floats:
        """For each round, what it and at most `left` - 1 after it can add."""
        tail[:] = 0.0
        for after in range(left):
            found = cross + alone[min(after, len(alone) - 1)] + tail[gap:]
            tail[:rounds] = np.maximum.accumulate(found[::-1])[::-1]
        return np.asarray(found)

    number, reached = count(), 0.0
    waiting = list[tuple[float, int, int, float, Floats, int]]()
    start, value, cross, left = 0, 0.0, np.zeros(rounds), pattern.max_rounds_per_record
    for _ in range(_MAX_STEPS):
        promised = value + promises(cross, left)
        for each in start + np.flatnonzero(promised[start:] >= reached):
            heapq.heappush(waiting, (-float(promised[each]), next(number), int(each), value, cross, left))
        promise, _, chosen, value, cross, left = heapq.heappop(waiting)
        value, start, left = value + float(cross[chosen] + own[chosen]), chosen + gap, left - 1
        reached = max(reached, value)
        if not left or start >= rounds:
            return -promise, True
        cross = cross + 2.0 * turned[chosen]
    return -promise, False


def _single_round_bounds(later: Floats, own: Floats, pattern: MinSeparation) -> list[Floats]:
    """For 0, 1, … rounds after each one: its own weight, and twice the heaviest pattern of those (in `later`)."""
    found = [own]
    for heaviest in islice(_heaviest_by_count(later, pattern), pattern.max_rounds_per_record - 1):
        found.append(own + 2.0 * heaviest)
        if np.array_equal(found[-1], found[-2]):
            break
    return found


def heaviest_patterns(weights: Floats, pattern: MinSeparation) -> Floats:
    """`participation.heaviest_pattern` of every row of `weights` ≥ 0; (n, T) -> (n,)."""
    return list(_heaviest_by_count(weights, pattern))[-1]


def _heaviest_by_count(weights: Floats, pattern: MinSeparation) -> Iterator[Floats]:
    """Those of at most 1, 2, … rounds."""
    gap, (rows, rounds) = pattern.min_separation, weights.shape
    best = np.zeros((rows, rounds + 1))  # best[:, i]: the heaviest pattern within the first i rounds
    for _ in range(pattern.max_rounds_per_record):
        with_last = weights.copy()
        with_last[:, gap:] += best[:, 1 : max(1, rounds - gap + 1)]
        best[:, 1:] = np.maximum.accumulate(with_last, axis=1)
        yield best[:, -1].copy()


def of_columns(columns: Columns, workload: Workload) -> Sensitivity:
    """The worst record of any C ≥ 0 whose columns are known; T²/N products of them in an order of N places.

    Guarantee: exact in a single pass and in a fixed order, whatever the clips are; a bound for separated
    participations.
    """
    clips, order = workload.clips, workload.public_order
    if order.single_pass:
        worst = float(np.max(clips**2 * columns.squared_norms))
        return Sensitivity(math.sqrt(worst), True, "one participation: largest column norm")
    if isinstance(order, MinSeparation):
        return sensitivity_from_rows(columns.inner, workload, order)
    own = (np.arange(place, workload.rounds, order.rounds_per_epoch) for place in range(order.rounds_per_epoch))
    worst = max(float(clips[held] @ columns.inner(held) @ clips[held]) for held in own if len(held))
    return Sensitivity(math.sqrt(worst), True, "every record of the fixed order")


def sensitivity_from_series(workload: Workload, coefficients: Floats) -> Sensitivity:
    """`certified` for c_0 … up to the last that matters, at most `workload.block` of them."""

    def within(clips: Floats, rounds_per_epoch: int) -> Floats:
        return series.record_squared_norms(coefficients[: len(clips)], clips, rounds_per_epoch)

    return certify_toeplitz(workload, lambda: coefficients, toeplitz_columns(coefficients, workload), within)


def certify_toeplitz(
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
    if workload.public_order.single_pass:
        return Sensitivity(math.sqrt(float(np.max(squared_norms))), True, "one participation: largest column norm")
    if isinstance(workload.public_order, MinSeparation):
        found = _certify_separated(workload, workload.public_order, coefficients(), columns.squared_norms)
        return tighten_sensitivity(found, columns.inner, workload)
    if workload.period is None and workload.equal_clips:
        return _earliest_pattern(
            workload,
            coefficients(),
            columns.squared_norms,
            workload.public_order.rounds_per_epoch,
            workload.rounds,
        )
    worst = float(np.max(record_squared_norms(workload, columns.squared_norms, within)))
    return Sensitivity(math.sqrt(worst), True, "every record of the fixed order")


def _certify_separated(
    workload: Workload, pattern: MinSeparation, coefficients: Floats, columns: Floats
) -> Sensitivity:
    squared_norms = workload.clips**2 * columns
    if workload.period is None:
        earliest = _earliest_pattern(
            workload, coefficients, columns, pattern.min_separation, pattern.max_rounds_per_record
        )
        if workload.equal_clips:
            return earliest
        if len(coefficients) <= pattern.min_separation:
            worst = heaviest_pattern(squared_norms, pattern)
            return Sensitivity(math.sqrt(worst), True, "no two participations overlap: squares add up")
    triangle = heaviest_pattern(np.sqrt(squared_norms), pattern)
    if workload.period is None and earliest.value < triangle:
        return Sensitivity(earliest.value, False, "unequal clips, as if all were the largest")
    return Sensitivity(triangle, False, "triangle inequality over the heaviest pattern")


def _earliest_pattern(
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
