"""What the papers' algorithms are compared with; formulas and sources in docs/baselines.md.

Follow the regularized leader on noisy sums of gradients: the server of DP-FTRL.

Source: Kairouz et al. 2021, Algorithm 1 and its momentum variant (section 5).

    v_t = γ v_{t-1} + S~_t
    x_{t+1} = Π(x_1 - η v_t)

| here | paper | shape |
|---|---|---|
| `released` | s~_t, the noisy sum of all gradients so far | (..., d) |
| `velocity` | v_t | (..., d) |
| `step` | 1/λ | scalar |
| `momentum` | γ | scalar |

Differentially private online-to-batch: the bounds on its increments, from which its noise follows.

Source: Zhang, Tran & Cutkosky 2022, "Differentially Private Online-to-Batch for Smooth Losses" (NeurIPS), with
weights α_t = t^k.  The increment of round t is α_t ∇f(x_t; z) - α_{t-1} ∇f(x_{t-1}; z), the x_t are the weighted
averages of an online learner's iterates in a convex set of diameter D, losses are G-Lipschitz and H-smooth.

The bound below is derived here; the paper states it up to constants:

    ‖increment‖ ≤ (α_t - α_{t-1}) G + α_{t-1} H ‖x_t - x_{t-1}‖,   x_t - x_{t-1} = (α_t/α_{1:t}) (w_t - x_{t-1})
                ≤ t^{k-1} (k G + (k+1) H D)    as α_t - α_{t-1} ≤ k t^{k-1} and α_{1:t} ≥ t^{k+1}/(k+1)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedpriv.accounting.gaussian import check_positive, moved_by, mu_of
from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import PlainGradient, PowerWeights, RecursiveGradient, Round
from fedpriv.noise.phased import PhaseEnds
from fedpriv.noise.workload import Workload
from fedpriv.papers.base import (
    Algorithm,
    Fraction,
    NoiseSettings,
    Positive,
    Problem,
    ProjectedSGD,
    Settings,
    chosen,
    independent,
    project_to_ball,
    stepped,
)
from fedpriv.papers.fedavg import OptionalLocalSteps, optionally_trained
from fedpriv.papers.phased import PhasedSGD, phases_of, shrink_of_phase, step_conditions, suggested_step
from fedpriv.papers.reshef_levy import AnytimeSGD
from fedpriv.papers.risk import (
    Bound,
    NoisyMinibatch,
    Prescription,
    Released,
    by_advanced_composition,
    by_moments,
    phased,
    projected,
)
from fedpriv.participation.orders import Phases, Schedule


class LeaderState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    initial: Tensor
    velocity: Tensor
    iterate: Tensor


@dataclass(frozen=True)
class FollowTheRegularizedLeader:
    """The iterate is the minimizer of the summed linear losses plus ‖x - x_1‖²/(2η); asks there."""

    step: Scalar
    radius: Scalar
    momentum: Scalar = 0.0

    def start(self, initial: Tensor) -> LeaderState:
        return LeaderState(initial, torch.zeros_like(initial), initial)

    def query(self, state: LeaderState) -> Tensor:
        return state.iterate

    def update(self, state: LeaderState, released: Tensor, current: Round) -> LeaderState:
        velocity = self.momentum * state.velocity + released / current.scale
        iterate = project_to_ball(stepped(state.initial, self.step, velocity), self.radius)
        return LeaderState(state.initial, velocity, iterate)

    def output(self, state: LeaderState) -> Tensor:
        return state.iterate


def increment_bound(t: int, power: float, lipschitz: float, smoothness: float, diameter: float) -> float:
    """t^{k-1} (k G + (k+1) H D), a clip norm for round t (from 1) that never bites; k = `power` ≥ 1."""
    if t < 1 or not power >= 1.0:
        raise InputError(f"t = {t}, power = {power}: rounds count from 1, and the weights t^k have k of 1 or more")
    for name, value in (("lipschitz", lipschitz), ("smoothness", smoothness), ("diameter", diameter)):
        check_positive(name, value)
    return float(t ** (power - 1.0) * (power * lipschitz + (power + 1.0) * smoothness * diameter))


class SgdSettings(Settings):
    clip: Positive = Field(description="C: norm bound on one record's gradient")
    step: Positive = Field(description="η")
    radius: Positive = Field(math.inf, description="radius of the ball the model stays in; unbounded if left out")
    momentum: Fraction = Field(0.0, description="heavy-ball momentum")
    output: Literal["last", "average"] = Field("last", description="which iterate is published")


def _averaged_risk(settings: "SgdSettings | MinibatchSettings", problem: Problem, released: Released) -> Bound:
    """Of the average of the iterates."""
    return projected(released.of_gradients, settings.radius, problem.smoothness, settings.step, fresh=True)


DP_SGD = Algorithm(
    name="dp-sgd",
    title="DP-SGD",
    source="Abadi et al., Deep Learning with Differential Privacy (CCS 2016), Algorithm 1; fixed batches",
    settings=SgdSettings,
    estimator=lambda settings, _problem: PlainGradient(settings.clip),
    mechanism=independent,
    optimizer=lambda settings, _problem, _noise_std: ProjectedSGD(
        settings.step, settings.radius, settings.momentum, averaged=settings.output == "average"
    ),
    excess_risk=lambda settings, problem, released: (
        _averaged_risk(settings, problem, released)
        if settings.output == "average" and not settings.momentum
        else None
    ),
)


class MinibatchSettings(Settings):
    clip: Positive = Field(description="C: norm bound on one record's gradient")
    step: Positive = Field(description="η")
    radius: Positive = Field(math.inf, description="radius of the ball the model stays in; unbounded if left out")


def _authors_numbers(settings: MinibatchSettings, problem: Problem) -> tuple[Prescription, ...]:
    """Noise and batch of the authors' programs, for silos of equal size and R = the scenario's rounds."""
    return tuple(
        _authors_number(name, formula, settings.clip, problem)
        for name, formula in (
            ("moments accountant", by_moments),
            ("advanced composition", by_advanced_composition),
        )
    )


def _authors_number(
    name: str,
    formula: Callable[[int, int, float, float, float], NoisyMinibatch],
    clip: float,
    problem: Problem,
) -> Prescription:
    try:
        if problem.epsilon is None:
            raise InputError(f"{name} needs an (ε, δ), and the scenario is not private")
        records = problem.records // problem.silos
        asked = formula(records, problem.rounds, problem.epsilon, problem.delta, clip)
    except InputError as error:
        return Prescription(name, {}, refusal=str(error))
    numbers = {
        "rounds": float(asked.rounds),
        "batch": float(asked.batch * problem.silos),
        "clip": clip,
        "noise std": asked.sigma / math.sqrt(problem.silos),
    }
    return Prescription(
        name, numbers, asked.conditions, "records are sampled with replacement, which is not accounted for here"
    )


NOISY_MINIBATCH = Algorithm(
    name="noisy-minibatch",
    title="Noisy minibatch SGD",
    source="after Lowy & Razaviyayn, Private Federated Learning Without a Trusted Server (ICLR 2023)",
    settings=MinibatchSettings,
    estimator=lambda settings, _problem: PlainGradient(settings.clip),
    mechanism=independent,
    # w_{r+1} = Π_K(w_r - η (1/M) Σ_i g~_{r,i}), output the mean of the iterates
    optimizer=lambda settings, _problem, _noise_std: ProjectedSGD(settings.step, settings.radius, averaged=True),
    theorems=_authors_numbers,
    excess_risk=_averaged_risk,
)


class FtrlSettings(NoiseSettings, OptionalLocalSteps):
    clip: Positive = Field(description="C: norm bound on one record's gradient, or on how far one client moves")
    step: Positive = Field(description="η: the model is x_1 - η · (sum of all gradients)")
    radius: Positive = Field(math.inf, description="radius of the ball the model stays in; unbounded if left out")
    momentum: Fraction = Field(0.0, description="momentum on the sums")


DP_FTRL = Algorithm(
    name="dp-ftrl",
    title="DP-FTRL",
    source="Kairouz et al., Practical and Private (Deep) Learning Without Sampling or Shuffling (ICML 2021)",
    settings=FtrlSettings,
    estimator=lambda settings, _problem: PlainGradient(settings.clip, decay=1.0),
    mechanism=chosen,
    optimizer=lambda settings, _problem, _noise_std: FollowTheRegularizedLeader(
        settings.step, settings.radius, settings.momentum
    ),
    objective=optionally_trained,
    published="points",
)


class PhasedSettings(Settings):
    clip: Literal["lipschitz"] | Positive = Field(
        "lipschitz", description="norm bound on one record's gradient; it may not be below the Lipschitz constant"
    )
    step: Positive = Field(description="η: phase i takes steps η/4^i")
    radius: Positive = Field(description="radius of the ball the model stays in")


def _one_pass_in_phases(declared: Schedule) -> Phases:
    if declared.rounds_per_epoch != declared.rounds:
        raise InputError(
            "federation.epochs: phased-sgd reads every record once, in phases; leave epochs out, or run dp-sgd"
        )
    return phases_of(declared.rounds_per_epoch)


def _phases(problem: Problem) -> Phases:
    assert isinstance(problem.schedule, Phases)  # the row's own `schedule` made it
    return problem.schedule


def _phase_ends(settings: PhasedSettings, problem: Problem, _workload: Workload) -> PhaseEnds:
    """Noise in the empty round that ends a phase, by contraction."""
    first = settings.step * shrink_of_phase(1)
    return PhaseEnds(_phases(problem), first, problem.smoothness, problem.lipschitz)


def _phased_clip(settings: PhasedSettings, problem: Problem) -> float:
    """C; InputError where the contraction argument does not apply."""
    if not problem.convex:
        raise InputError(
            "algorithm.name = 'phased-sgd': its privacy rests on a convex loss whose Lipschitz constant and "
            "smoothness hold everywhere; take model.name = 'softmax-regression'"
        )
    return problem.lipschitz if settings.clip == "lipschitz" else settings.clip


def _phased_numbers(settings: PhasedSettings, problem: Problem) -> tuple[Prescription, ...]:
    """The paper's step for batches of one record, from memory of the paper; noise and rounds follow from it."""
    name = "section 4, experimental"
    try:
        if problem.epsilon is None or not problem.convex:
            raise InputError(f"{name} needs a guarantee, and a loss that is known to be convex")
        phases = phases_of(problem.records)
        mu = mu_of(problem.epsilon, problem.delta)
        apart = moved_by(problem.relation, 1.0, 1.0)
        step = suggested_step(
            problem.records, problem.dimension, problem.lipschitz, 2.0 * settings.radius, 2.0 * mu / apart
        )
    except InputError as error:
        return (Prescription(name, {}, refusal=str(error)),)
    numbers = {"rounds": float(phases.rounds), "batch": 1.0, "clip": problem.lipschitz, "step": step}
    numbers["noise std"] = problem.lipschitz * apart / mu
    return (Prescription(name, numbers, step_conditions(step, problem.smoothness)),)


def _phased_risk(settings: PhasedSettings, problem: Problem, released: Released) -> Bound:
    """Noise is released in the empty round that ends a phase, in units of the phase's step."""
    lengths = _phases(problem).lengths
    steps = [settings.step * shrink_of_phase(phase) for phase in range(1, len(lengths) + 1)]
    stds = released.stds[np.cumsum([length + 1 for length in lengths]) - 1]
    noises = [step * std * math.sqrt(problem.dimension) for step, std in zip(steps, stds.tolist(), strict=True)]
    return phased(lengths, steps, noises, settings.radius, problem.lipschitz)


PHASED_SGD = Algorithm(
    name="phased-sgd",
    title="Phased SGD",
    source="after Feldman, Koren & Talwar, Private Stochastic Convex Optimization (STOC 2020), section 4",
    settings=PhasedSettings,
    schedule=lambda _settings, declared: _one_pass_in_phases(declared),
    trusts=("curator",),
    estimator=lambda settings, problem: PlainGradient(_phased_clip(settings, problem)),
    mechanism=_phase_ends,
    optimizer=lambda settings, problem, _noise_std: PhasedSGD(_phases(problem), settings.step, settings.radius),
    theorems=_phased_numbers,
    excess_risk=_phased_risk,
)


class OnlineToBatchSettings(NoiseSettings):
    clip: Positive = Field(description="C: an increment of round t is clipped to C t^(k-1)")
    step: Positive = Field(description="η of online gradient descent on the weighted gradients")
    radius: Positive = Field(description="radius of the ball the model stays in")
    power: Annotated[int, Field(ge=1, le=8)] = Field(1, description="k: the weights are α_t = t^k")


def _unclipped(settings: OnlineToBatchSettings, problem: Problem) -> tuple[Prescription, ...]:
    """The clip at which nothing is clipped, where slope and smoothness hold in the ball; the rest is as it is."""
    name = "bound on increments"
    if settings.radius > problem.convex_within:
        return (Prescription(name, {}, refusal=f"{name}: no slope and smoothness are known in the ball"),)
    clip = increment_bound(1, settings.power, problem.lipschitz, problem.smoothness, 2.0 * settings.radius)
    return (Prescription(name, {"rounds": float(problem.rounds), "batch": float(problem.batch), "clip": clip}),)


ONLINE_TO_BATCH = Algorithm(
    name="online-to-batch",
    title="Private online-to-batch",
    source="Zhang, Tran & Cutkosky, Differentially Private Online-to-Batch for Smooth Losses (NeurIPS 2022)",
    settings=OnlineToBatchSettings,
    # δ_t = t^k ∇f(x_t) - (t-1)^k ∇f(x_{t-1}), summed under the tree
    estimator=lambda settings, _problem: RecursiveGradient(
        settings.clip, weights=PowerWeights(settings.power), growth=settings.power - 1
    ),
    mechanism=chosen,
    # online gradient descent on the sums, x_t the weighted average of its iterates
    optimizer=lambda settings, _problem, _noise_std: AnytimeSGD(
        settings.step, settings.radius, PowerWeights(settings.power)
    ),
    theorems=_unclipped,
    published="points",
)
