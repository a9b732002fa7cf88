"""An algorithm of your own: what a record contributes, which noise is added, how the server moves.

This one takes gradients with fresh noise in every round, and averages the iterates as it goes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

import fedpriv
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import PlainGradient, Round
from fedpriv.papers.base import Algorithm, Positive, Settings, independent


class State(NamedTuple):
    iterate: Tensor  # (..., d)
    average: Tensor  # (..., d)


@dataclass(frozen=True)
class AveragedSteps:
    """x_{t+1} = x_t - η g~_t; publishes the mean of x_1 … x_t.  It sees released vectors only."""

    step: Scalar

    def start(self, initial: Tensor) -> State:
        return State(initial, initial)

    def query(self, state: State) -> Tensor:
        return state.iterate

    def update(self, state: State, released: Tensor, current: Round) -> State:
        iterate = state.iterate - self.step * released / current.scale
        return State(iterate, state.average + (iterate - state.average) / (current.t + 1))

    def output(self, state: State) -> Tensor:
        return state.average


class OwnSettings(Settings):
    """The keys of [algorithm] beside name and trust."""

    clip: Positive
    step: Positive


fedpriv.add_algorithm(
    Algorithm(
        name="my-algorithm",
        title="Averaged noisy gradient steps",
        source="my own",
        settings=OwnSettings,
        estimator=lambda settings, problem: PlainGradient(settings.clip),
        mechanism=independent,
        optimizer=lambda settings, problem, noise_std: AveragedSteps(settings.step),
    )
)
