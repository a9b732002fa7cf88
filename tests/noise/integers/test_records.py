"""From a query and records to integers: for every objective, within the norm, and each record for itself."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.models import MODELS, convolutional_net
from fedpriv.loss.objective import Batch, Objective, Query, Records, View, fast_paths
from fedpriv.loss.views import LocalSteps, LocalTraining, PerUnit, QuantileClip
from fedpriv.noise.integers.increments import make_dummy_record, sum_integer_increments
from fedpriv.noise.integers.strategies import choose_lattice
from tests.loss.builders import first_rows
from tests.loss.test_hostile_queries import CASES, F32, F64, Case, records_of
from tests.noise.integers.hostile_floats import random_floats

HELD = 7
"""Records of a round."""
CASES_HERE = {
    **CASES,
    "softmax regression of bytes": Case(lambda dtype: SoftmaxRegression(5, 3, 5.0**0.5, dtype, denominator=255)),
    "the CNN": Case(
        lambda dtype: make_module_objective(convolutional_net(3), 784, CrossEntropy(), 0, dtype), features=784
    ),
}
HOSTILE = (math.nan, math.inf, -math.inf, 1e38, -1e308, 5e-324)


def objective_of_case(name: str, dtype: torch.dtype, rows: int = HELD) -> Any:
    return CASES_HERE[name].make(dtype).for_batch(first_rows(1, ((0, rows),)))


def some_records(name: str, dtype: torch.dtype, count: int = HELD, seed: int = 3) -> Records:
    found = records_of(CASES_HERE[name], ["ordinary"] * count, dtype, seed)
    if "bytes" in name:
        generator = np.random.default_rng(seed)
        pixels = torch.from_numpy(generator.integers(0, 256, found.features.shape).astype(np.float64))
        return found._replace(features=(pixels / 255.0).to(dtype))
    return found


def sum_of(
    objective: Objective, query: Query, records: Records, clip: float = 1.0, norm: int | None = None
) -> np.ndarray:
    """Sum of the records' integers, on the lattice of 36 bits for the clip or with `norm` units as its length."""
    lattice, rows = choose_lattice([clip], 36), np.arange(len(records.labels))
    length, factor = (lattice.norm(clip), lattice.factor()) if norm is None else (norm, float(norm))
    return sum_integer_increments(objective, query, clip, records, length, factor, row_indices=rows)


def with_row(records: Records, place: int, other: Records) -> Records:
    """`records` with the row `place` of another batch."""
    columns = [column.clone() for column in records]
    for column, source in zip(columns, other, strict=True):
        column[place] = source[place]
    return Records(*columns)


def points_of(objective: Objective, dtype: torch.dtype, seed: int = 5) -> list[Tensor]:
    generator = np.random.default_rng(seed)
    first = objective.initial() + 0.3 * torch.from_numpy(generator.standard_normal(objective.dimension)).to(dtype)
    return [first, first + 0.01 * torch.from_numpy(generator.standard_normal(objective.dimension)).to(dtype)]


def integer_square(values: np.ndarray) -> int:
    return sum(int(value) ** 2 for value in values.tolist())


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CASES_HERE)
def test_integer_sums_match_the_float_sums_of_clipped_increments(name: str, dtype: torch.dtype) -> None:
    """What trains is what it was: the float sum of the same objective, to the precision of the run's type."""
    objective, records = objective_of_case(name, dtype), some_records(name, dtype)
    points = points_of(objective, dtype)
    for query in (Query(points[:1]), Query(points, (3.0, -2.0))):
        expected = objective.increment(query, Batch(records, torch.ones(HELD, dtype=F64)), 1.0).total.numpy()
        found = sum_of(objective, query, records) / 2.0**36
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < (2e-4 if dtype == F32 else 1e-8)


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CASES_HERE)
def test_a_records_integers_do_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    """Guarantee: among batches of one shape, row b depends on record b, its place and public values alone.

    Swapping record 2 moves the sum by the same integers, whoever is beside it: other records, records in
    another order, or rows that make NaN, infinity and numbers of every size.
    """
    objective = objective_of_case(name, dtype)
    query = Query(points_of(objective, dtype), (3.0, -2.0))
    records, swapped = some_records(name, dtype), some_records(name, dtype, seed=4)
    others = [some_records(name, dtype, seed=seed) for seed in (11, 12)]
    order = torch.tensor([4, 0, 2, 6, 1, 3, 5])
    others.append(Records(*(column[order] for column in records)))
    for value in HOSTILE:
        hostile = some_records(name, dtype, seed=13)
        hostile.features[::3] = torch.tensor(value, dtype=F64).to(dtype)
        others.append(hostile)
    moved = []
    for batch in (records, *others):
        before, after = (sum_of(objective, query, with_row(batch, 2, source)) for source in (records, swapped))
        moved.append(after - before)
    assert moved[0].any()
    assert all(np.array_equal(difference, moved[0]) for difference in moved[1:])


@pytest.mark.parametrize("name", ["softmax regression", "CNN", "first order, softmax", "zeroth order, softmax"])
def test_increments_are_computed_one_record_at_a_time_and_a_failing_one_is_zeros(name: str) -> None:
    """Every evaluation has one row, whoever fails: the sum lacks that record's integers and no others change."""
    objective, records = objective_of_case(name, F32), some_records(name, F32)
    query = Query(points_of(objective, F32), (1.0, -1.0))
    seen = []

    class Watched(View):
        def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
            seen.append((len(batch.weights), rows.tolist()))
            if 5 in rows and failing:
                raise FloatingPointError("record 5")
            return self.base.per_record(query, batch, rows, clip)

    failing = False
    whole = sum_of(Watched(objective), query, records)
    failing = True
    without = sum_of(Watched(objective), query, records)
    assert seen == [(1, [place]) for place in range(HELD)] * 2
    assert 0 < integer_square(whole - without) <= (2**36) ** 2


def test_byte_features_use_the_outer_product_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that are bytes need no d values a record; with a clip of few units they would lose too much."""
    name = "softmax regression of bytes"
    objective, records = objective_of_case(name, F32), some_records(name, F32)
    query = Query(points_of(objective, F32)[:1])
    monkeypatch.setattr(
        SoftmaxRegression, "per_record", Mock(side_effect=AssertionError("increments were formed"))
    )
    assert sum_of(objective, query, records).any()
    assert fast_paths(objective).outer.max_feature_norm >= 255 * math.sqrt(5)
    small = 2**16 * fast_paths(objective).outer.max_feature_norm - 1
    assert not sum_of(objective, query, records, norm=small).any()  # all failed
    monkeypatch.undo()
    general, outer = (
        sum_of(objective, query, records, norm=small) / small,
        sum_of(objective, query, records) / 2**36,
    )
    assert np.linalg.norm(general - outer) < 1e-4 * np.linalg.norm(outer)


@pytest.mark.parametrize(
    "keys", [{}, {"feature_norm": 4.0}, {"centre": 0.1}, {"features": "orientations", "feature_norm": 1.0}]
)
def test_scaled_features_round_to_integers_within_their_bound(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are rounded by moves a sum by less than 2^-9 of it; bytes are not rounded."""
    row = MODELS["softmax-regression"]
    given_settings = row.settings.model_validate(keys)
    generator = np.random.default_rng(1)
    images = generator.integers(0, 256, (9, 8, 8)).astype(np.uint8)
    labels = torch.from_numpy(generator.integers(0, 10, 9))
    for dtype in (F32, F64):
        features = row.features(images, dtype, given_settings)
        objective = row.objective(tuple(features.shape[1:]), 10, dtype, given_settings)
        outer = fast_paths(objective).outer
        assert outer is not None
        scaled = features.double() * outer.denominator
        integers = scaled.round()
        assert float(integers.abs().max()) <= 2**16
        assert float(torch.linalg.vector_norm(integers, dim=1).max()) <= outer.max_feature_norm
        if not keys:
            assert float((scaled - integers).abs().max()) < 1e-4
        records, query = Records(features, labels), Query(points_of(objective, dtype), (3.0, -2.0))
        with monkeypatch.context() as patch:
            rounded = sum_of(objective, query, records)
            patch.setattr("fedpriv.noise.integers.increments.suits_rank_one", lambda *_: False)
            formed = sum_of(objective, query, records)
        assert np.linalg.norm(rounded - formed) < 2**-9 * np.linalg.norm(formed)


@pytest.mark.parametrize("name", CASES_HERE)
def test_dummy_records_add_nothing_to_the_sum_and_no_record_is_dropped(name: str) -> None:
    """Guarantee: a round that draws few is filled up, and one that draws very many is read whole."""
    objective, records = objective_of_case(name, F32), some_records(name, F32)
    points = points_of(objective, F32)[:1]

    def sum_in(count: int, of: Records) -> list[int]:
        total = sum_integer_increments(objective, Query(points), 1.0, of, 2**36, 2.0**36, min_calls=count)
        return [int(value) for value in total]

    whole = sum_in(HELD, records)
    assert any(whole)
    assert all(sum_in(count, records) == whole for count in (1, HELD + 2))
    few = Records(*(column[:2] for column in records))
    assert sum_in(2, few) == sum_in(5, few) != whole


def test_sum_of_no_records_is_zero_and_dummy_records_are_all_zeros() -> None:
    objective = objective_of_case("softmax regression", F32)
    query = Query(points_of(objective, F32)[:1])
    assert not sum_integer_increments(objective, query, 1.0, None, 2**36, 2.0**36).any()
    for name in ("softmax regression", "least squares"):
        records = some_records(name, F32)
        assert all(not column.any() and len(column) == 1 for column in make_dummy_record(records))
        assert [column.dtype for column in make_dummy_record(records)] == [column.dtype for column in records]


def test_local_training_refuses_increments_of_single_records() -> None:
    base = objective_of_case("softmax regression", F32)
    training = LocalTraining(base, 0.1, 1, 1)
    assert fast_paths(training) == (None, None)
    batch = Batch(some_records("softmax regression", F32), torch.ones(HELD, dtype=torch.float64))
    with pytest.raises(Exception, match="no increments of single records"):
        training.per_record(Query([base.initial()]), batch, torch.arange(HELD), 1.0)


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", [name for name in CASES_HERE if name != "the CNN"])
def test_any_query_leaves_every_records_integers_within_their_norm(name: str, dtype: torch.dtype) -> None:
    """Guarantee: one record moves the sum by at most K under zero-out, whatever bits the points have."""
    objective, generator = objective_of_case(name, dtype), np.random.default_rng(6)
    for seed in range(12):
        kinds = list(generator.choice(["ordinary", "zero", "huge", "all scales", "not finite"], 3))
        records = records_of(CASES_HERE[name], kinds, dtype, seed)
        few = random_floats(generator, 32 if dtype == F32 else 64, (1 + seed % 2, 4))
        points = [torch.from_numpy(np.resize(values, objective.dimension)) for values in few]
        coefficients = [(1.0, -1.0), (5.0, -4.0), (2.0**30, -(2.0**30))][seed % 3][: len(points)]
        clip, query = 2.0 ** int(generator.integers(-40, 41)), Query(points, coefficients)
        norm = choose_lattice([clip], 36).norm(clip)
        torch.set_flush_denormal(seed % 4 >= 2)
        try:
            for row in range(3):
                alone = Records(*(column[row : row + 1] for column in records))
                found = sum_of(objective, query, alone, clip)
                assert found.dtype == np.int64
                assert integer_square(found) <= norm**2
            assert integer_square(sum_of(objective, query, records, clip)) <= (3 * norm) ** 2
        finally:
            torch.set_flush_denormal(False)


UNITS, MOST, FEATURES, CLASSES = 6, 4, 5, 3
CLIP = 1.0
LATTICE = choose_lattice([CLIP], 36)


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
    return sum_of(PerUnit(LOOKS[look](loss), MOST), Query([point]), records, CLIP)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e30, math.nan, math.inf])
@pytest.mark.parametrize("look", LOOKS)
def test_replacing_a_person_moves_the_sum_by_at_most_twice_the_norm_in_any_batch(
    look: str, dtype: torch.dtype, size: float
) -> None:
    """Guarantee of `sum_integer_increments`, for persons: also where their records make NaN, infinity, or huge
    gradients.
    """
    generator = torch.Generator().manual_seed(1)
    point = torch.randn(FEATURES * CLASSES + (look == "quantile"), generator=generator, dtype=dtype)
    one, other = persons(1, dtype), persons(2, dtype)
    hostile = other._replace(features=other.features * size)
    moved = integers(with_row(one, 2, hostile), point, look) - integers(one, point, look)
    assert integer_square(moved) <= (2 * LATTICE.norm(CLIP)) ** 2
    company = persons(3, dtype)
    with_one = integers(with_row(company, 2, one), point, look)
    again = integers(with_row(company, 2, hostile), point, look) - with_one
    assert np.array_equal(moved, again)


def test_integer_sum_over_persons_matches_the_sum_of_clipped_means() -> None:
    records, point = persons(4, torch.float64), torch.zeros(FEATURES * CLASSES, dtype=torch.float64)
    objective = PerUnit(SoftmaxRegression(FEATURES, CLASSES, 9.0, torch.float64), MOST)
    batch = Batch(records, torch.ones(UNITS, dtype=torch.float64))
    expected = objective.increment(Query([point]), batch, CLIP).total
    np.testing.assert_allclose(integers(records, point) * LATTICE.unit, expected.numpy(), atol=1e-8)
