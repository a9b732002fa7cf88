"""A client's own steps as one bounded increment: against a loop, and for any records that a client can have."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.models import find_model
from fedpriv.loss.objective import Batch, Objective, Query, Records
from fedpriv.loss.views import LocalSteps, PerUnit, QuantileClip, joint_clip
from tests.loss.test_per_unit import CLASSES, FEATURES, MOST, UNITS, WORST, batch

CLIP, STEP, STEPS = 0.7, 0.4, 5


def softmax() -> Objective:
    return SoftmaxRegression(FEATURES, CLASSES, torch.float64)


def network() -> Objective:
    row = find_model("mlp")
    return row.objective((FEATURES,), CLASSES, torch.float64, row.settings.model_validate({"hidden": 6}))


def moved_by_hand(objective: Objective, query: Tensor, unit: Records, size: int | None) -> Tensor:
    """The query less the model after the steps, gradient by gradient, of one client alone."""
    count, model = unit.labels.shape[0], query
    one = torch.ones(1, dtype=torch.float64)
    for step in range(STEPS):
        taken = range(count) if size is None else [(step * size + place) % count for place in range(size)]
        own = [place for place in taken if int(unit.labels[place]) >= 0]
        total = torch.zeros_like(model)
        for place in own:
            alone = Records(unit.features[place : place + 1], unit.labels[place : place + 1])
            total += objective.increment(Query([model]), Batch(alone, one), 1e9).total
        model = model - STEP * total / max(1, len(own))
    return query - model


@pytest.mark.parametrize("made", [softmax, network])
@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_client_moves_as_its_own_steps_do_and_is_clipped_whole(
    made: Callable[[], Objective], size: int | None
) -> None:
    objective, records = made(), batch()
    query = objective.initial() + 0.1 * torch.randn(
        objective.dimension, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    weights = torch.linspace(0.2, 1.0, UNITS, dtype=torch.float64)
    moves = [moved_by_hand(objective, query, Records(*(c[u] for c in records)), size) for u in range(UNITS)]
    expected = sum(
        weight * move * min(1.0, CLIP / float(move.norm())) for weight, move in zip(weights, moves, strict=True)
    )
    unit = PerUnit(LocalSteps(objective, STEP, STEPS, size), MOST)
    found = unit.increment(Query([query]), Batch(records, weights), CLIP)
    torch.testing.assert_close(found.total, expected, rtol=1e-9, atol=1e-12)
    assert int(found.clipped_count) == sum(float(move.norm()) > CLIP for move in moves) > 0
    rows = unit.per_record(
        Query([query]),
        Batch(records, torch.ones(UNITS, dtype=torch.float64)),
        torch.arange(UNITS),
        CLIP,
    )
    torch.testing.assert_close((rows * weights.unsqueeze(-1)).sum(0), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", WORST)
@pytest.mark.parametrize("told", [False, True], ids=["fixed clip", "quantile"])
def test_no_records_move_the_sum_by_more_than_the_clip(kind: str, told: bool) -> None:
    """Guarantee of units over `LocalSteps`: zero-out within C, replace-one within 2 C, found by brute force."""
    records, query = batch(), torch.randn(FEATURES * CLASSES, dtype=torch.float64)
    weights = torch.ones(UNITS, dtype=torch.float64)
    moved: Objective = LocalSteps(softmax(), 30.0, STEPS)  # steps that lead far away
    bound = CLIP
    if told:
        moved, bound = QuantileClip(moved, 0.5, 1.0), joint_clip(0.5)
        query = torch.cat([query, torch.tensor([0.3], dtype=torch.float64)])
    unit = PerUnit(moved, MOST)
    without = weights.clone()
    without[3] = 0.0
    others = unit.increment(Query([query]), Batch(records, without), bound).total
    features, labels = records.features.clone(), records.labels.clone()
    features[3] = WORST[kind](torch.randn(MOST, FEATURES, dtype=torch.float64))
    labels[3] = torch.arange(MOST) % CLASSES
    there = unit.increment(Query([query]), Batch(Records(features, labels), weights), bound).total
    assert torch.isfinite(there).all()
    assert float((there - others).norm()) <= bound * (1.0 + 1e-9)
    other = unit.increment(Query([query]), Batch(records, weights), bound).total
    assert float((there - other).norm()) <= 2.0 * bound * (1.0 + 1e-9)
    row = unit.per_record(
        Query([query]),
        Batch(Records(features, labels), torch.ones(UNITS, dtype=torch.float64)),
        torch.arange(UNITS),
        bound,
    )
    assert float(row[3].norm()) <= bound


def test_the_bit_says_whether_a_client_fits() -> None:
    records, query = batch(), torch.zeros(FEATURES * CLASSES, dtype=torch.float64)
    moves = [
        float(moved_by_hand(softmax(), query, Records(*(c[u] for c in records)), None).norm())
        for u in range(UNITS)
    ]
    limit, weight = sorted(moves)[UNITS // 2] * (1 + 1e-9), 0.4
    unit = PerUnit(QuantileClip(LocalSteps(softmax(), STEP, STEPS), weight, 1.0), MOST)
    point = torch.cat([query, torch.tensor([limit], dtype=torch.float64)])
    rows = unit.per_record(
        Query([point]),
        Batch(records, torch.ones(UNITS, dtype=torch.float64)),
        torch.arange(UNITS),
        joint_clip(weight),
    )
    fits = torch.tensor([move <= limit for move in moves])
    torch.testing.assert_close(rows[:, -1], torch.where(fits, weight / 2, -weight / 2).double(), rtol=1e-9, atol=0)
    lengths = torch.tensor([min(1.0, move / limit) for move in moves], dtype=torch.float64)
    torch.testing.assert_close(rows[:, :-1].norm(dim=-1), lengths, rtol=1e-9, atol=1e-12)
    weights = torch.ones(UNITS, dtype=torch.float64)
    assert (
        int(unit.increment(Query([point]), Batch(records, weights), joint_clip(weight)).clipped_count)
        == UNITS // 2
    )


def test_who_does_not_take_part_or_has_no_records_adds_nothing_to_the_bits() -> None:
    records = batch()
    records.labels[2] = -1
    point = torch.ones(FEATURES * CLASSES + 1, dtype=torch.float64)
    unit = PerUnit(QuantileClip(LocalSteps(softmax(), STEP, STEPS), 0.4, 1.0), MOST)
    weights = torch.zeros(UNITS, dtype=torch.float64)
    weights[2] = 1.0
    assert float(unit.increment(Query([point]), Batch(records, weights), joint_clip(0.4)).total.norm()) == 0.0


def test_nothing_is_claimed_of_how_far_a_client_moves() -> None:
    moved = LocalSteps(softmax(), STEP, STEPS)
    assert moved.lipschitz == moved.smoothness == math.inf
    assert not moved.convex
