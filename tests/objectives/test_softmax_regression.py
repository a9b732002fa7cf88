"""Closed-form increments against automatic differentiation, record by record."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.softmax import SoftmaxRegression


def reference(
    points: list[Tensor], coefficients: list[float], records: Records, weights: Tensor, clip: float, classes: int
) -> tuple[Tensor, int]:
    total, clipped = torch.zeros_like(points[0]), 0
    for feature, label, weight in zip(*records, weights, strict=True):
        increment = torch.zeros_like(points[0])
        for point, coefficient in zip(points, coefficients, strict=True):
            leaf = point.clone().requires_grad_()
            logits = leaf.view(classes, -1) @ feature
            loss = torch.nn.functional.cross_entropy(logits.unsqueeze(0), label.unsqueeze(0))
            increment += coefficient * torch.autograd.grad(loss, leaf)[0]
        norm = float(increment.norm())
        clipped += norm > clip
        total += weight * increment * (min(1.0, clip / norm) if norm else 1.0)
    return total, clipped


@given(
    batch=st.integers(1, 6),
    features=st.integers(1, 5),
    classes=st.integers(2, 4),
    points=st.integers(1, 3),
    clip=st.floats(0.01, 20.0),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_increment_equals_autograd(
    batch: int, features: int, classes: int, points: int, clip: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    objective = SoftmaxRegression(features, classes, feature_norm=1.0, dtype=torch.float64)
    at = [torch.from_numpy(generator.standard_normal(features * classes)) for _ in range(points)]
    coefficients = list(generator.standard_normal(points))
    records = Records(
        torch.from_numpy(generator.standard_normal((batch, features))),
        torch.from_numpy(generator.integers(0, classes, batch)),
    )
    weights = torch.from_numpy(generator.uniform(0.1, 1.0, batch))
    expected, clipped = reference(at, coefficients, records, weights, clip, classes)
    measured = objective.increment(Query(at, coefficients), Batch(records, weights), clip)
    torch.testing.assert_close(measured.total, expected, rtol=1e-9, atol=1e-11)
    assert int(measured.clipped) == clipped


def test_leading_axes_are_independent_replicates() -> None:
    generator = np.random.default_rng(0)
    objective = SoftmaxRegression(4, 3, feature_norm=1.0, dtype=torch.float64)
    point = torch.from_numpy(generator.standard_normal((5, 12)))
    records = Records(
        torch.from_numpy(generator.standard_normal((5, 7, 4))), torch.from_numpy(generator.integers(0, 3, (5, 7)))
    )
    weights, clip = torch.full((7,), 1 / 7, dtype=torch.float64), torch.linspace(0.1, 2.0, 5, dtype=torch.float64)
    together = objective.increment(Query([point]), Batch(records, weights), clip.unsqueeze(-1))
    for replicate in range(5):
        alone = objective.increment(
            Query([point[replicate]]),
            Batch(Records(records.features[replicate], records.labels[replicate]), weights),
            float(clip[replicate]),
        )
        torch.testing.assert_close(together.total[replicate], alone.total)
        assert together.clipped[replicate] == alone.clipped


def test_evaluation_at_zero_is_ln_classes() -> None:
    objective = SoftmaxRegression(3, 10, feature_norm=1.0, dtype=torch.float64)
    records = Records(torch.randn(20, 3, dtype=torch.float64), torch.zeros(20, dtype=torch.int64))
    evaluation = objective.evaluate(objective.initial(), records)
    assert float(evaluation.loss) == pytest.approx(math.log(10.0))
    assert float(evaluation.accuracy) == 1.0  # argmax of equal logits is the first class


def test_constants_bound_gradients_and_their_changes() -> None:
    """G = √2·max‖z‖ and L = max‖z‖²/2 (spec: 39.6 and 392.5 for MNIST with a bias)."""
    mnist = SoftmaxRegression(785, 10, feature_norm=math.sqrt(785.0))
    assert mnist.lipschitz == pytest.approx(39.62, abs=0.01)
    assert mnist.smoothness == 392.5
    generator = np.random.default_rng(1)
    objective = SoftmaxRegression(4, 3, feature_norm=2.0, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    for _ in range(200):
        feature = torch.from_numpy(generator.standard_normal((1, 4)))
        feature *= 2.0 / feature.norm()
        records = Records(feature, torch.from_numpy(generator.integers(0, 3, 1)))
        x, y = (torch.from_numpy(generator.standard_normal(12) * scale) for scale in (3.0, 0.1))
        at_x, at_y = (objective.increment(Query([p]), Batch(records, one), 1e9).total for p in (x, y))
        assert float(at_x.norm()) <= objective.lipschitz
        assert float((at_x - at_y).norm()) <= objective.smoothness * float((x - y).norm())
