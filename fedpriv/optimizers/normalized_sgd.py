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

from fedpriv.estimators.round import Round
from fedpriv.replicates.certain import certain
from fedpriv.replicates.columns import Scalar

_ROUNDING = 1.0 + 1e-6
_OWN_ROUNDING = 1.0 + 5e-7  # half of it: the rest is for whoever measures in another order of sums
_ATTEMPTS = 8


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

    Guarantee: ‖w_{t+1} - w_t‖ ≤ `movement_bound(step)` for the vectors as they are, rounded to their type,
    whatever finite vector is released.
    """

    step: Scalar
    output_round: Scalar = float("inf")

    def start(self, initial: Tensor) -> NormalizedState:
        return NormalizedState(initial, initial)

    def query(self, state: NormalizedState) -> Tensor:
        return state.iterate

    def update(self, state: NormalizedState, released: Tensor, current: Round) -> NormalizedState:
        wide = released.double()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        iterate = _moved(state.iterate, wide / norm.where(norm > 0.0, 1.0), self.step)
        before_output = torch.as_tensor(current.t < self.output_round)
        return NormalizedState(iterate, torch.where(before_output, iterate, state.chosen))

    def output(self, state: NormalizedState) -> Tensor:
        return state.chosen


def _moved(iterate: Tensor, direction: Tensor, step: Scalar) -> Tensor:
    """iterate - step · direction, rounded to the iterate's type so that no step is longer than the bound.

    A rounded step that is too long is taken again, as much shorter; where rounding outweighs the step, so that
    this does not settle, every coordinate is rounded towards where it was.
    """
    start, limit = iterate.double(), step * _OWN_ROUNDING
    move = step * direction
    for _ in range(_ATTEMPTS):
        moved = (start - move).to(iterate.dtype)
        length = torch.linalg.vector_norm(moved.double() - start, dim=-1, keepdim=True)
        over = length > limit
        if certain(~over.any()):
            return moved
        move = torch.where(over, move * (limit / length), move)
    moved = (start - move).to(iterate.dtype)
    nearer = torch.where((moved.double() - start).abs() > move.abs(), moved.nextafter(iterate), moved)
    return torch.where(over, nearer, moved)
