"""The workload: which running sums are released, and in which rounds one record takes part in them.

    A[t, i] = decay^(t-i) for i ≤ t in the same period, else 0

decay is 1 for prefix sums, 0 for none, 1 - α for momentum.  Everything in this file and in the algebra modules is
NumPy: accounting needs no torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.participation.orders import Participation, PublicOrder, Separated

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """A over `schedule.rounds` rounds, with increments clipped to `clips[t-1]` in round t.

    `schedule` declares the participation: fixed order every epoch (a `Schedule`, of which the single pass is the
    case rounds_per_epoch = rounds), the single pass with empty rounds of `Phases`, or any pattern of a
    `Separated`.  With a `period` the sums restart from 0 in rounds 1, 1 + period, 1 + 2 period, ….
    """

    schedule: Participation | Separated
    decay: float
    clips: Floats
    period: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InputError(f"rounds = {self.rounds}: a workload has at least one round")
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay = {self.decay}: the decay of a running sum lies between 0 and 1")
        if self.clips.shape != (self.rounds,) or not np.all(np.isfinite(self.clips) & (self.clips > 0.0)):
            raise InputError(f"clips: a finite number above 0 is needed for each of the {self.rounds} rounds")
        if self.period is not None and self.period < 1:
            raise InputError(f"period = {self.period}: it is 1 or more rounds, or None")

    @property
    def rounds(self) -> int:
        return self.schedule.rounds

    @property
    def order(self) -> PublicOrder | Separated:
        """The participation, which certificates have to know; InputError if it is secret."""
        if isinstance(self.schedule, PublicOrder | Separated):
            return self.schedule
        raise InputError("a certificate needs to know in which rounds a record takes part: that is secret")

    @property
    def equal_clips(self) -> bool:
        return bool(np.all(self.clips == self.clips[0]))

    @property
    def block(self) -> int:
        """Rounds between two restarts of the sums."""
        return self.rounds if self.period is None else min(self.period, self.rounds)


def restarts(t: int, period: int | None) -> bool:
    """Whether the sums start anew in round t."""
    return t == 1 or (period is not None and (t - 1) % period == 0)


def per_period(workload: Workload, values: Callable[[int], Floats]) -> Floats:
    """`values(rounds)` of one period after the other, (T,): full periods are alike, the last may be shorter."""
    full, rest = divmod(workload.rounds, workload.block)
    return np.concatenate([np.tile(values(workload.block), full), *([values(rest)] if rest else [])])


def geometric_sums(ratio: float, counts: Floats) -> Floats:
    """Σ_{j < n} ratio^j for every n of `counts`, 0 ≤ ratio ≤ 1."""
    if ratio == 1.0:
        return counts
    if ratio == 0.0:
        return np.minimum(counts, 1.0)
    return np.asarray(np.expm1(counts * math.log(ratio)) / (ratio - 1.0))


def powers(base: float, count: int) -> Floats:
    """base^0 … base^(count-1), with 0^0 = 1; by doubling, faster than one power an entry."""
    powers = np.ones(1)
    while len(powers) < count:
        powers = np.concatenate([powers, powers * base ** len(powers)])
    return powers[:count]
