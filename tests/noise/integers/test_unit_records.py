"""Units of several records as integers: a person moves the sums by one K, however many records the person has."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.loss.objective import Batch, Objective, Query, Records
from fedpriv.loss.softmax import SoftmaxRegression
from fedpriv.loss.views import LocalSteps, PerUnit, QuantileClip
from fedpriv.noise.integers.increments import integer_sum
from fedpriv.noise.integers.strategies import lattice_for

UNITS, MOST, FEATURES, CLASSES = 6, 4, 5, 3
CLIP = 1.0
LATTICE = lattice_for([CLIP], 36)


def persons(seed: int, dtype: torch.dtype) -> Records:
    """Of 1 to 4 records each; a label of -1 is no record."""
    generator = np.random.default_rng(seed)
    features = torch.from_numpy(3.0 * generator.standard_normal((UNITS, MOST, FEATURES))).to(dtype)
    labels = torch.from_numpy(generator.integers(0, CLASSES, (UNITS, MOST)))
    counts = torch.from_numpy(generator.integers(1, MOST + 1, UNITS))
    return Records(features, labels.where(torch.arange(MOST) < counts.unsqueeze(-1), -1))


LOOKS: dict[str, Callable[[Objective], Objective]] = {
    "gradient": lambda loss: loss,
    "own steps": lambda loss: LocalSteps(loss, 0.3, 4),
    "own batches": lambda loss: LocalSteps(loss, 0.3, 4, 3),
    "quantile": lambda loss: QuantileClip(LocalSteps(loss, 0.3, 4), 0.5, 1.0),
}


def integers(records: Records, point: Tensor, look: str = "gradient") -> np.ndarray:
    loss = SoftmaxRegression(FEATURES, CLASSES, 9.0, point.dtype)
    objective = PerUnit(LOOKS[look](loss), MOST)
    norm = LATTICE.norm(CLIP)
    return integer_sum(objective, Query([point]), CLIP, records, norm, LATTICE.factor())


def with_unit(records: Records, place: int, other: Records) -> Records:
    columns = [column.clone() for column in records]
    for column, source in zip(columns, other, strict=True):
        column[place] = source[place]
    return Records(*columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e30, math.nan, math.inf])
@pytest.mark.parametrize("look", LOOKS)
def test_a_person_moves_the_sum_by_twice_k_at_most_and_the_others_not_at_all(
    look: str, dtype: torch.dtype, size: float
) -> None:
    """Guarantee of `integer_sum`, for persons: also where their records make NaN, infinity, or huge gradients."""
    generator = torch.Generator().manual_seed(1)
    point = torch.randn(FEATURES * CLASSES + (look == "quantile"), generator=generator, dtype=dtype)
    one, other = persons(1, dtype), persons(2, dtype)
    hostile = other._replace(features=other.features * size)
    moved = integers(with_unit(one, 2, hostile), point, look) - integers(one, point, look)
    assert sum(int(value) ** 2 for value in moved) <= (2 * LATTICE.norm(CLIP)) ** 2
    company = persons(3, dtype)
    with_one = integers(with_unit(company, 2, one), point, look)
    again = integers(with_unit(company, 2, hostile), point, look) - with_one
    assert np.array_equal(moved, again)


def test_the_sum_is_that_of_clipped_means() -> None:
    records, point = persons(4, torch.float64), torch.zeros(FEATURES * CLASSES, dtype=torch.float64)
    objective = PerUnit(SoftmaxRegression(FEATURES, CLASSES, 9.0, torch.float64), MOST)
    expected = objective.increment(
        Query([point]), Batch(records, torch.ones(UNITS, dtype=torch.float64)), CLIP
    ).total
    np.testing.assert_allclose(integers(records, point) * LATTICE.unit, expected.numpy(), atol=1e-8)
