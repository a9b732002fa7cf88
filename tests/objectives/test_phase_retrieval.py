"""Rank-one increments of phase retrieval against automatic differentiation, record by record."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.data.synthetic import phase_retrieval
from fedpriv.loss.linear import PhaseRetrieval
from fedpriv.loss.objective import Batch, Query, Records


def drawn(generator: np.random.Generator, batch: int, features: int) -> Records:
    measurements = torch.from_numpy(generator.standard_normal((batch, features)))
    return Records(measurements, torch.from_numpy(generator.uniform(0.0, 2.0, batch)))


@given(
    power=st.sampled_from([1, 2]),
    batch=st.integers(1, 6),
    features=st.integers(1, 5),
    points=st.integers(1, 3),
    clip=st.floats(0.01, 20.0),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_increment_equals_autograd(
    power: int, batch: int, features: int, points: int, clip: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    objective = PhaseRetrieval(features, power, feature_norm=1.0, dtype=torch.float64)  # type: ignore[arg-type]
    at = [torch.from_numpy(generator.standard_normal(features)) for _ in range(points)]
    coefficients = list(generator.standard_normal(points))
    records = drawn(generator, batch, features)
    weights = torch.from_numpy(generator.uniform(0.1, 1.0, batch))
    expected, clipped = torch.zeros(features, dtype=torch.float64), 0
    for row, size, weight in zip(*records, weights, strict=True):
        increment = torch.zeros(features, dtype=torch.float64)
        for point, coefficient in zip(at, coefficients, strict=True):
            leaf = point.clone().requires_grad_()
            loss = ((leaf @ row).abs() ** power - size**power).abs()
            increment += coefficient * torch.autograd.grad(loss, leaf)[0]
        norm = float(increment.norm())
        clipped += norm > clip
        expected += weight * increment * (min(1.0, clip / norm) if norm else 1.0)
    found = objective.increment(Query(at, coefficients), Batch(records, weights), clip)
    torch.testing.assert_close(found.total, expected, rtol=1e-9, atol=1e-11)
    assert int(found.clipped) == clipped


def test_an_increment_that_is_not_finite_adds_nothing_and_counts_as_clipped() -> None:
    objective = PhaseRetrieval(2, 2, feature_norm=1.0, dtype=torch.float64)
    records = Records(torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    far = torch.tensor([1e200, 1.5], dtype=torch.float64)
    found = objective.increment(
        Query([far, far], [1e200, -1e200]), Batch(records, torch.ones(2, dtype=torch.float64)), 1.0
    )
    assert torch.isfinite(found.total).all()
    assert float(found.total.norm()) <= 2.0
    assert int(found.clipped) >= 1


def test_leading_axes_are_independent_replicates() -> None:
    generator = np.random.default_rng(0)
    objective = PhaseRetrieval(3, 1, feature_norm=1.0, dtype=torch.float64)
    point = torch.from_numpy(generator.standard_normal((4, 3)))
    records = Records(
        torch.from_numpy(generator.standard_normal((4, 5, 3))), torch.from_numpy(generator.uniform(0, 2, (4, 5)))
    )
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    together = objective.increment(Query([point]), Batch(records, weights), 0.7)
    for place in range(4):
        single = Records(records.features[place], records.labels[place])
        alone = objective.increment(Query([point[place]]), Batch(single, weights), 0.7)
        torch.testing.assert_close(together.total[place], alone.total)
        assert together.clipped[place] == alone.clipped
        torch.testing.assert_close(objective.losses(point, records)[place], objective.losses(point[place], single))


@pytest.mark.parametrize("power", [1, 2])
def test_the_loss_is_zero_at_the_hidden_vector_but_for_outliers(power: int) -> None:
    measurements, sizes, _, _ = phase_retrieval(4000, 10, dimension=8, outliers=0.0, seed=3)
    generous, wrong, _, _ = phase_retrieval(4000, 10, dimension=8, outliers=0.1, seed=3)
    assert np.allclose(np.linalg.norm(measurements, axis=1), 1.0)
    assert np.array_equal(measurements, generous)
    assert 0.07 < np.mean(wrong != sizes) < 0.13
    outer = np.einsum("ni,nj,n->ij", measurements, measurements, sizes**2)
    hidden = np.linalg.eigh(outer)[1][:, -1] * np.sqrt(8)  # the spectral estimate points along the hidden vector
    objective = PhaseRetrieval(8, power, feature_norm=1.0, dtype=torch.float64)  # type: ignore[arg-type]
    records = Records(torch.from_numpy(measurements), torch.from_numpy(sizes))
    near = objective.evaluate(torch.from_numpy(hidden), records)
    assert float(near.loss) < 0.2 * float(objective.evaluate(objective.initial(), records).loss)
    again, _, _, _ = phase_retrieval(4000, 10, dimension=8, outliers=0.0, seed=3)
    other, _, _, _ = phase_retrieval(4000, 10, dimension=8, outliers=0.0, seed=4)
    assert np.array_equal(again, measurements)
    assert not np.array_equal(other, measurements)
