"""Federated averaging, without privacy, with noise inside the silos, and with cohorts of clients.

**Federated averaging** with all silos is the reference without privacy.  Source: McMahan et al., "Communication-
Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017), Algorithm 1.

**Local DP-SGD** is DP-SGD (Abadi et al. 2016, Algorithm 1) inside the silos, as with Opacus inside a Flower
client.  Silos take noisy clipped steps, and every few rounds the server averages their points.  A release is a
silo's mean clipped gradient with noise, and p_i is the weight of silo i:

    w_{t+1} = w_t - η Σ_i p_i release_{i,t}     the mean of the silos' own points
    x_{t+1} = w_{t+1} if t is a multiple of `every`, else x_t

| here | meaning | shape |
|---|---|---|
| `mean` | w_t | (..., d) |
| `query_point` | x_t, the query | (..., d) |

**Cohorts** of clients: each client's displacement is clipped as a whole, and a server averages or adapts.
Sources: McMahan, Ramage, Talwar & Zhang 2018, "Learning differentially private recurrent language models",
Algorithm 1 (DP-FedAvg), and Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar & McMahan 2021, "Adaptive
federated optimization", Algorithm 2 (FedAdagrad, FedYogi and FedAdam, whose servers adapt the step of every
coordinate).  Their Δ_t is the clients' mean displacement, and g_t = -Δ_t is the pseudo-gradient here.

    m_t = β₁ m_{t-1} + (1 - β₁) g_t
    v_t = v_{t-1} + g_t²                                     (FedAdagrad)
    v_t = v_{t-1} - (1 - β₂) g_t² sign(v_{t-1} - g_t²)       (FedYogi)
    v_t = β₂ v_{t-1} + (1 - β₂) g_t²                         (FedAdam)
    x_{t+1} = x_t - η m_t / (√v_t + τ),   m_0 = 0, v_0 = τ²

| here | paper | shape |
|---|---|---|
| `released` / `scale` | -Δ_t, noisy | (..., d) |
| `first` | m_t, of -Δ | (..., d) |
| `second` | v_t | (..., d) |

**Quantile clipping**: the clip of these rows may follow a quantile of the clients' norms.  Source: Andrew,
Thakkar, McMahan & Ramaswamy 2021, Algorithm 1, with both noisy means in one vector.  A client sends a bit, 1 if
its displacement fits the clip, and b~_t is a noisy estimate of the share of such clients.  γ is the share that
should fit.  ρ is the weight of the bit, and η_C the rate at which the clip follows.  A client's clipped
displacement over C_t, joined with the coordinate ρ (bit - ½), has norm κ = √(1 + ρ²/4) at most.

    b~_t = ½ + (last coordinate) / ρ
    C_{t+1} = C_t exp(-η_C (b~_t - γ)), all C_t between MIN_ADAPTIVE_CLIP and MAX_ADAPTIVE_CLIP
    the optimizer gets C_t · (first d coordinates)

| here | paper | shape |
|---|---|---|
| `released` | -Δ~_t / C_t, and ρ (b~_t - ½), for Δ~_t the noisy mean displacement | (..., d + 1) |
| `clip` | C_t | (..., 1) |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED, Scalar
from fedpriv.loss.estimators import LocalGradient, PlainGradient, Round
from fedpriv.loss.objective import UNCLIPPED, Objective
from fedpriv.loss.views import (
    MAX_ADAPTIVE_CLIP,
    MIN_ADAPTIVE_CLIP,
    LocalSteps,
    LocalTraining,
    QuantileClip,
    joint_clip,
)
from fedpriv.papers.base import (
    Algorithm,
    Count,
    Fraction,
    Optimizer,
    Positive,
    Problem,
    ScheduledSettings,
    Settings,
    SteppingOptimizer,
    independent,
)
from fedpriv.papers.sgd import ProjectedSGD
from fedpriv.participation.orders import FixedOrder


class LocalStepsSettings(Settings):
    """Keys of the steps that a client takes on its own records in every round of its participation."""

    local_steps: Count = Field(description="K: steps of a client on its own records; 1 is along its mean gradient")
    local_step: Positive = Field(description="η of the clients' own steps")
    local_batch: Count | None = Field(None, description="records in one local step; all of a client's if left out")


class OptionalLocalSteps(Settings):
    """Keys of local steps for a row that can also use plain gradients."""

    local_steps: Count | None = Field(
        None, description="K: steps of a client on its own records; its gradient if left out"
    )
    local_step: Positive | None = Field(None, description="η of the clients' own steps; goes with local_steps")
    local_batch: Count | None = Field(None, description="records in one local step; all of a client's if left out")

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if (self.local_steps is None) != (self.local_step is None):
            raise ValueError("local_steps and local_step go together: give both, or neither")
        if self.local_batch is not None and self.local_steps is None:
            raise ValueError("local_batch needs local steps: give local_steps and local_step, or leave it out")
        return self


def add_local_steps(settings: LocalStepsSettings, problem: Problem, objective: Objective) -> Objective:
    """Replace the increments of an objective, gradients, by clients' displacements in local steps.

    Raises:
        InputError: A unit of protection has at most one record in a round.
    """
    return _with_local_steps(objective, problem, settings.local_step, settings.local_steps, settings.local_batch)


def add_optional_local_steps(settings: OptionalLocalSteps, problem: Problem, objective: Objective) -> Objective:
    """Replace increments as `add_local_steps` does if local steps are given, else return the objective.

    Raises:
        InputError: Local steps are given, and a unit of protection has at most one record in a round.
    """
    return (
        objective
        if settings.local_steps is None or settings.local_step is None
        else _with_local_steps(objective, problem, settings.local_step, settings.local_steps, settings.local_batch)
    )


def _with_local_steps(
    objective: Objective, problem: Problem, step: float, steps: int, batch: int | None
) -> Objective:
    if problem.unit.max_records == 1:
        raise InputError(
            "algorithm.local_steps: what trains and is clipped is a client with its records, and here a "
            f'{problem.unit.noun} has one; set privacy.unit = "client" and privacy.records of 2 or more'
        )
    return LocalSteps(objective, step, steps, batch)


class AveragingState(NamedTuple):
    """Server's vectors between two rounds, (..., d) each."""

    mean: Tensor
    query_point: Tensor


@dataclass(frozen=True)
class LocalAveraging:
    """Optimizer whose query is the mean of the silos' points, renewed once in `every` rounds."""

    step: Scalar
    """η of a silo's own steps."""
    every: int

    def start(self, initial: Tensor) -> AveragingState:
        return AveragingState(initial, initial)

    def query(self, state: AveragingState) -> Tensor:
        return state.query_point

    def update(self, state: AveragingState, released: Tensor, current: Round) -> AveragingState:
        mean = state.mean - self.step * released
        return AveragingState(mean, mean if current.t % self.every == 0 else state.query_point)

    def output(self, state: AveragingState) -> Tensor:
        return state.mean


class LocalSettings(Settings):
    """Keys of local DP-SGD."""

    clip: Positive = Field(description="C: norm bound on one record's gradient")
    step: Positive = Field(description="η of the silos' own steps")
    local_steps: Count = Field(
        description="K: steps of every silo between two averages; federation.rounds counts steps, each a release"
    )

    def keys_at_rest(self, distance: float) -> dict[str, Any]:
        """Return a step by which noise of norm clip / `distance` moves a silo by `distance`."""
        return {"step": distance**2 / self.clip}


def _check_whole_averages(settings: LocalSettings, declared: FixedOrder) -> FixedOrder:
    """Return the declared order.

    Raises:
        InputError: The rounds are no multiple of the local steps.
    """
    if declared.rounds % settings.local_steps:
        raise InputError(
            f"algorithm.local_steps = {settings.local_steps}: {declared.rounds} rounds, which are silos' steps, "
            "are no whole number of averages; let federation.rounds be a multiple of the local steps"
        )
    return declared


LOCAL_DP_SGD = Algorithm(
    name="local-dp-sgd",
    title="Local DP-SGD",
    source="Abadi et al. (CCS 2016), Algorithm 1, as local training in McMahan et al. (2017), Algorithm 1",
    settings=LocalSettings,
    schedule=_check_whole_averages,
    # the noise is added before a silo's next step, so that only the silo itself can add it
    trusts=("untrusted",),
    estimator=lambda settings, _problem: LocalGradient(settings.clip, settings.step, settings.local_steps),
    mechanism=independent,
    optimizer=lambda settings, _problem, _noise_std: LocalAveraging(settings.step, settings.local_steps),
)


class AveragingSettings(Settings):
    """Keys of federated averaging."""

    step: Positive = Field(description="η of the silos' own steps")
    local_batch: Count = Field(description="records in one local step")
    local_epochs: Count = Field(1, description="local passes over a silo's records of the round")


def _make_displacement(problem: Problem) -> PlainGradient:
    """Return the estimator of unclipped displacements.

    Raises:
        InputError: The run is to be private, and nothing bounds a record's effect on a displacement.
    """
    if problem.epsilon is not None:
        raise InputError(
            "algorithm.name = 'fedavg': nothing bounds how far one record moves a silo's trained model, so that "
            'no noise can be calibrated to it; set privacy.mode = "none"'
        )
    return PlainGradient(UNCLIPPED)


FEDERATED_AVERAGING = Algorithm(
    name="fedavg",
    title="Federated averaging",
    source="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data (2017)",
    settings=AveragingSettings,
    estimator=lambda _settings, problem: _make_displacement(problem),
    mechanism=independent,
    # the silos' mean increment is the query minus the mean of their trained models
    objective=lambda settings, _problem, objective: LocalTraining(
        objective, settings.step, settings.local_batch, settings.local_epochs
    ),
    # the mean of the silos' models: one step against the mean displacement, of rate 1
    optimizer=lambda _settings, _problem, _noise_std: ProjectedSGD(step=1.0, radius=math.inf),
)


class AdaptiveState(NamedTuple):
    """Server's vectors between two rounds, (..., d) each."""

    iterate: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class FedAdagrad:
    """Optimizer that divides the momentum by the root of τ² plus the sum of all squared gradients, plus τ."""

    step: Scalar
    """η: factor of every step."""
    first_decay: Scalar
    """β₁: weight of the earlier momentum."""
    floor: float = field(metadata=SHARED)
    """τ: the degree of adaptivity, where a smaller number adapts more."""

    def start(self, initial: Tensor) -> AdaptiveState:
        return AdaptiveState(initial, torch.zeros_like(initial), torch.full_like(initial, self.floor**2))

    def query(self, state: AdaptiveState) -> Tensor:
        return state.iterate

    def update(self, state: AdaptiveState, released: Tensor, current: Round) -> AdaptiveState:
        gradient = released / current.scale
        first = self.first_decay * state.first + (1.0 - self.first_decay) * gradient
        second = self._update_second(state.second, gradient.square())
        return AdaptiveState(state.iterate - self.step * first / (second.sqrt() + self.floor), first, second)

    def output(self, state: AdaptiveState) -> Tensor:
        return state.iterate

    def _update_second(self, squares: Tensor, new_squares: Tensor) -> Tensor:
        """Return v_t, of v_{t-1} and g_t²."""
        return squares + new_squares


@dataclass(frozen=True)
class FedYogi(FedAdagrad):
    """Optimizer whose squares grow or shrink, by at most the size of the new squares."""

    second_decay: Scalar
    """β₂: weight of the earlier squares."""

    def _update_second(self, squares: Tensor, new_squares: Tensor) -> Tensor:
        return squares - (1.0 - self.second_decay) * new_squares * torch.sign(squares - new_squares)


@dataclass(frozen=True)
class FedAdam(FedAdagrad):
    """Optimizer whose squares decay exponentially, by β₂ in each round."""

    second_decay: Scalar
    """β₂: weight of the earlier squares."""

    def _update_second(self, squares: Tensor, new_squares: Tensor) -> Tensor:
        return self.second_decay * squares + (1.0 - self.second_decay) * new_squares


class QuantileState(NamedTuple):
    """State of the inner optimizer, and the clip C_t, (..., 1)."""

    inner: Any
    clip: Tensor


@dataclass(frozen=True)
class QuantileClipping:
    """Optimizer that applies `inner` to d coordinates, and adapts the clip to a quantile.

    A query is (x_t, C_t), (..., d + 1), and the output is the inner optimizer's, (..., d).
    """

    inner: Optimizer
    weight: Scalar
    """ρ: weight of a client's bit beside its displacement."""
    quantile: Scalar
    """γ: the share of clients whose vectors should fit."""
    rate: Scalar
    """η_C: rate at which the clip follows the quantile."""

    def start(self, initial: Tensor) -> QuantileState:
        return QuantileState(
            self.inner.start(initial[..., :-1]), initial[..., -1:].clamp(MIN_ADAPTIVE_CLIP, MAX_ADAPTIVE_CLIP)
        )

    def query(self, state: QuantileState) -> Tensor:
        return torch.cat([self.inner.query(state.inner), state.clip], dim=-1)

    def update(self, state: QuantileState, released: Tensor, current: Round) -> QuantileState:
        scaled_update, scaled_bit = released[..., :-1], released[..., -1:]
        inner = self.inner.update(state.inner, scaled_update * state.clip, current)
        fitting_share = 0.5 + scaled_bit / (self.weight * current.scale)
        clip = state.clip * torch.exp(-self.rate * (fitting_share - self.quantile))
        return QuantileState(inner, clip.clamp(MIN_ADAPTIVE_CLIP, MAX_ADAPTIVE_CLIP))

    def output(self, state: QuantileState) -> Tensor:
        return self.inner.output(state.inner)


_BIT_NOISE_DIVISOR = 20.0
"""Divisor of the cohort in the standard deviation cohort / 20 that Andrew et al. 2021 advise for the bits' sum."""


class CohortSettings(LocalStepsSettings, ScheduledSettings):
    """Keys of all rows with cohorts."""

    clip: Positive = Field(description="C: norm bound on one client's move of the model; C_1 with clip_quantile")
    clip_quantile: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="γ: the clip follows this quantile of the clients' norms; a fixed clip if left out"
    )
    clip_rate: Positive = Field(0.2, description="η_C: how fast the clip follows, with clip_quantile")
    clip_weight: Positive | None = Field(
        None, description="ρ: what a client's bit weighs beside its move; 20 over the cohort if left out"
    )

    @model_validator(mode="after")
    def _of_the_quantile(self) -> Self:
        quantile_keys = self.model_fields_set & {"clip_rate", "clip_weight"}
        if self.clip_quantile is None and quantile_keys:
            raise ValueError(
                f"{min(quantile_keys)} needs a clip that follows a quantile: give clip_quantile, or leave it out"
            )
        return self

    def bit_weight(self, problem: Problem) -> float:
        """Return ρ, by default 20 over the cohort.

        The noise on the share of fitting clients then has standard deviation z κ / 20, where z is the noise
        multiplier of the joint vector, whose norm is at most κ.
        """
        return _BIT_NOISE_DIVISOR / problem.batch if self.clip_weight is None else self.clip_weight


class FedAvgSettings(CohortSettings):
    """Keys of DP-FedAvg."""

    step: Positive = Field(1.0, description="η: the model moves by η times the clients' mean move")
    momentum: Fraction = Field(0.0, description="heavy-ball momentum of the server")


class FedAdagradSettings(CohortSettings):
    """Keys of DP-FedAdagrad."""

    step: Positive = Field(description="η of the server")
    first_decay: Fraction = Field(0.9, description="β₁ of the server's momentum")
    floor: Positive = Field(1e-3, description="τ: what the root of the squares is added to, and starts as")


class FedAdamSettings(FedAdagradSettings):
    """Keys of DP-FedAdam and DP-FedYogi."""

    second_decay: Fraction = Field(0.99, description="β₂ of the squares")


def _make_estimator(settings: CohortSettings, problem: Problem) -> PlainGradient:
    """Return the estimator of a client's displacement, clipped to norm C.

    With a bit for the quantile, displacement and bit are clipped together to norm κ, in units of the current clip.
    """
    return (
        PlainGradient(settings.clip)
        if settings.clip_quantile is None
        else PlainGradient(joint_clip(settings.bit_weight(problem)))
    )


def _make_objective(settings: CohortSettings, problem: Problem, objective: Objective) -> Objective:
    training = add_local_steps(settings, problem, objective)
    return (
        training
        if settings.clip_quantile is None
        else QuantileClip(training, settings.bit_weight(problem), settings.clip)
    )


def _follow_quantile(settings: CohortSettings, problem: Problem, inner: Optimizer) -> Optimizer:
    """Return the server's optimizer, with the clip in its state if the clip follows a quantile."""
    return (
        inner
        if settings.clip_quantile is None
        else QuantileClipping(inner, settings.bit_weight(problem), settings.clip_quantile, settings.clip_rate)
    )


def _make_row(
    name: str, title: str, source: str, settings: type[CohortSettings], server: Callable[[Any], SteppingOptimizer]
) -> Algorithm:
    """Return the row of cohorts' clipped displacements with fresh noise, for one optimizer at the server."""
    return Algorithm(
        name=name,
        title=title,
        source=source,
        settings=settings,
        estimator=_make_estimator,
        mechanism=independent,
        objective=_make_objective,
        optimizer=lambda settings, problem, _noise_std: _follow_quantile(
            settings, problem, settings.schedule_steps(server(settings), problem)
        ),
    )


_REDDI = "Reddi et al., Adaptive Federated Optimization (ICLR 2021), Algorithm 2"

DP_FEDAVG = _make_row(
    "dp-fedavg",
    "DP-FedAvg",
    "McMahan et al., Learning Differentially Private Recurrent Language Models (ICLR 2018), Algorithm 1",
    FedAvgSettings,
    lambda settings: ProjectedSGD(settings.step, math.inf, settings.momentum),
)
DP_FEDADAM = _make_row(
    "dp-fedadam",
    "DP-FedAdam",
    _REDDI,
    FedAdamSettings,
    lambda settings: FedAdam(settings.step, settings.first_decay, settings.floor, settings.second_decay),
)
DP_FEDYOGI = _make_row(
    "dp-fedyogi",
    "DP-FedYogi",
    _REDDI,
    FedAdamSettings,
    lambda settings: FedYogi(settings.step, settings.first_decay, settings.floor, settings.second_decay),
)
DP_FEDADAGRAD = _make_row(
    "dp-fedadagrad",
    "DP-FedAdagrad",
    _REDDI,
    FedAdagradSettings,
    lambda settings: FedAdagrad(settings.step, settings.first_decay, settings.floor),
)
