"""Objectives for nonsmooth losses: random smoothing, and a measure of Goldstein stationarity.

`RandomSmoothing` is an objective whose gradients are estimated at random points around the query.  Source:
Kornowski, Liu & Talwar, section 2 and Algorithms 3, 4 and 5.  Directions are on the unit sphere for values and in
the ball for gradients; the paper exchanges the two in places.

    f_α(x) = E f(x + y), y uniform in the ball of radius α
    first order:   mean_j ∇f(x + y_j)                                        y_j in the ball of radius α
    zeroth order:  mean_j d/(2α) (f(x + α u_j) - f(x - α u_j)) u_j           u_j on the unit sphere

f is one record's loss, d the dimension of x.  Both estimate ∇f_α without bias.  A query has points x_k and
coefficients c_k.  A record's increment, its contribution to the query, is Σ_k c_k times the estimate at point x_k,
and is clipped after the sum over all directions and points.

Directions are keyed by a record's silo (the party that holds it) and its row index there, which the batch layout
has.  A window is a set of directions that are drawn at a time, which bounds the memory.  Leading axes "..." of
points and records are those of replicates: runs that are computed side by side.

`GoldsteinView` adds a metric to evaluations.  x is (r, β)-stationary for F if some convex combination of gradients
of F at points within distance r of x has norm at most β (Goldstein 1977; Kornowski, Liu & Talwar, section 2).  The
metric samples the points, so it is an upper bound on the least such norm, if all gradients are finite.

`find_min_norm_point` finds the least-norm point x of a convex hull by Wolfe's algorithm (Wolfe 1976), with a
certificate: no convex combination of points g_i has a norm below min_i ⟨g_i, x⟩/‖x‖.
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
from fedpriv.loss.linear import LinearObjective
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
"""Number of values of directions around one point that a replicate has at a time, 8 MiB in float64.

One direction may have more values, and `per_record` has one direction or more of every row at a time.
"""


class DirectionWindow(NamedTuple):
    """Some of the directions of a batch: those with numbers `first` … `last` - 1, of some records."""

    record_positions: Sequence[int]
    """Positions of the records in the batch."""
    first: int
    """Number of the first direction, from 0."""
    last: int
    """Number after that of the last direction."""


class Directions(Protocol):
    """Random directions for every record of a batch, (B, count, d) or (replicates, B, count, d).

    `slots` are the round, the silos and the row indices of the batch, and `count` is the number of directions of a
    record.  With a `window`, the result is the window's part of the same directions, and (records, last - first)
    takes the place of (B, count).
    """

    def sphere(
        self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None
    ) -> Tensor:
        """Draw directions uniformly on the unit sphere.

        `like` (..., d) gives d, the type and the device.
        """
        ...

    def ball(self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None) -> Tensor:
        """Draw directions uniformly in the unit ball, with arguments as for `sphere`."""
        ...


@dataclass(frozen=True)
class SeededDirections:
    """Directions as a pure function of seed, silo, round, row index, count, dimension and type.

    Guarantee: directions are keyed by the row index, never by the content of the row or by the other rows that are
    read, so a row has the same directions in neighbouring data sets, and secret participation does not change
    them.
    """

    seeds: tuple[int, ...] = field(metadata=PER_REPLICATE)
    """One seed for each replicate, or one for all replicates if they read the same rows."""

    def sphere(
        self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None
    ) -> Tensor:
        return self._draw(slots, count, like.shape[-1], like, window)

    def ball(self, slots: BatchLayout, count: int, like: Tensor, window: DirectionWindow | None = None) -> Tensor:
        """Draw directions uniformly in the unit ball of R^d.

        A direction has the first d coordinates of a point on the unit sphere of R^(d+2).
        """
        size = like.shape[-1]
        return self._draw(slots, count, size + 2, like, window)[..., :size]

    def _draw(
        self, slots: BatchLayout, count: int, size: int, like: Tensor, window: DirectionWindow | None
    ) -> Tensor:
        """Draw unit vectors of `size` coordinates: `count` for every record, or those in a window.

        A vector is a standard normal vector divided by its norm.  The normals of a record are one sequence of
        count · size numbers, keyed by seed, silo, round and row index.  A window takes a slice of the sequence.
        `like` gives the type (float32, or float64 for any other) and the device.

        Returns:
            The vectors, (B, count, size), or (records, last - first, size) with a window.  Several seeds, one for
            each replicate, add a first axis.
        """
        positions = slice(None) if window is None else list(window.record_positions)
        first, last = (0, count) if window is None else (window.first, window.last)
        silos, rows = slots.silo_ids[positions], slots.row_indices[..., positions]
        by_replicate = rows if rows.ndim > 1 else [rows] * len(self.seeds)
        # Replicates of one seed that read the same rows share directions.
        by_key: dict[tuple[int, bytes], Tensor] = {}
        by_seed = []
        for seed, row_indices in zip(self.seeds, by_replicate, strict=True):
            key = seed, row_indices.tobytes()
            if key not in by_key:
                normal_source = self._sources[seed, "float32" if like.dtype == torch.float32 else "float64"]
                if last - first == count:
                    normals = normal_source.row_vectors(count * size, silos, slots.t, row_indices)
                else:  # numbers `first` · `size` … `last` · `size` - 1 of the record's sequence
                    normals = np.stack(
                        [
                            normal_source.vector_slice(
                                count * size, first * size, last * size, int(silo), slots.t, int(row)
                            )
                            for silo, row in zip(silos, row_indices, strict=True)
                        ]
                    )
                vectors = torch.from_numpy(normals.reshape(len(row_indices), last - first, size))
                by_key[key] = vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
            by_seed.append(by_key[key])
        return (by_seed[0] if len(by_seed) == 1 else torch.stack(by_seed)).to(like.device)

    @cached_property
    def _sources(self) -> dict[tuple[int, str], KeyedNormal]:
        return {
            (seed, dtype): KeyedNormal(seed_key(seed, "directions"), dtype)
            for seed in self.seeds
            for dtype in ("float32", "float64")
        }


@dataclass(frozen=True)
class RandomSmoothing(View):
    """`base` with increments that are made of estimates of gradients from random directions.

    Evaluations are those of `base`.  If `shares_directions`, the directions around all points of an increment are
    the same, so that estimates at two points differ only because the points do.

    Guarantee: a record's increment is clipped as a whole, so one record moves the sum by at most its weight times
    `clip` if it is added or removed, whatever the loss and however few directions there are.
    """

    radius: float
    """Radius α of the ball around a point."""
    order: Literal["first", "zeroth"]
    """Estimate from gradients ("first") or from values ("zeroth")."""
    direction_count: int
    """Number of directions at each point, for increments of several points."""
    anchor_direction_count: int
    """Number of directions, for increments of a single point."""
    shares_directions: bool
    """Whether all points of an increment have the same directions."""
    direction_source: Directions
    """Source of the random directions."""
    batch_layout: BatchLayout | None = None
    """Round, silos and row indices of the batch, set by `for_batch`, or None before."""

    @property
    def dependence(self) -> Dependence:
        return declared_dependence(self.base) | OWN_FACTS

    @property
    def smoothness(self) -> float:
        """Smoothness of the smoothed loss: at most that of `base`, and at most √d · `base.lipschitz` / α."""
        return min(self.base.smoothness, math.sqrt(self.dimension) * self.base.lipschitz / self.radius)

    def for_batch(self, slots: BatchLayout) -> "RandomSmoothing":
        return dataclasses.replace(self, base=self.base.for_batch(slots), batch_layout=slots)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum the weighted clipped increments of a batch that has the rows of the batch layout.

        Returns:
            The sum, (..., d), and the number of clipped records of weight other than 0, (...).

        Raises:
            ValueError: The objective has no batch layout.
        """
        records, weights = batch
        record_count, point_count = weights.shape[-1], len(query.points)
        values_per_record = self._directions_per_point(point_count) * self.dimension
        if record_count * values_per_record <= _CHUNK_VALUES:  # all directions at once
            total, clipped = self._clip_contributions(query, records, weights, [None], clip)
        else:
            parts, chunk_size = [], max(1, _CHUNK_VALUES // values_per_record)
            for first in range(0, record_count, chunk_size):
                positions = range(first, min(first + chunk_size, record_count))
                chunk = Records(*(column.narrow(records.record_axis, first, len(positions)) for column in records))
                parts.append(
                    self._clip_contributions(
                        query, chunk, weights, self._make_windows(positions, point_count), clip
                    )
                )
            total = torch.cat([part.total for part in parts], -2)
            clipped = torch.cat([part.clipped_count for part in parts], -1)
        return Increment((weights.unsqueeze(-1) * total).sum(-2), (clipped * (weights != 0.0)).sum(-1))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """Compute the weighted clipped increment of every record, (rows, d).

        The row indices `rows`, in the only silo of the batch layout, key the directions.

        Raises:
            ValueError: There are rows, and the batch layout has not just one silo.
            AssertionError: There are rows, and the objective has no batch layout.
        """
        records, weights = batch
        if not len(rows):
            return weights.new_zeros((0, self.dimension))
        assert self.batch_layout is not None
        row_view = self.for_batch(self.batch_layout.with_rows(rows.cpu().numpy()))
        windows = row_view._make_windows(range(len(rows)), len(query.points))
        return weights.unsqueeze(-1) * row_view._clip_contributions(query, records, weights, windows, clip).total

    def evaluations(self, points: int) -> int:
        return (
            self.base.evaluations(points)
            * self._directions_per_point(points)
            * (1 if self.order == "first" else 2)
        )

    def extra_values(self, points: int, rows: int = 1) -> int:
        """Approximate number of values of directions that exist at a time, plus those of `base`."""
        values_per_record = self._directions_per_point(points) * self.dimension
        return points * min(rows * values_per_record, max(_CHUNK_VALUES, self.dimension)) + self.base.extra_values(
            points, rows
        )

    def _directions_per_point(self, points: int) -> int:
        return self.anchor_direction_count if points == 1 else self.direction_count

    def _make_windows(self, positions: Sequence[int], points: int) -> list[DirectionWindow | None]:
        """Make windows that cover all directions of the records at one or more positions in the batch.

        The number of directions depends on the number of points of the query.
        """
        count, window_size = (
            self._directions_per_point(points),
            max(1, _CHUNK_VALUES // (len(positions) * self.dimension)),
        )
        return [
            DirectionWindow(positions, first, min(first + window_size, count))
            for first in range(0, count, window_size)
        ]

    def _draw_directions(self, points: Sequence[Tensor], window: DirectionWindow | None) -> list[Tensor]:
        """Draw directions for each point: (..., B, count, d), or (..., records, last - first, d) for a window.

        Directions are in the unit ball for estimates from gradients, and on the unit sphere for those from values.
        If they are not shared, point k has those numbered k · count … (k + 1) · count - 1 of one draw.

        Raises:
            ValueError: The objective has no batch layout.
        """
        if self.batch_layout is None:
            raise ValueError("random smoothing draws directions for the slots of a batch: see `for_batch`")
        count = self._directions_per_point(len(points))
        draw = self.direction_source.ball if self.order == "first" else self.direction_source.sphere
        if self.shares_directions:
            return [draw(self.batch_layout, count, points[0], window)] * len(points)
        if window is None:
            directions = draw(self.batch_layout, count * len(points), points[0])
            return [directions[..., index * count : (index + 1) * count, :] for index in range(len(points))]
        point_windows = (
            window._replace(first=index * count + window.first, last=index * count + window.last)
            for index in range(len(points))
        )
        return [
            draw(self.batch_layout, count * len(points), points[0], point_window) for point_window in point_windows
        ]

    def _clip_contributions(
        self,
        query: Query,
        records: Records,
        weights: Tensor,
        windows: Sequence[DirectionWindow | None],
        clip: Scalar,
    ) -> Increment:
        """Estimate each record's combination of gradients, summed over the windows, and clip it.

        `base` does both for estimates from gradients in one window.  Other estimates are made and clipped here.

        Args:
            query: Combination of gradients, at points (..., d).
            records: Records to estimate gradients of, (..., B, …).
            weights: Weights of the batch, of which only type and device are used.
            windows: Windows that cover all directions of the records, where None stands for all of them.
            clip: Norm bound, a number or (..., 1).

        Returns:
            The clipped contributions, (..., B, d), and 1 for a record that counts as clipped
            (`compute_clipping`), else 0, (..., B).
        """
        unit_weight = weights.new_ones(1)
        # One bound for each record, (..., B, 1), since each is a batch of its own.
        record_clip = (
            clip.unsqueeze(-1).expand(*query.points[0].shape[:-1], records.labels.shape[-1], 1)
            if isinstance(clip, Tensor)
            else clip
        )
        directions = (self._draw_directions(query.points, window) for window in windows)
        if self.order == "first" and len(windows) == 1:  # `base` sums each record's gradients and clips the sum
            return self.base.increment(
                self._smooth_query(query, next(directions)),
                Batch(_as_single_batches(records, 1), unit_weight),
                record_clip,
            )
        if self.order == "first":
            estimates = self._estimate_from_gradients(query, records, directions, unit_weight)
        else:
            estimates = self._estimate_from_values(query, records, directions).to(unit_weight.dtype)
        estimates = estimates.unsqueeze(-2)
        clipped = compute_clipping(vector_bounds(upper_norm(estimates)), unit_weight, record_clip)
        return Increment(
            (clipped.zero_unrepresentable(estimates) * clipped.factor.unsqueeze(-1)).squeeze(-2),
            clipped.clipped_count,
        )

    def _smooth_query(self, query: Query, directions: Sequence[Tensor]) -> Query:
        """Make the query for gradients at the shifted points x_k + α y_j of each record, (..., B, d) each.

        Coefficients c_k are divided by the number of directions around a point, over all windows, so that the sum
        over windows is c_k times the mean over directions.

        Args:
            query: Points x_k, (..., d), and coefficients c_k.
            directions: Directions y_j in the unit ball for each point, (..., B, j, d).
        """
        shifted_points: list[Tensor] = []
        coefficients: list[float] = []
        for point, coefficient, offsets in zip(*query, directions, strict=True):
            point_shifts = (point.unsqueeze(-2).unsqueeze(-2) + self.radius * offsets).unbind(-2)
            shifted_points.extend(point_shifts)
            coefficients.extend([coefficient / self._directions_per_point(len(query.points))] * len(point_shifts))
        return Query(shifted_points, coefficients)

    def _estimate_from_gradients(
        self, query: Query, records: Records, windows: Iterable[Sequence[Tensor]], unit_weight: Tensor
    ) -> Tensor:
        """Estimate Σ_k c_k mean_j ∇f(x_k + α y_j) of each record, unclipped, (..., B, d).

        The estimate is NaN if the sum over a window is not representable, or is longer than `UNCLIPPED`.

        Args:
            query: Points x_k, (..., d), and coefficients c_k.
            records: Records, (..., B, …).
            windows: For each window, the directions y_j in the unit ball by points, (..., B, j, d) each.
            unit_weight: The weight 1, (1,), in the type of the sum.
        """
        total = unit_weight.new_zeros(())
        for directions in windows:
            part = self.base.increment(
                self._smooth_query(query, directions),
                Batch(_as_single_batches(records, 1), unit_weight),
                UNCLIPPED,
            )
            total = total + part.total.where((part.clipped_count == 0).unsqueeze(-1), torch.nan)
        return total

    def _estimate_from_values(self, query: Query, records: Records, windows: Iterable[Sequence[Tensor]]) -> Tensor:
        """Estimate Σ_k c_k mean_j d/(2α) (f(x_k + α u_j) - f(x_k - α u_j)) u_j of each record, (..., B, d).

        Args:
            query: Points x_k, (..., d), and coefficients c_k.
            records: Records, (..., B, …).
            windows: For each window, the directions u_j on the unit sphere by points, (..., B, j, d) each.
        """
        # Losses are (..., B, j, 1), and each window adds its share of the means.
        total = torch.zeros((), dtype=query.points[0].dtype, device=query.points[0].device)
        single_batches = _as_single_batches(records, 2)
        for directions in windows:
            for point, coefficient, unit_directions in zip(*query, directions, strict=True):
                center, offsets = point.unsqueeze(-2).unsqueeze(-2), self.radius * unit_directions
                difference = self.base.losses(center + offsets, single_batches) - self.base.losses(
                    center - offsets, single_batches
                )
                factor = (
                    coefficient
                    * self.dimension
                    / (2.0 * self.radius * self._directions_per_point(len(query.points)))
                )
                total = total + factor * (difference * unit_directions).sum(-2)
        return total


def _as_single_batches(records: Records, axes: int) -> Records:
    """Make each record a batch of one, by `axes` axes of length 1 behind the axis of records."""
    new_axes = (None,) * axes
    return Records(
        records.features[(slice(None),) * records.labels.dim() + new_axes], records.labels[(..., *new_axes)]
    )


Floats = NDArray[np.float64]

_SMALL = 1e-14  # largest weight of a point that counts as 0
_TOLERANCE = 1e-12  # of the optimality gap, in units of the largest squared norm
_BLOCK_VALUES = 2**22  # of the records' features, once for every model whose gradient is computed at a time


class MinNormPoint(NamedTuple):
    """A point of a convex hull, its norm, and a certified lower bound on the norms in the hull.

    The numbers are computed in float64, and the bounds hold up to rounding.
    """

    point: Floats
    """Point x, (d,)."""
    norm: float
    """Euclidean norm of x, an upper bound on the least norm in the hull."""
    certificate: float
    """Lower bound min_i ⟨g_i, x⟩/‖x‖ on the least norm in the hull, or 0 if that is negative or x is 0."""


def find_min_norm_point(points: Floats) -> MinNormPoint:
    """Find the least-norm point of the convex hull of points (n, d), by Wolfe's algorithm.

    The members are the points whose convex combination is x.  The point of least norm is the first member.  A step
    adds the point g_i of least ⟨g_i, x⟩ to the members, drops some of them, and x becomes the least-norm point of
    the hull of those that are kept.  A dropped point may be added again by a later step.

    The algorithm ends when ‖x‖² - ⟨g_i, x⟩ is at most 1e-12 of the largest squared norm of a point, or when g_i is
    a member already.  It also ends at a step that does not make x shorter, because of rounding, or whose equations
    are singular.  Such steps occur for points that are nearly in a subspace.

    Args:
        points: Points g_i, one or more, each 0 or of a norm from 1e-150 to 1e153, so that no square overflows.

    """
    squared_norms = np.sum(points**2, axis=1)
    largest = float(np.max(squared_norms))
    if largest == 0.0:
        return MinNormPoint(points[0].copy(), 0.0, 0.0)
    members, weights = [int(np.argmin(squared_norms))], np.ones(1)
    nearest = points[members[0]].copy()
    while True:
        products = points @ nearest
        farthest = int(np.argmin(products))  # point that is farthest in the direction of -`nearest`
        # A point that is a member already could only move the result by rounding.
        if nearest @ nearest - products[farthest] <= _TOLERANCE * largest or farthest in members:
            break
        try:
            next_members, weights = _minimize_over_members(
                points, [*members, farthest], np.append(weights, 0.0), largest
            )
        except np.linalg.LinAlgError:
            break
        if not (candidate := weights @ points[next_members]) @ candidate < nearest @ nearest:
            break
        members, nearest = next_members, candidate
    norm = float(np.linalg.norm(nearest))
    return MinNormPoint(nearest, norm, max(0.0, float(np.min(points @ nearest)) / norm if norm > 0.0 else 0.0))


def _minimize_over_members(
    points: Floats, members: list[int], weights: Floats, largest: float
) -> tuple[list[int], Floats]:
    """Drop members until the least-norm point of the others' affine hull is in their convex hull.

    This is the minor cycle of Wolfe's algorithm.  A dropped member may be one that a shorter point of all members'
    hull needs, and then a later step of the algorithm adds it again.

    With the members as rows of P, and 1 a vector of ones, the weights of the least-norm point of their affine hull
    are proportional to (P Pᵀ + largest · 1 1ᵀ)⁻¹ 1.  If all are above `_SMALL`, they are the result.  Otherwise
    the weights move towards them until the first weight becomes 0.  That member is dropped, with all others whose
    weight is then at most `_SMALL`, and the step is repeated.

    Args:
        points: All points, (n, d).
        members: Indices of the members.
        weights: Weights of the members in the present point, with sum 1.
        largest: Largest squared norm of a point.

    Returns:
        The remaining members, and their positive weights in the least-norm point of their hull.

    Raises:
        LinAlgError: The matrix of a step is singular in floating point.
    """
    while True:
        vectors = points[members]
        # Adding a number to all products does not change `target`, and keeps the matrix regular if a combination
        # of the points is 0.
        solution = np.linalg.solve(vectors @ vectors.T + largest, np.ones(len(members)))
        target = solution / solution.sum()
        if np.all(target > _SMALL):
            return members, target
        # Share of the way to `target` at which the weight of each blocking member becomes 0.
        step_shares = np.where(
            target <= _SMALL, np.minimum(weights / np.maximum(weights - target, _SMALL), 1.0), np.inf
        )
        first = int(np.argmin(step_shares))
        weights = (1.0 - step_shares[first]) * weights + step_shares[first] * target
        is_kept = (weights > _SMALL) & (np.arange(len(members)) != first)
        members, weights = (
            [member for member, is_member_kept in zip(members, is_kept, strict=True) if is_member_kept],
            weights[is_kept],
        )


def goldstein_measure(
    gradients: Callable[[Floats], Floats], point: Floats, radius: float, count: int, seed: int
) -> float:
    """Compute the least norm of a convex combination of gradients at random points around a point.

    The norm is an upper bound on Goldstein's measure of stationarity, the least norm of a convex combination of
    gradients at any points of the ball.

    Args:
        gradients: Function from points (n, d) to gradients (n, d).
        point: Center of the ball, (d,).
        radius: Radius of the ball.
        count: Number of points, which are uniform in the ball.
        seed: Seed of the points.
    """
    return find_min_norm_point(gradients(point + radius * _sample_unit_ball(count, len(point), seed))).norm


def measure_objective(
    objective: Objective, point: Tensor, records: Records, radius: float, count: int, seed: int
) -> float:
    """Compute the least norm of a convex combination of mean gradients at random points around `point`.

    Args:
        objective: Loss whose gradients are combined.
        point: Model, (d,).
        records: Records of the mean, one or more.
        radius: Radius of the ball around the model.
        count: Number of points in the ball.
        seed: Seed of the points.
    """

    def gradients(points: Floats) -> Floats:
        # A block of points is evaluated at a time, so that few copies of the features exist.
        block = max(1, _BLOCK_VALUES // (len(records.labels) * max(1, records.features[0].numel())))
        parts = torch.split(torch.from_numpy(points).to(point), block)
        mean_gradients = torch.cat([compute_mean_gradients(objective, part, records) for part in parts])
        return np.asarray(mean_gradients.double().cpu().numpy())

    return goldstein_measure(gradients, point.double().cpu().numpy(), radius, count, seed)


def compute_mean_gradients(objective: Objective, points: Tensor, records: Records) -> Tensor:
    """Compute the gradient of the mean loss at each of `points` (n, d): (n, d).

    A record whose gradient is not finite, or too large (`compute_clipping`), counts as 0 in the mean.
    """
    count = len(records.labels)
    weights = torch.full((count,), 1.0 / count, dtype=points.dtype, device=points.device)
    # A linear objective multiplies all models by the same features, others need the records of each model.
    models = () if isinstance(objective, LinearObjective) else (len(points),)
    return objective.increment(
        Query([points]),
        Batch(Records(*(column.expand(*models, *column.shape) for column in records)), weights),
        math.sqrt(torch.finfo(points.dtype).max),
    ).total


def _sample_unit_ball(count: int, dimension: int, seed: int) -> Floats:
    """Sample points uniformly in the unit ball of R^d, (count, d).

    The points are the first d coordinates of points on the unit sphere of R^(d+2).
    """
    normals = public_generator(seed, "goldstein").standard_normal((count, dimension + 2))
    return np.asarray(normals[:, :dimension] / np.linalg.norm(normals, axis=1, keepdims=True))


@dataclass(frozen=True)
class GoldsteinView(EvaluationView):
    """`base` with the metric `goldstein`: `measure_objective` of the records of an evaluation.

    The seed of the sampled points is the same in every evaluation, so that models can be compared.
    """

    radius: float
    """Radius of the ball in which points are sampled."""
    point_count: int = 256
    """Number of points in the ball around a model."""
    seed: int = 0
    """Seed of the points."""

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        evaluation = self.base.evaluate(point, records)
        measures = [
            measure_objective(self.base, model, records, self.radius, self.point_count, self.seed)
            for model in point.reshape(-1, self.dimension)
        ]
        return evaluation._replace(
            metrics={**evaluation.metrics, "goldstein": point.new_tensor(measures).view(point.shape[:-1])}
        )
