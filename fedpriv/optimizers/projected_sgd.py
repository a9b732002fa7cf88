"""Projected stochastic gradient descent, with momentum and averaging as options.

Sources: Abadi et al. 2016, Algorithm 1 (DP-SGD); Choquette-Choo, Ganesh & Thakurta 2025, section 4.3; averaging
is Polyak & Juditsky 1992, momentum the heavy ball of Polyak 1964.

    v_t = γ v_{t-1} + g~_t
    x_{t+1} = Π(x_t - η v_t)
    output x_{T+1}, or the mean of x_2 … x_{T+1}

| here | meaning | shape |
|---|---|---|
| `iterate` | x_t, the query | (..., d) |
| `velocity` | v_{t-1} | (..., d) |
| `average` | mean of x_2 … x_t | (..., d) |
| `released` / `scale` | g~_t, the noisy gradient | (..., d) |
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.optimizers.base import project_to_ball, stepped
from fedpriv.replicates.columns import Scalar


class SgdState(NamedTuple):
    """The server's vectors between two rounds, each (..., d); where no average is asked for it is the iterate."""

    iterate: Tensor
    velocity: Tensor
    average: Tensor


@dataclass(frozen=True)
class ProjectedSGD:
    """Gradient steps of length `step` inside the ball of `radius`."""

    step: Scalar
    radius: Scalar
    momentum: Scalar = 0.0
    averaged: bool = False

    def start(self, initial: Tensor) -> SgdState:
        return SgdState(initial, torch.zeros_like(initial), initial)

    def query(self, state: SgdState) -> Tensor:
        return state.iterate

    def update(self, state: SgdState, released: Tensor, current: Round) -> SgdState:
        gradient = released if current.scale == 1.0 else released / current.scale
        plain = isinstance(self.momentum, float) and self.momentum == 0.0
        velocity = gradient if plain else self.momentum * state.velocity + gradient
        iterate = project_to_ball(stepped(state.iterate, self.step, velocity), self.radius)
        average = state.average.lerp(iterate, 1.0 / current.t) if self.averaged else iterate
        return SgdState(iterate, velocity, average)

    def output(self, state: SgdState) -> Tensor:
        return state.average if self.averaged else state.iterate
