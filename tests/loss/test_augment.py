"""Copies of a picture inside of one clip: what they are, and that a record's are its own."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.core.errors import InputError
from fedpriv.data.layout import FeatureLayout, InputLayout
from fedpriv.loss.features import Augmentation, AugmentedView, augment_objective, check_augmentation_allowed
from fedpriv.loss.inputs import LabelledView, make_layout_objective
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.losses import CrossEntropy, LossChoice
from fedpriv.loss.module import ModuleObjective, unflatten_parameters
from fedpriv.loss.objective import Batch, BatchLayout, Query, Records, View
from fedpriv.loss.views import LocalTraining
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.schema import Cell
from tests.engines.test_engines import run
from tests.loss.builders import first_rows
from tests.loss.test_hostile_queries import SLACK, pair_of, small_cnn

MakeCell = Callable[..., Cell]
COUNT, SIDE, CLASSES = 7, 6, 3
THREE = Augmentation(copies=3, shift=2, flip=True)
PICTURES = FeatureLayout(SIDE * SIDE, (InputLayout((SIDE, SIDE), "numbers"),))
SLOTS = first_rows(5, ((0, 4), (2, 3)))
ONE_SILO = first_rows(5, ((0, COUNT),))
HOSTILE = [(1e-6, torch.float32), (1e6, torch.float32), (1e-6, torch.float64), (1.0, torch.float64)]
AUGMENTED = {"copies": 3, "shift": 2}


def made(augmentation: Augmentation = THREE, dtype: torch.dtype = torch.float64) -> AugmentedView:
    plain = make_module_objective(small_cnn(), SIDE * SIDE, CrossEntropy(), 0, dtype)
    found = augment_objective(plain, augmentation, PICTURES)
    assert isinstance(found, AugmentedView)
    return found


def drawn(dtype: torch.dtype = torch.float64) -> Records:
    generator = np.random.default_rng(3)
    features = torch.from_numpy(generator.standard_normal((COUNT, SIDE * SIDE))).to(dtype)
    return Records(features, torch.from_numpy(generator.integers(0, CLASSES, COUNT)))


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
    for place in range(len(records.labels)):
        own = point.clone().requires_grad_()
        losses = [
            functional.cross_entropy(
                torch.func.functional_call(
                    module,
                    unflatten_parameters(module, own),
                    (moved(records.features[place].view(SIDE, SIDE), *coin).view(1, -1),),
                ),
                records.labels[place : place + 1],
            )
            for coin in objective.transforms[place].tolist()
        ]
        (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), own)
        rows.append(gradient * min(1.0, clip / float(gradient.norm())))
    return torch.stack(rows)


@pytest.mark.parametrize("clip", [1e-2, 0.5, 1e6])
def test_an_increment_is_the_clipped_mean_gradient_of_a_records_copies(clip: float) -> None:
    objective, records = made().for_batch(ONE_SILO), drawn()
    point, weights = objective.initial(), torch.linspace(0.5, 1.0, COUNT, dtype=torch.float64)
    rows = by_hand(objective, point, records, clip)
    found = objective.increment(Query((point,)), Batch(records, weights), clip)
    assert torch.allclose(found.total, weights @ rows, atol=1e-9)
    each = objective.per_record(Query((point,)), Batch(records, weights), torch.arange(COUNT), clip)
    assert torch.allclose(each, weights.unsqueeze(-1) * rows, atol=1e-9)
    few = torch.tensor([5, 1])
    some = Batch(Records(records.features[few], records.labels[few]), weights[few])
    assert torch.allclose(objective.per_record(Query((point,)), some, few, clip), each[few], atol=1e-12)
    assert torch.allclose(
        objective.gradient(point, Batch(records, weights)), weights @ by_hand(objective, point, records, 1e30)
    )


def test_few_records_at_a_time_and_several_replicates_add_up_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, records, weights = made().for_batch(SLOTS), drawn(), torch.ones(COUNT, dtype=torch.float64)
    points = torch.stack([objective.initial(), 2.0 * objective.initial()])
    whole = [objective.increment(Query((point,)), Batch(records, weights), 0.5) for point in points]
    monkeypatch.setattr("fedpriv.loss.features._CHUNK_VALUES", 2 * 3 * SIDE * SIDE)
    both = Records(records.features.expand(2, -1, -1), records.labels.expand(2, -1))
    found = objective.increment(Query((points,)), Batch(both, weights), 0.5)
    assert torch.allclose(found.total, torch.stack([one.total for one in whole]))
    assert found.clipped_count.tolist() == [int(one.clipped_count) for one in whole]


def test_evaluations_are_of_the_records_themselves() -> None:
    objective, records = made().for_batch(SLOTS), drawn()
    point = objective.initial()
    assert torch.equal(objective.outputs(point, records), objective.base.outputs(point, records))
    assert torch.equal(objective.evaluate(point, records).loss, objective.base.evaluate(point, records).loss)
    assert objective.evaluations(2) == 3 * objective.base.evaluations(2)


def test_copies_follow_from_seed_silo_round_and_row_alone() -> None:
    coins = made().for_batch(SLOTS).transforms
    assert np.array_equal(coins[4:], made().for_batch(first_rows(5, ((2, 3),))).transforms)
    assert np.array_equal(coins[:2], made().for_batch(first_rows(5, ((0, 2),))).transforms)
    several = made().for_batch(BatchLayout(5, ((0, 2), (2, 1)), np.array([[3, 1, 2], [0, 3, 1]]))).transforms
    assert np.array_equal(several, coins[[[3, 1, 6], [0, 3, 5]]])
    assert not np.array_equal(coins, made().for_batch(SLOTS._replace(t=6)).transforms)
    assert not np.array_equal(coins[:3], coins[4:])
    assert (coins.min((0, 1)) >= [-2, -2, 0]).all()
    assert (coins.max((0, 1)) <= [2, 2, 1]).all()
    plain = made(Augmentation(copies=64, shift=0, flip=True)).for_batch(SLOTS).transforms
    assert not plain[..., :2].any()
    assert set(np.unique(plain[..., 2])) == {0, 1}


def test_a_record_moves_no_other_records_copies_and_no_sum_by_more_than_one_clip() -> None:
    """On integers, as a guard adds them, with 64 copies of a record that somebody made."""
    slots, records, norm = ONE_SILO, drawn(), 2**20
    objective = made(Augmentation(copies=64, shift=1)).for_batch(slots)
    query, there = Query((1e6 * objective.initial(),)), np.ones(COUNT, np.bool_)
    there[2] = False

    def total(counts: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        return sum_integer_increments(
            objective, query, 1.0, records, norm, norm, is_counted=counts, row_indices=slots.row_indices
        )

    others = total(there)
    assert others.any()
    for value in (1.0, 1e30, float("inf"), float("nan")):
        records.features[2] = value
        assert float(np.linalg.norm((total() - others).astype(float))) <= norm
        assert np.array_equal(others, total(there))


def test_copies_of_a_record_are_the_same_whoever_else_is_read() -> None:
    """Leave a record out: what the others add keeps its integers, and its sum its bits in floating point."""
    slots, records, norm = ONE_SILO, drawn(), 2**20
    point = made().initial()
    for left_out in range(COUNT):
        rows = np.delete(np.arange(COUNT), left_out)
        some = Records(records.features[rows], records.labels[rows])
        there = np.ones(COUNT, np.bool_)
        there[left_out] = False
        objective = made().for_batch(slots)
        all_read = sum_integer_increments(
            objective, Query((point,)), 1.0, records, norm, norm, is_counted=there, row_indices=slots.row_indices
        )
        few = BatchLayout(5, ((0, len(rows)),), rows)
        read = sum_integer_increments(
            made().for_batch(few), Query((point,)), 1.0, some, norm, norm, row_indices=rows
        )
        assert read.any()
        assert np.array_equal(all_read, read)
        weights = torch.ones(COUNT, dtype=torch.float64)
        weights[left_out] = 0.0
        whole = objective.increment(Query((point,)), Batch(records, weights), 1.0).total
        found = made().for_batch(few).increment(Query((point,)), Batch(some, weights[rows]), 1.0).total
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-14)


def test_a_round_in_which_nobody_is_drawn_computes_as_much_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, records, counted = made().for_batch(ONE_SILO), drawn(), []
    whole = AugmentedView._make_copies

    def counting(self: AugmentedView, batch: Batch, coins: NDArray[np.int64]) -> Batch:
        counted.append(len(coins))
        return whole(self, batch, coins)

    monkeypatch.setattr(AugmentedView, "_make_copies", counting)
    for few in (0, 1, COUNT):
        counted.clear()
        some = Records(records.features[:few], records.labels[:few])
        rows = np.arange(few, dtype=np.int64)
        nobody = objective.for_batch(BatchLayout(5, ((0, few),), rows))
        sum_integer_increments(
            nobody, Query((objective.initial(),)), 1.0, some, 2**20, 2**20, min_calls=COUNT, row_indices=rows
        )
        assert counted == [1] * COUNT


@pytest.mark.parametrize(
    ("clip", "dtype"),
    [(1.0, torch.float32), *(pytest.param(clip, dtype, marks=pytest.mark.slow) for clip, dtype in HOSTILE)],
)
def test_copies_of_hostile_pixels_stay_within_one_clip(clip: float, dtype: torch.dtype) -> None:
    """A pixel that some copies see and others do not, at the edge, and one that all see; whatever the query.

    Copies whose gradients overflow, or cancel but for their rounding, are where a mean could pass its clip.
    """
    objective, plain = made(Augmentation(copies=4, shift=2, flip=True), dtype).for_batch(ONE_SILO), drawn(dtype)
    weights = torch.linspace(0.1, 1.0, COUNT, dtype=torch.float64)
    tiny = torch.finfo(dtype).tiny
    for pixel, value in itertools.product((0, 21), (math.nan, math.inf, 1e38, -1e38, tiny / 8)):
        records = Records(plain.features.clone(), plain.labels)
        records.features[2, pixel] = value
        for pattern in ("random", "largest", "cancelling", "all scales"):
            points = pair_of(pattern, objective, dtype, pixel)
            query = Query(points[:1]) if pattern == "random" else Query(points, (1e5, -99999.0))
            whole = objective.increment(query, Batch(records, weights), clip).total
            assert bool(whole.isfinite().all())
            left = weights.clone()
            left[2] = 0.0
            without = objective.increment(query, Batch(records, left), clip).total
            assert float((whole - without).norm()) <= float(weights[2]) * clip * SLACK
            rows = objective.per_record(query, Batch(records, weights), torch.arange(COUNT), clip)
            assert bool((rows.double().norm(dim=1) <= weights * clip * SLACK).all())


def test_a_record_of_which_one_copy_is_not_finite_adds_nothing() -> None:
    """Some copies have the corner's NaN in them, from others it is moved out of sight: all of them are silent."""
    objective, records = made(Augmentation(copies=4, shift=2)).for_batch(ONE_SILO), drawn()
    sights = [[down >= 0 and right >= 0 for down, right, _ in copies] for copies in objective.transforms.tolist()]
    some = [place for place, sight in enumerate(sights) if any(sight)]
    assert any(not all(sights[place]) for place in some)
    assert len(some) < COUNT
    records.features[:, 0] = math.nan
    batch, query = Batch(records, torch.ones(COUNT, dtype=torch.float64)), Query((objective.initial(),))
    rows = objective.per_record(query, batch, torch.arange(COUNT), 1.0)
    assert [place for place in range(COUNT) if not rows[place].any()] == some
    assert int(objective.increment(query, batch, 1e6).clipped_count) == len(some)


@pytest.mark.slow
def test_engines_agree(small_cell: MakeCell) -> None:
    cell = small_cell(
        data__name="synthetic", model={"name": "cnn", "augment": AUGMENTED}, federation__rounds=2,
        federation__samples=27, federation__silos=2, run__evaluations=1, run__dtype="float64",
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.5, "output": "last"},
        privacy={"relation": "zero-out", "mu": 1.0},
    )  # fmt: skip
    found = [run(engine, cell)[1].evaluations for engine in ("vectorized", "inprocess")]
    assert np.array(found[0]) == pytest.approx(np.array(found[1]), rel=1e-9)


def test_several_labels_a_record_are_its_copies_labels() -> None:
    flags = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    layout = FeatureLayout(SIDE * SIDE + 2, (InputLayout((SIDE, SIDE), "numbers"),), (2,))
    plain, _ = make_layout_objective(
        nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 2)), layout, (SIDE, SIDE), LossChoice("binary"), 2, 0,
        torch.float64, "flags",
    )  # fmt: skip
    found = augment_objective(plain, Augmentation(copies=2, shift=1), layout)
    assert isinstance(found, LabelledView)
    features = torch.cat([drawn().features[:2], flags], 1)
    batch = Batch(Records(features, torch.zeros(2)), torch.ones(2, dtype=torch.float64))
    objective = found.for_batch(first_rows(1, ((0, 2),)))
    assert isinstance(objective, LabelledView)
    inner = objective.base
    assert isinstance(inner, AugmentedView)
    point, total = objective.initial(), torch.zeros(objective.dimension, dtype=torch.float64)
    for place in range(2):
        for coin in inner.transforms[place].tolist():
            copy = moved(drawn().features[place].view(SIDE, SIDE), *coin).view(1, -1)
            one = Records(torch.cat([copy, flags[place : place + 1]], 1), torch.zeros(1))
            total += plain.gradient(point, Batch(one, torch.full((1,), 0.5, dtype=torch.float64)))
    assert torch.allclose(objective.increment(Query((point,)), batch, 1e6).total, total)


@pytest.mark.parametrize(
    ("shape", "kind", "said"),
    [
        ((36,), "numbers", r"of shape \(36,\)"),
        ((6, 6), "tokens", "of whole numbers"),
        ((12, 12, 3), "numbers", "channels come first"),
        ((2, 30), "numbers", "out of sight"),
    ],
)
def test_records_that_are_no_pictures_are_refused(shape: tuple[int, ...], kind: str, said: str) -> None:
    width = int(np.prod(shape))
    layout = FeatureLayout(width, (InputLayout(shape, kind),))  # type: ignore[arg-type]
    plain = ModuleObjective(nn.Linear(width, 2), CrossEntropy(), 0, torch.float32)
    with pytest.raises(InputError, match=said):
        augment_objective(plain, THREE, layout)


def test_what_cannot_have_copies_is_refused(small_cell: MakeCell) -> None:
    softmax = SoftmaxRegression(36, CLASSES, feature_norm=1.0, dtype=torch.float32)
    with pytest.raises(InputError, match="for models of torch layers"):
        augment_objective(softmax, THREE, PICTURES)
    with pytest.raises(ValueError, match="differ by shift or flip"):
        Augmentation(copies=4)
    objective = made()
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
