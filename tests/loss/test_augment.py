"""Copies of a picture inside of one clip: what they are, and that a record's are its own."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.core.errors import InputError
from fedpriv.data.layout import FeatureLayout, InputLayout
from fedpriv.loss.features import (
    Augmentation,
    AugmentedView,
    MeanOverCopies,
    apply_transforms,
    augment_objective,
    check_augmentation_allowed,
)
from fedpriv.loss.inputs import LabelledView, make_layout_objective
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.losses import CrossEntropy, LossChoice
from fedpriv.loss.module import unflatten_parameters
from fedpriv.loss.objective import Batch, BatchLayout, Query, Records, View
from fedpriv.loss.views import LocalTraining
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.schema import Cell
from tests.engines.test_engines import run
from tests.loss.builders import (
    F32,
    F64,
    Patch,
    all_but,
    first_rows,
    list_increments,
    measure_calls,
    ones,
    pick,
    random_records,
    sum_increments,
)
from tests.loss.test_hostile_queries import SLACK, pair_of, small_cnn

MakeCell = Callable[..., Cell]
COUNT, SIDE, CLASSES = 7, 6, 3
THREE = Augmentation(copies=3, shift=2, flip=True)
PICTURES = FeatureLayout(SIDE * SIDE, (InputLayout((SIDE, SIDE), "numbers"),))
SLOTS = first_rows(5, ((0, 4), (2, 3)))
ONE_SILO = first_rows(5, ((0, COUNT),))
HOSTILE = [(1e-6, F32), (1e6, F32), (1e-6, F64), (1.0, F64)]
AUGMENTED = {"copies": 3, "shift": 2}


def augmented(augmentation: Augmentation = THREE, dtype: torch.dtype = F64) -> AugmentedView:
    plain = make_module_objective(small_cnn(), SIDE * SIDE, CrossEntropy(), 0, dtype)
    objective = augment_objective(plain, augmentation, PICTURES)
    assert isinstance(objective, AugmentedView)
    return objective


def pictures(dtype: torch.dtype = F64) -> Records:
    records = random_records(COUNT, SIDE * SIDE, CLASSES, seed=3)
    return Records(records.features.to(dtype), records.labels)


def integers(
    objective: AugmentedView, records: Records, norm: int = 2**20, query: Query | None = None, **keys: Any
) -> NDArray[np.int64]:
    """The sum as a guard takes it, of `norm` integers for a clip of 1."""
    query = query or Query((objective.initial(),))
    return sum_integer_increments(objective, query, 1.0, records, norm, norm, **keys)


def moved(picture: Tensor, down: int, right: int, mirrored: int) -> Tensor:
    """Pixel by pixel: moved first, with zeros where nothing was, then mirrored."""
    out = torch.zeros_like(picture)
    for line in range(SIDE):
        for column in range(SIDE):
            if 0 <= line - down < SIDE and 0 <= column - right < SIDE:
                out[line, column] = picture[line - down, column - right]
    return out.flip(-1) if mirrored else out


def by_hand(objective: AugmentedView, point: Tensor, records: Records, clip: float) -> Tensor:
    """Each record's mean gradient over its copies by autograd, clipped; (B, d)."""
    module, rows = objective.base.module, []  # type: ignore[attr-defined]
    for place, (image, label) in enumerate(zip(*records, strict=True)):
        leaf = point.clone().requires_grad_()
        copies = [moved(image.view(SIDE, SIDE), *coin).flatten() for coin in objective.transforms[place].tolist()]
        outputs = torch.func.functional_call(module, unflatten_parameters(module, leaf), (torch.stack(copies),))
        (gradient,) = torch.autograd.grad(functional.cross_entropy(outputs, label.expand(len(copies))), leaf)
        rows.append(gradient * min(1.0, clip / float(gradient.norm())))
    return torch.stack(rows)


@pytest.mark.parametrize("clip", [1e-2, 0.5, 1e6])
def test_an_increment_is_the_clipped_mean_gradient_of_a_records_copies(clip: float) -> None:
    objective, records = augmented().for_batch(ONE_SILO), pictures()
    point, weights = objective.initial(), torch.linspace(0.5, 1.0, COUNT, dtype=F64)
    rows, batch = by_hand(objective, point, records, clip), Batch(records, weights)
    assert torch.allclose(
        sum_increments(objective, point, records, clip, weights).total, weights @ rows, atol=1e-9
    )
    increments = objective.per_record(Query((point,)), batch, torch.arange(COUNT), clip)
    assert torch.allclose(increments, weights.unsqueeze(-1) * rows, atol=1e-9)
    few = torch.tensor([5, 1])
    some = Batch(pick(records, few), weights[few])
    assert torch.allclose(objective.per_record(Query((point,)), some, few, clip), increments[few], atol=1e-12)
    assert torch.allclose(objective.gradient(point, batch), weights @ by_hand(objective, point, records, 1e30))


def test_copies_of_several_records_and_channels_are_moved_pixel_by_pixel() -> None:
    pixels, transforms = torch.arange(1.0, 2 * 2 * SIDE**2 + 1), [[[2, -1, 0], [0, 0, 1]], [[-2, 1, 1], [1, 2, 0]]]
    images = pixels.view(2, 2, SIDE, SIDE)
    copies = apply_transforms(images.flatten(1), (2, SIDE, SIDE), torch.tensor(transforms), shift=2)
    expected = [
        torch.stack([moved(channel, *coin) for coin in coins for channel in image]).flatten()
        for image, coins in zip(images, transforms, strict=True)
    ]
    assert torch.equal(copies, torch.stack(expected))


def test_the_loss_of_several_records_is_the_mean_over_the_copies_of_each() -> None:
    outputs = torch.arange(2 * 4 * CLASSES, dtype=F64).sin().view(2, 4, CLASSES).requires_grad_()
    labels, loss = torch.tensor([2, 0]), MeanOverCopies(CrossEntropy())
    rows = zip(outputs, labels, strict=True)
    means = torch.stack([functional.cross_entropy(row, label.expand(4)) for row, label in rows])
    (gradient,) = torch.autograd.grad(means.sum(), outputs)
    torch.testing.assert_close(loss.value(outputs, labels), means)
    torch.testing.assert_close(loss.output_gradient(outputs, labels), gradient)


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 7), (2, [2, 2, 2, 1]), (5, [5, 2])])
def test_few_records_at_a_time_and_several_replicates_add_up_to_the_same(
    size: int, sizes: list[int], monkeypatch: Patch
) -> None:
    objective, records, weights = augmented().for_batch(SLOTS), pictures(), ones(COUNT)
    points = torch.stack([objective.initial(), 2.0 * objective.initial()])
    whole = [sum_increments(objective, point, records, 0.5) for point in points]
    values = 2 * 3 * SIDE * SIDE  # of a record's copies, in both replicates
    monkeypatch.setattr("fedpriv.loss.features._CHUNK_VALUES", size * values + values - 1)
    counts = measure_calls(monkeypatch, AugmentedView, "_make_copies", lambda _, view, batch, coins: len(coins))
    both = Records(records.features.expand(2, -1, -1), records.labels.expand(2, -1))
    few = sum_increments(objective, points, both, 0.5, weights)
    assert counts == sizes
    assert torch.allclose(few.total, torch.stack([one.total for one in whole]))
    assert few.clipped_count.tolist() == [int(one.clipped_count) for one in whole]


def test_evaluations_are_of_the_records_themselves() -> None:
    objective, records = augmented().for_batch(SLOTS), pictures()
    point = objective.initial()
    assert torch.equal(objective.outputs(point, records), objective.base.outputs(point, records))
    assert torch.equal(objective.evaluate(point, records).loss, objective.base.evaluate(point, records).loss)
    assert objective.evaluations(2) == 3 * objective.base.evaluations(2)


def test_copies_follow_from_seed_silo_round_and_row_alone() -> None:
    coins = augmented().for_batch(SLOTS).transforms
    assert np.array_equal(coins[4:], augmented().for_batch(first_rows(5, ((2, 3),))).transforms)
    assert np.array_equal(coins[:2], augmented().for_batch(first_rows(5, ((0, 2),))).transforms)
    several = augmented().for_batch(BatchLayout(5, ((0, 2), (2, 1)), np.array([[3, 1, 2], [0, 3, 1]]))).transforms
    assert np.array_equal(several, coins[[[3, 1, 6], [0, 3, 5]]])
    assert not np.array_equal(coins, augmented().for_batch(SLOTS._replace(t=6)).transforms)
    assert not np.array_equal(coins[:3], coins[4:])
    assert (coins.min((0, 1)) >= [-2, -2, 0]).all()
    assert (coins.max((0, 1)) <= [2, 2, 1]).all()
    plain = augmented(Augmentation(copies=64, shift=0, flip=True)).for_batch(SLOTS).transforms
    assert not plain[..., :2].any()
    assert set(np.unique(plain[..., 2])) == {0, 1}


def test_a_record_moves_no_other_records_copies_and_no_sum_by_more_than_one_clip() -> None:
    """On integers, as a guard adds them, with 64 copies of a record that somebody made."""
    records, norm, there = pictures(), 2**20, np.arange(COUNT) != 2
    objective = augmented(Augmentation(copies=64, shift=1)).for_batch(ONE_SILO)
    query = Query((1e6 * objective.initial(),))

    def total(is_counted: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        return integers(objective, records, norm, query, is_counted=is_counted, row_indices=ONE_SILO.row_indices)

    others = total(there)
    assert others.any()
    for value in (1.0, 1e30, float("inf"), float("nan")):
        records.features[2] = value
        assert float(np.linalg.norm((total() - others).astype(float))) <= norm
        assert np.array_equal(others, total(there))


def test_copies_of_a_record_are_the_same_whoever_else_is_read() -> None:
    """Leave a record out: what the others add keeps its integers, and its sum its bits in floating point."""
    objective, records = augmented().for_batch(ONE_SILO), pictures()
    point = objective.initial()
    for left_out in range(COUNT):
        there = np.arange(COUNT) != left_out
        (rows,), some = np.nonzero(there), pick(records, there)
        few = augmented().for_batch(BatchLayout(5, ((0, len(rows)),), rows))
        all_read = integers(objective, records, is_counted=there, row_indices=ONE_SILO.row_indices)
        read = integers(few, some, row_indices=rows)
        assert read.any()
        assert np.array_equal(all_read, read)
        whole = sum_increments(objective, point, records, 1.0, all_but(COUNT, left_out)).total
        torch.testing.assert_close(sum_increments(few, point, some, 1.0).total, whole, rtol=1e-12, atol=1e-14)


def test_a_round_in_which_nobody_is_drawn_computes_as_much_as_any_other(monkeypatch: Patch) -> None:
    objective, records = augmented().for_batch(ONE_SILO), pictures()
    counts = measure_calls(monkeypatch, AugmentedView, "_make_copies", lambda _, view, batch, coins: len(coins))
    for few in (0, 1, COUNT):
        counts.clear()
        rows = np.arange(few, dtype=np.int64)
        drawn = objective.for_batch(BatchLayout(5, ((0, few),), rows))
        integers(drawn, pick(records, rows), min_calls=COUNT, row_indices=rows)
        assert counts == [1] * COUNT


@pytest.mark.parametrize(
    ("clip", "dtype"), [(1.0, F32), *(pytest.param(*case, marks=pytest.mark.slow) for case in HOSTILE)]
)
def test_copies_of_hostile_pixels_stay_within_one_clip(clip: float, dtype: torch.dtype) -> None:
    """A pixel that some copies see, at the edge, and one that all see: gradients that overflow, or cancel."""
    objective = augmented(Augmentation(copies=4, shift=2, flip=True), dtype).for_batch(ONE_SILO)
    plain = pictures(dtype)
    weights, tiny = torch.linspace(0.1, 1.0, COUNT, dtype=F64), torch.finfo(dtype).tiny
    values = itertools.product((0, 21), (math.nan, math.inf, 1e38, -1e38, tiny / 8))
    for place, (pixel, value) in enumerate(values):
        records = Records(plain.features.clone(), plain.labels)
        records.features[2, pixel] = value
        for pattern in ("random", "largest", "cancelling", "all scales")[place % 2 :: 2]:
            points = pair_of(pattern, objective, dtype, pixel)
            query = Query(points[:1]) if pattern == "random" else Query(points, (1e5, -99999.0))
            whole = sum_increments(objective, query, records, clip, weights).total
            assert bool(whole.isfinite().all())
            without = sum_increments(objective, query, records, clip, weights * all_but(COUNT, 2)).total
            assert float((whole - without).norm()) <= float(weights[2]) * clip * SLACK
            rows = objective.per_record(query, Batch(records, weights), torch.arange(COUNT), clip)
            assert bool((rows.double().norm(dim=1) <= weights * clip * SLACK).all())


def test_a_record_of_which_one_copy_is_not_finite_adds_nothing() -> None:
    """Some copies have the corner's NaN in them, from others it is moved out of sight: all of them are silent."""
    objective, records = augmented(Augmentation(copies=4, shift=2)).for_batch(ONE_SILO), pictures()
    sights = [[down >= 0 and right >= 0 for down, right, _ in copies] for copies in objective.transforms.tolist()]
    some = [place for place, sight in enumerate(sights) if any(sight)]
    assert any(not all(sights[place]) for place in some)
    assert len(some) < COUNT
    records.features[:, 0] = math.nan
    rows = list_increments(objective, objective.initial(), records, 1.0)
    assert [place for place in range(COUNT) if not rows[place].any()] == some
    assert int(sum_increments(objective, objective.initial(), records, 1e6).clipped_count) == len(some)


@pytest.mark.slow
def test_engines_agree(small_cell: MakeCell) -> None:
    cell = small_cell(
        data__name="synthetic", model={"name": "cnn", "augment": AUGMENTED}, federation__rounds=2,
        federation__samples=27, federation__silos=2, run__evaluations=1, run__dtype="float64",
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.5, "output": "last"},
        privacy={"relation": "zero-out", "mu": 1.0},
    )  # fmt: skip
    result = [run(engine, cell)[1].evaluations for engine in ("vectorized", "inprocess")]
    assert np.array(result[0]) == pytest.approx(np.array(result[1]), rel=1e-9)


def test_the_goldstein_measure_of_a_model_with_augmentation_is_refused_when_planning(small_cell: MakeCell) -> None:
    """Before: a traceback at the first evaluation, which has no batch whose rows key the copies."""
    cell = small_cell(
        data__name="synthetic", model={"name": "cnn", "augment": AUGMENTED}, run__goldstein_radius=0.1
    )
    with pytest.raises(InputError, match=r"^run\.goldstein_radius: .* model\.augment"):
        load_task(cell)


def test_several_labels_a_record_are_its_copies_labels() -> None:
    flags = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=F64)
    layout = FeatureLayout(SIDE * SIDE + 2, (InputLayout((SIDE, SIDE), "numbers"),), (2,))
    plain, _ = make_layout_objective(
        nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 2)), layout, (SIDE, SIDE), LossChoice("binary"), 2, 0,
        F64, "flags",
    )  # fmt: skip
    augmentation, rows = Augmentation(copies=2, shift=1), first_rows(1, ((0, 2),))
    objective = augment_objective(plain, augmentation, layout).for_batch(rows)
    assert isinstance(objective, LabelledView)
    assert isinstance(objective.base, AugmentedView)
    point, total = objective.initial(), torch.zeros(objective.dimension, dtype=F64)
    for place, flag in enumerate(flags):
        for coin in objective.base.transforms[place].tolist():
            copy = moved(pictures().features[place].view(SIDE, SIDE), *coin).flatten()
            one = Records(torch.cat([copy, flag])[None], torch.zeros(1))
            total += plain.gradient(point, Batch(one, 0.5 * ones(1)))
    records = Records(torch.cat([pictures().features[:2], flags], 1), torch.zeros(2))
    assert torch.allclose(sum_increments(objective, point, records, 1e6).total, total)


def test_what_cannot_have_copies_is_refused(small_cell: MakeCell) -> None:
    softmax = SoftmaxRegression(36, CLASSES, feature_norm=1.0, dtype=F32)
    with pytest.raises(InputError, match="for models of torch layers"):
        augment_objective(softmax, THREE, PICTURES)
    with pytest.raises(ValueError, match="differ by shift or flip"):
        Augmentation(copies=4)
    objective = augmented()
    check_augmentation_allowed(objective, objective, "a row")
    for looked_at in (View(objective), LocalTraining(objective, 0.1, 2, 1)):
        with pytest.raises(InputError, match=r"model\.augment: a row takes records apart in its own way"):
            check_augmentation_allowed(LabelledView(objective, PICTURES), looked_at, "a row")
    fedavg = {"name": "fedavg", "trust": "trusted", "step": 0.5, "local_batch": 2, "local_epochs": 1}
    cell = small_cell(
        model={"name": "cnn", "augment": AUGMENTED}, federation__samples=27, federation__rounds=2,
        algorithm=fedavg, privacy={"relation": "zero-out", "mode": "none"},
    )  # fmt: skip
    with pytest.raises(InputError, match=r"model\.augment: fedavg takes records apart"):
        make_plan(cell, load_task(cell).objective)
