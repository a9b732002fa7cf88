"""Losses of a linear score: their constants, and problems whose optimum is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedpriv.data.synthetic import (
    KnownProblem,
    linear_regression,
    power_law,
    power_law_regression,
)
from fedpriv.loss.linear import LeastSquares, LogisticRegression, QuadraticPopulation, quadratic_in_ball
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.papers.base import project_to_ball

F64 = torch.float64


def records_of(problem: KnownProblem) -> Records:
    return Records(torch.from_numpy(problem.features), torch.from_numpy(problem.labels))


def least_squares(problem: KnownProblem) -> LeastSquares:
    population = QuadraticPopulation(torch.from_numpy(problem.curvature), torch.from_numpy(problem.minimizer))
    return LeastSquares(
        len(problem.minimizer), problem.feature_norm, population, label_bound=problem.label_bound, radius=2.0
    )


def logistic(problem: KnownProblem) -> LogisticRegression:
    return LogisticRegression(len(problem.minimizer), problem.feature_norm)


def with_labels_of_two_kinds(problem: KnownProblem) -> KnownProblem:
    return replace(problem, labels=(problem.labels > 0.0).astype(np.float64), label_bound=1.0)


@pytest.mark.parametrize("binary", [False, True])
def test_constants_bound_gradients_and_their_changes(binary: bool) -> None:
    generator = np.random.default_rng(3)
    problem = linear_regression(200, 4, 10.0, 0.5, 1)
    if binary:
        problem = with_labels_of_two_kinds(problem)
    objective = logistic(problem) if binary else least_squares(problem)
    records, one = records_of(problem), torch.ones(1, dtype=F64)
    assert float(records.labels.abs().max()) <= problem.label_bound
    for place in range(200):
        record = Records(records.features[place : place + 1], records.labels[place : place + 1])
        x, y = (torch.from_numpy(generator.standard_normal(4)) for _ in range(2))
        x, y = 2.0 * x / x.norm(), 2.0 * y / y.norm()
        at_x, at_y = (objective.increment(Query([point]), Batch(record, one), 1e9).total for point in (x, y))
        assert float(at_x.norm()) <= objective.lipschitz
        assert float((at_x - at_y).norm()) <= objective.smoothness * float((x - y).norm()) * (1 + 1e-12)


def test_population_risk_is_that_of_many_records() -> None:
    noise, n = 0.5, 200_000
    problem = linear_regression(n, 4, 10.0, noise, 1)
    objective, records = least_squares(problem), records_of(problem)
    best = torch.from_numpy(problem.minimizer)
    at_best = objective.evaluate(best, records)
    assert float(at_best.metrics["excess_risk"]) == 0.0
    assert float(at_best.metrics["gradient_norm"]) == 0.0
    assert float(at_best.loss) == pytest.approx(noise**2 / 2, rel=0.02)
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
    first, again, other = (linear_regression(10, 5, 100.0, 0.1, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.features, again.features)
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.minimizer, other.minimizer)
    assert first.curvature.max() / first.curvature.min() == pytest.approx(100.0)
    np.testing.assert_allclose(np.linalg.norm(first.features, axis=1), first.feature_norm)


def test_power_law_regression_has_the_population_it_claims() -> None:
    """E[z zᵀ] = diag(i^-2) within 5 standard errors a coordinate pair, and the labels' noise has its variance."""
    problem = power_law_regression(20_000, 6, 0.5, 3)
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
    assert population.least > 0.0
    point = torch.zeros(6, dtype=torch.float64)
    for _ in range(5000):
        point = project_to_ball(point - population.gradient(point), 0.5)
    assert float(population.excess_risk(point)) == pytest.approx(0.0, abs=1e-9)
    generator = torch.Generator().manual_seed(0)
    inside = project_to_ball(torch.randn(1000, 6, generator=generator, dtype=torch.float64), 0.5)
    assert float(population.excess_risk(inside).min()) > 0.0
    assert quadratic_in_ball(curvature, minimizer, 1.5).least == 0.0
