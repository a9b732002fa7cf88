"""What the golden runs of the Goldstein algorithms are made of: coins, directions, noise and records in formulas.

Computed once by an independent NumPy program, d = 2: α = .4, D = .05, η = .04, W = 3, T = 11, Σ = 4, J = 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import betainc
from torch import Tensor

from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import VarianceReducedGradient
from fedpriv.loss.goldstein import DirectionWindow
from fedpriv.loss.linear import PhaseRetrieval
from fedpriv.loss.objective import BatchLayout, Objective, Records
from fedpriv.noise.mechanism import Mechanism
from fedpriv.papers.kornowski import O2NC, O2NCState
from fedpriv.rounds.floats import initial_running_sum, update_running_sum
from tests.loss.builders import first_rows

ALPHA, ROUNDS, PERIOD, WINDOW = 0.4, 11, 4, 3
LOSS = PhaseRetrieval(2, 1, feature_norm=1.0, dtype=torch.float64)
START = torch.tensor([0.7, -0.4], dtype=torch.float64)


def fraction(value: float) -> float:
    return value - math.floor(value)


def records(first: int, count: int) -> Records:
    numbers = np.arange(first, first + count, dtype=np.float64)
    features = np.stack([np.cos(numbers), np.sin(2 * numbers + 1)], axis=1) / math.sqrt(2)
    return Records(torch.from_numpy(features), torch.from_numpy(0.3 + 0.1 * (numbers % 3)))


@dataclass(frozen=True)
class GoldenChoices:
    window: int = WINDOW

    def position(self, t: int, like: Tensor) -> Scalar:
        return fraction(0.5 + 0.6180339887498949 * t)

    def publishes(self, window: int, like: Tensor) -> Tensor:
        return torch.tensor(True)


@dataclass(frozen=True)
class GoldenDirections:
    def sphere(
        self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None
    ) -> Tensor:
        angles = self._per_row(slots, count, lambda t, r, i: 1.0 + 2 * t + 3 * r + 5 * i)
        return torch.stack([angles.cos(), angles.sin()], dim=-1)

    def ball(self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None) -> Tensor:
        lengths = self._per_row(slots, count, lambda t, r, i: fraction(0.5 + 0.37 * (t + 2 * r + 3 * i)))
        return lengths.sqrt().unsqueeze(-1) * self.sphere(slots, count, like)

    def _per_row(self, slots: BatchLayout, count: int, formula) -> Tensor:  # type: ignore[no-untyped-def]
        ((_, rows),) = slots.silo_sizes
        values = [[formula(slots.t, r, i) for i in range(count)] for r in range(rows)]
        return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class ExactlySmoothed(PhaseRetrieval):
    """∇f_α in closed form: ⟨a, x + y⟩ is u + α‖a‖ times one coordinate of the unit ball."""

    alpha: float = ALPHA

    def _output_gradient(self, point: Tensor, records: Records) -> Tensor:
        inner = (records.features @ point.unsqueeze(-1)).squeeze(-1)
        reach = self.alpha * torch.linalg.vector_norm(records.features, dim=-1)
        slope = -1.0 + 2.0 * self._above(inner, -records.labels, reach)
        slope = slope - 2.0 * self._above(inner, torch.zeros_like(inner), reach)
        return (slope + 2.0 * self._above(inner, records.labels, reach)).unsqueeze(-2)

    def _above(self, inner: Tensor, kink: Tensor, reach: Tensor) -> Tensor:
        """P(u + reach · coordinate > kink)."""
        q = ((inner - kink) / reach).clamp(-1.0, 1.0).numpy()
        return torch.from_numpy(0.5 + 0.5 * np.sign(q) * betainc(0.5, (self.features + 1) / 2, q**2))


@dataclass(frozen=True)
class Trace:
    queries: list[Tensor]
    sums: list[Tensor]
    released: list[Tensor]
    windows: list[Tensor]
    clipped: int


def golden_run(
    objective: Objective,
    estimator: VarianceReducedGradient,
    mechanism: Mechanism,
    fresh: Sequence[Tensor],
    batches: Sequence[Records],
) -> Trace:
    optimizer = O2NC(0.04, 0.05, GoldenChoices())  # type: ignore[arg-type]
    state: O2NCState = optimizer.start(START)
    total, hidden = initial_running_sum(START), mechanism.start()
    trace = Trace([], [], [], [], 0)
    clipped = 0
    for t in range(1, ROUNDS + 1):
        current, batch = estimator.round(t), batches[t - 1]
        query, rows = optimizer.query(state), len(batch.labels)
        weights = torch.full((rows,), 1.0 / rows, dtype=torch.float64)
        looked_at = objective.for_batch(first_rows(t, ((0, rows),)))
        total, clips = update_running_sum(total, current, query, looked_at, batch, weights, estimator.memory)
        clipped += int(clips)
        noise, hidden = mechanism.noise(hidden, t, fresh[t - 1])
        state = optimizer.update(state, total.total + noise, current)
        trace.queries.append(query)
        trace.sums.append(total.total)
        trace.released.append(total.total + noise)
        if t % WINDOW == 0:
            trace.windows.append(optimizer.output(state))
    return Trace(trace.queries, trace.sums, trace.released, trace.windows, clipped)
