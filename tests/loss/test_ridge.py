"""One release of second moments: distances in integers, what is solved, and what intervals cover."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.claims.ledger import make_release_streams
from fedpriv.core.errors import InputError
from fedpriv.loss import ridge
from fedpriv.loss.objective import Records
from fedpriv.loss.ridge import MeanStatistics, RidgeStatistics
from fedpriv.plan.plan import ROUNDING_ALLOWANCE, find_increment_diameter, make_plan
from fedpriv.plan.task import make_schema_task
from fedpriv.scenario.load import resolve_cell
from tests.data.tables import rows, table_tree, write_csv
from tests.loss.builders import F64, find_extent_by_force, list_integers, measure_calls, ones, sum_increments


def objective(*, classes: bool = True, penalty: float = 0.1, bound: float = 2.0) -> RidgeStatistics:
    return RidgeStatistics(3, bound, classes, penalty, F64)


def integers(asked: RidgeStatistics, rows: list[list[float]], labels: list[float], query: float = 1.0) -> Any:
    kind = torch.int64 if asked.classes else F64
    records = Records(torch.tensor(rows, dtype=F64), torch.tensor(labels, dtype=kind))
    return list_integers(asked, query * ones(asked.dimension), records)


@pytest.mark.parametrize("classes", [True, False])
def test_no_two_records_are_further_apart_than_is_charged(classes: bool) -> None:
    """Guarantee: norm 1 and `diameter` in integers, for records within the bound, beyond it, and hostile ones."""
    asked = objective(classes=classes)
    values = [-1.0, 0.0, 1.0, 1e3, 1e38, 5e-324, math.inf, math.nan]
    labels = [0, 1] if classes else [-1.0, 0.0, 1.0, 1e300, math.nan]
    cases = list(itertools.product(values, values, labels))
    length, distance = find_extent_by_force(
        integers(asked, [[a, b, 1.0] for a, b, _ in cases], [y for *_, y in cases])
    )
    assert length <= 1.0
    assert distance <= asked.diameter * (1.0 + ROUNDING_ALLOWANCE)


def test_the_distance_is_attained_by_records_at_right_angles() -> None:
    asked = objective(bound=math.sqrt(2.0))
    extent = find_extent_by_force(integers(asked, [[1.0, 0.0, 0.0]] * 2, [1, 0]))
    assert extent == pytest.approx((1.0, asked.diameter), rel=1e-6)


def test_what_is_asked_changes_nothing() -> None:
    asked = objective()
    for query in (0.0, -7.0, 1e30):
        rows = [[0.3, -0.2, 1.0]]
        np.testing.assert_array_equal(integers(asked, rows, [1], query), integers(asked, rows, [1]))


def drawn(count: int, draw: np.random.Generator, *, classes: bool) -> Records:
    features = np.hstack([draw.uniform(-1.0, 1.0, (count, 2)), np.ones((count, 1))])
    score = features @ np.array([0.4, -0.3, 0.1])
    if classes:
        labels = torch.from_numpy((draw.random(count) < 1.0 / (1.0 + np.exp(-2.0 * score))).astype(np.int64))
    else:
        labels = torch.from_numpy(np.clip(score + draw.normal(0.0, 0.1, count), -1.0, 1.0))
    return Records(torch.from_numpy(features), labels)


def mean_of(asked: RidgeStatistics, records: Records) -> torch.Tensor:
    return -sum_increments(asked, asked.initial(), records, 1.0).total / len(records.labels)


@pytest.mark.parametrize(("vectors", "chunks"), [(6, [2, 2, 1]), (2, [1] * 5)])
def test_moments_of_replicates_are_taken_a_few_records_at_a_time(
    vectors: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record takes a vector of all moments in each of three replicates, in a memory of so many vectors."""
    asked, draw = objective(), np.random.default_rng(1)
    replicates = [drawn(5, draw, classes=True) for _ in range(3)]
    points, weights = torch.zeros(3, asked.dimension, dtype=F64), torch.rand(3, 5, dtype=F64)
    monkeypatch.setattr(ridge, "_CHUNK_VALUES", vectors * asked.dimension)
    shapes = measure_calls(
        monkeypatch,
        RidgeStatistics,
        "_clip_increments",
        lambda _, view, query, batch, clip: batch.records.labels.shape,
    )
    together = sum_increments(
        asked, points, Records(*map(torch.stack, zip(*replicates, strict=True))), 1.0, weights
    )
    assert shapes == [(3, count) for count in chunks]
    for total, records, weight in zip(together.total, replicates, weights, strict=True):
        torch.testing.assert_close(total, sum_increments(asked, points[0], records, 1.0, weight).total)


@pytest.mark.parametrize("classes", [True, False])
def test_without_noise_the_weights_are_those_of_ridge_regression(classes: bool) -> None:
    asked, records = objective(classes=classes, bound=2.0), drawn(500, np.random.default_rng(0), classes=classes)
    z, y = records.features.numpy(), records.labels.numpy().astype(float)
    target = 2.0 * y - 1.0 if classes else y
    solved = np.linalg.solve(z.T @ z / 500 + 0.1 * np.eye(3), z.T @ target / 500) * (2.0 if classes else 1.0)
    np.testing.assert_allclose(asked.compute_weights(mean_of(asked, records)).numpy(), solved, atol=1e-9)
    evaluation, scores = asked.evaluate(mean_of(asked, records), records), z @ solved
    assert (evaluation.accuracy is not None) == classes
    losses = np.log1p(np.exp(-target * scores)) if classes else (scores - y) ** 2 / 2.0
    np.testing.assert_allclose(asked.losses(mean_of(asked, records), records).numpy(), losses, atol=1e-9)
    assert float(evaluation.loss) == pytest.approx(losses.mean())
    many = torch.stack([mean_of(asked, records), mean_of(asked, records) * 0.5])
    np.testing.assert_allclose(asked.compute_weights(many)[0].numpy(), solved, atol=1e-9)


def test_negative_eigenvalues_of_noise_make_no_weight_large() -> None:
    asked = objective(penalty=0.5)
    noisy = 100.0 * torch.randn(asked.dimension, generator=torch.Generator().manual_seed(0), dtype=F64)
    both = asked.moment_matrix(noisy)[:3, 3]
    assert float(asked.compute_weights(noisy).norm()) <= 2.0 * float(both.norm()) / 0.5 + 1e-9


@pytest.mark.parametrize(("classes", "factor"), [(False, 1.0), (True, 2.0)])
def test_coefficients_and_intervals_are_those_of_released_moments_by_hand(classes: bool, factor: float) -> None:
    """Two features and the constant with diag(1/2, 1, -1/10) for A, of which noise made the last, and λ = 1/4.

    Half of the row indices count, so that the release holds half of each mean, and half of the noise's std.
    """
    means = np.diag([0.5, 1.0, -0.1, 1.0])
    means[3, :3] = means[:3, 3] = 0.3, 0.6, 0.1
    released = 0.5 * means / 2.0**2 * np.where(np.eye(4), 1.0, math.sqrt(2.0))
    point = torch.from_numpy(released[np.triu_indices(4)])
    asked = objective(classes=classes, penalty=0.25, bound=2.0)
    result = asked.coefficients(point, MeanStatistics(0.005, 100, 0.5, 1))
    residual_square, noise_variance = 1.0 - 2.0 * 0.448 + 0.3104, (0.01 * 2.0**2) ** 2
    for coefficient, weight, moment in zip(result, (0.4, 0.48, 0.4), (0.5, 1.0, 0.0), strict=True):
        noise = noise_variance / 2.0 * (1.0 + 0.5504 + weight**2)
        error = math.sqrt(residual_square * moment / 100 + noise) / (moment + 0.25)
        assert coefficient.value == pytest.approx(factor * weight)
        assert coefficient.high - coefficient.value == pytest.approx(factor * 1.959964 * error, rel=1e-5)
        assert coefficient.value - coefficient.low == pytest.approx(factor * 1.959964 * error, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("std", [0.0, 0.004])
@pytest.mark.parametrize("classes", [True, False])
def test_intervals_cover_the_weights_of_the_population(classes: bool, std: float) -> None:
    """Guarantee: sampling and noise are in an interval."""
    draw = np.random.default_rng(4)
    asked = objective(classes=classes)
    true = asked.compute_weights(mean_of(asked, drawn(1_000_000, draw, classes=classes))).tolist()
    hits = list[bool]()
    for _ in range(400):
        point = mean_of(asked, drawn(1000, draw, classes=classes))
        noise = torch.from_numpy(std * draw.normal(size=asked.dimension))
        result = asked.coefficients(point + noise, MeanStatistics(std, 1000, 1.0, 1))
        hits += [each.low <= value <= each.high for each, value in zip(result, true, strict=True)]
    print(f"covered: {100 * float(np.mean(hits)):.1f} %")
    assert 0.95 - 4.5 * math.sqrt(0.0475 / 400) < float(np.mean(hits)) < 0.99


@dataclass(frozen=True)
class Liar(RidgeStatistics):
    """Moments that say of themselves that they lie close together."""

    @property
    def diameter(self) -> float:
        return 0.5


def tree_of(path: Any, **changes: Any) -> dict[str, Any]:
    tree = table_tree(write_csv(path / "t.csv", rows(300)))
    tree |= {
        "model": {"name": "ridge-statistics", "feature_norm": 2.0, "penalty": 0.1},
        "federation": {"silos": 2, "rounds": 1, "batches": [180, 120]},
        "privacy": {"relation": "replace-one", "mu": 1.0},
        "run": {"dtype": "float64", "evaluations": 1},
    }
    for section, keys in changes.items():
        tree[section] = {**tree[section], **keys}
    return tree


def test_one_release_is_charged_for_the_distance_that_is_proved_and_no_liar_is_believed(tmp_path: Any) -> None:
    cell = resolve_cell(tree_of(tmp_path), "test")
    assert cell.data.table_schema is not None
    honest = make_schema_task(cell, cell.data.table_schema).objective
    assert isinstance(honest, RidgeStatistics)
    for released in (False, True):
        plan = make_plan(cell, honest, for_release=released)
        assert plan.increment_diameter == pytest.approx(math.sqrt(2.0), rel=1e-5)
        assert make_release_streams(plan, 1)[0].mu == pytest.approx(1.0, rel=1e-6)
    liar = Liar(honest.features, honest.norm_bound, honest.classes, honest.penalty, honest.dtype)
    assert find_increment_diameter(liar, plan.estimator, plan.mechanism, plan.schedule) == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {"federation": {"rounds": 2, "epochs": 2}},
        {"algorithm": {"step": 0.5}},
        {"algorithm": {"clip": 0.5}},
        {"algorithm": {"name": "dp-ftrl", "mechanism": "tree"}},
    ],
)
def test_a_run_that_is_no_single_release_is_refused(tmp_path: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is one release"):
        resolve_cell(tree_of(tmp_path, **changes), "test")
