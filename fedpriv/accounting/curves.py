"""Privacy curves: upper bounds of δ as a function of ε, and what follows from them alone.

A `Curve` takes ε of any shape, each 0 or more, and returns for each an upper bound of the smallest δ for which
(ε, δ)-DP holds.  It never rises.  Where a function speaks of one direction, the curve bounds
H_ε(P‖Q) = sup_S P(S) - e^ε Q(S) for one ordered pair of distributions of releases; a guarantee needs both orders.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfcx, log_ndtr, ndtr

from fedpriv.accounting.bisection import smallest_safe
from fedpriv.accounting.checks import check_delta, check_epsilon, check_mu
from fedpriv.errors import InputError

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]

LEAST_DELTA = 1e-10
"""Below it a bound from Fourier transforms in float64 is mostly its own rounding."""
MOST_EPSILON = 700.0
"""e^ε is a float up to here."""

_SPLITS = 257  # of ε between the two halves of a chain: every split is a bound
_ROUNDING = 64.0 * np.finfo(np.float64).eps
_UNDERFLOW = 1e-300


def as_floats(values: ArrayLike) -> Floats:
    """`values` as an array of float64."""
    return np.asarray(values, np.float64)


def check_resolved(delta: float) -> float:
    """A δ that these bounds resolve; raises InputError below `LEAST_DELTA`."""
    if check_delta(delta) < LEAST_DELTA:
        raise InputError(f"delta = {delta}: privacy of secret participation is computed down to {LEAST_DELTA:g}")
    return delta


def delta_at(curve: Curve, epsilon: float) -> float:
    """The δ of `curve` at one ε ≥ 0, at most 1."""
    return min(1.0, float(curve(np.array([check_epsilon(epsilon)]))[0]))


def epsilon_at(curve: Curve, delta: float) -> float:
    """An ε at which `curve` is at most `delta`, and the smallest one up to rounding; inf where there is none.

    Guarantee: the ε returned was tried; `curve` never rises, so that it holds for every larger ε as well.
    """
    check_resolved(delta)
    if delta_at(curve, MOST_EPSILON) > delta:
        return float("inf")
    return smallest_safe(lambda epsilon: delta_at(curve, epsilon) <= delta, 1.0, tolerance=1e-12)


def lowest(curves: Sequence[Curve]) -> Curve:
    """The smallest of several upper bounds of the same thing."""

    def curve(epsilons: Floats) -> Floats:
        return as_floats(np.min([each(epsilons) for each in curves], axis=0))

    return curve


def highest(curves: Sequence[Curve]) -> Curve:
    """The largest of several curves: what holds for all directions, or for all units."""

    def curve(epsilons: Floats) -> Floats:
        return as_floats(np.max([each(epsilons) for each in curves], axis=0))

    return curve


def chained(first: Curve, second: Curve) -> Curve:
    """From P against R, and R against Q, to P against Q: min over ε₁ + ε₂ = ε of δ₁(ε₁) + e^ε₁ δ₂(ε₂).

    Guarantee: for every event S, P(S) ≤ e^ε₁ R(S) + δ₁ and R(S) ≤ e^ε₂ Q(S) + δ₂.  The minimum is over 257 splits,
    each of which is a bound.
    """

    def curve(epsilons: Floats) -> Floats:
        flat = np.asarray(epsilons, np.float64).ravel()
        whole = np.minimum(flat, MOST_EPSILON)
        parts = np.linspace(0.0, 1.0, _SPLITS)[:, None] * whole
        rests = np.maximum(0.0, whole - parts) * (1.0 - _ROUNDING)
        sums = first(parts) + np.exp(parts) * second(rests)
        return as_floats(np.min(sums, axis=0) * (1.0 + _ROUNDING)).reshape(np.shape(epsilons))

    return curve


def gaussian(mu: float) -> Curve:
    """The curve of μ-GDP, rounded up."""
    check_mu(mu)
    return lambda epsilons: _gaussian_deltas(mu, epsilons, +1.0)


def gaussian_from_below(mu: float) -> Curve:
    """The curve of μ-GDP, rounded down: what other bounds are compared with."""
    check_mu(mu)
    return lambda epsilons: _gaussian_deltas(mu, epsilons, -1.0)


def _gaussian_deltas(mu: float, epsilons: Floats, side: float) -> Floats:
    """Φ(-a) - e^ε Φ(-b), with all that rounding can hide of it added or taken away."""
    values = np.asarray(epsilons, np.float64)
    if mu == 0.0:
        return np.zeros_like(values)
    a, b = values / mu - 0.5 * mu, values / mu + 0.5 * mu
    first, second = ndtr(-a), ndtr(-a) * _ratio(a, b)
    hidden = _ROUNDING * (1.0 + np.abs(a) * b) * (first + second) + _UNDERFLOW
    return as_floats(np.clip(first - second + side * hidden, 0.0, 1.0))


def _ratio(a: Floats, b: Floats) -> Floats:
    """e^ε Φ(-b) / Φ(-a) as a ratio of Mills ratios, since e^ε φ(b) = φ(a)."""
    half = np.sqrt(0.5)
    with np.errstate(over="ignore", invalid="ignore"):
        of_mills = erfcx(b * half) / erfcx(a * half)
    far = a < -5.0  # there erfcx(a/√2) overflows, and logarithms do not cancel
    epsilons = 0.5 * (b * b - a * a)
    return as_floats(np.where(far, np.exp(np.minimum(0.0, epsilons + log_ndtr(-b) - log_ndtr(-a))), of_mills))
