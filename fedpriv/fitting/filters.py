"""Rational filters along the last axis, in sections of first order: no residues, nothing divides by small gaps."""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from fedpriv.mechanisms.workload import Floats


def ratio(signal: Floats, zeros: Sequence[float], poles: Sequence[float]) -> Floats:
    """Π (1 - zero x) / Π (1 - pole x) applied to `signal` (..., T); x delays by one."""
    from scipy.signal import lfilter  # half a second to import: only who fits pays for it

    for zero, pole in zip_longest(zeros, poles, fillvalue=0.0):
        if zero != pole:
            signal = lfilter([1.0, -zero], [1.0, -pole], signal, axis=-1)
    return np.asarray(signal, np.float64)


def delayed(signal: Floats, pole: float) -> Floats:
    """x / (1 - pole x) applied to `signal` (..., T)."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([0.0, 1.0], [1.0, -pole], signal, axis=-1), np.float64)


def dot(left: Floats, right: Floats) -> float:
    """The sum of products, without the threads of a matrix library: on a busy machine they wait for each other."""
    return float(np.sum(left * right))
