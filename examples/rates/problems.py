"""Problems with a known risk, for the measured rates: a family of linear losses, and the distance of a record.

    fedpriv run examples/rates/worst-linear-n.toml --import examples/rates/problems.py --workers 2
    fedpriv run examples/rates/goldstein-n.toml --import examples/rates/problems.py --workers 2

`linear-loss`: f(x; z) = -⟨z + v e₁, x⟩ in the ball of diameter 1, with records z = (s/√d) e.  The vector e has
independent random signs, s is 1/2 and d is 64.  The risk of x over the best point of the ball is |v|/2 - v x₁.
The drift v is min(1/2, level · unit), for keys of the model, so that a sweep over levels takes the worst of a
family, as lower bounds do.

`distance-loss`: f(x; ξ) = ‖x - ξ‖ with records ξ = e₁ + 0.2 u, where u is uniform on the unit sphere of R^d.  It
is convex, 1-Lipschitz in every dimension d, and not smooth.  A run starts at 0, at distance 1 of the minimizer
e₁.  The metric `gradient_norm` is the norm of the population's gradient, by quadrature.

`goldstein-travel` is the row `goldstein-single-pass` for T rounds, with the largest step D = travel/T.  Its clips
are L at anchors and √d L D/α for differences (Kornowski, Liu & Talwar), or with `wide` L d and d L D/α, the worst
case of an estimator from values (Zhang, Tran & Cutkosky).  In three points it is not the paper's algorithm, which
has the two keys `smoothed` and `oracle` to go back:

* Gradients are those at the query, exactly.  With `smoothed` they are at a random point in the ball of radius α
  around it, one for each record, as in Algorithm 5.
* The step is `step_factor` times the theorem's D/((L + G0) √W) with the error G0 of an exact oracle.  With
  `oracle = "first"` it is that of Algorithm 5 with one direction, whose bound has 4 L² for each difference of a
  period, however near the queries are: the step is 8 to 29 times shorter at the best settings.
* The output is not one random window's mean, but those of 40 windows, evenly spaced, one behind the other.  The
  metric is its mean over them: what the theorem bounds is the expectation over the random window.
"""

import dataclasses
import math
from abc import abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import roots_jacobi
from torch import Tensor

import fedpriv
from fedpriv.core.replicates import PER_REPLICATE, Scalar
from fedpriv.loss.clipping import compute_clipping, upper_norm, vector_bounds
from fedpriv.loss.estimators import Round
from fedpriv.loss.models import add_model
from fedpriv.loss.objective import Batch, Deterministic, Increment, ModelEvaluation, Query, Records
from fedpriv.loss.rows import Model, ModelSettings
from fedpriv.papers.base import Count, Positive, Problem, Settings
from fedpriv.papers.kornowski import GOLDSTEIN_SINGLE_PASS, O2NC, O2NCState, PublicChoices, SinglePassSettings
from fedpriv.papers.kornowski_bounds import NonsmoothProblem, max_nodes, single_pass_error
from fedpriv.participation.orders import Dependence

DIMENSION, SPREAD, RADIUS = 64, 0.5, 0.5
RECORDS = 1_000_000  # many more than a run reads, so that seeds read nearly independent records


@dataclass(frozen=True)
class RecordLoss(Deterministic):
    """Convex, 1-Lipschitz loss with a formula for the gradient of each record, and a model that starts at 0."""

    dimension: int
    dtype: torch.dtype
    convex: bool = True
    lipschitz: float = 1.0
    smoothness: float = math.inf
    linear: None = None
    dependence = Dependence.RECORD

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.dtype)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum clipped increments of records (..., B, d)."""
        vectors, clipped = self._clip(query, batch, clip)
        return Increment(vectors.sum(-2), clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self._clip(query, batch, clip)[0]

    @abstractmethod
    def gradients(self, point: Tensor, records: Tensor) -> Tensor:
        """Return the gradient of each record, (..., B, d), at points (..., d)."""

    def _clip(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor]:
        """Return the weighted clipped increments, (..., B, d), and the number of clipped records, (...)."""
        records, weights = batch
        total: Tensor | float = 0.0
        for point, coefficient in zip(*query, strict=True):
            total = total + coefficient * self.gradients(point, records.features)
        assert isinstance(total, Tensor)
        vectors = total.to(weights.dtype)
        clipped = compute_clipping(vector_bounds(upper_norm(vectors)), weights, clip)
        return clipped.zero_unrepresentable(vectors) * clipped.factor.unsqueeze(-1), clipped.clipped_count


class LinearLossSettings(ModelSettings):
    """Settings of the linear loss."""

    level: Positive = Field(1.0, description="drift v in units")
    unit: Positive = Field(0.1, description="drift of level 1")

    @property
    def drift(self) -> float:
        """v, at most 1/2."""
        return min(0.5, self.level * self.unit)


@dataclass(frozen=True)
class LinearLoss(RecordLoss):
    """Loss -⟨z + v e₁, x⟩ of records z with ‖z‖ = 1/2, smooth with constant 0."""

    smoothness: float = 0.0
    drift: float = 0.0
    """v."""

    def gradients(self, point: Tensor, records: Tensor) -> Tensor:
        return -self._shift(records)

    def _shift(self, records: Tensor) -> Tensor:
        """Return z + v e₁."""
        return records + self.drift * torch.eye(1, self.dimension, dtype=records.dtype, device=records.device)[0]

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return -(self._shift(records.features) * point.unsqueeze(-2)).sum(-1)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """Evaluate the mean loss, and the risk |v|/2 - v x₁ over the best point of the ball."""
        excess = self.drift * (RADIUS - point[..., 0])
        return ModelEvaluation(self.losses(point, records).mean(-1), None, {"excess_risk": excess})


def scale_signs(signs: NDArray[Any], dtype: torch.dtype, settings: LinearLossSettings) -> Tensor:
    """Return the records (s/√d) e of random signs e, given as bytes 0 and 1, (n, d)."""
    if len(signs) == RECORDS:
        return _scale_training_signs(dtype)
    return (2.0 * torch.from_numpy(signs).to(dtype) - 1.0) * (SPREAD / math.sqrt(DIMENSION))


@lru_cache(maxsize=1)
def _scale_training_signs(dtype: torch.dtype) -> Tensor:
    """Return all training records, which runs of every drift share."""
    return (2.0 * torch.from_numpy(draw_signs()[0][0]).to(dtype) - 1.0) * (SPREAD / math.sqrt(DIMENSION))


def linear_loss(
    _shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: LinearLossSettings
) -> LinearLoss:
    return LinearLoss(DIMENSION, dtype, drift=settings.drift)


@lru_cache(maxsize=1)
def draw_signs() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return training and test records of random signs, as bytes, with labels 0 that no loss reads."""
    signs = np.random.default_rng(20241).integers(0, 2, (RECORDS + 16, DIMENSION), dtype=np.uint8)
    return (signs[:-16], np.zeros(RECORDS)), (signs[-16:], np.zeros(16))


fedpriv.add_data("random-signs", draw_signs, classes=0)
add_model(
    "linear-loss", Model(LinearLossSettings, scale_signs, linear_loss, regression=True, only_for="random-signs")
)


NOISE_RADIUS, MAX_DIMENSION, SMOOTHING, WINDOWS = 0.2, 32, 0.5, 40


class DistanceSettings(ModelSettings):
    """Settings of the distance loss."""

    dimension: Annotated[int, Field(ge=2, le=MAX_DIMENSION)] = Field(8, description="d")


@dataclass(frozen=True)
class DistanceLoss(RecordLoss):
    """Distance ‖x - ξ‖ of the model and a record ξ."""

    def gradients(self, point: Tensor, records: Tensor) -> Tensor:
        difference = point.unsqueeze(-2) - records
        norm = torch.linalg.vector_norm(difference, dim=-1, keepdim=True)
        return difference / norm.where(norm > 0.0, 1.0)

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return torch.linalg.vector_norm(point.unsqueeze(-2) - records.features, dim=-1)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """Evaluate the mean distance, and the norm of the population's gradient.

        Both are means over the points, if several are given one behind the other, (..., points · d).
        """
        points = point.reshape(*point.shape[:-1], -1, self.dimension)
        distance = points.clone()
        distance[..., 0] -= 1.0
        norms = population_gradient_norm(torch.linalg.vector_norm(distance, dim=-1), self.dimension)
        losses = self.losses(points, Records(records.features.unsqueeze(-3), records.labels.unsqueeze(-2)))
        return ModelEvaluation(losses.mean((-2, -1)), None, {"gradient_norm": norms.mean(-1)})


def population_gradient_norm(distance: Tensor, dimension: int) -> Tensor:
    """Return ‖∇F‖ at some distance r of e₁, the mean of (r - c t)/√(r² - 2 c r t + c²) with c = 0.2.

    The coordinate t of u towards the model has the density (1 - t²)^((d-3)/2), so that Gauss-Jacobi quadrature is
    exact for polynomials.
    """
    nodes, weights = roots_jacobi(400, (dimension - 3) / 2.0, (dimension - 3) / 2.0)
    t = torch.from_numpy(nodes).to(distance.dtype)
    r = distance.unsqueeze(-1)
    values = (r - NOISE_RADIUS * t) / (r**2 - 2.0 * NOISE_RADIUS * r * t + NOISE_RADIUS**2).sqrt()
    return (values * torch.from_numpy(weights / weights.sum()).to(distance.dtype)).sum(-1).abs()


def place_on_sphere(normals: NDArray[Any], dtype: torch.dtype, settings: DistanceSettings) -> Tensor:
    """Return records e₁ + 0.2 u, with u the direction of the first d of a row's normal numbers, (n, d)."""
    directions = torch.from_numpy(normals[:, : settings.dimension]).to(dtype)
    records = NOISE_RADIUS * directions / torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    records[:, 0] += 1.0
    return records


def distance_loss(
    _shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: DistanceSettings
) -> DistanceLoss:
    return DistanceLoss(settings.dimension, dtype)


def draw_normals() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    normals = np.random.default_rng(20242).standard_normal((140_016, MAX_DIMENSION))
    return (normals[:-16], np.zeros(140_000)), (normals[-16:], np.zeros(16))


class TravelSettings(Settings):
    """Keys of `goldstein-travel`."""

    travel: Positive = Field(description="D T: distance that T steps can go")
    period: Count = Field(description="Σ: rounds from one anchor to the next, and records of an anchor")
    wide: bool = Field(False, description="clips for the worst case of an estimator from values")
    smoothed: bool = Field(False, description="gradients at random points around the query, as in Algorithm 5")
    oracle: Literal["exact", "first"] = Field("exact", description="oracle whose error G0 the step allows for")
    step_factor: Positive = Field(2.0, description="step, in units of the theorem's")

    def resolve(self, problem: Problem) -> SinglePassSettings:
        """Return the settings of `goldstein-single-pass` for the run's T and d."""
        radius = min(self.travel / problem.rounds, SMOOTHING / 4.0)
        root = problem.dimension if self.wide else math.sqrt(problem.dimension)
        return SinglePassSettings(
            smoothing=SMOOTHING,
            radius=radius,
            period=self.period,
            anchor_batches=self.period,
            anchor_clip=float(problem.dimension) if self.wide else 1.0,
            clip=root * radius / SMOOTHING,
            directions=1,
        )

    def make_optimizer(self, problem: Problem, noise_std: float) -> "WindowsO2NC":
        """Return the optimizer, with the step η = `step_factor` · D/((L + G0) √W)."""
        settings = self.resolve(problem)
        theory = NonsmoothProblem(problem.dimension, 1.0, math.inf, SMOOTHING, self.oracle)
        std = noise_std * math.sqrt(max_nodes(self.period))
        error = single_pass_error(
            theory, settings.radius, self.period, self.period * problem.batch, problem.batch, std
        )
        return WindowsO2NC(
            self.step_factor * settings.radius / ((1.0 + error) * math.sqrt(settings.window_rounds)),
            settings.radius,
            PublicChoices((problem.seed,), problem.rounds, window=1, publishes_last=True),
            (settings.window_rounds,),
        )


class WindowsState(NamedTuple):
    """Server's vectors before round t."""

    base: O2NCState
    """State of the conversion with windows of one round, whose published point is the last query."""
    window_sum: Tensor
    """Sum of the queries in the present window, (..., d)."""
    points: Tensor
    """Means of the published windows, one behind the other, (..., 40 d)."""


@dataclass(frozen=True)
class WindowsO2NC(O2NC):
    """Online-to-non-convex conversion that publishes the means of 40 windows, one behind the other.

    The length of a window is a replicate's own, so that runs of different travel are computed together.
    """

    windows: tuple[int, ...] = field(default=(), metadata=PER_REPLICATE)
    """W of each replicate."""

    @cached_property
    def completions(self) -> dict[int, list[tuple[int, list[int]]]]:
        """Replicates with a window that ends in a round, each with the window's places among the 40, by round.

        The 40 windows are evenly spaced among those that are complete in the end, and of fewer some count twice.
        """
        completions = defaultdict[int, list[tuple[int, list[int]]]](list)
        for replicate, window in enumerate(self.windows):
            numbers = np.linspace(1, self.choices.rounds // window, WINDOWS).round().astype(int)
            for number in range(1, self.choices.rounds // window + 1):
                completions[number * window].append((replicate, np.flatnonzero(numbers == number).tolist()))
        return completions

    def start(self, initial: Tensor) -> WindowsState:  # type: ignore[override]
        base = super().start(initial)
        return WindowsState(base, base.window_sum, torch.cat([initial] * WINDOWS, dim=-1))

    def query(self, state: WindowsState) -> Tensor:  # type: ignore[override]
        return state.base.query_point

    def update(self, state: WindowsState, released: Tensor, current: Round) -> WindowsState:  # type: ignore[override]
        window_sum, points = state.window_sum + state.base.query_point, state.points
        if current.t in self.completions:
            points = points.clone()
            sums, means = window_sum.view(-1, released.shape[-1]), points.view(-1, WINDOWS, released.shape[-1])
            for replicate, places in self.completions[current.t]:
                means[replicate, places] = sums[replicate] / self.windows[replicate]
                sums[replicate] = 0.0
        return WindowsState(super().update(state.base, released, current), window_sum, points)

    def output(self, state: WindowsState) -> Tensor:  # type: ignore[override]
        return state.points


fedpriv.add_data("standard-normal", draw_normals, classes=0)
add_model("distance-loss", Model(DistanceSettings, place_on_sphere, distance_loss, regression=True))
fedpriv.add_algorithm(
    dataclasses.replace(
        GOLDSTEIN_SINGLE_PASS,
        name="goldstein-travel",
        title="O2NC in one pass by its travel",
        settings=TravelSettings,
        schedule=lambda settings, declared: GOLDSTEIN_SINGLE_PASS.schedule(
            settings.model_copy(update={"anchor_batches": settings.period}), declared
        ),
        estimator=lambda settings, problem: GOLDSTEIN_SINGLE_PASS.estimator(settings.resolve(problem), problem),
        mechanism=lambda settings, problem, workload: GOLDSTEIN_SINGLE_PASS.mechanism(
            settings.resolve(problem), problem, workload
        ),
        optimizer=TravelSettings.make_optimizer,
        objective=lambda settings, problem, objective: (
            GOLDSTEIN_SINGLE_PASS.objective(settings.resolve(problem), problem, objective)
            if settings.smoothed
            else objective
        ),
        theorems=lambda _settings, _problem: (),
    )
)
