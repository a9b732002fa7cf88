"""What a run that protects one unit says about several at once: a person with k records."""

import math
from collections.abc import Mapping
from functools import lru_cache

from fedpriv.accounting import gdp
from fedpriv.accounting.curves import epsilon_at
from fedpriv.accounting.groups import chain, mu_together
from fedpriv.accounting.guarantees import GaussianDP, Guarantee

SIZES = (2, 8)


@lru_cache(maxsize=64)  # the seeds of a sweep promise the same, and a chain takes its time
def epsilons_of_several(guarantee: Guarantee, delta: float) -> Mapping[int, float]:
    """ε at δ for k units at once, by k; inf where nothing is known.

    Guarantee: exact for public orders, where all k meet in one round: k·μ.  Where rounds are secret it is the
    chain through k neighbours, δ_k(kε) ≤ Σ_{i<k} e^{iε} δ(ε): there is no rule in μ.
    """
    if isinstance(guarantee, GaussianDP):
        return {size: gdp.epsilon_of(mu_together(guarantee.mu, size), delta) for size in SIZES}
    return {size: epsilon_at(chain(guarantee.curve, size), delta) for size in SIZES}


def bounds_of_several(guarantee: Guarantee, delta: float) -> dict[str, dict[str, float | None]]:
    """The same as data, by k: ε at δ, and μ where there is one; None where nothing is known.

    Guarantee: k records of one person, whichever rounds they take part in, are protected by this at least.
    """
    mu = guarantee.mu if isinstance(guarantee, GaussianDP) else None
    return {
        str(size): {
            "mu": None if mu is None else mu_together(mu, size),
            "epsilon": None if math.isinf(epsilon) else epsilon,
        }
        for size, epsilon in epsilons_of_several(guarantee, delta).items()
    }


def words_of_several(guarantee: Guarantee, delta: float) -> str:
    """A sentence of a report, after the one that says whom records presume; of the run that protects least."""
    told = ", ".join(
        f"{size} records: ε {'unknown' if math.isinf(epsilon) else f'= {epsilon:.4g}'}"
        for size, epsilon in epsilons_of_several(guarantee, delta).items()
    )
    return f"One person's records together, in the run that protects least, at δ = {delta:g}: {told}."
