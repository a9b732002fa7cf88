"""What a row of the table of algorithms is, and the settings that rows share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedpriv.accounting.relation import Relation
from fedpriv.errors import InputError
from fedpriv.estimators.gradients import Estimator
from fedpriv.mechanisms import IndependentGaussian, Mechanism, Workload
from fedpriv.mechanisms.columns import raised
from fedpriv.mechanisms.registry import ChosenName, MechanismOptions, chosen_mechanism, unfitted
from fedpriv.objectives import Objective
from fedpriv.optimizers import Optimizer
from fedpriv.participation.base import Participation
from fedpriv.participation.fixed_order import Schedule
from fedpriv.privacy.unit import RECORD, Unit
from fedpriv.theory.excess_risk import Bound, Released
from fedpriv.theory.prescription import Prescription

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """The algorithm's own keys of the scenario's [algorithm] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def clip_factors(self, mechanism: Mechanism, workload: Workload) -> tuple[float, ...] | None:
        """What clips are multiplied by, (T,), where the columns of C leave room; None for nothing."""
        return None


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
    gap: float = math.inf
    """Φ: a bound on F(x_1) - inf F; inf if none is known.  Bounds are printed with it, nothing runs on it."""
    convex_within: float = 0.0
    """The radius of the ball around the start in which losses are convex, with these constants; 0: unknown."""
    relation: Relation = "replace-one"
    """Which data sets are neighbours: theorems ask for twice as much noise where records are exchanged."""
    unit: Unit = RECORD
    """What is clipped and counted, where other fields say record."""

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
    excess_risk: Callable[[Any, Problem, Released], Bound | None] = lambda _settings, _problem, _released: None
    """What the mean excess risk of a run cannot exceed, for convex losses of known smoothness whose records are
    read once in a public order; None where nothing is proved for these settings."""
    published: Literal["points", "rows"] | None = None
    """What noise is fitted to: the points that the optimizer asks at and its output, which are linear in the
    released rows while no projection is active; the rows themselves, of which theorems ask the mean noise; None:
    nothing can be fitted, since the optimizer is neither linear nor has such a theorem, or its sums restart."""
    name_of_mu: str = "mu"
    """What the paper calls the GDP parameter; accepted as a key of [privacy] beside `mu`."""


UNITS = ("clip", "step", "beta", "radius", "diameter")
"""Settings that scale a run's numbers and leave its linear map alike."""


class NoiseSettings(Settings, MechanismOptions):
    """Which noise is added to the running sums; every algorithm can be run with every mechanism."""

    mechanism: ChosenName = Field(
        "tree",
        description="binary tree, fresh noise in every round, banded square root or its inverse, one or a few "
        "buffers, or what serves the algorithm's output best (auto)",
    )
    late_clip: Literal["same", "balanced", "column"] = Field(
        "same",
        description='"column" raises the clips of rounds that the noise covers well, at the same noise; over '
        'several epochs a record\'s clips are redistributed; "balanced" is its name for independent noise in '
        "one pass, S √(T / (T - t + 1))",
    )

    @model_validator(mode="after")
    def _room_is_used_once(self) -> Self:
        if self.scale and self.late_clip != "same":
            raise ValueError("scale and late_clip use up the same room: give one of them")
        if self.late_clip == "balanced" and self.mechanism != IndependentGaussian.name:
            raise ValueError('late_clip = "balanced" is for mechanism = "independent": elsewhere it costs noise')
        return self

    def clip_factors(self, mechanism: Mechanism, workload: Workload) -> tuple[float, ...] | None:
        if self.late_clip == "same":
            return None
        if self.late_clip == "balanced" and not workload.schedule.single_pass:
            raise InputError(
                'algorithm.late_clip = "balanced" is free for a single pass in fixed order only: with epochs = 2 '
                'the noise would grow by 17 %; use "same", or "column"'
            )
        return tuple(raised(mechanism.columns(workload), workload).tolist())

    @property
    def unfitted(self) -> bool:
        """Whether numbers of the mechanism have to be fitted before a run."""
        return unfitted(self.mechanism, self)

    def in_units(self) -> Self:
        """The same with clip, step and sizes of 1, and a mechanism that stands in for one yet to be fitted."""
        ours = type(self).model_fields.keys()
        units: dict[str, Any] = {name: 1.0 for name in UNITS if name in ours}
        if "parameters" in ours:
            units["parameters"] = "explicit"
        return self.model_copy(update=units | {"mechanism": IndependentGaussian.name, "late_clip": "same"})


def chosen(settings: NoiseSettings, _problem: Problem, workload: Workload) -> Mechanism:
    """The mechanism that a scenario names."""
    return chosen_mechanism(settings.mechanism, workload, settings)


def independent(_settings: Settings, _problem: Problem, _workload: Workload) -> Mechanism:
    """Fresh noise in every round, whatever the scenario."""
    return IndependentGaussian()
