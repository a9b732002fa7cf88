"""Closed-form objectives against automatic differentiation, record by record; replicates are independent."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedpriv.loss.linear import LeastSquares, LogisticRegression, PhaseRetrieval
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.softmax import SoftmaxRegression

F64 = torch.float64


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


KINDS = {
    "softmax": Kind(
        lambda features: SoftmaxRegression(features, 3, feature_norm=1.0, dtype=F64),
        lambda w, z, label: functional.cross_entropy((w.view(3, -1) @ z).unsqueeze(0), label.unsqueeze(0)),
        lambda generator, shape: generator.integers(0, 3, shape),
    ),
    "logistic": Kind(
        lambda features: LogisticRegression(features, 1.0),
        lambda w, z, label: functional.binary_cross_entropy_with_logits(w @ z, label),
        lambda generator, shape: generator.integers(0, 2, shape).astype(float),
    ),
    "least squares": Kind(
        lambda features: LeastSquares(features, 1.0),
        lambda w, z, label: 0.5 * (w @ z - label) ** 2,
        lambda generator, shape: generator.standard_normal(shape),
    ),
    "phase retrieval, 1": retrieval(1),
    "phase retrieval, 2": retrieval(2),
}


def drawn(kind: Kind, generator: np.random.Generator, *shape: int) -> Records:
    """Records of these leading axes, the last being the features."""
    return Records(
        torch.from_numpy(generator.standard_normal(shape)), torch.from_numpy(kind.labels(generator, shape[:-1]))
    )


@pytest.mark.parametrize("name", KINDS)
@given(
    batch=st.integers(1, 6),
    features=st.integers(1, 5),
    points=st.integers(1, 3),
    clip=st.floats(0.01, 20.0),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_increment_equals_autograd(
    name: str, batch: int, features: int, points: int, clip: float, seed: int
) -> None:
    kind, generator = KINDS[name], np.random.default_rng(seed)
    objective = kind.of(features)
    at = [torch.from_numpy(generator.standard_normal(objective.dimension)) for _ in range(points)]
    coefficients = [float(value) for value in generator.standard_normal(points)]
    records = drawn(kind, generator, batch, features)
    weights = torch.from_numpy(generator.uniform(0.1, 1.0, batch))
    expected, clipped = torch.zeros(objective.dimension, dtype=F64), 0
    for feature, label, weight in zip(*records, weights, strict=True):
        increment = torch.zeros(objective.dimension, dtype=F64)
        for point, coefficient in zip(at, coefficients, strict=True):
            leaf = point.clone().requires_grad_()
            increment += coefficient * torch.autograd.grad(kind.loss(leaf, feature, label), leaf)[0]
        norm = float(increment.norm())
        clipped += norm > clip
        expected += weight * increment * (min(1.0, clip / norm) if norm else 1.0)
    found = objective.increment(Query(at, coefficients), Batch(records, weights), clip)
    torch.testing.assert_close(found.total, expected, rtol=1e-9, atol=1e-11)
    assert int(found.clipped) == clipped


@pytest.mark.parametrize("name", KINDS)
def test_leading_axes_are_independent_replicates(name: str) -> None:
    kind, generator = KINDS[name], np.random.default_rng(0)
    objective = kind.of(4)
    points = torch.from_numpy(generator.standard_normal((5, objective.dimension)))
    records = drawn(kind, generator, 5, 7, 4)
    weights, clip = torch.full((7,), 1 / 7, dtype=F64), torch.linspace(0.1, 2.0, 5, dtype=F64).unsqueeze(1)
    together = objective.increment(Query([points]), Batch(records, weights), clip)
    for place in range(5):
        own = Records(records.features[place], records.labels[place])
        alone = objective.increment(Query([points[place]]), Batch(own, weights), float(clip[place]))
        torch.testing.assert_close(together.total[place], alone.total)
        assert together.clipped[place] == alone.clipped
        losses = objective.evaluate(points, own).loss
        torch.testing.assert_close(losses[place], objective.evaluate(points[place], own).loss)
