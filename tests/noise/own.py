"""A mechanism that fedpriv does not ship, with state: a round's noise takes back a share of the row before."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

import fedpriv
from fedpriv.core.replicates import SHARED
from fedpriv.noise import series
from fedpriv.noise.mechanism import (
    Columns,
    Mechanism,
    MechanismState,
    Sensitivity,
    check_matches,
    toeplitz_columns,
)
from fedpriv.noise.sensitivity import of_columns
from fedpriv.noise.series import Floats, Workload


@dataclass(frozen=True)
class Echo(Mechanism):
    """C = I + share · shift: two diagonals."""

    name: ClassVar[str] = "echo"
    words: ClassVar[str] = "Gaussian noise that takes back a share of the last"

    decay: float = field(default=1.0, metadata=SHARED)
    share: float = field(default=0.25, metadata=SHARED)

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        return cls(workload.decay)

    def columns(self, workload: Workload) -> Columns:
        check_matches(workload, self.decay, None)
        return toeplitz_columns(np.array([1.0, self.share]), workload)

    def certified(self, workload: Workload) -> Sensitivity:
        return of_columns(self.columns(workload), workload)

    @property
    def fresh_std(self) -> float:
        return 1.0

    def variance(self, workload: Workload) -> Floats:
        inverse = np.convolve([1.0, self.share], [1.0, -self.decay])
        return np.cumsum(series.inverse(inverse, workload.rounds) ** 2)

    def memory_vectors(self, workload: Workload) -> int:
        return 2

    def noise(self, state: MechanismState, t: int, fresh: Tensor) -> tuple[Tensor, MechanismState]:
        """The state holds the last noise, and the last row of C^-1 z."""
        if not state:
            return fresh, (fresh, fresh)
        last, before = state
        row = fresh.add(before, alpha=-self.share)
        noise = row.add(last, alpha=self.decay)
        return noise, (noise, row)


fedpriv.add_mechanism(Echo)
