"""A server that follows a quantile of its clients' norms with its clip, around any optimizer.

Source: Andrew, Thakkar, McMahan & Ramaswamy 2021, Algorithm 1, with both noisy means in one vector.

    b~_t = ½ + (last coordinate) / ρ
    C_{t+1} = C_t exp(-η_C (b~_t - γ))
    the optimizer gets C_t · (first d coordinates)

| here | paper | shape |
|---|---|---|
| `released` | Δ~_t / C_t, and ρ (b~_t - ½) | (..., d + 1) |
| `clip` | C_t | (..., 1) |
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.objectives.quantile_clip import LARGEST, SMALLEST
from fedpriv.optimizers.base import Optimizer
from fedpriv.replicates.columns import Scalar


class QuantileState(NamedTuple):
    """The inner optimizer's state, and the clip (..., 1)."""

    inner: Any
    clip: Tensor


@dataclass(frozen=True)
class QuantileClipping:
    """`inner` over d coordinates; asks at (x_t, C_t)."""

    inner: Optimizer
    weight: Scalar
    """ρ."""
    quantile: Scalar
    """γ: the share of the clients whose vectors are to fit."""
    rate: Scalar
    """η_C."""

    def start(self, initial: Tensor) -> QuantileState:
        return QuantileState(self.inner.start(initial[..., :-1]), initial[..., -1:])

    def query(self, state: QuantileState) -> Tensor:
        return torch.cat([self.inner.query(state.inner), state.clip], dim=-1)

    def update(self, state: QuantileState, released: Tensor, current: Round) -> QuantileState:
        moved, told = released[..., :-1], released[..., -1:]
        inner = self.inner.update(state.inner, moved * state.clip, current)
        fitting = 0.5 + told / (self.weight * current.scale)
        clip = state.clip * torch.exp(-self.rate * (fitting - self.quantile))
        return QuantileState(inner, clip.clamp(SMALLEST, LARGEST))

    def output(self, state: QuantileState) -> Tensor:
        return self.inner.output(state.inner)
