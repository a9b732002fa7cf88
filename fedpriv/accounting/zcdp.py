"""ρ-zCDP of Gaussian compositions, and the (ε, δ) that the papers print.

Source: Bun & Steinke 2016, Propositions 1.3 and 1.6: ρ-zCDP gives ε = ρ + 2√(ρ ln(1/δ)); μ-GDP is exactly
(μ²/2)-zCDP for Gaussian compositions, so that the formula reads ε = μ²/2 + μ√(2 ln(1/δ)), as in Reshef & Levy
2024 with their ρ in the place of μ.  It is a valid bound and always above `gdp.epsilon_of`.
"""

import math

from fedpriv.accounting.checks import check_delta, check_epsilon, check_mu
from fedpriv.errors import InputError


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
