"""Privacy curves: upper bounds of δ as a function of ε, and what follows from them alone.

A `Curve` takes ε of any shape, each 0 or more, and returns for each an upper bound of the smallest δ for which
(ε, δ)-DP holds.  It never rises.  Where a function speaks of one direction, the curve bounds
H_ε(P‖Q) = sup_S P(S) - e^ε Q(S) for one ordered pair of distributions of releases; a guarantee needs both orders.

What a guarantee for one unit says about several at once: a person with k records, silos that share a person.

Fixed orders are exact: k units in one round and one direction move the release k times as far, k·μ.
**With secret participation there is no such rule in μ**: what holds is the chain through k neighbours,
δ_k(kε) ≤ Σ_{i<k} e^{iε} δ(ε), and k·μ for the μ of a run whose rounds everybody knows.

Sources: Dong, Roth & Su 2022, Theorem 2.14, for k·μ; Vadhan 2017, Lemma 2.2, for the chain.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfcx, log_ndtr, ndtr

from fedpriv.accounting.gaussian import check_delta, check_epsilon, check_mu, smallest_between, smallest_safe
from fedpriv.core.errors import InputError

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]

MIN_DELTA = 1e-10
"""Below it a bound from Fourier transforms in float64 is mostly its own rounding."""
MAX_EPSILON = 700.0
"""e^ε is a float up to here."""

_SPLIT_POINTS = 257  # of ε between the two halves of a chain: every split is a bound
_ROUNDING = 64.0 * np.finfo(np.float64).eps
_UNDERFLOW = 1e-300


def as_floats(values: ArrayLike) -> Floats:
    """`values` as an array of float64."""
    return np.asarray(values, np.float64)


def check_resolvable_delta(delta: float) -> float:
    """A δ that these bounds resolve; raises InputError below `LEAST_DELTA`."""
    if check_delta(delta) < MIN_DELTA:
        raise InputError(f"delta = {delta}: privacy of secret participation is computed down to {MIN_DELTA:g}")
    return delta


def delta_at(curve: Curve, epsilon: float) -> float:
    """The δ of `curve` at one ε ≥ 0, at most 1."""
    return min(1.0, float(curve(np.array([check_epsilon(epsilon)]))[0]))


def epsilon_at(curve: Curve, delta: float) -> float:
    """An ε at which `curve` is at most `delta`, and the smallest one up to rounding; inf where there is none.

    Guarantee: the ε returned was tried; `curve` never rises, so that it holds for every larger ε as well.
    """
    check_resolvable_delta(delta)
    if delta_at(curve, MAX_EPSILON) > delta:
        return float("inf")
    return smallest_safe(lambda epsilon: delta_at(curve, epsilon) <= delta, 1.0, tolerance=1e-12)


def lowest_curve(curves: Sequence[Curve]) -> Curve:
    """The smallest of several upper bounds of the same thing."""
    return lambda epsilons: as_floats(np.min([each(epsilons) for each in curves], axis=0))


def highest_curve(curves: Sequence[Curve]) -> Curve:
    """The largest of several curves: what holds for all directions, or for all units."""
    return lambda epsilons: as_floats(np.max([each(epsilons) for each in curves], axis=0))


def triangle_curve(first: Curve, second: Curve) -> Curve:
    """From P against R, and R against Q, to P against Q: min over ε₁ + ε₂ = ε of δ₁(ε₁) + e^ε₁ δ₂(ε₂).

    Guarantee: for every event S, P(S) ≤ e^ε₁ R(S) + δ₁ and R(S) ≤ e^ε₂ Q(S) + δ₂.  The minimum is over 257 splits,
    each of which is a bound.
    """

    def curve(epsilons: Floats) -> Floats:
        whole = np.minimum(np.asarray(epsilons, np.float64).ravel(), MAX_EPSILON)
        parts = np.linspace(0.0, 1.0, _SPLIT_POINTS)[:, None] * whole
        sums = first(parts) + np.exp(parts) * second(np.maximum(0.0, whole - parts) * (1.0 - _ROUNDING))
        return as_floats(np.min(sums, axis=0) * (1.0 + _ROUNDING)).reshape(np.shape(epsilons))

    return curve


def gaussian_curve(mu: float) -> Curve:
    """The curve of μ-GDP, rounded up."""
    check_mu(mu)
    return lambda epsilons: _gaussian_deltas(mu, epsilons, +1.0)


def lower_gaussian_curve(mu: float) -> Curve:
    """The curve of μ-GDP, rounded down: what other bounds are compared with."""
    check_mu(mu)
    return lambda epsilons: _gaussian_deltas(mu, epsilons, -1.0)


def _gaussian_deltas(mu: float, epsilons: Floats, side: float) -> Floats:
    """Φ(-a) - e^ε Φ(-b), with all that rounding can hide of it added or taken away."""
    values = np.asarray(epsilons, np.float64)
    if mu == 0.0:
        return np.zeros_like(values)
    a, b = values / mu - 0.5 * mu, values / mu + 0.5 * mu
    first, second = ndtr(-a), ndtr(-a) * _tail_ratio(a, b)
    hidden = _ROUNDING * (1.0 + np.abs(a) * b) * (first + second) + _UNDERFLOW
    return as_floats(np.clip(first - second + side * hidden, 0.0, 1.0))


def _tail_ratio(a: Floats, b: Floats) -> Floats:
    """e^ε Φ(-b) / Φ(-a) as a ratio of Mills ratios, since e^ε φ(b) = φ(a)."""
    half = np.sqrt(0.5)
    with np.errstate(over="ignore", invalid="ignore"):
        of_mills = erfcx(b * half) / erfcx(a * half)
    far = a < -5.0  # there erfcx(a/√2) overflows, and logarithms do not cancel
    epsilons = 0.5 * (b * b - a * a)
    return as_floats(np.where(far, np.exp(np.minimum(0.0, epsilons + log_ndtr(-b) - log_ndtr(-a))), of_mills))


_SEARCH_POINTS = 8192  # values of ε at which a chain is looked at
_MIN_SEARCHED = 1e-6


def check_group_size(size: int) -> int:
    """A group of 1 unit or more; raises InputError otherwise."""
    if size < 1:
        raise InputError(f"group of {size} units: a group has 1 or more")
    return size


def group_mu(mu: float, size: int) -> float:
    """The GDP parameter of `size` units of a run in fixed order that is μ-GDP for one: k·μ.

    Guarantee: it holds wherever the units take part, and for every mechanism; it is exact where they take part in
    the same rounds.
    """
    return _round_up(check_group_size(size) * check_mu(mu), size)


def group_privacy_curve(curve: Curve, size: int) -> Curve:
    """The curve of `size` units from that of one, for every kind of run: δ_k(ε) ≤ δ(ε/k) Σ_{i<k} e^{iε/k}.

    It rises again where e^{iε/k} outgrows what a curve resolves: `epsilon_of_chain` finds where it holds.

    Guarantee: neighbours are changed one unit at a time, k times.
    """
    check_group_size(size)
    if size == 1:
        return curve

    def of_group(epsilons: Floats) -> Floats:
        each = np.minimum(np.asarray(epsilons, np.float64), MAX_EPSILON) / size * (1.0 - 1e-15)
        factor = np.sum(np.exp(np.multiply.outer(np.arange(size), each)), axis=0) * (1.0 + 1e-12)
        with np.errstate(over="ignore", invalid="ignore"):
            return as_floats(np.minimum(1.0, curve(each) * factor))

    return of_group


def group_privacy_epsilon(curve: Curve, size: int, delta: float) -> float:
    """The smallest ε found at which the chain of `size` units is at most `delta`; inf where it never is.

    Guarantee: the ε returned was tried.  A true curve never rises, so that (ε, `delta`) holds for every larger ε
    as well, whether the chain rises again there or not.
    """
    check_resolvable_delta(delta)
    several = group_privacy_curve(curve, size)
    tried = np.append(0.0, np.geomspace(_MIN_SEARCHED, MAX_EPSILON, _SEARCH_POINTS))
    (holds,) = np.nonzero(several(tried) <= delta)
    if not len(holds):
        return math.inf
    if holds[0] == 0:
        return 0.0
    low, high = float(tried[holds[0] - 1]), float(tried[holds[0]])
    return smallest_between(lambda epsilon: delta_at(several, epsilon) <= delta, low, high, tolerance=1e-12)


def _round_up(value: float, size: int) -> float:
    return value if size == 1 else math.nextafter(value * (1.0 + 1e-15), math.inf)
