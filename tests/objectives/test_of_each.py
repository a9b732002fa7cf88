"""Increments of several batches at once are those of each batch alone, bit for bit."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fedpriv.clients.increments import Bounded
from fedpriv.objectives import Increment, LogisticRegression, Objective, OfEach, Records, SoftmaxRegression
from fedpriv.objectives.per_unit import PerUnit

SHAPES = list(itertools.product((1, 2, 10, 17), (1, 14, 17, 785, 1025), (1, 2, 9, 33), (1, 2, 17)))
"""(classes, features, records, batches), around the widths of vectors and where norms change their type."""


def bits(found: Increment) -> tuple[bytes, bytes]:
    return found.total.numpy().tobytes(), found.clipped.numpy().tobytes()


def hostile(features: Tensor, which: int) -> Tensor:
    """Nothing, a record that is no number, one too large to be held, or squares that underflow."""
    if which == 1:
        features[0, 0, 0] = torch.nan
    if which == 2:
        features[-1, -1] *= 1e30
    return features * 1e-30 if which == 3 else features


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("held", [True, False])
def test_softmax_regression(dtype: torch.dtype, held: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for case, (classes, features, size, batches) in enumerate(SHAPES):
        plain: Objective = SoftmaxRegression(features, classes, 3.0, dtype)
        objective = Bounded(plain) if held else plain
        inputs = hostile(torch.rand(batches, size, features, generator=generator, dtype=dtype), case % 4)
        records = Records(inputs, torch.randint(0, classes, (batches, size), generator=generator))
        points = tuple(torch.randn(2, classes * features, generator=generator, dtype=dtype))
        points = (points[0], points[1] * (1e20 if case % 7 == 0 else 1.0))
        weights = torch.full((size,), 1.0 / size, dtype=torch.float64)
        of_each = objective.of_each(points, (3.0, -2.0), records, weights, 0.3)
        assert of_each is not None
        for place in range(batches):
            alone = Records(*(column[place].clone() for column in records))
            one = objective.increment(points, (3.0, -2.0), alone, weights, 0.3)
            assert bits(of_each(place)) == bits(one), (classes, features, size, batches, place)


def test_another_look_does_not_take_its_bases_increments_for_its_own() -> None:
    objective = SoftmaxRegression(3, 2, 3.0)
    records = Records(torch.rand(2, 4, 5, 3), torch.zeros(2, 4, 5, dtype=torch.int64))
    given = (objective.initial(),), (1.0,), records, torch.ones(4), 1.0
    assert PerUnit(objective, 5).of_each(*given) is None
    assert LogisticRegression(3, 3.0).of_each(*given) is None
    assert Bounded(LogisticRegression(3, 3.0)).of_each(*given) is None


class Lying(SoftmaxRegression):
    """An objective whose increments are as long as it likes, or no numbers."""

    def of_each(self, *given: Any) -> OfEach:
        totals = torch.full((self.dimension,), 5.0), torch.full((self.dimension,), torch.nan)
        return lambda place: Increment(totals[place], torch.tensor(0))


def test_increments_of_several_batches_are_held_to_what_their_records_can_add_up_to() -> None:
    objective = Bounded(Lying(3, 2, 3.0))
    records = Records(torch.rand(2, 4, 3), torch.zeros(2, 4, dtype=torch.int64))
    found = objective.of_each((objective.initial(),), (1.0,), records, torch.full((4,), 0.25), 0.5)
    assert found is not None
    assert float(found(0).total.norm()) == pytest.approx(0.5, rel=1e-5)
    assert float(found(1).total.norm()) == 0.0
