"""Losses of linear scores, whose increments are outer products.

A record has features z and label y, and x is the model.  The gradient of a record's loss is δ ⊗ z, with δ the
derivative of the loss by the scores ("output gradient").  An increment Σ_k c_k ∇f(x_k; z, y), for the points x_k
and coefficients c_k of a query, has the same form (Σ_k c_k δ_k) ⊗ z.  Its norm is therefore a product of two
norms, and a clipped sum over a batch of B records is one matrix product.

| class | f(x; z, y) of the score ⟨x, z⟩ | lipschitz |
|---|---|---|
| `LeastSquares` | (⟨x, z⟩ - y)² / 2 | in a ball |
| `LogisticRegression` | log(1 + exp ⟨x, z⟩) - y ⟨x, z⟩ | max‖z‖ |
| `SigmoidRegression` | 1 / (1 + exp ±⟨x, z⟩), smooth and not convex | max‖z‖/4 |
| `PhaseRetrieval`, power 1 | ||⟨x, z⟩| - y| | max‖z‖ |
| `PhaseRetrieval`, power 2 | |⟨x, z⟩² - y²|, weakly convex | none |
| `SoftmaxRegression` | cross-entropy of a score for each class | √2 max‖z‖ |

A `LinearScore` may have a penalty, penalty · ‖x‖²/2 for every record, which the table leaves out.  Its gradient is
clipped together with the loss's, and increments are then materialized as vectors: (..., B, d).

Robust phase retrieval with power 2 is from Duchi & Ruan 2019; with power 1 it is the Lipschitz amplitude form.

A `Population` is a distribution of records whose risk is known, for reports of the excess risk.

Replicates are runs that are computed side by side, on a leading axis.  A `RecordBlock` gathers the records of
several rounds, for replicates that read the same ones, so that values that depend on the records only are computed
once for all of its rounds (`compute_per_block`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from fedpriv.core.replicates import Scalar
from fedpriv.loss.alone import softmax_residuals
from fedpriv.loss.clipping import (
    Clipping,
    clipping_if_certain,
    compute_clipping,
    joint_upper_norm,
    rank_one_bounds,
    upper_norm,
    vector_bounds,
)
from fedpriv.loss.losses import CrossEntropy, LogisticLoss, Loss, SigmoidLoss, SizeError, SquaredError
from fedpriv.loss.objective import (
    Batch,
    Deterministic,
    Increment,
    LinearScores,
    ModelEvaluation,
    OuterProduct,
    Query,
    Records,
)
from fedpriv.participation.orders import Dependence


class Population(Protocol):
    """Distribution of records with a known risk F."""

    def excess_risk(self, point: Tensor) -> Tensor:
        """Excess risk of points (..., d) over the best admissible point, (...)."""
        ...

    def gradient(self, point: Tensor) -> Tensor:
        """Gradient ∇F(x), (..., d)."""
        ...


@dataclass(frozen=True)
class QuadraticPopulation:
    """Population of least squares with E[z zᵀ] = diag(curvature).

    F(x) - F(x*) is (x - x*)ᵀ diag(curvature) (x - x*) / 2, from which `excess_risk` subtracts `min_excess_risk`.
    """

    curvature: Tensor
    """Diagonal of E[z zᵀ], (d,)."""
    minimizer: Tensor
    """Minimizer x* of F over all points, (d,)."""
    min_excess_risk: float = 0.0
    """F - F(x*) at the best admissible point, or 0 if x* is admissible."""

    def excess_risk(self, point: Tensor) -> Tensor:
        difference = point - self.minimizer.to(point.device)
        return (self.curvature.to(point.device) * difference.square()).sum(-1) / 2.0 - self.min_excess_risk

    def gradient(self, point: Tensor) -> Tensor:
        return self.curvature.to(point.device) * (point - self.minimizer.to(point.device))


def quadratic_in_ball(curvature: Tensor, minimizer: Tensor, radius: float) -> QuadraticPopulation:
    """Make the population whose excess risk is relative to the best point of a ball around 0.

    The best point is x* if x* lies in the ball.  Otherwise it is (diag(curvature) + λ)^-1 diag(curvature) x* for
    the λ > 0 that gives this point the norm `radius`.

    Args:
        curvature: Diagonal of E[z zᵀ], (d,), above 0.
        minimizer: Minimizer x* of the risk over all points, (d,).
        radius: Radius of the ball, above 0.
    """
    unconstrained = QuadraticPopulation(curvature, minimizer)
    if float(torch.linalg.vector_norm(minimizer)) <= radius:
        return unconstrained
    # Bisection: at the upper bound of λ the norm is at most the radius, and 200 halvings exhaust float64.
    low, high = 0.0, float(curvature.max() * torch.linalg.vector_norm(minimizer)) / radius
    for _ in range(200):
        middle = (low + high) / 2.0
        best = curvature * minimizer / (curvature + middle)
        low, high = (middle, high) if float(torch.linalg.vector_norm(best)) > radius else (low, middle)
    return QuadraticPopulation(
        curvature, minimizer, float(unconstrained.excess_risk(curvature * minimizer / (curvature + high)))
    )


class LinearObjective(Deterministic, ABC):
    """A loss of the scores X z of a record's features z.

    The parameters are the matrix X (outputs, features), flattened.
    """

    features: int
    """Number of features of a record."""
    dtype: torch.dtype
    """Type of the parameters."""
    penalty: float = 0.0
    """Factor of ‖x‖²/2 in every record's loss."""
    dependence = Dependence.RECORD

    @property
    @abstractmethod
    def loss(self) -> Loss: ...

    @property
    def dimension(self) -> int:
        return self.features

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.dtype)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        if self.penalty:
            vectors, clipped = self._materialize_increments(query, batch, clip)
            return Increment(vectors.sum(-2), clipped)
        output_gradients, features, clipped = self._clip_increments(query, batch, clip)
        # (..., outputs, features).  For one record the broadcast product is the same, and faster.
        total = output_gradients * features if features.shape[-2] == 1 else output_gradients @ features
        return Increment(total.flatten(-2), clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        if self.penalty:
            return self._materialize_increments(query, batch, clip)[0]
        output_gradients, features, _ = self._clip_increments(query, batch, clip)
        # (B, outputs, 1) * (B, 1, features)
        return (output_gradients.mT.unsqueeze(-1) * features.unsqueeze(-2)).flatten(-2)

    @property
    def linear(self) -> LinearScores | None:
        return None if self.penalty else LinearScores(self._scores_by_record, self.loss.output_gradient)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        records, weights = batch
        output_gradient = self.loss.output_gradient(
            self._scores_by_record(point, records.features), records.labels
        )
        total = ((output_gradient * weights.unsqueeze(-1)).mT @ records.features).flatten(-2)
        return total + self.penalty * weights.sum(-1, keepdim=True) * point if self.penalty else total

    def losses(self, point: Tensor, records: Records) -> Tensor:
        values = self.loss.value(self._scores_by_record(point, records.features), records.labels)
        return values + self.penalty * point.square().sum(-1, keepdim=True) / 2.0 if self.penalty else values

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return self._scores_by_record(point, records.features)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """Evaluate the accuracy, other metrics of the class, and the loss, which leaves out the penalty."""
        scores, labels = self._scores_by_record(point, records.features), records.labels
        mean, accuracy = self.loss.value(scores, labels).mean(-1), self.loss.accuracy(scores, labels)
        return ModelEvaluation(mean, accuracy, self._metrics(point, scores, labels))

    def _metrics(self, point: Tensor, scores: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Other metrics of an evaluation, by name."""
        return {}

    def _scores_by_record(self, point: Tensor, features: Tensor) -> Tensor:
        """Scores, (..., B, outputs)."""
        return self._scores(point, features).mT

    def _scores(self, point: Tensor, features: Tensor) -> Tensor:
        """Scores, (..., outputs, B), here of one output, for features (..., B, f)."""
        return (features @ point.unsqueeze(-1)).mT

    def _output_gradient(self, point: Tensor, records: Records) -> Tensor:
        """Derivative of the loss by the scores at `point`, (..., outputs, B)."""
        return self.loss.output_gradient(self._scores_by_record(point, records.features), records.labels).mT

    def _combined_gradients(self, query: Query, records: Records) -> Tensor:
        """Combination Σ_k coefficients[k] · (derivative at points[k]), (..., outputs, B).

        The result is newly allocated, so that the caller may change it in place.
        """
        output_gradients = sum(
            coefficient * self._output_gradient(point, records) for point, coefficient in zip(*query, strict=True)
        )
        assert isinstance(output_gradients, Tensor)
        return output_gradients

    def _clip_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor, Tensor]:
        """Factors of the weighted clipped increments, and the number of clipped records, (...).

        The increment of record b is the outer product of column b of the first factor and row b of the second one.

        Args:
            query: Combination of gradients, at points (..., d).
            batch: Records (..., B, …) and weights, (B,) or (..., B).
            clip: Norm bound, a number or (..., 1).

        Returns:
            Combined output gradients, times weights and clipping factors, (..., outputs, B), the features,
            (..., B, features), and the number.  Both factors are zeros for an increment that is not representable
            (`Clipping`).
        """
        records, weights = batch
        output_gradients = self._combined_gradients(query, records).to(weights.dtype)
        features, clipped = self._compute_clipping(output_gradients, records, weights, clip)
        output_gradients = clipped.zero_unrepresentable(output_gradients, -2).mul_(clipped.factor.unsqueeze(-2))
        return output_gradients, clipped.zero_unrepresentable(features), clipped.clipped_count

    def _compute_clipping(
        self, output_gradients: Tensor, records: Records, weights: Tensor, clip: Scalar
    ) -> tuple[Tensor, Clipping]:
        """Features in the type of the output gradients, and the clipping of their products, for one output.

        The norm of a record's increment is |output gradient| · ‖features‖.  Output gradients are (..., 1, B).
        """
        features = records.features.to(output_gradients.dtype)
        return features, compute_clipping(
            rank_one_bounds(output_gradients.squeeze(-2).abs().double(), upper_norm(features)), weights, clip
        )

    def _materialize_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor]:
        """Weighted clipped increments, (..., B, d), and the number of clipped records, (...).

        The loss has one output and a penalty, so that an increment is (Σ_k c_k δ_k) z + penalty · Σ_k c_k x_k
        before it is clipped.  An increment that is not representable (`Clipping`) is zeros.

        Args:
            query: Combination of gradients, with points x_k (..., d) and coefficients c_k.
            batch: Records (..., B, …) and weights, (B,) or (..., B).
            clip: Norm bound, a number or (..., 1).
        """
        records, weights = batch
        output_gradient = self._combined_gradients(query, records).squeeze(-2)
        # The penalty's gradient is linear in the point, so gradients are combined by combining points.
        combined_point = sum(coefficient * point for point, coefficient in zip(*query, strict=True))
        assert isinstance(combined_point, Tensor)
        vectors = (
            output_gradient.unsqueeze(-1) * records.features + self.penalty * combined_point.unsqueeze(-2)
        ).to(weights.dtype)
        clipped = compute_clipping(vector_bounds(upper_norm(vectors)), weights, clip)
        return clipped.zero_unrepresentable(vectors) * clipped.factor.unsqueeze(-1), clipped.clipped_count


@dataclass(frozen=True)
class LinearScore(LinearObjective, ABC):
    """A loss of one linear score.

    With a `population`, `evaluate` also reports two metrics of the population risk F: excess_risk, over the best
    admissible point, and gradient_norm = ‖∇F(x)‖.
    """

    features: int
    feature_norm: float
    """Upper bound on ‖z‖ over all possible records."""
    population: Population | None = None
    """Distribution of the records, or None if it is not known."""
    dtype: torch.dtype = torch.float64
    penalty: float = 0.0

    def _metrics(self, point: Tensor, scores: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        if self.population is None:
            return {}
        return {
            "excess_risk": self.population.excess_risk(point),
            "gradient_norm": torch.linalg.vector_norm(self.population.gradient(point), dim=-1),
        }


@dataclass(frozen=True)
class LeastSquares(LinearScore):
    """Least squares (⟨x, z⟩ - y)² / 2 with |y| ≤ `label_bound`, for x in the ball of `radius` around 0."""

    label_bound: float = 1.0
    """Upper bound on |y|."""
    radius: float = 1.0
    """Radius of the ball in which the model stays, or inf."""

    loss = SquaredError()

    @property
    def lipschitz(self) -> float:
        """max|⟨x, z⟩ - y| · max‖z‖ in the ball, plus the penalty's part, or inf if the radius is inf.

        The bound does not hold outside of the ball, so `convex` is False.
        """
        return (
            (self.radius * self.feature_norm + self.label_bound) * self.feature_norm + self.penalty * self.radius
            if math.isfinite(self.radius)
            else math.inf
        )

    @property
    def convex_within(self) -> float:
        return self.radius if math.isfinite(self.radius) else 0.0

    @property
    def smoothness(self) -> float:
        """max‖z‖², plus the penalty."""
        return self.feature_norm**2 + self.penalty


@dataclass(frozen=True)
class LogisticRegression(LinearScore):
    """Logistic loss log(1 + exp(⟨x, z⟩)) - y ⟨x, z⟩ with labels y 0 or 1."""

    convex: bool = True
    """Whether the loss is convex with valid constants everywhere.

    The value has to be False with a penalty, whose gradients have no bound that holds everywhere.
    """

    loss = LogisticLoss()

    @property
    def lipschitz(self) -> float:
        """max‖z‖, since the derivative by the score lies in (-1, 1), or inf with a penalty.

        The penalty's gradient grows with the model.
        """
        return math.inf if self.penalty else self.feature_norm

    @property
    def smoothness(self) -> float:
        """max‖z‖²/4, plus the penalty."""
        return self.feature_norm**2 / 4.0 + self.penalty


@dataclass(frozen=True)
class SigmoidRegression(LinearScore):
    """Sigmoid loss s(-m) of the margin m = ±⟨x, z⟩, with s(u) = 1/(1 + e^-u) and labels 0 (-) or 1 (+).

    The loss is smooth, not convex, and robust: a record with a large negative margin has a loss near 1 and almost
    no gradient.  With s = s(m), the derivatives by the score depend in absolute value on s in (0, 1) only:

        |f'| = s (1 - s) ≤ 1/4, at s = 1/2
        |f''| = s (1 - s) |1 - 2s|, the most where 6 s² - 6 s + 1 = 0: 1/(6√3), at s = 1/2 ± 1/(2√3)

    Without a penalty, the gradient is f' z and the Hessian f'' z zᵀ.  Losses then lie in (0, 1) and are 1/2 at
    x = 0, so no model's loss is lower than the initial one by 1/2 or more.

    Guarantee: for records with ‖z‖ ≤ `feature_norm` and no penalty, no gradient's norm exceeds `lipschitz`, and no
    two gradients of one record are farther apart than `smoothness` times the distance of their points, at every
    point, in exact arithmetic.
    """

    loss = SigmoidLoss()

    @property
    def lipschitz(self) -> float:
        """max‖z‖/4, or inf with a penalty, whose gradient grows with the model."""
        return self.feature_norm / 4.0 if not self.penalty else math.inf

    @property
    def smoothness(self) -> float:
        """max‖z‖²/(6√3), plus the penalty."""
        return self.feature_norm**2 / (6.0 * math.sqrt(3.0)) + self.penalty


_SIZE_TOLERANCE = 0.1


@dataclass(frozen=True)
class PhaseRetrieval(LinearObjective):
    """Robust phase retrieval, with sizes y ≥ 0 as labels (`SizeError`).

    The loss is the same at x and -x.  Parameters start at the vector of equal coordinates with norm `start_norm`,
    since 0 is a stationary point.
    """

    features: int
    power: Literal[1, 2]
    """Power of the score and of the label in the loss."""
    feature_norm: float
    """Upper bound on ‖z‖ over all possible records."""
    start_norm: float = 1.0
    """Norm of x_1."""
    dtype: torch.dtype = torch.float32

    outputs = Deterministic.outputs  # refuses: the absolute value of a score predicts the label, not the score
    linear = None  # a client's own steps go through `gradient`

    @property
    def loss(self) -> Loss:
        return SizeError(self.power)

    @property
    def lipschitz(self) -> float:
        return self.feature_norm if self.power == 1 else math.inf

    smoothness = math.inf
    """Infinite, since the gradient jumps at exact predictions, and for power 1 at ⟨x, z⟩ = 0."""

    def initial(self) -> Tensor:
        return torch.full((self.features,), self.start_norm / math.sqrt(self.features), dtype=self.dtype)

    def _metrics(self, point: Tensor, scores: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """The metric sizes_met, the share of records whose label is predicted with an error of 0.1 at most."""
        return {
            "sizes_met": ((scores.squeeze(-1).abs() - labels).abs() <= _SIZE_TOLERANCE).to(scores.dtype).mean(-1)
        }


Part = TypeVar("Part")


class BlockRecords(Records):
    """One round's records, (replicates, B, …), in memory that all replicates share.

    `Records` that are made of slices of these tensors belong to no block.
    """

    shared: Records
    """The same records without the axis of replicates."""
    block: "RecordBlock"
    """Block that holds them."""
    round_index: int
    """Position of the round in the block."""


class RecordBlock:
    """Records (rounds, B, …) that all replicates read, with results computed from them."""

    def __init__(self, records: Records, replicates: int) -> None:
        self._records, self._replicates = records, replicates
        self._computed: dict[Hashable, Sequence[Any]] = {}

    def split_rounds(self) -> Iterator[BlockRecords]:
        """Yield the records of each round, repeated for the replicates in a view, (replicates, B, …)."""
        # By round, features and labels as (B, …), and as (replicates, B, …).
        shared_rounds = zip(*(column.unbind() for column in self._records), strict=True)
        expanded = zip(
            *(
                column.unsqueeze(1).expand(-1, self._replicates, *column.shape[1:]).unbind()
                for column in self._records
            ),
            strict=True,
        )
        for round_index, (columns, shared_columns) in enumerate(zip(expanded, shared_rounds, strict=True)):
            records = BlockRecords(*columns)
            records.shared, records.block, records.round_index = Records(*shared_columns), self, round_index
            yield records

    def compute_part(self, round_index: int, name: Hashable, compute: Callable[[Records], Sequence[Part]]) -> Part:
        """Return one round's part of a computation on the records of all rounds.

        Args:
            round_index: Position of the round in the block.
            name: Name of the computation, which is run once for each name.
            compute: Function from the records of all rounds to one part for each round.
        """
        if name not in self._computed:
            self._computed[name] = compute(self._records)
        part: Part = self._computed[name][round_index]
        return part


def shared_records(records: Records) -> Records:
    """Return records without the axis of replicates if they are in a block, and others unchanged."""
    return records.shared if isinstance(records, BlockRecords) else records


def compute_per_block(records: Records, name: Hashable, compute: Callable[[Records], Tensor]) -> Tensor:
    """Compute numbers for each record, once for all rounds of a block.

    Args:
        records: Records of one round.
        name: Name of the computation, unique among those of a block.
        compute: Function from records to the numbers, whose first axes are those before the records' axis B.  The
            records are those of one round, or of all rounds of a block, (rounds, B, …).

    Returns:
        The result of `compute` for the round.  For records in a block it has no axis of replicates.
    """
    return (
        compute(records)
        if not isinstance(records, BlockRecords)
        else records.block.compute_part(
            records.round_index, name, lambda block_records: compute(block_records).unbind()
        )
    )


def _max_feature_norm(records: Records, dtype: torch.dtype) -> float:
    """Upper bound on the norms ‖z‖ of the features of all records of a round, after conversion to `dtype`.

    For records in a block the bounds of all rounds are computed at once, and stored for the other rounds.

    Args:
        records: Records of the round, one or more.
        dtype: Type to which features are converted.
    """
    if isinstance(records, BlockRecords):
        return records.block.compute_part(
            records.round_index,
            ("longest", dtype),
            lambda block_records: list[float](_feature_norms(block_records, dtype).amax(-1).tolist()),
        )
    # The norm of a single record takes fewer calls.
    return (
        joint_upper_norm(records.features.to(dtype))
        if records.features.numel() == records.features.shape[-1]
        else float(_feature_norms(records, dtype).max())
    )


def _feature_norms(records: Records, dtype: torch.dtype) -> Tensor:
    """Upper bound on the norm of each record's features, (..., B)."""
    return upper_norm(records.features.to(dtype))


@dataclass(frozen=True)
class SoftmaxRegression(LinearObjective):
    """Cross-entropy of a linear classifier.

    The parameters are `classes` rows of `features` weights, flattened.  The last feature is 1 in every record, for
    the bias.
    """

    features: int
    classes: int
    """Number of classes, each with a score."""
    feature_norm: float
    """Upper bound on ‖z‖ over all possible records."""
    dtype: torch.dtype = torch.float32
    convex: bool = True
    """Whether the loss is convex with valid constants everywhere."""
    denominator: int | None = None
    """Denominator of the features in sums of integers, or None if increments are formed one by one.

    Features are rounded to multiples of 1/`denominator`.  Bytes / 255 stay exact with 255.
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
    def outer(self) -> OuterProduct | None:
        if self.denominator is None:
            return None
        # Rounding to multiples of 1/denominator moves a record by at most √features/2 units.
        return OuterProduct(
            softmax_residuals,
            self.classes,
            self.denominator,
            math.ceil(self.denominator * self.feature_norm) + math.isqrt(self.features) + 1,
        )

    def _scores(self, point: Tensor, features: Tensor) -> Tensor:
        return self._scores_of_columns(point, features.mT)

    def _scores_of_columns(self, point: Tensor, columns: Tensor) -> Tensor:
        """Scores, (..., classes, B), for features as columns, (..., f, B)."""
        return point.view(*point.shape[:-1], self.classes, self.features) @ columns

    def _combined_gradients(self, query: Query, records: Records) -> Tensor:
        """Combination Σ_k coefficients[k] (softmax(scores at points[k]) - onehot), (..., classes, B)."""
        columns = compute_per_block(records, "columns", lambda block_records: block_records.features.mT)
        # Records that replicates share take one product.
        scores = [self._scores_of_columns(point, columns) for point in query.points]
        return _combined_residuals(scores, query.coefficients, records)

    def _compute_clipping(
        self, output_gradients: Tensor, records: Records, weights: Tensor, clip: Scalar
    ) -> tuple[Tensor, Clipping]:
        """Features in the type of the output gradients, and the clipping of their products.

        The norm of a record's increment is ‖output gradient‖ · ‖features‖.  The norms of single increments are
        not computed if a cheap bound for all of them shows that no increment is clipped.

        Args:
            output_gradients: Combined output gradients, (..., classes, B).
            records: Records of a round.
            weights: Weights, (B,) or (..., B).
            clip: Norm bound, a number or (..., 1).

        Returns:
            The features, (..., B, f), or (B, f) if all replicates share them, and the clipping factors with the
            number of clipped records.
        """
        dtype = output_gradients.dtype
        clipped = clipping_if_certain(output_gradients, lambda: _max_feature_norm(records, dtype), weights, clip)
        if clipped is None:
            feature_norms = compute_per_block(
                records, ("norm", dtype), lambda block_records: _feature_norms(block_records, dtype)
            )
            clipped = compute_clipping(
                rank_one_bounds(upper_norm(output_gradients, -2), feature_norms), weights, clip
            )
        return shared_records(records).features.to(dtype), clipped


def _combined_residuals(scores: Sequence[Tensor], coefficients: Sequence[float], records: Records) -> Tensor:
    """Combination Σ_k coefficients[k] (softmax(scores[k]) - onehot), (..., classes, B).

    Scores at a point are (..., classes, B), too: sums over a few classes go through memory in order.
    """
    residual = scores[0].softmax(-2).mul_(coefficients[0])
    for point_scores, coefficient in zip(scores[1:], coefficients[1:], strict=True):
        residual.add_(point_scores.softmax(-2), alpha=coefficient)
    classes = residual.shape[-2]
    return residual.sub_(
        compute_per_block(records, ("right", classes), lambda block_records: _one_hot(block_records, classes)),
        alpha=sum(coefficients),
    )


def _one_hot(records: Records, classes: int) -> Tensor:
    """One-hot vectors of the records' classes, (..., classes, B)."""
    features = records.features
    return torch.embedding(
        _class_identity(classes, features.dtype, features.device), records.labels
    ).mT.contiguous()


@lru_cache(maxsize=16)
def _class_identity(classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Identity matrix, whose rows are the unit vectors of the classes.  The matrix must not be written into."""
    with torch.inference_mode(False):  # the cached matrix outlives the run that creates it
        return torch.eye(classes, dtype=dtype, device=device)
