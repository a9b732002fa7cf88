"""Softmax regression in closed form.

A gradient is the outer product (softmax(x z) - onehot(y)) ⊗ z, so an increment, a linear combination of
gradients of one record at several points, is rank one too: its norm is a product of two norms, and a clipped
sum over a batch is one matrix product.

Records of several rounds that are gathered together, for replicates that read the same.

What depends on records alone is computed once for all rounds.  An objective asks for it with `of_records`, and
gets the same numbers for records that are no part of a block.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.core.replicates import Scalar
from fedpriv.loss.alone import softmax_slopes
from fedpriv.loss.clipping import certainly_unclipped, clipping, rank_one, upper_norm
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.objective import Batch, Deterministic, Evaluation, Increment, Linear, Outer, Query, Records


class OfBlock(Records):
    """One round's records, (replicates, B, …), with one memory for all replicates.

    What is made of them, a part for instance, is plain `Records` again.
    """

    single: Records
    """The same without the axis of replicates."""
    block: "Block"
    place: int


class Block:
    """Records (rounds, B, …) of which every replicate reads all."""

    def __init__(self, records: Records, replicates: int) -> None:
        self._records, self._replicates = records, replicates
        self._computed: dict[Hashable, Sequence[Tensor]] = {}

    def rounds(self) -> Iterator[OfBlock]:
        """Each round's records."""
        singles = zip(*(column.unbind() for column in self._records), strict=True)
        wide = zip(*(self._of_replicates(column).unbind() for column in self._records), strict=True)
        for place, (columns, single) in enumerate(zip(wide, singles, strict=True)):
            records = OfBlock(*columns)
            records.single, records.block, records.place = Records(*single), self, place
            yield records

    def computed(self, place: int, name: Hashable, compute: Callable[[Records], Tensor]) -> Tensor:
        """A round's part of what `compute` makes of the records of all rounds."""
        found = self._computed.get(name)
        if found is None:
            found = self._computed[name] = compute(self._records).unbind()
        return found[place]

    def _of_replicates(self, column: Tensor) -> Tensor:
        return column.unsqueeze(1).expand(-1, self._replicates, *column.shape[1:])


def once(records: Records) -> Records:
    """Without the axis of replicates where all of them read the same records, and share their memory."""
    return records.single if isinstance(records, OfBlock) else records


def of_records(records: Records, name: Hashable, compute: Callable[[Records], Tensor]) -> Tensor:
    """What `compute` makes of `once(records)`: numbers for each record by itself, under a `name` of their own."""
    return (
        records.block.computed(records.place, name, compute) if isinstance(records, OfBlock) else compute(records)
    )


@dataclass(frozen=True)
class SoftmaxRegression(Deterministic):
    """Cross-entropy of a linear classifier; parameters are `classes` rows of `features` weights, flattened.

    `feature_norm` bounds ‖z‖ over all records that can occur; a constant feature 1 serves as the bias.
    """

    features: int
    classes: int
    feature_norm: float
    dtype: torch.dtype = torch.float32
    convex: bool = True
    levels: int | None = None
    """In sums of integers features count as the nearest multiple of 1/`levels`: bytes / 255 as they are.

    None if increments are to be formed one by one instead.
    """

    @property
    def dimension(self) -> int:
        return self.features * self.classes

    @property
    def lipschitz(self) -> float:
        """√2 · max‖z‖: ‖softmax - onehot‖ ≤ √2."""
        return math.sqrt(2.0) * self.feature_norm

    @property
    def smoothness(self) -> float:
        """max‖z‖²/2: the Hessian of log-sum-exp has norm at most 1/2."""
        return self.feature_norm**2 / 2.0

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.dtype)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        residual, features, clipped = self._clipped(query, batch, clip)
        return Increment((residual @ features).flatten(-2), clipped)

    def per_record(self, query: Query, batch: Batch, places: Tensor, clip: float) -> Tensor:
        residual, features, _ = self._clipped(query, batch, clip)
        return (residual.mT.unsqueeze(-1) * features.unsqueeze(-2)).flatten(-2)

    @property
    def outer(self) -> Outer | None:
        if self.levels is None:
            return None
        return Outer(
            softmax_slopes,
            self.classes,
            self.levels,
            math.ceil(self.levels * self.feature_norm) + math.isqrt(self.features) + 1,
        )

    @property
    def linear(self) -> Linear:
        return Linear(self._logits, CrossEntropy().slope)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        records, weights = batch
        slope = CrossEntropy().slope(self._logits(point, records.features), records.labels)
        return ((slope * weights.unsqueeze(-1)).mT @ records.features).flatten(-2)

    def _clipped(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor, Tensor]:
        """Residuals (..., classes, B) and features that multiply to increments, and how many were clipped."""
        records, weights = batch
        kind = weights.dtype
        residual, features = self._residuals(query, records).to(kind), once(records).features.to(kind)
        seen = of_records(records, ("norm", kind), lambda several: upper_norm(several.features.to(kind)))
        clipped = certainly_unclipped(residual, seen, weights, clip) or clipping(
            rank_one(upper_norm(residual, -2), seen), weights, clip
        )
        features, residual = clipped.only(features), clipped.only(residual, -2)
        return residual.mul_(clipped.factor.unsqueeze(-2)), features, clipped.clipped

    def _residuals(self, query: Query, records: Records) -> Tensor:
        """Σ_k coefficients[k] (softmax(logits at points[k]) - onehot), (..., classes, B)."""
        features = once(records).features
        return _combined((self._scores(point, features) for point in query.points), query.coefficients, records)

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return CrossEntropy().value(self._logits(point, records.features), records.labels)

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        logits, loss = self._logits(point, records.features), CrossEntropy()
        return Evaluation(loss.value(logits, records.labels).mean(-1), loss.accuracy(logits, records.labels))

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return self._logits(point, records.features)

    def _logits(self, point: Tensor, features: Tensor) -> Tensor:
        """(..., B, classes)."""
        return self._scores(point, features).mT

    def _scores(self, point: Tensor, features: Tensor) -> Tensor:
        """The logits with records last, (..., classes, B)."""
        # Weights on the left: half the time, and records that all replicates share become one product.
        return self._matrix(point) @ features.mT

    def _matrix(self, point: Tensor) -> Tensor:
        return point.view(*point.shape[:-1], self.classes, self.features)


def _combined(scores: Iterable[Tensor], coefficients: Sequence[float], records: Records) -> Tensor:
    """Σ_k coefficients[k] (softmax(scores[k]) - onehot), (..., classes, B), from scores of that shape.

    Records come last: sums over a handful of classes then go through memory in order, at a tenth of the time.
    """
    parts = (of_point.softmax(-2) for of_point in scores)
    residual = next(parts).mul_(coefficients[0])
    for part, coefficient in zip(parts, coefficients[1:], strict=True):
        residual.add_(part, alpha=coefficient)
    classes = residual.shape[-2]
    right = of_records(records, ("right", classes), lambda several: _right(several, classes))
    return residual.sub_(right, alpha=sum(coefficients))


def _right(records: Records, classes: int) -> Tensor:
    """1 for each record's own class, (..., classes, B)."""
    labels = records.labels.unsqueeze(-2)
    zeros = records.features.new_zeros(*labels.shape[:-2], classes, labels.shape[-1])
    return zeros.scatter_(-2, labels, 1.0)
