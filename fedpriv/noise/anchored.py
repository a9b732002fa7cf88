"""Noise of an anchor's own, and square-root noise on the changes since: for sums that restart, read once.

In the first round of a period everything is released anew, later rounds add differences.  A tree charges a record
of an anchor and one of a difference alike; here each has noise of its own, as large as it needs:

    C = diag(1/anchor, C')  in every period,   C' the square root of the period's other rounds
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.noise import series
from fedpriv.noise.mechanism import Mechanism, MechanismState, Sensitivity, check_matches
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.workload import Floats, Workload, per_period

if TYPE_CHECKING:
    from torch import Tensor


_MOST_PERIOD = 1024  # as many vectors are kept


@dataclass(frozen=True)
class AnchoredSquareRoot(Mechanism):
    """`anchor` times as much noise in an anchor's round as is fresh in others, which stays until the next one.

    Guarantee: in one pass a record is in one round.  At an anchor it moves C s by its clip over `anchor`,
    elsewhere by its clip times the norm of its column of C', which ends with the period; the worst record is
    charged, exactly, for any clips.
    """

    name: ClassVar[str] = "anchored"
    words: ClassVar[str] = (
        "Gaussian noise of every anchor's own, and correlated noise on the changes between anchors"
    )

    period: int
    anchor: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.period <= _MOST_PERIOD:
            raise InputError(f"period = {self.period}: from 1 to {_MOST_PERIOD} rounds, as many vectors are kept")
        if not 0.0 < self.anchor < math.inf:
            raise InputError(f"anchor = {self.anchor}: a ratio of two noises is a finite number above 0")

    @classmethod
    def fair(cls, period: int, anchor_clip: float, clip: float) -> Self:
        """At which the record of an anchor costs what the first difference of a period costs."""
        plain = cls(period)
        longest = plain._columns(period - 1)[0] if period > 1 else 1.0
        return dataclasses.replace(plain, anchor=anchor_clip / (clip * float(longest)))

    def certified(self, workload: Workload) -> Sensitivity:
        check_matches(workload, 1.0, self.period)
        if not workload.order.single_pass:
            raise InputError(f"mechanism = {self.name!r}: its certificate is for records that are read once")
        moved = per_period(
            workload, lambda rounds: np.concatenate([[1.0 / self.anchor], self._columns(rounds - 1)])
        )
        worst = float(np.max(workload.clips * moved))
        return Sensitivity(worst, True, "one participation: an anchor's own noise, or the longest column")

    @property
    def fresh_std(self) -> float:
        return min(1.0, self.anchor)

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, 1.0, self.period)
        rows = np.concatenate([[0.0], np.cumsum(self._inverse[: self.period - 1] ** 2)]) + self.anchor**2
        return per_period(workload, lambda rounds: rows[:rounds])

    @property
    def worst_variance(self) -> float:
        """Of the last round of a period."""
        return self.anchor**2 + float(np.sum(self._inverse[: self.period - 1] ** 2))

    def memory_vectors(self, workload: Workload) -> int:
        return 1 + min(max(self.period - 1, 0), workload.rounds)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the anchor's noise, and that of the square root since."""
        if not state or (t - 1) % self.period == 0:
            noise = fresh * self.anchor
            return noise, (noise,)
        changes, after = self._changes.noise(state[1:], t, fresh)
        return state[0] + changes, (state[0], *after)

    @cached_property
    def _changes(self) -> BandedSquareRoot:
        return BandedSquareRoot(1.0, max(1, self.period - 1))

    @cached_property
    def _inverse(self) -> Floats:
        """B' = A C'^-1 is the square root itself."""
        return series.square_root(1.0, max(1, self.period - 1))

    def _columns(self, rounds: int) -> Floats:
        """Norms of the columns of C' over so many rounds."""
        if rounds < 1:
            return np.zeros(0)
        return np.sqrt(series.column_squared_norms(series.square_root(1.0, rounds), rounds))
