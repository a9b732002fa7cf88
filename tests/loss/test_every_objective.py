"""Closed-form objectives: against automatic differentiation, their constants, problems of known optimum."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedpriv.data.synthetic import (
    KnownProblem,
    make_linear_regression,
    make_phase_retrieval,
    make_power_law_regression,
    power_law,
)
from fedpriv.loss.linear import (
    LeastSquares,
    LogisticRegression,
    PhaseRetrieval,
    QuadraticPopulation,
    SigmoidRegression,
    SoftmaxRegression,
    quadratic_in_ball,
)
from fedpriv.loss.objective import Batch, EvaluationView, Objective, Query, Records
from fedpriv.loss.ridge import RidgeStatistics
from fedpriv.loss.rows import ColumnMoments
from fedpriv.loss.views import PerUnit
from fedpriv.papers.base import project_to_ball
from tests.loss.builders import F64, list_increments, ones, pick, pick_one, sum_increments


class Kind(NamedTuple):
    """An objective of so many features, its loss written out, and labels that it takes."""

    of: Callable[[int], Any]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    labels: Callable[[np.random.Generator, Any], np.ndarray[Any, Any]]


def retrieval(power: Any) -> Kind:
    return Kind(
        lambda features: PhaseRetrieval(features, power, feature_norm=1.0, dtype=F64),
        lambda w, z, size: ((w @ z).abs() ** power - size**power).abs(),
        lambda generator, shape: generator.uniform(0.0, 2.0, shape),
    )


def binary(generator: np.random.Generator, shape: Any) -> np.ndarray[Any, Any]:
    return np.asarray(generator.integers(0, 2, shape), float)


KINDS = {
    "softmax": Kind(
        lambda features: SoftmaxRegression(features, 3, feature_norm=1.0, dtype=F64),
        lambda w, z, label: functional.cross_entropy((w.view(3, -1) @ z).unsqueeze(0), label.unsqueeze(0)),
        lambda generator, shape: generator.integers(0, 3, shape)),
    "logistic": Kind(
        lambda features: LogisticRegression(features, 1.0),
        lambda w, z, label: functional.binary_cross_entropy_with_logits(w @ z, label), binary),
    "least squares": Kind(
        lambda features: LeastSquares(features, 1.0), lambda w, z, label: 0.5 * (w @ z - label) ** 2,
        lambda generator, shape: generator.standard_normal(shape)),
    "sigmoid": Kind(
        lambda features: SigmoidRegression(features, 1.0),
        lambda w, z, label: torch.sigmoid(-(2.0 * label - 1.0) * (w @ z)), binary),
    "phase retrieval, 1": retrieval(1),
    "phase retrieval, 2": retrieval(2),
}  # fmt: skip


def draw_records(kind: Kind, generator: np.random.Generator, *shape: int) -> Records:
    """Records of these leading axes, the last being the features."""
    features = torch.from_numpy(generator.standard_normal(shape))
    return Records(features, torch.from_numpy(kind.labels(generator, shape[:-1])))


@pytest.mark.parametrize("name", KINDS)
@given(
    count=st.integers(1, 6),
    width=st.integers(1, 5),
    points=st.integers(1, 3),
    clip=st.floats(0.01, 20.0),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=20)
def test_increment_equals_autograd(name: str, count: int, width: int, points: int, clip: float, seed: int) -> None:
    kind, generator = KINDS[name], np.random.default_rng(seed)
    objective = kind.of(width)
    at = [torch.from_numpy(generator.standard_normal(objective.dimension)) for _ in range(points)]
    coefficients = [float(value) for value in generator.standard_normal(points)]
    records = draw_records(kind, generator, count, width)
    weights = torch.from_numpy(generator.uniform(0.1, 1.0, count))
    expected, clipped = torch.zeros(objective.dimension, dtype=F64), 0
    for feature, label, weight in zip(*records, weights, strict=True):
        increment = torch.zeros(objective.dimension, dtype=F64)
        for point, coefficient in zip(at, coefficients, strict=True):
            leaf = point.clone().requires_grad_()
            increment += coefficient * torch.autograd.grad(kind.loss(leaf, feature, label), leaf)[0]
        norm = float(increment.norm())
        clipped += norm > clip
        expected += weight * increment * (min(1.0, clip / norm) if norm else 1.0)
    result = sum_increments(objective, Query(at, coefficients), records, clip, weights)
    torch.testing.assert_close(result.total, expected, rtol=1e-9, atol=1e-11)
    assert int(result.clipped_count) == clipped


@pytest.mark.parametrize("name", KINDS)
def test_a_record_takes_one_gradient_a_point_and_no_memory_beside_its_increment(name: str) -> None:
    objective = KINDS[name].of(4)
    assert (objective.evaluations(3), objective.extra_values(3, 5)) == (3, 0)


@pytest.mark.parametrize("name", KINDS)
def test_leading_axes_are_independent_replicates(name: str) -> None:
    kind, generator = KINDS[name], np.random.default_rng(0)
    objective = kind.of(4)
    points = torch.from_numpy(generator.standard_normal((5, objective.dimension)))
    records = draw_records(kind, generator, 5, 7, 4)
    weights, clip = ones(7) / 7, torch.linspace(0.1, 2.0, 5, dtype=F64).unsqueeze(1)
    together = sum_increments(objective, points, records, clip, weights)
    for place in range(5):
        own = pick(records, place)
        alone = sum_increments(objective, points[place], own, float(clip[place]), weights)
        torch.testing.assert_close(together.total[place], alone.total)
        assert together.clipped_count[place] == alone.clipped_count
        losses = objective.evaluate(points, own).loss
        torch.testing.assert_close(losses[place], objective.evaluate(points[place], own).loss)


def records_of(problem: KnownProblem) -> Records:
    return Records(torch.from_numpy(problem.features), torch.from_numpy(problem.labels))


def least_squares(problem: KnownProblem) -> LeastSquares:
    population = QuadraticPopulation(torch.from_numpy(problem.curvature), torch.from_numpy(problem.minimizer))
    return LeastSquares(
        len(problem.minimizer), problem.feature_norm, population, label_bound=problem.label_bound, radius=2.0
    )


def longest(objective: Objective, x: Tensor, y: Tensor, records: Records) -> tuple[float, float]:
    """The longest gradient at the points x, by G, and their greatest change to y, by L; records one a point."""
    at_x, at_y = (sum_increments(objective, point, records, weights=ones(1)).total for point in (x, y))
    changes = (at_x - at_y).norm(dim=-1) / (objective.smoothness * (x - y).norm(dim=-1))
    return float((at_x.norm(dim=-1) / objective.lipschitz).max()), float(changes.max())


@pytest.mark.parametrize("binary_labels", [False, True])
def test_constants_bound_gradients_and_their_changes(binary_labels: bool) -> None:
    generator = np.random.default_rng(3)
    problem = make_linear_regression(200, 4, 10.0, 0.5, 1)
    objective: Objective = least_squares(problem)
    if binary_labels:
        problem = replace(problem, labels=(problem.labels > 0.0).astype(np.float64), label_bound=1.0)
        objective = LogisticRegression(len(problem.minimizer), problem.feature_norm)
    records = records_of(problem)
    assert float(records.labels.abs().max()) <= problem.label_bound
    for place in range(200):
        x, y = (torch.from_numpy(generator.standard_normal(4)) for _ in range(2))
        gradient, change = longest(objective, 2.0 * x / x.norm(), 2.0 * y / y.norm(), pick_one(records, place))
        assert gradient <= 1.0
        assert change <= 1 + 1e-12


@pytest.mark.parametrize(
    ("objective", "lipschitz", "smoothness"),
    [
        (LeastSquares(3, 2.0, label_bound=0.5, radius=3.0), (3.0 * 2.0 + 0.5) * 2.0, 4.0),
        (LeastSquares(3, 2.0, label_bound=0.5, radius=3.0, penalty=0.25), 13.0 + 0.25 * 3.0, 4.25),
        (LeastSquares(3, 2.0, radius=math.inf), math.inf, 4.0),
        (LeastSquares(3, 0.0, radius=math.inf), math.inf, 0.0),
        (LogisticRegression(3, 3.0), 3.0, 9.0 / 4.0),
        (LogisticRegression(3, 3.0, penalty=0.5, convex=False), math.inf, 2.75),
        (SigmoidRegression(3, 2.0, penalty=0.5), math.inf, 2.0 / (3.0 * math.sqrt(3.0)) + 0.5),
        (PhaseRetrieval(3, 1, 2.0), 2.0, math.inf),
        (PhaseRetrieval(3, 2, 2.0), math.inf, math.inf),
        (ColumnMoments(3, 0.5), 0.5, 0.0),
        (RidgeStatistics(3, 2.0, True, 0.1, F64), 1.0, 0.0),
    ],
)
def test_constants_are_as_small_as_the_bounds_on_records_allow(
    objective: Objective, lipschitz: float, smoothness: float
) -> None:
    """Steps shrink and noise grows with them, so that a larger constant costs accuracy."""
    assert (objective.lipschitz, objective.smoothness) == pytest.approx((lipschitz, smoothness))


def test_constants_of_sigmoid_regression_by_brute_force() -> None:
    """No pair of points breaks G or L, some come within 1e-6 of each, and the loss is not convex."""
    objective, at = SigmoidRegression(1, 2.0), torch.linspace(-8.0, 8.0, 32_001, dtype=F64).unsqueeze(-1)
    record = Records(torch.full((1, 1), 2.0, dtype=F64), ones(1))
    gradients = sum_increments(objective, at, record).total.squeeze(-1)
    slopes = gradients.diff() / at.squeeze(-1).diff()
    assert objective.lipschitz * (1 - 1e-6) <= float(gradients.abs().max()) <= objective.lipschitz
    assert objective.smoothness * (1 - 1e-6) <= float(slopes.abs().max()) <= objective.smoothness * (1 + 1e-9)
    assert float(slopes.min()) < -0.99 * objective.smoothness
    assert not objective.convex
    generator = np.random.default_rng(4)
    x, y = (torch.from_numpy(generator.standard_normal((2000, 3)) * 3.0) for _ in range(2))
    z = torch.from_numpy(generator.standard_normal((2000, 1, 3)))
    records = Records(2.0 * z / z.norm(dim=-1, keepdim=True), torch.from_numpy(binary(generator, (2000, 1))))
    assert max(longest(SigmoidRegression(3, 2.0), x, y, records)) <= 1.0


def test_a_view_of_evaluations_is_its_base_in_all_else() -> None:
    problem = make_linear_regression(20, 4, 10.0, 0.5, 1)
    base, records, point = least_squares(problem), records_of(problem), torch.linspace(-1.0, 1.0, 4, dtype=F64)
    view, batch = EvaluationView(base), Batch(records, torch.linspace(0.1, 1.0, 20, dtype=F64))
    for name in ("dependence", "dimension", "lipschitz", "smoothness", "convex", "convex_within"):
        assert getattr(view, name) == getattr(base, name)
    assert torch.equal(view.initial(), base.initial())
    total, clipped = view.increment(Query((point,)), batch, 0.5)
    expected, expected_clipped = base.increment(Query((point,)), batch, 0.5)
    assert torch.equal(total, expected)
    assert int(clipped) == int(expected_clipped) > 0
    assert torch.equal(view.gradient(point, batch), base.gradient(point, batch))
    assert torch.equal(view.losses(point, records), base.losses(point, records))
    assert torch.equal(view.outputs(point, records), base.outputs(point, records))
    assert torch.equal(list_increments(view, point, records, 0.5), list_increments(base, point, records, 0.5))
    assert EvaluationView(PerUnit(base, 5)).evaluations(3) == 15


@pytest.mark.parametrize(
    ("objective", "loss"),
    [
        (LeastSquares(4, 1.0, penalty=0.3), lambda scores, labels: (scores - labels) ** 2 / 2.0),
        (LogisticRegression(4, 1.0, penalty=0.3, convex=False),
         lambda scores, labels: functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")),
    ],
    ids=["squares", "logistic"],
)  # fmt: skip
def test_a_penalty_is_part_of_each_records_loss_and_gradient_but_not_of_an_evaluation(
    objective: Any, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    generator = np.random.default_rng(5)
    features, points = (torch.from_numpy(generator.standard_normal(shape)) for shape in ((6, 4), (2, 4)))
    records = Records(features, torch.from_numpy(binary(generator, 6)))
    weights = torch.linspace(0.1, 1.0, 6, dtype=F64)
    for point in points:
        leaf = point.clone().requires_grad_()
        plain = loss(features @ leaf, records.labels)
        losses = plain + 0.3 / 2.0 * leaf.square().sum()
        torch.testing.assert_close(objective.losses(point, records), losses.detach())
        assert float(objective.evaluate(point, records).loss) == pytest.approx(float(plain.detach().mean()))
        (gradient,) = torch.autograd.grad(weights @ losses, leaf)
        torch.testing.assert_close(objective.gradient(point, Batch(records, weights)), gradient)
        torch.testing.assert_close(sum_increments(objective, point, records, weights=weights).total, gradient)
        torch.testing.assert_close(weights @ list_increments(objective, point, records, 1e9), gradient)
    together = objective.losses(points, records)
    torch.testing.assert_close(together, torch.stack([objective.losses(point, records) for point in points]))


def test_population_risk_is_that_of_many_records() -> None:
    problem = make_linear_regression(200_000, 4, 10.0, 0.5, 1)
    objective, records = least_squares(problem), records_of(problem)
    best = torch.from_numpy(problem.minimizer)
    at_best = objective.evaluate(best, records)
    assert float(at_best.metrics["excess_risk"]) == 0.0
    assert float(at_best.metrics["gradient_norm"]) == 0.0
    assert float(at_best.loss) == pytest.approx(0.5**2 / 2, rel=0.02)
    generator = np.random.default_rng(0)
    for _ in range(5):
        point = best + torch.from_numpy(generator.standard_normal(4))
        there = objective.evaluate(point, records)
        sampled = float(there.loss - at_best.loss)
        assert float(there.metrics["excess_risk"]) == pytest.approx(sampled, rel=0.03, abs=0.002)
        assert objective.population is not None
        leaf = point.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective.population.excess_risk(leaf), leaf)
        torch.testing.assert_close(objective.population.gradient(point), gradient)
        assert float(there.metrics["gradient_norm"]) == pytest.approx(float(gradient.norm()))


def test_problems_depend_on_their_seed_and_have_the_condition_number_asked_for() -> None:
    first, again, other = (make_linear_regression(10, 5, 100.0, 0.1, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.features, again.features)
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.minimizer, other.minimizer)
    assert first.curvature.max() / first.curvature.min() == pytest.approx(100.0)
    np.testing.assert_allclose(np.linalg.norm(first.features, axis=1), first.feature_norm)


def test_power_law_regression_has_the_population_it_claims() -> None:
    """E[z zᵀ] = diag(i^-2) within 5 standard errors a coordinate pair, and the labels' noise has its variance."""
    problem = make_power_law_regression(20_000, 6, 0.5, 3)
    curvature, minimizer = power_law(6)
    np.testing.assert_allclose(problem.features**2, np.tile(curvature, (20_000, 1)), rtol=1e-12)
    off = problem.features.T @ problem.features / 20_000 - np.diag(curvature)
    assert np.abs(off).max() < 5.0 / np.sqrt(20_000)
    assert np.linalg.norm(minimizer) == pytest.approx(1.0)
    noise = problem.labels - problem.features @ minimizer
    assert np.abs(noise).max() <= 0.5 * np.sqrt(3.0)
    assert noise.var() == pytest.approx(0.25, rel=0.05)


def test_excess_risk_in_a_ball_is_counted_from_its_best_point() -> None:
    """A minimizer outside the ball: no point of the ball has negative excess, projected descent reaches 0."""
    curvature, minimizer = (torch.from_numpy(values) for values in power_law(6))
    population = quadratic_in_ball(curvature, minimizer, 0.5)
    assert population.min_excess_risk > 0.0
    point = torch.zeros(6, dtype=F64)
    for _ in range(5000):
        point = project_to_ball(point - population.gradient(point), 0.5)
    assert float(population.excess_risk(point)) == pytest.approx(0.0, abs=1e-9)
    generator = torch.Generator().manual_seed(0)
    inside = project_to_ball(torch.randn(1000, 6, generator=generator, dtype=F64), 0.5)
    assert float(population.excess_risk(inside).min()) > 0.0
    assert quadratic_in_ball(curvature, minimizer, 1.5).min_excess_risk == 0.0


def test_population_risk_is_computed_on_the_device_of_the_model() -> None:
    curvature, minimizer = (torch.from_numpy(values) for values in power_law(6))
    objective = LeastSquares(6, 1.0, quadratic_in_ball(curvature, minimizer, 0.5))
    records = Records(torch.zeros(5, 6, dtype=F64, device="meta"), torch.zeros(5, dtype=F64, device="meta"))
    metrics = objective.evaluate(torch.zeros(2, 6, dtype=F64, device="meta"), records).metrics
    assert metrics.keys() == {"excess_risk", "gradient_norm"}
    assert {(values.device.type, values.shape) for values in metrics.values()} == {("meta", (2,))}


def test_evaluation_at_zero_is_ln_classes() -> None:
    objective = SoftmaxRegression(3, 10, feature_norm=1.0, dtype=F64)
    records = Records(torch.randn(20, 3, dtype=F64), torch.zeros(20, dtype=torch.int64))
    evaluation = objective.evaluate(objective.initial(), records)
    assert float(evaluation.loss) == pytest.approx(math.log(10.0))
    assert float(evaluation.accuracy) == 1.0  # argmax of equal logits is the first class


def test_constants_of_softmax_regression_bound_gradients_and_their_changes() -> None:
    """G = √2·max‖z‖ and L = max‖z‖²/2 (spec: 39.6 and 392.5 for MNIST with a bias)."""
    mnist = SoftmaxRegression(785, 10, feature_norm=math.sqrt(785.0))
    assert mnist.lipschitz == pytest.approx(39.62, abs=0.01)
    assert mnist.smoothness == 392.5
    generator = np.random.default_rng(1)
    objective = SoftmaxRegression(4, 3, feature_norm=2.0, dtype=F64)
    for _ in range(200):
        feature = torch.from_numpy(generator.standard_normal((1, 4)))
        records = Records(2.0 * feature / feature.norm(), torch.from_numpy(generator.integers(0, 3, 1)))
        x, y = (torch.from_numpy(generator.standard_normal(12) * scale) for scale in (3.0, 0.1))
        assert max(longest(objective, x, y, records)) <= 1.0


def test_an_increment_that_is_not_finite_adds_nothing_and_counts_as_clipped() -> None:
    objective = PhaseRetrieval(2, 2, feature_norm=1.0, dtype=F64)
    far = torch.tensor([1e200, 1.5], dtype=F64)
    records = Records(torch.eye(2, dtype=F64), ones(2))
    result = sum_increments(objective, Query([far, far], [1e200, -1e200]), records, 1.0)
    assert torch.isfinite(result.total).all()
    assert float(result.total.norm()) <= 2.0
    assert int(result.clipped_count) >= 1


@pytest.mark.parametrize("power", [1, 2])
def test_the_loss_is_zero_at_the_hidden_vector_but_for_outliers(power: int) -> None:
    measurements, sizes, _, _ = make_phase_retrieval(4000, 10, dimension=8, outliers=0.0, seed=3)
    generous, wrong, _, _ = make_phase_retrieval(4000, 10, dimension=8, outliers=0.1, seed=3)
    assert np.allclose(np.linalg.norm(measurements, axis=1), 1.0)
    assert np.array_equal(measurements, generous)
    assert 0.07 < np.mean(wrong != sizes) < 0.13
    outer = np.einsum("ni,nj,n->ij", measurements, measurements, sizes**2)
    hidden = np.linalg.eigh(outer)[1][:, -1] * np.sqrt(8)  # the spectral estimate points along the hidden vector
    objective = PhaseRetrieval(8, power, feature_norm=1.0, dtype=F64)  # type: ignore[arg-type]
    records = Records(torch.from_numpy(measurements), torch.from_numpy(sizes))
    near = objective.evaluate(torch.from_numpy(hidden), records)
    assert float(near.loss) < 0.2 * float(objective.evaluate(objective.initial(), records).loss)
    same, other = (make_phase_retrieval(4000, 10, dimension=8, outliers=0.0, seed=seed)[0] for seed in (3, 4))
    assert np.array_equal(same, measurements)
    assert not np.array_equal(other, measurements)
