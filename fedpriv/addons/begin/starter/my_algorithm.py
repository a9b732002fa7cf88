"""An algorithm of your own: contribution of a record, mechanism of the noise, and server optimizer.

This one takes gradients with fresh noise in every round, and publishes the mean of the iterates.
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
    """Optimizer x_{t+1} = x_t - η g~_t that publishes the mean of x_1 … x_{t+1} after round t = 1, 2, ….

    η is `step`, and g~_t the noisy mean of the clipped gradients.  An optimizer sees released vectors only.
    """

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
    """Keys of [algorithm] beside name and trust."""

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
