"""μ-Gaussian differential privacy with its exact (ε, δ), safe inversion, and neighbouring relations.

The smallest δ for which μ-GDP implies (ε, δ)-DP is, by Dong, Roth & Su 2022, "Gaussian differential privacy",
Corollary 2.13, and Balle & Wang 2018, Theorem 8,

    δ(ε) = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2)

φ and Φ are the density and the distribution function of N(0, 1).  Neighbours differ in one unit, such as a record:
under `zero-out` its contributions are 0 in one of them, and under `replace-one` it is exchanged for another unit.
A composition of Gaussian mechanisms, adaptive or not, is exactly √(Σ μ_i²)-GDP (Dong, Roth & Su 2022, Corollary
3.3).

The conversions `delta_of`, `epsilon_of` and `mu_of` are rounded to the safe side: δ and ε up, and μ down.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erfcx, ndtr

from fedpriv.core.errors import InputError

_OVERFLOW_MESSAGE = "privacy: what is asked for is too large for floating point"


def largest_safe(safe: Callable[[float], bool], low: float) -> float:
    """Return about the largest float > 0 for which `safe` holds, by bisection.

    `low` is doubled until `safe` fails, and the last interval is bisected.  The returned value satisfies `safe`.
    Beyond half of the largest float the result is the last doubling.

    Args:
        safe: Condition that holds at `low` and fails for all far larger values.
        low: Value > 0 at which `safe` holds.

    Raises:
        InputError: `safe` holds at all values that are tried, up to infinity.

    Example:
        >>> round(largest_safe(lambda value: value**2 <= 2.0, low=1.0), 6)
        1.414214
    """
    high = 2.0 * low
    while safe(high):
        if not math.isfinite(high):
            raise InputError(_OVERFLOW_MESSAGE)
        low, high = high, 2.0 * high
    while low < (middle := _midpoint(low, high)) < high:
        low, high = (middle, high) if safe(middle) else (low, middle)
    return low


def smallest_safe(safe: Callable[[float], bool], high: float, tolerance: float = 0.0) -> float:
    """Return about the smallest float ≥ 0 for which `safe` holds, by bisection.

    `high` is doubled until `safe` holds, and the last interval is bisected.  The returned value satisfies `safe`.

    Args:
        safe: Condition that holds for all far larger values.
        high: First value > 0 to try after 0.
        tolerance: Relative width of the interval at which the bisection ends.  With 0 it is as narrow as floats
            allow.  A result of 1e-300 or less may be far above the smallest such float, and beyond half of the
            largest float it is infinity.

    Raises:
        InputError: `safe` fails at all values that are tried, up to infinity.

    Example:
        >>> round(smallest_safe(lambda value: value**2 >= 2.0, high=1.0), 6)
        1.414214
    """
    if safe(0.0):
        return 0.0
    low = 0.0
    while not safe(high):
        if not math.isfinite(high):
            raise InputError(_OVERFLOW_MESSAGE)
        low, high = high, 2.0 * high
    return smallest_between(safe, low, high, tolerance)


def smallest_safe_near(safe: Callable[[float], bool], start: float, factor: float, tolerance: float) -> float:
    """Return about the smallest float > 0 for which `safe` holds, with few calls of `safe`.

    Steps by `factor` away from `start` find an interval in which the condition changes.  A bisection narrows it.

    Args:
        safe: Condition that fails for all far smaller values > 0, and holds for all far larger ones.
        start: First value > 0 to try.
        factor: Factor > 1 of the steps away from `start`, until the condition changes.
        tolerance: Relative width of the interval at which the bisection ends.
    """
    low = high = start
    while not safe(high):
        low, high = high, factor * high
    # If `safe` holds at `start`, go down until it fails.
    while low == high or (low < start and safe(low)):
        low, high = low / factor, low
    return smallest_between(safe, low, high, tolerance)


def smallest_between(safe: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """Return a number in (`low`, `high`] for which `safe` holds, by bisection.

    If `safe` is not monotone, the result may be one of several edges.  It always satisfies `safe`.

    Args:
        safe: Condition that fails at `low` and holds at `high`.
        low: Lower end, below `high`.
        high: Upper end.
        tolerance: Relative width of the interval at which the bisection ends.  With a `low` of 0 it ends at a
            `high` of about 1e-300, too.
    """
    while high > low * (1.0 + tolerance) and low < (middle := _midpoint(low, high)) < high:
        low, high = (low, middle) if safe(middle) else (middle, high)
    return high


def _midpoint(low: float, high: float) -> float:
    """Return the arithmetic mean of numbers within a factor of 2, else the geometric mean.

    The geometric mean takes a `low` below 1e-300 as 1e-300.
    """
    if low == 0.0 or high > 2.0 * low:
        return math.sqrt(max(low, _MIN_POSITIVE)) * math.sqrt(high)
    return low + 0.5 * (high - low)


_MIN_POSITIVE = 1e-300


def check_mu(mu: float) -> float:
    """Return μ if it is finite and ≥ 0, where 0 means that no release depends on the data.

    Raises:
        InputError: μ is out of this range.
    """
    if not (math.isfinite(mu) and mu >= 0.0):
        raise InputError(f"mu = {mu}: the Gaussian-DP parameter is a finite number, 0 or more")
    return mu


def check_epsilon(epsilon: float) -> float:
    """Return ε if it is finite and ≥ 0.

    Raises:
        InputError: ε is out of this range.
    """
    if not (math.isfinite(epsilon) and epsilon >= 0.0):
        raise InputError(f"epsilon = {epsilon}: it is a finite number, 0 or more")
    return epsilon


def check_delta(delta: float) -> float:
    """Return δ if 0 < δ < 1.

    Raises:
        InputError: δ is out of this range.
    """
    if not 0.0 < delta < 1.0:
        raise InputError(f"delta = {delta}: it is a probability strictly between 0 and 1, e.g. 1e-5")
    return delta


def check_positive(name: str, value: float) -> float:
    """Return the value if it is finite and above 0.

    Args:
        name: Name of the value, for the message.
        value: Value to check.

    Raises:
        InputError: The value is out of this range.  The message begins with `name`.
    """
    if not (math.isfinite(value) and value > 0.0):
        raise InputError(f"{name} = {value}: it must be a finite number above 0")
    return value


_ROUNDING = 8.0 * np.finfo(np.float64).eps  # a few units in the last place, for erfcx, ndtr and their arguments
_MU_MARGIN = 1e-11  # two evaluations of δ(ε) may disagree in their last bits
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_MIN_DELTA = math.ulp(0.0)


def delta_of(mu: float, epsilon: float) -> float:
    """Return the smallest δ for which μ-GDP implies (ε, δ)-DP, at least the smallest float for μ > 0.

    Args:
        mu: μ, finite and ≥ 0.
        epsilon: ε, finite and ≥ 0.

    Returns:
        δ in [0, 1], rounded up, which is 0 for μ = 0.

    Raises:
        InputError: μ or ε is out of its range.

    Example:
        >>> float(round(delta_of(mu=1.0, epsilon=1.0), 6))
        0.126937
    """
    if check_mu(mu) == 0.0:
        check_epsilon(epsilon)
        return 0.0
    # The smallest float covers the rounding of a δ that has few digits.  It changes no δ above 1e-307.
    return min(1.0, math.exp(_log_delta(mu, check_epsilon(epsilon))) * (1.0 + _ROUNDING) + _MIN_DELTA)


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest ε ≥ 0 for which μ-GDP implies (ε, δ)-DP.

    The inverse of `delta_of` in ε.

    Args:
        mu: μ, finite and ≥ 0.
        delta: δ, strictly between 0 and 1.

    Returns:
        ε, rounded up, which is 0 for μ = 0, and infinity if ε is too large for a float.

    Raises:
        InputError: μ or δ is out of its range.

    Example:
        >>> round(epsilon_of(mu=1.0, delta=1e-5), 4)
        4.3772
    """
    log_delta = math.log(check_delta(delta))
    if check_mu(mu) == 0.0:
        return 0.0
    return smallest_safe(lambda epsilon: _log_delta(mu, epsilon) <= log_delta, high=mu)


@lru_cache(maxsize=1024, typed=True)
def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest μ for which μ-GDP implies (ε, δ)-DP, less a relative 1e-11.

    Guarantee: for ε of 1e-3 or more, `epsilon_of` this μ, or of one a little smaller, is at most ε.

    Args:
        epsilon: ε ≥ 0, with a finite 2ε.
        delta: δ, strictly between 0 and 1.

    Returns:
        μ > 0, rounded down.

    Raises:
        InputError: ε or δ is out of its range.

    Example:
        >>> round(mu_of(epsilon=1.0, delta=1e-5), 4)
        0.2681
    """
    log_delta, epsilon = math.log(check_delta(delta)), check_epsilon(epsilon)
    # Two safe values to start from: zCDP's conversion, and total variation δ(0) ≤ μ/√(2π).
    tail = math.sqrt(-2.0 * log_delta)
    start = max(2.0 * epsilon / (math.sqrt(tail**2 + 2.0 * epsilon) + tail), delta)
    return largest_safe(lambda mu: _log_delta(mu, epsilon) <= log_delta, low=start) * (1.0 - _MU_MARGIN)


def compose(mus: ArrayLike) -> float:
    """Return the GDP parameter √(Σ μ_i²) of releases together that are μ_i-GDP each.

    Args:
        mus: μ of every release, finite and ≥ 0, in any shape.

    Returns:
        √(Σ μ_i²) up to one rounding, or infinity if it is too large for a float.

    Raises:
        InputError: A μ_i is negative or not finite.

    Example:
        >>> compose([3.0, 4.0])
        5.0
    """
    values = np.asarray(mus, np.float64)
    if not np.all(np.isfinite(values) & (values >= 0.0)):
        raise InputError("mu of every release must be a finite number, 0 or more")
    return math.hypot(*values.ravel().tolist())


def noise_for(mu: float, sensitivity: float) -> float:
    """Return the noise std for which releases of total l2 sensitivity `sensitivity` are μ-GDP.

    The result is `sensitivity` / μ up to rounding.  In floating point `sensitivity` divided by it is at most μ.

    Args:
        mu: μ > 0.
        sensitivity: l2 distance by which neighbours move all releases together, above 0.

    Returns:
        Standard deviation of every coordinate, in the unit of `sensitivity`, infinity if it is too large for a
        float.

    Raises:
        InputError: An argument is not a finite number above 0.

    Example:
        >>> noise_for(mu=0.5, sensitivity=2.0)
        4.0
    """
    check_positive("mu", mu)
    check_positive("sensitivity", sensitivity)
    std = max(sensitivity / mu, _MIN_DELTA)
    while sensitivity / std > mu:
        std = math.nextafter(std, math.inf)
    return std


def _log_delta(mu: float, epsilon: float) -> float:
    """Return ln δ(ε) for `mu` = μ > 0 and `epsilon` = ε ≥ 0, rounded up.

    The result is -inf, and not rounded up, if a is positive and a² too large for a float, with a as below.  δ is
    then far below the smallest float.

    Let a = ε/μ - μ/2, b = ε/μ + μ/2, and m = (1 - Φ)/φ, the Mills ratio.  As e^ε φ(b) = φ(a), the formula of the
    module's docstring is δ(ε) = φ(a) (m(a) - m(b)).  Its logarithm is computed as a sum, as φ(a) may underflow.
    For a < -1, where m(a) may overflow, it is the logarithm of Φ(-a) - φ(a) m(b).
    """
    a, b = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    if a < -1.0:  # then μ > 2, and the two terms hardly cancel
        density = math.exp(-0.5 * a * a - _LOG_SQRT_2PI)
        rounding_error = _ROUNDING * (1.0 + density * b)  # a is known to within one rounding of b
        return min(0.0, math.log(float(ndtr(-a)) - density * _mills(b) + rounding_error))
    if not math.isfinite(a * a):
        return -math.inf
    # Two upper bounds of m(a) - m(b), tight for large and for small μ: the difference itself, and, as -m' is
    # convex, the trapezoid rule for its integral.  Each is raised by its largest rounding error.
    mills_a, mills_b = _mills(a), _mills(b)
    difference = mills_a - mills_b + _ROUNDING * (mills_a + mills_b)
    slopes = 2.0 - a * mills_a - b * mills_b + _ROUNDING * (2.0 + abs(a) * mills_a + b * mills_b)
    log_difference = math.log(max(math.ulp(0.0), min(difference, 0.5 * mu * slopes)))
    rounding_error = _ROUNDING * (1.0 + abs(a) * b + abs(log_difference))
    return -0.5 * a * a - _LOG_SQRT_2PI + log_difference + rounding_error


def _mills(x: float) -> float:
    """Return (1 - Φ(x)) / φ(x)."""
    return math.sqrt(0.5 * math.pi) * float(erfcx(x * math.sqrt(0.5)))


Relation = Literal["replace-one", "zero-out"]
"""Neighbouring relation: one record exchanged for another, or its contribution replaced by zero."""

RELATIONS: tuple[Relation, ...] = get_args(Relation)
RELATION_FACTOR: dict[Relation, float] = {"zero-out": 1.0, "replace-one": 2.0}
"""Largest distance in clip norms by which one record moves a clipped increment, by relation."""


APART = RELATION_FACTOR["replace-one"]
"""Largest increment diameter in clips, if no smaller one is known."""


def factor_of(relation: Relation, increment_diameter: float = APART) -> float:
    """Return the largest distance in clips by which one record moves an increment.

    Args:
        relation: Neighbouring relation.
        increment_diameter: Largest distance of two increments, in clips.  It counts under replace-one only, and
            as 2 if it is larger.

    Example:
        >>> factor_of("zero-out"), factor_of("replace-one"), factor_of("replace-one", 1.5)
        (1.0, 2.0, 1.5)
    """
    return min(increment_diameter, APART) if relation == "replace-one" else RELATION_FACTOR[relation]


def moved_by(
    relation: Relation, per_record: float, sensitivity: float, increment_diameter: float = APART
) -> float:
    """Return the largest l2 distance by which one record moves a stream of releases.

    Args:
        relation: Neighbouring relation.
        per_record: Weight of a record's increment in its sum.
        sensitivity: l2 distance by which the stream moves if the record's increments move by 1 clip and have
            weight 1, in clips or in the unit of the releases.
        increment_diameter: Largest distance of two increments, in clips, see `factor_of`.

    Returns:
        Distance, in the unit of `sensitivity`.

    Example:
        >>> moved_by("replace-one", per_record=0.25, sensitivity=2.0)
        1.0
    """
    return factor_of(relation, increment_diameter) * per_record * sensitivity


def relation_named(name: str) -> Relation:
    """Return the neighbouring relation of this name.

    Raises:
        InputError: There is no such relation.
    """
    for relation in RELATIONS:
        if name == relation:
            return relation
    raise InputError(f"relation = {name!r}: accepted are {', '.join(map(repr, RELATIONS))}")
