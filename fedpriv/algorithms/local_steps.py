"""Settings of rows whose clients take steps of their own, and the objective that trains so."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from fedpriv.algorithms.base import Positive, Problem, Settings
from fedpriv.errors import InputError
from fedpriv.objectives import Objective
from fedpriv.objectives.local_steps import LocalSteps

Whole = Annotated[int, Field(ge=1)]


class LocalStepsSettings(Settings):
    """Steps that a client takes on its own records in every round in which it takes part."""

    local_steps: Whole = Field(description="K: steps of a client on its own records; 1 step is its mean gradient")
    local_step: Positive = Field(description="η of the clients' own steps")
    local_batch: Whole | None = Field(None, description="records in one local step; all of a client's if left out")


class OptionalLocalSteps(Settings):
    """The same for a row that also takes plain gradients."""

    local_steps: Whole | None = Field(
        None, description="K: steps of a client on its own records; its gradient if left out"
    )
    local_step: Positive | None = Field(None, description="η of the clients' own steps; goes with local_steps")
    local_batch: Whole | None = Field(None, description="records in one local step; all of a client's if left out")

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if (self.local_steps is None) != (self.local_step is None):
            raise ValueError("local_steps and local_step come together: how many, and how long")
        if self.local_batch is not None and self.local_steps is None:
            raise ValueError("local_batch is of local steps: give local_steps and local_step, or leave it out")
        return self


def trained(settings: LocalStepsSettings, problem: Problem, objective: Objective) -> Objective:
    """The clients' own training; InputError unless units of several records are clipped."""
    return _trained(objective, problem, settings.local_step, settings.local_steps, settings.local_batch)


def optionally_trained(settings: OptionalLocalSteps, problem: Problem, objective: Objective) -> Objective:
    """The same, or the plain gradient where no local steps are given."""
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
