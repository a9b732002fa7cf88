"""A batch whose rows are persons or clients, each with several records: clipped as a whole.

    v_u = Σ_r w_r Σ_k c_k ∇f(x_{t-k}; r),   w_r = 1/(number of u's records)

Source: McMahan, Ramage, Talwar & Zhang 2018, "Learning differentially private recurrent language models", for the
mean of a user's records that is clipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedpriv.objectives.base import UNCLIPPED, Increment, Records, Slots
from fedpriv.objectives.clipping import clipping, formed, upper_norm
from fedpriv.objectives.view import View
from fedpriv.replicates.columns import Scalar

_VALUES = 2**21  # that the units of one chunk make: what lies in a cache is clipped faster


@dataclass(frozen=True)
class PerUnit(View):
    """`base`, over rows that hold up to `records` records: features (..., B, m, …) and labels (..., B, m).

    Where a unit has fewer records its labels are filled up with `absent` ones.

    Guarantee: one unit moves the sum by at most its weight times the clip, whatever its records are, how many it
    has, and what the loss is: its mean is clipped as a whole.  What a unit contributes does not depend on others.
    The constants of `base` hold, since a mean of gradients is no longer than the longest.
    """

    records: int

    def at(self, slots: Slots) -> Self:
        """The same: a loss with public coins is keyed by rows, and has no units of several records."""
        return self

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        axis, count = records.labels.dim() - 2, records.labels.shape[-2]
        size = points[0].shape[-1] + records.features[..., 0, :, :].numel() // max(1, self._lead(records))
        rows = max(1, _VALUES // (size * max(1, self._lead(records))))
        total: Tensor | float = 0.0
        clipped: Tensor | int = 0
        for start in range(0, count, rows):
            span = min(rows, count - start)
            some = Records(*(column.narrow(axis, start, span) for column in records))
            weight = weights.narrow(-1, start, span)
            means, inside = self._means(points, coefficients, some, weights.dtype)
            found = clipping(formed(upper_norm(means)), weight, clip)
            held = found.only(means)
            total = total + (found.factor.unsqueeze(-2) @ held).squeeze(-2)
            touched = (inside > 0) & (weight != 0.0)
            clipped = clipped + (touched if found.beyond is None else found.beyond | touched).sum(-1)
        assert isinstance(total, Tensor)
        assert isinstance(clipped, Tensor)
        return Increment(total, clipped)

    def per_record(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        places: Tensor,
        clip: float,
    ) -> Tensor:
        """Of every unit, (B, d) float64."""
        means, _ = self._means(points, coefficients, records, torch.float64)
        found = clipping(formed(upper_norm(means)), torch.ones(len(means), dtype=torch.float64), clip)
        held = found.only(means)
        return held * found.factor.unsqueeze(-1)

    @property
    def outer(self) -> None:
        """None: a mean over records is no outer product."""

    def evaluations(self, points: int) -> int:
        return self.records * self.base.evaluations(points)

    def _means(
        self, points: Sequence[Tensor], coefficients: Sequence[float], records: Records, dtype: torch.dtype
    ) -> Increment:
        """v_u of every unit, (..., B, d): the units are one more leading axis of the records.

        With it how many of its records were clipped, or it itself, before it is clipped as a whole; (..., B).
        """
        there = ~is_absent(records.labels)
        inner = there.to(dtype) / there.sum(-1, keepdim=True).clamp(min=1).to(dtype)
        count = records.labels.shape[-2]
        apart = [point.unsqueeze(-2).expand(*point.shape[:-1], count, point.shape[-1]) for point in points]
        own = Records(records.features, records.labels.where(there, 0))
        return self.base.increment(apart, coefficients, own, inner, UNCLIPPED)

    def _lead(self, records: Records) -> int:
        return records.labels[..., 0, 0].numel()


def absent(labels: Tensor) -> float | int:
    """A label that no record has: -1 of classes, NaN of numbers."""
    return float("nan") if labels.is_floating_point() else -1


def is_absent(labels: Tensor) -> Tensor:
    return labels.isnan() if labels.is_floating_point() else labels < 0
