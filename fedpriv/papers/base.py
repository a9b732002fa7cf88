"""What a row of the table of algorithms is, and the settings that rows share.

What a server optimizer is: it asks at a point, consumes what is released there, and has an output.

Projected stochastic gradient descent, with momentum and averaging as options.

Sources: Abadi et al. 2016, Algorithm 1 (DP-SGD); Choquette-Choo, Ganesh & Thakurta 2025, section 4.3; averaging
is Polyak & Juditsky 1992, momentum the heavy ball of Polyak 1964.

    v_t = γ v_{t-1} + g~_t
    x_{t+1} = Π(x_t - η v_t)
    output x_{T+1}, or the mean of x_2 … x_{T+1}

| here | meaning | shape |
|---|---|---|
| `iterate` | x_t, the query | (..., d) |
| `velocity` | v_{t-1} | (..., d) |
| `average` | mean of x_2 … x_t | (..., d) |
| `released` / `scale` | g~_t, the noisy gradient | (..., d) |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedpriv.accounting.gaussian import Relation
from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar, never_above
from fedpriv.loss.estimators import Estimator, Round
from fedpriv.loss.objective import Objective
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.mechanism import Mechanism, raised
from fedpriv.noise.registry import ChosenName, MechanismOptions, chosen_mechanism, unfitted
from fedpriv.noise.trust import RECORD, Unit
from fedpriv.noise.workload import Workload
from fedpriv.papers.risk import Bound, Prescription, Released
from fedpriv.participation.orders import Participation, Schedule


class Optimizer(Protocol):
    """A pure state machine over vectors of shape (..., d); leading axes are replicates.

    Guarantee: it sees released (noisy) vectors only, so everything it computes is post-processing.
    """

    def start(self, initial: Tensor) -> Any:
        """The state before round 1, from x_1 of shape (..., d)."""
        ...

    def query(self, state: Any) -> Tensor:
        """The point x_t at which the silos are asked next, shape (..., d)."""
        ...

    def update(self, state: Any, released: Tensor, current: Round) -> Any:
        """The state after round `current.t`, in which `released` was the noisy mean of running sums."""
        ...

    def output(self, state: Any) -> Tensor:
        """The model a run that stopped here would publish, shape (..., d)."""
        ...


def stepped(point: Tensor, step: Scalar, direction: Tensor) -> Tensor:
    """point - step · direction, vectors (..., d), in one pass over memory."""
    if isinstance(step, Tensor):
        return torch.addcmul(point, step, direction, value=-1.0)
    return torch.sub(point, direction, alpha=step)


def project_to_ball(point: Tensor, radius: Scalar) -> Tensor:
    """The nearest point of the ball ‖x‖ ≤ radius around 0, for each leading index of `point` (..., d).

    `point` is the caller's own, and may be written into.
    """
    norm = torch.linalg.vector_norm(point, dim=-1, keepdim=True)
    if never_above(norm, radius):
        return point
    return point.mul_(
        norm.reciprocal_().mul_(radius).clamp_(max=1.0)
    )  # radius / 0 is inf, clamped to 1: 0 stays 0


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


class SgdState(NamedTuple):
    """The server's vectors between two rounds, each (..., d); where no average is asked for it is the iterate."""

    iterate: Tensor
    velocity: Tensor
    average: Tensor


@dataclass(frozen=True)
class ProjectedSGD:
    """Gradient steps of length `step` inside the ball of `radius`."""

    step: Scalar
    radius: Scalar
    momentum: Scalar = 0.0
    averaged: bool = False

    def start(self, initial: Tensor) -> SgdState:
        return SgdState(initial, torch.zeros_like(initial), initial)

    def query(self, state: SgdState) -> Tensor:
        return state.iterate

    def update(self, state: SgdState, released: Tensor, current: Round) -> SgdState:
        gradient = released if current.scale == 1.0 else released / current.scale
        plain = isinstance(self.momentum, float) and self.momentum == 0.0
        velocity = gradient if plain else self.momentum * state.velocity + gradient
        iterate = project_to_ball(stepped(state.iterate, self.step, velocity), self.radius)
        average = state.average.lerp(iterate, 1.0 / current.t) if self.averaged else iterate
        return SgdState(iterate, velocity, average)

    def output(self, state: SgdState) -> Tensor:
        return state.average if self.averaged else state.iterate
