"""Losses of one linear score ⟨x, z⟩, in closed form: a gradient is a number times the feature vector.

An increment is that too, with the combination of the numbers at its points, so its norm is |number| · ‖z‖.  With
a penalty every record's loss has penalty · ‖x‖²/2 beside it, in the clip; increments are then formed as vectors.

Populations whose risk is known, for checks against theory: what `evaluate` reports beside the mean loss.

Robust phase retrieval: find x from the sizes of ⟨x, z⟩, some of them wrong.  Neither smooth nor convex.

    power 1:  f(x; z, b) = | |⟨x, z⟩| - b |          ‖z‖-Lipschitz
    power 2:  f(x; z, b) = | ⟨x, z⟩² - b² |          weakly convex, not Lipschitz: clipping bounds it

Sources: Duchi & Ruan 2019 (power 2); the amplitude form is its Lipschitz sibling.  A gradient is a number times z,
so an increment is rank one: its norm is a product, and a clipped sum over a batch one matrix product.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.core.replicates import Scalar
from fedpriv.loss.clipping import clipping, formed, rank_one, upper_norm
from fedpriv.loss.objective import Batch, Deterministic, Evaluation, Increment, Linear, Query, Records


class Population(Protocol):
    """The risk over the distribution of records, not over a sample."""

    def excess_risk(self, point: Tensor) -> Tensor:
        """F(x) - F(x*) for points (..., d), shape (...)."""
        ...

    def gradient(self, point: Tensor) -> Tensor:
        """∇F(x), (..., d)."""
        ...


@dataclass(frozen=True)
class QuadraticPopulation:
    """F(x) - F(x*) = (x - x*)ᵀ diag(curvature) (x - x*) / 2, of least squares with E[z zᵀ] = diag(curvature)."""

    curvature: Tensor
    minimizer: Tensor
    least: float = 0.0
    """F - F(x*) of the best point that is allowed, if x* is not: excess is counted from there."""

    def excess_risk(self, point: Tensor) -> Tensor:
        return (self.curvature * (point - self.minimizer).square()).sum(-1) / 2.0 - self.least

    def gradient(self, point: Tensor) -> Tensor:
        return self.curvature * (point - self.minimizer)


def quadratic_in_ball(curvature: Tensor, minimizer: Tensor, radius: float) -> QuadraticPopulation:
    """The population whose excess risk is counted from the best point of the ball of `radius` around 0.

    That point is (diag(curvature) + λ)^-1 diag(curvature) x* for the λ ≥ 0 that gives it the norm `radius`.
    """
    free = QuadraticPopulation(curvature, minimizer)
    if float(torch.linalg.vector_norm(minimizer)) <= radius:
        return free
    low, high = 0.0, float(curvature.max() * torch.linalg.vector_norm(minimizer)) / radius
    for _ in range(200):
        middle = (low + high) / 2.0
        best = curvature * minimizer / (curvature + middle)
        low, high = (middle, high) if float(torch.linalg.vector_norm(best)) > radius else (low, middle)
    best = curvature * minimizer / (curvature + high)
    return QuadraticPopulation(curvature, minimizer, float(free.excess_risk(best)))


@dataclass(frozen=True)
class LinearScore(Deterministic, ABC):
    """What the losses of a linear score share; `feature_norm` bounds ‖z‖ over all records that can occur.

    With a `population`, `evaluate` also reports the metrics excess_risk = F(x) - F(x*) and
    gradient_norm = ‖∇F(x)‖ of the population risk F.
    """

    dimension: int
    feature_norm: float
    population: Population | None = None
    dtype: torch.dtype = torch.float64
    penalty: float = 0.0

    @abstractmethod
    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """(..., B)."""

    @abstractmethod
    def _slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The derivative of the loss by the score, (..., B)."""

    @abstractmethod
    def _accuracy(self, scores: Tensor, labels: Tensor) -> Tensor | None: ...

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.dtype)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        slope = self._slopes(query, batch.records)
        if not self.penalty:
            return slope_sum(slope, batch, clip)
        vectors, clipped = _formed_clipped(self._formed(query, batch.records, slope), batch.weights, clip)
        return Increment(vectors.sum(-2), clipped)

    def per_record(self, query: Query, batch: Batch, places: Tensor, clip: float) -> Tensor:
        slope = self._slopes(query, batch.records)
        if not self.penalty:
            return slope_rows(slope, batch, clip)
        return _formed_clipped(self._formed(query, batch.records, slope), batch.weights, clip)[0]

    @property
    def linear(self) -> Linear | None:
        if self.penalty:
            return None
        return Linear(self._column_of_scores, self._column_of_slopes)

    def _column_of_scores(self, point: Tensor, features: Tensor) -> Tensor:
        return _scores(point, features).unsqueeze(-1)

    def _column_of_slopes(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self._slope(scores.squeeze(-1), labels).unsqueeze(-1)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        records, weights = batch
        slope = self._slope(_scores(point, records.features), records.labels) * weights
        pull = self.penalty * weights.sum(-1, keepdim=True) * point
        return (slope.unsqueeze(-2) @ records.features).squeeze(-2) + pull

    def _slopes(self, query: Query, records: Records) -> Tensor:
        """Σ_k coefficients[k] · the derivative by the score at points[k], (..., B)."""
        slope = sum(
            coefficient * self._slope(_scores(point, records.features), records.labels)
            for point, coefficient in zip(*query, strict=True)
        )
        assert isinstance(slope, Tensor)
        return slope

    def _formed(self, query: Query, records: Records, slope: Tensor) -> Tensor:
        """The increments (..., B, d) themselves, the penalty's share with them."""
        pull = sum(coefficient * point for point, coefficient in zip(*query, strict=True))
        assert isinstance(pull, Tensor)
        return slope.unsqueeze(-1) * records.features + self.penalty * pull.unsqueeze(-2)

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self._loss(_scores(point, records.features), records.labels) + self._penalty(point).unsqueeze(-1)

    def _penalty(self, point: Tensor) -> Tensor:
        return self.penalty * point.square().sum(-1) / 2.0

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return _scores(point, records.features).unsqueeze(-1)

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        scores = _scores(point, records.features)
        metrics = {}
        if self.population is not None:
            metrics["excess_risk"] = self.population.excess_risk(point)
            metrics["gradient_norm"] = torch.linalg.vector_norm(self.population.gradient(point), dim=-1)
        loss = self._loss(scores, records.labels).mean(-1)
        return Evaluation(loss, self._accuracy(scores, records.labels), metrics)


@dataclass(frozen=True)
class LeastSquares(LinearScore):
    """(⟨x, z⟩ - y)² / 2 with |y| ≤ `label_bound`, for x in the ball of `radius` around 0."""

    label_bound: float = 1.0
    radius: float = 1.0

    @property
    def lipschitz(self) -> float:
        """max|⟨x, z⟩ - y| · max‖z‖ in the ball; outside it no bound holds, so `convex` is not claimed."""
        return (
            self.radius * self.feature_norm + self.label_bound
        ) * self.feature_norm + self.penalty * self.radius

    @property
    def convex_within(self) -> float:
        return self.radius if math.isfinite(self.radius) else 0.0

    @property
    def smoothness(self) -> float:
        """max‖z‖², and the penalty."""
        return self.feature_norm**2 + self.penalty

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels).square() / 2.0

    def _slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        return scores - labels

    def _accuracy(self, scores: Tensor, labels: Tensor) -> None:
        """None: a prediction is near, not right."""


@dataclass(frozen=True)
class LogisticRegression(LinearScore):
    """log(1 + exp(⟨x, z⟩)) - y ⟨x, z⟩ with labels y 0 or 1."""

    convex: bool = True
    """To be False with a penalty: no bound on the gradients holds at every point then."""

    @property
    def lipschitz(self) -> float:
        """max‖z‖: the derivative by the score lies in (-1, 1); inf with a penalty, which grows with the model."""
        return math.inf if self.penalty else self.feature_norm

    @property
    def smoothness(self) -> float:
        """max‖z‖²/4, and the penalty."""
        return self.feature_norm**2 / 4.0 + self.penalty

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return functional.softplus(scores) - labels * scores

    def _slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        return scores.sigmoid() - labels

    def _accuracy(self, scores: Tensor, labels: Tensor) -> Tensor:
        return ((scores > 0) == (labels > 0.5)).to(scores.dtype).mean(-1)


def slope_sum(slope: Tensor, batch: Batch, clip: Scalar) -> Increment:
    """The clipped sum of slope[b] · features[b] over the batch, `slope` (..., B)."""
    column, features, clipped = _clipped(slope, batch, clip)
    return Increment((column.mT @ features).squeeze(-2), clipped)


def slope_rows(slope: Tensor, batch: Batch, clip: float) -> Tensor:
    """slope[b] · features[b], clipped, of every record: (B, f)."""
    column, features, _ = _clipped(slope, batch, clip)
    return column * features


def _clipped(slope: Tensor, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of the clipped increments, (..., B, 1) and (..., B, f), and how many were clipped."""
    weights = batch.weights
    column, features = slope.unsqueeze(-1).to(weights.dtype), batch.records.features.to(weights.dtype)
    clipped = clipping(rank_one(column.squeeze(-1).abs().double(), upper_norm(features)), weights, clip)
    column, features = clipped.only(column), clipped.only(features)
    return column * clipped.factor.unsqueeze(-1), features, clipped.clipped


def _formed_clipped(increments: Tensor, weights: Tensor, clip: Scalar) -> tuple[Tensor, Tensor]:
    """Weights times the clipped increments (..., B, d) that are there as such, and how many were clipped."""
    vectors = increments.to(weights.dtype)
    clipped = clipping(formed(upper_norm(vectors)), weights, clip)
    vectors = clipped.only(vectors)
    return vectors * clipped.factor.unsqueeze(-1), clipped.clipped


def _scores(point: Tensor, features: Tensor) -> Tensor:
    return (features @ point.unsqueeze(-1)).squeeze(-1)


_EXPLAINED = 0.1


@dataclass(frozen=True)
class PhaseRetrieval(Deterministic):
    """Labels are sizes b ≥ 0; `feature_norm` bounds ‖z‖.  At x and -x the loss is the same.

    Parameters start at the vector of equal coordinates with norm `start`: 0 is a stationary point.
    """

    features: int
    power: Literal[1, 2]
    feature_norm: float
    start: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def dimension(self) -> int:
        return self.features

    @property
    def lipschitz(self) -> float:
        return self.feature_norm if self.power == 1 else math.inf

    @property
    def smoothness(self) -> float:
        """inf: the gradient jumps where a prediction is exact, and for power 1 where ⟨x, z⟩ = 0."""
        return math.inf

    def initial(self) -> Tensor:
        return torch.full((self.features,), self.start / math.sqrt(self.features), dtype=self.dtype)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        return slope_sum(self._slopes(query, batch.records), batch, clip)

    def per_record(self, query: Query, batch: Batch, places: Tensor, clip: float) -> Tensor:
        return slope_rows(self._slopes(query, batch.records), batch, clip)

    def _slopes(self, query: Query, records: Records) -> Tensor:
        """Σ_k coefficients[k] · the derivative by ⟨x, z⟩ at points[k], (..., B)."""
        slope = torch.zeros((), dtype=query.points[0].dtype, device=query.points[0].device)
        for point, coefficient in zip(*query, strict=True):
            slope = slope + coefficient * self._slope(point, records)
        return slope

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self._residual(_inner(point, records), records).abs()

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        """The mean loss, and as metric `sizes_met` the share of records whose size is met to within 0.1."""
        inner = _inner(point, records)
        met = (inner.abs() - records.labels).abs() <= _EXPLAINED
        loss = self._residual(inner, records).abs().mean(-1)
        return Evaluation(loss, None, {"sizes_met": met.to(inner.dtype).mean(-1)})

    def _residual(self, inner: Tensor, records: Records) -> Tensor:
        return inner.abs() ** self.power - records.labels.to(inner.dtype) ** self.power

    def _slope(self, point: Tensor, records: Records) -> Tensor:
        """The derivative of the loss by ⟨x, z⟩; 0 at a kink."""
        inner = _inner(point, records)
        by_size = inner.sign() if self.power == 1 else 2.0 * inner
        return self._residual(inner, records).sign() * by_size


def _inner(point: Tensor, records: Records) -> Tensor:
    """⟨x, z⟩ of every record, (..., B)."""
    return (records.features @ point.unsqueeze(-1)).squeeze(-1)
