"""ρ-zCDP and Rényi DP of Gaussian compositions, with their conversions to (ε, δ).

**zCDP and the papers' formula.**  ρ-zCDP gives ε = ρ + 2√(ρ ln(1/δ)).  μ-GDP is exactly (μ²/2)-zCDP for Gaussian
compositions, so that the formula reads ε = μ²/2 + μ√(2 ln(1/δ)), as in Reshef & Levy 2024, whose ρ is μ here.
Source: Bun & Steinke 2016, Propositions 1.3 and 1.6.

**Rényi DP**, with a closer conversion to (ε, δ):

    ε = min over α > 1 of  αρ + ln((α - 1)/α) - (ln δ + ln α)/(α - 1),   ρ = μ²/2

Every order α gives a valid bound, so that a search that misses the minimum by a little stays on the safe side.
Sources: Mironov 2017 for the curve; Canonne, Kamath & Steinke 2020, Proposition 12, for the conversion.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.gaussian import check_delta, check_epsilon, check_mu, largest_safe
from fedpriv.core.errors import InputError


def zcdp_of(mu: float) -> float:
    """Return the zCDP parameter of μ-GDP, μ²/2.

    Raises:
        InputError: μ is out of its range, or μ² is too large for a float.

    Example:
        >>> zcdp_of(2.0)
        2.0
    """
    if math.isinf(check_mu(mu) * mu):
        raise InputError(f"mu = {mu}: its square is too large for floating point")
    return 0.5 * mu**2


def mu_of_zcdp(zcdp: float) -> float:
    """Return the Gaussian-DP parameter √(2ρ) of a Gaussian composition that is ρ-zCDP.

    μ is rounded so that μ²/2 is at most ρ in floating point.

    Raises:
        InputError: ρ is not a number from 0 to 1e300.

    Example:
        >>> mu_of_zcdp(2.0)
        2.0
    """
    if not 0.0 <= zcdp <= 1e300:
        raise InputError(f"zcdp = {zcdp}: it is a number from 0 to 1e300")
    mu = math.sqrt(2.0 * zcdp)
    return mu if 0.5 * mu**2 <= zcdp else math.nextafter(mu, 0.0)


def paper_epsilon(mu: float, delta: float) -> float:
    """Return the papers' ε = ρ + 2√(ρ ln(1/δ)) with ρ = μ²/2.

    Args:
        mu: μ ≥ 0, with a finite μ².
        delta: δ, strictly between 0 and 1.

    Returns:
        ε, which is at least the exact one, up to rounding.

    Raises:
        InputError: μ or δ is out of its range.

    Example:
        >>> round(paper_epsilon(mu=1.0, delta=1e-5), 4)
        5.2985
    """
    zcdp = zcdp_of(mu)
    return zcdp + 2.0 * math.sqrt(zcdp * -math.log(check_delta(delta)))


def paper_mu(epsilon: float, delta: float) -> float:
    """Return the μ at which `paper_epsilon` is ε.

    The result is √(2 ln(1/δ) + 2ε) - √(2 ln(1/δ)), computed without cancellation.

    Args:
        epsilon: ε ≥ 0, with a finite 2ε.
        delta: δ, strictly between 0 and 1.

    Raises:
        InputError: ε or δ is out of its range.

    Example:
        >>> round(paper_mu(epsilon=1.0, delta=1e-5), 4)
        0.2041
    """
    tail = -2.0 * math.log(check_delta(delta))
    return check_epsilon(2.0 * check_epsilon(epsilon)) / (math.sqrt(tail + 2.0 * epsilon) + math.sqrt(tail))


_SEARCH_DECADES = (4.0, 0.05, 0.001)  # half-widths, in powers of ten, of the successive searches over α - 1
_GRID_POINTS = 801
MIN_ORDER_EXCESS, MAX_ORDER_EXCESS = 1e-6, 1e9
"""Range of λ - 1 in searches for the best order λ of a general Rényi curve."""


def epsilon_of(mu: float, delta: float) -> float:
    """Return the ε ≥ 0 that the Rényi curve of μ-GDP gives at δ, by the formula of the module's docstring.

    The minimum over α is searched on three grids of log10(α - 1).  The second and the third lie around the minimum
    of the grid before.

    Args:
        mu: μ ≥ 0, with a finite μ².
        delta: δ, strictly between 0 and 1.

    Returns:
        ε, an upper bound up to rounding, or 0 if the formula is negative.

    Raises:
        InputError: μ or δ is out of its range.

    Example:
        >>> round(epsilon_of(mu=1.0, delta=1e-5), 4)
        4.7284
    """
    zcdp, log_delta = zcdp_of(check_mu(mu)), math.log(check_delta(delta))
    if zcdp == 0.0:
        return 0.0
    center = 0.5 * (math.log10(-log_delta) - math.log10(zcdp))  # the minimum of the plain zCDP conversion
    for width in _SEARCH_DECADES:
        grid = np.linspace(center - width, center + width, _GRID_POINTS)
        values = renyi_to_epsilons(10.0**grid, (1.0 + 10.0**grid) * zcdp, log_delta)
        center = float(grid[np.argmin(values)])
    return max(0.0, float(np.min(values)))


def mu_of(epsilon: float, delta: float) -> float:
    """Return about the largest μ for which `epsilon_of` is at most ε at δ.

    Args:
        epsilon: ε, finite and above 0.
        delta: δ, strictly between 0 and 1.

    Raises:
        InputError: ε or δ is out of its range, ε is 0, or μ² of a μ that is tried is too large for a float.
    """
    if check_epsilon(epsilon) == 0.0:
        raise InputError("epsilon = 0: a μ by Rényi DP is computed for an ε above 0; take the exact conversion")
    return largest_safe(lambda mu: epsilon_of(mu, delta) <= epsilon, low=paper_mu(epsilon, delta) * (1.0 - 1e-9))


def renyi_to_epsilons(
    excess: NDArray[np.float64], renyi: NDArray[np.float64], log_delta: float
) -> NDArray[np.float64]:
    """Return for every order a valid ε at δ.

    Args:
        excess: Orders minus 1, above 0, (n,).
        renyi: Rényi curve at these orders, (n,).
        log_delta: ln δ.

    Returns:
        ε of every order, (n,), which may be negative.
    """
    log_order = np.log1p(excess)
    return renyi + np.log(excess) - log_order - (log_delta + log_order) / excess
