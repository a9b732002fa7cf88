"""Accelerated projected gradient descent with Nesterov's three sequences: the server of Accelerated-DP-SRGD.

Source: Choquette-Choo, Ganesh & Thakurta 2025, Algorithm 1, counted from 1 (there from 0, with η_t = t + 1).

    g~_t = S~_t / α_t
    z_{t+1} = Π(z_t - (α_t/β) g~_t)
    y_{t+1} = Π(x_t - (1/β) g~_t)
    x_{t+1} = (1 - τ) y_{t+1} + τ z_{t+1},   τ = α_{t+1} / α_{1:t+1}
    output y_{T+1}

| here | paper | shape |
|---|---|---|
| `ask` | x_t | (..., d) |
| `mirror` | z_t | (..., d) |
| `output` | y_t | (..., d) |
| `released` / `scale` | S~_t / η_t, the noisy gradient ∇~_t | (..., d) |
| `beta` | β | scalar |
| `radius` | R | scalar |

The z-step is η_t/β as Algorithm 1 prints it; the paper's proof silently halves it, which measures worse.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.estimators.weights import LinearWeights, Weights
from fedpriv.optimizers.base import project_to_ball
from fedpriv.replicates.columns import Scalar


class NesterovState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    ask: Tensor
    mirror: Tensor
    output: Tensor


@dataclass(frozen=True)
class NesterovCoupling:
    """Gradient step and weighted mirror step, coupled; F(y_{T+1}) - F* = O(β R² / T²) on smooth convex losses."""

    beta: Scalar
    radius: Scalar
    weights: Weights = field(default_factory=LinearWeights)

    def start(self, initial: Tensor) -> NesterovState:
        return NesterovState(initial, initial, initial)

    def query(self, state: NesterovState) -> Tensor:
        return state.ask

    def update(self, state: NesterovState, released: Tensor, current: Round) -> NesterovState:
        step = released / (current.scale * self.beta)
        mirror = project_to_ball(state.mirror - self.weights.at(current.t) * step, self.radius)
        output = project_to_ball(state.ask - step, self.radius)
        following = current.t + 1
        share = self.weights.at(following) / self.weights.total(following)
        return NesterovState(output.lerp(mirror, share), mirror, output)

    def output(self, state: NesterovState) -> Tensor:
        return state.output
