"""Noisy minibatch SGD of Lowy & Razaviyayn, with the noise and batch size of its authors' programs.

Source: Lowy & Razaviyayn, "Private Federated Learning Without a Trusted Server: Optimal Algorithms for Convex
Losses" (ICLR 2023).  In each of R rounds each of M silos draws K of its n records and adds N(0, σ² I) to the mean
of their gradients.  With g~_{r,i} the noisy mean of silo i, η the step and Π the projection on a ball around 0,

    w_{r+1} = Π(w_r - η (1/M) Σ_i g~_{r,i}),   output the mean of w_2 … w_{R+1}

Noise and batch size are those of the authors' published programs (`gauss_AC` and the choice of K).  One pair is by
advanced composition, as in the theorem, and one by the moments accountant, as in the experiments.  Both are for
uniform sampling with replacement and replace-one neighbours.

A run of this row does not sample with replacement, and its noise is calibrated for its own participation.
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
    """Parameters of R rounds with batch K, and noise `sigma` in each silo's mean gradient."""

    rounds: int
    """R."""
    batch: int
    """K: records of one silo in a round."""
    sigma: float
    """Standard deviation σ of the noise in each coordinate."""
    conditions: tuple[Condition, ...]
    """Upper bound on ε, and K ≤ n, which may not hold."""


def parameters_by_moments(
    examples: int, rounds: int, epsilon: float, delta: float, lipschitz: float
) -> NoisyMinibatch:
    """Return the parameters by the moments accountant, with the condition ε ≤ 2 ln(1/δ).

    σ² = 8 L² R ln(1/δ)/(n² ε²) and K = max(1, n √(ε/(4R))), rounded down.

    Args:
        examples: Number n of records in a silo.
        rounds: R.
        epsilon: ε.
        delta: δ.
        lipschitz: Bound L on the norm of one record's gradient.

    Raises:
        InputError: A number is out of its range.

    Example:
        >>> parameters_by_moments(examples=1000, rounds=100, epsilon=1.0, delta=1e-5, lipschitz=1.0).batch
        50
    """
    _check(examples, rounds, epsilon, delta, lipschitz)
    log_term = math.log(1.0 / delta)
    sigma = lipschitz * math.sqrt(8.0 * rounds * log_term) / (examples * epsilon)
    min_batch = examples * math.sqrt(epsilon / (4.0 * rounds))
    return _make_parameters(
        examples, rounds, sigma, min_batch, Condition("ε ≤ 2 ln(1/δ)", epsilon, 2.0 * log_term)
    )


def parameters_by_advanced_composition(
    examples: int, rounds: int, epsilon: float, delta: float, lipschitz: float
) -> NoisyMinibatch:
    """Return the parameters by advanced composition, with the condition ε ≤ 2 ln(2/δ).

    σ² = 256 L² R ln(2.5RK/(δn)) ln(2/δ)/(n² ε²) and K = max(1, nε/(4√(2R ln(2/δ)))), rounded down.

    Args:
        examples: Number n of records in a silo.
        rounds: R.
        epsilon: ε.
        delta: δ.
        lipschitz: Bound L on the norm of one record's gradient.

    Raises:
        InputError: A number is out of its range, or δ is 2.5 R K/n or more.
    """
    _check(examples, rounds, epsilon, delta, lipschitz)
    log_term = math.log(2.0 / delta)
    min_batch = examples * epsilon / (4.0 * math.sqrt(2.0 * rounds * log_term))
    composition_term = math.log(2.5 * rounds * _round_batch(min_batch) / (delta * examples))
    if composition_term <= 0.0:
        raise InputError(f"delta = {delta}: advanced composition needs delta below 2.5 R K / n")
    sigma = 16.0 * lipschitz * math.sqrt(rounds * composition_term * log_term) / (examples * epsilon)
    return _make_parameters(
        examples, rounds, sigma, min_batch, Condition("ε ≤ 2 ln(2/δ)", epsilon, 2.0 * log_term)
    )


def _check(examples: int, rounds: int, epsilon: float, delta: float, lipschitz: float) -> None:
    """Raise InputError for a number that is out of its range."""
    if min(examples, rounds) < 1:
        raise InputError(f"examples = {examples}, rounds = {rounds}: both must be 1 or more")
    check_positive("epsilon", epsilon)
    check_delta(delta)
    check_positive("lipschitz", lipschitz)


def _round_batch(min_batch: float) -> int:
    """Round down to at least 1, as the authors' programs do."""
    return max(1, int(min_batch))


def _make_parameters(
    examples: int, rounds: int, sigma: float, min_batch: float, epsilon_condition: Condition
) -> NoisyMinibatch:
    batch = _round_batch(min_batch)
    return NoisyMinibatch(rounds, batch, sigma, (epsilon_condition, Condition("K ≤ n", batch, examples)))


@catch_refusal
def _prescribe(
    name: str,
    formula: Callable[[int, int, float, float, float], NoisyMinibatch],
    clip: float,
    problem: Problem,
) -> Prescription:
    """Prescribe noise and batch of the authors' programs, for silos of equal size and L = `clip`."""
    if problem.epsilon is None:
        raise InputError(f"{name} needs an (ε, δ), and the scenario is not private")
    parameters = formula(problem.records // problem.silos, problem.rounds, problem.epsilon, problem.delta, clip)
    numbers = {
        "rounds": float(parameters.rounds),
        "batch": float(parameters.batch * problem.silos),
        "clip": clip,
        "noise std": parameters.sigma / math.sqrt(problem.silos),
    }
    return Prescription(
        name,
        numbers,
        parameters.conditions,
        "records are sampled with replacement, which is not accounted for here",
    )


NOISY_MINIBATCH = Algorithm(
    name="noisy-minibatch",
    title="Noisy minibatch SGD",
    source="after Lowy & Razaviyayn, Private Federated Learning Without a Trusted Server (ICLR 2023)",
    settings=StepSettings,
    estimator=lambda settings, _problem: PlainGradient(settings.clip),
    mechanism=independent,
    # w_{r+1} = Π(w_r - η (1/M) Σ_i g~_{r,i}), output the mean of w_2 … w_{R+1}
    optimizer=lambda settings, _problem, _noise_std: ProjectedSGD(settings.step, settings.radius, averaged=True),
    theorems=lambda settings, problem: (
        _prescribe("moments accountant", parameters_by_moments, settings.clip, problem),
        _prescribe("advanced composition", parameters_by_advanced_composition, settings.clip, problem),
    ),
    excess_risk=averaged_bound,
)
