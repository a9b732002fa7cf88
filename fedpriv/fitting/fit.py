"""Fitting the roots of a buffered Toeplitz mechanism to what a run publishes; deterministic.

The roots come from unbounded numbers v: with s = sigmoid(v) and ρ_j = Π_{l≤j} (1 - s_l) the roots
θ = decay (ρ_1, ρ_3, …) and φ = decay (ρ_2, ρ_4, …) interlace for every v (decay = 0 is fitted as 1).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from fedpriv.fitting.filters import delayed, dot, ratio
from fedpriv.fitting.loss import Loss
from fedpriv.fitting.objective import Objective
from fedpriv.fitting.worst import worst_record
from fedpriv.mechanisms import Separated, Workload
from fedpriv.mechanisms.roots import Roots
from fedpriv.mechanisms.workload import Floats, powers

_AS_GOOD = 1e-9
"""In log J: what fewer numbers may cost.  Pairs of roots that cancel are left out so."""

_ROUGH, _FINE = 1e-7, 1e-15
"""Relative changes of log J at which a descent ends: from every start, and then from the best of them."""
_MOST_POLISHED = 500_000
"""Numbers in the rows beyond which the first is enough: a fit of 60,000 rounds would take minutes for nothing."""

_GRID = 12
_WIDEST = 40.0


@dataclass(frozen=True)
class Fit:
    """Roots, and the log J that a fit reached with them."""

    theta: Roots
    phi: Roots
    loss: float


def fit_lambda(objective: Objective) -> Fit:
    """The best λ of λ-CGD: θ = (λ,), φ = (0,).

    Its noise on row r is (R A)_r + (decay - λ) · (delayed sum), so that ‖R B‖² is a quadratic in λ.
    """
    workload, largest = objective.workload, _largest(objective.workload)
    fresh, past = objective.rows[:, ::-1], delayed(objective.rows[:, ::-1], workload.decay)
    own, mixed, carried = dot(fresh, fresh), dot(fresh, past), dot(past, past)

    def loss(log_gap: float) -> float:
        root = -largest * math.expm1(log_gap)
        series = powers(root, workload.rounds)
        moved = ratio(worst_record(series, workload), (), (root,))
        kept = workload.decay - root
        return math.log(dot(moved, moved)) + math.log(own + 2.0 * kept * mixed + kept**2 * carried)

    grid = np.linspace(math.log(0.05 / workload.rounds), math.log(0.95), _GRID)
    best = int(np.argmin([loss(log_gap) for log_gap in grid]))
    bounds = grid[max(0, best - 1)], grid[min(_GRID - 1, best + 1)]
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return Fit((-largest * math.expm1(found.x),), (0.0,), float(found.fun))


def fit_roots(loss: Loss, count: int, last_free: bool, around: Roots) -> Fit:
    """The best `count` pairs of roots that gradient descent finds; with `last_free` False φ_m = 0.

    It starts from log-spaced distances to `decay`, and from the single root `around` with pairs that nearly
    cancel. Pairs that do cancel in the end are left out, so that the fit may have fewer.
    """
    largest = _largest(loss.workload)

    def of_numbers(numbers: Floats) -> tuple[float, Floats]:
        shrink = np.exp(-np.logaddexp(0.0, numbers))  # 1 - s
        roots = np.asarray(largest * np.cumprod(shrink), np.float64)
        value, gradient = loss.at(roots if last_free else np.concatenate([roots, [0.0]]))
        later = np.cumsum((gradient[: len(roots)] * roots)[::-1])[::-1]
        return value, -(1.0 - shrink) * later

    def descended(start: Floats, tolerance: float) -> tuple[float, Floats]:
        result = minimize(
            of_numbers,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-_WIDEST, _WIDEST)] * len(start),
            options={"maxiter": 500, "maxfun": 1000, "ftol": tolerance, "gtol": 1e-9},
        )
        return float(result.fun), np.asarray(result.x, np.float64)

    starts = _starts(loss.workload, count, last_free, around[0] / largest)
    _, found = min((descended(start, _ROUGH) for start in starts), key=lambda each: each[0])
    if loss.size <= _MOST_POLISHED:
        _, found = descended(found, _FINE)
    roots = (largest * np.cumprod(np.exp(-np.logaddexp(0.0, found)))).tolist()
    kept, value = _simplified(roots if last_free else [*roots, 0.0], loss)
    return Fit(tuple(kept[0::2]), tuple(kept[1::2]), value)


def _starts(workload: Workload, count: int, last_free: bool, around: float) -> Iterator[Floats]:
    size = 2 * count if last_free else 2 * count - 1
    schedule = workload.schedule
    reach = schedule.min_separation if isinstance(schedule, Separated) else schedule.rounds_per_epoch
    gaps = np.geomspace(0.6 / min(workload.rounds, reach), 0.75, size)
    yield _numbers(1.0 - gaps)
    pairs = np.repeat(np.linspace(0.6, 0.2, count - 1), 2) * np.tile([1.0, 0.85], count - 1)
    yield _numbers(around * np.concatenate([[1.0], pairs, [0.02] * last_free]))


def _numbers(ratios: Floats) -> Floats:
    """v for falling roots below 1."""
    shrink = ratios / np.concatenate([[1.0], ratios[:-1]])
    return np.asarray(np.log1p(-shrink) - np.log(shrink), np.float64)


def _simplified(roots: list[float], loss: Loss) -> tuple[list[float], float]:
    """Without neighbours that cancel, and with φ_m = 0 or θ_1 = decay where that is as good: less state."""
    largest = _largest(loss.workload)
    while True:
        value, _ = loss.at(np.array(roots))
        for simpler in _simpler(roots, largest):
            cost, _ = loss.at(np.array(simpler))
            if cost <= value + _AS_GOOD:
                roots = simpler
                break
        else:
            return roots, value


def _simpler(roots: list[float], largest: float) -> Iterator[list[float]]:
    for place in range(len(roots) - 1 if len(roots) > 2 else 0):
        yield roots[:place] + roots[place + 2 :]
    if roots[-1]:
        yield [*roots[:-1], 0.0]
    if roots[0] != largest:
        yield [largest, *roots[1:]]


def _largest(workload: Workload) -> float:
    return workload.decay if workload.decay > 0.0 else 1.0
