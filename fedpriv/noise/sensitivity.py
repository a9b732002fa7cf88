"""Sensitivity: the largest distance by which one record can move C s, from the columns of C.

s_t is the sum of the increments of round t = 1 … T, the clipped contributions of its records, and C_i, (T,), is
column i of the strategy matrix.  In a fixed order a record takes part in every `rounds_per_epoch`-th round from
its position on.  In a separated participation its rounds S are any pattern of at most `max_rounds_per_record`
rounds, at least `min_separation` apart.  For a record's increments u_i, i ∈ S, with ‖u_i‖ ≤ clip_i,

    ‖Σ_{i∈S} u_i ⊗ C_i‖² = Σ_{i,j∈S} ⟨u_i, u_j⟩ ⟨C_i, C_j⟩ ≤ Σ_{i,j∈S} clip_i clip_j |⟨C_i, C_j⟩|

For C ≥ 0 increments of one direction, as long as their clips, attain the bound, which is then the exact
sensitivity for S.  The squared norm of a record is the right-hand side for its S.

For Toeplitz C with coefficients c_0 ≥ c_1 ≥ … ≥ 0 and equal clips the earliest pattern, rounds 1, 1 + separation,
…, is the worst (Kalinin & Lampert 2024, Theorem 2).  Columns that do not overlap add their squares (Choquette-Choo
et al. 2023).  For other separated participations the worst pattern is searched for, or bounded.  Proof:
docs/proofs/sensitivity.md.
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


def record_squared_norms(
    workload: Workload, column_squares: Floats, compute_norms: Callable[[Floats, int], Floats]
) -> Floats:
    """Compute the squared norm of the record at each position of a fixed order.

    A record's squared norm is the square of the distance by which it can move C s.  C restarts with every period,
    so that columns of different periods are orthogonal, and squared norms of the periods add up.

    Args:
        workload: Clips, participation and period.
        column_squares: Squared norms of the columns of C, (T,).
        compute_norms: Function (clips, rounds_per_epoch) that returns the squared norms of the first
            min(rounds_per_epoch, len(clips)) records of one period that starts with position 0.

    Returns:
        A squared norm for each position of an epoch, (rounds_per_epoch,), or each round of a single pass, (T,).

    Raises:
        TypeError: The participation is separated, without an order.
        InputError: The participation is secret, or has fresh permutations.
    """
    if isinstance(workload.public_order, MinSeparation):
        raise TypeError("a separated participation has no order")
    single_squares = workload.clips**2 * column_squares
    if workload.public_order.single_pass:
        return single_squares
    rounds_per_epoch = min(workload.public_order.rounds_per_epoch, workload.rounds)
    # In this case no period has a record twice, so that no columns of a record overlap.
    if rounds_per_epoch >= workload.rounds_per_period:
        sums = np.bincount(np.arange(workload.rounds) % rounds_per_epoch, single_squares, rounds_per_epoch)
        return np.asarray(sums, np.float64)
    squared_norms = np.zeros(rounds_per_epoch)
    for start in range(0, workload.rounds, workload.rounds_per_period):
        period_norms = compute_norms(workload.clips[start : start + workload.rounds_per_period], rounds_per_epoch)
        squared_norms[(start + np.arange(len(period_norms))) % rounds_per_epoch] += period_norms
    return squared_norms


def heaviest_pattern(weights: Floats, pattern: MinSeparation) -> float:
    """Compute the largest sum of weights ≥ 0 over the rounds of one allowed pattern.

    An allowed pattern is a set of at most `max_rounds_per_record` rounds, at least `min_separation` apart.

    Args:
        weights: Weight of each round, ≥ 0, (T,).
        pattern: Allowed patterns.

    Example:
        >>> pattern = MinSeparation(rounds=4, max_participations=2, min_separation=2)
        >>> heaviest_pattern(np.array([1.0, 3.0, 2.0, 3.0]), pattern)
        6.0
    """
    gap = pattern.min_separation
    if np.all(weights[1:] <= weights[:-1]):  # the earliest pattern is the heaviest
        return float(np.sum(weights[::gap][: pattern.max_rounds_per_record]))
    best = np.zeros(len(weights) + 1)  # best[i]: weight of the heaviest pattern in the first i rounds
    for _ in range(pattern.max_rounds_per_record):
        with_last = weights.copy()  # with_last[i]: weight of the heaviest pattern that ends with round i
        with_last[gap:] += best[1 : max(1, len(weights) - gap + 1)]
        next_best = np.maximum.accumulate(np.concatenate([[0.0], with_last]))
        if np.array_equal(next_best, best):
            break
        best = next_best
    return float(best[-1])


MAX_ROUNDS = 2000
"""Most rounds T for which `tighten_sensitivity` searches, since a search takes T² numbers."""
_MAX_STEPS = 400
"""Most steps of a search."""


def tighten_sensitivity(sensitivity: Sensitivity, inner: InnerProducts, workload: Workload) -> Sensitivity:
    """Return a sensitivity, or a better one from a search over separated participations.

    There is no search for other participations, or for more than 2,000 rounds.

    Guarantee: an exact sensitivity is returned unchanged, and a bound is kept, or replaced by an exact sensitivity
    or a smaller bound.

    Args:
        sensitivity: Sensitivity, exact or a bound.
        inner: Inner products of the columns of C.
        workload: Clips and participation.
    """
    schedule = workload.schedule
    if sensitivity.exact or not isinstance(schedule, MinSeparation) or workload.rounds > MAX_ROUNDS:
        return sensitivity
    by_rows = sensitivity_from_rows(inner, workload, schedule)
    return by_rows if by_rows.exact or by_rows.value < sensitivity.value else sensitivity


def sensitivity_from_rows(inner: InnerProducts, workload: Workload, pattern: MinSeparation) -> Sensitivity:
    """Compute the sensitivity by a search, or the smaller of two bounds if the search is cut short.

    With X_ij = clip_i clip_j ⟨C_i, C_j⟩, a record with the rounds S moves C s by at most the root of Σ_{i,j∈S}
    X_ij.  `farthest_pattern` searches for the largest of these sums, or bounds it.  A second bound is the weight
    of the heaviest pattern for the weights ρ_i, where ρ_i is the weight of the heaviest pattern in row i of X.

    Guarantee: no pattern of `pattern`, no signs and no directions of increments move C s farther; where the result
    is exact, a pattern moves C s as far.

    Args:
        inner: Inner products of the columns of C ≥ 0.
        workload: Clips of the run.
        pattern: Allowed patterns.

    Returns:
        Sensitivity in the unit of the clips.
    """
    weights = inner(np.arange(workload.rounds)) * np.outer(workload.clips, workload.clips)
    search_bound, is_attained = farthest_pattern(weights, pattern)
    if is_attained:
        return Sensitivity(math.sqrt(search_bound), True, "the worst pattern, by search")
    by_rows = heaviest_pattern(heaviest_patterns(weights, pattern), pattern)
    reason = "a bound of the worst pattern, by a search that was cut short or by the heaviest patterns"
    return Sensitivity(math.sqrt(min(search_bound, by_rows)), False, reason)


def farthest_pattern(weights: Floats, pattern: MinSeparation) -> tuple[float, bool]:
    """Bound Σ_{i,j∈S} X_ij over the allowed patterns S, and return whether one attains the bound.

    The search is best-first branch and bound, of at most 400 steps.  A branch fixes the last few rounds of S, and
    has a bound of the sums that S can still have.  A step takes the branch with the largest bound and fixes one
    more round, before the others.  In the bound, a round that is not fixed counts its products with the fixed
    rounds exactly, and with other rounds by the heaviest pattern in its row of X.

    Guarantee: the bound of every branch that is not searched is at least its worst pattern, and the largest bound
    is returned.

    Args:
        weights: X_ij = clip_i clip_j ⟨C_i, C_j⟩ ≥ 0, (T, T).
        pattern: Allowed patterns.

    Returns:
        Bound of the squared distance, and whether a pattern attains it.
    """
    # Time is reversed: earlier rounds have higher indices.
    reversed_weights, gap, rounds = weights[::-1, ::-1], pattern.min_separation, len(weights)
    diagonal, tail = np.diag(reversed_weights), np.zeros(rounds + gap)
    single_bounds = _single_round_bounds(np.triu(reversed_weights, gap), diagonal, pattern)

    def bound_additions(cross: Floats, round_count: int) -> Floats:
        """Bound, for each round, the sum that it and at most `round_count` - 1 rounds after it can add, (T,).

        Rounds count in reversed time.  `cross`, (T,), is twice the sum of X_ij over the fixed rounds j.
        """
        tail[:] = 0.0  # tail[i]: bound of what rounds i, i + 1, … can add, with 0 beyond the end
        for rounds_after in range(round_count):
            totals = cross + single_bounds[min(rounds_after, len(single_bounds) - 1)] + tail[gap:]
            tail[:rounds] = np.maximum.accumulate(totals[::-1])[::-1]
        return np.asarray(totals)

    # An entry of the queue: minus the bound, a number, the branch's last fixed round, and of the rounds fixed
    # before it their sum `value`, `cross`, and the number of rounds that S may have after them.
    tie_breaker, best_value = count(), 0.0  # the heap orders equal bounds by a number, since arrays have no order
    queue = list[tuple[float, int, int, float, Floats, int]]()
    start, value, cross, rounds_left = 0, 0.0, np.zeros(rounds), pattern.max_rounds_per_record
    for _ in range(_MAX_STEPS):
        bounds = value + bound_additions(cross, rounds_left)
        for candidate in start + np.flatnonzero(bounds[start:] >= best_value):
            heapq.heappush(
                queue, (-float(bounds[candidate]), next(tie_breaker), int(candidate), value, cross, rounds_left)
            )
        negative_bound, _, last_round, value, cross, rounds_left = heapq.heappop(queue)
        value, start, rounds_left = (
            value + float(cross[last_round] + diagonal[last_round]),
            last_round + gap,
            rounds_left - 1,
        )
        best_value = max(best_value, value)
        if not rounds_left or start >= rounds:
            return -negative_bound, True  # S is complete, so that its bound is its sum
        cross = cross + 2.0 * reversed_weights[last_round]
    return -negative_bound, False


def _single_round_bounds(later_weights: Floats, diagonal: Floats, pattern: MinSeparation) -> list[Floats]:
    """Bound what round i adds to Σ_{i,j∈S} X_ij if at most 0, 1, … rounds of S come after it, (T,) each.

    Round i adds X_ii and, twice, X_ij for each round j of S after it.  The bound takes the rounds after it, among
    all that S may have, with the largest sum of X_ij.

    Args:
        later_weights: Weights X_ij of `farthest_pattern`, (T, T), with zeros where round j cannot come after round
            i.  Rounds are in reversed time there and here, so that "after" means earlier in the run.
        diagonal: Own weights X_ii, (T,).
        pattern: Allowed patterns.

    Returns:
        The bounds for 0, 1, … rounds after it, a list that ends early if more rounds change nothing.
    """
    bounds = [diagonal]
    for heaviest in islice(_heaviest_by_count(later_weights, pattern), pattern.max_rounds_per_record - 1):
        bounds.append(diagonal + 2.0 * heaviest)
        if np.array_equal(bounds[-1], bounds[-2]):
            break
    return bounds


def heaviest_patterns(weights: Floats, pattern: MinSeparation) -> Floats:
    """Compute the weight of the heaviest pattern in every row, as `heaviest_pattern`: (n, T) -> (n,).

    Args:
        weights: Weights of the rounds, ≥ 0, (n, T).
        pattern: Allowed patterns.
    """
    return list(_heaviest_by_count(weights, pattern))[-1]


def _heaviest_by_count(weights: Floats, pattern: MinSeparation) -> Iterator[Floats]:
    """Yield the weights of every row's heaviest pattern of at most 1, 2, … rounds: (n, T) -> (n,) each.

    The last yield is for `max_rounds_per_record` rounds.  best_k[i], the largest weight of at most k of the first
    i rounds, is max(best_k[i-1], weight_i + best_{k-1}[i - min_separation]).

    Args:
        weights: Weights of the rounds, ≥ 0, (n, T).
        pattern: Allowed patterns.
    """
    gap, (rows, rounds) = pattern.min_separation, weights.shape
    best = np.zeros((rows, rounds + 1))  # best[:, i]: weight of the heaviest pattern in the first i rounds
    for _ in range(pattern.max_rounds_per_record):
        with_last = weights.copy()
        with_last[:, gap:] += best[:, 1 : max(1, rounds - gap + 1)]
        best[:, 1:] = np.maximum.accumulate(with_last, axis=1)
        yield best[:, -1].copy()


def of_columns(columns: Columns, workload: Workload) -> Sensitivity:
    """Compute the sensitivity of any C ≥ 0 whose columns are known.

    In a single pass this is the largest product of a column's norm and its clip, rounds without records included.
    In a fixed order every record is tried.  In separated participations the worst pattern is searched for
    (`sensitivity_from_rows`).

    Guarantee: exact in a single pass whose rounds all read records, and in a fixed order, whatever the clips are;
    a bound for separated participations, which is exact where the search ends at a pattern.

    Args:
        columns: Columns of C.
        workload: Clips and participation.

    Raises:
        InputError: The participation is secret, or has fresh permutations.
    """
    clips, order = workload.clips, workload.public_order
    if order.single_pass:
        worst_square = float(np.max(clips**2 * columns.squared_norms))
        return Sensitivity(math.sqrt(worst_square), True, "one participation: largest column norm")
    if isinstance(order, MinSeparation):
        return sensitivity_from_rows(columns.inner, workload, order)
    record_rounds = (
        np.arange(position, workload.rounds, order.rounds_per_epoch) for position in range(order.rounds_per_epoch)
    )
    worst_square = max(
        float(clips[rounds] @ columns.inner(rounds) @ clips[rounds]) for rounds in record_rounds if len(rounds)
    )
    return Sensitivity(math.sqrt(worst_square), True, "every record of the fixed order")


def sensitivity_from_series(workload: Workload, coefficients: Floats) -> Sensitivity:
    """Compute the certified sensitivity of a Toeplitz C with c_0 ≥ c_1 ≥ … ≥ 0.

    With a period, C restarts with the sums, and is Toeplitz within each period.

    Args:
        workload: Clips, participation and period.
        coefficients: c_0, c_1, …, at most `workload.rounds_per_period` of them, with zeros beyond their end.

    Raises:
        InputError: The participation is secret, or has fresh permutations.
    """

    def compute_norms(clips: Floats, rounds_per_epoch: int) -> Floats:
        return series.record_squared_norms(coefficients[: len(clips)], clips, rounds_per_epoch)

    return certify_toeplitz(
        workload, lambda: coefficients, toeplitz_columns(coefficients, workload), compute_norms
    )


def certify_toeplitz(
    workload: Workload,
    coefficients: Callable[[], Floats],
    columns: Columns,
    compute_norms: Callable[[Floats, int], Floats],
) -> Sensitivity:
    """Compute the sensitivity of a Toeplitz C with coefficients ≥ 0 that never increase.

    With a period, C restarts with the sums, and is Toeplitz within each period.  The result is exact in a single
    pass whose rounds all read records, and in a fixed order.  For separated participations it is exact in some
    cases, and otherwise the smallest of some bounds.

    Args:
        workload: Clips, participation and period.
        coefficients: Function that returns c_0, c_1, …, at most T of them, with zeros beyond their end.
        columns: Columns of C.
        compute_norms: Function (clips, rounds_per_epoch) that returns the squared norms of the records of a fixed
            order in one period.

    Raises:
        InputError: The participation is secret, or has fresh permutations.
    """
    squared_norms = workload.clips**2 * columns.squared_norms
    if workload.public_order.single_pass:
        return Sensitivity(math.sqrt(float(np.max(squared_norms))), True, "one participation: largest column norm")
    if isinstance(workload.public_order, MinSeparation):
        bound = _certify_separated(workload, workload.public_order, coefficients(), columns.squared_norms)
        return tighten_sensitivity(bound, columns.inner, workload)
    if workload.period is None and workload.equal_clips:
        return _earliest_pattern(
            workload,
            coefficients(),
            columns.squared_norms,
            workload.public_order.rounds_per_epoch,
            workload.rounds,
        )
    worst_square = float(np.max(record_squared_norms(workload, columns.squared_norms, compute_norms)))
    return Sensitivity(math.sqrt(worst_square), True, "every record of the fixed order")


def _certify_separated(
    workload: Workload, pattern: MinSeparation, coefficients: Floats, column_squares: Floats
) -> Sensitivity:
    """Compute the sensitivity of separated participations under a Toeplitz C, or a bound.

    C has coefficients ≥ 0 that never increase.  If the workload has no period, the result is exact for equal
    clips, and for at most `min_separation` coefficients, with which no two columns of a pattern overlap.
    Otherwise it is a bound.

    Args:
        workload: Clips and period.
        pattern: Allowed patterns.
        coefficients: First column of C, with zeros beyond its end.
        column_squares: Squared norms of the columns of C, (T,).
    """
    squared_norms = workload.clips**2 * column_squares
    if workload.period is None:
        earliest = _earliest_pattern(
            workload, coefficients, column_squares, pattern.min_separation, pattern.max_rounds_per_record
        )
        if workload.equal_clips:
            return earliest
        if len(coefficients) <= pattern.min_separation:
            worst_square = heaviest_pattern(squared_norms, pattern)
            return Sensitivity(math.sqrt(worst_square), True, "no two participations overlap: squares add up")
    # By the triangle inequality a pattern moves C s by at most the sum of clip · ‖column‖ over its rounds.
    triangle = heaviest_pattern(np.sqrt(squared_norms), pattern)
    if workload.period is None and earliest.value < triangle:
        return Sensitivity(earliest.value, False, "unequal clips, as if all were the largest")
    return Sensitivity(triangle, False, "triangle inequality over the heaviest pattern")


def _earliest_pattern(
    workload: Workload, coefficients: Floats, column_squares: Floats, gap: int, max_participations: int
) -> Sensitivity:
    """Compute the sensitivity for rounds 1, 1 + gap, …, with the workload's largest clip in each.

    The sensitivity is clip · ‖Σ_k C_{1 + k gap}‖ over at most `max_participations` rounds.  For equal clips and
    sums that never restart it is the exact sensitivity.

    Args:
        workload: Rounds and clips.
        coefficients: First column of C, with zeros beyond its end, which never increases.
        column_squares: Squared norms of the columns of C, (T,).
        gap: Rounds between two participations.
        max_participations: Most rounds of the pattern.
    """
    rounds = workload.rounds
    if len(coefficients) <= gap:
        norm = math.sqrt(float(np.sum(column_squares[::gap][:max_participations])))
    else:
        # Row k of these arrays, (participations, gap), has the `gap` rounds from the k-th participation on.
        participations = -(-rounds // gap)
        shifted = np.zeros((participations, gap))
        shifted.ravel()[: len(coefficients)] = coefficients
        displacements = np.cumsum(shifted, axis=0)
        if max_participations < participations:
            displacements[max_participations:] -= displacements[:-max_participations].copy()
        norm = float(np.linalg.norm(displacements.ravel()[:rounds]))
    return Sensitivity(float(np.max(workload.clips)) * norm, True, "equal clips: the earliest pattern")
