"""Units of several records: against a loop over units, and for any records that one of them can have."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fedpriv.loss.views
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.models import find_model
from fedpriv.loss.objective import Batch, Objective, Query, Records
from fedpriv.loss.views import PerUnit, absent_label, is_absent

CLIP, UNITS, MOST, FEATURES, CLASSES = 1.5, 7, 4, 5, 3


def softmax() -> Objective:
    return SoftmaxRegression(FEATURES, CLASSES, torch.float64)


def batch(*lead: int, seed: int = 0) -> Records:
    """Units of 1 to 4 records, the rest filled up."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*lead, UNITS, MOST, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (*lead, UNITS, MOST), generator=generator)
    counts = torch.randint(1, MOST + 1, (*lead, UNITS), generator=generator)
    there = torch.arange(MOST) < counts.unsqueeze(-1)
    return Records(features.where(there.unsqueeze(-1), 0.0), labels.where(there, -1))


def mean_of(objective: Objective, points: list[Tensor], coefficients: list[float], unit: Records) -> Tensor:
    """The mean increment of one unit's own records, each computed alone."""
    rows = [place for place, label in enumerate(unit.labels.tolist()) if label >= 0]
    one = torch.ones(1, dtype=torch.float64)
    total = torch.zeros(objective.dimension, dtype=torch.float64)
    for row in rows:
        alone = Records(unit.features[row : row + 1], unit.labels[row : row + 1])
        total += objective.increment(Query(points, coefficients), Batch(alone, one), 1e9).total
    return total / len(rows)


def clipped(vector: Tensor) -> Tensor:
    return vector * min(1.0, CLIP / float(vector.norm()))


@pytest.mark.parametrize("coefficients", [[1.0], [1.0, -0.5]])
def test_a_unit_is_the_clipped_mean_of_its_own_records(coefficients: list[float]) -> None:
    objective, records = softmax(), batch()
    generator = torch.Generator().manual_seed(3)
    points = [torch.randn(objective.dimension, generator=generator, dtype=torch.float64) for _ in coefficients]
    weights = torch.linspace(0.1, 1.0, UNITS, dtype=torch.float64)
    means = [mean_of(objective, points, coefficients, Records(*(c[u] for c in records))) for u in range(UNITS)]
    expected = sum(weight * clipped(mean) for weight, mean in zip(weights, means, strict=True))
    found = PerUnit(objective, MOST).increment(Query(points, coefficients), Batch(records, weights), CLIP)
    torch.testing.assert_close(found.total, expected, rtol=1e-9, atol=1e-12)
    assert int(found.clipped_count) == sum(float(mean.norm()) > CLIP for mean in means)
    assert 0 < int(found.clipped_count) < UNITS  # some are held, some are not
    rows = PerUnit(objective, MOST).per_record(
        Query(points, coefficients),
        Batch(records, torch.ones(UNITS, dtype=torch.float64)),
        torch.arange(UNITS),
        CLIP,
    )
    torch.testing.assert_close(rows, torch.stack([clipped(mean) for mean in means]), rtol=1e-9, atol=1e-12)


def test_replicates_lead_units_as_they_lead_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """And chunks of a few units give what all at once give."""
    objective, records = softmax(), batch(2)
    points = torch.randn(2, objective.dimension, dtype=torch.float64)
    weights = torch.rand(2, UNITS, dtype=torch.float64)
    unit = PerUnit(objective, MOST)
    together = unit.increment(Query([points]), Batch(records, weights), CLIP)
    monkeypatch.setattr(fedpriv.loss.views, "_CHUNK_VALUES", 1)
    chunked = unit.increment(Query([points]), Batch(records, weights), CLIP)
    for place in range(2):
        own = Records(*(column[place] for column in records))
        alone = unit.increment(Query([points[place]]), Batch(own, weights[place]), CLIP)
        for found in (together, chunked):
            torch.testing.assert_close(found.total[place], alone.total, rtol=1e-9, atol=1e-12)
            assert int(found.clipped_count[place]) == int(alone.clipped_count)


def test_units_of_one_record_are_records() -> None:
    objective, records = softmax(), batch()
    single = Records(records.features[:, :1], records.labels[:, :1])
    point, weights = torch.randn(objective.dimension, dtype=torch.float64), torch.ones(UNITS, dtype=torch.float64)
    found = PerUnit(objective, 1).increment(Query([point]), Batch(single, weights), CLIP)
    plain = objective.increment(Query([point]), Batch(Records(*(c[:, 0] for c in single)), weights), CLIP)
    torch.testing.assert_close(found.total, plain.total, rtol=1e-6, atol=1e-9)


WORST: dict[str, Callable[[Tensor], Tensor]] = {
    "no numbers": lambda features: features * math.nan,
    "infinite": lambda features: features / 0.0,
    "very large": lambda features: features * 1e150,
    "far away": lambda features: features + 1e6,
    "all alike": lambda features: torch.ones_like(features) * 50.0,
}


@pytest.mark.parametrize("kind", WORST)
def test_whatever_its_records_are_a_unit_moves_the_sum_by_its_clip(kind: str) -> None:
    """Guarantee of `PerUnit`: its weight times the clip, more records than others have and NaN included."""
    objective, records = softmax(), batch()
    point, weights = torch.randn(objective.dimension, dtype=torch.float64), torch.ones(UNITS, dtype=torch.float64)
    unit = PerUnit(objective, MOST)
    without = weights.clone()
    without[3] = 0.0
    others = unit.increment(Query([point]), Batch(records, without), CLIP).total
    features, labels = records.features.clone(), records.labels.clone()
    features[3] = WORST[kind](torch.randn(MOST, FEATURES, dtype=torch.float64))
    labels[3] = torch.arange(MOST) % CLASSES
    total = unit.increment(Query([point]), Batch(Records(features, labels), weights), CLIP).total
    assert torch.isfinite(total).all()
    assert float((total - others).norm()) <= CLIP * (1.0 + 1e-9)
    row = unit.per_record(
        Query([point]),
        Batch(Records(features, labels), torch.ones(UNITS, dtype=torch.float64)),
        torch.arange(UNITS),
        CLIP,
    )
    assert float(row[3].norm()) <= CLIP


def test_a_unit_without_records_adds_nothing() -> None:
    objective, records = softmax(), batch()
    empty = Records(records.features, records.labels.clone())
    empty.labels[2] = -1
    point, one = torch.randn(objective.dimension, dtype=torch.float64), torch.zeros(UNITS, dtype=torch.float64)
    one[2] = 1.0
    assert float(PerUnit(objective, MOST).increment(Query([point]), Batch(empty, one), CLIP).total.norm()) == 0.0


def test_a_network_takes_units_too() -> None:
    row = find_model("mlp")
    objective = row.objective((FEATURES,), CLASSES, torch.float64, row.settings.model_validate({"hidden": 6}))
    records, point = batch(), objective.initial()
    weights = torch.full((UNITS,), 0.5, dtype=torch.float64)
    means = [mean_of(objective, [point], [1.0], Records(*(c[u] for c in records))) for u in range(UNITS)]
    found = PerUnit(objective, MOST).increment(Query([point]), Batch(records, weights), CLIP)
    expected = sum(0.5 * clipped(mean) for mean in means)
    torch.testing.assert_close(found.total, expected, rtol=1e-9, atol=1e-12)


def test_labels_that_no_record_has() -> None:
    assert is_absent(torch.tensor([0, -1, 2])).tolist() == [False, True, False]
    numbers = torch.tensor([0.0, math.nan, -1.0])
    assert is_absent(numbers).tolist() == [False, True, False]
    assert math.isnan(absent_label(numbers))
    assert absent_label(torch.tensor([1])) == -1
