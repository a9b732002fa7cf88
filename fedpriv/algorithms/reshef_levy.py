"""DP-μ²-FL: Reshef & Levy 2024, Algorithms 1 (untrusted server) and 2 (trusted server)."""

import math
from typing import Literal

from pydantic import Field

from fedpriv.algorithms.base import Algorithm, Positive, Problem, Settings
from fedpriv.estimators import RecursiveGradient
from fedpriv.mechanisms import IndependentGaussian
from fedpriv.optimizers import AnytimeSGD


class Mu2Settings(Settings):
    """Reshef & Levy 2024: parameters of Theorems 4.1 and 5.1, each of which may be overridden."""

    diameter: Positive = Field(description="D: diameter of the ball the model stays in")
    clip: Literal["lipschitz"] | Positive = Field(
        "lipschitz", description="norm bound S on one record's increment; 'lipschitz' is the paper's G + 2LD"
    )
    step: Literal["paper"] | Positive = Field(
        "paper", description="η; 'paper' is min(D / (std of the mean's noise · √(T d)), 1 / (4 L T))"
    )


def _clip(settings: Mu2Settings, problem: Problem) -> float:
    """S = G + 2LD."""
    if settings.clip != "lipschitz":
        return settings.clip
    return problem.lipschitz + 2.0 * problem.smoothness * settings.diameter


def _step(settings: Mu2Settings, problem: Problem, noise_std: float) -> float:
    """η = min{ρ D √M / (2 S T √d), 1/(4 L T)} (untrusted), with M for √M if trusted.

    Both are D / (σ_mean √(T d)), where σ_mean = 2 S √T / (ρ √M) or 2 S √T / (ρ M) is the standard deviation of
    the noise in the mean over silos.
    """
    if settings.step != "paper":
        return settings.step
    smooth = 1.0 / (4.0 * problem.smoothness * problem.rounds)
    if noise_std == 0.0:
        return smooth
    return min(settings.diameter / (noise_std * math.sqrt(problem.rounds * problem.dimension)), smooth)


DP_MU2_FL = Algorithm(
    name="dp-mu2-fl",
    title="DP-μ²-FL",
    source="Reshef & Levy, Private and Federated Stochastic Convex Optimization (ICML 2024), Algorithms 1 and 2",
    settings=Mu2Settings,
    # s_t = t g_t - (t-1) g~_{t-1}, summed: q_t = q_{t-1} + s_t
    estimator=lambda settings, problem: RecursiveGradient(clip=_clip(settings, problem)),
    # fresh noise on every q_t
    mechanism=lambda _settings, _problem: IndependentGaussian(),
    # w_{t+1} = P_K(w_t - eta q~_t), x_{t+1} the weighted average of the w
    optimizer=lambda settings, problem, noise_std: AnytimeSGD(
        step=_step(settings, problem, noise_std), radius=settings.diameter / 2.0
    ),
    name_of_mu="rho",
)
