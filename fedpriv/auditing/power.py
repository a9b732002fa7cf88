"""How much of the noise would have to be gone for an audit to see it, at the trials that it had."""

import numpy as np
from scipy import special

from fedpriv.auditing import secret
from fedpriv.auditing.bounds import upper_rates
from fedpriv.auditing.secret import Evidence, Seen, evidence_of
from fedpriv.auditing.statistics import ON_THE_BEST
from fedpriv.auditing.tradeoff import Curve, shown
from fedpriv.participation.poisson import Poisson
from fedpriv.randomness import public_generator
from fedpriv.running.plan import Plan

POWER = 0.95
"""The probability with which an audit refutes noise of the size that it says it would see."""
_SIMULATED, _LOOKED, _GRID = 60, 4, 20


def sees(apart: float, claimed: float, trials: int, failure: float) -> float:
    """The largest f ≤ 1 such that noise of f times its size is refuted with probability `POWER` or more; 0: none.

    `apart` is the `separation` of both worlds at the whole noise.  Of `trials` canaries the test that has half of
    `failure` guesses wrongly with probability Φ(-apart / 2f), independently, and the claim falls if wrong guesses
    are so few that `bound_at` is above `claimed`: a binomial probability, exactly.  Other tests of a family can
    see more, and none of them takes from this one.
    """
    most = _most_wrong(claimed, trials, failure * ON_THE_BEST / 2.0)
    if most < 0 or apart <= 0.0:
        return 0.0
    rate = float(special.bdtri(most, trials, POWER))
    return min(1.0, apart / (-2.0 * float(special.ndtri(rate)))) if rate < 0.5 else 1.0


def _most_wrong(claimed: float, trials: int, failure: float) -> int:
    """The most wrong guesses of so many that refute a claim; -1 if none do."""
    wrong = np.arange(trials)
    refuting = -2.0 * special.ndtri(upper_rates(wrong, trials, failure)) > claimed
    return int(np.sum(refuting)) - 1


def sees_in_secret(plan: Plan, curve: Curve, trials: int, failure: float, seed: int) -> float:
    """The largest share of the noise that was found, in twentieths, refuted in all of its 60 simulated audits.

    0 if none was.  Canaries, their secret rounds and their noise are simulated, as many as there were, and the
    best of the tests that `canaries_shown` has is put to them.  Which audits a share has follows from `seed`:
    the first few of each say where to look, and from there on down the first share is taken that all of its audits
    refute.  So less may be said than would be seen, and a share that is refuted with a probability below `POWER`
    passes with one below 5 %: 0.95 to the power of 60.
    """
    evidence = evidence_of(plan)

    def refuted(share: int, audits: range) -> bool:
        drawn = (public_generator(seed, "audit sees", f"{share}", f"{each}") for each in audits)
        return all(_refuted(evidence, curve, trials, failure, share / _GRID, coins) for coins in drawn)

    low, high = 0, _GRID
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if refuted(middle, range(_LOOKED)) else (low, middle)
    while low and not refuted(low, range(_LOOKED, _SIMULATED)):
        low -= 1
        while low and not refuted(low, range(_LOOKED)):
            low -= 1
    return low / _GRID


def _refuted(
    evidence: Evidence, curve: Curve, trials: int, failure: float, share: float, drawn: np.random.Generator
) -> bool:
    """Whether noise of so much of its size is refuted in one simulated audit of rows of the first group."""
    schedule = evidence.schedule
    rounds = len(range(0, schedule.rounds, schedule.groups))
    present = drawn.random(trials) < 0.5
    if isinstance(schedule, Poisson):
        takes = drawn.random((trials, rounds)) < 1.0 / schedule.bins
    else:
        place = drawn.integers(schedule.bins, size=(trials, rounds // schedule.bins, 1))
        takes = (place == np.arange(schedule.bins)).reshape(trials, rounds)
    sign = np.where(present, 1.0, 0.0 if evidence.relation == "zero-out" else -1.0)
    whole = np.zeros((trials, schedule.rounds))
    noise = share * evidence.multiplier * drawn.standard_normal((trials, rounds))
    whole[:, :: schedule.groups] = takes * sign[:, None] + noise
    seen = Seen(whole, present, np.zeros(trials, np.int64))
    return shown(curve, evidence.secret(seen), present, failure * secret.ON_THE_BEST).excess > 0.0
