"""ρ-zCDP of Gaussian compositions, and the (ε, δ) that the papers print.

Source: Bun & Steinke 2016, Propositions 1.3 and 1.6: ρ-zCDP gives ε = ρ + 2√(ρ ln(1/δ)); μ-GDP is exactly
(μ²/2)-zCDP for Gaussian compositions, so that the formula reads ε = μ²/2 + μ√(2 ln(1/δ)), as in Reshef & Levy
2024 with their ρ in the place of μ.  It is a valid bound and always above `gdp.epsilon_of`.

Rényi differential privacy of Gaussian compositions and its best known conversion to (ε, δ).

Source: Mironov 2017 for the curve; Canonne, Kamath & Steinke 2020, Proposition 12, for the conversion

    ε = min over α > 1 of  αρ + ln((α - 1)/α) - (ln δ + ln α)/(α - 1),   ρ = μ²/2

which is tighter than the papers' zCDP formula and looser than the exact one in `gdp`.  Orders are continuous:
every order gives a valid bound, so a search that misses the minimum by a little stays on the safe side.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.gaussian import check_delta, check_epsilon, check_mu, largest_safe
from fedpriv.core.errors import InputError


def zcdp_of(mu: float) -> float:
    """The zCDP parameter of μ-GDP: μ²/2."""
    return 0.5 * check_mu(mu) ** 2


def mu_of_zcdp(zcdp: float) -> float:
    """The Gaussian-DP parameter of a Gaussian composition that is ρ-zCDP: √(2ρ)."""
    if not (math.isfinite(zcdp) and zcdp >= 0.0):
        raise InputError(f"zcdp = {zcdp}: it is a finite number, 0 or more")
    mu = math.sqrt(2.0 * zcdp)
    return mu if 0.5 * mu**2 <= zcdp else math.nextafter(mu, 0.0)


def paper_epsilon(mu: float, delta: float) -> float:
    """ε = ρ + 2√(ρ ln(1/δ)) with ρ = μ²/2."""
    zcdp = zcdp_of(mu)
    return zcdp + 2.0 * math.sqrt(zcdp * -math.log(check_delta(delta)))


def paper_mu(epsilon: float, delta: float) -> float:
    """The μ at which `paper_epsilon` is ε: √(2 ln(1/δ) + 2ε) - √(2 ln(1/δ)), written without cancellation."""
    tail = -2.0 * math.log(check_delta(delta))
    return 2.0 * check_epsilon(epsilon) / (math.sqrt(tail + 2.0 * epsilon) + math.sqrt(tail))


_SEARCH_DECADES = (4.0, 0.05, 0.001)  # half-widths, in powers of ten, of the successive searches over α - 1
_GRID_POINTS = 801
MIN_ORDER_EXCESS, MAX_ORDER_EXCESS = 1e-6, 1e9
"""Between which orders λ - 1 are looked for where the curve is not a Gaussian composition's."""


def epsilon_of(mu: float, delta: float) -> float:
    """The ε that the Rényi curve of μ-GDP gives at δ (0 or more)."""
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
    """The largest μ whose Rényi curve gives (ε, δ); always at least the papers' and at most the exact one."""
    if check_epsilon(epsilon) == 0.0:
        raise InputError("epsilon = 0: Rényi DP reaches it for no μ above 0; take the exact conversion")
    return largest_safe(lambda mu: epsilon_of(mu, delta) <= epsilon, low=paper_mu(epsilon, delta) * (1.0 - 1e-9))


def renyi_to_epsilons(
    excess: NDArray[np.float64], renyi: NDArray[np.float64], log_delta: float
) -> NDArray[np.float64]:
    """ε at δ for every order 1 + `excess`, at which the Rényi curve is `renyi`: each of them holds."""
    log_order = np.log1p(excess)
    return renyi + np.log(excess) - log_order - (log_delta + log_order) / excess
