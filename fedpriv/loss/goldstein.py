"""Goldstein stationarity, measured: the least norm of a convex combination of gradients near a point.

Source: Goldstein 1977; Kornowski, Liu & Talwar, section 2.  x is (r, β)-stationary for F if some convex
combination of gradients of F at points within distance r of x has norm at most β.  The measure here samples the
points, so it is an upper bound on that least norm.  It never grows when points are added, converges slowly in
their number, and is comparable between models only for one number of points and one seed.

The least-norm point of the convex hull is found by Wolfe's algorithm (Wolfe 1976), with a certificate: no convex
combination has a norm below min_i ⟨g_i, x⟩/‖x‖.  `Measured` is an objective whose evaluation has the measure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.random import public_generator
from fedpriv.loss.objective import Batch, Evaluation, EvaluationView, Objective, Query, Records

Floats = NDArray[np.float64]

_SMALL = 1e-14
_TOLERANCE = 1e-12  # of the optimality gap, in units of the largest squared norm
_BLOCK_VALUES = 2**22


class LeastNorm(NamedTuple):
    """A point of a convex hull, and a bound below which no point of the hull lies."""

    point: Floats
    norm: float
    certificate: float


def least_norm(points: Floats) -> LeastNorm:
    """The point of least norm in the convex hull of the rows of `points` (n, d), by Wolfe's algorithm."""
    squared_norms = np.sum(points**2, axis=1)
    largest = float(np.max(squared_norms))
    if largest == 0.0:
        return LeastNorm(points[0].copy(), 0.0, 0.0)
    members, weights = [int(np.argmin(squared_norms))], np.ones(1)
    nearest = points[members[0]].copy()
    while True:
        products = points @ nearest
        farthest = int(np.argmin(products))
        if nearest @ nearest - products[farthest] <= _TOLERANCE * largest or farthest in members:
            break
        members, weights = [*members, farthest], np.append(weights, 0.0)
        members, weights = _inside(points, members, weights, largest)
        nearest = weights @ points[members]
    norm = float(np.linalg.norm(nearest))
    bound = float(np.min(points @ nearest)) / norm if norm > 0.0 else 0.0
    return LeastNorm(nearest, norm, max(0.0, bound))


def _inside(points: Floats, members: list[int], weights: Floats, largest: float) -> tuple[list[int], Floats]:
    """Towards the least-norm point of the members' affine hull; members that stop the way are dropped."""
    while True:
        chosen = points[members]
        solved = np.linalg.solve(chosen @ chosen.T + largest, np.ones(len(members)))
        ideal = solved / solved.sum()
        if np.all(ideal > _SMALL):
            return members, ideal
        blocking = ideal <= _SMALL
        shares = np.full(len(members), np.inf)
        shares[blocking] = weights[blocking] / np.maximum(weights[blocking] - ideal[blocking], _SMALL)
        first = int(np.argmin(shares))
        weights = (1.0 - shares[first]) * weights + shares[first] * ideal
        keep = weights > _SMALL
        keep[first] = False
        members, weights = [member for member, kept in zip(members, keep, strict=True) if kept], weights[keep]


def goldstein(gradients: Callable[[Floats], Floats], point: Floats, radius: float, count: int, seed: int) -> float:
    """The measure at `point` (d,) from gradients at `count` points uniform in the ball of `radius` around it.

    `gradients` maps points (n, d) to gradients (n, d).  The points are a function of (seed, d) alone and grow with
    `count`: those of a smaller count come first.
    """
    return least_norm(gradients(point + radius * _in_unit_ball(count, len(point), seed))).norm


def goldstein_of(
    objective: Objective, point: Tensor, records: Records, radius: float, count: int, seed: int
) -> float:
    """The measure of the mean loss over `records` at `point` (d,)."""

    def gradients(points: Floats) -> Floats:
        block = max(1, _BLOCK_VALUES // (len(records.labels) * max(1, records.features[0].numel())))
        parts = torch.split(torch.from_numpy(points).to(point), block)
        joined = torch.cat([mean_gradient(objective, part, records) for part in parts])
        return np.asarray(joined.double().cpu().numpy())

    return goldstein(gradients, point.double().cpu().numpy(), radius, count, seed)


def mean_gradient(objective: Objective, points: Tensor, records: Records) -> Tensor:
    """The gradient of the mean loss at each of `points` (n, d): an increment whose clip is never reached."""
    count = len(records.labels)
    weights = torch.full((count,), 1.0 / count, dtype=points.dtype, device=points.device)
    clip = math.sqrt(torch.finfo(points.dtype).max)
    return objective.increment(Query([points]), Batch(records, weights), clip).total


def _in_unit_ball(count: int, dimension: int, seed: int) -> Floats:
    """Uniform in the ball: the first d coordinates of points of the unit sphere in R^(d+2)."""
    normals = public_generator(seed, "goldstein").standard_normal((count, dimension + 2))
    return np.asarray(normals[:, :dimension] / np.linalg.norm(normals, axis=1, keepdims=True))


@dataclass(frozen=True)
class Measured(EvaluationView):
    """`base`, with the metric `goldstein` at `radius`: of the mean loss over the records evaluated on.

    The sampled points are the same in every evaluation (one seed), so that models can be compared.
    """

    radius: float
    points: int = 256
    seed: int = 0

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        evaluation = self.base.evaluate(point, records)
        measures = [
            goldstein_of(self.base, model, records, self.radius, self.points, self.seed)
            for model in point.reshape(-1, self.dimension)
        ]
        measured = torch.tensor(measures, dtype=point.dtype, device=point.device).view(point.shape[:-1])
        return evaluation._replace(metrics={**evaluation.metrics, "goldstein": measured})
