"""Rényi differential privacy of Gaussian compositions and its best known conversion to (ε, δ).

Source: Mironov 2017 for the curve; Canonne, Kamath & Steinke 2020, Proposition 12, for the conversion

    ε = min over α > 1 of  αρ + ln((α - 1)/α) - (ln δ + ln α)/(α - 1),   ρ = μ²/2

which is tighter than the papers' zCDP formula and looser than the exact one in `gdp`.  Orders are continuous:
every order gives a valid bound, so a search that misses the minimum by a little stays on the safe side.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.bisection import largest_safe
from fedpriv.accounting.checks import check_delta, check_epsilon, check_mu
from fedpriv.accounting.zcdp import paper_mu, zcdp_of
from fedpriv.errors import InputError

_DECADES = (4.0, 0.05, 0.001)  # half-widths, in powers of ten, of the successive searches over α - 1
_POINTS = 801
LEAST_EXCESS, MOST_EXCESS = 1e-6, 1e9
"""Between which orders λ - 1 are looked for where the curve is not a Gaussian composition's."""


def epsilon_of(mu: float, delta: float) -> float:
    """The ε that the Rényi curve of μ-GDP gives at δ (0 or more)."""
    zcdp, log_delta = zcdp_of(check_mu(mu)), math.log(check_delta(delta))
    if zcdp == 0.0:
        return 0.0
    center = 0.5 * (math.log10(-log_delta) - math.log10(zcdp))  # the minimum of the plain zCDP conversion
    for width in _DECADES:
        grid = np.linspace(center - width, center + width, _POINTS)
        values = _epsilons(10.0**grid, zcdp, log_delta)
        center = float(grid[np.argmin(values)])
    return max(0.0, float(np.min(values)))


def mu_of(epsilon: float, delta: float) -> float:
    """The largest μ whose Rényi curve gives (ε, δ); always at least the papers' and at most the exact one."""
    if check_epsilon(epsilon) == 0.0:
        raise InputError("epsilon = 0: Rényi DP reaches it for no μ above 0; take the exact conversion")
    return largest_safe(lambda mu: epsilon_of(mu, delta) <= epsilon, low=paper_mu(epsilon, delta) * (1.0 - 1e-9))


def to_epsilons(excess: NDArray[np.float64], renyi: NDArray[np.float64], log_delta: float) -> NDArray[np.float64]:
    """ε at δ for every order 1 + `excess`, at which the Rényi curve is `renyi`: each of them holds."""
    log_order = np.log1p(excess)
    return renyi + np.log(excess) - log_order - (log_delta + log_order) / excess


def _epsilons(excess: NDArray[np.float64], zcdp: float, log_delta: float) -> NDArray[np.float64]:
    """ε for every order 1 + excess of a Gaussian composition."""
    return to_epsilons(excess, (1.0 + excess) * zcdp, log_delta)
