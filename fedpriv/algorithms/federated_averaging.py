"""Plain federated averaging, the non-private reference: McMahan et al. 2017, Algorithm 1, with all silos."""

import math
from typing import Annotated

from pydantic import Field

from fedpriv.algorithms.base import Algorithm, Positive, Problem, Settings, independent
from fedpriv.errors import InputError
from fedpriv.estimators.gradients import PlainGradient
from fedpriv.objectives.base import UNCLIPPED
from fedpriv.objectives.local_training import LocalTraining
from fedpriv.optimizers import ProjectedSGD

_Whole = Annotated[int, Field(ge=1)]


class AveragingSettings(Settings):
    step: Positive = Field(description="η of the silos' own steps")
    local_batch: _Whole = Field(description="records in one local step")
    local_epochs: _Whole = Field(1, description="local passes over a silo's records of the round")


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
