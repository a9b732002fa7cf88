"""What a client of a cohort contributes: how far a few steps on its own records moved the model it was sent.

    w_0 = x_t,   w_k = w_{k-1} - η_l · mean gradient at w_{k-1} of its k-th batch,   increment x_t - w_K

Source: McMahan, Ramage, Talwar & Zhang 2018, "Learning differentially private recurrent language models",
Algorithm 1 (UserUpdateFedAvg), with K steps in place of epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.objectives.base import Increment, Records, Slots
from fedpriv.objectives.local_training import part_of, stepped
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
        present, model = (weights > 0.0).to(query.dtype), query
        count = records.labels.shape[-1]
        size = count if self.batch is None else min(self.batch, count)
        for step in range(self.steps):
            taken = (torch.arange(size) + step * size) % count
            own = records if size == count else part_of(records, taken.to(query.device))
            here = present if size == count else present.index_select(-1, taken.to(query.device))
            model = stepped(self.base, model, own, here, self.step)
        moved = (query - model).to(weights.dtype)
        return Increment(moved, query.new_zeros(query.shape[:-1]))

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
