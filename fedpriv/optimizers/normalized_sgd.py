"""Normalized stochastic gradient descent: every step has length η, whatever the noise.

Source: Tran & Cutkosky, Momentum Aggregation for Private Non-convex ERM (NeurIPS 2022), Algorithms 1 and 2.

    w_{t+1} = w_t - η m^_t / ‖m^_t‖,  and w_{t+1} = w_t if m^_t = 0
    output w_{T+1}, or w_U with U uniform on 1 … T (the iterate that the paper's theorems are about)

| here | meaning | shape |
|---|---|---|
| `iterate` | w_t, the query | (..., d) |
| `chosen` | w_min(t, U) | (..., d) |
| `released` | m^_t, the noisy momentum | (..., d) |
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.rounds import Round, Scalar

_ROUNDING = 1.0 + 1e-6


def movement_bound(step: float) -> float:
    """The most that ‖w_{t+1} - w_t‖ can be, floating-point rounding included: η(1 + 1e-6)."""
    return step * _ROUNDING


class NormalizedState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    iterate: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class NormalizedSGD:
    """Steps of length `step`, taken after the silos' momenta are averaged.

    `output_round` is U, drawn by public randomness before the run; infinity publishes the last iterate.

    Guarantee: ‖w_{t+1} - w_t‖ ≤ `movement_bound(step)`, whatever is released.
    """

    step: Scalar
    output_round: Scalar = float("inf")

    def start(self, initial: Tensor) -> NormalizedState:
        return NormalizedState(initial, initial)

    def query(self, state: NormalizedState) -> Tensor:
        return state.iterate

    def update(self, state: NormalizedState, released: Tensor, current: Round) -> NormalizedState:
        norm = torch.linalg.vector_norm(released, dim=-1, keepdim=True)
        direction = released / norm.where(norm > 0.0, 1.0)
        iterate = state.iterate - self.step * direction
        before_output = torch.as_tensor(current.t < self.output_round)
        return NormalizedState(iterate, torch.where(before_output, iterate, state.chosen))

    def output(self, state: NormalizedState) -> Tensor:
        return state.chosen
