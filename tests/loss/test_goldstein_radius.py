"""The Goldstein measure on functions whose Goldstein subdifferential is known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.loss.goldstein import (
    compute_mean_gradients,
    find_min_norm_point,
    goldstein_measure,
    measure_objective,
)
from fedpriv.loss.linear import PhaseRetrieval
from fedpriv.loss.objective import Records


@pytest.mark.parametrize(
    ("rows", "norm"),
    [
        ([(1, 0), (0, 1)], 0.707106781187),
        ([(2, 1), (2, -1), (5, 0)], 2.0),
        ([(1, 0), (-1, 0)], 0.0),
        ([(3, 4)], 5.0),
        ([(1, 2, 2), (2, -1, 0), (0, 1, -2), (1, 1, 1)], 1.069044967650),
        ([(0, 0), (1, 1)], 0.0),
    ],
)
def test_golden_norms(rows: list[tuple[float, ...]], norm: float) -> None:
    assert find_min_norm_point(np.array(rows, np.float64)).norm == pytest.approx(norm, abs=1e-12)


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 60),
    dimension=st.integers(1, 12),
    shift=st.floats(-2.0, 2.0),
    signs=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_the_certificate_closes_the_gap(seed: int, count: int, dimension: int, shift: float, signs: bool) -> None:
    """Also for degenerate sets of ±1 vectors, where other solvers go wrong."""
    points = np.random.default_rng(seed).standard_normal((count, dimension))
    points = np.sign(points) if signs else points + shift
    found = find_min_norm_point(points)
    scale = float(np.max(np.linalg.norm(points, axis=1)))
    assert found.certificate <= found.norm * (1 + 1e-9) + 1e-12
    assert found.norm - found.certificate < 1e-5 * scale or found.norm < 1e-5 * scale
    random = np.random.default_rng(seed).dirichlet(np.ones(count), size=20) @ points
    assert np.min(np.linalg.norm(random, axis=1)) >= found.norm - 1e-9


@pytest.mark.parametrize(("point", "expected"), [(0.3, 0.0), (-0.49, 0.0), (0.51, 1.0), (-2.0, 1.0)])
def test_absolute_value(point: float, expected: float) -> None:
    """|x| within 1/2 of its kink has gradients of both signs, hence 0; elsewhere the measure is the slope."""
    assert goldstein_measure(np.sign, np.array([point]), 0.5, 400, seed=1) == pytest.approx(expected, abs=1e-12)


def test_maximum() -> None:
    """max(x, y) near its ridge: conv{(1, 0), (0, 1)} has least norm 1/√2; away from it 1."""

    def gradients(points: np.ndarray) -> np.ndarray:
        first = points[:, :1] > points[:, 1:]
        return np.where(first, [[1.0, 0.0]], [[0.0, 1.0]])

    assert goldstein_measure(gradients, np.array([0.1, 0.0]), 0.2, 100, seed=1) == pytest.approx(math.sqrt(0.5))
    assert goldstein_measure(gradients, np.array([1.0, 0.0]), 0.2, 100, seed=1) == pytest.approx(1.0)


@pytest.mark.parametrize("radius", [0.1, 0.5, 2.0])
def test_quadratic(radius: float) -> None:
    """|x|²/2: its gradients in the ball are the ball, so the least norm is max(|x| - r, 0), from above."""
    point = np.array([0.8, -0.6])
    exact = max(1.0 - radius, 0.0)
    measured = goldstein_measure(lambda points: points, point, radius, 3000, seed=2)
    assert exact <= measured <= exact + 0.05 * radius


def test_more_points_never_raise_the_measure() -> None:
    point = np.array([0.5, 0.1, -0.3])
    measured = [
        goldstein_measure(lambda points: points**3, point, 0.3, count, seed=4) for count in (4, 16, 64, 256)
    ]
    assert measured == sorted(measured, reverse=True)
    assert measured[0] > measured[-1]
    assert measured[0] == goldstein_measure(lambda points: points**3, point, 0.3, 4, seed=4)


def test_the_measure_of_an_objective_is_that_of_its_mean_loss() -> None:
    """At the hidden vector of exact measurements every loss is 0 around it: measure 0.  Far off it is positive."""
    generator = np.random.default_rng(0)
    features = torch.from_numpy(generator.standard_normal((500, 4)))
    features /= torch.linalg.vector_norm(features, dim=1, keepdim=True)
    hidden = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    records = Records(features, (features @ hidden).abs())
    objective = PhaseRetrieval(4, 1, feature_norm=1.0, dtype=torch.float64)
    assert measure_objective(objective, hidden, records, 0.3, 128, seed=0) < 1e-3
    assert measure_objective(objective, hidden + 2.0, records, 0.3, 128, seed=0) > 0.05

    point = (hidden + 1.0).requires_grad_()
    loss = ((features @ point).abs() - records.labels).abs().mean()
    (expected,) = torch.autograd.grad(loss, point)
    found = compute_mean_gradients(objective, point.detach().unsqueeze(0), records)
    torch.testing.assert_close(found.squeeze(0), expected, rtol=1e-10, atol=1e-12)
