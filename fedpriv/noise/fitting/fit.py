"""Fitting the roots of a buffered Toeplitz mechanism to what a run publishes; deterministic.

The roots come from unbounded numbers v: with s = sigmoid(v) and ρ_j = Π_{l≤j} (1 - s_l) the roots θ = decay (ρ_1,
ρ_3, …) and φ = decay (ρ_2, ρ_4, …) interlace for every v (decay = 0 is fitted as 1).  What is made small is a
function of the roots, with its exact gradient:

    log J = log ‖C u‖² + log ‖R B‖²    R the rows of a `NoiseCost`, u the worst record: its clips in its own rounds

With x the delay, ∂c/∂θ = x/(1 - θx) c, ∂b/∂θ = -x/(1 - θx) b, and for φ the signs change.  Both norms are those of
filtered signals, so every derivative is one more filter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedpriv.noise import series
from fedpriv.noise.fitting.cost import NoiseCost, filter_delayed, filter_rational, sum_products
from fedpriv.noise.series import Floats, Workload, powers
from fedpriv.participation.orders import MinSeparation


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
    elif isinstance(schedule, MinSeparation):
        record[:: schedule.min_separation] = np.max(clips)
        record[schedule.max_rounds_per_record * schedule.min_separation :] = 0.0
    else:
        first = 0
        if not np.all(clips == clips[0]):
            first = int(np.argmax(series.record_squared_norms(coefficients, clips, schedule.rounds_per_epoch)))
        record[first :: schedule.rounds_per_epoch] = clips[first :: schedule.rounds_per_epoch]
    return record


@dataclass(frozen=True)
class RootLoss:
    """log J as a function of the roots θ_1, φ_1, θ_2, φ_2, … in falling order."""

    cost: NoiseCost

    @property
    def workload(self) -> Workload:
        return self.cost.workload

    @property
    def value_count(self) -> int:
        """Number of values that are filtered for one evaluation: rows times rounds."""
        return self.cost.weights.size

    @cached_property
    def increment_weights(self) -> Floats:
        """The rows times A, last round first: noise enters a row backwards in time."""
        return filter_rational(self.cost.weights[:, ::-1], (), (self.workload.decay,))

    def evaluate(self, roots: Floats) -> tuple[float, Floats]:
        """log J and its gradient by the roots."""
        raise NotImplementedError


@dataclass(frozen=True)
class PlainLoss(RootLoss):
    """Noise as it is, without `column_scale`."""

    def evaluate(self, roots: Floats) -> tuple[float, Floats]:
        theta, phi = roots[0::2].tolist(), roots[1::2].tolist()
        impulse = np.eye(1, self.workload.rounds)[0]
        moved = filter_rational(worst_record(filter_rational(impulse, phi, theta), self.workload), phi, theta)
        spread = filter_rational(self.increment_weights, theta, phi)
        squared_norm, variance = sum_products(moved, moved), sum_products(spread, spread)
        gradient = np.empty(len(roots))
        for place, root in enumerate(roots):
            sign = 1.0 if place % 2 == 0 else -1.0
            by_squared_norm = sum_products(moved, filter_delayed(moved, root)) / squared_norm
            gradient[place] = (
                2.0 * sign * (by_squared_norm - sum_products(spread, filter_delayed(spread, root)) / variance)
            )
        return float(np.log(squared_norm) + np.log(variance)), gradient

    def noise_energy(self, theta: series.Roots, phi: series.Roots) -> float:
        """‖R B‖²: J of a mechanism of sensitivity 1."""
        return float(np.sum(filter_rational(self.increment_weights, theta, phi) ** 2))


@dataclass(frozen=True)
class ScaledLoss(RootLoss):
    """Noise of increment t divided by D_t = ‖C_1‖ / ‖C_t‖; one pass with equal clips.

    Sensitivity and scale together leave the column norms n_t: log J = log ‖R A diag(n) C^-1‖², clips of 1.
    """

    def evaluate(self, roots: Floats) -> tuple[float, Floats]:
        theta, phi = roots[0::2].tolist(), roots[1::2].tolist()
        series = filter_rational(np.eye(1, self.workload.rounds)[0], phi, theta)
        norms = np.sqrt(np.cumsum(series**2))  # of the columns, last round first, as the rows are
        summed = self.increment_weights * self.workload.clips[0]
        spread = filter_rational(summed * norms, theta, phi)
        variance = sum_products(spread, spread)
        by_norms = np.sum(filter_rational(spread[:, ::-1], theta, phi)[:, ::-1] * summed, axis=0) / norms
        gradient = np.empty(len(roots))
        for place, root in enumerate(roots):
            sign = 1.0 if place % 2 == 0 else -1.0
            grown = np.cumsum(series * filter_delayed(series, root))
            gradient[place] = (
                2.0
                * sign
                * (sum_products(by_norms, grown) - sum_products(spread, filter_delayed(spread, root)))
                / variance
            )
        return float(np.log(variance)), gradient


_LOSS_TOLERANCE = 1e-9
"""In log J: what fewer numbers may cost.  Pairs of roots that cancel are left out so."""

_ROUGH_TOLERANCE, _FINE_TOLERANCE = 1e-7, 1e-15
"""Relative changes of log J at which a descent ends: from every start, and then from the best of them."""
_MAX_POLISHED = 500_000
"""Numbers in the rows beyond which the first is enough: a fit of 60,000 rounds would take minutes for nothing."""

_GRID_POINTS = 12
_MAX_LOGIT = 40.0


@dataclass(frozen=True)
class RootFit:
    """Roots, and the log J that a fit reached with them."""

    theta: series.Roots
    phi: series.Roots
    loss: float


def fit_lambda(cost: NoiseCost) -> RootFit:
    """The best λ of λ-CGD: θ = (λ,), φ = (0,).

    Its noise on row r is (R A)_r + (decay - λ) · (delayed sum), so that ‖R B‖² is a quadratic in λ.
    """
    from scipy.optimize import minimize_scalar  # slow to import: only fits pay for it

    workload, largest = cost.workload, _max_root(cost.workload)
    fresh, past = cost.weights[:, ::-1], filter_delayed(cost.weights[:, ::-1], workload.decay)
    own, mixed, carried = sum_products(fresh, fresh), sum_products(fresh, past), sum_products(past, past)

    def loss(log_gap: float) -> float:
        root = -largest * math.expm1(log_gap)
        moved = filter_rational(worst_record(powers(root, workload.rounds), workload), (), (root,))
        kept = workload.decay - root
        return math.log(sum_products(moved, moved)) + math.log(own + 2.0 * kept * mixed + kept**2 * carried)

    grid = np.linspace(math.log(0.05 / workload.rounds), math.log(0.95), _GRID_POINTS)
    best = int(np.argmin([loss(log_gap) for log_gap in grid]))
    bounds = grid[max(0, best - 1)], grid[min(_GRID_POINTS - 1, best + 1)]
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return RootFit((-largest * math.expm1(found.x),), (0.0,), float(found.fun))


def fit_roots(loss: RootLoss, count: int, last_free: bool, around: series.Roots) -> RootFit:
    """The best `count` pairs of roots that gradient descent finds; with `last_free` False φ_m = 0.

    It starts from log-spaced distances to `decay`, and from the single root `around` with pairs that nearly
    cancel. Pairs that do cancel in the end are left out, so that the fit may have fewer.
    """
    from scipy.optimize import minimize

    largest = _max_root(loss.workload)

    def of_numbers(numbers: Floats) -> tuple[float, Floats]:
        shrink = np.exp(-np.logaddexp(0.0, numbers))  # 1 - s
        roots = np.asarray(largest * np.cumprod(shrink), np.float64)
        value, gradient = loss.evaluate(roots if last_free else np.concatenate([roots, [0.0]]))
        return value, -(1.0 - shrink) * np.cumsum((gradient[: len(roots)] * roots)[::-1])[::-1]

    def descended(start: Floats, tolerance: float) -> tuple[float, Floats]:
        result = minimize(
            of_numbers,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-_MAX_LOGIT, _MAX_LOGIT)] * len(start),
            options={"maxiter": 500, "maxfun": 1000, "ftol": tolerance, "gtol": 1e-9},
        )
        return float(result.fun), np.asarray(result.x, np.float64)

    starts = _starting_points(loss.workload, count, last_free, around[0] / largest)
    _, found = min((descended(start, _ROUGH_TOLERANCE) for start in starts), key=lambda each: each[0])
    if loss.value_count <= _MAX_POLISHED:
        _, found = descended(found, _FINE_TOLERANCE)
    roots = (largest * np.cumprod(np.exp(-np.logaddexp(0.0, found)))).tolist()
    kept, value = _simplify_roots(roots if last_free else [*roots, 0.0], loss)
    return RootFit(tuple(kept[0::2]), tuple(kept[1::2]), value)


def _starting_points(workload: Workload, count: int, last_free: bool, around: float) -> Iterator[Floats]:
    size = 2 * count if last_free else 2 * count - 1
    schedule = workload.schedule
    reach = schedule.min_separation if isinstance(schedule, MinSeparation) else schedule.rounds_per_epoch
    yield _unbounded_roots(1.0 - np.geomspace(0.6 / min(workload.rounds, reach), 0.75, size))
    pairs = np.repeat(np.linspace(0.6, 0.2, count - 1), 2) * np.tile([1.0, 0.85], count - 1)
    yield _unbounded_roots(around * np.concatenate([[1.0], pairs, [0.02] * last_free]))


def _unbounded_roots(ratios: Floats) -> Floats:
    """v for falling roots below 1."""
    shrink = ratios / np.concatenate([[1.0], ratios[:-1]])
    return np.asarray(np.log1p(-shrink) - np.log(shrink), np.float64)


def _simplify_roots(roots: list[float], loss: RootLoss) -> tuple[list[float], float]:
    """Without neighbours that cancel, and with φ_m = 0 or θ_1 = decay where that is as good: less state."""
    largest = _max_root(loss.workload)
    while True:
        value, _ = loss.evaluate(np.array(roots))
        for simpler in _simpler_roots(roots, largest):
            found, _ = loss.evaluate(np.array(simpler))
            if found <= value + _LOSS_TOLERANCE:
                roots = simpler
                break
        else:
            return roots, value


def _simpler_roots(roots: list[float], largest: float) -> Iterator[list[float]]:
    for place in range(len(roots) - 1 if len(roots) > 2 else 0):
        yield roots[:place] + roots[place + 2 :]
    if roots[-1]:
        yield [*roots[:-1], 0.0]
    if roots[0] != largest:
        yield [largest, *roots[1:]]


def _max_root(workload: Workload) -> float:
    return workload.decay if workload.decay > 0.0 else 1.0
