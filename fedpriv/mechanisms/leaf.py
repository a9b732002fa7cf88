"""Gaussian noise on the increments themselves, summed like them: C is diagonal.

Source: Kornowski, Liu & Talwar, Algorithm 4: every leaf gets its own noise, and the noisy leaf is what is added to
the running sum, so the noise accumulates over a period.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedpriv.errors import InputError
from fedpriv.mechanisms.base import Blocks, Mechanism, MechanismState, Sensitivity, check_matches
from fedpriv.mechanisms.sensitivity.participation import heaviest_pattern
from fedpriv.mechanisms.workload import Floats, Workload
from fedpriv.participation.separated import Separated
from fedpriv.replicates.columns import SHARED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LeafGaussian(Mechanism):
    """Fresh noise on every increment, `first` times as large in the first round of a period as in the others.

    Guarantee: a record moves the increments of its own rounds only; their squared clips over squared noises add
    up, exactly, for any participation.
    """

    name: ClassVar[str] = "leaf"
    words: ClassVar[str] = "Gaussian noise on every change of the running sum, which adds up from anchor to anchor"

    decay: float = field(default=1.0, metadata=SHARED)
    period: int | None = None
    first: float = field(default=1.0, metadata=SHARED)

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay = {self.decay}: the decay of a running sum lies between 0 and 1")
        if self.period is not None and self.period < 1:
            raise InputError(f"period = {self.period}: the sums restart after 1 or more rounds, or never (None)")
        if not 0.0 < self.first < math.inf:
            raise InputError(f"first = {self.first}: a ratio of two noises is a finite number above 0")

    def certified(self, workload: Workload) -> Sensitivity:
        check_matches(workload, self.decay, self.period)
        squared_norms = (workload.clips / self._scales(workload)) ** 2
        if isinstance(workload.order, Separated):
            worst = heaviest_pattern(squared_norms, workload.order)
        else:
            rounds_per_epoch = min(workload.order.rounds_per_epoch, workload.rounds)
            worst = float(
                np.max(np.bincount(np.arange(workload.rounds) % rounds_per_epoch, squared_norms, rounds_per_epoch))
            )
        return Sensitivity(math.sqrt(worst), True, "increments are independent: squares add up")

    @property
    def fresh_std(self) -> float:
        return min(1.0, self.first)

    def blocks(self, workload: Workload) -> Blocks:
        """C is diagonal: the inverse noises."""
        check_matches(workload, self.decay, self.period)
        return Blocks(1, 1.0 / self._scales(workload))

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, self.decay, self.period)
        variances = np.empty(workload.rounds)
        total = 0.0
        for place, scale in enumerate(self._scales(workload)):
            total = scale**2 + (0.0 if place % workload.block == 0 else self.decay**2 * total)
            variances[place] = total
        return variances

    def memory_vectors(self, workload: Workload) -> int:
        return 1

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the noise of the last sum."""
        if not state or (self.period is not None and (t - 1) % self.period == 0):
            noise = fresh * self.first
        else:
            noise = fresh.add(state[0], alpha=self.decay)
        return noise, (noise,)

    def _scales(self, workload: Workload) -> Floats:
        scales = np.ones(workload.rounds)
        scales[:: workload.block] = self.first
        return scales
