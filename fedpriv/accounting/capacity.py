"""How many units a round is made to hold, where how many were drawn must stay secret.

The number of units drawn in a round depends on the data: on who is in it.  A silo whose answers take longer for
larger rounds tells it.  So a round evaluates a public number of rows, the *capacity*, whoever was drawn; in the
rare round that draws more, all are processed, never dropped, and the probability of such a round goes into the
slack.
"""

import math
from dataclasses import dataclass

from scipy.special import bdtrc

from fedpriv.errors import InputError

_RARELY = 2.0**-40
_HIDDEN = 1e-6  # relative: two libraries differ by 2e-8 for ten million units


@dataclass(frozen=True)
class Capacity:
    """A public number of units of a round.

    Guarantee: fewer than `rows` + 1 of the units that could be drawn are drawn, but for a probability of
    `overflow` at most, a round.
    """

    rows: int
    overflow: float


def capacity(units: int, rate: float) -> Capacity:
    """The smallest number of rows that `units`, drawn independently at `rate` each, exceed with probability 2^-40.

    For an allocation to T rounds the rate is 1/T.
    """
    if units < 1 or not 0.0 < rate <= 1.0:
        raise InputError(f"capacity of {units} units at rate {rate}: 1 unit or more, a rate above 0 and at most 1")
    low, high = -1, units
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _overflow(middle, units, rate) <= _RARELY else (middle, high)
    return Capacity(high, _overflow(high, units, rate))


def slack_of(round_capacity: Capacity, rounds: int) -> float:
    """What a run's slack has to hold for the rounds that overflow: the union bound, rounded up."""
    if rounds < 1:
        raise InputError(f"rounds = {rounds}: there is 1 round or more")
    return round_capacity.overflow * rounds * (1.0 + 1e-15)


def _overflow(rows: int, units: int, rate: float) -> float:
    """P(Binomial(units, rate) > rows), rounded up."""
    return 0.0 if rows >= units else float(bdtrc(rows, units, rate)) * (1.0 + _HIDDEN) + math.ulp(0.0)
