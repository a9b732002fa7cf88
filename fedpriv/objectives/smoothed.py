"""Random smoothing: an objective seen through random points around the query.

Source: Kornowski, Liu & Talwar, section 2 and Algorithms 3, 4 and 5, with the directions repaired: on the unit
sphere for values, in the ball for gradients (the paper has them the wrong way round in places).

    f_α(x) = E f(x + y), y uniform in the ball of radius α
    first order:   mean_j ∇f(x + y_j)                                        y_j in the ball
    zeroth order:  mean_j d/(2α) (f(x + α u_j) - f(x - α u_j)) u_j           u_j on the unit sphere

Both estimate ∇f_α without bias.  A record's contribution is clipped after all directions and points are summed.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedpriv.objectives.base import Increment, Records, Slots
from fedpriv.objectives.clipping import clipping, formed, upper_norm
from fedpriv.objectives.view import View
from fedpriv.randomness import KeyedNormal, seed_key
from fedpriv.replicates.columns import PER_REPLICATE, Scalar


class Directions(Protocol):
    """Random unit directions for every row of a batch, (B, count, d) or (replicates, B, count, d)."""

    def sphere(self, slots: Slots, count: int, like: Tensor) -> Tensor:
        """Uniform on the unit sphere; `like` (..., d) gives d, the type and the device."""
        ...

    def ball(self, slots: Slots, count: int, like: Tensor) -> Tensor:
        """Uniform in the unit ball."""
        ...


@dataclass(frozen=True)
class SeededDirections:
    """Directions as a pure function of (seed, silo, round, row): the same on every engine, in any order.

    Guarantee: they are keyed by the row, never by what is in it, so neighbouring data sets see the same ones.
    """

    seeds: tuple[int, ...] = field(metadata=PER_REPLICATE)

    def sphere(self, slots: Slots, count: int, like: Tensor) -> Tensor:
        return self._drawn(slots, count, like.shape[-1], like)

    def ball(self, slots: Slots, count: int, like: Tensor) -> Tensor:
        """The first d coordinates of a point of the unit sphere in R^(d+2) are uniform in the ball of R^d."""
        size = like.shape[-1]
        return self._drawn(slots, count, size + 2, like)[..., :size]

    def _drawn(self, slots: Slots, count: int, size: int, like: Tensor) -> Tensor:
        by_seed = {}
        for seed, source in self._sources(like.dtype).items():
            normals = [
                torch.from_numpy(source.vector(rows * count * size, owner=silo, t=slots.t)).view(rows, count, size)
                for silo, rows in slots.silos
            ]
            joined = torch.cat(normals)
            by_seed[seed] = joined / torch.linalg.vector_norm(joined, dim=-1, keepdim=True)
        drawn = [by_seed[seed] for seed in self.seeds]
        return (drawn[0] if len(drawn) == 1 else torch.stack(drawn)).to(like.device)

    def _sources(self, dtype: torch.dtype) -> dict[int, KeyedNormal]:
        return self._single if dtype == torch.float32 else self._double

    @cached_property
    def _single(self) -> dict[int, KeyedNormal]:
        return {seed: KeyedNormal(seed_key(seed, "directions"), "float32") for seed in self.seeds}

    @cached_property
    def _double(self) -> dict[int, KeyedNormal]:
        return {seed: KeyedNormal(seed_key(seed, "directions"), "float64") for seed in self.seeds}


@dataclass(frozen=True)
class Smoothed(View):
    """`base` with every gradient replaced by its estimate from random directions; evaluation is of `base`.

    `shared` directions serve all points of an increment, so that a difference of two gradients is small when the
    points are near; otherwise each point has its own.

    Guarantee: as for any objective, a record's increment is clipped as a whole, so one record moves the sum by at
    most its weight times `clip` under zero-out, whatever the loss and however few directions there are.
    """

    radius: float
    order: Literal["first", "zeroth"]
    directions: int
    anchor_directions: int
    """Where an increment has one point only."""
    shared: bool
    source: Directions
    slots: Slots | None = None

    @property
    def smoothness(self) -> float:
        """Of the smoothed loss: at most √d L/α, see parameters.goldstein.smoothness_constant."""
        return min(self.base.smoothness, math.sqrt(self.dimension) * self.base.lipschitz / self.radius)

    def at(self, slots: Slots) -> "Smoothed":
        return dataclasses.replace(self, base=self.base.at(slots), slots=slots)

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        estimated = self._estimated(points, coefficients, records, self._directions(points), weights.dtype, clip)
        clipped = (estimated.clipped * (weights != 0.0)).sum(-1)
        return Increment((weights.unsqueeze(-1) * estimated.total).sum(-2), clipped)

    def per_record(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        places: Tensor,
        clip: float,
    ) -> Tensor:
        if len(points) not in self._drawn:
            self._drawn[len(points)] = self._directions(points)
        around = [directions[places] for directions in self._drawn[len(points)]]
        return self._estimated(points, coefficients, records, around, torch.float64, clip).total

    @property
    def outer(self) -> None:
        """None: what is estimated from directions is no outer product."""

    @cached_property
    def _drawn(self) -> dict[int, list[Tensor]]:
        """The directions of all slots by the number of points: records come in chunks, and are drawn for once."""
        return {}

    def _estimated(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        around: Sequence[Tensor],
        dtype: torch.dtype,
        clip: Scalar,
    ) -> Increment:
        """Each record's clipped contribution, (..., B, d), and whether it was clipped, (..., B)."""
        estimate = self._of_gradients if self.order == "first" else self._of_values
        return estimate(points, coefficients, records, around, dtype, clip)

    def evaluations(self, points: int) -> int:
        count = self.anchor_directions if points == 1 else self.directions
        return self.base.evaluations(points) * count * (1 if self.order == "first" else 2)

    def _directions(self, points: Sequence[Tensor]) -> list[Tensor]:
        """For each point its directions, (..., B, count, d)."""
        if self.slots is None:
            raise ValueError("random smoothing draws directions for the slots of a batch: see `at`")
        count = self.anchor_directions if len(points) == 1 else self.directions
        draw = self.source.ball if self.order == "first" else self.source.sphere
        if self.shared:
            return [draw(self.slots, count, points[0])] * len(points)
        drawn = draw(self.slots, count * len(points), points[0])
        return [drawn[..., place * count : (place + 1) * count, :] for place in range(len(points))]

    def _of_gradients(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        around: Sequence[Tensor],
        dtype: torch.dtype,
        clip: Scalar,
    ) -> Increment:
        """Each record's clipped contribution, (..., B, d): an increment of `base` over more points."""
        moved: list[Tensor] = []
        scaled: list[float] = []
        for point, coefficient, offsets in zip(points, coefficients, around, strict=True):
            each = (point.unsqueeze(-2).unsqueeze(-2) + self.radius * offsets).unbind(-2)
            moved.extend(each)
            scaled.extend([coefficient / len(each)] * len(each))
        single = Records(records.features.unsqueeze(records.labels.dim()), records.labels.unsqueeze(-1))
        one = torch.ones(1, dtype=dtype, device=points[0].device)
        return self.base.increment(moved, scaled, single, one, _per_record(clip))

    def _of_values(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        around: Sequence[Tensor],
        dtype: torch.dtype,
        clip: Scalar,
    ) -> Increment:
        """Each record's clipped contribution, (..., B, d), from differences of its values; 0 if not finite."""
        axis = records.labels.dim()
        features = records.features.unsqueeze(axis).unsqueeze(axis)
        single = Records(features, records.labels.unsqueeze(-1).unsqueeze(-1))
        total = torch.zeros((), dtype=points[0].dtype, device=points[0].device)
        for point, coefficient, units in zip(points, coefficients, around, strict=True):
            centre, offsets = point.unsqueeze(-2).unsqueeze(-2), self.radius * units
            rise = self.base.losses(centre + offsets, single) - self.base.losses(centre - offsets, single)
            slope = coefficient * self.dimension / (2.0 * self.radius * units.shape[-2])
            total = total + slope * (rise * units).sum(-2)
        each = total.to(dtype).unsqueeze(-2)
        one = torch.ones(1, dtype=dtype, device=each.device)
        clipped = clipping(formed(upper_norm(each)), one, _per_record(clip))
        each = clipped.only(each)
        return Increment((each * clipped.factor.unsqueeze(-1)).squeeze(-2), clipped.clipped)


def _per_record(clip: Scalar) -> Scalar:
    """A clip (replicates, 1) as a column for contributions (replicates, B, d)."""
    return clip.unsqueeze(-1) if isinstance(clip, Tensor) else clip
