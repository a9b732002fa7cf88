"""Whether each unit's vector fits into the clip of the moment, as one more coordinate of what it contributes.

    (v_u · min(1/C_t, 1/‖v_u‖),  ρ (b_u - ½)),   b_u = 1 if ‖v_u‖ ≤ C_t, else 0

Source: Andrew, Thakkar, McMahan & Ramaswamy 2021, "Differentially private learning with adaptive clipping": both
of its releases as one.  C_t is the query's last coordinate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.objectives.base import Increment, Records, Slots
from fedpriv.objectives.view import View
from fedpriv.replicates.columns import SHARED, Scalar

SMALLEST, LARGEST = 2.0**-40, 2.0**40
"""Clips of the moment lie between these."""


def joint_clip(weight: float) -> float:
    """κ = √(1 + ρ²/4): the norm of a unit's vector in units of C_t and its ρ (b - ½) together."""
    return math.hypot(1.0, weight / 2.0)


@dataclass(frozen=True)
class QuantileClip(View):
    """`base` in d + 1 dimensions, for units (`PerUnit`): points (..., d + 1) hold x_t and C_t.

    Guarantee: none of its own: `PerUnit` clips the d + 1 coordinates together to κ, whatever the query's C_t is,
    so that noise for a clip of κ accounts for the vector and the bit in one release.  A unit without records, or
    that does not take part, has 0 in the last coordinate too.
    """

    weight: float = field(metadata=SHARED)
    """ρ."""
    first: float
    """C_1."""

    @property
    def dimension(self) -> int:
        return self.base.dimension + 1

    def initial(self) -> Tensor:
        start = self.base.initial()
        return torch.cat([start, start.new_tensor([self.first])])

    def at(self, slots: Slots) -> Self:
        return self

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        (point,) = points
        limit = point[..., -1:].clamp(SMALLEST, LARGEST).to(weights.dtype)
        moved = self.base.increment((point[..., :-1],), coefficients, records, weights, clip).total
        norm = torch.linalg.vector_norm(moved, dim=-1, keepdim=True)
        fits, there = norm <= limit, (weights > 0.0).any(-1, keepdim=True)
        told = torch.where(fits, self.weight / 2.0, -self.weight / 2.0).to(moved.dtype) * there
        vector = moved / torch.maximum(norm, limit)
        return Increment(torch.cat([vector, told], dim=-1), ~fits.squeeze(-1))

    def per_record(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        places: Tensor,
        clip: float,
    ) -> Tensor:
        """InputError: the bit is a unit's; ask `PerUnit`."""
        raise InputError("algorithm: whether a client's vector fits its clip is no sum over records; ask by unit")

    @property
    def outer(self) -> None:
        """None, as for `per_record`."""
