"""DP-Adam and DP-AdamW with bias correction: the noise variance is subtracted from the second moment.

Source: Tang, Shpilevskiy & Lécuyer 2024 (DP-AdamBC).  Adam (Kingma & Ba 2015) runs on noisy mean gradients g~_t.
The mean of their squares contains the variance φ of the noise, which is public, and is subtracted.

    m_t = β₁ m_{t-1} + (1 - β₁) g~_t,     m̂_t = m_t / (1 - β₁^t)
    v_t = β₂ v_{t-1} + (1 - β₂) g~_t²,    v̂_t = v_t / (1 - β₂^t)
    x_{t+1} = x_t - η (m̂_t / √max(v̂_t - φ, γ²) + λ x_t)

λ > 0 is DP-AdamW (Loshchilov & Hutter 2019).  The paper's γ' is γ² here.

| here | paper | shape |
|---|---|---|
| `released` / `scale` | g~_t | (..., d) |
| `noise_std` / `scale` | √φ = σ C / B | scalar |
| `first`, `second` | m_t, v_t | (..., d) |
| `floor` | γ | scalar |

`released` is the mean of the silos' noisy sums of a round, and `scale` the number by which it is divided for a
mean gradient.  A query is the point at which silos compute gradients.  Operations are taken entry by entry.

Guarantee: φ is public.  It is the variance of the noise in the mean when no silo is absent.  Where silos add the
noise, an absent silo takes its noise with it: too much is then subtracted, and γ limits the step.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import PlainGradient, Round
from fedpriv.papers.base import Algorithm, Fraction, Optimizer, Positive, Problem, ScheduledSettings, independent


class AdamState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    iterate: Tensor
    """x_t."""
    first: Tensor
    """m_t."""
    second: Tensor
    """v_t."""


@dataclass(frozen=True)
class CorrectedAdam:
    """Adam that divides by the root of the second moment minus the noise variance, and queries at x_t."""

    step: Scalar
    """η."""
    first_decay: Scalar
    """β₁."""
    second_decay: Scalar
    """β₂."""
    noise_std: Scalar
    """Standard deviation of the noise in one coordinate of `released`, or 0 to subtract nothing."""
    floor: Scalar
    """γ: smallest root by which m̂_t is divided."""
    weight_decay: Scalar
    """λ."""

    def start(self, initial: Tensor) -> AdamState:
        return AdamState(initial, torch.zeros_like(initial), torch.zeros_like(initial))

    def query(self, state: AdamState) -> Tensor:
        return state.iterate

    def update(self, state: AdamState, released: Tensor, current: Round) -> AdamState:
        """Return the state with x_{t+1}, m_t and v_t, (..., d) each.

        Args:
            state: State before round t, with x_t, m_{t-1} and v_{t-1}.
            released: Release of round t, (..., d), of which `released` / `scale` is the noisy mean gradient g~_t.
            current: Round, with its number t and its scale.
        """
        gradient = released / current.scale
        first = self.first_decay * state.first + (1.0 - self.first_decay) * gradient
        second = self.second_decay * state.second + (1.0 - self.second_decay) * gradient.square()
        corrected = second / (1.0 - self.second_decay**current.t) - (self.noise_std / current.scale) ** 2
        # γ is a number, or a tensor with one number for each replicate.
        floor = torch.as_tensor(self.floor, dtype=corrected.dtype, device=corrected.device)
        # With noise, v̂_t - φ can be negative.
        direction = (
            first / (1.0 - self.first_decay**current.t) / torch.maximum(corrected.clamp(min=0.0).sqrt(), floor)
        )
        return AdamState(
            state.iterate - self.step * (direction + self.weight_decay * state.iterate), first, second
        )

    def output(self, state: AdamState) -> Tensor:
        return state.iterate


class AdamSettings(ScheduledSettings):
    """Settings of DP-Adam."""

    clip: Positive = Field(description="C: norm bound on one record's gradient")
    step: Positive = Field(description="η")
    first_decay: Fraction = Field(0.9, description="β₁ of the gradients' mean")
    second_decay: Fraction = Field(0.999, description="β₂ of the squares' mean")
    floor: Positive | None = Field(
        None,
        description="γ: the smallest root that a step is divided by; if left out, √φ, at least 1e-8",
    )
    bias: Literal["corrected", "kept"] = Field(
        "corrected", description='whether the variance of the noise is subtracted; "kept" is DP-Adam without'
    )

    @model_validator(mode="before")
    @classmethod
    def _of_fresh_noise(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and "mechanism" in keys:
            raise ValueError(
                "mechanism: this algorithm subtracts the variance of its noise from the squares, and only noise "
                "that is fresh in every round has one for all rounds; leave the key out, or take dp-ftrl"
            )
        return keys


class AdamWSettings(AdamSettings):
    """Settings of DP-AdamW."""

    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.01, description="λ: in every round the model shrinks by η λ of itself"
    )


_MIN_FLOOR = 1e-8
"""Least γ if the scenario leaves it out, and its value without noise: the constant of Kingma & Ba."""


def _make_optimizer(settings: AdamSettings, problem: Problem, noise_std: float, weight_decay: float) -> Optimizer:
    floor = max(noise_std, _MIN_FLOOR) if settings.floor is None else settings.floor
    subtracted_std = noise_std if settings.bias == "corrected" else 0.0
    return settings.schedule_steps(
        CorrectedAdam(
            settings.step, settings.first_decay, settings.second_decay, subtracted_std, floor, weight_decay
        ),
        problem,
    )


_TANG = "Tang, Shpilevskiy & Lécuyer, DP-AdamBC: Your DP-Adam Is Actually DP-SGD (AAAI 2024)"

DP_ADAM = Algorithm(
    name="dp-adam",
    title="DP-Adam, bias corrected",
    source=_TANG,
    settings=AdamSettings,
    estimator=lambda settings, _problem: PlainGradient(settings.clip),
    mechanism=independent,
    optimizer=lambda settings, problem, noise_std: _make_optimizer(settings, problem, noise_std, 0.0),
)
DP_ADAMW = Algorithm(
    name="dp-adamw",
    title="DP-AdamW, bias corrected",
    source=f"{_TANG}; decay of Loshchilov & Hutter, Decoupled Weight Decay Regularization (ICLR 2019)",
    settings=AdamWSettings,
    estimator=lambda settings, _problem: PlainGradient(settings.clip),
    mechanism=independent,
    optimizer=lambda settings, problem, noise_std: _make_optimizer(
        settings, problem, noise_std, settings.weight_decay
    ),
)
