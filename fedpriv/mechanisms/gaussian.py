"""Independent Gaussian noise on every running sum: B = I, C = A.

Reshef & Levy 2024, Algorithms 1 and 2 (single pass); any declared participation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from fedpriv.mechanisms.base import Blocks, Mechanism, MechanismState, Sensitivity
from fedpriv.mechanisms.columns import Columns, toeplitz_inner
from fedpriv.mechanisms.sensitivity import nonincreasing
from fedpriv.mechanisms.workload import Floats, Workload, geometric_sums, powers

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class IndependentGaussian(Mechanism):
    """Fresh noise in every round, whatever was released before.

    Guarantee: a record that takes part in round τ moves the sums of rounds τ, τ+1, … of its period by
    decay^(t-τ) times its increment; all its increments are added up, and the worst record is charged.
    For a single pass with clip S and decay 1 this is S√T: σ = 2S√T/ρ under replace-one, the paper's
    σ² = 4S²T/ρ².
    """

    name: ClassVar[str] = "independent"
    words: ClassVar[str] = "independent Gaussian noise in every round"

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        return cls()

    def certified(self, workload: Workload) -> Sensitivity:
        def within(clips: Floats, rounds_per_epoch: int) -> Floats:
            return _record_squared_norms(clips, rounds_per_epoch, workload.decay)

        def coefficients() -> Floats:
            return powers(workload.decay, workload.rounds)

        return nonincreasing.certified(workload, coefficients, self.columns(workload), within)

    def columns(self, workload: Workload) -> Columns:
        coefficients = powers(workload.decay, workload.block)
        inner = toeplitz_inner(coefficients, workload.rounds, workload.period)
        return Columns(_column_squared_norms(workload), inner)

    @property
    def fresh_std(self) -> float:
        return 1.0

    def blocks(self, workload: Workload) -> Blocks | None:
        """C = A, which is the identity for decay 0; with any other an increment stays in all later sums."""
        return Blocks(1, np.ones(workload.rounds)) if workload.decay == 0.0 else None

    def variance(self, workload: Workload) -> Floats:
        return np.ones(workload.rounds)

    def noise_series(self, workload: Workload) -> Floats:
        series = np.zeros(workload.rounds)
        series[0] = 1.0
        return series

    def memory_vectors(self, workload: Workload) -> int:
        return 0

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        return fresh, state


def _column_squared_norms(workload: Workload) -> Floats:
    """Σ_{t≥τ} decay^{2(t-τ)} up to the end of τ's period, for every τ."""
    if workload.period is None:
        return geometric_sums(workload.decay**2, np.arange(workload.rounds, 0.0, -1.0))
    rounds = np.arange(workload.rounds, dtype=np.float64)
    ends = np.minimum((rounds // workload.block + 1) * workload.block, workload.rounds)
    return geometric_sums(workload.decay**2, ends - rounds)


def _record_squared_norms(clips: Floats, rounds_per_epoch: int, decay: float) -> Floats:
    """Squared norms of the records of a fixed order within one period, without a T × T matrix: O(T log T).

    Between two rounds of a record what it moved only decays, so it is enough to know it in those rounds:
    y_k = clip_k + decay^rounds_per_epoch y_{k-1}.
    """
    rounds = len(clips)
    rounds_per_epoch = min(rounds_per_epoch, rounds)
    epochs = -(-rounds // rounds_per_epoch)
    moved = np.zeros((epochs, rounds_per_epoch))
    moved.ravel()[:rounds] = clips
    shift, over_epoch = 1, decay**rounds_per_epoch
    while shift < epochs:  # after each pass a row holds the last 2·shift terms of the recursion
        moved[shift:] += over_epoch * moved[:-shift]
        shift, over_epoch = 2 * shift, over_epoch**2
    until_next = np.minimum(
        rounds_per_epoch,
        rounds - np.arange(epochs * rounds_per_epoch, dtype=np.float64).reshape(epochs, rounds_per_epoch),
    )
    lasting = geometric_sums(decay**2, np.maximum(until_next, 0.0))
    return np.asarray(np.sum(moved**2 * lasting, axis=0))
