"""The noisy minibatch method: Lowy & Razaviyayn, Private Federated Learning Without a Trusted Server: Optimal
Algorithms for Convex Losses (ICLR 2023).

In each of R rounds each of M silos draws K of its n records and adds N(0, σ² I) to the mean of their gradients:

    w_{r+1} = Π_K(w_r - η (1/M) Σ_i g~_{r,i}),   output the mean of the iterates

Noise and batch size are those of the authors' published programs (`gauss_AC` and the choice of K), once by
advanced composition, as the theorem has it, and once by the moments accountant, as the experiments use it.  There
the sampling is uniform with replacement and neighbours are replace-one.

This project does not account for that sampling: its own runs of the method are calibrated by `fedpriv.accounting`
for what they really do, and these numbers are shown beside them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedpriv.accounting.gaussian import check_delta, check_positive
from fedpriv.core.errors import InputError
from fedpriv.loss.estimators import PlainGradient
from fedpriv.papers.base import Algorithm, Condition, Prescription, Problem, catch_refusal, independent
from fedpriv.papers.sgd import ProjectedSGD, StepSettings, averaged_bound


@dataclass(frozen=True)
class NoisyMinibatch:
    """R rounds with batch K and noise of standard deviation `sigma` in each silo's mean gradient."""

    rounds: int
    batch: int
    sigma: float
    conditions: tuple[Condition, ...]


def parameters_by_moments(
    examples: int, rounds: int, epsilon: float, delta: float, lipschitz: float
) -> NoisyMinibatch:
    """σ² = 8 L² R ln(1/δ)/(n² ε²), K = max(1, n √(ε/(4R))), for ε ≤ 2 ln(1/δ); n records in a silo."""
    _check(examples, rounds, epsilon, delta, lipschitz)
    log_term = math.log(1.0 / delta)
    sigma = lipschitz * math.sqrt(8.0 * rounds * log_term) / (examples * epsilon)
    smallest = examples * math.sqrt(epsilon / (4.0 * rounds))
    return _make_parameters(examples, rounds, sigma, smallest, Condition("ε ≤ 2 ln(1/δ)", epsilon, 2.0 * log_term))


def parameters_by_advanced_composition(
    examples: int, rounds: int, epsilon: float, delta: float, lipschitz: float
) -> NoisyMinibatch:
    """σ² = 256 L² R ln(2.5RK/(δn)) ln(2/δ)/(n² ε²), K = max(1, nε/(4√(2R ln(2/δ)))), for ε ≤ 2 ln(2/δ)."""
    _check(examples, rounds, epsilon, delta, lipschitz)
    log_term = math.log(2.0 / delta)
    smallest = examples * epsilon / (4.0 * math.sqrt(2.0 * rounds * log_term))
    composed = math.log(2.5 * rounds * _round_batch(smallest) / (delta * examples))
    if composed <= 0.0:
        raise InputError(f"delta = {delta}: advanced composition needs delta below 2.5 R K / n")
    sigma = 16.0 * lipschitz * math.sqrt(rounds * composed * log_term) / (examples * epsilon)
    return _make_parameters(examples, rounds, sigma, smallest, Condition("ε ≤ 2 ln(2/δ)", epsilon, 2.0 * log_term))


def _check(examples: int, rounds: int, epsilon: float, delta: float, lipschitz: float) -> None:
    if min(examples, rounds) < 1:
        raise InputError(f"examples = {examples}, rounds = {rounds}: 1 or more of both")
    check_positive("epsilon", epsilon)
    check_delta(delta)
    check_positive("lipschitz", lipschitz)


def _round_batch(smallest: float) -> int:
    """As the authors' programs round: down, and 1 at least."""
    return max(1, int(smallest))


def _make_parameters(
    examples: int, rounds: int, sigma: float, smallest: float, small: Condition
) -> NoisyMinibatch:
    batch = _round_batch(smallest)
    return NoisyMinibatch(rounds, batch, sigma, (small, Condition("K ≤ n", batch, examples)))


@catch_refusal
def _prescribe(
    name: str,
    formula: Callable[[int, int, float, float, float], NoisyMinibatch],
    clip: float,
    problem: Problem,
) -> Prescription:
    """Noise and batch of the authors' programs, for silos of equal size and R = the scenario's rounds."""
    if problem.epsilon is None:
        raise InputError(f"{name} needs an (ε, δ), and the scenario is not private")
    asked = formula(problem.records // problem.silos, problem.rounds, problem.epsilon, problem.delta, clip)
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
    settings=StepSettings,
    estimator=lambda settings, _problem: PlainGradient(settings.clip),
    mechanism=independent,
    # w_{r+1} = Π_K(w_r - η (1/M) Σ_i g~_{r,i}), output the mean of the iterates
    optimizer=lambda settings, _problem, _noise_std: ProjectedSGD(settings.step, settings.radius, averaged=True),
    theorems=lambda settings, problem: (
        _prescribe("moments accountant", parameters_by_moments, settings.clip, problem),
        _prescribe("advanced composition", parameters_by_advanced_composition, settings.clip, problem),
    ),
    excess_risk=averaged_bound,
)
