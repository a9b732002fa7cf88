"""Units of several records, and a client's steps as one increment: against loops, and for any records."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedpriv.loss.views
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.models import find_model
from fedpriv.loss.objective import Batch, Objective, Query, Records
from fedpriv.loss.views import LocalSteps, PerUnit, QuantileClip, absent_label, is_absent, joint_clip
from tests.loss.builders import (
    F64,
    Patch,
    all_but,
    list_increments,
    measure_calls,
    ones,
    pick,
    pick_one,
    sum_increments,
)

CLIP, UNITS, MOST, FEATURES, CLASSES = 1.5, 7, 4, 5, 3
STEP, STEPS, STEPS_CLIP = 0.4, 5, 0.7


def softmax() -> Objective:
    return SoftmaxRegression(FEATURES, CLASSES, 1.0, F64)


def network() -> Objective:
    row = find_model("mlp")
    return row.objective((FEATURES,), CLASSES, F64, row.settings.model_validate({"hidden": 6}))


def batch(*lead: int, seed: int = 0) -> Records:
    """Units of 1 to 4 records, the rest filled up."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*lead, UNITS, MOST, FEATURES, generator=generator, dtype=F64)
    labels = torch.randint(0, CLASSES, (*lead, UNITS, MOST), generator=generator)
    counts = torch.randint(1, MOST + 1, (*lead, UNITS), generator=generator)
    there = torch.arange(MOST) < counts.unsqueeze(-1)
    return Records(features.where(there.unsqueeze(-1), 0.0), labels.where(there, -1))


def random_point(objective: Objective, seed: int = 3) -> Tensor:
    return torch.randn(objective.dimension, generator=torch.Generator().manual_seed(seed), dtype=F64)


def means(objective: Objective, query: Query | Tensor, records: Records) -> list[Tensor]:
    """The mean increment of each unit's own records, each computed alone."""
    sums: list[Any] = []
    for unit in range(UNITS):
        rows = [pick_one(pick(records, unit), row) for row in range(MOST) if int(records.labels[unit, row]) >= 0]
        sums.append(sum(sum_increments(objective, query, row).total for row in rows) / len(rows))
    return sums


def moves(objective: Objective, query: Tensor, records: Records, size: int | None = None) -> list[Tensor]:
    """The query less the model after the steps, gradient by gradient, of each client alone."""
    distances = []
    for unit in (pick(records, number) for number in range(UNITS)):
        model = query
        for step in range(STEPS):
            taken = range(MOST) if size is None else [(step * size + place) % MOST for place in range(size)]
            own = [pick_one(unit, place) for place in taken if int(unit.labels[place]) >= 0]
            total = sum((sum_increments(objective, model, row).total for row in own), torch.zeros_like(model))
            model = model - STEP * total / max(1, len(own))
        distances.append(query - model)
    return distances


def check_clipped_mean(
    unit: PerUnit, query: Query | Tensor, records: Records, expected: list[Tensor], clip: float
) -> int:
    """Sum and rows are those of these vectors of the units, clipped; how many are."""
    weights = torch.linspace(0.1, 1.0, UNITS, dtype=F64)
    clipped = torch.stack([vector * min(1.0, clip / float(vector.norm())) for vector in expected])
    result = sum_increments(unit, query, records, clip, weights)
    torch.testing.assert_close(result.total, weights @ clipped, rtol=1e-9, atol=1e-12)
    assert int(result.clipped_count) == sum(float(vector.norm()) > clip for vector in expected)
    torch.testing.assert_close(list_increments(unit, query, records, clip), clipped, rtol=1e-9, atol=1e-12)
    return int(result.clipped_count)


@pytest.mark.parametrize("coefficients", [[1.0], [1.0, -0.5]])
def test_a_unit_is_the_clipped_mean_of_its_own_records(coefficients: list[float]) -> None:
    objective, records = softmax(), batch()
    generator = torch.Generator().manual_seed(3)
    points = [torch.randn(objective.dimension, generator=generator, dtype=F64) for _ in coefficients]
    query, unit = Query(points, coefficients), PerUnit(objective, MOST)
    clipped_count = check_clipped_mean(unit, query, records, means(objective, query, records), CLIP)
    assert 0 < clipped_count < UNITS  # some are held, some are not


def test_a_network_takes_units_too() -> None:
    objective, records = network(), batch()
    point = objective.initial()
    check_clipped_mean(PerUnit(objective, MOST), point, records, means(objective, point, records), CLIP)


@pytest.mark.parametrize("made", [softmax, network])
@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_client_moves_as_its_own_steps_do_and_is_clipped_whole(
    made: Callable[[], Objective], size: int | None
) -> None:
    objective, records = made(), batch()
    query = objective.initial() + 0.1 * random_point(objective, 4)
    unit = PerUnit(LocalSteps(objective, STEP, STEPS, size), MOST)
    assert check_clipped_mean(unit, query, records, moves(objective, query, records, size), STEPS_CLIP) > 0


def test_clients_side_by_side_move_as_each_does_and_nothing_is_clipped() -> None:
    records, query = batch(), random_point(softmax())
    clients, weights = Records(records.features, records.labels.clamp(min=0)), (records.labels >= 0).double()
    result = sum_increments(LocalSteps(softmax(), STEP, STEPS), query.repeat(UNITS, 1), clients, CLIP, weights)
    expected = torch.stack(moves(softmax(), query, records))
    torch.testing.assert_close(result.total, expected, rtol=1e-9, atol=1e-12)
    assert result.clipped_count.tolist() == [0] * UNITS


def test_replicates_lead_units_as_they_lead_records(monkeypatch: Patch) -> None:
    """And chunks of a few units give what all at once give."""
    unit, records = PerUnit(softmax(), MOST), batch(2)
    points = torch.stack([random_point(softmax(), seed) for seed in (3, 4)])
    weights = torch.rand(2, UNITS, dtype=F64)
    together = sum_increments(unit, points, records, CLIP, weights)
    sizes = measure_calls(
        monkeypatch, PerUnit, "_clip_units", lambda _, view, query, batch, clip: batch.records.labels.shape[-2]
    )
    for size, chunk_sizes in ((1, [1] * UNITS), (3, [3, 3, 1])):
        # A unit takes its vector and its features, in each of the two replicates.  One more unit lacks one value.
        values = (size + 1) * 2 * (FEATURES * CLASSES + MOST * FEATURES) - 1
        monkeypatch.setattr(fedpriv.loss.views, "_CHUNK_VALUES", values)
        sizes.clear()
        chunked = sum_increments(unit, points, records, CLIP, weights)
        assert sizes == chunk_sizes
    for place in range(2):
        alone = sum_increments(unit, points[place], pick(records, place), CLIP, weights[place])
        for result in (together, chunked):
            torch.testing.assert_close(result.total[place], alone.total, rtol=1e-9, atol=1e-12)
            assert int(result.clipped_count[place]) == int(alone.clipped_count)


def test_units_of_one_record_are_records() -> None:
    objective, records = softmax(), batch()
    point = random_point(objective)
    alone = sum_increments(PerUnit(objective, 1), point, pick(records, (slice(None), slice(1))), CLIP)
    plain = sum_increments(objective, point, pick(records, (slice(None), 0)), CLIP)
    torch.testing.assert_close(alone.total, plain.total, rtol=1e-6, atol=1e-9)


WORST: dict[str, Callable[[Tensor], Tensor]] = {
    "no numbers": lambda features: features * math.nan,
    "infinite": lambda features: features / 0.0,
    "very large": lambda features: features * 1e150,
    "far away": lambda features: features + 1e6,
    "all alike": lambda features: torch.ones_like(features) * 50.0,
}
FAR = LocalSteps(softmax(), 30.0, STEPS)
UNIT_KINDS: dict[str, tuple[Objective, float]] = {
    "mean": (softmax(), CLIP),
    "steps that lead far away": (FAR, STEPS_CLIP),
    "steps and a quantile": (QuantileClip(FAR, 0.5, 1.0), joint_clip(0.5)),
}


@pytest.mark.parametrize("worst", WORST)
@pytest.mark.parametrize("kind", UNIT_KINDS)
def test_whatever_its_records_are_a_unit_moves_the_sum_by_its_clip(kind: str, worst: str) -> None:
    """Guarantee of `PerUnit`, also over `LocalSteps`: zero-out within C, replace-one within 2 C, NaN included."""
    base, clip = UNIT_KINDS[kind]
    unit, records, point = PerUnit(base, MOST), batch(), torch.randn(FEATURES * CLASSES, dtype=F64)
    if unit.dimension > len(point):
        point = torch.cat([point, torch.tensor([0.3], dtype=F64)])
    hostile = Records(records.features.clone(), records.labels.clone())
    hostile.features[3] = WORST[worst](torch.randn(MOST, FEATURES, dtype=F64))
    hostile.labels[3] = torch.arange(MOST) % CLASSES
    others = sum_increments(unit, point, records, clip, all_but(UNITS, 3)).total
    there, other = (sum_increments(unit, point, some, clip).total for some in (hostile, records))
    assert torch.isfinite(there).all()
    assert float((there - others).norm()) <= clip * (1.0 + 1e-9)
    assert float((there - other).norm()) <= 2.0 * clip * (1.0 + 1e-9)
    assert float(list_increments(unit, point, hostile, clip)[3].norm()) <= clip


@pytest.mark.parametrize("quantile", [False, True], ids=["mean", "bits of a quantile"])
def test_a_unit_without_records_adds_nothing_and_is_not_clipped(quantile: bool) -> None:
    records = batch()
    records.labels[2] = -1
    base = QuantileClip(LocalSteps(softmax(), STEP, STEPS), 0.4, 1.0) if quantile else softmax()
    unit = PerUnit(base, MOST)
    result = sum_increments(unit, ones(unit.dimension), records, joint_clip(0.4), 1.0 - all_but(UNITS, 2))
    assert float(result.total.norm()) == 0.0
    assert int(result.clipped_count) == 0


@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_round_that_reads_no_unit_adds_nothing(lead: tuple[int, ...]) -> None:
    """As for any other objective, though runs call none in such a round."""
    features, labels = batch(*lead)
    records, points = (
        Records(features[..., :0, :, :], labels[..., :0, :]),
        ones(FEATURES * CLASSES).repeat(*lead, 1),
    )
    unit = PerUnit(LocalSteps(softmax(), STEP, STEPS), MOST)
    result = unit.increment(Query((points.float(),)), Batch(records, ones(0)), CLIP)
    assert torch.equal(result.total, torch.zeros(*lead, FEATURES * CLASSES, dtype=F64))
    assert torch.equal(result.clipped_count, torch.zeros(lead, dtype=torch.int64))


def test_the_bit_says_whether_a_client_fits() -> None:
    records, query, weight = batch(), torch.zeros(FEATURES * CLASSES, dtype=F64), 0.4
    lengths = torch.stack([move.norm() for move in moves(softmax(), query, records)])
    limit = float(lengths.sort().values[UNITS // 2]) * (1 + 1e-9)
    unit = PerUnit(QuantileClip(LocalSteps(softmax(), STEP, STEPS), weight, 1.0), MOST)
    point = torch.cat([query, torch.tensor([limit], dtype=F64)])
    rows = list_increments(unit, point, records, joint_clip(weight))
    bits = torch.where(lengths <= limit, weight / 2, -weight / 2).double()
    torch.testing.assert_close(rows[:, -1], bits, rtol=1e-9, atol=0)
    torch.testing.assert_close(rows[:, :-1].norm(dim=-1), (lengths / limit).clamp(max=1.0), rtol=1e-9, atol=1e-12)
    assert int(sum_increments(unit, point, records, joint_clip(weight)).clipped_count) == UNITS // 2


def test_nothing_is_claimed_of_how_far_a_client_moves() -> None:
    moved = LocalSteps(softmax(), STEP, STEPS)
    assert moved.lipschitz == moved.smoothness == math.inf
    assert not moved.convex
    assert moved.convex_within == PerUnit(moved, MOST).convex_within == 0.0


def test_labels_that_no_record_has() -> None:
    assert is_absent(torch.tensor([0, -1, 2])).tolist() == [False, True, False]
    numbers = torch.tensor([0.0, math.nan, -1.0])
    assert is_absent(numbers).tolist() == [False, True, False]
    assert math.isnan(absent_label(numbers))
    assert absent_label(torch.tensor([1])) == -1
