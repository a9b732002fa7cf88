"""Losses of linear scores, in closed form.

A gradient is slopes ⊗ features: the derivatives of the loss by the scores, times the feature vector.  An increment
is that too, with the combination of the slopes at its points: its norm is a product of two norms, and a clipped
sum over a batch one matrix product.  With a penalty every record's loss has penalty · ‖x‖²/2 beside it, in the
clip; increments are then formed as vectors.  Softmax regression is such a loss too (softmax.py).

| class | f(x; z, y) of the score ⟨x, z⟩ | lipschitz |
|---|---|---|
| `LeastSquares` | (⟨x, z⟩ - y)² / 2 | in a ball |
| `LogisticRegression` | log(1 + exp ⟨x, z⟩) - y ⟨x, z⟩ | max‖z‖ |
| `SigmoidRegression` | 1 / (1 + exp ±⟨x, z⟩), smooth and not convex | max‖z‖/4 |
| `PhaseRetrieval`, power 1 | ||⟨x, z⟩| - y| | max‖z‖ |
| `PhaseRetrieval`, power 2 | |⟨x, z⟩² - y²|, weakly convex | none: clipping bounds it |

Sources of robust phase retrieval: Duchi & Ruan 2019 (power 2); the amplitude form is its Lipschitz sibling.

A `Population` is a distribution of records whose risk is known: evaluations report it, for checks against theory.

Softmax regression: a linear objective with classes, and blocks of records that replicates share.

A `Block` gathers the records of several rounds, for replicates that read the same ones.  What depends on records
alone is computed once for all rounds of a block: an objective asks for it with `of_records`, and gets the same
numbers for records that are no part of a block.
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
    """The risk over the distribution of records, not over a sample."""

    def excess_risk(self, point: Tensor) -> Tensor:
        """F(x) - F(x*) for points (..., d), shape (...)."""
        ...

    def gradient(self, point: Tensor) -> Tensor:
        """∇F(x), (..., d)."""
        ...


@dataclass(frozen=True)
class QuadraticPopulation:
    """F(x) - F(x*) = (x - x*)ᵀ diag(curvature) (x - x*) / 2, of least squares with E[z zᵀ] = diag(curvature)."""

    curvature: Tensor
    minimizer: Tensor
    min_excess_risk: float = 0.0
    """F - F(x*) of the best point that is allowed, if x* is not: excess is counted from there."""

    def excess_risk(self, point: Tensor) -> Tensor:
        return (self.curvature * (point - self.minimizer).square()).sum(-1) / 2.0 - self.min_excess_risk

    def gradient(self, point: Tensor) -> Tensor:
        return self.curvature * (point - self.minimizer)


def quadratic_in_ball(curvature: Tensor, minimizer: Tensor, radius: float) -> QuadraticPopulation:
    """The population whose excess risk is counted from the best point of the ball of `radius` around 0.

    That point is (diag(curvature) + λ)^-1 diag(curvature) x* for the λ ≥ 0 that gives it the norm `radius`.
    """
    free = QuadraticPopulation(curvature, minimizer)
    if float(torch.linalg.vector_norm(minimizer)) <= radius:
        return free
    low, high = 0.0, float(curvature.max() * torch.linalg.vector_norm(minimizer)) / radius
    for _ in range(200):
        middle = (low + high) / 2.0
        best = curvature * minimizer / (curvature + middle)
        low, high = (middle, high) if float(torch.linalg.vector_norm(best)) > radius else (low, middle)
    best = curvature * minimizer / (curvature + high)
    return QuadraticPopulation(curvature, minimizer, float(free.excess_risk(best)))


class LinearObjective(Deterministic, ABC):
    """A loss of the scores X z of a record with features z; parameters are the rows of X, flattened.

    `_scores` says how scores are laid out: records last, (..., outputs, B).
    """

    features: int
    dtype: torch.dtype
    penalty: float = 0.0
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
        slopes, features, clipped = self._clip_increments(query, batch, clip)
        return Increment((slopes @ features).flatten(-2), clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        if self.penalty:
            return self._materialize_increments(query, batch, clip)[0]
        slopes, features, _ = self._clip_increments(query, batch, clip)
        return (slopes.mT.unsqueeze(-1) * features.unsqueeze(-2)).flatten(-2)

    @property
    def linear(self) -> LinearScores | None:
        return None if self.penalty else LinearScores(self._scores_by_record, self.loss.output_gradient)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        records, weights = batch
        slope = self.loss.output_gradient(self._scores_by_record(point, records.features), records.labels)
        total = ((slope * weights.unsqueeze(-1)).mT @ records.features).flatten(-2)
        return total + self.penalty * weights.sum(-1, keepdim=True) * point if self.penalty else total

    def losses(self, point: Tensor, records: Records) -> Tensor:
        values = self.loss.value(self._scores_by_record(point, records.features), records.labels)
        return values + self.penalty * point.square().sum(-1, keepdim=True) / 2.0 if self.penalty else values

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return self._scores_by_record(point, records.features)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """The loss is reported without the penalty."""
        scores, labels = self._scores_by_record(point, records.features), records.labels
        mean, accuracy = self.loss.value(scores, labels).mean(-1), self.loss.accuracy(scores, labels)
        return ModelEvaluation(mean, accuracy, self._metrics(point, scores, labels))

    def _metrics(self, point: Tensor, scores: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Other metrics of an evaluation, by name."""
        return {}

    def _scores_by_record(self, point: Tensor, features: Tensor) -> Tensor:
        """The scores, (..., B, outputs)."""
        return self._scores(point, features).mT

    def _scores(self, point: Tensor, features: Tensor) -> Tensor:
        """(..., outputs, B), of one output unless a class says otherwise."""
        return (features @ point.unsqueeze(-1)).mT

    def _output_gradient(self, point: Tensor, records: Records) -> Tensor:
        """The derivative of the loss by the scores at `point`, (..., outputs, B)."""
        return self.loss.output_gradient(self._scores_by_record(point, records.features), records.labels).mT

    def _combined_gradients(self, query: Query, records: Records) -> Tensor:
        """Their combination, Σ_k coefficients[k] · the derivative at points[k], in memory of its own."""
        slopes = sum(
            coefficient * self._output_gradient(point, records) for point, coefficient in zip(*query, strict=True)
        )
        assert isinstance(slopes, Tensor)
        return slopes

    def _clip_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor, Tensor]:
        """Slopes (..., outputs, B) and features that multiply to increments, and how many were clipped."""
        records, weights = batch
        slopes = self._combined_gradients(query, records).to(weights.dtype)
        features, clipped = self._compute_clipping(slopes, records, weights, clip)
        features, slopes = clipped.zero_unrepresentable(features), clipped.zero_unrepresentable(slopes, -2)
        return slopes.mul_(clipped.factor.unsqueeze(-2)), features, clipped.clipped_count

    def _compute_clipping(
        self, slopes: Tensor, records: Records, weights: Tensor, clip: Scalar
    ) -> tuple[Tensor, Clipping]:
        """The features in the slopes' type, and what clips their products; of one output."""
        features = records.features.to(slopes.dtype)
        return features, compute_clipping(
            rank_one_bounds(slopes.squeeze(-2).abs().double(), upper_norm(features)), weights, clip
        )

    def _materialize_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor]:
        """Weights times the clipped increments of one output with a penalty, (..., B, d), and how many were."""
        records, weights = batch
        slope = self._combined_gradients(query, records).squeeze(-2)
        pull = sum(coefficient * point for point, coefficient in zip(*query, strict=True))
        assert isinstance(pull, Tensor)
        vectors = (slope.unsqueeze(-1) * records.features + self.penalty * pull.unsqueeze(-2)).to(weights.dtype)
        clipped = compute_clipping(vector_bounds(upper_norm(vectors)), weights, clip)
        return clipped.zero_unrepresentable(vectors) * clipped.factor.unsqueeze(-1), clipped.clipped_count


@dataclass(frozen=True)
class LinearScore(LinearObjective, ABC):
    """A loss of one linear score; `feature_norm` bounds ‖z‖ over all records that can occur.

    With a `population`, `evaluate` also reports the metrics excess_risk = F(x) - F(x*) and
    gradient_norm = ‖∇F(x)‖ of the population risk F.
    """

    features: int
    feature_norm: float
    population: Population | None = None
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
    """(⟨x, z⟩ - y)² / 2 with |y| ≤ `label_bound`, for x in the ball of `radius` around 0."""

    label_bound: float = 1.0
    radius: float = 1.0

    loss = SquaredError()

    @property
    def lipschitz(self) -> float:
        """max|⟨x, z⟩ - y| · max‖z‖ in the ball; outside it no bound holds, so `convex` is not claimed."""
        return (
            self.radius * self.feature_norm + self.label_bound
        ) * self.feature_norm + self.penalty * self.radius

    @property
    def convex_within(self) -> float:
        return self.radius if math.isfinite(self.radius) else 0.0

    @property
    def smoothness(self) -> float:
        """max‖z‖², and the penalty."""
        return self.feature_norm**2 + self.penalty


@dataclass(frozen=True)
class LogisticRegression(LinearScore):
    """log(1 + exp(⟨x, z⟩)) - y ⟨x, z⟩ with labels y 0 or 1."""

    convex: bool = True
    """To be False with a penalty: no bound on the gradients holds at every point then."""

    loss = LogisticLoss()

    @property
    def lipschitz(self) -> float:
        """max‖z‖: the derivative by the score lies in (-1, 1); inf with a penalty, which grows with the model."""
        return math.inf if self.penalty else self.feature_norm

    @property
    def smoothness(self) -> float:
        """max‖z‖²/4, and the penalty."""
        return self.feature_norm**2 / 4.0 + self.penalty


@dataclass(frozen=True)
class SigmoidRegression(LinearScore):
    """s(-m) of the margin m = ±⟨x, z⟩, with s(u) = 1/(1 + e^-u) and labels 0 (-) or 1 (+).

    Smooth, not convex, and robust: a record that is wrong by far has a loss of nearly 1 and hardly any gradient.
    With s = s(m) the derivatives by the score have sizes that depend on s in (0, 1) alone:

        |f'| = s (1 - s) ≤ 1/4, at s = 1/2
        |f''| = s (1 - s) |1 - 2s|, the most where 6 s² - 6 s + 1 = 0: 1/(6√3), at s = 1/2 ± 1/(2√3)

    The gradient is f' z and the Hessian f'' z zᵀ.  Losses lie in (0, 1) and are 1/2 at x = 0: no model's is
    lower than the start's by 1/2 or more, `--gap 0.5`.

    Guarantee: for records with ‖z‖ ≤ `feature_norm`, no gradient's norm exceeds `lipschitz`, and no two gradients
    of one record are farther apart than `smoothness` times their points, at every point, in exact arithmetic.
    """

    loss = SigmoidLoss()

    @property
    def lipschitz(self) -> float:
        """max‖z‖/4."""
        return self.feature_norm / 4.0

    @property
    def smoothness(self) -> float:
        """max‖z‖²/(6√3)."""
        return self.feature_norm**2 / (6.0 * math.sqrt(3.0))


_SIZE_TOLERANCE = 0.1


@dataclass(frozen=True)
class PhaseRetrieval(LinearObjective):
    """Labels are sizes b ≥ 0; `feature_norm` bounds ‖z‖.  At x and -x the loss is the same.

    Parameters start at the vector of equal coordinates with norm `start`: 0 is a stationary point.
    """

    features: int
    power: Literal[1, 2]
    feature_norm: float
    start_norm: float = 1.0
    dtype: torch.dtype = torch.float32

    outputs = Deterministic.outputs  # a score predicts no label, its size does
    linear = None  # a client's own steps go through `gradient`

    @property
    def loss(self) -> Loss:
        return SizeError(self.power)

    @property
    def lipschitz(self) -> float:
        return self.feature_norm if self.power == 1 else math.inf

    smoothness = math.inf
    """The gradient jumps where a prediction is exact, and for power 1 where ⟨x, z⟩ = 0."""

    def initial(self) -> Tensor:
        return torch.full((self.features,), self.start_norm / math.sqrt(self.features), dtype=self.dtype)

    def _metrics(self, point: Tensor, scores: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """The share of records whose size is met to within 0.1."""
        return {
            "sizes_met": ((scores.squeeze(-1).abs() - labels).abs() <= _SIZE_TOLERANCE).to(scores.dtype).mean(-1)
        }


Part = TypeVar("Part")


class BlockRecords(Records):
    """One round's records, (replicates, B, …), with one memory for all replicates.

    What is made of them, a part for instance, is plain `Records` again.
    """

    shared: Records
    """The same without the axis of replicates."""
    block: "RecordBlock"
    round_index: int


class RecordBlock:
    """Records (rounds, B, …) of which every replicate reads all."""

    def __init__(self, records: Records, replicates: int) -> None:
        self._records, self._replicates = records, replicates
        self._computed: dict[Hashable, Sequence[Any]] = {}

    def split_rounds(self) -> Iterator[BlockRecords]:
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
            records = BlockRecords(*columns)
            records.shared, records.block, records.round_index = Records(*single), self, place
            yield records

    def compute_part(self, place: int, name: Hashable, compute: Callable[[Records], Sequence[Part]]) -> Part:
        """A round's part of what `compute` makes of the records of all rounds."""
        if name not in self._computed:
            self._computed[name] = compute(self._records)
        part: Part = self._computed[name][place]
        return part


def shared_records(records: Records) -> Records:
    """Without the axis of replicates where all of them read the same records, and share their memory."""
    return records.shared if isinstance(records, BlockRecords) else records


def compute_per_block(records: Records, name: Hashable, compute: Callable[[Records], Tensor]) -> Tensor:
    """What `compute` makes of `once(records)`: numbers for each record by itself, under a `name` of their own."""
    return (
        compute(records)
        if not isinstance(records, BlockRecords)
        else records.block.compute_part(records.round_index, name, lambda several: compute(several).unbind())
    )


def _max_feature_norm(records: Records, dtype: torch.dtype) -> float:
    """At least the norm of the features of each record, (B, f), as `upper_norm` bounds them."""
    if isinstance(records, BlockRecords):
        longest: float = records.block.compute_part(
            records.round_index,
            ("longest", dtype),
            lambda several: _feature_norms(several, dtype).amax(-1).tolist(),
        )
        return longest
    if records.features.numel() == records.features.shape[-1]:
        return joint_upper_norm(records.features.to(dtype))
    return float(_feature_norms(records, dtype).max())


def _feature_norms(records: Records, dtype: torch.dtype) -> Tensor:
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
    denominator: int | None = None
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
    def outer(self) -> OuterProduct | None:
        if self.denominator is None:
            return None
        return OuterProduct(
            softmax_residuals,
            self.classes,
            self.denominator,
            math.ceil(self.denominator * self.feature_norm) + math.isqrt(self.features) + 1,
        )

    def _scores(self, point: Tensor, features: Tensor) -> Tensor:
        # Weights on the left: half the time, and records that all replicates share become one product.
        return point.view(*point.shape[:-1], self.classes, self.features) @ features.mT

    def _combined_gradients(self, query: Query, records: Records) -> Tensor:
        """Σ_k coefficients[k] (softmax(scores at points[k]) - onehot), (..., classes, B)."""
        features = shared_records(records).features
        return _combined_residuals(
            [self._scores(point, features) for point in query.points], query.coefficients, records
        )

    def _compute_clipping(
        self, slopes: Tensor, records: Records, weights: Tensor, clip: Scalar
    ) -> tuple[Tensor, Clipping]:
        kind = slopes.dtype
        clipped = clipping_if_certain(slopes, lambda: _max_feature_norm(records, kind), weights, clip)
        if clipped is None:
            seen = compute_per_block(records, ("norm", kind), lambda several: _feature_norms(several, kind))
            clipped = compute_clipping(rank_one_bounds(upper_norm(slopes, -2), seen), weights, clip)
        return shared_records(records).features.to(kind), clipped


def _combined_residuals(scores: Sequence[Tensor], coefficients: Sequence[float], records: Records) -> Tensor:
    """Σ_k coefficients[k] (softmax(scores[k]) - onehot), (..., classes, B), from scores of that shape.

    Records come last: sums over a handful of classes then go through memory in order, at a tenth of the time.
    """
    residual = scores[0].softmax(-2).mul_(coefficients[0])
    for of_point, coefficient in zip(scores[1:], coefficients[1:], strict=True):
        residual.add_(of_point.softmax(-2), alpha=coefficient)
    classes = residual.shape[-2]
    return residual.sub_(
        compute_per_block(records, ("right", classes), lambda several: _one_hot(several, classes)),
        alpha=sum(coefficients),
    )


def _one_hot(records: Records, classes: int) -> Tensor:
    """1 for each record's own class, (..., classes, B)."""
    features = records.features
    return torch.embedding(
        _class_identity(classes, features.dtype, features.device), records.labels
    ).mT.contiguous()


@lru_cache(maxsize=16)
def _class_identity(classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The unit vector of each class, one a row; nobody writes into it."""
    with torch.inference_mode(False):  # it outlives the run that asks for it first
        return torch.eye(classes, dtype=dtype, device=device)
