"""Phased SGD: private stochastic convex optimization in linear time, inside one curator.

Source: Feldman, Koren & Talwar, "Private Stochastic Convex Optimization: Optimal Rates in Linear Time" (STOC
2020), section 4.  SGD runs in phases, each of about half the length and with a quarter of the step of the phase
before, from a noisy start.  Phase i = 1, 2, … has n_i = ⌊n/(2^i B)⌋ gradient rounds, each with B fresh examples,
from w_{i,1} = w_{i-1}.  An empty round then adds the noise.  A curator is one party that is server and silos.

    w_{i,t+1} = Π_K(w_{i,t} - η_i g_t),   η_i = η / 4^i,  g_t the mean gradient of a batch, without noise
    w_i       = Π_K((w_{i,1} + … + w_{i,n_i}) / n_i - η_i ζ_i),   ζ_i the noise of the phase's empty round

A query is the point at which gradients are computed.  The paper does not project w_i.  Projecting a private point
costs no privacy, and the average lies in K already.

| here | paper | shape |
|---|---|---|
| `phase_start` | w_{i-1}, the last private point, which is the output | (..., d) |
| `iterate` | w_{i,t}, known to the curator only | (..., d) |
| `iterate_sum` | w_{i,1} + … + w_{i,t-1} | (..., d) |
| `step` | η | scalar |
| `radius` | K is the ball of this radius around 0 | scalar |

This file was written from the paper's abstract and not checked against its text.  Therefore the noise follows
from the sensitivity proved in `fedpriv.noise.diagonal`, and `suggested_step` is experimental.

The bound on the excess risk (`phased_bound`): with ξ_0 = w_0 - x* and ξ_i = -η_i ζ_i, in expectation

    F(w_k) - F(x*) ≤ Σ_i (‖ξ_{i-1}‖²/(2 η_i n_i) + η_i L²/2) + L ‖ξ_k‖

Proof: docs/proofs/excess-risk.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedpriv.accounting.gaussian import moved_by, mu_of
from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import PlainGradient, Round
from fedpriv.noise.diagonal import PhaseEnds
from fedpriv.noise.series import Workload
from fedpriv.papers.base import (
    Algorithm,
    Bound,
    Condition,
    Positive,
    Prescription,
    Problem,
    ReleaseNumbers,
    Settings,
    catch_refusal,
    project_to_ball,
)
from fedpriv.participation.orders import FixedOrder, Phases


def make_phases(examples: int, batch: int = 1) -> Phases:
    """Return phases i = 1, 2, … of ⌊n/(2^i B)⌋ rounds of B examples, as long as a phase has a round.

    Each phase ends with one more round, which reads no example.

    Args:
        examples: n.
        batch: B.

    Raises:
        InputError: The first phase has no round, or the batch is below 1.

    Example:
        >>> make_phases(16).lengths
        (8, 4, 2, 1)
    """
    if batch < 1 or examples < 2 * batch:
        raise InputError(
            f"examples = {examples}, batch = {batch}: the first phase reads half of the "
            "examples, so there must be two batches or more, each of 1 example or more"
        )
    lengths, length = [], examples // (2 * batch)
    while length >= 1:
        lengths.append(length)
        length = examples // (2 ** (len(lengths) + 1) * batch)
    return Phases(tuple(lengths))


def phase_step_factor(phase: int) -> float:
    """Return η_i/η = 1/4^i for phase i = 1, 2, ….

    Example:
        >>> phase_step_factor(1), phase_step_factor(2)
        (0.25, 0.0625)
    """
    return math.pow(4.0, -phase)


class PhasedState(NamedTuple):
    """Curator's vectors between two rounds, (..., d) each."""

    phase_start: Tensor
    iterate: Tensor
    iterate_sum: Tensor


@dataclass(frozen=True)
class PhasedSGD:
    """Optimizer whose queries are the iterates of a phase, and whose output changes in empty rounds only.

    Guarantee: queries are NOT private, and all rounds happen inside one curator.  `output` is the start of the
    current phase: the initial model, or the average of the phase before with the noise of its empty round,
    projected to K.  Noise is calibrated for these starts, so that they, and nothing else, may be shown at any
    time.
    """

    phases: Phases
    """Numbers n_i of gradient rounds, with an empty round after each phase."""
    step: Scalar
    """η: phase i takes steps η / 4^i."""
    radius: Scalar
    """Radius of K."""

    def start(self, initial: Tensor) -> PhasedState:
        return PhasedState(initial, initial, torch.zeros_like(initial))

    def query(self, state: PhasedState) -> Tensor:
        return state.iterate

    def update(self, state: PhasedState, released: Tensor, current: Round) -> PhasedState:
        """Step to w_{i,t+1} in a gradient round, or from the phase's average to w_i in an empty round.

        Args:
            state: Vectors of the module's table before the round.
            released: Release of the round, (..., d), of which `released` / `scale` is the mean gradient g_t, or
                the noise ζ_i in an empty round.
            current: Round of the run, with its number from 1 and its scale.
        """
        phase = self.phases.phase(current.t)
        displacement = self.step * phase_step_factor(phase) * released / current.scale
        if self.phases.batch_index(current.t) is not None:
            return PhasedState(
                state.phase_start,
                project_to_ball(state.iterate - displacement, self.radius),
                state.iterate_sum + state.iterate,
            )
        # The release of an empty round is noise alone, and makes the average private.
        average = state.iterate_sum / self.phases.lengths[phase - 1]
        start = project_to_ball(average - displacement, self.radius)
        return PhasedState(start, start, torch.zeros_like(start))

    def output(self, state: PhasedState) -> Tensor:
        return state.phase_start


def suggested_step(examples: int, dimension: int, lipschitz: float, diameter: float, mu: float) -> float:
    """Return η = (D/L) min{4/√n, μ/(2√d)}, for batches of 1 and replace-one neighbours.

    The formula is quoted from memory.

    Args:
        examples: n.
        dimension: d.
        lipschitz: L.
        diameter: Diameter D of the ball K.
        mu: μ, for the paper's ρ of (α, αρ²/2)-RDP.

    Example:
        >>> round(suggested_step(100, 10, 1.0, 1.0, 1.0), 4)
        0.1581
    """
    return diameter / lipschitz * min(4.0 / math.sqrt(examples), mu / (2.0 * math.sqrt(dimension)))


def step_conditions(step: float, smoothness: float) -> tuple[Condition, ...]:
    """Return the condition η_1 ≤ 2/smoothness of the contraction, on which privacy rests.

    A linear loss, of smoothness 0, has no such condition.

    Args:
        step: η of the scenario.
        smoothness: Smoothness of every record's loss, 0 or more.
    """
    return (Condition("η/4 ≤ 2/smoothness", step * phase_step_factor(1), 2.0 / smoothness),) if smoothness else ()


def phased_bound(
    lengths: Sequence[int], steps: Sequence[float], noises: Sequence[float], radius: float, lipschitz: float
) -> Bound:
    """Bound the excess risk after phases i = 1 … k, by the formula in the module's text.

    Args:
        lengths: Numbers n_i of rounds, (k,).
        steps: Steps η_i, (k,).
        noises: Root mean squares of ‖ξ_i‖, (k,).
        radius: Bound on ‖ξ_0‖.
        lipschitz: L.
    """
    start_errors = [radius, *noises[:-1]]
    value = lipschitz * noises[-1] + sum(
        start_error**2 / (2.0 * step * length) + step * lipschitz**2 / 2.0
        for length, step, start_error in zip(lengths, steps, start_errors, strict=True)
    )
    return Bound(value, (), "records are independent; the excess is over the best point of the ball")


class PhasedSettings(Settings):
    """Keys of phased SGD."""

    clip: Literal["lipschitz"] | Positive = Field(
        "lipschitz", description="norm bound on one record's gradient; it may not be below the Lipschitz constant"
    )
    step: Positive = Field(description="η: phase i takes steps η/4^i")
    radius: Positive = Field(description="radius of the ball the model stays in")


def _make_schedule(declared: FixedOrder) -> Phases:
    """Make the phases of one pass, whose gradient rounds read one batch of the declared order each.

    Raises:
        InputError: The rounds of the scenario are not one whole pass, or a pass has a single batch.
    """
    if declared.rounds_per_epoch != declared.rounds:
        raise InputError(
            "federation: phased-sgd reads every record once, in phases, and these rounds are not one whole pass; "
            "leave out epochs, or rounds beside samples and batch, take rounds = clients / cohort, or run dp-sgd"
        )
    return make_phases(declared.rounds_per_epoch)


def _problem_phases(problem: Problem) -> Phases:
    assert isinstance(problem.schedule, Phases)  # as made by the row's own `schedule`
    return problem.schedule


def _make_mechanism(settings: PhasedSettings, problem: Problem, _workload: Workload) -> PhaseEnds:
    """Return noise in the empty round that ends a phase, calibrated by contraction."""
    return PhaseEnds(
        _problem_phases(problem), settings.step * phase_step_factor(1), problem.smoothness, problem.lipschitz
    )


def _find_clip(settings: PhasedSettings, problem: Problem) -> float:
    """Return the clip of the gradients, the Lipschitz constant by default.

    Raises:
        InputError: The loss is not known to be convex in the ball, so that the contraction argument does not hold.
    """
    if settings.radius > problem.convex_within:
        raise InputError(
            f"algorithm.radius = {settings.radius:g}: the privacy of phased-sgd rests on a convex loss whose "
            f"Lipschitz constant and smoothness hold in its ball, and this model's hold up to radius "
            f"{problem.convex_within:g}; take model.name = 'softmax-regression', or a smaller radius"
        )
    return problem.lipschitz if settings.clip == "lipschitz" else settings.clip


@catch_refusal
def _prescribe(name: str, settings: PhasedSettings, problem: Problem) -> Prescription:
    """Prescribe the paper's step for batches of one record, quoted from memory, with rounds and noise.

    The rounds include the empty rounds.  The step is `suggested_step` in a ball of diameter 2 · `radius`.  The
    noise std is a L/μ in units of a gradient, where a is 1 under zero-out and 2 under replace-one.
    """
    if problem.epsilon is None or settings.radius > problem.convex_within:
        raise InputError(f"{name} needs a guarantee, and a loss that is known to be convex in the ball")
    mu = mu_of(problem.epsilon, problem.delta)
    factor = moved_by(problem.relation, 1.0, 1.0)
    # The step is stated for replace-one, and under zero-out the same noise has half the μ.
    step = suggested_step(
        problem.records, problem.dimension, problem.lipschitz, 2.0 * settings.radius, 2.0 * mu / factor
    )
    numbers = {
        "rounds": float(make_phases(problem.records).rounds),
        "batch": 1.0,
        "clip": problem.lipschitz,
        "step": step,
        "noise std": problem.lipschitz * factor / mu,
    }
    return Prescription(name, numbers, step_conditions(step, problem.smoothness))


def _compute_bound(settings: PhasedSettings, problem: Problem, released: ReleaseNumbers) -> Bound:
    """Bound the excess risk, with the noise of each phase from its empty round.

    The root mean square norm of ξ_i is η_i √d std_i, where std_i is the noise of the release in the empty round
    that ends phase i, per coordinate and in units of a gradient.
    """
    lengths = _problem_phases(problem).lengths
    steps = [settings.step * phase_step_factor(phase) for phase in range(1, len(lengths) + 1)]
    empty_rounds = np.cumsum([length + 1 for length in lengths]) - 1  # counted from 0
    noises = [
        step * std * math.sqrt(problem.dimension)
        for step, std in zip(steps, released.stds[empty_rounds].tolist(), strict=True)
    ]
    return phased_bound(lengths, steps, noises, settings.radius, problem.lipschitz)


PHASED_SGD = Algorithm(
    name="phased-sgd",
    title="Phased SGD",
    source="after Feldman, Koren & Talwar, Private Stochastic Convex Optimization (STOC 2020), section 4",
    settings=PhasedSettings,
    schedule=lambda _settings, declared: _make_schedule(declared),
    trusts=("curator",),
    estimator=lambda settings, problem: PlainGradient(_find_clip(settings, problem)),
    mechanism=_make_mechanism,
    optimizer=lambda settings, problem, _noise_std: PhasedSGD(
        _problem_phases(problem), settings.step, settings.radius
    ),
    theorems=lambda settings, problem: (_prescribe("section 4, experimental", settings, problem),),
    excess_risk=_compute_bound,
)
