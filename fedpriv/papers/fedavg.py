"""Clients that train by themselves: McMahan et al., Communication-Efficient Learning of Deep Networks from
Decentralized Data (AISTATS 2017), Algorithm 1.

Two rows, and the settings of all rows whose clients take steps of their own.

**Federated averaging** with all silos is the reference without privacy.

**Local DP-SGD** is DP-SGD (Abadi et al. 2016, Algorithm 1) inside the silos: noisy clipped steps between two
averages, as with Opacus inside a Flower client.  The server averages where the silos have got to, every so many
rounds:

    w_{t+1} = w_t - η Σ_i p_i release_{i,t}     the mean of the silos' own points
    x_{t+1} = w_{t+1} if t is a multiple of `every`, else x_t

| here | meaning | shape |
|---|---|---|
| `mean` | w_t | (..., d) |
| `sent` | x_t, the query | (..., d) |
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

from pydantic import Field, model_validator
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import LocalGradient, PlainGradient, Round
from fedpriv.loss.objective import UNCLIPPED, Objective
from fedpriv.loss.views import LocalSteps, LocalTraining
from fedpriv.papers.base import Algorithm, Count, Positive, Problem, Settings, independent
from fedpriv.papers.sgd import ProjectedSGD
from fedpriv.participation.orders import Schedule


class LocalStepsSettings(Settings):
    """Steps that a client takes on its own records in every round in which it takes part."""

    local_steps: Count = Field(description="K: steps of a client on its own records; 1 step is its mean gradient")
    local_step: Positive = Field(description="η of the clients' own steps")
    local_batch: Count | None = Field(None, description="records in one local step; all of a client's if left out")


class OptionalLocalSteps(Settings):
    """The same for a row that also takes plain gradients."""

    local_steps: Count | None = Field(
        None, description="K: steps of a client on its own records; its gradient if left out"
    )
    local_step: Positive | None = Field(None, description="η of the clients' own steps; goes with local_steps")
    local_batch: Count | None = Field(None, description="records in one local step; all of a client's if left out")

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if (self.local_steps is None) != (self.local_step is None):
            raise ValueError("local_steps and local_step come together: how many, and how long")
        if self.local_batch is not None and self.local_steps is None:
            raise ValueError("local_batch is of local steps: give local_steps and local_step, or leave it out")
        return self


def trained(settings: LocalStepsSettings, problem: Problem, objective: Objective) -> Objective:
    """Replace gradients by the clients' own training; InputError unless units of several records are clipped."""
    return _trained(objective, problem, settings.local_step, settings.local_steps, settings.local_batch)


def optionally_trained(settings: OptionalLocalSteps, problem: Problem, objective: Objective) -> Objective:
    """Do the same, or keep the plain gradient where no local steps are given."""
    if settings.local_steps is None or settings.local_step is None:
        return objective
    return _trained(objective, problem, settings.local_step, settings.local_steps, settings.local_batch)


def _trained(objective: Objective, problem: Problem, step: float, steps: int, batch: int | None) -> Objective:
    if problem.unit.records == 1:
        raise InputError(
            "algorithm.local_steps: what trains and is clipped is a client with its records, and privacy.unit is "
            f'one {problem.unit.noun}; set privacy.unit = "client" and privacy.records of 2 or more'
        )
    return LocalSteps(objective, step, steps, batch)


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


class LocalSettings(Settings):
    clip: Positive = Field(description="C: norm bound on one record's gradient")
    step: Positive = Field(description="η of the silos' own steps")
    local_steps: Count = Field(
        description="K: steps of every silo between two averages; federation.rounds counts steps, each a release"
    )


def _whole_averages(settings: LocalSettings, declared: Schedule) -> Schedule:
    if declared.rounds % settings.local_steps:
        raise InputError(
            f"algorithm.local_steps = {settings.local_steps}: {declared.rounds} rounds, which are silos' steps, "
            "are no whole number of averages; let federation.rounds be a multiple"
        )
    return declared


LOCAL_DP_SGD = Algorithm(
    name="local-dp-sgd",
    title="Local DP-SGD",
    source="Abadi et al. (CCS 2016), Algorithm 1, as local training in McMahan et al. (2017), Algorithm 1",
    settings=LocalSettings,
    schedule=_whole_averages,
    # noise is there before a silo's next step, so that only the silo itself can add it
    trusts=("untrusted",),
    estimator=lambda settings, _problem: LocalGradient(settings.clip, settings.step, settings.local_steps),
    mechanism=independent,
    optimizer=lambda settings, _problem, _noise_std: LocalAveraging(settings.step, settings.local_steps),
)


class AveragingSettings(Settings):
    step: Positive = Field(description="η of the silos' own steps")
    local_batch: Count = Field(description="records in one local step")
    local_epochs: Count = Field(1, description="local passes over a silo's records of the round")


def _displacement(problem: Problem) -> PlainGradient:
    if problem.epsilon is not None:
        raise InputError(
            "algorithm.name = 'fedavg': what a silo's own training moves has no bound for one record, so that no "
            'noise can be calibrated to it; set privacy.mode = "none"'
        )
    return PlainGradient(UNCLIPPED)


FEDERATED_AVERAGING = Algorithm(
    name="fedavg",
    title="Federated averaging",
    source="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data (2017)",
    settings=AveragingSettings,
    estimator=lambda _settings, problem: _displacement(problem),
    mechanism=independent,
    # a silo's increment is query - its trained model
    objective=lambda settings, _problem, objective: LocalTraining(
        objective, settings.step, settings.local_batch, settings.local_epochs
    ),
    # the mean of the silos' models: one step of length 1 along the mean displacement
    optimizer=lambda _settings, _problem, _noise_std: ProjectedSGD(step=1.0, radius=math.inf),
)
