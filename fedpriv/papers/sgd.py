"""DP-SGD, and projected gradient steps for other algorithms.

Source: Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016), Algorithm 1.  Abadi et al. sample
batches.  Here they are fixed unless the scenario asks for sampling.  Options are averaging (Polyak & Juditsky
1992) and momentum (the heavy ball of Polyak 1964).

    v_t = γ v_{t-1} + g~_t
    x_{t+1} = Π(x_t - η v_t)
    output x_{T+1}, the mean of x_2 … x_{T+1}, or x_U with U uniform in 1 … T

| here | meaning | shape |
|---|---|---|
| `iterate` | x_t, the query | (..., d) |
| `velocity` | v_{t-1}, or zeros in a run without momentum | (..., d) |
| `average` | mean of x_2 … x_t (x_1 for t = 1), x_min(t, U), or x_t for the output x_{T+1} | (..., d) |
| `released` / `scale` | g~_t, the noisy gradient | (..., d) |

A query is the point at which silos compute gradients.  Π projects on a ball of radius R around 0.  The bound on
the excess risk of the average (`projected_bound`) is for released ∇F(x_t) + e_t, with e_t the error of the
gradient, for an M-smooth convex F and steps η ≤ 1/M.  Proof: docs/proofs/excess-risk.md.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedpriv.core.random import public_generator
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import PlainGradient, Round
from fedpriv.noise.series import Floats
from fedpriv.papers.base import (
    Algorithm,
    Bound,
    Condition,
    Fraction,
    Positive,
    Problem,
    ReleaseNumbers,
    ScheduledSettings,
    Settings,
    independent,
    project_to_ball,
    take_step,
)


class SgdState(NamedTuple):
    """Server's vectors between two rounds, (..., d) each."""

    iterate: Tensor
    velocity: Tensor
    """Velocity v_{t-1}, or zeros that share one element of memory in a run without momentum."""
    average: Tensor
    """Mean of the iterates, or x_min(t, U), or the iterate itself if neither is the output."""


@dataclass(frozen=True)
class ProjectedSGD:
    """Optimizer of gradient steps with the learning rate `step` inside the ball of `radius`."""

    step: Scalar
    """η."""
    radius: Scalar
    """R, or inf for no ball."""
    momentum: Scalar = 0.0
    """γ, or 0 without a velocity."""
    averaged: bool = False
    """Whether the output is the mean of x_2 … x_{T+1}."""
    output_round: Scalar | None = None
    """U of the published x_U, drawn by public randomness before the run, or None."""

    def start(self, initial: Tensor) -> SgdState:
        return SgdState(initial, initial.new_zeros(()).expand_as(initial), initial)

    def query(self, state: SgdState) -> Tensor:
        return state.iterate

    def update(self, state: SgdState, released: Tensor, current: Round) -> SgdState:
        """Step against the velocity, project onto the ball, and update the output, (..., d) each.

        The output of a run that stops after round t is the mean of x_2 … x_{t+1} if `averaged`, and x_{t+1}
        otherwise.  With an `output_round` U it is x_{t+1} while t < U, and x_U from then on.

        Args:
            state: Vectors of the module's table before round t.
            released: Release of round t, of which `released` / `scale` is the noisy gradient g~_t.
            current: Round, with its number t and its scale.
        """
        gradient = released if current.scale == 1.0 else released / current.scale
        has_no_momentum = isinstance(self.momentum, float) and self.momentum == 0.0
        velocity = gradient if has_no_momentum else self.momentum * state.velocity + gradient
        iterate = project_to_ball(take_step(state.iterate, self.step, velocity), self.radius)
        average = state.average.lerp(iterate, 1.0 / current.t) if self.averaged else iterate
        if self.output_round is not None:
            # The iterate after round U - 1 is x_U, which no later round replaces.
            average = torch.where(torch.as_tensor(current.t < self.output_round), iterate, state.average)
        return SgdState(iterate, state.velocity if has_no_momentum else velocity, average)

    def output(self, state: SgdState) -> Tensor:
        return state.iterate if self.output_round is None and not self.averaged else state.average


def projected_bound(
    errors: Floats, radius: float, smoothness: float, step: float, *, fresh: bool = False
) -> Bound:
    """Bound the excess risk of the mean of the iterates x_2 … x_{T+1}.

    The bound after T rounds is R²/(2ηT) + 2R mean(s_t), or R²/(2ηT) + mean(s_t²)/(2(1/η - M)) with fresh errors.
    The first term is for the way from the start x_1 = 0, and the second for the errors of the gradients.

    Proof: docs/proofs/excess-risk.md.

    Args:
        errors: Bounds s_t on the root mean square of ‖e_t‖, (T,).
        radius: R, radius of the ball.
        smoothness: M, smoothness of the mean loss.
        step: η, above 0.
        fresh: Whether e_t, the error of the gradient in round t, has mean 0 whatever was released before.

    Returns:
        The bound, infinite unless M ≤ 1/η (M < 1/η with fresh errors), and the condition M ≤ 1/η.

    Example:
        >>> projected_bound(np.zeros(10), radius=1.0, smoothness=1.0, step=0.5).value
        0.1
    """
    condition = Condition("M ≤ 1/η", smoothness, 1.0 / step)
    slack = 1.0 / step - smoothness
    if slack < 0.0 or (fresh and slack <= 0.0):
        return Bound(math.inf, (condition,))
    initial_term = radius**2 / (2.0 * step * len(errors))
    return (
        Bound(initial_term + float(np.mean(errors**2)) / (2.0 * slack), (condition,))
        if fresh
        else Bound(initial_term + 2.0 * radius * float(np.mean(errors)), (condition,))
    )


class StepSettings(Settings):
    """Keys of plain steps in a ball."""

    clip: Positive = Field(description="C: norm bound on one record's gradient")
    step: Positive = Field(description="η")
    radius: Positive = Field(math.inf, description="radius of the ball the model stays in; unbounded if left out")


class SgdSettings(StepSettings, ScheduledSettings):
    """Keys of DP-SGD."""

    momentum: Fraction = Field(0.0, description="heavy-ball momentum")
    output: Literal["last", "average", "random"] = Field(
        "last", description='which iterate is published; "random" is that of RRSGD (docs/baselines.md)'
    )

    @model_validator(mode="after")
    def _one_output(self) -> Self:
        if self.fading_average and self.output != "last":
            raise ValueError(f'output = "{self.output}" and fading_average are two models to publish: give one')
        return self

    def output_round(self, problem: Problem) -> float | None:
        """Return U of the random iterate, from 1 to T, which follows from the seed and T alone, or None."""
        return (
            None
            if self.output != "random"
            else float(public_generator(problem.seed, "output iterate").integers(1, problem.rounds + 1))
        )


def averaged_bound(settings: StepSettings, problem: Problem, released: ReleaseNumbers) -> Bound:
    """Bound the excess risk of the average of the iterates, for a run that releases gradients."""
    return projected_bound(
        released.gradient_errors, settings.radius, problem.smoothness, settings.step, fresh=True
    )


DP_SGD = Algorithm(
    name="dp-sgd",
    title="DP-SGD",
    source="Abadi et al., Deep Learning with Differential Privacy (CCS 2016), Algorithm 1; fixed batches",
    settings=SgdSettings,
    estimator=lambda settings, _problem: PlainGradient(settings.clip),
    mechanism=independent,
    optimizer=lambda settings, problem, _noise_std: settings.schedule_steps(
        ProjectedSGD(
            settings.step,
            settings.radius,
            settings.momentum,
            averaged=settings.output == "average",
            output_round=settings.output_round(problem),
        ),
        problem,
    ),
    excess_risk=lambda settings, problem, released: (
        averaged_bound(settings, problem, released)
        if settings.output == "average" and not settings.momentum and settings.has_steady_steps
        else None
    ),
)
