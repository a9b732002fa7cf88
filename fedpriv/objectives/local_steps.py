"""What a client of a cohort contributes: how far a few steps on its own records moved the model it was sent.

    w_0 = x_t,   w_k = w_{k-1} - η_l · mean gradient at w_{k-1} of its k-th batch,   increment x_t - w_K

Source: McMahan, Ramage, Talwar & Zhang 2018, "Learning differentially private recurrent language models",
Algorithm 1 (UserUpdateFedAvg), with K steps in place of epochs.

A model with linear scores moves in the span of a client's records, w_k = x_t - η_l A_kᵀ Z with A_k (records,
outputs).  Its scores are scores(x_t) - η_l (Z Zᵀ) A_k: steps are taken on these small matrices, and the model's
move is formed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.objectives.base import Increment, Linear, Records, Slots
from fedpriv.objectives.view import View
from fedpriv.replicates.columns import SHARED, Scalar


@dataclass(frozen=True)
class LocalSteps(View):
    """`base`, whose increment is the query less the model after `steps` steps of length `step`, unclipped.

    A step takes `batch` records, the next ones in a circle, or all of them; the leading axes of records are
    clients, who train side by side, each a model of its own.  Records of weight 0 are not there.

    It is for units (`PerUnit`), which clip it whole.  Guarantee: the loss, the records and how far they lead
    are not trusted: nothing is claimed of this vector's length, so `lipschitz` and `smoothness` are infinite and
    no row may rest on them.
    """

    step: float = field(metadata=SHARED)
    steps: int
    batch: int | None = None

    @property
    def lipschitz(self) -> float:
        return float("inf")

    @property
    def smoothness(self) -> float:
        return float("inf")

    @property
    def convex(self) -> bool:
        return False

    def at(self, slots: Slots) -> Self:
        return self

    def evaluations(self, points: int) -> int:
        return self.steps * points

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        (query,) = points
        present = (weights > 0.0).to(query.dtype)
        scores = self.base.linear
        if scores is None:
            moved = query - self._trained(query, records, present)
        else:
            moved = self._in_the_span(scores, query, records, present)
        return Increment(moved.to(weights.dtype), query.new_zeros(query.shape[:-1]))

    def per_record(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        places: Tensor,
        clip: float,
    ) -> Tensor:
        """InputError: it is no sum over records; of units ask `PerUnit`."""
        raise InputError("algorithm: a client's own steps are no sum over its records; ask by unit")

    @property
    def outer(self) -> None:
        """None, as for `per_record`."""

    def _trained(self, query: Tensor, records: Records, present: Tensor) -> Tensor:
        """The model after the steps, (..., d)."""
        model, axis = query, records.labels.dim() - 1
        for taken in self._batches(records.labels):
            own = Records(*(column.index_select(axis, taken) for column in records))
            gradient = self.base.gradient(model, own, _mean(present.index_select(-1, taken)))
            model = torch.sub(model, gradient, alpha=self.step)
        return model

    def _in_the_span(self, scores: Linear, query: Tensor, records: Records, present: Tensor) -> Tensor:
        """How far the model moved, (..., d), by steps in the span of each client's records."""
        features, labels = records
        products, first = features @ features.mT, _scores_at(scores, query, features)
        combined = torch.zeros_like(first)
        for taken in self._batches(labels):
            reached = first - self.step * (products @ combined)
            mean = torch.zeros_like(present).index_copy(-1, taken, _mean(present.index_select(-1, taken)))
            combined = combined + scores.slopes(reached, labels) * mean.unsqueeze(-1)
        return ((self.step * combined).mT @ features).flatten(-2)

    def _batches(self, labels: Tensor) -> Iterator[Tensor]:
        """Which records every step takes."""
        count = labels.shape[-1]
        size = count if self.batch is None else min(self.batch, count)
        return ((torch.arange(size, device=labels.device) + step * size) % count for step in range(self.steps))


def _mean(present: Tensor) -> Tensor:
    """Weights of the mean over the records that are there."""
    return present / present.sum(-1, keepdim=True).clamp(min=1.0)


def _scores_at(scores: Linear, query: Tensor, features: Tensor) -> Tensor:
    """The scores of every client's records, (..., clients, records, outputs); one product for a shared query."""
    if query.dim() > 1 and query.stride(-2) == 0:
        together = scores.of(query.select(-2, 0), features.flatten(-3, -2))
        return together.reshape(*features.shape[:-1], together.shape[-1])
    return scores.of(query, features)
