"""Online-to-non-convex conversion: online gradient descent chooses the steps, not the points.

Source: Cutkosky, Mehta & Orabona 2023; Kornowski, Liu & Talwar, Algorithm 2.

    z_t = x_{t-1} + s_t Δ_t,   x_t = x_{t-1} + Δ_t            s_t uniform on [0, 1)
    Δ_{t+1} = Δ_t - η g~_t, projected on the ball of radius D;  Δ_1 = 0
    output: the mean of z over one window of W rounds, drawn among the windows that are complete

| here | paper | shape |
|---|---|---|
| `iterate` | x_{t-1} | (..., d) |
| `move` | Δ_t | (..., d) |
| `ask` | z_t, the query: not an iterate | (..., d) |
| `window_sum` | Σ z over the window that t lies in, before z_t | (..., d) |
| `published` | the output, if the run stopped here | (..., d) |
| `radius`, `step`, `choices.window` | D, η, M | |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.optimizers.base import project_to_ball, stepped
from fedpriv.randomness import public_generator
from fedpriv.replicates.columns import PER_REPLICATE, Scalar


@dataclass(frozen=True)
class PublicChoices:
    """The optimizer's coins: public, drawn from the seed, no matter what is released.

    `publishes(k)` is true with probability 1/k, so the last true one is uniform over the windows so far: the
    paper draws it once, and a run that stops early has its draw too.
    """

    seeds: tuple[int, ...] = field(metadata=PER_REPLICATE)
    rounds: int
    window: int
    last: bool = False
    """Whether always the last complete window is published; the theorems are about a random one."""

    def position(self, t: int, like: Tensor) -> Scalar:
        """s_t, shape (replicates, 1), or a number for one replicate."""
        return _column(self._positions[:, t - 1], like)

    def publishes(self, window: int, like: Tensor) -> Tensor:
        """Whether the `window`-th window (from 1) becomes the output, shape (replicates, 1) or ()."""
        if self.last:
            return torch.ones((), dtype=torch.bool, device=like.device)
        return torch.as_tensor(_column(window * self._lots[:, window - 1], like)) < 1.0

    @cached_property
    def _positions(self) -> NDArray[np.float64]:
        return _uniform(self.seeds, "positions", self.rounds + 1)

    @cached_property
    def _lots(self) -> NDArray[np.float64]:
        return _uniform(self.seeds, "windows", self.rounds // self.window)


class O2NCState(NamedTuple):
    """The server's vectors before round t, each (..., d)."""

    iterate: Tensor
    move: Tensor
    ask: Tensor
    window_sum: Tensor
    published: Tensor


@dataclass(frozen=True)
class O2NC:
    """O2NC with projected online gradient descent.

    Whatever is released, ‖Δ_t‖ ≤ D and ‖z_t - z_{t-1}‖ ≤ 2D; the queries of a window lie within
    ((W + 1)/2 - 1/W) D of their mean.  Everything, the choice of the window included, is post-processing of
    releases and public coins.
    """

    step: Scalar
    radius: Scalar
    choices: PublicChoices

    def start(self, initial: Tensor) -> O2NCState:
        still = torch.zeros_like(initial)
        return O2NCState(initial, still, initial, still, initial)

    def query(self, state: O2NCState) -> Tensor:
        return state.ask

    def update(self, state: O2NCState, released: Tensor, current: Round) -> O2NCState:
        window, t = self.choices.window, current.t
        window_sum, published = state.window_sum + state.ask, state.published
        if t % window == 0:
            chosen = self.choices.publishes(t // window, released)
            published = torch.where(chosen, window_sum / window, published)
            window_sum = torch.zeros_like(window_sum)
        iterate = state.iterate + state.move
        move = project_to_ball(stepped(state.move, self.step / current.scale, released), self.radius)
        ask = iterate + self.choices.position(t + 1, released) * move
        return O2NCState(iterate, move, ask, window_sum, published)

    def output(self, state: O2NCState) -> Tensor:
        """A window's mean; x_0 before the first window is complete."""
        return state.published


def _uniform(seeds: Sequence[int], purpose: str, count: int) -> NDArray[np.float64]:
    return np.stack([public_generator(seed, "o2nc", purpose).random(count) for seed in seeds])


def _column(values: NDArray[np.float64], like: Tensor) -> Scalar:
    return float(values[0]) if len(values) == 1 else like.new_tensor(values).unsqueeze(-1)
