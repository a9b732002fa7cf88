"""A mechanism adds correlated Gaussian noise to a stream of running sums.

One algebra for all: the running sums are A s, where row t of the lower-triangular workload A holds the decays
and s the increments.  A mechanism is a factorization A = B C; it releases A s + B z with independent Gaussian
z_t, which is post-processing of C s + z.  Streaming, one fresh vector z_t comes in each round and row t of B z
goes out.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.rounds import Schedule


@dataclass(frozen=True)
class Workload:
    """A[t, i] = keep^(t-i) for i ≤ t over `schedule.rounds` rounds; `clips[t-1]` bounds round t's increment."""

    schedule: Schedule
    keep: float
    clips: NDArray[np.float64]


MechanismState = tuple[Tensor, ...]
"""A flat tuple of vectors shaped like the fresh ones, its length a function of t: silos store it as it is."""


class Mechanism(Protocol):
    """A streaming factorization of the workload."""

    def sensitivity(self, workload: Workload) -> float:
        """The l2 distance by which one record can move C s, if zero-out moves its increment by its clip norm.

        Noise z_t ~ N(0, σ² I) then gives exactly (sensitivity / σ)-GDP under zero-out and (2 sensitivity / σ)
        under replace-one, for everything released over the whole run.
        """
        ...

    def start(self) -> MechanismState:
        """The state before round 1."""
        ...

    def noise(self, state: MechanismState, t: int, fresh: Tensor) -> tuple[Tensor, MechanismState]:
        """Row t of B z and the next state, from this round's fresh vector z_t (any leading axes)."""
        ...
