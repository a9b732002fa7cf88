"""Fit of the roots of a buffered Toeplitz mechanism to the points that a run publishes.

C = Π (1 - φ_i x) / Π (1 - θ_i x) is the strategy matrix as a power series in the delay x by one round, with m
pairs of roots (θ_i, φ_i).  A is the matrix of running sums with decay, and B = A C^-1.  The minimized function,
here for noise that is not scaled (`ScaledLoss` has the other one), is

    log J = log ‖C u‖² + log ‖R B‖²    R the rows of a `NoiseCost`, u clips of the worst record (`worst_record`)

Its gradient for a fixed u is exact: with c and b the first columns of C and B, ∂c/∂θ = x/(1 - θx) c and ∂b/∂θ =
-x/(1 - θx) b, and for φ the signs change.  Both norms are those of filtered signals, so every derivative is one
more filter.

The roots are functions of unbounded numbers v: with s = sigmoid(v) and ρ_j = Π_{l≤j} (1 - s_l) the roots θ = decay
(ρ_1, ρ_3, …) and φ = decay (ρ_2, ρ_4, …) interlace for every v, but for rounding (decay = 0 is fitted as 1).  The
fit is deterministic.
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
    """Return the record u whose ‖C u‖ fits take for the sensitivity, (T,).

    u has the record's clips in its rounds, and 0 elsewhere.  ‖C u‖ is the largest distance by which a record moves
    C s, for the sums s of records' clipped contributions.  In separated participations of several rounds each of
    u's clips is the largest of all rounds, so that with unequal clips ‖C u‖ is an upper bound.

    Args:
        coefficients: First column of C, (T,), ≥ 0 and never increasing.
        workload: Clips, and participations in a fixed order or separated ones.
    """
    schedule, clips = workload.schedule, workload.clips
    record = np.zeros(workload.rounds)
    if schedule.single_pass:
        worst = int(np.argmax(clips**2 * series.column_squared_norms(coefficients, workload.rounds)))
        record[worst] = clips[worst]
    elif isinstance(schedule, MinSeparation):
        # As early and as often as possible, with the largest clip in each of its rounds.
        record[:: schedule.min_separation] = np.max(clips)
        record[schedule.max_rounds_per_record * schedule.min_separation :] = 0.0
    else:
        first = 0  # with equal clips the record of round 1 moves C s farthest
        if not np.all(clips == clips[0]):
            first = int(np.argmax(series.record_squared_norms(coefficients, clips, schedule.rounds_per_epoch)))
        record[first :: schedule.rounds_per_epoch] = clips[first :: schedule.rounds_per_epoch]
    return record


@dataclass(frozen=True)
class RootLoss:
    """log J as a function of the roots θ_1, φ_1, θ_2, φ_2, … in falling order."""

    cost: NoiseCost
    """Weights R of the published points, with the workload."""

    @property
    def workload(self) -> Workload:
        return self.cost.workload

    @property
    def value_count(self) -> int:
        """Number of values of R, rows times rounds, on which the time of an evaluation depends."""
        return self.cost.weights.size

    @cached_property
    def increment_weights(self) -> Floats:
        """R A, (n, T), with the last round first, since noise enters a row backwards in time."""
        return filter_rational(self.cost.weights[:, ::-1], (), (self.workload.decay,))

    def evaluate(self, roots: Floats) -> tuple[float, Floats]:
        """Compute log J and its gradient (2m,) with respect to the roots (2m,)."""
        raise NotImplementedError


@dataclass(frozen=True)
class PlainLoss(RootLoss):
    """log J of noise without `column_scale`."""

    def evaluate(self, roots: Floats) -> tuple[float, Floats]:
        """Compute log ‖C u‖² + log ‖R B‖² and its gradient with respect to the roots, (2m,).

        C is applied to u as a filter, and C^-1 to `increment_weights` R A.  The derivative of a filtered signal by
        a root is the same signal, filtered once more by ±x / (1 - root x).

        Args:
            roots: θ_1, φ_1, θ_2, φ_2, …, θ_m, φ_m, (2m,).
        """
        theta, phi = roots[0::2].tolist(), roots[1::2].tolist()
        impulse = np.eye(1, self.workload.rounds)[0]
        # u is one of finitely many records, and so counts as constant in the gradient.
        column_signal = filter_rational(
            worst_record(filter_rational(impulse, phi, theta), self.workload), phi, theta
        )
        noise_signal = filter_rational(self.increment_weights, theta, phi)
        squared_norm, variance = (
            sum_products(column_signal, column_signal),
            sum_products(noise_signal, noise_signal),
        )
        gradient = np.empty(len(roots))
        for index, root in enumerate(roots):
            # Roots at odd indices are φ, for which the signs change.
            sign = 1.0 if index % 2 == 0 else -1.0
            norm_derivative = sum_products(column_signal, filter_delayed(column_signal, root)) / squared_norm
            gradient[index] = (
                2.0
                * sign
                * (norm_derivative - sum_products(noise_signal, filter_delayed(noise_signal, root)) / variance)
            )
        return float(np.log(squared_norm) + np.log(variance)), gradient

    def noise_energy(self, theta: series.Roots, phi: series.Roots) -> float:
        """Compute ‖R B‖², which is J of a mechanism of sensitivity 1.

        Args:
            theta: Poles θ of C.
            phi: Zeros φ of C, as many as poles.
        """
        return float(np.sum(filter_rational(self.increment_weights, theta, phi) ** 2))


@dataclass(frozen=True)
class ScaledLoss(RootLoss):
    """log J of noise with `column_scale`, for one pass with equal clips.

    The noise of increment t is divided by D_t = n_1 / n_t, where n_t is the norm of column t of C.  Then every
    column of C diag(D) has the norm n_1, which cancels in the product of sensitivity and noise:

        log J = log ‖clip · R A diag(n) C^-1‖²
    """

    def evaluate(self, roots: Floats) -> tuple[float, Floats]:
        """Compute log ‖clip · R A diag(n) C^-1‖² and its gradient with respect to the roots, (2m,).

        The gradient has two parts, since the roots are in C^-1 and in the column norms n.  With the signal
        s = clip · R A diag(n) C^-1, a root changes ‖s‖² by

            2 (Σ ∂‖s‖²/∂n² · d(n²/2) + Σ s · ds),

        where ds is the change of s by C^-1 alone.  C is a product of factors (1 - φ x) / (1 - θ x).  So a θ
        changes C by C x / (1 - θ x), and C^-1 by the same factor with a minus.  A φ has the other signs.

        Args:
            roots: θ_1, φ_1, θ_2, φ_2, …, θ_m, φ_m, (2m,).
        """
        theta, phi = roots[0::2].tolist(), roots[1::2].tolist()
        series = filter_rational(np.eye(1, self.workload.rounds)[0], phi, theta)
        norms = np.sqrt(np.cumsum(series**2))  # n, with the last round first as in `increment_weights`
        weights = self.increment_weights * self.workload.clips[0]
        noise_signal = filter_rational(weights * norms, theta, phi)
        variance = sum_products(noise_signal, noise_signal)
        # Derivative of the variance with respect to n², with C^-1 unchanged.
        norm_gradient = (
            np.sum(filter_rational(noise_signal[:, ::-1], theta, phi)[:, ::-1] * weights, axis=0) / norms
        )
        gradient = np.empty(len(roots))
        for index, root in enumerate(roots):
            sign = 1.0 if index % 2 == 0 else -1.0  # of a θ, or of a φ
            # Derivative of n² / 2 with respect to the root, but for the sign.
            norm_changes = np.cumsum(series * filter_delayed(series, root))
            gradient[index] = (
                2.0
                * sign
                * (
                    sum_products(norm_gradient, norm_changes)
                    - sum_products(noise_signal, filter_delayed(noise_signal, root))
                )
                / variance
            )
        return float(np.log(variance)), gradient


_LOSS_TOLERANCE = 1e-9
"""Increase of log J that is accepted for fewer or simpler roots."""

_ROUGH_TOLERANCE, _FINE_TOLERANCE = 1e-7, 1e-15
"""Changes of log J, relative to it or to 1, at which a descent ends.

The first one is for descents from every start, the second one for that from the best result.
"""
_MAX_POLISHED = 500_000
"""Most values of R, rows times rounds, for which a second descent is run, to save time."""

_GRID_POINTS = 12
"""Number of λ at which the search for the best λ starts."""
_MAX_LOGIT = 40.0
"""Bound of the absolute value of the numbers v."""


@dataclass(frozen=True)
class RootFit:
    """Roots of a fitted C, and their log J."""

    theta: series.Roots
    """Poles θ_1 > θ_2 > … of C."""
    phi: series.Roots
    """Zeros φ of C, as many as poles."""
    loss: float
    """log J."""


def fit_lambda(cost: NoiseCost) -> RootFit:
    """Fit the λ of λ-CGD, C = 1 / (1 - λx), to the least log J: θ = (λ,), φ = (0,).

    The search is over log(1 - λ / max), where max is the decay (1 for decay 0): on a grid from 1 - λ / max = 0.05
    / T to 0.95, and then around the best.  ‖R B‖² is a quadratic in λ, whose three coefficients are computed once,
    since B = A C^-1 = (1 - λx) / (1 - decay x) = 1 + (decay - λ) x / (1 - decay x).

    Args:
        cost: Cost of noise, whose J is minimized.
    """
    from scipy.optimize import minimize_scalar  # slow to import, and needed only for fits

    workload, max_root = cost.workload, _max_root(cost.workload)
    signal, delayed_signal = cost.weights[:, ::-1], filter_delayed(cost.weights[:, ::-1], workload.decay)
    signal_square, product, delayed_square = (
        sum_products(signal, signal),
        sum_products(signal, delayed_signal),
        sum_products(delayed_signal, delayed_signal),
    )

    def loss(log_gap: float) -> float:
        root = -max_root * math.expm1(log_gap)
        column_signal = filter_rational(worst_record(powers(root, workload.rounds), workload), (), (root,))
        gap = workload.decay - root
        return math.log(sum_products(column_signal, column_signal)) + math.log(
            signal_square + 2.0 * gap * product + gap**2 * delayed_square
        )

    grid = np.linspace(math.log(0.05 / workload.rounds), math.log(0.95), _GRID_POINTS)
    best_index = int(np.argmin([loss(log_gap) for log_gap in grid]))
    bounds = grid[max(0, best_index - 1)], grid[min(_GRID_POINTS - 1, best_index + 1)]
    minimum = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return RootFit((-max_root * math.expm1(minimum.x),), (0.0,), float(minimum.fun))


def fit_roots(loss: RootLoss, count: int, last_free: bool, around: series.Roots) -> RootFit:
    """Fit pairs of roots by minimizing log J with L-BFGS-B over the numbers v of the module.

    There are two starts, and the better result is refined by a second descent unless R is large.  In the end roots
    are simplified, so that the fit may have fewer pairs (`_simplify_roots`).

    Args:
        loss: log J as a function of the roots.
        count: Number m of pairs (θ_i, φ_i).
        last_free: Whether φ_m is fitted, else φ_m = 0.
        around: θ_1 of the second start, the λ of `fit_lambda`, as a tuple of one.
    """
    from scipy.optimize import OptimizeResult, minimize

    max_root = _max_root(loss.workload)

    # log J and its gradient with respect to v, by the chain rule through the products ρ.
    def evaluate(numbers: Floats) -> tuple[float, Floats]:
        ratios = np.exp(-np.logaddexp(0.0, numbers))  # 1 - s
        roots = np.asarray(max_root * np.cumprod(ratios), np.float64)
        value, gradient = loss.evaluate(roots if last_free else np.concatenate([roots, [0.0]]))
        return value, -(1.0 - ratios) * np.cumsum((gradient[: len(roots)] * roots)[::-1])[::-1]

    def descend(start: Floats, tolerance: float) -> OptimizeResult:
        return minimize(
            evaluate,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-_MAX_LOGIT, _MAX_LOGIT)] * len(start),
            options={"maxiter": 500, "maxfun": 1000, "ftol": tolerance, "gtol": 1e-9},
        )

    starts = _starting_points(loss.workload, count, last_free, around[0] / max_root)
    best = min((descend(start, _ROUGH_TOLERANCE) for start in starts), key=lambda result: float(result.fun))
    if loss.value_count <= _MAX_POLISHED:
        best = descend(best.x, _FINE_TOLERANCE)
    best_numbers = np.asarray(best.x, np.float64)
    roots = (max_root * np.cumprod(np.exp(-np.logaddexp(0.0, best_numbers)))).tolist()
    simple_roots, value = _simplify_roots(roots if last_free else [*roots, 0.0], loss)
    return RootFit(tuple(simple_roots[0::2]), tuple(simple_roots[1::2]), value)


def _starting_points(workload: Workload, count: int, last_free: bool, around: float) -> Iterator[Floats]:
    """Yield two starts v, (2m,), or (2m - 1,) if φ_m is not fitted.

    The first has roots at log-spaced distances below the largest allowed root.  The second has θ_1 at `around`,
    pairs (φ_i, θ_{i+1}) that nearly cancel, and φ_m near 0 if it is fitted.

    Args:
        workload: Participation, from which the smallest distance follows.
        count: Number m of pairs.
        last_free: Whether φ_m is fitted.
        around: θ_1 of the second start, relative to the largest allowed root.
    """
    root_count = 2 * count if last_free else 2 * count - 1
    schedule = workload.schedule
    spacing = schedule.min_separation if isinstance(schedule, MinSeparation) else schedule.rounds_per_epoch
    yield _unbounded_roots(1.0 - np.geomspace(0.6 / min(workload.rounds, spacing), 0.75, root_count))
    pairs = np.repeat(np.linspace(0.6, 0.2, count - 1), 2) * np.tile([1.0, 0.85], count - 1)
    yield _unbounded_roots(around * np.concatenate([[1.0], pairs, [0.02] * last_free]))


def _unbounded_roots(ratios: Floats) -> Floats:
    """Compute v for roots 1 > ρ_1 > ρ_2 > … > 0, relative to the largest allowed root."""
    quotients = ratios / np.concatenate([[1.0], ratios[:-1]])
    return np.asarray(np.log1p(-quotients) - np.log(quotients), np.float64)


def _simplify_roots(roots: list[float], loss: RootLoss) -> tuple[list[float], float]:
    """Remove pairs of roots that nearly cancel, and set φ_m = 0 or θ_1 to the largest allowed root.

    A change is made if it raises log J by at most 1e-9.

    Args:
        roots: θ_1, φ_1, θ_2, φ_2, …, falling.
        loss: log J as a function of these roots.

    Returns:
        The simpler roots in the same order, and their log J.
    """
    max_root = _max_root(loss.workload)
    while True:
        value, _ = loss.evaluate(np.array(roots))
        for candidate in _simpler_roots(roots, max_root):
            candidate_value, _ = loss.evaluate(np.array(candidate))
            if candidate_value <= value + _LOSS_TOLERANCE:
                roots = candidate
                break
        else:
            return roots, value


def _simpler_roots(roots: list[float], max_root: float) -> Iterator[list[float]]:
    """Yield simpler variants of the roots θ_1, φ_1, θ_2, …, one change at a time.

    A variant lacks two neighbours, unless these are all roots, or has φ_m = 0, or θ_1 = `max_root`, the largest
    allowed root.  If θ_1 = φ_1, which is no mechanism, a small θ_1 with φ_1 = 0 takes the place of φ_m = 0.
    """
    for index in range(len(roots) - 1 if len(roots) > 2 else 0):
        yield roots[:index] + roots[index + 2 :]
    if roots[-1]:
        # The small θ_1 is large enough not to be rounded to 0 on integers.
        yield [*roots[:-1], 0.0] if roots[0] > roots[1] else [2.5e-10, 0.0]
    if roots[0] != max_root:
        yield [max_root, *roots[1:]]


def _max_root(workload: Workload) -> float:
    return workload.decay if workload.decay > 0.0 else 1.0
