"""What a guarantee for one unit says about several at once: a person with k records, silos that share a person.

Fixed orders are exact: k units in one round and one direction move the release k times as far, k·μ.
**With secret participation there is no such rule in μ**: what holds is the chain through k neighbours,
δ_k(kε) ≤ Σ_{i<k} e^{iε} δ(ε), and k·μ for the μ of a run whose rounds everybody knows.

Sources: Dong, Roth & Su 2022, Theorem 2.14, for k·μ; Vadhan 2017, Lemma 2.2, for the chain.
"""

import math

import numpy as np

from fedpriv.accounting.bisection import smallest_between
from fedpriv.accounting.checks import check_mu
from fedpriv.accounting.curves import MOST_EPSILON, Curve, Floats, as_floats, check_resolved, delta_at
from fedpriv.errors import InputError

_TRIED = 8192  # values of ε at which a chain is looked at
_LEAST_TRIED = 1e-6


def check_size(size: int) -> int:
    """A group of 1 unit or more; raises InputError otherwise."""
    if size < 1:
        raise InputError(f"group of {size} units: a group has 1 or more")
    return size


def mu_together(mu: float, size: int) -> float:
    """The GDP parameter of `size` units of a run in fixed order that is μ-GDP for one: k·μ.

    Guarantee: it holds wherever the units take part, and for every mechanism; it is exact where they take part in
    the same rounds.
    """
    return _above(check_size(size) * check_mu(mu), size)


def chain(curve: Curve, size: int) -> Curve:
    """The curve of `size` units from that of one, for every kind of run: δ_k(ε) ≤ δ(ε/k) Σ_{i<k} e^{iε/k}.

    It rises again where e^{iε/k} outgrows what a curve resolves: `epsilon_of_chain` finds where it holds.

    Guarantee: neighbours are changed one unit at a time, k times.
    """
    check_size(size)
    if size == 1:
        return curve

    def of_group(epsilons: Floats) -> Floats:
        each = np.minimum(np.asarray(epsilons, np.float64), MOST_EPSILON) / size * (1.0 - 1e-15)
        factor = np.sum(np.exp(np.multiply.outer(np.arange(size), each)), axis=0) * (1.0 + 1e-12)
        with np.errstate(over="ignore", invalid="ignore"):
            return as_floats(np.minimum(1.0, curve(each) * factor))

    return of_group


def epsilon_of_chain(curve: Curve, size: int, delta: float) -> float:
    """The smallest ε found at which the chain of `size` units is at most `delta`; inf where it never is.

    Guarantee: the ε returned was tried.  A true curve never rises, so that (ε, `delta`) holds for every larger ε
    as well, whether the chain rises again there or not.
    """
    check_resolved(delta)
    several = chain(curve, size)
    tried = np.append(0.0, np.geomspace(_LEAST_TRIED, MOST_EPSILON, _TRIED))
    (holds,) = np.nonzero(several(tried) <= delta)
    if not len(holds):
        return math.inf
    if holds[0] == 0:
        return 0.0
    low, high = float(tried[holds[0] - 1]), float(tried[holds[0]])
    return smallest_between(lambda epsilon: delta_at(several, epsilon) <= delta, low, high, tolerance=1e-12)


def _above(value: float, size: int) -> float:
    return value if size == 1 else math.nextafter(value * (1.0 + 1e-15), math.inf)
