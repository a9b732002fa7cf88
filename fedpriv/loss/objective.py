"""The protocol of an objective: clipped sums of records' answers to a query, and evaluations.

| | |
|---|---|
| `Query`, `Batch` | gradients to combine; records to sum over, with their weights |
| `Objective` | the protocol: a loss over flat parameters |
| `Deterministic` | base class of losses without public coins |
| `View` | base class of wrappers that delegate to another objective |
| `EvaluationView` | base class of views that change evaluations only |
| `fast_paths` | the shortcuts that a loss may have as attributes |
| `Bfloat16View` | passes through a model in bfloat16 |

An increment is a record's clipped contribution to a sum: its gradient, or a combination of its gradients at the
points of a query.  Public coins are public random numbers that an increment depends on, such as directions or
shifts of pictures.  Leading axes "..." of points and records are those of replicates, which are runs that are
computed side by side, or of units of protection.

`Bfloat16View` computes gradients at models and from features that are rounded to 8 significant bits.  Several
labels of a record lie behind its features, and are rounded with them.  Norms, clips and sums stay in the type of
the weights, since a guarantee depends on them (mixed precision as in Micikevicius et al. 2018).
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
"""Norm bound where nothing is to be clipped, representable in float32."""


class BatchLayout(NamedTuple):
    """Silos and row indices of a batch's records, without their content, by which public coins are keyed."""

    t: int
    """Round."""
    silo_sizes: tuple[tuple[int, int], ...]
    """Silos in the order of their records, as pairs (number, records)."""
    row_indices: NDArray[np.int64]
    """Row index of each record in its silo, (B,) or (replicates, B).

    There is an axis of replicates if they read different rows.
    """

    @property
    def silo_ids(self) -> NDArray[np.int64]:
        """Silo of each record, (B,)."""
        numbers, counts = zip(*self.silo_sizes, strict=True) if self.silo_sizes else ((), ())
        return np.repeat(np.array(numbers, np.int64), counts)

    def with_rows(self, rows: NDArray[np.int64]) -> "BatchLayout":
        """Replace the row indices of a batch of one silo by others (B,), in the same round."""
        ((silo, _),) = self.silo_sizes
        return BatchLayout(self.t, ((silo, len(rows)),), rows)


class Records(NamedTuple):
    """Features (..., B, features) and labels (..., B) of a batch.

    Labels are integers for classes, and floats for a regression.  Several labels of a record lie behind its
    features (`FeatureLayout`), until `LabelledView` makes labels (..., B, *shape) of them.
    """

    features: Tensor
    """Features, (..., B, features)."""
    labels: Tensor
    """Labels, (..., B) or (..., B, *shape)."""

    @property
    def record_axis(self) -> int:
        """Axis of the records, in features and labels."""
        return self.features.dim() - 2


class Query(NamedTuple):
    """Combination of gradients that every record is asked for.

    The combination is Σ_k coefficients[k] ∇f(points[k]; record).
    """

    points: Sequence[Tensor]
    """Points (..., d), whose leading axes are replicates or units."""
    coefficients: Sequence[float] = (1.0,)
    """Coefficient of each point, by default for the gradient at one point."""


class Batch(NamedTuple):
    """Records that an increment is summed over, with their weights in the sum."""

    records: Records
    """Records (..., B, …), with the leading axes of the query's points."""
    weights: Tensor
    """Weights, (B,) or (..., B), in the type of clipping factors and sums.

    The type may be wider than that of the points.  A record of weight 0 is absent.
    """


class Increment(NamedTuple):
    """A weighted sum of clipped increments, (..., d), and the number of clipped records, (...)."""

    total: Tensor
    """Sum, (..., d)."""
    clipped_count: Tensor
    """Number of clipped records, (...)."""


class ModelEvaluation(NamedTuple):
    """Mean loss and share of right predictions of models on test records, each of shape (...)."""

    loss: Tensor
    """Mean loss over the records, with natural logarithms."""
    accuracy: Tensor | None
    """Share of right predictions in [0, 1], or None if predictions are neither right nor wrong."""
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    """Other metrics of the objective by name, (...) each."""

    def to_metrics(self) -> dict[str, Tensor]:
        """Return all metrics by the names that results have, with an accuracy of NaN where the loss is NaN."""
        return {
            "test_loss": self.loss,
            # Right predictions among outputs of NaN are chance.
            **(
                {}
                if self.accuracy is None
                else {"test_accuracy": self.accuracy.where(~self.loss.isnan(), torch.nan)}
            ),
            **self.metrics,
        }


class OuterProduct(NamedTuple):
    """Factors of the increments of linear scores, which are residual (classes,) ⊗ features.

    Features are rounded to integer multiples of 1/`denominator`.
    """

    residuals: Callable[[IntegerScores, NDArray[np.int64]], Floats]
    """Derivative of the loss by the scores, (B, classes), from scores and labels (B,).

    """
    classes: int
    """Number of scores of a record."""
    denominator: int
    """Factor of the features before they are rounded to integers."""
    max_feature_norm: int
    """Public upper bound on the norm of a record's integer features."""


class LinearScores(NamedTuple):
    """A loss of linear scores, whose gradient is an output gradient (outputs,) ⊗ features."""

    compute_scores: Callable[[Tensor, Tensor], Tensor]
    """Scores (..., B, outputs), linear in the point, from point (..., d) and features (..., B, f)."""
    output_gradient: Callable[[Tensor, Tensor], Tensor]
    """Derivative of the loss by the scores, (..., B, outputs), from scores and labels (..., B)."""


class Objective(Protocol):
    """A loss with per-record gradients over flat parameters of length `dimension`."""

    @property
    def dimension(self) -> int: ...

    @property
    def lipschitz(self) -> float:
        """Bound G on the norm of one record's gradient, or inf if none is known.

        The bound may hold in the ball of `convex_within` only.
        """
        ...

    @property
    def smoothness(self) -> float:
        """Bound L on the Lipschitz constant of one record's gradient, or inf if none is known."""
        ...

    @property
    def convex(self) -> bool:
        """Whether every record's loss is convex, with `lipschitz` and `smoothness` valid at every point.

        The value is False if convexity is not known.
        """
        ...

    @property
    def convex_within(self) -> float:
        """Radius of a ball around 0 in which every record's loss is convex and the constants are valid.

        The run has to start in its center.  The radius is inf if all of this holds everywhere, and 0 if it is not
        known of any ball.  Bounds on the excess risk and the guarantee of phased-sgd depend on it.
        """
        ...

    def initial(self) -> Tensor:
        """Return x_1, of shape (d,)."""
        ...

    @property
    def dependence(self) -> Dependence:
        """Facts on which a record's increment depends.

        A class that does not declare them may depend on anything.
        """
        ...

    def for_batch(self, slots: BatchLayout) -> "Objective":
        """Return the objective for a batch layout, or this one if its increments do not depend on the layout."""
        ...

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum weights[b] · clip(query of record b, norm `clip`) over the records b of a batch.

        Gradients may be computed in the type of the points.  The total has the type of the weights.

        Args:
            query: Combination of gradients.
            batch: Records, one or more, and their weights.
            clip: Norm bound, a number or (..., 1).

        Returns:
            The sum, and the number of clipped records.  A record of weight above 0 whose increment is not finite
            adds nothing and counts as clipped.

        Guarantee: one record moves the sum by at most weights[b] · clip under zero-out and twice that under
        replace-one, for a clip of 2^-40 to 2^40 and any points, records and loss, rounding included but for that
        of the other records' sum.
        Exceptions are views that say so: those whose increments are no sums over records (`QuantileClip`,
        `LocalSteps`, `LocalTraining`), and `SummedScores`, which has a bound of its own in place of `clip`.
        """
        ...

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        """Compute the weighted clipped increment of every record, (B, d), in the weights' type.

        Row b is weights[b] · clip(query of record b, norm `clip`).

        Args:
            query: Combination of gradients, at points without leading axes.
            batch: Records (B, …) and their weights.
            rows: Row index of each record in the silo of the batch layout, (B,).
            clip: Norm bound.

        Returns:
            The increments, with zeros for a record whose increment is not finite.

        Guarantee: row b depends on what `dependence` declares and on public values alone, but for rounding.
        """
        ...

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        """Sum weighted gradients without clipping, (..., d), for training inside of a unit.

        The sum is Σ_b weights[b] · ∇f(point; record b).  A record may make the sum invalid, for its own leading
        axes only.

        Args:
            point: Models, (..., d).
            batch: Records and their weights.
        """
        ...

    def losses(self, point: Tensor, records: Records) -> Tensor:
        """Compute the loss of every record, (..., B).

        Args:
            point: Models, (..., d).
            records: Records, (B, …), or (..., B, …) with the leading axes of `point`.

        Raises:
            InputError: The objective computes no losses record by record.
        """
        ...

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        """Compute the model's outputs for every record, (..., B, …).

        Outputs are, for example, logits of classes, one logit of class 1 against 0, or a regression's prediction.

        Args:
            point: Models, (..., d).
            records: Records without leading axes.

        Raises:
            InputError: The model makes no predictions.
        """
        ...

    def evaluations(self, points: int) -> int:
        """Number of gradients, or of values of the loss, that one record's increment at `points` points takes."""
        ...

    def extra_values(self, points: int, rows: int = 1) -> int:
        """Number of values, such as directions or copies, that exist beside the increments of one replicate.

        Args:
            points: Number of points of the query.
            rows: Number of records whose increments exist at a time.
        """
        ...

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """Compute loss, accuracy and other metrics of models.

        Args:
            point: Models, (..., d).
            records: Test records without leading axes.
        """
        ...


class Deterministic(ABC):
    """Base class of objectives without public coins."""

    convex: bool = False

    @abstractmethod
    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment: ...

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        """Sum gradients as increments with the clip `UNCLIPPED`."""
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
"""Classes with a proof of their `diameter`.  The proof does not hold for subclasses."""
SUMMED_BY_CELL: set[type] = set()
"""Classes whose increments are added cell by cell, by their own `sum_integer_vectors`."""


def is_shipped(kind: object) -> bool:
    """Whether a class or a function is part of fedpriv, by the name of its module.

    Proofs hold for these classes only, even if other classes are added to the sets above.
    """
    return kind.__module__.startswith("fedpriv.")


class FastPaths(NamedTuple):
    """Faster computations of a loss's increments, each None if the loss lacks it."""

    outer: OuterProduct | None
    """Increments that factor, with integer features."""
    linear: LinearScores | None
    """Linear scores, if the loss is a function of linear scores only."""


def fast_paths(objective: Objective) -> FastPaths:
    """Find the attributes `outer` and `linear` of a loss, behind views that change evaluations only.

    Other views may have other increments than their base.
    """
    while isinstance(objective, EvaluationView):
        objective = objective.base
    return FastPaths(getattr(objective, "outer", None), getattr(objective, "linear", None))


@dataclass(frozen=True)
class View:
    """A loss that delegates its methods to `base`, except for those that a subclass overrides.

    A subclass declares on what its increments depend (`dependence`).  `for_batch` returns the objective of `base`
    without the view, so that a subclass with increments of its own has to override it.
    """

    base: Objective
    """Objective that methods are delegated to."""

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


def find_innermost_objective(objective: Objective) -> Objective:
    """Find the objective behind all views, or return an objective that is no view."""
    while isinstance(objective, View):
        objective = objective.base
    return objective


@dataclass(frozen=True)
class RecordView(View):
    """View in which a record's increment depends on the same facts as that of `base`."""

    @property
    def dependence(self) -> Dependence:
        return declared_dependence(self.base)


@dataclass(frozen=True)
class EvaluationView(RecordView):
    """View that overrides evaluations only: increments are those of `base`, bit for bit."""


_MAX_BFLOAT16_INTEGER = 256
"""Largest integer up to which bfloat16 represents every integer."""


@dataclass(frozen=True)
class Bfloat16View(RecordView):
    """`base` with gradients at models and from features that are rounded to bfloat16.

    Evaluations are in the type of the model.

    Guarantee: as for any objective, since an increment has the type of the weights before its norm is computed:
    gradients differ from those of `base`, and each increment is clipped as the vector that is added.  The loss
    counts as neither convex nor smooth, since a gradient jumps where the model is rounded to another number, so
    that no privacy may rest on contraction or smoothness.  Differences of gradients are refused.  `lipschitz` is
    that of `base`, which gradients may exceed by the rounding.
    """

    convex, convex_within, smoothness = False, 0.0, math.inf

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
    """Round the point of a query to bfloat16.

    Raises:
        InputError: The query combines gradients at several points.
    """
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
    """Make the view of `objective` with gradients computed in bfloat16, after two checks.

    No column of integers, such as tokens or counts, may have an integer above 256 in absolute value, since
    bfloat16 may round it to another.  The increment of one record is computed as a trial.

    Args:
        objective: Objective of the run.
        records: Records to search for integers that bfloat16 may round, one or more.  The first is the trial's.

    Raises:
        InputError: A column has integers that may be rounded to others, or the model cannot compute in bfloat16.
    """
    features = records.features.flatten(0, -2)
    has_large_integers = (features == features.round()).all(0) & (features.abs().amax(0) > _MAX_BFLOAT16_INTEGER)
    if has_large_integers.any():
        raise InputError(
            f'run.passes = "bfloat16": feature {int(has_large_integers.nonzero()[0])} has whole numbers beyond '
            f"{_MAX_BFLOAT16_INTEGER}, which would become others in 8 bits; leave it out, or scale the feature"
        )
    # One record shows whether the operations of the model exist in bfloat16.  Its label is 0, and if there are
    # several labels, they lie behind its features.
    view, point = Bfloat16View(objective), objective.initial()
    probe = Records(features[:1], torch.zeros_like(records.labels.flatten()[:1]))
    try:
        view.for_batch(BatchLayout(1, ((0, 1),), np.zeros(1, np.int64))).increment(
            Query((point,)), Batch(probe, point.new_ones(1)), 1.0
        )
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f'run.passes = "bfloat16": the model cannot compute in it ({reason}); leave it out'
        ) from None
    return view
