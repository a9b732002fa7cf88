"""Federated averaging and adaptive federated optimization with cohorts: each client's move is clipped whole."""

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from fedpriv.algorithms.base import Algorithm, Fraction, Positive, Problem, independent
from fedpriv.algorithms.local_steps import LocalStepsSettings, trained
from fedpriv.estimators.gradients import PlainGradient
from fedpriv.objectives import Objective
from fedpriv.objectives.quantile_clip import QuantileClip, joint_clip
from fedpriv.optimizers import FedAdagrad, FedAdam, FedYogi, Optimizer, ProjectedSGD, QuantileClipping

_SHARE = 20.0
"""The noise on the count is the noise multiplier times a cohort over this, as Andrew et al. 2021 advise."""


class CohortSettings(LocalStepsSettings):
    """What all rows of cohorts share."""

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
        given = self.model_fields_set & {"clip_rate", "clip_weight"}
        if self.clip_quantile is None and given:
            raise ValueError(f"{min(given)} is of a clip that follows a quantile: give clip_quantile too")
        return self

    def bit_weight(self, problem: Problem) -> float:
        """ρ: with it the noise on the share of clients that fit is z κ / 20 of a cohort."""
        return _SHARE / problem.batch if self.clip_weight is None else self.clip_weight


class FedAvgSettings(CohortSettings):
    step: Positive = Field(1.0, description="η: the model moves by η times the clients' mean move")
    momentum: Fraction = Field(0.0, description="heavy-ball momentum of the server")


class FedAdagradSettings(CohortSettings):
    step: Positive = Field(description="η of the server")
    first_decay: Fraction = Field(0.9, description="β₁ of the server's momentum")
    floor: Positive = Field(1e-3, description="τ: what the root of the squares is added to, and starts as")


class FedAdamSettings(FedAdagradSettings):
    second_decay: Fraction = Field(0.99, description="β₂ of the squares")


def _clipped(settings: CohortSettings, problem: Problem) -> PlainGradient:
    """A client's move, of norm at most C; with a bit beside it at most κ, in units of the clip of the moment."""
    if settings.clip_quantile is None:
        return PlainGradient(settings.clip)
    return PlainGradient(joint_clip(settings.bit_weight(problem)))


def _moves(settings: CohortSettings, problem: Problem, objective: Objective) -> Objective:
    moved = trained(settings, problem, objective)
    if settings.clip_quantile is None:
        return moved
    return QuantileClip(moved, settings.bit_weight(problem), settings.clip)


def _following(settings: CohortSettings, problem: Problem, inner: Optimizer) -> Optimizer:
    """The server's optimizer, and the clip that it keeps beside it."""
    if settings.clip_quantile is None:
        return inner
    return QuantileClipping(inner, settings.bit_weight(problem), settings.clip_quantile, settings.clip_rate)


_REDDI = "Reddi et al., Adaptive Federated Optimization (ICLR 2021), Algorithm 2"

DP_FEDAVG = Algorithm(
    name="dp-fedavg",
    title="DP-FedAvg",
    source="McMahan et al., Learning Differentially Private Recurrent Language Models (ICLR 2018), Algorithm 1",
    settings=FedAvgSettings,
    estimator=_clipped,
    mechanism=independent,
    objective=_moves,
    optimizer=lambda settings, problem, _noise_std: _following(
        settings, problem, ProjectedSGD(settings.step, math.inf, settings.momentum)
    ),
)
DP_FEDADAM = Algorithm(
    name="dp-fedadam",
    title="DP-FedAdam",
    source=_REDDI,
    settings=FedAdamSettings,
    estimator=_clipped,
    mechanism=independent,
    objective=_moves,
    optimizer=lambda settings, problem, _noise_std: _following(
        settings, problem, FedAdam(settings.step, settings.first_decay, settings.floor, settings.second_decay)
    ),
)
DP_FEDYOGI = Algorithm(
    name="dp-fedyogi",
    title="DP-FedYogi",
    source=_REDDI,
    settings=FedAdamSettings,
    estimator=_clipped,
    mechanism=independent,
    objective=_moves,
    optimizer=lambda settings, problem, _noise_std: _following(
        settings, problem, FedYogi(settings.step, settings.first_decay, settings.floor, settings.second_decay)
    ),
)
DP_FEDADAGRAD = Algorithm(
    name="dp-fedadagrad",
    title="DP-FedAdagrad",
    source=_REDDI,
    settings=FedAdagradSettings,
    estimator=_clipped,
    mechanism=independent,
    objective=_moves,
    optimizer=lambda settings, problem, _noise_std: _following(
        settings, problem, FedAdagrad(settings.step, settings.first_decay, settings.floor)
    ),
)
