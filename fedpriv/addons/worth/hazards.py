"""A hazard regression as one convex problem, for fits at home."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpriv.loss.objective import Objective, Records, RecordView
from fedpriv.loss.survival import Hazard, told


@dataclass(frozen=True)
class LinearHazards(RecordView):
    """A hazard regression in so many `bins`, with what a fit at home needs beside: losses record by record."""

    bins: int

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return Hazard().value(self.base.outputs(point, records), records.labels)

    def constant_loss(self, train: Tensor, tests: Tensor) -> float:
        """The mean loss on labels `tests` of the hazards in labels `train`, half an event and a survivor added."""
        last, seen = told(train, self.bins)
        place = torch.arange(self.bins)
        died = ((place == last.unsqueeze(-1)) & seen.unsqueeze(-1)).double().sum(0)
        odds = (died + 0.5) / ((place < last.unsqueeze(-1)).double().sum(0) + 0.5)
        return float(Hazard().value(odds.log().expand(len(tests), -1), tests).mean())


def linear_hazards(objective: Objective) -> LinearHazards | None:
    """The view of a hazard regression, whose fit is one convex problem; None of any other loss."""
    module = getattr(objective, "module", None)
    if isinstance(getattr(objective, "loss", None), Hazard) and isinstance(module, nn.Linear):
        return LinearHazards(objective, module.out_features)
    return None
