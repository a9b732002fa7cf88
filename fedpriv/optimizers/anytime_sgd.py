"""Anytime-averaged projected SGD: the server of DP-μ²-FL.

Source: Reshef & Levy 2024, Algorithms 1 and 2, server lines; anytime averaging is Cutkosky 2019.

    w_{t+1} = Π_K(w_t - η q~_t)
    x_{t+1} = (1 - a) x_t + a w_{t+1},   a = α_{t+1} / α_{1:t+1}
    output x_T: what is released in round T moves nothing that is published; or x_{T+1}, which it does move

| here | paper | shape |
|---|---|---|
| `iterate` | w_t | (..., d) |
| `ask` | x_t, the next query | (..., d) |
| `answered` | the query that was answered last; after T rounds x_T | (..., d) |
| `released` | q~_t, the mean of the silos' running sums with noise | (..., d) |
| `step` | η | scalar |
| `radius` | D/2: K is the ball of diameter D around 0 | scalar |
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.estimators.weights import LinearWeights, Weights
from fedpriv.optimizers.base import project_to_ball, stepped
from fedpriv.replicates.columns import Scalar


class AnytimeState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    iterate: Tensor
    ask: Tensor
    answered: Tensor


@dataclass(frozen=True)
class AnytimeSGD:
    """Projected SGD whose query points are the weighted average of its iterates.

    (t-1) ‖x_t - x_{t-1}‖ ≤ 2D follows from the averaging weights; DP-μ²-FL's bound S = G + 2LD rests on it.
    """

    step: Scalar
    radius: Scalar
    weights: Weights = field(default_factory=LinearWeights)
    following: bool = False
    """Whether the point after the last round, x_{T+1}, is published in place of x_T."""

    def start(self, initial: Tensor) -> AnytimeState:
        return AnytimeState(iterate=initial, ask=initial, answered=initial)

    def query(self, state: AnytimeState) -> Tensor:
        return state.ask

    def update(self, state: AnytimeState, released: Tensor, current: Round) -> AnytimeState:
        iterate = project_to_ball(stepped(state.iterate, self.step, released), self.radius)
        following = current.t + 1
        share = self.weights.at(following) / self.weights.total(following)
        return AnytimeState(iterate, ask=state.ask.lerp(iterate, share), answered=state.ask)

    def output(self, state: AnytimeState) -> Tensor:
        return state.ask if self.following else state.answered
