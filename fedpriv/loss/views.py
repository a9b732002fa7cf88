"""Losses by units of protection, persons or clients with several records, and training of silos.

| class | contribution of a unit, or of a silo | source |
|---|---|---|
| `PerUnit` | v_u = Σ_r w_r Σ_k c_k ∇f(x_{t-k}; r),   w_r = 1/(number of u's records) | McMahan et al. 2018 |
| `QuantileClip` | (v_u · min(1/C_t, 1/‖v_u‖), ρ (b_u - ½)), b_u = 1 if ‖v_u‖ ≤ C_t, else 0 | Andrew et al. 2021 |
| `LocalSteps` | x_t - w_K, w_0 = x_t, w_k = w_{k-1} - η_l · gradient of its k-th batch | McMahan et al. 2018 |
| `LocalTraining` | x_t minus the model after a silo's own epochs, unclipped | McMahan et al. 2017 |

A contribution to a sum is called an increment.  A class here wraps a loss, `base`.  Neighbouring data sets differ
in one unit: under zero-out its contribution is replaced by zeros, and under replace-one its records by others.

`PerUnit` clips the vector v_u that `base` computes from the records of a unit u as one batch.  For a plain loss
v_u combines the gradients of the records r at the queries x_t, x_{t-1}, … with coefficients c_k.  The classes in
the next two rows can be this `base`.  In `QuantileClip`, C_t is the query's last coordinate, v_u is the vector of
its `base`, and ρ is the weight of the bit b_u.  The paper releases the sum of vectors and that of bits separately,
and here one release has both.

`LocalSteps` takes K steps of length η_l from the query x_t.  A model with linear scores moves in the span of a
client's records Z (records, features): w_k = x_t - η_l A_kᵀ Z, where A_k (records, outputs) is the sum over the
steps so far of the loss's derivatives by the scores, each times the record's weight in the step.  The scores of
this model are scores(x_t) - η_l (Z Zᵀ) A_k, so that steps can be taken on these small matrices.

Sources:

* McMahan, Ramage, Talwar & Zhang 2018, "Learning differentially private recurrent language models": Algorithm 1
  (UserUpdateFedAvg), and the mean over a user's records that is clipped.
* Andrew, Thakkar, McMahan & Ramaswamy 2021, "Differentially private learning with adaptive clipping".
* McMahan, Moore, Ramage, Hampson & Agüera y Arcas 2017, Algorithm 1 (ClientUpdate).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED, Scalar, max_values_at_once
from fedpriv.loss.clipping import Clipping, compute_clipping, upper_norm, vector_bounds
from fedpriv.loss.objective import (
    UNCLIPPED,
    Batch,
    BatchLayout,
    Increment,
    LinearScores,
    Query,
    Records,
    View,
    fast_paths,
)
from fedpriv.participation.orders import Dependence, declared_dependence

_CHUNK_VALUES = 2**21  # vectors and features of a chunk's units, clipped faster while they fit into a cache


@dataclass(frozen=True)
class PerUnit(View):
    """`base` over rows that are units of up to m = `max_records` records.

    Features are (..., B, m, …) and labels (..., B, m), with absent labels (`absent_label`) for missing records.

    Guarantee: one unit moves the sum by at most its weight times the clip under zero-out and twice that under
    replace-one, whatever its records are, how many of the m it has, and what the loss is: its vector is clipped as
    a whole, and zero if it has no records.  A unit's contribution does not depend on other units.  The constants
    of a plain loss `base` hold, since a mean of gradients is no longer than the longest, and likewise for
    differences of gradients.
    """

    max_records: int
    """m: most records of a unit."""

    @property
    def dependence(self) -> Dependence:
        """Dependence of `base` without `BATCH`, since a batch of `base` is one unit's own records here."""
        return declared_dependence(self.base) & ~Dependence.BATCH

    def for_batch(self, slots: BatchLayout) -> Self:
        """Return this objective unchanged, without a layout for `base`."""
        return self

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum weight · (v_u clipped to norm `clip`) over the units u of a batch.

        v_u is the vector of `base` for the unit's records.

        Args:
            query: Combination of gradients, at points (..., d).
            batch: Units as records, (..., B, m, …), and the units' weights, (B,) or (..., B).
            clip: Norm bound of a unit's vector, a number or (..., 1).

        Returns:
            The sum, (..., d), and the number of units that were clipped here or in `base`, (...).
        """
        # A chunk of units at a time bounds the memory, since every unit has a vector of d values.
        records, weights = batch
        axis, unit_count = records.labels.dim() - 2, records.labels.shape[-2]
        values_per_unit = query.points[0].shape[-1] + math.prod(records.features.shape[-2:])
        chunk_size = max(
            1,
            max_values_at_once(_CHUNK_VALUES, weights.device)
            // (values_per_unit * max(1, math.prod(records.labels.shape[:-2]))),
        )
        total = torch.zeros_like(query.points[0], dtype=weights.dtype)
        clipped = query.points[0].new_zeros(query.points[0].shape[:-1], dtype=torch.int64)
        for start in range(0, unit_count, chunk_size):
            span = min(chunk_size, unit_count - start)
            chunk = Records(*(column.narrow(axis, start, span) for column in records))
            weight = weights.narrow(-1, start, span)
            vectors, inner_clips, clipping = self._clip_units(query, Batch(chunk, weight), clip)
            total = total + (clipping.factor.unsqueeze(-2) @ vectors).squeeze(-2)
            is_clipped_before = (inner_clips > 0) & (weight != 0.0)
            clipped = clipped + (
                is_clipped_before if clipping.is_clipped is None else clipping.is_clipped | is_clipped_before
            ).sum(-1)
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """Compute the weighted clipped vector of every unit, (B, d)."""
        vectors, _, clipping = self._clip_units(query, batch, clip)
        return vectors * clipping.factor.unsqueeze(-1)

    def evaluations(self, points: int) -> int:
        return self.max_records * self.base.evaluations(points)

    def _clip_units(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor, Clipping]:
        """Vectors v_u of all units, their numbers of clips in `base`, and the clipping of units.

        Vectors are (..., B, d), not clipped as units yet, and numbers are (..., B).  A vector that is not
        representable is zero.
        """
        means, inner_clips = self._unit_means(query, batch.records, batch.weights.dtype)
        clipping = compute_clipping(
            vector_bounds(upper_norm(means)),
            # A unit without records adds zeros, even if `base` has a vector for it.
            batch.weights * (~is_absent(batch.records.labels)).any(-1),
            clip,
        )
        return clipping.zero_unrepresentable(means), inner_clips, clipping

    def _unit_means(self, query: Query, records: Records, dtype: torch.dtype) -> Increment:
        """Vector v_u of every unit before clipping, (..., B, d), and the number of clips in `base`, (..., B).

        A unit is a batch of its own for `base`: the units are one more leading axis of points and records.
        Present records of a unit have weight 1/(number of them), so that a sum of gradients is their mean.

        Args:
            query: Combination of gradients, at points (..., d).
            records: Units, (..., B, m, …).
            dtype: Type of the records' weights.
        """
        is_present = ~is_absent(records.labels)  # (..., B, m)
        record_weights = is_present.to(dtype) / is_present.sum(-1, keepdim=True).clamp(min=1).to(dtype)
        unit_count = records.labels.shape[-2]
        # (..., B, d)
        points = [
            point.unsqueeze(-2).expand(*point.shape[:-1], unit_count, point.shape[-1]) for point in query.points
        ]
        # Absent records have weight 0, and get label 0 because every label has to be valid.
        present_records = Records(records.features, records.labels.where(is_present, 0))
        return self.base.increment(
            Query(points, query.coefficients), Batch(present_records, record_weights), UNCLIPPED
        )


def absent_label(labels: Tensor) -> float | int:
    """Return the label of an absent record: -1 for classes, NaN for numbers."""
    return float("nan") if labels.is_floating_point() else -1


def is_absent(labels: Tensor) -> Tensor:
    """Find the labels of absent records, booleans of the labels' shape."""
    return labels.isnan() if labels.is_floating_point() else labels < 0


MIN_ADAPTIVE_CLIP, MAX_ADAPTIVE_CLIP = 2.0**-40, 2.0**40
"""Bounds within which every adaptive clip C_t lies."""


def joint_clip(weight: float) -> float:
    """Norm bound κ = √(1 + ρ²/4) of a unit's d + 1 coordinates in `QuantileClip`, for the weight ρ.

    The first d coordinates are the unit's vector divided by C_t, of norm 1 at its clip.  The last one is ρ (b - ½)
    for its bit b.
    """
    return math.hypot(1.0, weight / 2.0)


@dataclass(frozen=True)
class QuantileClip(View):
    """`base` in d + 1 dimensions, for units (`PerUnit`): points (..., d + 1) hold x_t and C_t.

    Guarantee: none of its own: `PerUnit` clips the d + 1 coordinates together to κ = `joint_clip`(ρ), whatever the
    query's C_t is, so that noise for a clip of κ accounts for the vector and the bit in one release.  A unit
    without records, or of weight 0, adds 0 to the sum of the last coordinate, too.
    """

    bit_weight: float = field(metadata=SHARED)
    """Weight ρ of the bit."""
    first_clip: float = field(metadata=SHARED)
    """First clip C_1."""

    @property
    def dependence(self) -> Dependence:
        return declared_dependence(self.base) | Dependence.BATCH

    @property
    def dimension(self) -> int:
        return self.base.dimension + 1

    def initial(self) -> Tensor:
        start = self.base.initial()
        return torch.cat([start, start.new_tensor([self.first_clip])])

    def for_batch(self, slots: BatchLayout) -> Self:
        return self

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Compute the scaled vector and the bit of one unit, (..., d + 1).

        The first d coordinates are v / max(‖v‖, C_t), with v from `base`.  The last one is ρ (b - ½), where the
        bit b is 1 if ‖v‖ ≤ C_t, else 0.  A unit without records has 0 as its last coordinate.

        Args:
            query: One point, (..., d + 1): x_t, then C_t, which is clamped to `MIN_ADAPTIVE_CLIP` …
                `MAX_ADAPTIVE_CLIP`.
            batch: Records of the unit, with weights of sum 1, or all 0 for a unit without records.
            clip: Clip of single records in `base`, which `PerUnit` sets to `UNCLIPPED`.

        Returns:
            The coordinates, and whether the unit counts as clipped, (...), which it does unless ‖v‖ ≤ C_t.
        """
        ((point,), coefficients), weights = query, batch.weights
        adaptive_clip = point[..., -1:].clamp(MIN_ADAPTIVE_CLIP, MAX_ADAPTIVE_CLIP).to(weights.dtype)
        vectors = self.base.increment(Query((point[..., :-1],), coefficients), batch, clip).total
        norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        is_within, is_present = norms <= adaptive_clip, (weights > 0.0).any(-1, keepdim=True)
        bits = torch.where(is_within, self.bit_weight / 2.0, -self.bit_weight / 2.0).to(vectors.dtype) * is_present
        return Increment(
            torch.cat([vectors / torch.maximum(norms, adaptive_clip), bits], dim=-1), ~is_within.squeeze(-1)
        )

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """Refuse increments of single records by an InputError, since a bit belongs to a unit."""
        raise InputError(
            "algorithm: an adaptive clip has no increments of single records; take units of several records "
            "(privacy.unit)"
        )


@dataclass(frozen=True)
class LocalSteps(View):
    """`base` whose increment is the query minus the model after `steps` local steps, unclipped.

    A step takes the next `batch` rows in cyclic order, or all if `batch` is None or larger than their number, and
    subtracts `step` times the mean gradient of the present records (of weight above 0) among them.  A step without
    present records moves nothing, unless a subclass has other steps.  Clients train side by side, on leading axes
    of the records, each with a model of its own.  `PerUnit` clips the increment as a whole.

    A subclass that overrides `local_gradient` takes steps in the direction of its choice, and one that overrides
    `_train_clients` has a loop of its own.

    Guarantee: none of its own.  The loss, the records, and the direction and length of a subclass's steps are not
    trusted, but a client's steps have to be a function of this client alone (`local_gradient`).  Nothing is
    claimed of this vector's length, so `lipschitz` and `smoothness` are infinite and no claim may rest on them.
    """

    step: float = field(metadata=SHARED)
    """Length η_l of a step."""
    steps: int
    """Number K of steps."""
    batch: int | None = None
    """Number of rows of a step, or None for all."""

    @property
    def dependence(self) -> Dependence:
        return declared_dependence(self.base) | Dependence.BATCH

    lipschitz = smoothness = math.inf
    convex = False
    convex_within = 0.0

    def for_batch(self, slots: BatchLayout) -> Self:
        return self

    def evaluations(self, points: int) -> int:
        return self.steps * points

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Compute the query minus each client's model after its local steps, (..., d), without clipping.

        Args:
            query: One point, (..., d), from which the steps start.  Its coefficient is not used.
            batch: Records of each client, (..., B, …), with weights above 0 for those that are present.
            clip: Not used.
        """
        (start,), (records, weights) = query.points, batch
        present = (weights > 0.0).to(start.dtype)
        has_own_steps = any(
            getattr(type(self), name) is not getattr(LocalSteps, name)
            for name in ("local_gradient", "_train_clients")
        )
        scores = None if has_own_steps else fast_paths(self.base).linear
        # A linear model moves in the span of its records, unless a subclass has steps of its own.
        if scores is None:
            displacement = start - self._train_clients(start, records, present)
        else:
            displacement = self._train_in_span(scores, start, records, present)
        return Increment(displacement.to(weights.dtype), start.new_zeros(start.shape[:-1]))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """Refuse increments of single records by an InputError: a client's steps depend on all of its records."""
        raise InputError(
            "algorithm: a client's own steps have no increments of single records; take units of several records "
            "(privacy.unit)"
        )

    def local_gradient(self, model: Tensor, start: Tensor, records: Records, weights: Tensor) -> Tensor:
        """Compute the direction against which each client takes a step, here the gradient of its mean loss.

        Override it for a local step of your own.  A client's direction may be any function of its own model,
        start, records and weights, and of no other client's: its whole displacement is clipped afterwards.

        Args:
            model: Model of each client before the step, (..., d).
            start: Model x_t that the server sent, (..., d).
            records: Records of the step, (..., B, …), with any labels where a weight is 0.
            weights: Weights of the mean over the records that are present, (..., B), 0 for absent records.

        Returns:
            The direction of each client, (..., d).
        """
        return self.base.gradient(model, Batch(records, weights))

    def _train_clients(self, start: Tensor, records: Records, present: Tensor) -> Tensor:
        """Model of each client after the steps, (..., d).

        Args:
            start: First model of each client, (..., d).
            records: Records of each client, (..., B, …).
            present: 1 for each record that is present, else 0, (..., B).
        """
        model, axis = start, records.labels.dim() - 1
        for record_indices in self._batch_indices(records.labels):
            step_records = Records(*(column.index_select(axis, record_indices) for column in records))
            mean_weights = _mean_weights(present.index_select(-1, record_indices))
            gradient = self.local_gradient(model, start, step_records, mean_weights)
            model = torch.sub(model, gradient, alpha=self.step)
        return model

    def _train_in_span(self, scores: LinearScores, start: Tensor, records: Records, present: Tensor) -> Tensor:
        """Displacement x_t - w_K of each client after all K steps, (..., d), for a loss of linear scores.

        With the features Z (B, f), A_0 = 0 and D_k the derivatives of the loss by the scores, (B, outputs), step k
        is

            scores = scores(x_t) - η_l (Z Zᵀ) A_{k-1},   A_k = A_{k-1} + (weights in the batch's mean) · D_k,

        and the displacement is η_l A_Kᵀ Z.  Z Zᵀ is computed once, so that a step takes no product with Z.

        Args:
            scores: Functions for the scores of `base`, and for the derivative of its loss by them.
            start: First model x_t of each client, (..., d).
            records: Records of each client, (..., B, …).
            present: 1 for each record that is present, else 0, (..., B).
        """
        features, labels = records
        products, initial_scores = features @ features.mT, _client_scores(scores, start, features)
        combined_gradients = torch.zeros_like(initial_scores)  # A_k
        for record_indices in self._batch_indices(labels):
            current_scores = initial_scores - self.step * (products @ combined_gradients)
            mean_weights = torch.zeros_like(present).index_copy(
                -1, record_indices, _mean_weights(present.index_select(-1, record_indices))
            )
            combined_gradients = combined_gradients + scores.output_gradient(
                current_scores, labels
            ) * mean_weights.unsqueeze(-1)
        return ((self.step * combined_gradients).mT @ features).flatten(-2)

    def _batch_indices(self, labels: Tensor) -> Iterator[Tensor]:
        """Record indices of each step's batch, in cyclic order, for labels (..., B)."""
        count = labels.shape[-1]
        size = count if self.batch is None else min(self.batch, count)
        return ((torch.arange(size, device=labels.device) + step * size) % count for step in range(self.steps))


def _mean_weights(present: Tensor) -> Tensor:
    """Weights of the mean over the records that are present."""
    return present / present.sum(-1, keepdim=True).clamp(min=1.0)


def _client_scores(scores: LinearScores, model: Tensor, features: Tensor) -> Tensor:
    """Scores of every client's records, (..., clients, records, outputs).

    A model that all clients share takes one product.
    """
    if model.dim() > 1 and model.stride(-2) == 0:
        all_scores = scores.compute_scores(model.select(-2, 0), features.flatten(-3, -2))
        return all_scores.reshape(*features.shape[:-1], all_scores.shape[-1])
    return scores.compute_scores(model, features)


@dataclass(frozen=True)
class LocalTraining(View):
    """`base` whose increment is Σ_i p_i (query - w_i), for models w_i of the silos after local SGD.

    Each silo starts from the query and runs `epochs` passes over its records of the round, in batches of `batch`
    records in their order (the last may be smaller), with steps of length `step`.  p_i is the sum of the weights
    of silo i's records.  Records of weight 0 are absent.

    Guarantee: none.  One record moves a silo's whole trajectory, so there is no bound to calibrate noise to.
    """

    step: float
    """Length of a step."""
    batch: int
    """Number of records of a batch."""
    epochs: int
    """Number of passes over the silo's records of a round."""
    silo_sizes: tuple[tuple[int, int], ...] = ()
    """Silos in the order of their records, as pairs (number, records), set by `for_batch`."""

    @property
    def dependence(self) -> Dependence:
        """Dependence on the silo's whole batch, with the order of its records."""
        return declared_dependence(self.base) | Dependence.BATCH | Dependence.POSITION | Dependence.SILO

    convex = False
    convex_within = 0.0

    def for_batch(self, slots: BatchLayout) -> Self:
        return replace(self, silo_sizes=slots.silo_sizes)

    def evaluations(self, points: int) -> int:
        return self.epochs * points

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Compute Σ_i p_i (query - w_i) over the silos, (..., d), and count no record as clipped.

        Args:
            query: One point, (..., d), from which every silo starts.  Its coefficient is not used.
            batch: Records (..., B, …) in the order of the silos, with their weights.
            clip: Not used.
        """
        (initial_model,), (records, weights) = query.points, batch
        total, start = torch.zeros_like(initial_model), 0
        for _, record_count in self.silo_sizes:
            silo_weights = weights.narrow(-1, start, record_count)
            displacement = initial_model - self._train_silo(
                initial_model,
                _slice_records(records, start, record_count),
                (silo_weights > 0.0).to(initial_model.dtype),
            )
            total = total + silo_weights.sum(-1, keepdim=True) * displacement
            start += record_count
        return Increment(total, initial_model.new_zeros(initial_model.shape[:-1], dtype=torch.int64))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """Refuse increments of single records by an InputError: a silo trains on all of its records."""
        raise InputError(
            "algorithm: local training has no increments of single records, which releases in integers need; set "
            'run.arithmetic = "float"'
        )

    def _train_silo(self, initial_model: Tensor, silo_records: Records, present: Tensor) -> Tensor:
        """Train from `initial_model` on one silo's records, and return the model, (..., d).

        A step subtracts `step` times the mean gradient of the present records of a batch.

        Args:
            initial_model: Model of the query, (..., d).
            silo_records: Records of the silo in the round, (..., B, …).
            present: 1 for each record that is present, else 0, (..., B).
        """
        model = initial_model
        for _ in range(self.epochs):
            for start, count in _batch_spans(silo_records.labels.shape[-1], self.batch):
                batch_present = present.narrow(-1, start, count)
                batch = Batch(
                    _slice_records(silo_records, start, count),
                    batch_present / batch_present.sum(-1, keepdim=True).clamp(min=1.0),
                )
                model = model - self.step * self.base.increment(Query((model,)), batch, UNCLIPPED).total
        return model


def _slice_records(records: Records, start: int, rows: int) -> Records:
    return Records(*(column.narrow(records.record_axis, start, rows) for column in records))


def _batch_spans(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and length of every batch of `size` rows, or fewer at the end."""
    return ((start, min(size, rows - start)) for start in range(0, rows, size))
