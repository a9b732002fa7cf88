"""What an objective is: clipped sums of what records answer to a query, and an evaluation.

| | |
|---|---|
| `Query`, `Batch` | which gradients are combined; which records are asked, and what each weighs |
| `Objective` | the protocol: a loss over flat parameters |
| `Deterministic` | base class of losses without public coins |
| `View` | base class of wrappers that delegate to another objective |
| `EvaluationView` | base class of those that change evaluations alone |
| `fast_paths` | the shortcuts that a loss may have as attributes |

Passes through a model in bfloat16, with everything that a guarantee rests on in the run's own type.

The model, its noise, norms, clips and sums stay as they are; what a record's gradient is computed from has 8 bits.
Micikevicius et al. 2018, "Mixed precision training", have the same division: master weights and sums are wide.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.alone import Floats, IntegerScores
from fedpriv.participation.orders import UNDECLARED, Dependence, declared_dependence

UNCLIPPED = 1e30
"""A norm bound that no gradient reaches, and that floating-point numbers of 32 bits can hold."""


class BatchLayout(NamedTuple):
    """Names of a batch's records, without a look at any of them: all that public coins may be keyed by."""

    t: int
    """The round."""
    silo_sizes: tuple[tuple[int, int], ...]
    """Silos in the order of their records: (number, records)."""
    row_indices: NDArray[np.int64]
    """Row index of each record in its silo, (B,), or (replicates, B) where replicates read different rows.

    A record keeps its row index in every round, whoever else is read.
    """

    @property
    def silo_ids(self) -> NDArray[np.int64]:
        """The silo of each record, (B,)."""
        numbers, counts = zip(*self.silo_sizes, strict=True) if self.silo_sizes else ((), ())
        return np.repeat(np.array(numbers, np.int64), counts)

    def with_rows(self, rows: NDArray[np.int64]) -> "BatchLayout":
        """The same round for other rows (B,) of the same silo; for a batch of one silo."""
        ((silo, _),) = self.silo_sizes
        return BatchLayout(self.t, ((silo, len(rows)),), rows)


class Records(NamedTuple):
    """A batch: features (..., B, features) and labels (..., B), integers of classes or floats of a regression.

    Several labels of a record lie behind its features (`Layout`); `Labelled` alone makes them (..., B, *shape).
    """

    features: Tensor
    labels: Tensor

    @property
    def record_axis(self) -> int:
        """Axis of the records, of both."""
        return self.features.dim() - 2


class Query(NamedTuple):
    """A combination of gradients that every record is asked for: Σ_k coefficients[k] ∇f(points[k]; record)."""

    points: Sequence[Tensor]
    """Each (..., d); the leading axes are replicates, or units, side by side."""
    coefficients: Sequence[float] = (1.0,)
    """One a point; left out, the query is for the gradient at one point."""


class Batch(NamedTuple):
    """The records that an increment is summed over, and what each of them weighs in the sum."""

    records: Records
    """With an axis B of records behind the leading axes of the query's points."""
    weights: Tensor
    """(B,) or (..., B), in the type that norms, factors and sums are to have: it may be wider than the points'.

    A record of weight 0 is not there: it does not count as clipped either.
    """


class Increment(NamedTuple):
    """A weighted sum of clipped increments (..., d) and how many of the records were clipped (...)."""

    total: Tensor
    clipped_count: Tensor


class ModelEvaluation(NamedTuple):
    """Mean loss (natural logarithm) and share of right predictions in [0, 1], each of shape (...).

    `accuracy` is None for a regression; `metrics` holds what else the objective knows, by name, each (...).
    """

    loss: Tensor
    accuracy: Tensor | None
    metrics: Mapping[str, Tensor] = MappingProxyType({})

    def to_metrics(self) -> dict[str, Tensor]:
        """Everything by name, as results keep it."""
        accuracy = {} if self.accuracy is None else {"test_accuracy": self.accuracy}
        return {"test_loss": self.loss, **accuracy, **self.metrics}


class OuterProduct(NamedTuple):
    """How increments of linear scores factor: residual (classes,) ⊗ features, in whole multiples of 1/`levels`."""

    residuals: Callable[[IntegerScores, NDArray[np.int64]], Floats]
    """(scores, labels (B,)) → the loss's derivative by the scores, (B, classes), in written order (`Scores`)."""
    classes: int
    denominator: int
    """Features times this are rounded to integers."""
    max_feature_norm: int
    """A public bound on the norm of a record's integer features."""


class LinearScores(NamedTuple):
    """A loss of linear scores: a gradient is slopes (outputs,) ⊗ features."""

    compute_scores: Callable[[Tensor, Tensor], Tensor]
    """(point (..., d), features (..., B, f)) → scores (..., B, outputs), linear in the point."""
    output_gradient: Callable[[Tensor, Tensor], Tensor]
    """(scores (..., B, outputs), labels (..., B)) → the loss's derivative by the scores, (..., B, outputs)."""


class Objective(Protocol):
    """A loss with per-record gradients over flat parameters of length `dimension`."""

    @property
    def dimension(self) -> int: ...

    @property
    def lipschitz(self) -> float:
        """G: a bound on the norm of one record's gradient; inf if none is known."""
        ...

    @property
    def smoothness(self) -> float:
        """L: a bound on the Lipschitz constant of one record's gradient; inf if none is known."""
        ...

    @property
    def convex(self) -> bool:
        """Whether every record's loss is convex, with `lipschitz` and `smoothness` valid at every point.

        A guarantee by contraction rests on it; False where it is not known.
        """
        ...

    @property
    def convex_within(self) -> float:
        """The radius of the ball around 0 in which every record's loss is convex, with `lipschitz` and
        `smoothness` valid, if a run starts in its centre: inf where that is everywhere, 0 where it is not known.

        Bounds on the excess risk rest on it, no guarantee does.
        """
        ...

    def initial(self) -> Tensor:
        """x_1, shape (d,)."""
        ...

    @property
    def dependence(self) -> Dependence:
        """Facts on which a record's increment depends; a class that does not say depends on anything."""
        ...

    def for_batch(self, slots: BatchLayout) -> "Objective":
        """The objective of the batch in these slots: another one only where it has public coins of its own."""
        ...

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Σ_b weights[b] · clip(the query of record b, norm `clip`), `clip` a number or (..., 1).

        Gradients are taken in the type of the points; the total has that of the weights: in what is really
        released it is float64.

        Guarantee: one record moves the sum by at most weights[b] · clip under zero-out and twice that under
        replace-one, for any points, records and loss, rounding included but for that of the other records' sum.
        A record whose increment is not finite adds nothing and counts as clipped.
        """
        ...

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """weights[b] · clip(the query of record b, norm `clip`) of every record: (B, d), of the weights' type.

        There are no leading axes here.  `rows[b]` is the row index of record b in the silo of `at`.  A record
        whose increment is not finite is a row of zeros.

        Guarantee: row b depends on what `dependence` declares and on public values alone, but for rounding.  Exact
        releases ask for one record at a time (`loss.alone`), where nothing of the others is at hand.
        """
        ...

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        """Σ_b weights[b] · ∇f(point; record b), (..., d), clipped nowhere: for training inside of a unit.

        A record may spoil the sum, of its own leading axes only.
        """
        ...

    def losses(self, point: Tensor, records: Records) -> Tensor:
        """f(point; record) of every record, shape (..., B), for `point` and `records` as in `increment`.

        InputError where a model gives gradients only.
        """
        ...

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        """What the model says of every record, (..., B, outputs), for `point` (..., d) and unbatched records.

        Logits of classes, one logit of class 1 against 0, or a regression's prediction.  InputError where a model
        predicts nothing.
        """
        ...

    def evaluations(self, points: int) -> int:
        """Gradients (or values) of one record that an increment over so many points takes."""
        ...

    def extra_values(self, points: int, rows: int = 1) -> int:
        """Values that exist at a time beside increments of so many rows, of one replicate: directions, copies."""
        ...

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """Loss and accuracy of `point` (..., d) on records without leading axes."""
        ...


class Deterministic(ABC):
    """What objectives without public coins have in common."""

    convex: bool = False

    @abstractmethod
    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment: ...

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        """By increments that nothing clips."""
        return self.increment(Query((point,)), batch, UNCLIPPED).total

    @property
    def convex_within(self) -> float:
        return math.inf if self.convex else 0.0

    def for_batch(self, slots: BatchLayout) -> Self:
        return self

    def evaluations(self, points: int) -> int:
        return points

    def extra_values(self, points: int, rows: int = 1) -> int:
        return 0

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        raise InputError(
            f"run.metrics: {type(self).__name__} predicts nothing that could be scored; leave them out"
        )

    def losses(self, point: Tensor, records: Records) -> Tensor:
        raise InputError(
            f"model: {type(self).__name__} gives no values record by record, which a zeroth-order oracle needs; "
            "use gradients"
        )


PROVED_DIAMETERS: set[type] = set()
"""Classes whose `diameter` is proved; no subclass of one is believed."""
SUMMED_BY_CELL: set[type] = set()
"""Classes whose increments are added cell by cell, by their own `whole`."""


def is_shipped(kind: type) -> bool:
    """Whether a class is fedpriv's own: proofs are of these alone, whoever adds to the sets above."""
    return kind.__module__.startswith("fedpriv.")


class FastPaths(NamedTuple):
    """Faster ways to a loss's increments; None where it has none."""

    outer: OuterProduct | None
    """Increments that factor, with features that are whole numbers."""
    linear: LinearScores | None
    """Linear scores that the loss is a function of, and of nothing else."""


def fast_paths(objective: Objective) -> FastPaths:
    """Find the attributes `outer` and `linear` that a loss may have, behind views that only evaluate.

    Any other view has none, even of a loss that does: its increments may be others.
    """
    while isinstance(objective, EvaluationView):
        objective = objective.base
    return FastPaths(getattr(objective, "outer", None), getattr(objective, "linear", None))


@dataclass(frozen=True)
class View:
    """A loss whose every part is that of `base`, but for what a subclass changes.

    A subclass declares on what its increments depend: one that says nothing depends on anything.
    """

    base: Objective

    @property
    def dependence(self) -> Dependence:
        return UNDECLARED

    @property
    def dimension(self) -> int:
        return self.base.dimension

    @property
    def lipschitz(self) -> float:
        return self.base.lipschitz

    @property
    def smoothness(self) -> float:
        return self.base.smoothness

    @property
    def convex(self) -> bool:
        return self.base.convex

    @property
    def convex_within(self) -> float:
        return self.base.convex_within

    def initial(self) -> Tensor:
        return self.base.initial()

    def for_batch(self, slots: BatchLayout) -> Objective:
        return self.base.for_batch(slots)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        return self.base.increment(query, batch, clip)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self.base.per_record(query, batch, rows, clip)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        return self.base.gradient(point, batch)

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self.base.losses(point, records)

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return self.base.outputs(point, records)

    def evaluations(self, points: int) -> int:
        return self.base.evaluations(points)

    def extra_values(self, points: int, rows: int = 1) -> int:
        return self.base.extra_values(points, rows)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        return self.base.evaluate(point, records)


@dataclass(frozen=True)
class RecordView(View):
    """A view in which a record's increment depends on the facts on which that of `base` does."""

    @property
    def dependence(self) -> Dependence:
        return declared_dependence(self.base)


@dataclass(frozen=True)
class EvaluationView(RecordView):
    """`base`, but for `evaluate`: increments are computed as `base` computes them, bit for bit."""


_MAX_BFLOAT16_INTEGER = 256
"""Up to here bfloat16 holds every whole number."""


@dataclass(frozen=True)
class Bfloat16View(RecordView):
    """`base`, whose gradients are taken at models and of features that are rounded to bfloat16.

    Evaluations are in the type of the model.

    Guarantee: as for any objective, since norms and sums are in the type of the weights: gradients are other
    gradients, and each is clipped as the vector that is added.
    """

    def for_batch(self, slots: BatchLayout) -> Self:
        base = self.base.for_batch(slots)
        return self if base is self.base else replace(self, base=base)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        return self.base.increment(_query_in_bfloat16(query), _batch_in_bfloat16(batch), clip)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self.base.per_record(_query_in_bfloat16(query), _batch_in_bfloat16(batch), rows, clip)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        return self.increment(Query((point,)), batch, UNCLIPPED).total


def _query_in_bfloat16(query: Query) -> Query:
    """InputError for a difference of gradients: models of two rounds are often equal in 8 bits."""
    if len(query.points) > 1:
        raise InputError(
            'run.passes = "bfloat16": this algorithm adds differences of gradients at two models, which differ by '
            "less than bfloat16 can tell; leave it out, or take an algorithm of plain gradients such as dp-sgd"
        )
    return query._replace(points=[point.bfloat16() for point in query.points])


def _batch_in_bfloat16(batch: Batch) -> Batch:
    records, weights = batch
    return Batch(Records(records.features.bfloat16(), records.labels), weights)


def make_bfloat16_view(objective: Objective, records: Records) -> Bfloat16View:
    """`objective` with passes in bfloat16.

    Raises:
        InputError: a column of whole numbers beyond 256, such as the words of a sentence, which would become
            others; or a model that cannot compute in bfloat16.
    """
    features = records.features.flatten(0, -2)
    whole = (features == features.round()).all(0) & (features.abs().amax(0) > _MAX_BFLOAT16_INTEGER)
    if whole.any():
        place = int(whole.nonzero()[0])
        raise InputError(
            f'run.passes = "bfloat16": feature {place} has whole numbers beyond {_MAX_BFLOAT16_INTEGER}, which '
            "would become "
            "others in 8 bits; leave it out, or scale the feature"
        )
    short, point = Bfloat16View(objective), objective.initial()
    one = Records(features[:1], torch.zeros_like(records.labels.flatten()[:1]))
    try:
        short.for_batch(BatchLayout(1, ((0, 1),), np.zeros(1, np.int64))).increment(
            Query((point,)), Batch(one, point.new_ones(1)), 1.0
        )
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f'run.passes = "bfloat16": the model cannot compute in it ({reason}); leave it out'
        ) from None
    return short
