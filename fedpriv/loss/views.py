"""Losses of units: persons or clients with several records, each clipped as a whole.

| class | what a unit, or a silo, contributes | source |
|---|---|---|
| `PerUnit` | v_u = Σ_r w_r Σ_k c_k ∇f(x_{t-k}; r),   w_r = 1/(number of u's records) | McMahan et al. 2018 |
| `QuantileClip` | (v_u · min(1/C_t, 1/‖v_u‖), ρ (b_u - ½)), b_u = 1 if ‖v_u‖ ≤ C_t, else 0 | Andrew et al. 2021 |
| `LocalSteps` | x_t - w_K, w_0 = x_t, w_k = w_{k-1} - η_l · gradient of its k-th batch | McMahan et al. 2018 |
| `LocalTraining` | x_t less the model after a silo's own epochs, unclipped | McMahan et al. 2017 |

In `QuantileClip` C_t is the query's last coordinate: both releases of the paper are one.  `LocalSteps` has K steps
in place of epochs.  A model with linear scores moves in the span of a client's records, w_k = x_t - η_l A_kᵀ Z
with A_k (records, outputs); its scores are scores(x_t) - η_l (Z Zᵀ) A_k, so steps are taken on these small
matrices and the model's move is formed once.

Sources: McMahan, Ramage, Talwar & Zhang 2018, "Learning differentially private recurrent language models",
Algorithm 1 (UserUpdateFedAvg) and the mean of a user's records that is clipped.  Andrew, Thakkar, McMahan &
Ramaswamy 2021, "Differentially private learning with adaptive clipping".  McMahan, Moore, Ramage, Hampson & Agüera
y Arcas 2017, Algorithm 1 (ClientUpdate).
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

_CHUNK_VALUES = 2**21  # that the units of one chunk make: what lies in a cache is clipped faster


@dataclass(frozen=True)
class PerUnit(View):
    """`base`, over rows that hold up to `records` records: features (..., B, m, …) and labels (..., B, m).

    Where a unit has fewer records its labels are filled up with `absent` ones.

    Guarantee: one unit moves the sum by at most its weight times the clip, whatever its records are, how many it
    has, and what the loss is: its mean is clipped as a whole.  What a unit contributes does not depend on others.
    The constants of `base` hold, since a mean of gradients is no longer than the longest.
    """

    max_records: int

    @property
    def dependence(self) -> Dependence:
        """The dependence of `base`, whose batch is one unit's own records here."""
        return declared_dependence(self.base) & ~Dependence.BATCH

    def for_batch(self, slots: BatchLayout) -> Self:
        """The same: a loss with public coins is keyed by rows, and has no units of several records."""
        return self

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        records, weights = batch
        axis, count = records.labels.dim() - 2, records.labels.shape[-2]
        size = query.points[0].shape[-1] + records.features[..., 0, :, :].numel() // max(
            1, self._leading_size(records)
        )
        rows = max(
            1, max_values_at_once(_CHUNK_VALUES, weights.device) // (size * max(1, self._leading_size(records)))
        )
        total: Tensor | float = 0.0
        clipped: Tensor | int = 0
        for start in range(0, count, rows):
            span = min(rows, count - start)
            some = Records(*(column.narrow(axis, start, span) for column in records))
            weight = weights.narrow(-1, start, span)
            held, inside, found = self._clip_units(query, Batch(some, weight), clip)
            total = total + (found.factor.unsqueeze(-2) @ held).squeeze(-2)
            touched = (inside > 0) & (weight != 0.0)
            clipped = clipped + (touched if found.is_clipped is None else found.is_clipped | touched).sum(-1)
        assert isinstance(total, Tensor)
        assert isinstance(clipped, Tensor)
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """Of every unit, (B, d)."""
        held, _, found = self._clip_units(query, batch, clip)
        return held * found.factor.unsqueeze(-1)

    def evaluations(self, points: int) -> int:
        return self.max_records * self.base.evaluations(points)

    def _clip_units(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor, Clipping]:
        """v_u of every unit, (..., B, d), zeros if it is not held, and what clips it as a whole.

        Between them how many of its records were clipped, or it itself, before that; (..., B).
        """
        means, inside = self._unit_means(query, batch.records, batch.weights.dtype)
        found = compute_clipping(vector_bounds(upper_norm(means)), batch.weights, clip)
        return found.zero_unrepresentable(means), inside, found

    def _unit_means(self, query: Query, records: Records, dtype: torch.dtype) -> Increment:
        """v_u of every unit, (..., B, d): the units are one more leading axis of the records."""
        there = ~is_absent(records.labels)
        inner = there.to(dtype) / there.sum(-1, keepdim=True).clamp(min=1).to(dtype)
        count = records.labels.shape[-2]
        apart = [point.unsqueeze(-2).expand(*point.shape[:-1], count, point.shape[-1]) for point in query.points]
        own = Records(records.features, records.labels.where(there, 0))
        return self.base.increment(Query(apart, query.coefficients), Batch(own, inner), UNCLIPPED)

    def _leading_size(self, records: Records) -> int:
        return records.labels[..., 0, 0].numel()


def absent_label(labels: Tensor) -> float | int:
    """A label that no record has: -1 of classes, NaN of numbers."""
    return float("nan") if labels.is_floating_point() else -1


def is_absent(labels: Tensor) -> Tensor:
    return labels.isnan() if labels.is_floating_point() else labels < 0


MIN_ADAPTIVE_CLIP, MAX_ADAPTIVE_CLIP = 2.0**-40, 2.0**40
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

    bit_weight: float = field(metadata=SHARED)
    """ρ."""
    first_clip: float = field(metadata=SHARED)
    """C_1."""

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
        ((point,), coefficients), weights = query, batch.weights
        limit = point[..., -1:].clamp(MIN_ADAPTIVE_CLIP, MAX_ADAPTIVE_CLIP).to(weights.dtype)
        moved = self.base.increment(Query((point[..., :-1],), coefficients), batch, clip).total
        norm = torch.linalg.vector_norm(moved, dim=-1, keepdim=True)
        fits, there = norm <= limit, (weights > 0.0).any(-1, keepdim=True)
        told = torch.where(fits, self.bit_weight / 2.0, -self.bit_weight / 2.0).to(moved.dtype) * there
        return Increment(torch.cat([moved / torch.maximum(norm, limit), told], dim=-1), ~fits.squeeze(-1))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """InputError: the bit is a unit's; ask `PerUnit`."""
        raise InputError("algorithm: whether a client's vector fits its clip is no sum over records; ask by unit")


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
    def dependence(self) -> Dependence:
        return declared_dependence(self.base) | Dependence.BATCH

    lipschitz = math.inf
    smoothness = math.inf
    convex = False

    def for_batch(self, slots: BatchLayout) -> Self:
        return self

    def evaluations(self, points: int) -> int:
        return self.steps * points

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        (start,), (records, weights) = query.points, batch
        present = (weights > 0.0).to(start.dtype)
        scores = fast_paths(self.base).linear
        if scores is None:
            moved = start - self._train_clients(start, records, present)
        else:
            moved = self._train_in_span(scores, start, records, present)
        return Increment(moved.to(weights.dtype), start.new_zeros(start.shape[:-1]))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """InputError: it is no sum over records; of units ask `PerUnit`."""
        raise InputError("algorithm: a client's own steps are no sum over its records; ask by unit")

    def _train_clients(self, start: Tensor, records: Records, present: Tensor) -> Tensor:
        """The model after the steps, (..., d)."""
        model, axis = start, records.labels.dim() - 1
        for taken in self._batch_indices(records.labels):
            own = Records(*(column.index_select(axis, taken) for column in records))
            gradient = self.base.gradient(model, Batch(own, _mean_weights(present.index_select(-1, taken))))
            model = torch.sub(model, gradient, alpha=self.step)
        return model

    def _train_in_span(self, scores: LinearScores, start: Tensor, records: Records, present: Tensor) -> Tensor:
        """How far the model moved, (..., d), by steps in the span of each client's records."""
        features, labels = records
        products, first = features @ features.mT, _client_scores(scores, start, features)
        combined = torch.zeros_like(first)
        for taken in self._batch_indices(labels):
            reached = first - self.step * (products @ combined)
            mean = torch.zeros_like(present).index_copy(-1, taken, _mean_weights(present.index_select(-1, taken)))
            combined = combined + scores.output_gradient(reached, labels) * mean.unsqueeze(-1)
        return ((self.step * combined).mT @ features).flatten(-2)

    def _batch_indices(self, labels: Tensor) -> Iterator[Tensor]:
        """Which records every step takes."""
        count = labels.shape[-1]
        size = count if self.batch is None else min(self.batch, count)
        return ((torch.arange(size, device=labels.device) + step * size) % count for step in range(self.steps))


def _mean_weights(present: Tensor) -> Tensor:
    """Weights of the mean over the records that are there."""
    return present / present.sum(-1, keepdim=True).clamp(min=1.0)


def _client_scores(scores: LinearScores, model: Tensor, features: Tensor) -> Tensor:
    """The scores of every client's records, (..., clients, records, outputs); one product for a shared model."""
    if model.dim() > 1 and model.stride(-2) == 0:
        together = scores.compute_scores(model.select(-2, 0), features.flatten(-3, -2))
        return together.reshape(*features.shape[:-1], together.shape[-1])
    return scores.compute_scores(model, features)


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
    silo_sizes: tuple[tuple[int, int], ...] = ()

    @property
    def dependence(self) -> Dependence:
        """Everything of the silo's batch, with the order of its records."""
        return declared_dependence(self.base) | Dependence.BATCH | Dependence.POSITION | Dependence.SILO

    convex = False
    convex_within = 0.0

    def for_batch(self, slots: BatchLayout) -> Self:
        return replace(self, silo_sizes=slots.silo_sizes)

    def evaluations(self, points: int) -> int:
        return self.epochs * points

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        (sent,), (records, weights) = query.points, batch
        total, start = torch.zeros_like(sent), 0
        for _, rows in self.silo_sizes:
            own = weights.narrow(-1, start, rows)
            moved = sent - self._train_silo(sent, _slice_records(records, start, rows), (own > 0.0).to(sent.dtype))
            total = total + own.sum(-1, keepdim=True) * moved
            start += rows
        return Increment(total, sent.new_zeros(sent.shape[:-1], dtype=torch.int64))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """InputError: a silo's trajectory is no sum over its records."""
        raise InputError(
            "algorithm: local training moves a silo's model by no sum over records; release no integers of it"
        )

    def _train_silo(self, sent: Tensor, own: Records, present: Tensor) -> Tensor:
        """`present` is 1 for each of its records, and 0 for what only fills up a batch of several replicates."""
        model = sent
        for _ in range(self.epochs):
            for start, count in _batch_spans(own.labels.shape[-1], self.batch):
                here = present.narrow(-1, start, count)
                batch = Batch(_slice_records(own, start, count), here / here.sum(-1, keepdim=True).clamp(min=1.0))
                model = model - self.step * self.base.increment(Query((model,)), batch, UNCLIPPED).total
        return model


def _slice_records(records: Records, start: int, rows: int) -> Records:
    axis = records.labels.ndim - 1  # of the batch, behind the leading axes
    return Records(*(column.narrow(axis, start, rows) for column in records))


def _batch_spans(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and length of every batch."""
    return ((start, min(size, rows - start)) for start in range(0, rows, size))
