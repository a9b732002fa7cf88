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

The phased method's parameters: lengths, steps and noise of every phase.

Source: Feldman, Koren & Talwar 2020, "Private Stochastic Convex Optimization: Optimal Rates in Linear Time",
section 4: phase i = 1, 2, … reads n_i = n/2^i fresh examples with step η_i = η/4^i, and starts the next one at
its average iterate plus N(0, σ_i² I).  Written down from the paper's abstract and from its known statement, not
checked against its text: `noise_std_of_phase` therefore follows from the sensitivity proved in
`fedpriv.noise.phased`, and `suggested_step` is experimental.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import Round
from fedpriv.papers.base import project_to_ball
from fedpriv.papers.risk import Condition
from fedpriv.participation.orders import Phases


def phases_of(examples: int, batch: int = 1) -> Phases:
    """⌊n/(2^i B)⌋ rounds of B examples in phase i, for as many phases as have one.

    InputError where not even the first phase has a round.
    """
    if batch < 1 or examples < 2 * batch:
        raise InputError(
            f"examples = {examples}, batch = {batch}: the first phase reads half of the "
            "examples, so there must be two batches of 1 or more at least"
        )
    lengths, length = [], examples // (2 * batch)
    while length >= 1:
        lengths.append(length)
        length = examples // (2 ** (len(lengths) + 1) * batch)
    return Phases(tuple(lengths))


def shrink_of_phase(phase: int) -> float:
    """η_i/η = 1/4^i for phase i = 1, 2, …."""
    return math.pow(4.0, -phase)


def noise_std_of_phase(step: float, phase: int, clip: float, batch: int, mu: float) -> float:
    """σ_i = η_i C/(B μ): the noise of the start after phase i, per coordinate, in units of the parameters.

    Guarantee: every start, and so the output, is `mu`-GDP under zero-out for convex losses of smoothness at most
    2/η_1 and Lipschitz constant at most C; replace-one needs twice as much.
    """
    return step * shrink_of_phase(phase) * clip / (batch * mu)


def suggested_step(examples: int, dimension: int, lipschitz: float, diameter: float, mu: float) -> float:
    """η = (D/L) min{4/√n, μ/(2√d)}, with μ for the paper's ρ of (α, αρ²/2)-RDP; batches of 1, replace-one."""
    return diameter / lipschitz * min(4.0 / math.sqrt(examples), mu / (2.0 * math.sqrt(dimension)))


def step_conditions(step: float, smoothness: float) -> tuple[Condition, ...]:
    """The contraction, on which privacy rests: η_1 ≤ 2/smoothness."""
    return (Condition("η/4 ≤ 2/smoothness", step * shrink_of_phase(1), 2.0 / smoothness),)


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
