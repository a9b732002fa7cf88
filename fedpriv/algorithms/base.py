"""What a row of the table of algorithms is, and the settings that rows share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fedpriv.accounting.relation import Relation
from fedpriv.estimators.gradients import Estimator
from fedpriv.mechanisms import IndependentGaussian, Mechanism, Workload
from fedpriv.mechanisms.registry import ChosenName, MechanismOptions, chosen_mechanism
from fedpriv.objectives import Objective
from fedpriv.optimizers import Optimizer
from fedpriv.participation.base import Participation
from fedpriv.participation.fixed_order import Schedule
from fedpriv.theory.prescription import Prescription

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """The algorithm's own keys of the scenario's [algorithm] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True)
class Problem:
    """The public numbers of a run from which an algorithm's parameters follow."""

    dimension: int
    lipschitz: float
    """G: a bound on the norm of one record's gradient; inf if none is known."""
    smoothness: float
    """L: a bound on the Lipschitz constant of one record's gradient; inf if none is known."""
    convex: bool
    """Whether the loss is known to be convex, with these constants valid everywhere."""
    batch: int
    """B: records of all silos in one round."""
    schedule: Participation
    """Which records are read in which round."""
    epsilon: float | None = None
    """ε of the guarantee at `delta`; None for a run that is not private."""
    delta: float = 1e-5
    seed: int = 0
    """Of public random choices an optimizer makes before round 1."""
    silos: int = 1
    relation: Relation = "replace-one"
    """Which data sets are neighbours: theorems ask for twice as much noise where records are exchanged."""

    @property
    def rounds(self) -> int:
        """T."""
        return self.schedule.rounds

    @property
    def records(self) -> int:
        """n: records of all silos that are read."""
        return self.batch * self.schedule.batches_held


@dataclass(frozen=True)
class Algorithm:
    """One row of the table."""

    name: str
    title: str
    source: str
    settings: type[Settings]
    estimator: Callable[[Any, Problem], Estimator]
    mechanism: Callable[[Any, Problem, Workload], Mechanism]
    """For the running sums that the estimator gives under the run's schedule."""
    optimizer: Callable[[Any, Problem, float], Optimizer]
    """From settings, problem and the standard deviation of a fresh noise vector's coordinates in the mean."""
    objective: Callable[[Any, Problem, Objective], Objective] = lambda _settings, _problem, objective: objective
    """How the algorithm looks at the model's loss: as it is, unless the row says otherwise."""
    schedule: Callable[[Any, Schedule], Participation] = lambda _settings, declared: declared
    """What the row makes of the scenario's rounds and places; the declared schedule itself if left out."""
    trusts: tuple[str, ...] = ("untrusted", "trusted", "secure-aggregation")
    """The trust settings under which the row's releases are all that anyone outside learns."""
    theorems: Callable[[Any, Problem], tuple[Prescription, ...]] = lambda _settings, _problem: ()
    """What theory asks for at these numbers; shown beside what a scenario uses, by `fedpriv privacy theorem`."""
    name_of_mu: str = "mu"
    """What the paper calls the GDP parameter; accepted as a key of [privacy] beside `mu`."""


class NoiseSettings(Settings, MechanismOptions):
    """Which noise is added to the running sums; every algorithm can be run with every mechanism."""

    mechanism: ChosenName = Field(
        "tree", description="binary tree, fresh noise in every round, or banded square root"
    )


def chosen(settings: NoiseSettings, _problem: Problem, workload: Workload) -> Mechanism:
    """The mechanism that a scenario names."""
    return chosen_mechanism(settings.mechanism, workload, settings)


def independent(_settings: Settings, _problem: Problem, _workload: Workload) -> Mechanism:
    """Fresh noise in every round, whatever the scenario."""
    return IndependentGaussian()
