"""Privacy curves, upper bounds of δ as a function of ε, and group privacy.

A `Curve` takes an array of ε ≥ 0 and returns for each an upper bound of the smallest δ for which (ε, δ)-DP holds
(`lower_gaussian_curve` a lower one).  The smallest δ never rises with ε, but a bound of it may.  A curve of one
direction bounds H_ε(P‖Q) = sup_S P(S) - e^ε Q(S) for one ordered pair of distributions of releases.  A guarantee
needs both orders.  φ and Φ are the density and the distribution function of the standard normal distribution.

**Group privacy** is the guarantee for k units together, such as the records of one person, derived from that for
one unit.  It has two bounds: the chain through k neighbours, δ_k(kε) ≤ Σ_{i<k} e^{iε} δ(ε), and k·μ if the same
run with known rounds is μ-GDP.

Sources: Dong, Roth & Su 2022, Theorem 2.14, for k·μ; Vadhan 2017, Lemma 2.2, for the chain.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfcx, ndtr

from fedpriv.accounting.gaussian import check_delta, check_epsilon, check_mu, smallest_between, smallest_safe
from fedpriv.core.errors import InputError

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]

MIN_DELTA = 1e-10
"""Smallest δ for which bounds from Fourier transforms in float64 are more than their own rounding."""
MAX_EPSILON = 700.0
"""Largest ε for which e^ε is computed as a float."""

_SPLIT_POINTS = 257  # splits of ε between the two halves of a chain, each of which is a bound
_ROUNDING = 64.0 * np.finfo(np.float64).eps
_UNDERFLOW = 1e-300


def as_floats(values: ArrayLike) -> Floats:
    """Return `values` as an array of float64."""
    return np.asarray(values, np.float64)


def check_resolvable_delta(delta: float) -> float:
    """Return δ if bounds from Fourier transforms resolve it.

    Raises:
        InputError: δ is below `MIN_DELTA`, or 1 or more.
    """
    if check_delta(delta) < MIN_DELTA:
        raise InputError(f"delta = {delta}: privacy of secret participation is computed down to {MIN_DELTA:g}")
    return delta


def delta_at(curve: Curve, epsilon: float) -> float:
    """Return the δ of `curve` at one ε ≥ 0, at most 1.

    Args:
        curve: Privacy curve.
        epsilon: ε, finite and ≥ 0.

    Raises:
        InputError: ε is out of its range.

    Example:
        >>> round(delta_at(gaussian_curve(1.0), 1.0), 6)
        0.126937
    """
    return min(1.0, float(curve(np.array([check_epsilon(epsilon)]))[0]))


def epsilon_at(curve: Curve, delta: float) -> float:
    """Return the ε at which a falling curve comes down to `delta`, or infinity.

    Guarantee: at a finite returned ε `curve` was evaluated, and is at most `delta`.  The smallest δ never rises
    with ε, so that (ε', `delta`)-DP holds for every larger ε', too.

    Args:
        curve: Upper bound of the smallest δ.
        delta: δ, at least `MIN_DELTA` and below 1.

    Returns:
        ε, or infinity if the curve is above `delta` at `MAX_EPSILON`.

    Raises:
        InputError: δ is out of its range.

    Example:
        >>> round(epsilon_at(gaussian_curve(1.0), 1e-5), 4)
        4.3772
    """
    check_resolvable_delta(delta)
    if delta_at(curve, MAX_EPSILON) > delta:
        return float("inf")
    return smallest_safe(lambda epsilon: delta_at(curve, epsilon) <= delta, 1.0, tolerance=1e-12)


def lowest_curve(curves: Sequence[Curve]) -> Curve:
    """Return the pointwise minimum of curves, as the best of several upper bounds of one δ.

    Args:
        curves: One curve or more.

    Example:
        >>> round(delta_at(lowest_curve([gaussian_curve(1.0), gaussian_curve(2.0)]), 1.0), 6)
        0.126937
    """
    return lambda epsilons: as_floats(np.min([curve(epsilons) for curve in curves], axis=0))


def highest_curve(curves: Sequence[Curve]) -> Curve:
    """Return the pointwise maximum of curves, as an upper bound for all directions, or for all units.

    Args:
        curves: One curve or more.

    Example:
        >>> round(delta_at(highest_curve([gaussian_curve(1.0), gaussian_curve(2.0)]), 1.0), 6)
        0.509862
    """
    return lambda epsilons: as_floats(np.max([curve(epsilons) for curve in curves], axis=0))


def triangle_curve(first: Curve, second: Curve) -> Curve:
    """Return the curve of P against Q from those of P against R, and of R against Q.

    With δ₁ the curve `first` and δ₂ the curve `second`, the result at ε is the minimum of δ₁(ε₁) + e^ε₁ δ₂(ε₂)
    over 257 splits ε₁ + ε₂ = ε with ε₁, ε₂ ≥ 0, rounded up, and constant from `MAX_EPSILON` on.

    Guarantee: every split is a bound, as for every event S, P(S) ≤ e^ε₁ R(S) + δ₁(ε₁) and R(S) ≤ e^ε₂ Q(S) +
    δ₂(ε₂).

    Args:
        first: Curve of P against R.
        second: Curve of R against Q.
    """

    def curve(epsilons: Floats) -> Floats:
        # The smallest δ never rises with ε, so that the bound at `MAX_EPSILON` holds for larger ε, too.
        totals = np.minimum(np.asarray(epsilons, np.float64).ravel(), MAX_EPSILON)
        first_epsilons = np.linspace(0.0, 1.0, _SPLIT_POINTS)[:, None] * totals
        sums = first(first_epsilons) + np.exp(first_epsilons) * second(
            np.maximum(0.0, totals - first_epsilons) * (1.0 - _ROUNDING)
        )
        return as_floats(np.min(sums, axis=0) * (1.0 + _ROUNDING)).reshape(np.shape(epsilons))

    return curve


def gaussian_curve(mu: float) -> Curve:
    """Return the curve of μ-GDP, rounded up.

    Raises:
        InputError: μ is out of its range.

    Example:
        >>> gaussian_curve(1.0)(np.array([0.0, 1.0])).round(4).tolist()
        [0.3829, 0.1269]
    """
    check_mu(mu)
    return lambda epsilons: _gaussian_deltas(mu, epsilons, +1.0)


def lower_gaussian_curve(mu: float) -> Curve:
    """Return the curve of μ-GDP, rounded down, for comparison with upper bounds.

    Raises:
        InputError: μ is out of its range.
    """
    check_mu(mu)
    return lambda epsilons: _gaussian_deltas(mu, epsilons, -1.0)


def _gaussian_deltas(mu: float, epsilons: Floats, sign: float) -> Floats:
    """Return δ of μ-GDP at each ε ≥ 0, of any shape, rounded up or down.

    δ is Φ(-a) - e^ε Φ(-b) with a = ε/μ - μ/2 and b = ε/μ + μ/2.  `sign` is 1 to round up and -1 to round down.
    """
    values = np.asarray(epsilons, np.float64)
    if mu == 0.0:
        return np.zeros_like(values)
    with np.errstate(over="ignore"):
        # Far beyond ±40 the arguments decide nothing, and their squares have to be finite.
        a, b = (np.clip(values / mu + half * mu, -1e150, 1e150) for half in (-0.5, 0.5))
    first, second = ndtr(-a), ndtr(-a) * _tail_ratio(a, b)
    rounding_error = _ROUNDING * (1.0 + np.abs(a) * b) * (first + second) + _UNDERFLOW
    return as_floats(np.clip(first - second + sign * rounding_error, 0.0, 1.0))


def _tail_ratio(a: Floats, b: Floats) -> Floats:
    """Return e^ε Φ(-b) / Φ(-a) with ε = (b² - a²)/2, for arrays of one shape with b ≥ |a|.

    With a = ε/μ - μ/2 and b = ε/μ + μ/2, δ(ε) of μ-GDP is Φ(-a) times 1 less this ratio.  The ratio is the Mills
    ratio (1 - Φ)/φ at b over that at a, since e^ε φ(b) = φ(a).  So e^ε, which may overflow, is not computed.
    """
    half = np.sqrt(0.5)
    # erfcx(a/√2) overflows near a = -38: below -5 it is taken as 2 e^(a²/2) Φ(-a).
    near, far = np.maximum(a, -5.0), np.minimum(a, -5.0)
    inverse_at_a = np.where(a < -5.0, np.exp(-0.5 * far * far) / (2.0 * ndtr(-far)), 1.0 / erfcx(near * half))
    return as_floats(erfcx(b * half) * inverse_at_a)


_SEARCH_POINTS = 8192  # values of ε at which the curve of a group is evaluated
_MIN_SEARCHED = 1e-6


def check_group_size(size: int) -> int:
    """Return the size of a group if it is 1 or more.

    Raises:
        InputError: The size is below 1.
    """
    if size < 1:
        raise InputError(f"group of {size} units: a group has 1 or more")
    return size


def group_mu(mu: float, size: int) -> float:
    """Return the GDP parameter k·μ of k = `size` units, for a run in fixed order.

    Guarantee: if the run is μ-GDP for one unit, k·μ holds wherever the units take part, and for every mechanism.

    Args:
        mu: μ of one unit, finite and ≥ 0.
        size: Number k ≥ 1 of units.

    Returns:
        k·μ, rounded up, or infinity if it is too large for a float.

    Raises:
        InputError: μ or the size is out of its range.

    Example:
        >>> round(group_mu(0.5, size=3), 6)
        1.5
    """
    return _round_up(check_group_size(size) * check_mu(mu), size)


def group_privacy_curve(curve: Curve, size: int) -> Curve:
    """Return the bound of a group's δ from the curve of one unit: δ_k(ε) ≤ δ(ε/k) Σ_{i<k} e^{iε/k}.

    The bound may rise with ε.  For k > 1 it is at most 1, and constant from `MAX_EPSILON` on.

    Guarantee: neighbours are changed one unit at a time, k times, so that the bound holds for every kind of run.

    Args:
        curve: Curve of one unit.
        size: Number k ≥ 1 of units.

    Raises:
        InputError: The size is below 1.
    """
    check_group_size(size)
    if size == 1:
        return curve

    def of_group(epsilons: Floats) -> Floats:
        unit_epsilons = np.minimum(np.asarray(epsilons, np.float64), MAX_EPSILON) / size * (1.0 - 1e-15)
        with np.errstate(over="ignore", invalid="ignore"):
            # The geometric series Σ e^{iε/k}, which is k at 0.
            factor = np.where(
                unit_epsilons > 0.0, np.expm1(size * unit_epsilons) / np.expm1(unit_epsilons), float(size)
            )
            return as_floats(np.minimum(1.0, curve(unit_epsilons) * factor * (1.0 + 1e-12)))

    return of_group


def group_privacy_epsilon(curve: Curve, size: int, delta: float) -> float:
    """Return about the smallest ε at which the bound of `group_privacy_curve` is at most `delta`.

    The first such point of a grid from 0 to `MAX_EPSILON` is refined by a bisection.

    Guarantee: at a finite returned ε the bound was evaluated, and is at most `delta`.  The smallest δ never rises
    with ε, so that (ε', `delta`)-DP holds for every larger ε', too.

    Args:
        curve: Curve of one unit.
        size: Number of units in the group.
        delta: Target δ, at least `MIN_DELTA` and below 1.

    Returns:
        ε, or infinity if the bound is above `delta` at all points of the grid.

    Raises:
        InputError: δ or the size is out of its range.

    Example:
        >>> round(group_privacy_epsilon(gaussian_curve(0.5), size=2, delta=1e-5), 3)
        4.52
    """
    check_resolvable_delta(delta)
    curve_of_group = group_privacy_curve(curve, size)
    epsilons = np.append(0.0, np.geomspace(_MIN_SEARCHED, MAX_EPSILON, _SEARCH_POINTS))
    (holds,) = np.nonzero(curve_of_group(epsilons) <= delta)
    if not len(holds):
        return math.inf
    if holds[0] == 0:
        return 0.0
    low, high = float(epsilons[holds[0] - 1]), float(epsilons[holds[0]])
    return smallest_between(lambda epsilon: delta_at(curve_of_group, epsilon) <= delta, low, high, tolerance=1e-12)


def _round_up(value: float, size: int) -> float:
    return value if size == 1 else math.nextafter(value * (1.0 + 1e-15), math.inf)
