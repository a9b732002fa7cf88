"""The attack on the radius of floating-point noise (Box-Muller with few bits), and that integers withstand it."""

import numpy as np
import pytest

from fedpriv.core.random import KeyedNormal
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.integers.gaussian import KeyedDiscreteGaussian
from fedpriv.noise.integers.plan import ExactRunInputs, fit_lattice
from tests.noise.integers.members import workload_of

CYCLES = 2.0e4


def radius_score(x: np.ndarray, y: np.ndarray) -> float:
    """Σ cos 2πk over the pairs whose radius, a Box-Muller radius of 31 bits, has an index k below 2·10^4."""
    with np.errstate(under="ignore"):
        k = 2.0**31 * np.exp(-(x.astype(np.float64) ** 2 + y.astype(np.float64) ** 2) / 2) - 0.5
    return float(np.sum(np.cos(2 * np.pi * k[k < CYCLES])))


def right_guesses(integer: bool, trials: int) -> int:
    """How often an attacker tells which of two sums, one clip apart, was released over 120 rounds at μ = 0.1."""
    rounds, size, right = 120, 7850, 0
    half = -(-size // 4) * 2  # of the words of a vector in `KeyedNormal`: the first half are cosines
    form = IndependentGaussian().integer(workload_of(rounds, 1.0))
    plan = fit_lattice(ExactRunInputs(form, (1,) * rounds, size, "replace-one", 0.1))
    for trial in range(trials):
        generator = np.random.default_rng(1000 + trial)
        direction = generator.normal(size=size)
        apart = np.round(direction / np.linalg.norm(direction) * plan.norms(1)[0] * 2).astype(np.int64)
        scores = np.zeros(2)
        key = generator.bytes(32)
        if not integer:
            std = np.float32(plan.claim.sigma)
            noise = KeyedNormal(key, np.float32).vectors(size, [0] * rounds, list(range(1, rounds + 1))) * std
        for t in range(rounds):
            if integer:
                seen = KeyedDiscreteGaussian(key, 0, t + 1).vector(size, plan.claim.sigma)
                candidates = [seen, seen - apart]
            else:
                released_row = np.zeros(size, np.float32) + noise[t]
                candidates = [released_row, released_row - apart.astype(np.float32)]
            for which, z in enumerate(candidates):
                unit = z / plan.claim.sigma
                scores[which] += radius_score(unit[: size - half], unit[half:])
        right += scores[0] > scores[1]
    return right


@pytest.mark.slow
def test_radius_attack_on_discrete_gaussian_noise_fails() -> None:
    """What the attacker would gain: certainty, from the 31 bits of a float32 radius; a false alarm has 3e-5."""
    assert right_guesses(integer=True, trials=30) <= 25


@pytest.mark.slow
def test_the_radius_attack_works_on_float32_noise() -> None:
    """Control."""
    assert right_guesses(integer=False, trials=10) >= 9
