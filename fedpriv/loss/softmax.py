"""Softmax regression: a linear objective with classes, and blocks of records that replicates share.

A `Block` gathers the records of several rounds, for replicates that read the same ones.  What depends on records
alone is computed once for all rounds of a block: an objective asks for it with `of_records`, and gets the same
numbers for records that are no part of a block.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedpriv.core.replicates import Scalar
from fedpriv.loss.alone import softmax_slopes
from fedpriv.loss.clipping import Clipping, certainly_unclipped, clipping, rank_one, upper_length, upper_norm
from fedpriv.loss.linear import LinearObjective
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.objective import Outer, Query, Records

Part = TypeVar("Part")


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
        self._computed: dict[Hashable, Sequence[Any]] = {}

    def rounds(self) -> Iterator[OfBlock]:
        """Each round's records."""
        singles = zip(*(column.unbind() for column in self._records), strict=True)
        wide = zip(
            *(
                column.unsqueeze(1).expand(-1, self._replicates, *column.shape[1:]).unbind()
                for column in self._records
            ),
            strict=True,
        )
        for place, (columns, single) in enumerate(zip(wide, singles, strict=True)):
            records = OfBlock(*columns)
            records.single, records.block, records.place = Records(*single), self, place
            yield records

    def computed(self, place: int, name: Hashable, compute: Callable[[Records], Sequence[Part]]) -> Part:
        """A round's part of what `compute` makes of the records of all rounds."""
        found = self._computed.get(name)
        if found is None:
            found = self._computed[name] = compute(self._records)
        part: Part = found[place]
        return part


def once(records: Records) -> Records:
    """Without the axis of replicates where all of them read the same records, and share their memory."""
    return records.single if isinstance(records, OfBlock) else records


def of_records(records: Records, name: Hashable, compute: Callable[[Records], Tensor]) -> Tensor:
    """What `compute` makes of `once(records)`: numbers for each record by itself, under a `name` of their own."""
    if not isinstance(records, OfBlock):
        return compute(records)
    return records.block.computed(records.place, name, lambda several: compute(several).unbind())


def _longest(records: Records, dtype: torch.dtype) -> float:
    """At least the norm of the features of each record, (B, f), as `upper_norm` bounds them."""
    if isinstance(records, OfBlock):
        of_block: float = records.block.computed(
            records.place, ("longest", dtype), lambda several: _seen(several, dtype).amax(-1).tolist()
        )
        return of_block
    if records.features.numel() == records.features.shape[-1]:
        return upper_length(records.features.to(dtype))
    longest: float = _seen(records, dtype).max().item()
    return longest


def _seen(records: Records, dtype: torch.dtype) -> Tensor:
    """At least the norm of the features of each record, (..., B)."""
    return upper_norm(records.features.to(dtype))


@dataclass(frozen=True)
class SoftmaxRegression(LinearObjective):
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

    loss = CrossEntropy()

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

    def _scores(self, point: Tensor, features: Tensor) -> Tensor:
        # Weights on the left: half the time, and records that all replicates share become one product.
        return point.view(*point.shape[:-1], self.classes, self.features) @ features.mT

    def _slopes(self, query: Query, records: Records) -> Tensor:
        """Σ_k coefficients[k] (softmax(scores at points[k]) - onehot), (..., classes, B)."""
        features = once(records).features
        return _combined([self._scores(point, features) for point in query.points], query.coefficients, records)

    def _clipping(
        self, slopes: Tensor, records: Records, weights: Tensor, clip: Scalar
    ) -> tuple[Tensor, Clipping]:
        kind = slopes.dtype
        clipped = certainly_unclipped(slopes, lambda: _longest(records, kind), weights, clip)
        if clipped is None:
            seen = of_records(records, ("norm", kind), lambda several: _seen(several, kind))
            clipped = clipping(rank_one(upper_norm(slopes, -2), seen), weights, clip)
        return once(records).features.to(kind), clipped


def _combined(scores: Sequence[Tensor], coefficients: Sequence[float], records: Records) -> Tensor:
    """Σ_k coefficients[k] (softmax(scores[k]) - onehot), (..., classes, B), from scores of that shape.

    Records come last: sums over a handful of classes then go through memory in order, at a tenth of the time.
    """
    residual = scores[0].softmax(-2).mul_(coefficients[0])
    for of_point, coefficient in zip(scores[1:], coefficients[1:], strict=True):
        residual.add_(of_point.softmax(-2), alpha=coefficient)
    classes = residual.shape[-2]
    right = of_records(records, ("right", classes), lambda several: _right(several, classes))
    return residual.sub_(right, alpha=sum(coefficients))


def _right(records: Records, classes: int) -> Tensor:
    """1 for each record's own class, (..., classes, B)."""
    features = records.features
    return torch.embedding(_units(classes, features.dtype, features.device), records.labels).mT.contiguous()


@lru_cache(maxsize=16)
def _units(classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The unit vector of each class, one a row; nobody writes into it."""
    with torch.inference_mode(False):  # it outlives the run that asks for it first
        return torch.eye(classes, dtype=dtype, device=device)
