"""A model's scores as sums over test records: what silos send of records that nobody else sees.

    record b gives   (right_b - 1/2,  loss_b / bound - 1/2)     of a classification, loss_b held to [0, bound]
                     (loss_b / bound - 1/2)                     of a regression

Every coordinate lies in ±1/2, so that one record has norm √2/2, or 1/2, whatever the model is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.metrics.scores import logits_of
from fedpriv.objectives import Increment, Objective, Records, Slots, View
from fedpriv.objectives.base import Deterministic
from fedpriv.objectives.losses import CrossEntropy
from fedpriv.replicates.columns import Scalar


@dataclass(frozen=True)
class SummedScores(View):
    """`base`, whose increments are what its test records say about a model: points are models (..., d).

    `dimension` is that of an increment, 2 of a classification and 1 of a regression, not that of a model.

    Guarantee: an increment is a function of its own record and the model, and its norm is at most `norm`, whatever
    the model is: a loss that is not finite counts as `loss_bound`.
    """

    loss_bound: float
    classes: bool

    @property
    def dimension(self) -> int:
        return 2 if self.classes else 1

    @property
    def norm(self) -> float:
        """Of one record's increment, at most."""
        return math.sqrt(self.dimension) / 2.0

    @property
    def convex(self) -> bool:
        return False

    @property
    def outer(self) -> None:
        """None: an increment is no product with features."""

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.base.initial().dtype)

    def at(self, slots: Slots) -> Self:
        return self

    def evaluations(self, points: int) -> int:
        """As a gradient has: a forward pass of a model holds about as many values as it has parameters."""
        return points * self.base.dimension

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        total = (self.contributions(points[0], records) * weights.double().unsqueeze(-1)).sum(-2)
        return Increment(total, total.new_zeros(total.shape[:-1]))

    def per_record(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        places: Tensor,
        clip: float,
    ) -> Tensor:
        return self.contributions(points[0], records)

    def contributions(self, model: Tensor, records: Records) -> Tensor:
        """(..., B, `dimension`), float64, of `model` (..., d)."""
        if not self.classes:
            return self._held(self.base.losses(model, records)).unsqueeze(-1)
        logits = logits_of(self.base.outputs(model, records))
        right = (logits.argmax(-1) == records.labels).double() - 0.5
        return torch.stack([right, self._held(CrossEntropy().value(logits, records.labels.long()))], -1)

    def _held(self, losses: Tensor) -> Tensor:
        shares = losses.double() / self.loss_bound
        return shares.nan_to_num(nan=1.0, posinf=1.0, neginf=0.0).clamp(0.0, 1.0) - 0.5

    def named(self, mean: Tensor) -> dict[str, Tensor]:
        """Means of increments (..., `dimension`) as metrics by name, each (...)."""
        return named_scores(mean, self.loss_bound, classes=self.classes)


def named_scores(mean: Tensor, loss_bound: float, *, classes: bool) -> dict[str, Tensor]:
    """Means of increments (..., 2), or (..., 1) of a regression, as metrics by name, each (...)."""
    loss = {"test_loss": (mean[..., -1] + 0.5) * loss_bound}
    return {**loss, "test_accuracy": mean[..., 0] + 0.5} if classes else loss


def summed_scores(base: Objective, loss_bound: float, *, classes: bool) -> SummedScores:
    """InputError for a model whose predictions, or losses, cannot be told record by record."""
    name = "outputs" if classes else "losses"
    if getattr(type(base), name, None) is getattr(Deterministic, name):
        raise InputError(
            f"evaluation: {type(base).__name__} gives no {name} record by record; take another model, or "
            "leave the section out"
        )
    return SummedScores(base, loss_bound, classes)
