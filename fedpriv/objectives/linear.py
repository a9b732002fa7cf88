"""Losses of one linear score ⟨x, z⟩, in closed form: a gradient is a number times the feature vector.

An increment is that too, with the combination of the numbers at its points, so its norm is |number| · ‖z‖.  With
a penalty every record's loss has penalty · ‖x‖²/2 beside it, in the clip; increments are then formed as vectors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.objectives.base import Deterministic, Evaluation, Increment, Linear, Records
from fedpriv.objectives.clipping import clipping, formed, rank_one, upper_norm
from fedpriv.objectives.population import Population
from fedpriv.replicates.columns import Scalar


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

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        slope = self._slopes(points, coefficients, records)
        if not self.penalty:
            return slope_sum(slope, records.features, weights, clip)
        vectors, clipped = _formed_clipped(self._formed(points, coefficients, records, slope), weights, clip)
        return Increment(vectors.sum(-2), clipped)

    def per_record(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        places: Tensor,
        clip: float,
    ) -> Tensor:
        slope = self._slopes(points, coefficients, records)
        if not self.penalty:
            return slope_rows(slope, records.features, clip)
        ones = torch.ones(len(slope), dtype=torch.float64)
        return _formed_clipped(self._formed(points, coefficients, records, slope), ones, clip)[0]

    @property
    def linear(self) -> Linear | None:
        if self.penalty:
            return None
        return Linear(self._column_of_scores, self._column_of_slopes)

    def _column_of_scores(self, point: Tensor, features: Tensor) -> Tensor:
        return _scores(point, features).unsqueeze(-1)

    def _column_of_slopes(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self._slope(scores.squeeze(-1), labels).unsqueeze(-1)

    def gradient(self, point: Tensor, records: Records, weights: Tensor) -> Tensor:
        slope = self._slope(_scores(point, records.features), records.labels) * weights
        pull = self.penalty * weights.sum(-1, keepdim=True) * point
        return (slope.unsqueeze(-2) @ records.features).squeeze(-2) + pull

    def _slopes(self, points: Sequence[Tensor], coefficients: Sequence[float], records: Records) -> Tensor:
        """Σ_k coefficients[k] · the derivative by the score at points[k], (..., B)."""
        slope = sum(
            coefficient * self._slope(_scores(point, records.features), records.labels)
            for point, coefficient in zip(points, coefficients, strict=True)
        )
        assert isinstance(slope, Tensor)
        return slope

    def _formed(
        self, points: Sequence[Tensor], coefficients: Sequence[float], records: Records, slope: Tensor
    ) -> Tensor:
        """The increments (..., B, d) themselves, the penalty's share with them."""
        pull = sum(coefficient * point for point, coefficient in zip(points, coefficients, strict=True))
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


def slope_sum(slope: Tensor, features: Tensor, weights: Tensor, clip: Scalar) -> Increment:
    """The clipped sum of slope[b] · features[b] over the batch, `slope` (..., B) and `features` (..., B, f)."""
    column, features, clipped = _clipped(slope, features, weights, clip)
    return Increment((column.mT @ features).squeeze(-2), clipped)


def slope_rows(slope: Tensor, features: Tensor, clip: float) -> Tensor:
    """slope[b] · features[b], clipped, of every record: (B, f) in float64."""
    column, features, _ = _clipped(slope, features, torch.ones(len(slope), dtype=torch.float64), clip)
    return column * features


def _clipped(slope: Tensor, features: Tensor, weights: Tensor, clip: Scalar) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of the clipped increments, (..., B, 1) and (..., B, f), and how many were clipped."""
    column, features = slope.unsqueeze(-1).to(weights.dtype), features.to(weights.dtype)
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
