"""Follow the regularized leader on noisy sums of gradients: the server of DP-FTRL.

Source: Kairouz et al. 2021, Algorithm 1 and its momentum variant (section 5).

    v_t = γ v_{t-1} + S~_t
    x_{t+1} = Π(x_1 - η v_t)

| here | paper | shape |
|---|---|---|
| `released` | s~_t, the noisy sum of all gradients so far | (..., d) |
| `velocity` | v_t | (..., d) |
| `step` | 1/λ | scalar |
| `momentum` | γ | scalar |
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.optimizers.base import project_to_ball, stepped
from fedpriv.replicates.columns import Scalar


class LeaderState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    initial: Tensor
    velocity: Tensor
    iterate: Tensor


@dataclass(frozen=True)
class FollowTheRegularizedLeader:
    """The iterate is the minimizer of the summed linear losses plus ‖x - x_1‖²/(2η); asks there."""

    step: Scalar
    radius: Scalar
    momentum: Scalar = 0.0

    def start(self, initial: Tensor) -> LeaderState:
        return LeaderState(initial, torch.zeros_like(initial), initial)

    def query(self, state: LeaderState) -> Tensor:
        return state.iterate

    def update(self, state: LeaderState, released: Tensor, current: Round) -> LeaderState:
        velocity = self.momentum * state.velocity + released / current.scale
        iterate = project_to_ball(stepped(state.initial, self.step, velocity), self.radius)
        return LeaderState(state.initial, velocity, iterate)

    def output(self, state: LeaderState) -> Tensor:
        return state.iterate
