"""Noise at the ends of phases, by contraction: only the end of a phase leaves the curator.

Source: Feldman, Koren & Talwar 2020, section 4; the contraction is Hardt, Recht & Singer 2016, Lemma 3.7: for a
convex loss of smoothness L, the gradient step w ↦ Π_K(w - η ∇f(w)) with η ≤ 2/L moves no two points apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.noise.mechanism import Mechanism, MechanismState, Sensitivity
from fedpriv.noise.series import Floats, Workload
from fedpriv.participation.orders import Phases

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PhaseEnds(Mechanism):
    """Fresh noise in the empty round that ends a phase, none in its gradient rounds.

    `largest_step` is the step of the first phase, `smoothness` and `lipschitz` are those of every record's loss.

    Guarantee: records are behind one phase each.  A record with gradient at most C in a batch of B moves the
    iterate after its round by step · C/B under zero-out (twice that under replace-one), later rounds of the
    phase do not move the two trajectories apart, so the phase's average iterate moves by at most step · C/B: in
    units of the step, by the record's weight times its clip, which is what noise in those units is charged with.
    This holds for convex, smooth losses whose gradients the clip never touches (a clipped gradient step is no
    contraction), and for the phase starts and the output only: the queries inside a phase are not private.
    """

    name: ClassVar[str] = "phase-ends"
    words: ClassVar[str] = "Gaussian noise on the point that ends a phase, the only one that is published"

    phases: Phases
    largest_step: float
    smoothness: float
    lipschitz: float

    @property
    def assumption(self) -> str:
        return (
            "The claim rests on a convex, smooth and Lipschitz loss and on steps in exact arithmetic: what "
            "happens within a phase is bounded by contraction, not by clipping."
        )

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "phases": Phases(tuple(data["phases"]["lengths"]))})

    def certified(self, workload: Workload) -> Sensitivity:
        """InputError unless the contraction argument applies to this workload, step and clip."""
        if workload.order != self.phases:
            raise InputError("noise at the ends of phases: the schedule must be the mechanism's own phases")
        if workload.decay != 0.0:
            raise InputError(f"noise at the ends of phases needs plain gradients, decay = 0; got {workload.decay}")
        if not self.largest_step * self.smoothness <= 2.0:
            raise InputError(
                f"step = {self.largest_step:g}: the phased method is private only for steps up to "
                f"2 / smoothness = {2.0 / self.smoothness:g}"
            )
        if not float(np.min(workload.clips)) >= self.lipschitz:
            raise InputError(
                f"clip = {float(np.min(workload.clips)):g}: the phased method is private only if clipping never "
                f"bites, so the clip must be the Lipschitz constant {self.lipschitz:g} or more"
            )
        return Sensitivity(float(np.max(workload.clips)), False, "contraction: convex, smooth, one phase a record")

    def variance(self, workload: Workload) -> Floats:
        return np.array([float(self.phases.place(t) is None) for t in range(1, workload.rounds + 1)])

    def memory_vectors(self, workload: Workload) -> int:
        return 0

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        return (fresh if self.phases.place(t) is None else fresh.new_zeros(fresh.shape)), state
