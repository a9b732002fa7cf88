"""Mechanisms side by side for one row: the noise that each leaves in the output and in the queries.

All figures are for noise sized to sensitivity 1 (μ = 1 under zero-out); they are inversely proportional to μ.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedpriv.fitting.bounds import lower_bounds
from fedpriv.fitting.response import Response
from fedpriv.fitting.spread import spread
from fedpriv.mechanisms import Mechanism, Sensitivity, Workload


@dataclass(frozen=True)
class Published:
    """Standard deviations per coordinate in what a run publishes."""

    queries: float
    """Root mean square over the response's queries."""
    output: float | None
    """None if the response has no output."""


@dataclass(frozen=True)
class Comparison:
    """One mechanism's line."""

    sensitivity: Sensitivity
    """Also the standard deviation of fresh vectors."""
    rows_rms: float
    """Noise of the released sums, root mean square over the rounds."""
    rows_last: float
    """In the last round."""
    published: Published
    vectors: int
    """The most that a state holds."""


def compared(mechanism: Mechanism, response: Response, workload: Workload) -> Comparison:
    sensitivity = mechanism.certified(workload)
    rows = response.queries if response.output is None else np.vstack([response.queries, response.output])
    stds = (sensitivity.value * np.sqrt(spread(mechanism, rows, workload))).tolist()
    variance = mechanism.variance(workload)
    count = len(response.queries)
    return Comparison(
        sensitivity=sensitivity,
        rows_rms=sensitivity.value * math.sqrt(float(np.mean(variance))),
        rows_last=sensitivity.value * math.sqrt(float(variance[-1])),
        published=Published(_rms(stds[:count]), None if response.output is None else stds[-1]),
        vectors=mechanism.memory_vectors(workload),
    )


def least(response: Response, workload: Workload) -> Published:
    """What no mechanism falls below with these clips; no one mechanism attains the bound of the queries."""
    queries = lower_bounds(response.queries, workload).tolist()
    if response.output is None:
        return Published(_rms(queries), None)
    return Published(_rms(queries), float(lower_bounds(response.output[None], workload)[0]))


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))
