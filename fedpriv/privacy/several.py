"""What a run that protects one unit says about several at once: a person with k records."""

from collections.abc import Mapping
from functools import lru_cache

from fedpriv.accounting import gdp
from fedpriv.accounting.curves import epsilon_at
from fedpriv.accounting.groups import epsilon_of_chain, mu_together
from fedpriv.accounting.guarantees import GaussianDP, Guarantee, Sampled
from fedpriv.figures import delta_figure, epsilon_figure

SIZES = (2, 8)


@lru_cache(maxsize=64)  # the seeds of a sweep promise the same, and a chain takes its time
def epsilons_of_several(guarantee: Guarantee, delta: float) -> Mapping[int, float]:
    """ε at δ for k units at once, by k.

    Guarantee: exact for public orders, where all k meet in one round: k·μ.  Where rounds are secret it is the
    smallest of up to three bounds: the chain through k neighbours, k·μ of rounds that everybody knows, and the law
    of how many of k units join.  The second always gives a number.
    """
    if isinstance(guarantee, GaussianDP):
        return {size: gdp.epsilon_of(mu_together(guarantee.mu, size), delta) for size in SIZES}
    return {size: _secret(guarantee, size, delta) for size in SIZES}


def _secret(guarantee: Sampled, size: int, delta: float) -> float:
    known = gdp.epsilon_of(mu_together(guarantee.known_mu, size), delta)
    joining = guarantee.group_curve(size)
    found = [known, epsilon_of_chain(guarantee.curve, size, delta)]
    return min(found if joining is None else [*found, epsilon_at(joining, delta)])


def bounds_of_several(guarantee: Guarantee, delta: float) -> dict[str, dict[str, float | None]]:
    """The same as data, by k: ε at δ, and μ where there is one.

    Guarantee: k records of one person, whichever rounds they take part in, are protected by this at least.
    """
    mu = guarantee.mu if isinstance(guarantee, GaussianDP) else None
    return {
        str(size): {"mu": None if mu is None else mu_together(mu, size), "epsilon": epsilon}
        for size, epsilon in epsilons_of_several(guarantee, delta).items()
    }


def words_of_several(guarantee: Guarantee, delta: float) -> str:
    """A sentence of a report, after the one that says whom records presume; of the run that protects least."""
    told = ", ".join(
        f"{size} records: ε = {epsilon_figure(epsilon)}"
        for size, epsilon in epsilons_of_several(guarantee, delta).items()
    )
    return f"One person's records together, in the run that protects least, at δ = {delta_figure(delta)}: {told}."
