"""The row of the table that describes an algorithm, and the parts that all rows share.

A row (`Algorithm`) says how estimator, mechanism and optimizer follow from its `Settings`, which are its own keys
in the scenario's [algorithm] section, and from the `Problem`, which holds public numbers of a run.  The mechanism
depends on the running sums, too, and the optimizer on the standard deviation of the noise.  A server `Optimizer`
queries silos at a point, consumes the release, and has an output.

`Prescription` holds the numbers that a theorem asks for.  `Bound` is an upper bound on the mean excess risk of a
run at the run's own numbers.  Bounds stand in the files of their papers, with every constant.  They are derived in
docs/proofs/excess-risk.md along the papers' proofs, and use these symbols:

| symbol | meaning |
|---|---|
| F | mean of convex losses of smoothness M; every record is read once |
| K, R | ball around the start, and its radius |
| x* | best point of K |
| e_t | release of round t minus the value that F itself would have given |
| s_t | root mean square norm of e_t |

Rows whose settings are `ScheduledSettings`, such as DP-SGD, can change their step over the run, and can publish a
fading average of their models.  W is the number of rounds of the warm-up, T the number of rounds of the run.
Without a warm-up W is 0, and the minimum is 1:

    η_t = η · min(1, t / W) · f_t
    f_t = 1, ½ (1 + cos(π p_t)), or step_drop^(drops before t),  p_t = max(0, t - 1 - W) / max(1, T - W)
    a_t = (β - β^t)/(1 - β^t) a_{t-1} + (1 - β)/(1 - β^t) x_{t+1}

The drops before t are those of `step_drops` with drop · T < t.  a_t is the mean of x_2 … x_{t+1} in which each
model has β times the weight of the next (De et al. 2022).  Cosine steps are from Loshchilov & Hutter 2017, the
warm-up is from Goyal et al. 2017.

| here | meaning | shape |
|---|---|---|
| `factors` | η_t / η of round 1, 2, … | (T,) |
| `mean` | a_t | (..., d) |

Guarantee: factors and β are public before round 1, and schedules and averages see the vectors of the inner
optimizer only.  What they compute is therefore post-processing wherever the inner optimizer's vectors are.
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
    """Pure state machine over vectors of shape (..., d), whose leading axes are replicates.

    Guarantee: an optimizer sees the initial model, public numbers and released vectors only, so that every value
    that it computes is post-processing of releases.  `PhasedSGD` is the exception: inside one curator, sums of its
    gradient rounds reach it without noise, and only its output is private.
    """

    def start(self, initial: Tensor) -> Any:
        """Return the state before round 1, from x_1 of shape (..., d)."""
        ...

    def query(self, state: Any) -> Tensor:
        """Return the next query x_t, of shape (..., d)."""
        ...

    def update(self, state: Any, released: Tensor, current: Round) -> Any:
        """Return the state after round `current.t`.

        Args:
            state: State before the round.
            released: Mean of the silos' running sums with the noise of the round, (..., d).
            current: The round's public numbers.
        """
        ...

    def output(self, state: Any) -> Tensor:
        """Return the model that a run would publish if it stopped here, of shape (..., d)."""
        ...


def take_step(point: Tensor, step: Scalar, direction: Tensor) -> Tensor:
    """Compute point - step · direction for vectors (..., d), in one pass over memory.

    Args:
        point: Vectors (..., d).
        step: Factor of the direction, a number or (..., 1).
        direction: Vectors (..., d).

    Example:
        >>> take_step(torch.tensor([1.0, 2.0]), 0.5, torch.tensor([2.0, 2.0])).tolist()
        [0.0, 1.0]
    """
    return (
        torch.addcmul(point, step, direction, value=-1.0)
        if isinstance(step, Tensor)
        else torch.sub(point, direction, alpha=step)
    )


def project_to_ball(point: Tensor, radius: Scalar) -> Tensor:
    """Project `point` (..., d) to the ball ‖x‖ ≤ radius around 0, for each leading index.

    Args:
        point: Vectors of the caller, which may be overwritten.
        radius: Radius of the ball, above 0, or inf for no ball.

    Returns:
        The projected vectors (..., d), in the memory of `point`.

    Example:
        >>> project_to_ball(torch.tensor([0.0, 2.0]), 1.0).tolist()
        [0.0, 1.0]
    """
    norm = torch.linalg.vector_norm(point, dim=-1, keepdim=True)
    if never_above(norm, radius):
        return point
    # `radius` / 0 is inf, clamped to 1: 0 stays 0.
    return point.mul_(norm.reciprocal_().mul_(radius).clamp_(max=1.0))


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """The algorithm's own keys of the scenario's [algorithm] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def clip_factors(self, mechanism: Mechanism, workload: Workload) -> tuple[float, ...] | None:
        """Factors of the clips at which the noise stays the same, (T,), or None for 1 in every round.

        Args:
            mechanism: Mechanism of the row.
            workload: Running sums, with the clips before any factor.

        Raises:
            InputError: The scenario asks for factors, and none are known for these sums.
        """
        return None

    def keys_at_rest(self, distance: float) -> dict[str, Any]:
        """Return keys with values under which gradients of one query are taken close to it.

        An audit needs them, since its canaries reach the clip only at queries where the model is undecided.

        Args:
            distance: Distance of models that the values aim at, below 1.
        """
        return {}


@dataclass(frozen=True)
class Problem:
    """The public numbers of a run from which an algorithm's parameters follow."""

    dimension: int
    """d: number of parameters of the model, and of the further numbers that `Algorithm.model` adds."""
    lipschitz: float
    """G: bound on the norm of one record's gradient, or inf if none is known."""
    smoothness: float
    """L: bound on the Lipschitz constant of one record's gradient, or inf if none is known."""
    convex: bool
    """Whether the loss is known to be convex, with these constants valid everywhere."""
    batch: int
    """B: records of all silos in one batch.

    A round reads one batch, in expectation if records are sampled, unless the row's schedule says otherwise.
    """
    schedule: Participation
    """Participation: the records that each round reads."""
    epsilon: float | None = None
    """ε that the rounds may have at `delta`, or None for a run that is not private."""
    delta: float = 1e-5
    """δ of the guarantee."""
    seed: int = 0
    """Seed of the run's public random choices."""
    silos: int = 1
    """Number of silos."""
    gap: float = math.inf
    """Φ: bound on F(x_1) - inf F, or inf if none is known."""
    convex_within: float = 0.0
    """Radius of the ball around the start in which these constants hold and losses are convex, or 0."""
    relation: Relation = "replace-one"
    """Relation of neighbouring data sets."""
    unit: Unit = RECORD
    """Unit of protection, which is clipped and counted.  Other fields call it a record."""

    @property
    def rounds(self) -> int:
        """T: number of rounds."""
        return self.schedule.rounds

    @property
    def records(self) -> int:
        """n: number of records of all silos in one pass."""
        return self.batch * self.schedule.batches_per_silo


class Condition(NamedTuple):
    """A condition `left ≤ right` of a theorem or bound, with its `text` in symbols."""

    text: str
    """Condition in symbols of its paper or proof, such as "M ≤ β"."""
    left: float
    """Value of the left side in this run."""
    right: float
    """Value of the right side in this run."""

    @property
    def holds(self) -> bool:
        """Whether left ≤ right up to rounding, since many choices of parameters aim at equality."""
        return self.left <= self.right * (1.0 + 1e-12)


class Prescription(NamedTuple):
    """The numbers that a theorem asks for."""

    theorem: str
    """Name of the theorem in its paper."""
    numbers: Mapping[str, float]
    """Values by name, empty if the theorem cannot be evaluated.

    Some are named as in scenarios (rounds, batch, clip and other keys of the row).  Others are "noise std" in the
    mean over silos, numbers of a corollary, and bounds.
    """
    conditions: tuple[Condition, ...] = ()
    """Conditions of the theorem, with their values."""
    assumption: str = ""
    """Assumption of the theorem that cannot be checked by numbers."""
    refusal: str | None = None
    """Reason why a scenario cannot run with these numbers, on one line, or None if none is known.

    Conditions that do not hold are no such reason.
    """


Arguments = ParamSpec("Arguments")


def catch_refusal(
    formula: Callable[Concatenate[str, Arguments], Prescription],
) -> Callable[Concatenate[str, Arguments], Prescription]:
    """Decorate `formula` so that an InputError becomes a prescription without numbers.

    Args:
        formula: Function of a theorem's name and of other arguments that prescribes numbers.

    Returns:
        The function, which returns a prescription with the error's text as its `refusal` instead of raising.
    """

    @functools.wraps(formula)
    def evaluated(theorem: str, /, *args: Arguments.args, **options: Arguments.kwargs) -> Prescription:
        try:
            return formula(theorem, *args, **options)
        except InputError as error:
            return Prescription(theorem, {}, refusal=str(error))

    return evaluated


class ReleaseNumbers(NamedTuple):
    """The public numbers of a run's releases."""

    batch: int
    """B: number of records of all silos in a batch."""
    dimension: int
    """d: number of coordinates of a release."""
    clips: Floats
    """Norm bounds on one record's increment, before the division by B, (T,)."""
    stds: Floats
    """Standard deviations of the noise of each release in the mean over silos, per coordinate, (T,)."""

    @property
    def sum_errors(self) -> Floats:
        """Bounds s_t of running sums with decay 1, (T,): sampling error of rounds 1 … t, noise of round t."""
        return np.asarray(np.sqrt(np.cumsum(self.clips**2) / self.batch + self.dimension * self.stds**2))

    @property
    def gradient_errors(self) -> Floats:
        """Bounds s_t of releases that use one round's records only, (T,)."""
        return np.asarray(np.sqrt(self.clips**2 / self.batch + self.dimension * self.stds**2))


class Bound(NamedTuple):
    """Upper bound `value` on the mean excess risk, or inf if a condition of the proof fails."""

    value: float
    """Bound on the mean excess risk, or inf if nothing is proved at these numbers."""
    conditions: tuple[Condition, ...]
    """Conditions under which the bound holds."""
    assumption: str = (
        "records are independent, and no increment is longer than its clip; the excess is over the best point of "
        "the ball"
    )
    """Assumption of the bound that cannot be checked by numbers."""


@dataclass(frozen=True)
class Algorithm:
    """One row of the table."""

    name: str
    """Name in scenarios."""
    title: str
    """Name for people."""
    source: str
    """Paper of the algorithm."""
    settings: type[Settings]
    """Type of the row's own keys."""
    estimator: Callable[[Any, Problem], Estimator]
    """Estimator from settings and problem: increments and clips of every round."""
    mechanism: Callable[[Any, Problem, Workload], Mechanism]
    """Mechanism for the running sums of the estimator under the run's schedule."""
    optimizer: Callable[[Any, Problem, float], Optimizer]
    """Optimizer from settings, problem and noise_std.

    noise_std is the standard deviation of one coordinate of a fresh noise vector in the mean over silos.
    """
    objective: Callable[[Any, Problem, Objective], Objective] = lambda _settings, _problem, objective: objective
    """Objective of the algorithm from the model's objective, by default the same one."""
    model: Callable[[Any, Objective], Objective] | None = None
    """Model whose point holds more than the scenario's parameters, or None for the scenario's own model.

    Silos are queried about this model, and this model is evaluated and published.
    """
    schedule: Callable[[Any, FixedOrder], Participation] = lambda _settings, declared: declared
    """Participation of the row from the declared schedule, by default the declared schedule itself."""
    trusts: tuple[str, ...] = ("untrusted", "trusted", "secure-aggregation")
    """Trust settings that the row accepts, under which an outsider learns nothing but its releases."""
    theorems: Callable[[Any, Problem], tuple[Prescription, ...]] = lambda _settings, _problem: ()
    """Numbers that theorems ask for."""
    excess_risk: Callable[[Any, Problem, ReleaseNumbers], Bound | None] = lambda *_: None
    """Bound on the mean excess risk of a run, or None if nothing is proved for these settings.

    The bound is for convex losses of known smoothness whose records are read once in a public order.
    """
    published: Literal["points", "rows"] | None = None
    """Target for which noise is fitted, or None if nothing can be fitted.

    * "points": the optimizer's queries and its output, which are linear in the releases while no projection is
      active.
    * "rows": the releases themselves, for optimizers whose theorems depend on the mean noise.
    * None: the row has a mechanism of its own, or an optimizer to which no noise can be fitted.
    """
    name_of_mu: str = "mu"
    """Name of the GDP parameter in the paper, "mu" or "rho".

    With "rho", [privacy] accepts the key `rho` in place of `mu`.
    """


SCALE_SETTINGS = ("clip", "step", "beta", "radius", "diameter")
"""Settings that only scale a run's numbers, so that the noise that suits a run best is the same."""


class NoiseSettings(Settings, MechanismOptions):
    """Keys of rows whose noise can be any mechanism that has a form for their running sums."""

    mechanism: ChosenName = Field(
        "tree",
        description="binary tree, fresh noise in every round, banded square root or its inverse, one or a few "
        "buffers, or what serves the algorithm's output best (auto)",
    )
    late_clip: Literal["same", "balanced", "column"] = Field(
        "same",
        description='"column" raises the clips of rounds that the noise covers well, at the same noise; over '
        'several epochs a record\'s clips are redistributed; "balanced" is its name for independent noise in '
        "one pass, where sums without decay have clips S √(T / (T - t + 1))",
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
        """Copy of the settings with 1 for each of `SCALE_SETTINGS`, explicit parameters, and late_clip "same".

        A clip "growing" stays, because it is no scale: clips differ between rounds.  The mechanism is independent
        noise, which needs no fit.
        """
        field_names = type(self).model_fields.keys()
        updates: dict[str, Any] = {
            name: 1.0 for name in SCALE_SETTINGS if name in field_names and getattr(self, name) != "growing"
        }
        if "parameters" in field_names:
            updates["parameters"] = "explicit"
        return self.model_copy(update=updates | {"mechanism": IndependentGaussian.name, "late_clip": "same"})


def choose_mechanism(settings: NoiseSettings, _problem: Problem, workload: Workload) -> Mechanism:
    """Make the mechanism that a scenario names.

    Raises:
        InputError: The mechanism cannot be built for these sums.
    """
    return make_mechanism(settings.mechanism, workload, settings)


def independent(_settings: Settings, _problem: Problem, _workload: Workload) -> Mechanism:
    """Make independent noise in every round, for any scenario."""
    return IndependentGaussian()


class SteppingOptimizer(Optimizer, Protocol):
    """Optimizer, a frozen dataclass, whose moves before any projection are proportional to `step`.

    The state of the optimizer depends on the step only through these moves.
    """

    @property
    def step(self) -> Scalar: ...


@dataclass(frozen=True)
class ScheduledSteps:
    """Optimizer `inner` whose step in round t is multiplied by `factors[t - 1]`, which is η_t / η."""

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
    """State of the inner optimizer, and the mean a_t of its models, (..., d)."""

    inner: Any
    mean: Tensor


@dataclass(frozen=True)
class FadingAverage:
    """Optimizer that publishes a mean of `inner`'s outputs, each with β times the weight of the next."""

    inner: Optimizer
    decay: Scalar
    """β, in (0, 1)."""

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
    """Keys of a step that changes over the run, and of a mean of the models that is published."""

    step_schedule: Literal["cosine", "drops"] | None = Field(
        None, description="how the step shrinks: by half a cosine towards 0, or at step_drops; not if left out"
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
        None, description="β: a mean of all models is published, in which each weighs β times as much as the next"
    )

    @model_validator(mode="after")
    def _of_drops(self) -> Self:
        if (self.step_schedule == "drops") != (self.step_drops is not None):
            raise ValueError('step_schedule = "drops" and step_drops go together: give both, or neither')
        if self.step_drop is not None and self.step_drops is None:
            raise ValueError('step_drop needs step_schedule = "drops" and step_drops: give them too')
        return self

    @property
    def has_steady_steps(self) -> bool:
        """Whether none of these keys is set, as theorems assume."""
        return self.warm_up is None and self.fading_average is None and self.step_schedule is None

    def step_factors(self, rounds: int) -> tuple[float, ...]:
        """Factors η_t / η of all rounds, (T,)."""
        warm_up_rounds = round((self.warm_up or 0.0) * rounds)
        return tuple(
            min(1.0, t / max(1, warm_up_rounds)) * self._step_factor(t, rounds, warm_up_rounds)
            for t in range(1, rounds + 1)
        )

    def _step_factor(self, t: int, rounds: int, warm_up_rounds: int) -> float:
        if self.step_schedule == "cosine":
            return 0.5 + 0.5 * math.cos(math.pi * max(0, t - 1 - warm_up_rounds) / max(1, rounds - warm_up_rounds))
        return float((self.step_drop or 0.1) ** sum(t > share * rounds for share in self.step_drops or ()))

    def schedule_steps(self, optimizer: SteppingOptimizer, problem: Problem) -> Optimizer:
        """Apply the step schedule and the fading average to an optimizer, as far as they change anything."""
        factors = self.step_factors(problem.rounds)
        scheduled: Optimizer = optimizer if set(factors) == {1.0} else ScheduledSteps(optimizer, factors)
        return FadingAverage(scheduled, self.fading_average) if self.fading_average else scheduled
