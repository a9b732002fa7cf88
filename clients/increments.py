"""What a silo adds to its sum, checked where it enters: float64, and no longer than its records' clips."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedpriv.objectives import Increment, Records, Slots
from fedpriv.objectives.view import View
from fedpriv.replicates.columns import Scalar

_ROUNDING = 1.0 + 1e-6
"""Of a sum over a batch in the run's own arithmetic."""


@dataclass(frozen=True)
class Bounded(View):
    """Increments of `base` in float64, held to what their records can add up to.

    Guarantee: a total is finite and at most (1 + 1e-6) Σ |weight| · clip long, whatever `base` computes.  A longer
    one is shortened to that length, which moves no two totals apart; one that is not finite counts as zero.
    Neither is refused: a refusal would tell something about the records.
    """

    def at(self, slots: Slots) -> Self:
        base = self.base.at(slots)
        return self if base is self.base else dataclasses.replace(self, base=base)

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        found = self.base.increment(points, coefficients, records, weights, clip)
        total = found.total if found.total.dtype == torch.float64 else found.total.double()
        most, length = _most(weights, clip), float(torch.linalg.vector_norm(total))
        if not length <= most:
            total = total * (most / length) if length < torch.inf else torch.zeros_like(total)
        return Increment(total, found.clipped)


def _most(weights: Tensor, clip: Scalar) -> float:
    """What increments of records of these weights can add up to."""
    return float(weights.double().abs().sum()) * float(clip) * _ROUNDING


@contextmanager
def without_denormals() -> Iterator[None]:
    """Denormal numbers are 0: they take many times as long, and a query can make them of some records only."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
