"""The row of the table that describes an algorithm, and what all rows share.

A row (`Algorithm`) says how estimator, mechanism and optimizer follow from its `Settings`, the keys of the
scenario's [algorithm] section, and from the `Problem`, a run's public numbers.  A server `Optimizer` asks at a
point, consumes what is released there, and has an output.  `Prescription` holds the numbers of a theorem beside
those of a scenario, `Bound` what the mean excess risk of a run cannot exceed at the run's own numbers.

Bounds are derived in the files of their papers, in the way of the papers' proofs, with every constant: a theorem
says what happens at its own parameters, a bound says it at any.  There F is the mean of convex losses of
smoothness M, x* its best point in the ball K of radius R around the start, every record is read once, e_t is what
is released in round t minus what F itself would have released, and s_t its root mean square norm.

Steps that change over a run, and a fading average of its models: for every row whose optimizer has a `step`.

    η_t = η · min(1, t / W) · f_t                        W: rounds of the warm-up, T: of the run
    f_t = 1, ½ (1 + cos(π p_t)), or drop^(times so far),  p_t = max(0, t - 1 - W) / (T - W)
    a_t = (β - β^t)/(1 - β^t) a_{t-1} + (1 - β)/(1 - β^t) x_{t+1}

a_t is the mean of x_2 … x_{t+1}, of which one weighs β times the next (as De et al. 2022 publish).  Cosine:
Loshchilov & Hutter 2017; warm-up: Goyal et al. 2017.

| here | meaning | shape |
|---|---|---|
| `factors` | η_t / η of round 1, 2, … | (T,) |
| `mean` | a_t | (..., d) |

Guarantee: factors and β are public before round 1, and vectors are those that the inner optimizer has: whatever is
computed here is post-processing.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, Self, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedpriv.accounting.gaussian import Relation
from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.clipping import never_above
from fedpriv.loss.estimators import Estimator, Round
from fedpriv.loss.objective import Objective
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.mechanism import Mechanism, clip_multipliers
from fedpriv.noise.registry import ChosenName, MechanismOptions, make_mechanism, needs_fit
from fedpriv.noise.series import Floats, Workload
from fedpriv.noise.trust import RECORD, Unit
from fedpriv.participation.orders import FixedOrder, Participation


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


def take_step(point: Tensor, step: Scalar, direction: Tensor) -> Tensor:
    """point - step · direction, vectors (..., d), in one pass over memory."""
    return (
        torch.addcmul(point, step, direction, value=-1.0)
        if isinstance(step, Tensor)
        else torch.sub(point, direction, alpha=step)
    )


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
Count = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """The algorithm's own keys of the scenario's [algorithm] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def clip_factors(self, mechanism: Mechanism, workload: Workload) -> tuple[float, ...] | None:
        """Factors of the clips, (T,), where the columns of C leave room; None for 1 everywhere."""
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
        return self.batch * self.schedule.batches_per_silo


class Condition(NamedTuple):
    """`text` as the paper writes it, `left` and `right` the two numbers of `left ≤ right`."""

    text: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        """Up to rounding, as equality is what many parameter choices aim at."""
        return self.left <= self.right * (1.0 + 1e-12)


class Prescription(NamedTuple):
    """The numbers of one theorem; none where it cannot be evaluated, and then `refusal` says why."""

    theorem: str
    numbers: Mapping[str, float]
    """By the names that runs use: rounds, batch, clip, noise std, and the fields of the optimizer."""
    conditions: tuple[Condition, ...] = ()
    assumption: str = ""
    """What no number can show."""
    refusal: str | None = None
    """Why a scenario cannot run with these numbers, on one line; None if it can."""


Arguments = ParamSpec("Arguments")


def catch_refusal(
    formula: Callable[Concatenate[str, Arguments], Prescription],
) -> Callable[Concatenate[str, Arguments], Prescription]:
    """Make an InputError of `formula(theorem, …)` the refusal of a prescription without numbers."""

    @functools.wraps(formula)
    def evaluated(theorem: str, /, *args: Arguments.args, **options: Arguments.kwargs) -> Prescription:
        try:
            return formula(theorem, *args, **options)
        except InputError as error:
            return Prescription(theorem, {}, refusal=str(error))

    return evaluated


class ReleaseNumbers(NamedTuple):
    """The public numbers of what a run releases."""

    batch: int
    """B: records of all silos in a round."""
    dimension: int
    clips: Floats
    """Norm bounds on one record's increment, (T,)."""
    stds: Floats
    """Of the noise in what is released, per coordinate, in the mean over silos, (T,)."""

    @property
    def sum_errors(self) -> Floats:
        """s_t of running sums with decay 1: the sampling of all rounds so far, and the noise of this one; (T,)."""
        return np.asarray(np.sqrt(np.cumsum(self.clips**2) / self.batch + self.dimension * self.stds**2))

    @property
    def gradient_errors(self) -> Floats:
        """s_t of what is released of one round's records alone; (T,)."""
        return np.asarray(np.sqrt(self.clips**2 / self.batch + self.dimension * self.stds**2))


class Bound(NamedTuple):
    """`value` bounds the mean excess risk if the conditions hold; infinite where they leave nothing to say."""

    value: float
    conditions: tuple[Condition, ...]
    assumption: str = (
        "records are independent, and no increment is longer than its clip; over the best point of the ball"
    )


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
    model: Callable[[Any, Objective], Objective] | None = None
    """How the scenario's model becomes one whose point holds more than its parameters: what silos are asked about,
    what is evaluated and published; the scenario's own if left out."""
    schedule: Callable[[Any, FixedOrder], Participation] = lambda _settings, declared: declared
    """Participation of the row at the scenario's rounds and places; the declared schedule itself if left out."""
    trusts: tuple[str, ...] = ("untrusted", "trusted", "secure-aggregation")
    """The trust settings under which the row's releases are all that anyone outside learns."""
    theorems: Callable[[Any, Problem], tuple[Prescription, ...]] = lambda _settings, _problem: ()
    """Numbers that theory asks for; shown beside what a scenario uses, by `fedpriv privacy theorem`."""
    excess_risk: Callable[[Any, Problem, ReleaseNumbers], Bound | None] = lambda *_: None
    """Bound on the mean excess risk of a run, for convex losses of known smoothness whose records are read once
    in a public order; None where nothing is proved for these settings."""
    published: Literal["points", "rows"] | None = None
    """Target of fitted noise: the points that the optimizer asks at and its output, which are linear in the
    released rows while no projection is active; the rows themselves, of which theorems ask the mean noise; None:
    nothing can be fitted, since the optimizer is neither linear nor has such a theorem, or its sums restart."""
    name_of_mu: str = "mu"
    """Name of the GDP parameter in the paper; accepted as a key of [privacy] beside `mu`."""


SCALE_SETTINGS = ("clip", "step", "beta", "radius", "diameter")
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
        return tuple(clip_multipliers(mechanism.columns(workload), workload).tolist())

    @property
    def needs_fit(self) -> bool:
        """Whether numbers of the mechanism have to be fitted before a run."""
        return needs_fit(self.mechanism, self)

    def with_unit_scale(self) -> Self:
        """The same with clip, step and sizes of 1, and a mechanism that stands in for one yet to be fitted."""
        ours = type(self).model_fields.keys()
        units: dict[str, Any] = {name: 1.0 for name in SCALE_SETTINGS if name in ours}
        if "parameters" in ours:
            units["parameters"] = "explicit"
        return self.model_copy(update=units | {"mechanism": IndependentGaussian.name, "late_clip": "same"})


def choose_mechanism(settings: NoiseSettings, _problem: Problem, workload: Workload) -> Mechanism:
    """The mechanism that a scenario names."""
    return make_mechanism(settings.mechanism, workload, settings)


def independent(_settings: Settings, _problem: Problem, _workload: Workload) -> Mechanism:
    """Fresh noise in every round, whatever the scenario."""
    return IndependentGaussian()


class SteppingOptimizer(Optimizer, Protocol):
    """An optimizer, a frozen dataclass, that moves by `step` times something; where it stands knows no step."""

    @property
    def step(self) -> Scalar: ...


@dataclass(frozen=True)
class ScheduledSteps:
    """`inner`, whose step in round t is its own times `factors[t - 1]`."""

    inner: SteppingOptimizer
    factors: tuple[float, ...]

    def start(self, initial: Tensor) -> Any:
        return self.inner.start(initial)

    def query(self, state: Any) -> Tensor:
        return self.inner.query(state)

    def update(self, state: Any, released: Tensor, current: Round) -> Any:
        step = self.inner.step * self.factors[current.t - 1]
        return cast(SteppingOptimizer, dataclasses.replace(cast(Any, self.inner), step=step)).update(
            state, released, current
        )

    def output(self, state: Any) -> Tensor:
        return self.inner.output(state)


class FadingState(NamedTuple):
    """The inner optimizer's state, and the mean (..., d)."""

    inner: Any
    mean: Tensor


@dataclass(frozen=True)
class FadingAverage:
    """`inner`, whose models so far are published in their mean: one counts `decay` times the next."""

    inner: Optimizer
    decay: Scalar
    """β."""

    def start(self, initial: Tensor) -> FadingState:
        return FadingState(self.inner.start(initial), initial)

    def query(self, state: FadingState) -> Tensor:
        return self.inner.query(state.inner)

    def update(self, state: FadingState, released: Tensor, current: Round) -> FadingState:
        inner = self.inner.update(state.inner, released, current)
        weight = (1.0 - self.decay) / (1.0 - self.decay**current.t)
        return FadingState(inner, state.mean + weight * (self.inner.output(inner) - state.mean))

    def output(self, state: FadingState) -> Tensor:
        return state.mean


Share = Annotated[float, Field(gt=0, lt=1)]


class ScheduledSettings(Settings):
    """Keys of every row whose server steps: how its step changes, and which mean of its models is published."""

    step_schedule: Literal["cosine", "drops"] | None = Field(
        None, description="how the step shrinks: half a cosine down to 0, or after step_drops; not if left out"
    )
    warm_up: Share | None = Field(
        None, description="share of the rounds in which the step rises to its full length; 0 if left out"
    )
    step_drops: Annotated[tuple[Share, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description='shares of the rounds after each of which the step is shorter, with "drops"'
    )
    step_drop: Share | None = Field(
        None, description="what the step is multiplied by at each of step_drops; 0.1 if left out"
    )
    fading_average: Share | None = Field(
        None, description="β: the mean of all models is published, one weighing β times the next"
    )

    @model_validator(mode="after")
    def _of_drops(self) -> Self:
        if (self.step_schedule == "drops") != (self.step_drops is not None):
            raise ValueError('step_schedule = "drops" and step_drops come together: which, and when')
        if self.step_drop is not None and self.step_drops is None:
            raise ValueError('step_drop is of step_schedule = "drops": give step_drops too')
        return self

    @property
    def has_steady_steps(self) -> bool:
        """Whether all steps are equal and the optimizer's own output is published, as theorems presume."""
        return self.warm_up is None and self.fading_average is None and self.step_schedule is None

    def step_factors(self, rounds: int) -> tuple[float, ...]:
        """η_t / η of all rounds."""
        warm = round((self.warm_up or 0.0) * rounds)
        return tuple(min(1.0, t / max(1, warm)) * self._step_factor(t, rounds, warm) for t in range(1, rounds + 1))

    def _step_factor(self, t: int, rounds: int, warm: int) -> float:
        if self.step_schedule == "cosine":
            return 0.5 + 0.5 * math.cos(math.pi * max(0, t - 1 - warm) / max(1, rounds - warm))
        return float((self.step_drop or 0.1) ** sum(t > share * rounds for share in self.step_drops or ()))

    def schedule_steps(self, optimizer: SteppingOptimizer, problem: Problem) -> Optimizer:
        """The optimizer with these steps and this mean; itself where the scenario gives none of the keys."""
        factors = self.step_factors(problem.rounds)
        moved: Optimizer = optimizer if set(factors) == {1.0} else ScheduledSteps(optimizer, factors)
        return FadingAverage(moved, self.fading_average) if self.fading_average else moved
