"""What a row of the table of algorithms is, and the settings that rows share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedpriv.estimators import Estimator
from fedpriv.mechanisms import BandedSquareRoot, BinaryTree, IndependentGaussian, Mechanism
from fedpriv.objectives import Objective
from fedpriv.optimizers import Optimizer

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """The algorithm's own keys of the scenario's [algorithm] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def batches(self, t: int) -> int:
        """How many batches of its order a silo reads in round t; other numbers than 1 need a single pass."""
        return 1


@dataclass(frozen=True)
class Problem:
    """The public numbers of a run from which an algorithm's parameters follow."""

    rounds: int
    dimension: int
    lipschitz: float
    """G: a bound on the norm of one record's gradient; inf if none is known."""
    smoothness: float
    """L: a bound on the Lipschitz constant of one record's gradient; inf if none is known."""
    batch: int = 1
    """B: records of all silos in one round."""
    places: int = 0
    """Rounds of one pass over the records; 0 stands for all rounds (one pass)."""
    seed: int = 0
    """Of public random choices an optimizer makes before round 1."""

    @property
    def records(self) -> int:
        """n: records of all silos."""
        return self.batch * (self.places or self.rounds)


@dataclass(frozen=True)
class Algorithm:
    """One row of the table."""

    name: str
    title: str
    source: str
    settings: type[Settings]
    estimator: Callable[[Any, Problem], Estimator]
    mechanism: Callable[[Any, Problem], Mechanism]
    optimizer: Callable[[Any, Problem, float], Optimizer]
    """From settings, problem and the standard deviation of a fresh noise vector's coordinates in the mean."""
    objective: Callable[[Any, Problem, Objective], Objective] = lambda _settings, _problem, objective: objective
    """How the algorithm looks at the model's loss: as it is, unless the row says otherwise."""
    name_of_mu: str = "mu"
    """What the paper calls the GDP parameter; accepted as a key of [privacy] beside `mu`."""


class NoiseSettings(Settings):
    """Which noise is added to the running sums; every algorithm can be run with every mechanism."""

    mechanism: Literal["tree", "independent", "banded"] = Field(
        "tree", description="binary tree, fresh noise in every round, or banded square root"
    )
    bands: Annotated[int, Field(ge=1)] = Field(16, description='diagonals of C, for mechanism = "banded"')


def chosen_mechanism(settings: NoiseSettings, keep: float) -> Mechanism:
    """The mechanism that a scenario names, for running sums with decay `keep`."""
    match settings.mechanism:
        case "tree":
            return BinaryTree(keep)
        case "banded":
            return BandedSquareRoot(keep, settings.bands)
        case "independent":
            return IndependentGaussian()
