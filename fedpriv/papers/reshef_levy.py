"""DP-μ²-FL: Reshef & Levy, Private and Federated Stochastic Convex Optimization (ICML 2024), Algorithms 1
(untrusted server) and 2 (trusted server).

Anytime-averaged projected SGD; anytime averaging is Cutkosky 2019.  The server's lines:

    w_{t+1} = Π_K(w_t - η q~_t)
    x_{t+1} = (1 - a) x_t + a w_{t+1},   a = α_{t+1} / α_{1:t+1}
    output x_T: what is released in round T moves nothing that is published; or x_{T+1}, which it does move

| here | paper | shape or unit |
|---|---|---|
| `iterate` | w_t | (..., d) |
| `ask` | x_t, the next query | (..., d) |
| `answered` | the query that was answered last; after T rounds x_T | (..., d) |
| `released` | q~_t, the mean of the silos' running sums with noise | (..., d) |
| `step` | η | scalar |
| `radius` | D/2: K is the ball of diameter D around 0 | parameter |
| `diameter` | D | parameter |
| `lipschitz`, `smoothness` | G, L | gradient; gradient / parameter |
| `rounds` | T; the theorems take as many as a silo has records | |
| `silos` | M | |
| `mu` | ρ | |
| `clip` | S = G + 2LD | gradient |
| `noise_in_mean` | σ/√M (5.2), σ (6.2): in the mean over silos | gradient |

Theorems 5.2 (untrusted server) and 6.2 (trusted server) are for replace-one; under zero-out a record moves half as
far, and half of the noise does.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field
from torch import Tensor

from fedpriv.accounting.gaussian import check_positive, moved_by, mu_of, noise_for
from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import RecursiveGradient, Round
from fedpriv.noise.registry import ChosenName
from fedpriv.noise.series import Workload
from fedpriv.papers.base import (
    Algorithm,
    NoiseSettings,
    Positive,
    Prescription,
    Problem,
    catch_refusal,
    choose_mechanism,
    project_to_ball,
    take_step,
)
from fedpriv.participation.orders import FixedOrder


class AnytimeState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    iterate: Tensor
    query_point: Tensor
    last_query: Tensor


@dataclass(frozen=True)
class AnytimeSGD:
    """Projected SGD whose query points are the average of its iterates, with the estimator's weights.

    (t-1) ‖x_t - x_{t-1}‖ ≤ 2D follows from the averaging weights; DP-μ²-FL's bound S = G + 2LD rests on it.
    """

    step: Scalar
    radius: Scalar
    publishes_next: bool = False
    """Whether the point after the last round, x_{T+1}, is published in place of x_T."""

    def start(self, initial: Tensor) -> AnytimeState:
        return AnytimeState(iterate=initial, query_point=initial, last_query=initial)

    def query(self, state: AnytimeState) -> Tensor:
        return state.query_point

    def update(self, state: AnytimeState, released: Tensor, current: Round) -> AnytimeState:
        iterate = project_to_ball(take_step(state.iterate, self.step, released), self.radius)
        if current.next_share is None:
            raise InputError(
                "AnytimeSGD averages iterates with the estimator's weights, and this estimator has none: take "
                "RecursiveGradient, or give its Round a next_share"
            )
        return AnytimeState(
            iterate, query_point=state.query_point.lerp(iterate, current.next_share), last_query=state.query_point
        )

    def output(self, state: AnytimeState) -> Tensor:
        return state.query_point if self.publishes_next else state.last_query


@dataclass(frozen=True)
class Mu2Parameters:
    """Numbers that a theorem asks for; `excess_risk` bounds E f(x_T) - f(x*) for the worst G* and σ~."""

    rounds: int
    clip: float
    noise_in_mean: float
    step: float
    excess_risk: float


def mu2_parameters(problem: Problem, mu: float, diameter: float, trusted: bool) -> Mu2Parameters:
    """σ = 2S√T/ρ at every silo, or 2S√T/(ρM) at the server; η = min{D/(σ_mean √(T d)), 1/(4LT)}.

        E f(x_T) - f(x*) ≤ 4D ((G* + 2LD)/T + 2S√d/(ρ T √M) + σ~/√(TM)),  σ~ = σ_g + 2σ_L D

    with M for the first √M if trusted; that term is σ_mean √d / T^{3/2}.  G* ≤ G, σ_g ≤ G and σ_L ≤ L hold for
    any records, so that the bound is (G + 2LD), the clip, in both other places.  T is the records of one silo.
    """
    silos, rounds = problem.silos, problem.records // problem.silos
    for name, value in (("rounds", rounds), ("diameter", diameter), ("mu", mu)):
        check_positive(name, float(value))
    for name in ("dimension", "lipschitz", "smoothness"):
        check_positive(name, float(getattr(problem, name)))
    clip = problem.lipschitz + 2.0 * problem.smoothness * diameter
    noise = noise_for(
        mu,
        moved_by(problem.relation, 1.0 / silos if trusted else 1.0 / math.sqrt(silos), clip * math.sqrt(rounds)),
    )
    smooth = 1.0 / (4.0 * problem.smoothness * rounds)
    step = min(diameter / (noise * math.sqrt(rounds * problem.dimension)), smooth)
    private = noise * math.sqrt(problem.dimension) / rounds**1.5
    sampling = clip / math.sqrt(rounds * silos)
    return Mu2Parameters(rounds, clip, noise, step, 4.0 * diameter * (clip / rounds + private + sampling))


class Mu2Settings(NoiseSettings):
    """Reshef & Levy 2024: parameters of Theorems 5.2 and 6.2, each of which may be overridden."""

    mechanism: ChosenName = Field(
        "independent", description="the paper's fresh noise in every round, or one of the others"
    )

    diameter: Positive = Field(description="D: diameter of the ball the model stays in")
    clip: Literal["lipschitz", "growing"] | Positive = Field(
        "lipschitz",
        description="norm bound S on one record's increment; 'lipschitz' is the paper's G + 2LD, 'growing' is "
        "G + 2LD (t-1)/(t+1) in round t, which clips no more and costs less noise",
    )
    output: Literal["last", "next"] = Field(
        "last", description="what is published: the paper's x_T, or x_{T+1}, in which the last batch counts, too"
    )
    step: Literal["paper"] | Positive = Field(
        "paper",
        description="η; 'paper' is min(D / (std of the mean's noise · √(T d)), 1 / (4 L T)), L the smoothness",
    )


def _base_clip(settings: Mu2Settings, problem: Problem) -> float:
    """S = G + 2LD, or the G that rounds add to."""
    if settings.clip == "growing":
        return problem.lipschitz
    return (
        settings.clip
        if settings.clip != "lipschitz"
        else problem.lipschitz + 2.0 * problem.smoothness * settings.diameter
    )


def _make_estimator(settings: Mu2Settings, problem: Problem) -> RecursiveGradient:
    """The increment of round t is g_t + (t-1)(g_t - g~_{t-1}), and (t-1) ‖x_t - x_{t-1}‖ ≤ 2D (t-1)/(t+1)."""
    moved = 2.0 * problem.smoothness * settings.diameter if settings.clip == "growing" else 0.0
    return RecursiveGradient(_base_clip(settings, problem), drift_clip=moved)


def _step_length(settings: Mu2Settings, problem: Problem, noise_std: float) -> float:
    """η = min{ρ D √M / (2 S T √d), 1/(4 L T)} (untrusted), with M for √M if trusted.

    Both are D / (σ_mean √(T d)), where σ_mean = 2 S √T / (ρ √M) or 2 S √T / (ρ M) is the standard deviation of
    the noise in the mean over silos: of what is released, root mean square over the rounds where they differ.
    `noise_std` is that of a fresh vector.
    """
    if settings.step != "paper":
        return settings.step
    if not math.isfinite(problem.smoothness):
        raise InputError(
            'algorithm.step = "paper": η is at most 1/(4 L T), and no smoothness L is known for this model; '
            "give a number"
        )
    smooth = 1.0 / (4.0 * problem.smoothness * problem.rounds)
    if noise_std == 0.0:
        return smooth
    rounds = Workload(FixedOrder(problem.rounds, problem.rounds), 1.0, np.ones(problem.rounds))
    released_std = noise_std * math.sqrt(choose_mechanism(settings, problem, rounds).mean_variance(rounds))
    return min(settings.diameter / (released_std * math.sqrt(problem.rounds * problem.dimension)), smooth)


@catch_refusal
def _prescribe(name: str, trusted: bool, settings: Mu2Settings, problem: Problem) -> Prescription:
    if problem.epsilon is None or settings.diameter / 2.0 > problem.convex_within:
        raise InputError(
            f"{name} needs a guarantee, and a loss that is convex, with a known slope and smoothness, in the "
            f"ball of diameter {settings.diameter:g}"
        )
    asked = mu2_parameters(problem, mu_of(problem.epsilon, problem.delta), settings.diameter, trusted)
    numbers = {
        "rounds": float(asked.rounds),
        "batch": float(problem.silos),
        "clip": asked.clip,
        "noise std": asked.noise_in_mean,
        "step": asked.step,
        "radius": settings.diameter / 2.0,
        "excess risk": asked.excess_risk,
    }
    return Prescription(
        name, numbers, assumption="each silo's records are independent; excess risk at G* = G, σ~ = G + 2LD"
    )


DP_MU2_FL = Algorithm(
    name="dp-mu2-fl",
    title="DP-μ²-FL",
    source="Reshef & Levy, Private and Federated Stochastic Convex Optimization (ICML 2024), Algorithms 1 and 2",
    settings=Mu2Settings,
    # s_t = t g_t - (t-1) g~_{t-1}, summed: q_t = q_{t-1} + s_t
    estimator=_make_estimator,
    # fresh noise on every q_t, unless the scenario asks for another mechanism
    mechanism=choose_mechanism,
    # w_{t+1} = P_K(w_t - eta q~_t), x_{t+1} the weighted average of the w
    optimizer=lambda settings, problem, noise_std: AnytimeSGD(
        step=_step_length(settings, problem, noise_std),
        radius=settings.diameter / 2.0,
        publishes_next=settings.output == "next",
    ),
    # one record of each silo a round, each in one round
    theorems=lambda settings, problem: (
        _prescribe("Theorem 5.2 (untrusted server)", False, settings, problem),
        _prescribe("Theorem 6.2 (trusted server)", True, settings, problem),
    ),
    published="points",
    name_of_mu="rho",
)
