"""The phased method: SGD in phases of halving length, each with a quarter of the step and a noisy start.

Source: Feldman, Koren & Talwar 2020, "Private Stochastic Convex Optimization: Optimal Rates in Linear Time",
section 4 (Phased SGD).  In phase i = 1, 2, … of n_i gradient rounds, from w_{i,1} = w_{i-1}:

    w_{i,t+1} = Π_K(w_{i,t} - η_i g_t),   η_i = η / 4^i
    w_i       = Π_K((w_{i,1} + … + w_{i,n_i}) / n_i - η_i ζ_i),   ζ_i the noise of the phase's empty round

The paper does not project w_i; projecting what is private costs nothing, and the average lies in K already.

| here | paper | shape |
|---|---|---|
| `start` | w_{i-1}, the last private point; the output | (..., d) |
| `iterate` | w_{i,t}, private to the curator | (..., d) |
| `total` | w_{i,1} + … + w_{i,t-1} | (..., d) |
| `step` | η | scalar |
| `radius` | K is the ball of this radius around 0 | scalar |
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.optimizers.base import project_to_ball
from fedpriv.participation.phases import Phases
from fedpriv.replicates.columns import Scalar
from fedpriv.theory.phased import shrink_of_phase


class PhasedState(NamedTuple):
    """The curator's vectors between two rounds, each (..., d)."""

    start: Tensor
    iterate: Tensor
    total: Tensor


@dataclass(frozen=True)
class PhasedSGD:
    """Asks at the iterate of the phase; what it publishes changes in the empty rounds only.

    Guarantee: queries are NOT private, everything happens inside one curator.  `output` is the start of the
    current phase, a function of what was released in empty rounds, so that it may be shown at any time.
    """

    phases: Phases
    step: Scalar
    radius: Scalar

    def start(self, initial: Tensor) -> PhasedState:
        return PhasedState(initial, initial, torch.zeros_like(initial))

    def query(self, state: PhasedState) -> Tensor:
        return state.iterate

    def update(self, state: PhasedState, released: Tensor, current: Round) -> PhasedState:
        phase = self.phases.phase(current.t)
        move = self.step * shrink_of_phase(phase) * released / current.scale
        if self.phases.place(current.t) is not None:
            iterate = project_to_ball(state.iterate - move, self.radius)
            return PhasedState(state.start, iterate, state.total + state.iterate)
        average = state.total / self.phases.lengths[phase - 1]
        start = project_to_ball(average - move, self.radius)
        return PhasedState(start, start, torch.zeros_like(start))

    def output(self, state: PhasedState) -> Tensor:
        return state.start
