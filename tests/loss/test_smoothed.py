"""Random smoothing: unbiased, keyed by row, within the clip of a neighbour; and the Goldstein measure."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedpriv.loss import goldstein
from fedpriv.loss.estimators import VarianceReducedGradient
from fedpriv.loss.ghost import GhostObjective
from fedpriv.loss.goldstein import (
    DirectionWindow,
    GoldsteinView,
    RandomSmoothing,
    SeededDirections,
    compute_mean_gradients,
    find_min_norm_point,
    goldstein_measure,
    measure_objective,
)
from fedpriv.loss.linear import PhaseRetrieval, SoftmaxRegression
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.objective import Batch, Objective, Query, Records
from fedpriv.rounds.floats import initial_running_sum, update_running_sum
from tests.loss.builders import (
    F32,
    F64,
    Patch,
    first_rows,
    list_increments,
    measure_calls,
    ones,
    pick,
    sum_increments,
)
from tests.papers.goldstein_golden import ExactlySmoothed

DIMENSION, ALPHA = 5, 0.3
ORDERS = [(order, shared) for order in ("first", "zeroth") for shared in (True, False)]
BASE = PhaseRetrieval(DIMENSION, 1, feature_norm=1.0, dtype=F64)


def smoothed(
    order: Any,
    directions: int,
    shared: bool = True,
    base: Objective = BASE,
    seeds: tuple[int, ...] = (1,),
    anchor: int = 0,
) -> RandomSmoothing:
    anchor = anchor or (1 if order == "first" else directions)
    return RandomSmoothing(base, ALPHA, order, directions, anchor, shared, SeededDirections(seeds))


def near(*values: float) -> list[Tensor]:
    return [torch.full((DIMENSION,), value, dtype=F64) for value in values]


QUERIES = [Query(near(0.3)), Query(near(0.3, 0.1), (1.0, -1.0))]


def record(size: float) -> Records:
    row = torch.tensor([[1.0, -2.0, 0.5, 1.5, 1.0]], dtype=F64)
    return Records(row / row.norm(), torch.tensor([size], dtype=F64))


@pytest.mark.parametrize(("order", "shared"), ORDERS)
def test_estimates_are_unbiased(order: str, shared: bool) -> None:
    """40,000 rows that hold the same record: their mean is ∇f_α(z) - ∇f_α(z') within 5 standard errors."""
    rows, one = 40_000, record(0.2)
    exact = ExactlySmoothed(DIMENSION, 1, feature_norm=1.0, dtype=F64, alpha=ALPHA)
    objective = smoothed(order, 1, shared).for_batch(first_rows(3, ((0, rows),)))
    many = Records(one.features.expand(rows, -1), one.labels.expand(rows))
    for query in QUERIES:
        estimate = sum_increments(objective, query, many, weights=ones(rows) / rows)
        error = estimate.total - sum_increments(exact, query, one).total
        spread = DIMENSION * len(query.points) / math.sqrt(rows)  # no estimate is longer than d for each point
        assert float(error.norm()) < 5 * spread / 2
        assert float(error.abs().max()) < 0.02
        assert int(estimate.clipped_count) == 0


def test_directions_are_keyed_by_seed_silo_round_and_row() -> None:
    like = torch.zeros(4, dtype=F64)
    source = SeededDirections((1,))
    drawn = source.sphere(first_rows(2, ((0, 3), (5, 2))), 2, like)
    assert drawn.shape == (5, 2, 4)
    torch.testing.assert_close(torch.linalg.vector_norm(drawn, dim=-1), torch.ones(5, 2, dtype=F64))
    assert torch.equal(source.sphere(first_rows(2, ((5, 2),)), 2, like), drawn[3:])
    for other in (first_rows(3, ((5, 2),)), first_rows(2, ((6, 2),))):
        assert not torch.allclose(source.sphere(other, 2, like), drawn[3:])
    both = SeededDirections((1, 9)).sphere(first_rows(2, ((5, 2),)), 2, like)
    assert torch.equal(both[0], drawn[3:])
    assert not torch.allclose(both[1], drawn[3:])


@pytest.mark.parametrize("dimension", [1, 2, 6])
def test_the_ball_is_filled_uniformly(dimension: int) -> None:
    """‖y‖^d is uniform on [0, 1], and no direction is preferred."""
    points = SeededDirections((6,)).ball(first_rows(1, ((0, 20_000),)), 1, torch.zeros(dimension, dtype=F64))
    shares = np.sort((torch.linalg.vector_norm(points, dim=-1) ** dimension).numpy().ravel())
    assert np.max(np.abs(shares - (np.arange(20_000) + 0.5) / 20_000)) < 1.95 / math.sqrt(20_000)
    assert float(points.mean(0).norm()) < 5 / math.sqrt(20_000)


@pytest.mark.parametrize(("order", "shared"), ORDERS)
def test_one_record_moves_a_period_by_its_clip_at_most_and_nothing_else(order: str, shared: bool) -> None:
    """Replace a record by one that pulls the other way: 2 C/B, in its own round and the rest of its period."""
    period, rounds, batch = 4, 10, 2
    estimator = VarianceReducedGradient(0.05, 0.01, period)
    objective = smoothed(order, 2, shared)
    generator = torch.Generator().manual_seed(0)
    path = 0.5 * torch.randn((rounds, DIMENSION), generator=generator, dtype=F64)
    features = torch.randn((rounds, batch, DIMENSION), generator=generator, dtype=F64)
    labels = torch.rand((rounds, batch), generator=generator, dtype=F64)
    weights = ones(batch) / batch

    def sums(sizes: Tensor) -> list[Tensor]:
        state, result = initial_running_sum(path[0]), []
        for t in range(1, rounds + 1):
            looked_at = objective.for_batch(first_rows(t, ((0, batch),)))
            records = Records(features[t - 1], sizes[t - 1])
            state, _ = update_running_sum(state, estimator.round(t), path[t - 1], looked_at, records, weights, 2)
            result.append(state.total)
        return result

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
    pulls = [sum_increments(objective, ones(DIMENSION), record(size), 0.4) for size in (0.0, 100.0)]
    assert float((pulls[0].total - pulls[1].total).norm()) == pytest.approx(0.8)
    assert [int(pull.clipped_count) for pull in pulls] == [1, 1]


@pytest.mark.parametrize(("order", "shared"), ORDERS)
def test_nobody_drawn_is_a_sum_of_nothing(order: str, shared: bool) -> None:
    """Directions of no rows, of all silos or of one of two, whose other rows are as they are without it."""
    objective, nobody = smoothed(order, 2, shared), pick(record(0.2), slice(0))
    for query in QUERIES:
        empty = objective.for_batch(first_rows(3, ((0, 0), (1, 0))))
        assert not sum_increments(empty, query, nobody, 1.0).total.any()
        assert list_increments(empty, query, nobody, 1.0).shape == (0, DIMENSION)
        beside, alone = (objective.for_batch(first_rows(3, silos)) for silos in (((0, 0), (1, 1)), ((1, 1),)))
        totals = [sum_increments(part, query, record(0.2), 9.0).total for part in (beside, alone)]
        assert torch.equal(*totals)


def test_shared_directions_make_a_difference_small() -> None:
    """Zeroth order: with shared directions at most 2 d L D/α surely; with independent ones the spread stays."""
    query = Query(near(0.4, 0.4 + 1e-4), (1.0, -1.0))
    distance = float((query.points[1] - query.points[0]).norm())
    norms: dict[bool, list[float]] = {True: [], False: []}
    for shared, lengths in norms.items():
        for t in range(1, 50):
            objective = smoothed("zeroth", 1, shared).for_batch(first_rows(t, ((0, 1),)))
            lengths.append(float(sum_increments(objective, query, record(0.3)).total.norm()))
    assert max(norms[True]) <= DIMENSION * distance / ALPHA * (1 + 1e-9)
    assert np.median(norms[False]) > 100 * max(norms[True])


@pytest.mark.parametrize("order", ["first", "zeroth"])
def test_any_model_can_be_smoothed_and_replicates_are_alone(order: str) -> None:
    base: Any = SoftmaxRegression(3, 2, feature_norm=1.0, dtype=F64)
    generator = np.random.default_rng(1)
    points = [torch.from_numpy(generator.standard_normal((2, 6))) for _ in range(2)]
    features = torch.from_numpy(generator.standard_normal((2, 4, 3)))
    records = Records(features, torch.from_numpy(generator.integers(0, 2, (2, 4))))
    weights = torch.tensor([[1.0, 0.5, 0.25, 0.0], [0.5, 1.0, 0.0, 0.75]], dtype=F64)
    clip = torch.tensor([[0.2], [0.5]], dtype=F64)
    slots, coefficients = first_rows(1, ((0, 1), (1, 3))), [1.0, -1.0]
    together = smoothed(order, 2, base=base, seeds=(1, 2), anchor=2).for_batch(slots)
    result = sum_increments(together, Query(points, coefficients), records, clip, weights)
    for place, seed in enumerate((1, 2)):
        single, query = smoothed(order, 2, base=base, seeds=(seed,)).for_batch(slots), [p[place] for p in points]
        own = pick(records, place)
        alone = sum_increments(single, Query(query, coefficients), own, float(clip[place]), weights[place])
        torch.testing.assert_close(result.total[place], alone.total, rtol=1e-10, atol=1e-12)
        assert result.clipped_count[place] == alone.clipped_count


def test_it_needs_the_slots_of_a_batch() -> None:
    with pytest.raises(ValueError, match="slots"):
        sum_increments(smoothed("first", 2), BASE.initial(), record(1.0), 1.0)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("dtype", [F32, F64])
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


@pytest.mark.parametrize(("order", "shared"), ORDERS)
@pytest.mark.parametrize("points", [1, 2])
def test_directions_taken_a_few_at_a_time_give_the_contribution_of_all(
    monkeypatch: Patch, order: str, shared: bool, points: int
) -> None:
    objective = smoothed(order, 6, shared).for_batch(first_rows(3, ((1, 4),)))
    generator = torch.Generator().manual_seed(0)
    query = [torch.randn(DIMENSION, generator=generator, dtype=F64) for _ in range(points)]
    records = Records(torch.randn((4, DIMENSION), generator=generator, dtype=F64), torch.rand(4, dtype=F64))
    places = torch.tensor([3, 1, 0, 2])
    asked, own = Query(query, [1.0, -0.5][:points]), Batch(pick(records, places), ones(4))
    at_once = objective.per_record(asked, own, places, 0.7)
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", 2 * DIMENSION)
    torch.testing.assert_close(objective.per_record(asked, own, places, 0.7), at_once)
    torch.testing.assert_close(at_once.sum(0), sum_increments(objective, asked, records, 0.7).total)


def test_a_record_has_few_directions_at_a_time(monkeypatch: Patch) -> None:
    """Memory of a guard does not grow with the number of directions in a scenario."""
    sizes = measure_calls(monkeypatch, SeededDirections, "sphere", lambda drawn, *_: drawn.numel())
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", 2 * DIMENSION)
    objective = smoothed("zeroth", 6, shared=True).for_batch(first_rows(3, ((1, 4),)))
    query = Query(near(0.0, 1.0), (1.0, -1.0))
    objective.per_record(query, Batch(record(0.1), ones(1)), torch.tensor([2]), 0.7)
    assert set(sizes) == {2 * DIMENSION}


@pytest.mark.parametrize(("order", "shared"), ORDERS)
@pytest.mark.parametrize("points", [1, 2])
def test_few_rows_and_few_directions_at_a_time_give_what_all_give(
    monkeypatch: Patch, order: str, shared: bool, points: int
) -> None:
    """Rows apart have the very bits of rows together, and replicates beside others those that they have alone."""
    slots, seeds = first_rows(3, ((1, 4), (2, 3))), (1, 2)
    generator = torch.Generator().manual_seed(0)
    around = [torch.randn((2, DIMENSION), generator=generator, dtype=F64) for _ in range(points)]
    records = Records(
        torch.randn((2, 7, DIMENSION), generator=generator, dtype=F64),
        torch.rand((2, 7), generator=generator, dtype=F64),
    )
    asked = Query(around, [1.0, -0.5][:points])
    weights, clip = ones(7) / 7, torch.tensor([[0.2], [0.7]], dtype=F64)
    both = smoothed(order, 6, shared, seeds=seeds, anchor=6).for_batch(slots)
    whole = sum_increments(both, asked, records, clip, weights)
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", 2 * 6 * DIMENSION)
    assert torch.equal(sum_increments(both, asked, records, clip, weights).total, whole.total)
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", 4 * DIMENSION)
    few = sum_increments(both, asked, records, clip, weights)
    torch.testing.assert_close(few.total, whole.total)
    assert torch.equal(few.clipped_count, whole.clipped_count)
    for place, seed in enumerate(seeds):
        alone = smoothed(order, 6, shared, seeds=(seed,), anchor=6).for_batch(slots)
        query = Query([point[place] for point in around], asked.coefficients)
        own = sum_increments(alone, query, pick(records, place), clip[place], weights)
        assert torch.equal(own.total, few.total[place])


@pytest.mark.parametrize("order", ["first", "zeroth"])
@pytest.mark.parametrize("hostile", [math.nan, math.inf, 1e200])
def test_guarantee_few_directions_at_a_time_are_clipped_together(
    monkeypatch: Patch, order: str, hostile: float
) -> None:
    """A record moves the sum by its clip at most, however many parts it is taken in; one not held adds nothing."""
    monkeypatch.setattr("fedpriv.loss.goldstein._CHUNK_VALUES", DIMENSION)
    base, (point,) = PhaseRetrieval(DIMENSION, 2, feature_norm=1.0, dtype=F64), near(2.0)
    objective = smoothed(order, 6, base=base, anchor=6).for_batch(first_rows(1, ((0, 1),)))
    pull = sum_increments(objective, point, record(0.1), 0.01)
    assert 0.0099 < float(pull.total.norm()) <= 0.01
    assert int(pull.clipped_count) == 1
    bad = record(0.1)
    bad.features[0, 2] = hostile
    lost = sum_increments(objective, point, bad, 0.01)
    assert int(lost.clipped_count) == 1
    assert not lost.total.any()


# The Goldstein measure, on functions whose subdifferential is known


@pytest.mark.parametrize(
    ("rows", "norm"),
    [
        ([(1, 0), (0, 1)], 0.707106781187),
        ([(2, 1), (2, -1), (5, 0)], 2.0),
        ([(1, 0), (-1, 0)], 0.0),
        ([(3, 4)], 5.0),
        ([(1, 2, 2), (2, -1, 0), (0, 1, -2), (1, 1, 1)], 1.069044967650),
        ([(0, 0), (1, 1)], 0.0),
        ([(0, 0), (0, 0)], 0.0),
        ([(2, -2), (1, -1)], 1.414213562373),
    ],
)
def test_golden_norms(rows: list[tuple[float, ...]], norm: float) -> None:
    assert find_min_norm_point(np.array(rows, np.float64)).norm == pytest.approx(norm, abs=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 12), st.floats(-2.0, 2.0), st.booleans())
@settings(max_examples=60)
def test_the_certificate_closes_the_gap(seed: int, count: int, dimension: int, shift: float, signs: bool) -> None:
    """Also for degenerate sets of ±1 vectors, where other solvers go wrong."""
    points = np.random.default_rng(seed).standard_normal((count, dimension))
    points = np.sign(points) if signs else points + shift
    result = find_min_norm_point(points)
    scale = float(np.max(np.linalg.norm(points, axis=1)))
    assert result.certificate <= result.norm * (1 + 1e-9) + 1e-12
    assert result.norm - result.certificate < 1e-5 * scale or result.norm < 1e-5 * scale
    random = np.random.default_rng(seed).dirichlet(np.ones(count), size=20) @ points
    assert np.min(np.linalg.norm(random, axis=1)) >= result.norm - 1e-9


def of_the_larger(points: Any) -> Any:
    """Gradients of max(x, y): near its ridge conv{(1, 0), (0, 1)} has least norm 1/√2."""
    return np.where(points[:, :1] > points[:, 1:], [[1.0, 0.0]], [[0.0, 1.0]])


@pytest.mark.parametrize(
    ("gradient", "point", "radius", "expected"),
    [
        (np.sign, [0.3], 0.5, 0.0), (np.sign, [-0.49], 0.5, 0.0), (np.sign, [0.51], 0.5, 1.0),
        (np.sign, [-2.0], 0.5, 1.0), (of_the_larger, [0.1, 0.0], 0.2, math.sqrt(0.5)),
        (of_the_larger, [1.0, 0.0], 0.2, 1.0),
    ],
)  # fmt: skip
def test_the_measure_of_a_kink_is_known(gradient: Any, point: list[float], radius: float, expected: float) -> None:
    """|x| within 1/2 of its kink has gradients of both signs, hence 0; elsewhere the measure is the slope."""
    measured = goldstein_measure(gradient, np.array(point), radius, 400, seed=1)
    assert measured == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("radius", [0.1, 0.5, 2.0])
def test_quadratic(radius: float) -> None:
    """|x|²/2: its gradients in the ball are the ball, so the least norm is max(|x| - r, 0), from above."""
    exact = max(1.0 - radius, 0.0)
    measured = goldstein_measure(lambda points: points, np.array([0.8, -0.6]), radius, 3000, seed=2)
    assert exact <= measured <= exact + 0.05 * radius


def test_more_points_never_raise_the_measure() -> None:
    point = np.array([0.5, 0.1, -0.3])
    measured = [goldstein_measure(lambda points: points**3, point, 0.3, n, seed=4) for n in (4, 16, 64, 256)]
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
    result = compute_mean_gradients(objective, point.detach().unsqueeze(0), records)
    torch.testing.assert_close(result.squeeze(0), expected, rtol=1e-10, atol=1e-12)


def test_gradients_that_rounding_moves_out_of_a_subspace_have_a_least_norm() -> None:
    """Points of a plane, rounded to float32.  Before: an endless loop, or a LinAlgError, for every second seed."""
    for seed in range(1, 20):
        draw = np.random.default_rng(seed)
        plane = draw.normal(size=6) + draw.normal(size=(32, 2)) @ draw.normal(size=(2, 6))
        result = find_min_norm_point(plane.astype(np.float32).astype(np.float64))
        assert result.certificate == pytest.approx(result.norm, rel=1e-6)


def test_an_evaluation_measures_each_model_at_256_points(monkeypatch: Patch) -> None:
    counts = measure_calls(monkeypatch, goldstein, "compute_mean_gradients", lambda _, loss, at, records: len(at))
    points = torch.stack(near(0.3, 2.0))
    metrics = GoldsteinView(BASE, 0.5).evaluate(points, record(1.0)).metrics
    assert sum(counts) == 2 * 256
    expected = [measure_objective(BASE, point, record(1.0), 0.5, 256, seed=0) for point in points]
    assert metrics["goldstein"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1] * 10), (4 * 15 + 14, [4, 4, 2]), (2**22, [10])])
@pytest.mark.parametrize(
    "base",
    [
        BASE,
        SoftmaxRegression(DIMENSION, 3, feature_norm=1.0, dtype=F64),
        GhostObjective(nn.Sequential(nn.Linear(DIMENSION, 2)), CrossEntropy(), 0, F64),
    ],
    ids=["one score", "three scores", "module"],
)
def test_few_models_are_measured_at_a_time(
    base: Objective, limit: int, sizes: list[int], monkeypatch: Patch
) -> None:
    """Each model may take the features of three records."""
    labels = torch.zeros(3, dtype=F64 if base is BASE else torch.int64)
    records = Records(torch.eye(3, DIMENSION, dtype=F64), labels)
    point = torch.arange(1.0, base.dimension + 1.0, dtype=F64)
    whole = measure_objective(base, point, records, 3.0, 10, seed=1)
    monkeypatch.setattr(goldstein, "_BLOCK_VALUES", limit)
    counts = measure_calls(monkeypatch, goldstein, "compute_mean_gradients", lambda _, loss, at, records: len(at))
    axes = measure_calls(
        monkeypatch, type(base), "increment", lambda _, loss, query, batch, clip: batch.records.features.dim()
    )
    assert measure_objective(base, point, records, 3.0, 10, seed=1) == pytest.approx(whole)
    assert counts == sizes
    # Models of a linear objective share the features, (records, features).
    assert set(axes) == {3 if isinstance(base, GhostObjective) else 2}


def test_modules_are_measured_and_smoothed_for_several_models() -> None:
    """Before: the measure of a module raised a ValueError, and clips of several replicates an IndexError."""
    base = GhostObjective(
        nn.Sequential(nn.Linear(DIMENSION, 3), nn.GELU(), nn.Linear(3, 2)), CrossEntropy(), 0, F64
    )
    records = Records(torch.randn(7, DIMENSION, dtype=F64), torch.arange(7) % 2)
    models = torch.stack([base.initial(), base.initial() + 0.1])
    expected = torch.stack([base.gradient(model, Batch(records, ones(7) / 7.0)) for model in models])
    torch.testing.assert_close(compute_mean_gradients(base, models, records), expected)

    both = Records(*(column.expand(2, *column.shape) for column in records))
    layout, clips = first_rows(1, ((0, 7),)), torch.tensor([[0.5], [0.2]], dtype=F64)
    objective = smoothed("first", 2, base=base, seeds=(1, 2)).for_batch(layout)
    total = objective.increment(Query((models,)), Batch(both, ones(7)), clips).total
    for seed, model, clip, result in zip((1, 2), models, clips.flatten().tolist(), total, strict=True):
        single = smoothed("first", 2, base=base, seeds=(seed,)).for_batch(layout)
        torch.testing.assert_close(result, single.increment(Query((model,)), Batch(records, ones(7)), clip).total)
