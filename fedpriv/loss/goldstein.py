"""Goldstein stationarity, measured: the least norm of a convex combination of gradients near a point.

Source: Goldstein 1977; Kornowski, Liu & Talwar, section 2.  x is (r, β)-stationary for F if some convex
combination of gradients of F at points within distance r of x has norm at most β.  The measure here samples the
points, so it is an upper bound on that least norm.  It never grows when points are added, converges slowly in
their number, and is comparable between models only for one number of points and one seed.

The least-norm point of the convex hull is found by Wolfe's algorithm (Wolfe 1976), with a certificate: no convex
combination has a norm below min_i ⟨g_i, x⟩/‖x‖.  `Measured` is an objective whose evaluation has the measure.

Random smoothing: an objective seen through random points around the query.

Source: Kornowski, Liu & Talwar, section 2 and Algorithms 3, 4 and 5, with the directions repaired: on the unit
sphere for values, in the ball for gradients (the paper has them the wrong way round in places).

    f_α(x) = E f(x + y), y uniform in the ball of radius α
    first order:   mean_j ∇f(x + y_j)                                        y_j in the ball
    zeroth order:  mean_j d/(2α) (f(x + α u_j) - f(x - α u_j)) u_j           u_j on the unit sphere

Both estimate ∇f_α without bias.  A record's contribution is clipped after all directions and points are summed.
However many directions there are, few are held at a time: those of some records, and of one record some.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.random import KeyedNormal, public_generator, seed_key
from fedpriv.core.replicates import PER_REPLICATE, Scalar
from fedpriv.loss.clipping import compute_clipping, upper_norm, vector_bounds
from fedpriv.loss.objective import (
    UNCLIPPED,
    Batch,
    BatchLayout,
    EvaluationView,
    Increment,
    ModelEvaluation,
    Objective,
    Query,
    Records,
    View,
)
from fedpriv.participation.orders import OWN_FACTS, Dependence, declared_dependence

_CHUNK_VALUES = 2**20
"""Values of directions around one point that are held at a time, a replicate: 8 MiB of them in float64."""


class DirectionWindow(NamedTuple):
    """Some of the directions of a batch: of the records at `places`, those numbered `first` … `last`-1 of each."""

    record_positions: Sequence[int]
    first: int
    last: int


class Directions(Protocol):
    """Random unit directions for every record of a batch, (B, count, d) or (replicates, B, count, d).

    With a `window` only those, (places, last - first, d), the same as among all.
    """

    def sphere(
        self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None
    ) -> Tensor:
        """Uniform on the unit sphere; `like` (..., d) gives d, the type and the device."""
        ...

    def ball(self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None) -> Tensor:
        """Uniform in the unit ball."""
        ...


@dataclass(frozen=True)
class SeededDirections:
    """Directions as a pure function of (seed, silo, round, row): the same on every engine, in any order.

    Guarantee: they are keyed by the row index, never by what is in the row or by who else is read, so neighbouring
    data sets see the same ones, and secret participation does not move them.
    """

    seeds: tuple[int, ...] = field(metadata=PER_REPLICATE)

    def sphere(
        self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None
    ) -> Tensor:
        return self._draw(slots, count, like.shape[-1], like, window)

    def ball(self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None) -> Tensor:
        """The first d coordinates of a point of the unit sphere in R^(d+2) are uniform in the ball of R^d."""
        size = like.shape[-1]
        return self._draw(slots, count, size + 2, like, window)[..., :size]

    def _draw(
        self, slots: BatchLayout, count: int, size: int, like: Tensor, window: DirectionWindow | None
    ) -> Tensor:
        places = slice(None) if window is None else list(window.record_positions)
        first, last = (0, count) if window is None else window[1:]
        silos, rows = slots.silo_ids[places], slots.row_indices[..., places]
        by_replicate = rows if rows.ndim > 1 else [rows] * len(self.seeds)
        by_name: dict[
            tuple[int, bytes], Tensor
        ] = {}  # replicates of one seed that read the same rows share theirs
        drawn = []
        for seed, own in zip(self.seeds, by_replicate, strict=True):
            name = seed, own.tobytes()
            if name not in by_name:
                source = self._sources[seed, "float32" if like.dtype == torch.float32 else "float64"]
                if last - first == count:
                    normals = source.row_vectors(count * size, silos, slots.t, own)
                else:
                    ends = count * size, first * size, last * size
                    normals = np.stack(
                        [
                            source.vector_slice(*ends, int(silo), slots.t, int(row))
                            for silo, row in zip(silos, own, strict=True)
                        ]
                    )
                joined = torch.from_numpy(normals.reshape(len(own), last - first, size))
                by_name[name] = joined / torch.linalg.vector_norm(joined, dim=-1, keepdim=True)
            drawn.append(by_name[name])
        return (drawn[0] if len(drawn) == 1 else torch.stack(drawn)).to(like.device)

    @cached_property
    def _sources(self) -> dict[tuple[int, str], KeyedNormal]:
        return {
            (seed, dtype): KeyedNormal(seed_key(seed, "directions"), dtype)
            for seed in self.seeds
            for dtype in ("float32", "float64")
        }


@dataclass(frozen=True)
class RandomSmoothing(View):
    """`base` with every gradient replaced by its estimate from random directions; evaluation is of `base`.

    `shared` directions serve all points of an increment, so that a difference of two gradients is small when the
    points are near; otherwise each point has its own.

    Guarantee: as for any objective, a record's increment is clipped as a whole, so one record moves the sum by at
    most its weight times `clip` under zero-out, whatever the loss and however few directions there are.
    """

    radius: float
    order: Literal["first", "zeroth"]
    direction_count: int
    anchor_direction_count: int
    """Where an increment has one point only."""
    shares_directions: bool
    direction_source: Directions
    batch_layout: BatchLayout | None = None

    @property
    def dependence(self) -> Dependence:
        return declared_dependence(self.base) | OWN_FACTS

    @property
    def smoothness(self) -> float:
        """Of the smoothed loss: at most √d L/α, see docs/goldstein.md."""
        return min(self.base.smoothness, math.sqrt(self.dimension) * self.base.lipschitz / self.radius)

    def for_batch(self, slots: BatchLayout) -> "RandomSmoothing":
        return dataclasses.replace(self, base=self.base.for_batch(slots), batch_layout=slots)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """As for `Objective`; `batch` has the rows of all slots, and directions of few of them exist at a time.

        How many follows from public numbers, and not from how many replicates there are.
        """
        records, weights = batch
        rows, points = weights.shape[-1], len(query.points)
        of_record = self._directions_per_point(points) * self.dimension
        if rows * of_record <= _CHUNK_VALUES:
            total, clipped = self._clip_contributions(query, records, weights, [None], clip)
        else:
            parts, together = [], max(1, _CHUNK_VALUES // of_record)
            for first in range(0, rows, together):
                places = range(first, min(first + together, rows))
                some = Records(*(column.narrow(records.record_axis, first, len(places)) for column in records))
                parts.append(
                    self._clip_contributions(query, some, weights, self._make_windows(places, points), clip)
                )
            total = torch.cat([part.total for part in parts], -2)
            clipped = torch.cat([part.clipped_count for part in parts], -1)
        return Increment((weights.unsqueeze(-1) * total).sum(-2), (clipped * (weights != 0.0)).sum(-1))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """As for `Objective`; a few directions at a time."""
        records, weights = batch
        if not len(rows):
            return weights.new_zeros((0, self.dimension))
        assert self.batch_layout is not None
        own = self.for_batch(self.batch_layout.with_rows(rows.cpu().numpy()))
        windows = own._make_windows(range(len(rows)), len(query.points))
        return weights.unsqueeze(-1) * own._clip_contributions(query, records, weights, windows, clip).total

    def evaluations(self, points: int) -> int:
        return (
            self.base.evaluations(points)
            * self._directions_per_point(points)
            * (1 if self.order == "first" else 2)
        )

    def extra_values(self, points: int, rows: int = 1) -> int:
        """Of directions, around all points."""
        of_record = self._directions_per_point(points) * self.dimension
        return points * min(rows * of_record, max(_CHUNK_VALUES, self.dimension)) + self.base.extra_values(
            points, rows
        )

    def _directions_per_point(self, points: int) -> int:
        return self.anchor_direction_count if points == 1 else self.direction_count

    def _make_windows(self, places: Sequence[int], points: int) -> list[DirectionWindow | None]:
        """Windows over all directions of these records, a few directions each."""
        count, most = self._directions_per_point(points), max(1, _CHUNK_VALUES // (len(places) * self.dimension))
        return [DirectionWindow(places, first, min(first + most, count)) for first in range(0, count, most)]

    def _draw_directions(self, points: Sequence[Tensor], window: DirectionWindow | None) -> list[Tensor]:
        """For each point its directions, (..., B, count, d), or those of a window."""
        if self.batch_layout is None:
            raise ValueError("random smoothing draws directions for the slots of a batch: see `at`")
        count = self._directions_per_point(len(points))
        draw = self.direction_source.ball if self.order == "first" else self.direction_source.sphere
        if self.shares_directions:
            return [draw(self.batch_layout, count, points[0], window)] * len(points)
        if window is None:
            drawn = draw(self.batch_layout, count * len(points), points[0])
            return [drawn[..., place * count : (place + 1) * count, :] for place in range(len(points))]
        of_points = (
            window._replace(first=place * count + window.first, last=place * count + window.last)
            for place in range(len(points))
        )
        return [draw(self.batch_layout, count * len(points), points[0], each) for each in of_points]

    def _clip_contributions(
        self,
        query: Query,
        records: Records,
        weights: Tensor,
        windows: Sequence[DirectionWindow | None],
        clip: Scalar,
    ) -> Increment:
        """Each record's clipped contribution, (..., B, d), of weight 1, and whether it was clipped, (..., B).

        `weights` gives its type.  Gradients around which all directions are there are clipped by the loss itself.
        """
        one = weights.new_ones(1)
        of_record = clip.unsqueeze(-1) if isinstance(clip, Tensor) else clip  # (replicates, 1, 1)
        around = (self._draw_directions(query.points, window) for window in windows)
        if self.order == "first" and len(windows) == 1:
            return self.base.increment(
                self._smooth_query(query, next(around)), Batch(_as_single_batches(records, 1), one), of_record
            )
        if self.order == "first":
            each = self._estimate_from_gradients(query, records, around, one)
        else:
            each = self._estimate_from_values(query, records, around).to(one.dtype)
        each = each.unsqueeze(-2)
        clipped = compute_clipping(vector_bounds(upper_norm(each)), one, of_record)
        return Increment(
            (clipped.zero_unrepresentable(each) * clipped.factor.unsqueeze(-1)).squeeze(-2), clipped.clipped_count
        )

    def _smooth_query(self, query: Query, around: Sequence[Tensor]) -> Query:
        """Gradients at points around those of the query, (..., B, d) each, each with its share of the mean."""
        moved: list[Tensor] = []
        scaled: list[float] = []
        for point, coefficient, offsets in zip(*query, around, strict=True):
            each = (point.unsqueeze(-2).unsqueeze(-2) + self.radius * offsets).unbind(-2)
            moved.extend(each)
            scaled.extend([coefficient / self._directions_per_point(len(query.points))] * len(each))
        return Query(moved, scaled)

    def _estimate_from_gradients(
        self, query: Query, records: Records, around: Iterable[Sequence[Tensor]], one: Tensor
    ) -> Tensor:
        """Each record's estimate from its gradients, unclipped, (..., B, d); NaN where one of them is not held."""
        total = one.new_zeros(())
        for some in around:
            part = self.base.increment(
                self._smooth_query(query, some), Batch(_as_single_batches(records, 1), one), UNCLIPPED
            )
            total = total + part.total.where((part.clipped_count == 0).unsqueeze(-1), torch.nan)
        return total

    def _estimate_from_values(self, query: Query, records: Records, around: Iterable[Sequence[Tensor]]) -> Tensor:
        """Each record's estimate from differences of its values, (..., B, d)."""
        total = torch.zeros((), dtype=query.points[0].dtype, device=query.points[0].device)
        apart = _as_single_batches(records, 2)
        for some in around:
            for point, coefficient, units in zip(*query, some, strict=True):
                centre, offsets = point.unsqueeze(-2).unsqueeze(-2), self.radius * units
                rise = self.base.losses(centre + offsets, apart) - self.base.losses(centre - offsets, apart)
                slope = (
                    coefficient
                    * self.dimension
                    / (2.0 * self.radius * self._directions_per_point(len(query.points)))
                )
                total = total + slope * (rise * units).sum(-2)
        return total


def _as_single_batches(records: Records, axes: int) -> Records:
    """Each record a batch of one, with so many further axes behind those of the batch."""
    features, labels = records
    axis = labels.dim()
    for _ in range(axes):
        features, labels = features.unsqueeze(axis), labels.unsqueeze(-1)
    return Records(features, labels)


Floats = NDArray[np.float64]

_SMALL = 1e-14
_TOLERANCE = 1e-12  # of the optimality gap, in units of the largest squared norm
_BLOCK_VALUES = 2**22


class MinNormPoint(NamedTuple):
    """A point of a convex hull, and a bound below which no point of the hull lies."""

    point: Floats
    norm: float
    certificate: float


def find_min_norm_point(points: Floats) -> MinNormPoint:
    """The point of least norm in the convex hull of the rows of `points` (n, d), by Wolfe's algorithm."""
    squared_norms = np.sum(points**2, axis=1)
    largest = float(np.max(squared_norms))
    if largest == 0.0:
        return MinNormPoint(points[0].copy(), 0.0, 0.0)
    members, weights = [int(np.argmin(squared_norms))], np.ones(1)
    nearest = points[members[0]].copy()
    while True:
        products = points @ nearest
        farthest = int(np.argmin(products))
        if nearest @ nearest - products[farthest] <= _TOLERANCE * largest or farthest in members:
            break
        members, weights = [*members, farthest], np.append(weights, 0.0)
        members, weights = _minimize_over_members(points, members, weights, largest)
        nearest = weights @ points[members]
    norm = float(np.linalg.norm(nearest))
    return MinNormPoint(nearest, norm, max(0.0, float(np.min(points @ nearest)) / norm if norm > 0.0 else 0.0))


def _minimize_over_members(
    points: Floats, members: list[int], weights: Floats, largest: float
) -> tuple[list[int], Floats]:
    """Towards the least-norm point of the members' affine hull; members that stop the way are dropped."""
    while True:
        chosen = points[members]
        solved = np.linalg.solve(chosen @ chosen.T + largest, np.ones(len(members)))
        ideal = solved / solved.sum()
        if np.all(ideal > _SMALL):
            return members, ideal
        blocking = ideal <= _SMALL
        shares = np.full(len(members), np.inf)
        shares[blocking] = weights[blocking] / np.maximum(weights[blocking] - ideal[blocking], _SMALL)
        first = int(np.argmin(shares))
        weights = (1.0 - shares[first]) * weights + shares[first] * ideal
        keep = weights > _SMALL
        keep[first] = False
        members, weights = [member for member, kept in zip(members, keep, strict=True) if kept], weights[keep]


def goldstein_measure(
    gradients: Callable[[Floats], Floats], point: Floats, radius: float, count: int, seed: int
) -> float:
    """The measure at `point` (d,) from gradients at `count` points uniform in the ball of `radius` around it.

    `gradients` maps points (n, d) to gradients (n, d).  The points are a function of (seed, d) alone and grow with
    `count`: those of a smaller count come first.
    """
    return find_min_norm_point(gradients(point + radius * _sample_unit_ball(count, len(point), seed))).norm


def measure_objective(
    objective: Objective, point: Tensor, records: Records, radius: float, count: int, seed: int
) -> float:
    """The measure of the mean loss over `records` at `point` (d,)."""

    def gradients(points: Floats) -> Floats:
        block = max(1, _BLOCK_VALUES // (len(records.labels) * max(1, records.features[0].numel())))
        parts = torch.split(torch.from_numpy(points).to(point), block)
        found = torch.cat([compute_mean_gradients(objective, part, records) for part in parts])
        return np.asarray(found.double().cpu().numpy())

    return goldstein_measure(gradients, point.double().cpu().numpy(), radius, count, seed)


def compute_mean_gradients(objective: Objective, points: Tensor, records: Records) -> Tensor:
    """The gradient of the mean loss at each of `points` (n, d): an increment whose clip is never reached."""
    count = len(records.labels)
    weights = torch.full((count,), 1.0 / count, dtype=points.dtype, device=points.device)
    return objective.increment(
        Query([points]), Batch(records, weights), math.sqrt(torch.finfo(points.dtype).max)
    ).total


def _sample_unit_ball(count: int, dimension: int, seed: int) -> Floats:
    """Uniform in the ball: the first d coordinates of points of the unit sphere in R^(d+2)."""
    normals = public_generator(seed, "goldstein").standard_normal((count, dimension + 2))
    return np.asarray(normals[:, :dimension] / np.linalg.norm(normals, axis=1, keepdims=True))


@dataclass(frozen=True)
class GoldsteinView(EvaluationView):
    """`base`, with the metric `goldstein` at `radius`: of the mean loss over the records evaluated on.

    The sampled points are the same in every evaluation (one seed), so that models can be compared.
    """

    radius: float
    point_count: int = 256
    seed: int = 0

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        evaluation = self.base.evaluate(point, records)
        measures = [
            measure_objective(self.base, model, records, self.radius, self.point_count, self.seed)
            for model in point.reshape(-1, self.dimension)
        ]
        measured = torch.tensor(measures, dtype=point.dtype, device=point.device).view(point.shape[:-1])
        return evaluation._replace(metrics={**evaluation.metrics, "goldstein": measured})
