"""Independent Gaussian noise on every running sum: B = I, C = A.

Reshef & Levy 2024, Algorithms 1 and 2.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedpriv.mechanisms.base import MechanismState, Workload


@dataclass(frozen=True)
class IndependentGaussian:
    """Fresh noise in every round, whatever was released before.

    Guarantee: the record of round τ moves the sums of rounds τ, τ+1, …, T by keep^(t-τ) times its increment,
    so its exact sensitivity is clip_τ √(Σ_{t≥τ} keep^{2(t-τ)}) and the worst record's is charged.
    With clip S and keep 1 this is S√T: σ = 2S√T/ρ under replace-one, the paper's σ² = 4S²T/ρ².
    """

    def sensitivity(self, workload: Workload) -> float:
        if not workload.schedule.single_pass:
            raise ValueError("independent noise is accounted for a single pass only")
        remaining = np.arange(workload.schedule.rounds, 0, -1, dtype=np.float64)
        decay = workload.keep**2
        norms = remaining if decay == 1.0 else (1.0 - decay**remaining) / (1.0 - decay)
        return float(np.max(workload.clips * np.sqrt(norms)))

    def start(self) -> MechanismState:
        return ()

    def noise(self, state: MechanismState, t: int, fresh: Tensor) -> tuple[Tensor, MechanismState]:
        return fresh, state
