"""A privacy target as a person states it, in any of four currencies."""

from fedpriv.accounting import gdp
from fedpriv.accounting.checks import check_mu
from fedpriv.accounting.zcdp import mu_of_zcdp
from fedpriv.errors import InputError

DEFAULT_DELTA = 1e-5
"""At which ε is printed if nobody says otherwise."""


def target_mu(
    mu: float | None = None,
    zcdp: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> float:
    """The Gaussian-DP parameter of the one target given: μ, zCDP's ρ, or ε together with δ (exact conversion).

    Raises InputError unless exactly one of the three is given and lies in its range.
    """
    if sum(value is not None for value in (mu, zcdp, epsilon)) != 1:
        raise InputError("privacy target: give exactly one of mu, zcdp, or epsilon with delta")
    if mu is not None:
        return check_mu(mu)
    if zcdp is not None:
        return mu_of_zcdp(zcdp)
    if delta is None:
        raise InputError(f"epsilon = {epsilon}: an epsilon is a target only together with a delta, e.g. 1e-6")
    assert epsilon is not None
    return gdp.mu_of(epsilon, delta)
