"""DP-FTRL: follow the regularized leader on noisy sums of gradients.

Source: Kairouz et al., "Practical and Private (Deep) Learning Without Sampling or Shuffling" (ICML 2021),
Algorithm 1 and its momentum variant (section 5).

    v_t = γ v_{t-1} + S~_t,   v_0 = 0
    x_{t+1} = Π(x_1 - η v_t),   Π the projection on a ball around 0

| here | paper | shape |
|---|---|---|
| `released` | s~_t (S~_t above), the noisy sum of all gradients so far | (..., d) |
| `velocity` | v_t | (..., d) |
| `step` | 1/λ (η above) | scalar |
| `momentum` | γ | scalar |
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import PlainGradient, Round
from fedpriv.papers.base import (
    Algorithm,
    Fraction,
    NoiseSettings,
    Positive,
    choose_mechanism,
    project_to_ball,
    take_step,
)
from fedpriv.papers.fedavg import OptionalLocalSteps, add_optional_local_steps


class LeaderState(NamedTuple):
    """Server's vectors between two rounds, (..., d) each."""

    initial: Tensor
    velocity: Tensor
    iterate: Tensor


@dataclass(frozen=True)
class FollowTheRegularizedLeader:
    """Optimizer whose iterate steps from x_1 against the sum of all gradients, or its momentum.

    Without momentum the iterate, which is the next query, minimizes ⟨S~_t, x⟩ + ‖x - x_1‖²/(2η) over the ball.
    """

    step: Scalar
    """η."""
    radius: Scalar
    """Radius of the ball, which may be infinite."""
    momentum: Scalar = 0.0
    """γ, or 0 without momentum."""

    def start(self, initial: Tensor) -> LeaderState:
        return LeaderState(initial, torch.zeros_like(initial), initial)

    def query(self, state: LeaderState) -> Tensor:
        return state.iterate

    def update(self, state: LeaderState, released: Tensor, current: Round) -> LeaderState:
        velocity = self.momentum * state.velocity + released / current.scale
        return LeaderState(
            state.initial, velocity, project_to_ball(take_step(state.initial, self.step, velocity), self.radius)
        )

    def output(self, state: LeaderState) -> Tensor:
        return state.iterate


class FtrlSettings(NoiseSettings, OptionalLocalSteps):
    """Keys of DP-FTRL."""

    clip: Positive = Field(description="C: norm bound on one record's gradient, or on how far one client moves")
    step: Positive = Field(description="η: without momentum the model is x_1 - η · (sum of all gradients)")
    radius: Positive = Field(math.inf, description="radius of the ball the model stays in; unbounded if left out")
    momentum: Fraction = Field(0.0, description="momentum on the sums")


DP_FTRL = Algorithm(
    name="dp-ftrl",
    title="DP-FTRL",
    source="Kairouz et al., Practical and Private (Deep) Learning Without Sampling or Shuffling (ICML 2021)",
    settings=FtrlSettings,
    estimator=lambda settings, _problem: PlainGradient(settings.clip, decay=1.0),
    mechanism=choose_mechanism,
    optimizer=lambda settings, _problem, _noise_std: FollowTheRegularizedLeader(
        settings.step, settings.radius, settings.momentum
    ),
    objective=add_optional_local_steps,
    published="points",
)
