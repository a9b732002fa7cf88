"""An objective whose evaluation also tells how Goldstein-stationary a model is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.metrics.goldstein import goldstein_of
from fedpriv.objectives import Evaluation, Increment, Objective, Records, Slots
from fedpriv.rounds import Scalar


@dataclass(frozen=True)
class Measured:
    """`base`, with the metric `goldstein` at `radius`: of the mean loss over the records evaluated on.

    The sampled points are the same in every evaluation (one seed), so that models can be compared.
    """

    base: Objective
    radius: float
    points: int = 256
    seed: int = 0

    @property
    def dimension(self) -> int:
        return self.base.dimension

    @property
    def lipschitz(self) -> float:
        return self.base.lipschitz

    @property
    def smoothness(self) -> float:
        return self.base.smoothness

    @property
    def convex(self) -> bool:
        return self.base.convex

    def initial(self) -> Tensor:
        return self.base.initial()

    def at(self, slots: Slots) -> Objective:
        return self.base.at(slots)

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        return self.base.increment(points, coefficients, records, weights, clip)

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self.base.losses(point, records)

    def evaluations(self, points: int) -> int:
        return self.base.evaluations(points)

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        evaluation = self.base.evaluate(point, records)
        measures = [
            goldstein_of(self.base, model, records, self.radius, self.points, self.seed)
            for model in point.reshape(-1, self.dimension)
        ]
        measured = torch.tensor(measures, dtype=point.dtype, device=point.device).view(point.shape[:-1])
        return evaluation._replace(metrics={**evaluation.metrics, "goldstein": measured})
