"""DP-μ²-FL of Reshef & Levy: anytime-averaged projected SGD on noisy running sums.

Source: Reshef & Levy, "Private and Federated Stochastic Convex Optimization" (ICML 2024), Algorithms 1 (untrusted
server) and 2 (trusted server).  Anytime averaging is Cutkosky's (2019).  The server computes

    w_{t+1} = Π_K(w_t - η q~_t)
    x_{t+1} = (1 - a) x_t + a w_{t+1},   a = α_{t+1} / α_{1:t+1}
    output x_T, which the release of round T does not change, or x_{T+1}, which it does

Weights are α_t = t, with sums α_{1:t} = α_1 + … + α_t.

| here | paper | shape or unit |
|---|---|---|
| `iterate` | w_t | (..., d) |
| `query_point` | x_t, the next query | (..., d) |
| `last_query` | the last query with a release, x_T after T rounds | (..., d) |
| `released` | q~_t, the mean of the silos' running sums with noise | (..., d) |
| `step` | η | scalar |
| `radius` | D/2: K is the ball of diameter D around 0 | parameter |
| `diameter` | D | parameter |
| `lipschitz`, `smoothness` | G, L | gradient; gradient / parameter |
| `rounds` | T, in the theorems the number of records of a silo | |
| `silos` | M | |
| `mu` | ρ | |
| `clip` | S = G + 2LD | gradient |
| `noise_in_mean` | σ/√M (5.2), σ (6.2): in the mean over silos | gradient |

A query is the point at which silos compute gradients, and a record's increment is its clipped contribution to a
running sum.  A release is such a sum with noise.

Theorems 5.2 (untrusted server) and 6.2 (trusted server) are for replace-one.  Under zero-out a record changes a
sum by at most half as much, and half of the noise suffices.
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
    """Server's vectors between two rounds, (..., d) each."""

    iterate: Tensor
    query_point: Tensor
    last_query: Tensor


@dataclass(frozen=True)
class AnytimeSGD:
    """Projected SGD whose query points are the average of its iterates, with the estimator's weights.

    For α_t = t and a start in the ball of diameter D, (t-1) ‖x_t - x_{t-1}‖ ≤ 2D (t-1)/(t+1) < 2D.  DP-μ²-FL's S =
    G + 2LD follows from this bound.
    """

    step: Scalar
    """η."""
    radius: Scalar
    """Radius D/2 of K."""
    publishes_next: bool = False
    """Whether the output is x_{T+1}, the point after the last round, and not x_T."""

    def start(self, initial: Tensor) -> AnytimeState:
        return AnytimeState(iterate=initial, query_point=initial, last_query=initial)

    def query(self, state: AnytimeState) -> Tensor:
        return state.query_point

    def update(self, state: AnytimeState, released: Tensor, current: Round) -> AnytimeState:
        """Return w_{t+1}, x_{t+1} and x_t, (..., d) each, from the state with w_t and x_t.

        Raises:
            InputError: The estimator has no weights.
        """
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
    """Numbers that a theorem requires, with its bound on the excess risk.

    The module's table has the symbols and units of the fields without a text.
    """

    rounds: int
    clip: float
    noise_in_mean: float
    step: float
    excess_risk: float
    """Bound on E f(x_T) - f(x*) for the worst G* and σ~."""


def mu2_parameters(problem: Problem, mu: float, diameter: float, trusted: bool) -> Mu2Parameters:
    """Return the parameters of Theorem 5.2 (untrusted server) or 6.2 (trusted server).

    In the theorems each of the M silos reads one record a round, so that T is the number of records of one silo.
    Under replace-one σ = 2S√T/ρ at every silo, or 2S√T/(ρM) at the server, and half of that under zero-out.  The
    step is η = min{D/(σ_mean √(T d)), 1/(4LT)}, where σ_mean, the noise in the mean over silos, is σ/√M or σ.  The
    bound is

        E f(x_T) - f(x*) ≤ 4D ((G* + 2LD)/T + σ_mean √d / T^{3/2} + σ~/√(TM)),  σ~ = σ_g + 2σ_L D

    G* is the norm of ∇f at the minimizer x*.  σ_g is the standard deviation of one record's gradient, and σ_L that
    of a difference of its gradients per distance of the points.  G* + 2LD and σ~ are at most the clip G + 2LD,
    which stands for both.

    Args:
        problem: Numbers of the problem.
        mu: ρ.
        diameter: D.
        trusted: Whether the server is trusted.

    Raises:
        InputError: T, d, G, L, ρ or D is not a finite number above 0.
    """
    silos, rounds = problem.silos, problem.records // problem.silos
    for name, value in (("rounds", rounds), ("diameter", diameter), ("mu", mu)):
        check_positive(name, float(value))
    for name in ("dimension", "lipschitz", "smoothness"):
        check_positive(name, float(getattr(problem, name)))
    clip = problem.lipschitz + 2.0 * problem.smoothness * diameter
    noise_in_mean = noise_for(
        mu,
        moved_by(problem.relation, 1.0 / silos if trusted else 1.0 / math.sqrt(silos), clip * math.sqrt(rounds)),
    )
    max_step = 1.0 / (4.0 * problem.smoothness * rounds)
    step = min(diameter / (noise_in_mean * math.sqrt(rounds * problem.dimension)), max_step)
    noise_term = noise_in_mean * math.sqrt(problem.dimension) / rounds**1.5
    sampling_term = clip / math.sqrt(rounds * silos)
    return Mu2Parameters(
        rounds, clip, noise_in_mean, step, 4.0 * diameter * (clip / rounds + noise_term + sampling_term)
    )


class Mu2Settings(NoiseSettings):
    """Keys of DP-μ²-FL, whose defaults are the parameters of Theorems 5.2 and 6.2."""

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
    """Return the scenario's number, S = G + 2LD by default, or G for a growing clip (`_make_estimator`)."""
    if settings.clip == "growing":
        return problem.lipschitz
    return (
        settings.clip
        if settings.clip != "lipschitz"
        else problem.lipschitz + 2.0 * problem.smoothness * settings.diameter
    )


def _make_estimator(settings: Mu2Settings, problem: Problem) -> RecursiveGradient:
    """Return the estimator of running sums with clipped increments.

    The increment of round t is g_t + (t-1)(g_t - g~_{t-1}), and (t-1) ‖x_t - x_{t-1}‖ ≤ 2D (t-1)/(t+1).  So
    the growing clip is G + 2LD (t-1)/(t+1).
    """
    drift_clip = 2.0 * problem.smoothness * settings.diameter if settings.clip == "growing" else 0.0
    return RecursiveGradient(_base_clip(settings, problem), drift_clip=drift_clip)


def _step_length(settings: Mu2Settings, problem: Problem, noise_std: float) -> float:
    """Return the scenario's η, or by default the paper's min{D / (σ_mean √(T d)), 1/(4 L T)}.

    σ_mean is the standard deviation of the released noise in the mean over silos, as a root mean square over the
    rounds.  Without noise η = 1/(4 L T).  With noise L = 0 sets no limit: 1/(4 L T) then counts as infinite.

    Args:
        settings: Keys of the algorithm.
        problem: Numbers of the run, with T rounds.
        noise_std: Standard deviation per coordinate of a fresh noise vector in the mean over silos, or 0.

    Raises:
        InputError: The step is to follow from L, and no L is known, or L = 0 without noise, or the scenario's
            mechanism cannot be built.
    """
    if settings.step != "paper":
        return settings.step
    if not math.isfinite(problem.smoothness) or not (problem.smoothness or noise_std):
        raise InputError(
            'algorithm.step = "paper": η is at most 1/(4 L T), and no smoothness L above 0 is known for this '
            "model; give a number"
        )
    max_step = 1.0 / (4.0 * problem.smoothness * problem.rounds) if problem.smoothness else math.inf
    if noise_std == 0.0:
        return max_step
    workload = Workload(FixedOrder(problem.rounds, problem.rounds), 1.0, np.ones(problem.rounds))
    released_std = noise_std * math.sqrt(choose_mechanism(settings, problem, workload).mean_variance(workload))
    return min(settings.diameter / (released_std * math.sqrt(problem.rounds * problem.dimension)), max_step)


@catch_refusal
def _prescribe(name: str, trusted: bool, settings: Mu2Settings, problem: Problem) -> Prescription:
    if problem.epsilon is None or settings.diameter / 2.0 > problem.convex_within:
        raise InputError(
            f"{name} needs a guarantee, and a loss that is convex, with a known Lipschitz constant and "
            f"smoothness, in the ball of diameter {settings.diameter:g}"
        )
    parameters = mu2_parameters(problem, mu_of(problem.epsilon, problem.delta), settings.diameter, trusted)
    numbers = {
        "rounds": float(parameters.rounds),
        "batch": float(problem.silos),
        "clip": parameters.clip,
        "noise std": parameters.noise_in_mean,
        "step": parameters.step,
        "radius": settings.diameter / 2.0,
        "excess risk": parameters.excess_risk,
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
    # fresh noise on every q_t, unless the scenario chooses another mechanism
    mechanism=choose_mechanism,
    # w_{t+1} = P_K(w_t - eta q~_t), x_{t+1} the weighted average of the w
    optimizer=lambda settings, problem, noise_std: AnytimeSGD(
        step=_step_length(settings, problem, noise_std),
        radius=settings.diameter / 2.0,
        publishes_next=settings.output == "next",
    ),
    # in the theorems a round reads one record of each silo, and a record is in one round
    theorems=lambda settings, problem: (
        _prescribe("Theorem 5.2 (untrusted server)", False, settings, problem),
        _prescribe("Theorem 6.2 (trusted server)", True, settings, problem),
    ),
    published="points",
    name_of_mu="rho",
)
