"""The server of silos that take steps by themselves: it averages where they have got to, every so many rounds.

    w_{t+1} = w_t - η Σ_i p_i release_{i,t}     the mean of the silos' own points
    x_{t+1} = w_{t+1} if t is a multiple of `every`, else x_t

Source: McMahan et al. 2017, Algorithm 1, with the steps of Abadi et al. 2016, Algorithm 1, at the clients.

| here | meaning | shape |
|---|---|---|
| `mean` | w_t | (..., d) |
| `sent` | x_t, the query | (..., d) |
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.replicates.columns import Scalar


class AveragingState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    mean: Tensor
    sent: Tensor


@dataclass(frozen=True)
class LocalAveraging:
    """Averages of silos that step by `step`, sent to them `every` so many rounds."""

    step: Scalar
    every: int

    def start(self, initial: Tensor) -> AveragingState:
        return AveragingState(initial, initial)

    def query(self, state: AveragingState) -> Tensor:
        return state.sent

    def update(self, state: AveragingState, released: Tensor, current: Round) -> AveragingState:
        mean = state.mean - self.step * released
        return AveragingState(mean, mean if current.t % self.every == 0 else state.sent)

    def output(self, state: AveragingState) -> Tensor:
        return state.mean
