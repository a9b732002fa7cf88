"""One epoch, large batches: Choquette-Choo, Ganesh & Thakurta 2025.

The paper counts rounds from 0 with η_t = t + 1; here rounds count from 1 and α_t = t is the same weight.
"""

import math
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedpriv.algorithms.base import Algorithm, NoiseSettings, Positive, Problem, Settings, chosen, independent
from fedpriv.errors import InputError
from fedpriv.estimators.gradients import PlainGradient, RecursiveGradient
from fedpriv.mechanisms.sensitivity.nodes import levels
from fedpriv.optimizers import NesterovCoupling, ProjectedSGD
from fedpriv.theory.accelerated import Asked, non_realizable, realizable
from fedpriv.theory.accelerated import Problem as TheoremProblem
from fedpriv.theory.excess_risk import Bound, Released, accelerated, projected
from fedpriv.theory.prescription import Prescription

_PAPER = "Choquette-Choo, Ganesh & Thakurta, Near-Optimal Rates for O(1)-Smooth DP-SCO (ALT 2025)"


class AcceleratedSettings(NoiseSettings):
    """The numbers the algorithm runs with, or the theorem they are taken from.

    At the data sizes of one machine the theorems' constants are far too large: `parameters` says so then.
    """

    parameters: Literal["explicit", "theorem-realizable", "theorem-non-realizable"] = Field(
        "explicit", description="where clip and beta come from; a theorem also says how many rounds there must be"
    )
    clip: Positive | None = Field(None, description="C: norm bound on one record's increment")
    first_clip: Literal["balanced", "same"] = Field(
        "same", description="round 1 is in one tree node more: 'balanced' clips it tighter, for less noise"
    )
    beta: Positive | None = Field(None, description="β: the steps are α_t/β and 1/β")
    radius: Positive = Field(description="R: radius of the ball the model stays in")

    @model_validator(mode="after")
    def _one_source_of_parameters(self) -> Self:
        for key in ("clip", "beta"):
            if (getattr(self, key) is None) == (self.parameters == "explicit"):
                raise ValueError(f'{key} is needed with parameters = "explicit", and only there')
        if self.first_clip == "balanced" and self.late_clip != "same":
            raise ValueError('late_clip evens out round 1 as well: leave first_clip = "balanced" out')
        return self

    def numbers(self, problem: Problem) -> tuple[float, float]:
        """C and β; InputError, with what the theorem asks for, where a theorem cannot be run as written."""
        if self.parameters == "explicit":
            assert self.clip is not None
            assert self.beta is not None
            return self.clip, self.beta
        asked = theorem(self.parameters, problem, self.radius)
        if asked.whole_rounds != problem.rounds:
            raise InputError(
                f'algorithm.parameters = "{self.parameters}" asks for {asked.whole_rounds} rounds of '
                f"{asked.whole_batch} records at n = {problem.records}; the scenario has {problem.rounds} rounds"
            )
        return asked.clip, asked.beta


_FORMULAS = {"theorem-realizable": realizable, "theorem-non-realizable": non_realizable}


def theorem(name: str, problem: Problem, radius: float) -> Asked:
    """What a theorem of the paper asks for at a scenario's numbers; InputError if one of them is not known."""
    return _FORMULAS[name](_posed(name, problem, radius))


def _posed(name: str, problem: Problem, radius: float) -> TheoremProblem:
    if problem.epsilon is None or not math.isfinite(problem.lipschitz) or not math.isfinite(problem.smoothness):
        raise InputError(
            f'algorithm.parameters = "{name}": the theorem needs an (ε, δ), and a loss with a known Lipschitz '
            "constant and smoothness"
        )
    return TheoremProblem(
        examples=problem.records,
        dimension=problem.dimension,
        epsilon=problem.epsilon,
        delta=problem.delta,
        lipschitz=problem.lipschitz,
        smoothness=problem.smoothness,
        radius=radius,
        relation=problem.relation,
    )


def _prescribed(settings: AcceleratedSettings, problem: Problem) -> tuple[Prescription, ...]:
    """Both theorems; where one cannot be evaluated at all, why."""
    return tuple(
        _prescription(name, problem, settings.radius) for name in ("theorem-realizable", "theorem-non-realizable")
    )


def _prescription(name: str, problem: Problem, radius: float) -> Prescription:
    try:
        posed = _posed(name, problem, radius)
        asked = _FORMULAS[name](posed)
    except InputError as error:
        return Prescription(name, {}, refusal=str(error))
    known = asked.refusal is None and radius <= problem.convex_within
    risk = asked.excess_risk(posed) if known else math.inf
    numbers = {
        "rounds": asked.rounds,
        "batch": asked.batch,
        "clip": asked.clip,
        "noise std": asked.sigma,
        "noise std (Corollary 9)": asked.paper_sigma,
        "beta": asked.beta,
        "radius": radius,
        **({"excess risk": risk} if math.isfinite(risk) else {}),
    }
    return Prescription(name, numbers, asked.conditions, asked.assumption, asked.refusal)


def _recursive(settings: AcceleratedSettings, problem: Problem) -> RecursiveGradient:
    """Round 1 lies in ⌊log2 T⌋ + 1 released nodes, every other round in at most ⌊log2 T⌋."""
    clip, _ = settings.numbers(problem)
    most = levels(problem.rounds)
    balanced = settings.first_clip == "balanced" and settings.mechanism == "tree" and most > 1
    first = math.sqrt((most - 1) / most) if balanced else 1.0
    return RecursiveGradient(clip=clip, first_clip=first * clip)


ACCELERATED_DP_SRGD = Algorithm(
    name="accelerated-dp-srgd",
    title="Accelerated-DP-SRGD",
    source=f"{_PAPER}, Algorithm 1",
    settings=AcceleratedSettings,
    # Δ_t = t ∇f(x_t) - (t-1) ∇f(x_{t-1}), summed: S_t = S_{t-1} + Δ_t
    estimator=_recursive,
    # the binary tree on every S_t
    mechanism=chosen,
    # z, y and x: Nesterov's three sequences
    optimizer=lambda settings, problem, _noise_std: NesterovCoupling(
        settings.numbers(problem)[1], settings.radius
    ),
    theorems=_prescribed,
    excess_risk=lambda settings, problem, released: accelerated(
        released.of_sums, settings.radius, problem.smoothness, settings.numbers(problem)[1]
    ),
    published="points",
)


class UnacceleratedSettings(AcceleratedSettings):
    """The theorems are about the accelerated algorithm: there is none to take parameters from."""

    parameters: Literal["explicit"] = Field("explicit", description="clip and beta are given")
    output: Literal["last", "average"] = Field("last", description="which iterate is published")


def _unaccelerated_risk(settings: UnacceleratedSettings, problem: Problem, released: Released) -> Bound | None:
    """Of the average: sums are divided by their t, and so are their errors."""
    if settings.output != "average":
        return None
    errors = released.of_sums / np.arange(1.0, problem.rounds + 1.0)
    return projected(errors, settings.radius, problem.smoothness, 1.0 / settings.numbers(problem)[1])


UNACCELERATED_DP_SRGD = Algorithm(
    name="unaccelerated-dp-srgd",
    title="DP-SRGD without acceleration",
    source=f"{_PAPER}, section 4.3",
    settings=UnacceleratedSettings,
    estimator=_recursive,
    mechanism=chosen,
    # x_{t+1} = Π(x_t - S~_t / (t β))
    optimizer=lambda settings, problem, _noise_std: ProjectedSGD(
        step=1.0 / settings.numbers(problem)[1], radius=settings.radius, averaged=settings.output == "average"
    ),
    excess_risk=_unaccelerated_risk,
    published="points",
)


class IndependentSettings(Settings):
    clip: Positive = Field(description="C: norm bound on one record's gradient, before the weight α_t")
    beta: Positive = Field(description="β: the steps are α_t/β and 1/β")
    radius: Positive = Field(description="R: radius of the ball the model stays in")


ACCELERATED_INDEPENDENT = Algorithm(
    name="accelerated-independent",
    title="Accelerated SGD on independent gradients",
    source=f"{_PAPER}, section 5.5",
    settings=IndependentSettings,
    # ∇_t alone is released; the optimizer weights it by α_t, so the noise grows with the weight by itself
    estimator=lambda settings, _problem: PlainGradient(settings.clip),
    mechanism=independent,
    optimizer=lambda settings, _problem, _noise_std: NesterovCoupling(settings.beta, settings.radius),
    # the error of t g_t is t times that of g_t, and of mean 0 whatever was released before
    excess_risk=lambda settings, problem, released: accelerated(
        released.of_gradients * np.arange(1.0, problem.rounds + 1.0),
        settings.radius,
        problem.smoothness,
        settings.beta,
        fresh=True,
    ),
)
