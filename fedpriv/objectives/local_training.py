"""What a silo of federated averaging contributes: how far its own training moved the model it was sent.

Source: McMahan, Moore, Ramage, Hampson & Agüera y Arcas 2017, Algorithm 1 (ClientUpdate).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.objectives.base import UNCLIPPED, Increment, Records, Slots
from fedpriv.objectives.view import View
from fedpriv.replicates.columns import Scalar


@dataclass(frozen=True)
class LocalTraining(View):
    """`base`, whose increment is Σ_i p_i (query - w_i): w_i is silo i's model after local SGD from the query.

    Each silo takes `epochs` passes of steps of length `step` over its records of the round, in batches of `batch`
    in the order they come in.  p_i is the sum of the weights of its records; records of weight 0 are not there.

    Guarantee: none.  One record moves a silo's whole trajectory, so there is no bound to calibrate noise to.
    """

    step: float
    batch: int
    epochs: int
    silos: tuple[tuple[int, int], ...] = ()

    @property
    def convex(self) -> bool:
        return False

    @property
    def convex_within(self) -> float:
        return 0.0

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
            own = weights.narrow(-1, start, rows)
            moved = query - self._trained(query, _part(records, start, rows), (own > 0.0).to(query.dtype))
            total = total + own.sum(-1, keepdim=True) * moved
            start += rows
        return Increment(total, query.new_zeros(query.shape[:-1], dtype=torch.int64))

    def per_record(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        places: Tensor,
        clip: float,
    ) -> Tensor:
        """InputError: a silo's trajectory is no sum over its records."""
        raise InputError(
            "algorithm: local training moves a silo's model by no sum over records; release no integers of it"
        )

    @property
    def outer(self) -> None:
        """None, as for `per_record`."""

    def _trained(self, query: Tensor, own: Records, present: Tensor) -> Tensor:
        """`present` is 1 for each of its records, and 0 for what only fills up a batch of several replicates."""
        model = query
        for _ in range(self.epochs):
            for start, count in _spans(own.labels.shape[-1], self.batch):
                here = present.narrow(-1, start, count)
                mean = here / here.sum(-1, keepdim=True).clamp(min=1.0)
                batch = _part(own, start, count)
                model = model - self.step * self.base.increment((model,), (1.0,), batch, mean, UNCLIPPED).total
        return model


def _part(records: Records, start: int, rows: int) -> Records:
    axis = records.labels.ndim - 1  # of the batch, behind the leading axes
    return Records(*(column.narrow(axis, start, rows) for column in records))


def _spans(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and length of every batch."""
    return ((start, min(size, rows - start)) for start in range(0, rows, size))
