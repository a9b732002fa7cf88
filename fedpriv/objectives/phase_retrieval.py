"""Robust phase retrieval: find x from the sizes of ⟨x, z⟩, some of them wrong.  Neither smooth nor convex.

    power 1:  f(x; z, b) = | |⟨x, z⟩| - b |          ‖z‖-Lipschitz
    power 2:  f(x; z, b) = | ⟨x, z⟩² - b² |          weakly convex, not Lipschitz: clipping bounds it

Sources: Duchi & Ruan 2019 (power 2); the amplitude form is its Lipschitz sibling.  A gradient is a number times z,
so an increment is rank one: its norm is a product, and a clipped sum over a batch one matrix product.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpriv.objectives.base import Deterministic, Evaluation, Increment, Records
from fedpriv.objectives.linear import slope_rows, slope_sum
from fedpriv.replicates.columns import Scalar

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

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        return slope_sum(self._slopes(points, coefficients, records), records.features, weights, clip)

    def per_record(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        places: Tensor,
        clip: float,
    ) -> Tensor:
        return slope_rows(self._slopes(points, coefficients, records), records.features, clip)

    def _slopes(self, points: Sequence[Tensor], coefficients: Sequence[float], records: Records) -> Tensor:
        """Σ_k coefficients[k] · the derivative by ⟨x, z⟩ at points[k], (..., B)."""
        slope = torch.zeros((), dtype=points[0].dtype, device=points[0].device)
        for point, coefficient in zip(points, coefficients, strict=True):
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
