"""Random smoothing: unbiased, keyed by row, and no farther than the clip from a neighbour."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.loss.estimators import VarianceReducedGradient
from fedpriv.loss.goldstein import DirectionWindow, RandomSmoothing, SeededDirections
from fedpriv.loss.linear import PhaseRetrieval, SoftmaxRegression
from fedpriv.loss.objective import Batch, Objective, Query, Records
from fedpriv.rounds.floats import initial_running_sum, update_running_sum
from tests.loss.builders import first_rows, sum_increments
from tests.papers.goldstein_golden import ExactlySmoothed

DTYPE, DIMENSION, ALPHA = torch.float64, 5, 0.3
BASE = PhaseRetrieval(DIMENSION, 1, feature_norm=1.0, dtype=DTYPE)


def smoothed(
    order: str, directions: int, shared: bool = True, base: Objective = BASE, seed: int = 1
) -> RandomSmoothing:
    anchor = 1 if order == "first" else directions
    return RandomSmoothing(base, ALPHA, order, directions, anchor, shared, SeededDirections((seed,)))  # type: ignore[arg-type]


def record(size: float) -> Records:
    row = torch.tensor([[1.0, -2.0, 0.5, 1.5, 1.0]], dtype=DTYPE)
    return Records(row / row.norm(), torch.tensor([size], dtype=DTYPE))


@pytest.mark.parametrize("order", ["first", "zeroth"])
@pytest.mark.parametrize("shared", [True, False])
def test_estimates_are_unbiased(order: str, shared: bool) -> None:
    """40,000 rows that hold the same record: their mean is ∇f_α(z) - ∇f_α(z') within 5 standard errors."""
    rows, weights = 40_000, torch.full((40_000,), 1 / 40_000, dtype=DTYPE)
    one = record(0.2)
    points = [torch.full((DIMENSION,), value, dtype=DTYPE) for value in (0.3, 0.1)]
    exact = ExactlySmoothed(DIMENSION, 1, feature_norm=1.0, dtype=DTYPE, alpha=ALPHA)
    for used, coefficients in ((points[:1], [1.0]), (points, [1.0, -1.0])):
        expected = exact.increment(Query(used, coefficients), Batch(one, torch.ones(1, dtype=DTYPE)), 1e9).total
        objective = smoothed(order, 1, shared).for_batch(first_rows(3, ((0, rows),)))
        many = Records(one.features.expand(rows, -1), one.labels.expand(rows))
        estimate = objective.increment(Query(used, coefficients), Batch(many, weights), 1e9)
        spread = DIMENSION * len(used) / math.sqrt(rows)  # no estimate is longer than d for each point
        assert float((estimate.total - expected).norm()) < 5 * spread / 2
        assert float((estimate.total - expected).abs().max()) < 0.02
        assert int(estimate.clipped_count) == 0


def test_directions_are_keyed_by_seed_silo_round_and_row() -> None:
    like = torch.zeros(4, dtype=DTYPE)
    source = SeededDirections((1,))
    drawn = source.sphere(first_rows(2, ((0, 3), (5, 2))), 2, like)
    assert drawn.shape == (5, 2, 4)
    torch.testing.assert_close(torch.linalg.vector_norm(drawn, dim=-1), torch.ones(5, 2, dtype=DTYPE))
    assert torch.equal(source.sphere(first_rows(2, ((5, 2),)), 2, like), drawn[3:])
    for other in (first_rows(3, ((5, 2),)), first_rows(2, ((6, 2),))):
        assert not torch.allclose(source.sphere(other, 2, like), drawn[3:])
    both = SeededDirections((1, 9)).sphere(first_rows(2, ((5, 2),)), 2, like)
    assert torch.equal(both[0], drawn[3:])
    assert not torch.allclose(both[1], drawn[3:])


@pytest.mark.parametrize("dimension", [1, 2, 6])
def test_the_ball_is_filled_uniformly(dimension: int) -> None:
    """‖y‖^d is uniform on [0, 1], and no direction is preferred."""
    points = SeededDirections((6,)).ball(first_rows(1, ((0, 20_000),)), 1, torch.zeros(dimension, dtype=DTYPE))
    shares = np.sort((torch.linalg.vector_norm(points, dim=-1) ** dimension).numpy().ravel())
    assert np.max(np.abs(shares - (np.arange(20_000) + 0.5) / 20_000)) < 1.95 / math.sqrt(20_000)
    assert float(points.mean(0).norm()) < 5 / math.sqrt(20_000)


@pytest.mark.parametrize("order", ["first", "zeroth"])
@pytest.mark.parametrize("shared", [True, False])
def test_one_record_moves_a_period_by_its_clip_at_most_and_nothing_else(order: str, shared: bool) -> None:
    """Replace a record by one that pulls the other way: 2 C/B, in its own round and the rest of its period."""
    period, rounds, batch = 4, 10, 2
    estimator = VarianceReducedGradient(0.05, 0.01, period)
    objective = smoothed(order, 2, shared)
    generator = torch.Generator().manual_seed(0)
    path = 0.5 * torch.randn((rounds, DIMENSION), generator=generator, dtype=DTYPE)
    features = torch.randn((rounds, batch, DIMENSION), generator=generator, dtype=DTYPE)
    labels = torch.rand((rounds, batch), generator=generator, dtype=DTYPE)
    weights = torch.full((batch,), 1 / batch, dtype=DTYPE)

    def sums(sizes: Tensor) -> list[Tensor]:
        state, found = initial_running_sum(path[0]), []
        for t in range(1, rounds + 1):
            looked_at = objective.for_batch(first_rows(t, ((0, batch),)))
            records = Records(features[t - 1], sizes[t - 1])
            state, _ = update_running_sum(state, estimator.round(t), path[t - 1], looked_at, records, weights, 2)
            found.append(state.total)
        return found

    before = sums(labels)
    for changed in range(1, rounds + 1):
        sizes = labels.clone()
        sizes[changed - 1, 1] = 100.0
        moved = [after - other for after, other in zip(sums(sizes), before, strict=True)]
        clip = float(estimator.round(changed).clip)
        last = min(rounds, (changed - 1) // period * period + period)
        for t, difference in enumerate(moved, start=1):
            if not changed <= t <= last:
                assert not difference.any()
            else:
                assert float(difference.norm()) <= 2 * clip / batch * (1 + 1e-12)
                torch.testing.assert_close(difference, moved[changed - 1], rtol=0, atol=1e-13)


def test_the_bound_of_an_anchor_is_attained() -> None:
    """b = 0 and b = 100 at the same measurement: opposite gradients, both clipped: 2 C/B."""
    objective = smoothed("first", 1).for_batch(first_rows(1, ((0, 1),)))
    point, one = torch.ones(DIMENSION, dtype=DTYPE), torch.ones(1, dtype=DTYPE)
    pulls = [objective.increment(Query([point]), Batch(record(size), one), 0.4) for size in (0.0, 100.0)]
    assert float((pulls[0].total - pulls[1].total).norm()) == pytest.approx(0.8)
    assert [int(pull.clipped_count) for pull in pulls] == [1, 1]


@pytest.mark.parametrize("order", ["first", "zeroth"])
@pytest.mark.parametrize("shared", [True, False])
def test_nobody_drawn_is_a_sum_of_nothing(order: str, shared: bool) -> None:
    """Directions of no rows, of all silos or of one of two, whose other rows are as they are without it."""
    points = [torch.full((DIMENSION,), value, dtype=DTYPE) for value in (0.3, 0.1)]
    for used, coefficients in ((points[:1], [1.0]), (points, [1.0, -1.0])):
        objective, none = (
            smoothed(order, 2, shared).for_batch(first_rows(3, ((0, 0), (1, 0)))),
            torch.ones(0, dtype=DTYPE),
        )
        nobody = Records(*(column[:0] for column in record(0.2)))
        assert not objective.increment(Query(used, coefficients), Batch(nobody, none), 1.0).total.any()
        places = torch.zeros(0, dtype=torch.int64)
        assert objective.per_record(
            Query(used, coefficients), Batch(nobody, torch.ones(len(places), dtype=torch.float64)), places, 1.0
        ).shape == (0, DIMENSION)
        one = torch.ones(1, dtype=DTYPE)
        totals = [
            smoothed(order, 2, shared)
            .for_batch(first_rows(3, silos))
            .increment(Query(used, coefficients), Batch(record(0.2), one), 9.0)
            .total
            for silos in (((0, 0), (1, 1)), ((1, 1),))
        ]
        assert torch.equal(*totals)


def test_shared_directions_make_a_difference_small() -> None:
    """Zeroth order: with shared directions at most 2 d L D/α surely; with independent ones the spread stays."""
    near = [torch.full((DIMENSION,), 0.4, dtype=DTYPE), torch.full((DIMENSION,), 0.4 + 1e-4, dtype=DTYPE)]
    distance, one = float((near[1] - near[0]).norm()), torch.ones(1, dtype=DTYPE)
    norms: dict[bool, list[float]] = {True: [], False: []}
    for shared, seen in norms.items():
        for t in range(1, 50):
            objective = smoothed("zeroth", 1, shared).for_batch(first_rows(t, ((0, 1),)))
            seen.append(
                float(objective.increment(Query(near, [1.0, -1.0]), Batch(record(0.3), one), 1e9).total.norm())
            )
    assert max(norms[True]) <= DIMENSION * distance / ALPHA * (1 + 1e-9)
    assert np.median(norms[False]) > 100 * max(norms[True])


@pytest.mark.parametrize("order", ["first", "zeroth"])
def test_any_model_can_be_smoothed_and_replicates_are_alone(order: str) -> None:
    base: Any = SoftmaxRegression(3, 2, feature_norm=1.0, dtype=DTYPE)
    generator = np.random.default_rng(1)
    points = [torch.from_numpy(generator.standard_normal((2, 6))) for _ in range(2)]
    features = torch.from_numpy(generator.standard_normal((2, 4, 3)))
    labels = torch.from_numpy(generator.integers(0, 2, (2, 4)))
    weights, clip = torch.full((4,), 0.25, dtype=DTYPE), torch.tensor([[0.2], [0.5]], dtype=DTYPE)
    slots = first_rows(1, ((0, 1), (1, 3)))
    together = RandomSmoothing(base, ALPHA, order, 2, 2, True, SeededDirections((1, 2))).for_batch(slots)  # type: ignore[arg-type]
    found = together.increment(Query(points, [1.0, -1.0]), Batch(Records(features, labels), weights), clip)
    for place, seed in enumerate((1, 2)):
        single = smoothed(order, 2, base=base, seed=seed).for_batch(slots)
        alone = single.increment(
            Query([point[place] for point in points], [1.0, -1.0]),
            Batch(Records(features[place], labels[place]), weights),
            float(clip[place]),
        )
        torch.testing.assert_close(found.total[place], alone.total, rtol=1e-10, atol=1e-12)
        assert found.clipped_count[place] == alone.clipped_count


def test_it_needs_the_slots_of_a_batch() -> None:
    with pytest.raises(ValueError, match="slots"):
        sum_increments(smoothed("first", 2), BASE.initial(), record(1.0), 1.0)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_window_of_directions_is_the_same_as_among_all(dtype: torch.dtype, count: int) -> None:
    """Of any rows of any silo, any of their directions: a silo draws few at a time, and may not draw others."""
    slots, like = first_rows(2, ((0, 3), (5, 4))), torch.zeros(37, dtype=dtype)
    source = SeededDirections((1,))
    for draw in (source.sphere, source.ball):
        drawn = draw(slots, count, like)
        for places in ([0], [2, 3, 6], [5, 0]):
            for first in range(count):
                window = DirectionWindow(places, first, count)
                torch.testing.assert_close(draw(slots, count, like, window), drawn[places, first:])


@pytest.mark.parametrize("order", ["first", "zeroth"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("points", [1, 2])
def test_directions_taken_a_few_at_a_time_give_the_contribution_of_all(
    monkeypatch: pytest.MonkeyPatch, order: str, shared: bool, points: int
) -> None:
    objective = smoothed(order, 6, shared).for_batch(first_rows(3, ((1, 4),)))
    generator = torch.Generator().manual_seed(0)
    query = [torch.randn(DIMENSION, generator=generator, dtype=DTYPE) for _ in range(points)]
    records = Records(torch.randn((4, DIMENSION), generator=generator, dtype=DTYPE), torch.rand(4, dtype=DTYPE))
    places = torch.tensor([3, 1, 0, 2])
    asked = Query(query, [1.0, -0.5][:points])
    own = Batch(Records(*(column[places] for column in records)), torch.ones(4, dtype=torch.float64))
    at_once = objective.per_record(asked, own, places, 0.7)
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", 2 * DIMENSION)
    torch.testing.assert_close(objective.per_record(asked, own, places, 0.7), at_once)
    whole = objective.increment(asked, Batch(records, own.weights), 0.7).total
    torch.testing.assert_close(at_once.sum(0), whole)


def test_a_record_has_few_directions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a guard does not grow with the number of directions in a scenario."""
    drawn: list[torch.Tensor] = []
    sphere = SeededDirections.sphere

    def counted(*given: Any) -> torch.Tensor:
        drawn.append(sphere(*given))
        return drawn[-1]

    monkeypatch.setattr(SeededDirections, "sphere", counted)
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", 2 * DIMENSION)
    objective = smoothed("zeroth", 6, shared=True).for_batch(first_rows(3, ((1, 4),)))
    query = Query([torch.zeros(DIMENSION, dtype=DTYPE), torch.ones(DIMENSION, dtype=DTYPE)], [1.0, -1.0])
    own = Batch(record(0.1), torch.ones(1, dtype=DTYPE))
    objective.per_record(query, own, torch.tensor([2]), 0.7)
    assert drawn
    assert {part.numel() for part in drawn} == {2 * DIMENSION}


@pytest.mark.parametrize("order", ["first", "zeroth"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("points", [1, 2])
def test_few_rows_and_few_directions_at_a_time_give_what_all_give(
    monkeypatch: pytest.MonkeyPatch, order: str, shared: bool, points: int
) -> None:
    """Rows apart have the very bits of rows together, and replicates beside others those that they have alone."""
    slots, seeds = first_rows(3, ((1, 4), (2, 3))), (1, 2)
    generator = torch.Generator().manual_seed(0)
    around = [torch.randn((2, DIMENSION), generator=generator, dtype=DTYPE) for _ in range(points)]
    records = Records(
        torch.randn((2, 7, DIMENSION), generator=generator, dtype=DTYPE),
        torch.rand((2, 7), generator=generator, dtype=DTYPE),
    )
    asked = Query(around, [1.0, -0.5][:points])
    batch, clip = Batch(records, torch.full((7,), 1 / 7, dtype=DTYPE)), torch.tensor([[0.2], [0.7]], dtype=DTYPE)
    both = RandomSmoothing(BASE, ALPHA, order, 6, 6, shared, SeededDirections(seeds)).for_batch(slots)  # type: ignore[arg-type]
    whole = both.increment(asked, batch, clip)
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", 2 * 6 * DIMENSION)
    assert torch.equal(both.increment(asked, batch, clip).total, whole.total)
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", 4 * DIMENSION)
    few = both.increment(asked, batch, clip)
    torch.testing.assert_close(few.total, whole.total)
    assert torch.equal(few.clipped_count, whole.clipped_count)
    for place, seed in enumerate(seeds):
        alone = RandomSmoothing(BASE, ALPHA, order, 6, 6, shared, SeededDirections((seed,))).for_batch(slots)  # type: ignore[arg-type]
        own = Batch(Records(*(column[place] for column in records)), batch.weights)
        found = alone.increment(Query([point[place] for point in around], asked.coefficients), own, clip[place])
        assert torch.equal(found.total, few.total[place])


@pytest.mark.parametrize("order", ["first", "zeroth"])
@pytest.mark.parametrize("hostile", [math.nan, math.inf, 1e200])
def test_guarantee_few_directions_at_a_time_are_clipped_together(
    monkeypatch: pytest.MonkeyPatch, order: str, hostile: float
) -> None:
    """A record moves the sum by its clip at most, however many parts it is taken in; one not held adds nothing."""
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", DIMENSION)
    base = PhaseRetrieval(DIMENSION, 2, feature_norm=1.0, dtype=DTYPE)
    one, point = torch.ones(1, dtype=DTYPE), torch.full((DIMENSION,), 2.0, dtype=DTYPE)
    objective = smoothed(order, 6, base=base)
    objective = dataclasses.replace(objective, anchor_direction_count=6).for_batch(first_rows(1, ((0, 1),)))
    pull = objective.increment(Query([point]), Batch(record(0.1), one), 0.01)
    assert 0.0099 < float(pull.total.norm()) <= 0.01
    assert int(pull.clipped_count) == 1
    bad = record(0.1)
    bad.features[0, 2] = hostile
    lost = objective.increment(Query([point]), Batch(bad, one), 0.01)
    assert int(lost.clipped_count) == 1
    assert not lost.total.any()
