"""DP-μ²-FL: Reshef & Levy 2024, Algorithms 1 (untrusted server) and 2 (trusted server)."""

import math
from typing import Literal

import numpy as np
from pydantic import Field

from fedpriv.accounting.gdp import mu_of
from fedpriv.algorithms.base import Algorithm, NoiseSettings, Positive, Problem, chosen
from fedpriv.errors import InputError
from fedpriv.estimators.gradients import RecursiveGradient
from fedpriv.mechanisms import Workload
from fedpriv.mechanisms.registry import ChosenName
from fedpriv.optimizers import AnytimeSGD
from fedpriv.participation.fixed_order import Schedule
from fedpriv.theory.mu2 import Mu2Problem, mu2_parameters
from fedpriv.theory.prescription import Prescription


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


def _clip(settings: Mu2Settings, problem: Problem) -> float:
    """S = G + 2LD, or the G that rounds add to."""
    if settings.clip == "growing":
        return problem.lipschitz
    if settings.clip != "lipschitz":
        return settings.clip
    return problem.lipschitz + 2.0 * problem.smoothness * settings.diameter


def _estimator(settings: Mu2Settings, problem: Problem) -> RecursiveGradient:
    """The increment of round t is g_t + (t-1)(g_t - g~_{t-1}), and (t-1) ‖x_t - x_{t-1}‖ ≤ 2D (t-1)/(t+1)."""
    moved = 2.0 * problem.smoothness * settings.diameter if settings.clip == "growing" else 0.0
    return RecursiveGradient(_clip(settings, problem), moved=moved)


def _step(settings: Mu2Settings, problem: Problem, noise_std: float) -> float:
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
    rounds = Workload(Schedule(problem.rounds, problem.rounds), 1.0, np.ones(problem.rounds))
    released_std = noise_std * math.sqrt(chosen(settings, problem, rounds).mean_variance(rounds))
    return min(settings.diameter / (released_std * math.sqrt(problem.rounds * problem.dimension)), smooth)


def _prescribed(settings: Mu2Settings, problem: Problem) -> tuple[Prescription, ...]:
    """Both theorems: one record of each silo a round, each in one round."""
    return tuple(
        _prescription(f"Theorem {number} ({server} server)", trusted, settings, problem)
        for number, server, trusted in (("5.2", "untrusted", False), ("6.2", "trusted", True))
    )


def _prescription(name: str, trusted: bool, settings: Mu2Settings, problem: Problem) -> Prescription:
    try:
        if problem.epsilon is None or settings.diameter / 2.0 > problem.convex_within:
            raise InputError(
                f"{name} needs a guarantee, and a loss that is convex, with a known slope and smoothness, in the "
                f"ball of diameter {settings.diameter:g}"
            )
        asked = mu2_parameters(
            Mu2Problem(
                problem.records // problem.silos,
                problem.silos,
                problem.dimension,
                problem.lipschitz,
                problem.smoothness,
                settings.diameter,
                mu_of(problem.epsilon, problem.delta),
                problem.relation,
            ),
            trusted,
        )
    except InputError as error:
        return Prescription(name, {}, refusal=str(error))
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
    estimator=_estimator,
    # fresh noise on every q_t, unless the scenario asks for another mechanism
    mechanism=chosen,
    # w_{t+1} = P_K(w_t - eta q~_t), x_{t+1} the weighted average of the w
    optimizer=lambda settings, problem, noise_std: AnytimeSGD(
        step=_step(settings, problem, noise_std),
        radius=settings.diameter / 2.0,
        following=settings.output == "next",
    ),
    theorems=_prescribed,
    published="points",
    name_of_mu="rho",
)
