"""An objective whose evaluation also tells how Goldstein-stationary a model is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.metrics.goldstein import goldstein_of
from fedpriv.objectives import Evaluation, Records, View


@dataclass(frozen=True)
class Measured(View):
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
