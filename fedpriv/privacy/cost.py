"""What a mechanism costs for one workload and one privacy target, in the units of a release."""

import math
from dataclasses import dataclass

import numpy as np

from fedpriv.mechanisms.base import Mechanism, Sensitivity
from fedpriv.mechanisms.workload import Workload
from fedpriv.privacy.trust import Noise


@dataclass(frozen=True)
class Cost:
    """Standard deviations per coordinate; an error is the noise in a released running sum."""

    sensitivity: Sensitivity
    """For the sum of increments, before a batch mean divides it."""
    std: float
    """Of the fresh vectors, as whoever adds the noise draws them."""
    error: float
    """Root mean square over the rounds, in what one owner of noise releases."""
    error_last: float
    """In the last round."""
    error_worst: float
    """In the worst round."""
    error_in_mean: float
    """Root mean square over the rounds, in the weighted mean over silos."""
    memory: int
    """Vectors in the state, at most."""


def cost_of(mechanism: Mechanism, workload: Workload, sensitivity: Sensitivity, noise: Noise) -> Cost:
    """`noise` is what a trust setting makes of that sensitivity for a target."""
    std = float(noise.sources[0].std)
    variance = mechanism.variance(workload)
    typical = math.sqrt(float(np.mean(variance)))
    return Cost(
        sensitivity=sensitivity,
        std=std,
        error=std * typical,
        error_last=std * math.sqrt(float(variance[-1])),
        error_worst=std * math.sqrt(float(np.max(variance))),
        error_in_mean=noise.std_in_mean * typical,
        memory=mechanism.memory_vectors(workload),
    )
