"""What a silo of federated averaging contributes: how far its own training moved the model it was sent.

Source: McMahan, Moore, Ramage, Hampson & Agüera y Arcas 2017, Algorithm 1 (ClientUpdate).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fedpriv.objectives.base import Increment, Records, Slots
from fedpriv.objectives.view import View
from fedpriv.rounds import Scalar

UNCLIPPED = 1e30
"""A norm bound that no gradient reaches, and that floating-point numbers of 32 bits can hold."""


@dataclass(frozen=True)
class LocalTraining(View):
    """`base`, whose increment is Σ_i p_i (query - w_i): w_i is silo i's model after local SGD from the query.

    Each silo takes `epochs` passes of steps of length `step` over its records of the round, in batches of `batch`
    in the order they come in.  p_i is the sum of the weights of its records.

    Guarantee: none.  One record moves a silo's whole trajectory, so there is no bound to calibrate noise to.
    """

    step: float
    batch: int
    epochs: int
    silos: tuple[tuple[int, int], ...] = ()

    @property
    def convex(self) -> bool:
        return False

    def at(self, slots: Slots) -> Self:
        return replace(self, silos=slots.silos)

    def evaluations(self, points: int) -> int:
        return self.epochs * points

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        (query,) = points
        total, start = torch.zeros_like(query), 0
        for _, rows in self.silos:
            share = weights.narrow(-1, start, rows).sum(-1, keepdim=True)
            total = total + share * (query - self._trained(query, _part(records, start, rows)))
            start += rows
        return Increment(total, query.new_zeros(query.shape[:-1]))

    def _trained(self, query: Tensor, own: Records) -> Tensor:
        model = query
        for _ in range(self.epochs):
            for batch in _batches(own, self.batch):
                count = batch.labels.shape[-1]
                mean = torch.full((count,), 1.0 / count, dtype=query.dtype, device=query.device)
                model = model - self.step * self.base.increment((model,), (1.0,), batch, mean, UNCLIPPED).total
        return model


def _part(records: Records, start: int, rows: int) -> Records:
    axis = records.labels.ndim - 1  # of the batch, behind the leading axes
    return Records(*(column.narrow(axis, start, rows) for column in records))


def _batches(records: Records, size: int) -> Iterator[Records]:
    rows = records.labels.shape[-1]
    return (_part(records, start, min(size, rows - start)) for start in range(0, rows, size))
