"""The table of algorithms: name -> estimator × mechanism × optimizer, each as its paper writes it.

A row says how the parts follow from the settings of the scenario's [algorithm] section and from the problem.
The engines know no algorithm by name; a new one is a row here and, where a part is new, one small file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedpriv.errors import InputError
from fedpriv.estimators import Estimator, RecursiveGradient
from fedpriv.mechanisms import IndependentGaussian, Mechanism
from fedpriv.optimizers import AnytimeSGD, Optimizer

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """The algorithm's own keys of the scenario's [algorithm] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True)
class Problem:
    """The public numbers of a run from which an algorithm's parameters follow."""

    rounds: int
    dimension: int
    lipschitz: float
    smoothness: float


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
    """From settings, problem and the standard deviation of one coordinate of the noise in the mean."""
    name_of_mu: str = "mu"
    """What the paper calls the GDP parameter; accepted as a key of [privacy] beside `mu`."""


class Mu2Settings(Settings):
    """Reshef & Levy 2024: parameters of Theorems 4.1 and 5.1, each of which may be overridden."""

    diameter: Positive = Field(description="D: diameter of the ball the model stays in")
    clip: Literal["lipschitz"] | Positive = Field(
        "lipschitz", description="norm bound S on one record's increment; 'lipschitz' is the paper's G + 2LD"
    )
    step: Literal["paper"] | Positive = Field(
        "paper", description="η; 'paper' is min(D / (std of the mean's noise · √(T d)), 1 / (4 L T))"
    )


def _mu2_clip(settings: Mu2Settings, problem: Problem) -> float:
    """S = G + 2LD."""
    if settings.clip != "lipschitz":
        return settings.clip
    return problem.lipschitz + 2.0 * problem.smoothness * settings.diameter


def _mu2_step(settings: Mu2Settings, problem: Problem, noise_std: float) -> float:
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
    estimator=lambda settings, problem: RecursiveGradient(clip=_mu2_clip(settings, problem)),
    # fresh noise on every q_t
    mechanism=lambda _settings, _problem: IndependentGaussian(),
    # w_{t+1} = P_K(w_t - eta q~_t), x_{t+1} the weighted average of the w
    optimizer=lambda settings, problem, noise_std: AnytimeSGD(
        step=_mu2_step(settings, problem, noise_std), radius=settings.diameter / 2.0
    ),
    name_of_mu="rho",
)

ALGORITHMS = {row.name: row for row in (DP_MU2_FL,)}


def algorithm_named(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise InputError(f"algorithm.name = {name!r}: known algorithms are {', '.join(map(repr, ALGORITHMS))}")
    return ALGORITHMS[name]
