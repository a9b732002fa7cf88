"""The domain of every accounting function, said once and in words."""

import math

from fedpriv.errors import InputError


def check_mu(mu: float) -> float:
    """μ ≥ 0 and finite; 0 means that nothing about the data was released."""
    if not (math.isfinite(mu) and mu >= 0.0):
        raise InputError(f"mu = {mu}: the Gaussian-DP parameter is a finite number, 0 or more")
    return mu


def check_epsilon(epsilon: float) -> float:
    if not (math.isfinite(epsilon) and epsilon >= 0.0):
        raise InputError(f"epsilon = {epsilon}: it is a finite number, 0 or more")
    return epsilon


def check_delta(delta: float) -> float:
    if not 0.0 < delta < 1.0:
        raise InputError(f"delta = {delta}: it is a probability strictly between 0 and 1, e.g. 1e-5")
    return delta


def check_positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0.0):
        raise InputError(f"{name} = {value}: it must be a finite number above 0")
    return value
