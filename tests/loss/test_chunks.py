"""How many records are computed at a time, in rounds and in evaluations, and factors without company."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.core.replicates import max_values_at_once
from fedpriv.loss import layered, module
from fedpriv.loss.clipping import compute_clipping, never_above, upper_norm, vector_bounds
from fedpriv.loss.layered import LayeredObjective, make_module_objective
from fedpriv.loss.layers import extract_patches_by_view
from fedpriv.loss.linear import BlockRecords, RecordBlock, SoftmaxRegression, compute_per_block, shared_records
from fedpriv.loss.losses import CrossEntropy, Loss, SquaredError
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Batch, Objective, Query, Records
from fedpriv.loss.scores import ScoreView, make_summed_scores
from tests.loss.builders import F64, Net, Patch, measure_calls, pick, random_records, sum_increments

COUNT = 300


def layered_objective(net: nn.Module, features: int, loss: Loss | None = None) -> LayeredObjective:
    objective = LayeredObjective.from_module(net, features, loss or CrossEntropy(), 0, F64)
    assert objective is not None
    return objective


def test_chunks_of_many_parameters_have_many_records(monkeypatch: Patch) -> None:
    """Every chunk's sum is as long as the model: one of few records would be a pass over memory for little."""
    objective = layered_objective(nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 3)), 200)
    point, records = objective.initial(), random_records(COUNT, 200)
    sizes = measure_calls(
        monkeypatch, LayeredObjective, "_make_terms", lambda _, view, query, chunk: len(chunk.labels)
    )
    whole = sum_increments(objective, point, records, 1.0)
    monkeypatch.setattr(layered, "_CHUNK_VALUES", 1)
    in_chunks = sum_increments(objective, point, records, 1.0)
    least = layered._VALUES_PER_PARAMETER * objective.dimension // objective.values_per_record
    assert COUNT / 2 > least > 10
    assert sizes == [COUNT, least, least, COUNT - 2 * least]
    torch.testing.assert_close(in_chunks.total, whole.total, rtol=1e-12, atol=1e-15)


def test_a_record_takes_the_values_of_its_layers_and_of_their_gradients() -> None:
    """The memory of a chunk is so many values a record: patches are most of them, and do not count by channel."""
    net = nn.Sequential(
        nn.Unflatten(1, (2, 4, 5)), nn.Conv2d(2, 3, (2, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)
    )
    outputs_of_layers = 2 * 4 * 5 + 3 * 3 * 3 + 27 + 27 + 4
    outputs, patches, weight_gradient = 27, 9 * 12, 3 * 12  # 9 positions, each with a patch of 2·2·3 pixels
    convolution = 2 * outputs + 2 * patches + weight_gradient
    assert layered_objective(net, 40).values_per_record == 40 + outputs_of_layers + convolution + 2 * (27 + 4)


@pytest.mark.parametrize(("share", "models_at_once"), [(2, [2, 1]), (0, [1, 1, 1])])
@pytest.mark.parametrize("leading", [(3,), (2, 3)])
def test_models_side_by_side_have_the_gradients_of_each_by_itself(
    leading: tuple[int, ...], share: int, models_at_once: list[int], monkeypatch: Patch
) -> None:
    """Taken a few at a time along the last of the leading axes, two of three here, or one at least."""
    objective = layered_objective(nn.Sequential(nn.Linear(5, 3)), 5)
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(*leading, objective.dimension, generator=generator, dtype=F64)
    features = torch.randn(*leading, 4, 5, generator=generator, dtype=F64)
    records = Records(features, torch.randint(0, 3, (*leading, 4), generator=generator))
    weights = torch.rand(*leading, 4, generator=generator, dtype=F64)
    rows = 4 * int(np.prod(leading[:-1]))
    monkeypatch.setattr(layered, "_CHUNK_VALUES", share * rows * objective.values_per_record)
    counts = measure_calls(
        monkeypatch, LayeredObjective, "_sum_gradients", lambda _, view, point, batch: point.shape[:-1].numel()
    )
    together = objective.gradient(points, Batch(records, weights))
    assert counts == [count * rows // 4 for count in models_at_once]
    for place in np.ndindex(leading):
        alone = objective.gradient(points[place], Batch(pick(records, place), weights[place]))
        torch.testing.assert_close(together[place], alone, rtol=1e-12, atol=1e-15)


def test_models_without_records_have_a_gradient_of_zeros() -> None:
    objective = layered_objective(nn.Sequential(nn.Linear(5, 3)), 5)
    records = Records(torch.zeros(2, 0, 5, dtype=F64), torch.zeros(2, 0, dtype=torch.int64))
    gradient = objective.gradient(objective.initial().expand(2, -1), Batch(records, torch.ones(0, dtype=F64)))
    assert torch.equal(gradient, torch.zeros(2, objective.dimension, dtype=F64))


ROUNDS, REPLICATES, BATCH, FEATURES, CLASSES = 3, 2, 5, 7, 4
OBJECTIVE = SoftmaxRegression(FEATURES, CLASSES, feature_norm=10.0, dtype=F64)


def gathered() -> Records:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(ROUNDS, BATCH, FEATURES, generator=generator, dtype=F64)
    return Records(features, torch.randint(CLASSES, (ROUNDS, BATCH), generator=generator))


def test_a_round_of_a_block_is_its_records_once_for_all_replicates() -> None:
    whole = gathered()
    for t, records in enumerate(RecordBlock(whole, REPLICATES).split_rounds()):
        for column, single, own in zip(records, shared_records(records), pick(whole, t), strict=True):
            assert torch.equal(single, own)
            assert torch.equal(column, own.expand(REPLICATES, *own.shape))
            assert column.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("clip", [0.05, 1.0, 1e6])
def test_increments_are_those_of_plain_records(clip: float) -> None:
    generator = torch.Generator().manual_seed(4)
    points = torch.randn(2, REPLICATES, OBJECTIVE.dimension, generator=generator, dtype=F64).unbind()
    weights = torch.rand(BATCH, generator=generator, dtype=F64)
    for records in RecordBlock(gathered(), REPLICATES).split_rounds():
        ours, plain = (
            sum_increments(OBJECTIVE, Query(points, (3.0, -2.0)), given, clip, weights)
            for given in (records, Records(*records))
        )
        torch.testing.assert_close(ours.total, plain.total, rtol=1e-12, atol=1e-14)
        assert torch.equal(ours.clipped_count, plain.clipped_count)


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_the_increment_of_one_record_is_that_of_its_row(clip: float) -> None:
    """A sum of one record is formed without a matrix product, with the same bits."""
    (point,) = torch.randn(1, OBJECTIVE.dimension, generator=torch.Generator().manual_seed(6), dtype=F64)
    batch = Batch(Records(*(column[:1] for column in pick(gathered(), 0))), torch.tensor([0.3], dtype=F64))
    increment = OBJECTIVE.increment(Query((point,), (2.0,)), batch, clip)
    assert torch.equal(
        increment.total, OBJECTIVE.per_record(Query((point,), (2.0,)), batch, torch.zeros(1), clip)[0]
    )
    assert increment.clipped_count.tolist() == (1 if clip < 1.0 else 0)


def test_a_quantity_of_records_is_computed_once_a_block() -> None:
    shapes = []

    def sums(records: Records) -> torch.Tensor:
        shapes.append(records.labels.shape)
        return records.features.sum(-1)

    for t, records in enumerate(RecordBlock(gathered(), REPLICATES).split_rounds()):
        assert torch.equal(compute_per_block(records, "sums", sums), gathered().features[t].sum(-1))
    assert shapes == [(ROUNDS, BATCH)]


def test_a_part_of_a_round_has_nothing_of_its_block() -> None:
    (records, *_) = RecordBlock(gathered(), REPLICATES).split_rounds()
    part = Records(*(column.narrow(1, 0, 2) for column in records))
    assert not isinstance(part, BlockRecords)
    assert shared_records(part) is part
    assert compute_per_block(part, "sums", lambda some: some.features.sum(-1)).shape == (REPLICATES, 2)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_factor_is_the_same_beside_records_that_are_clipped(dtype: torch.dtype) -> None:
    """A batch in which nothing is clipped takes a shortcut: it must not show in any record's factor."""
    generator = torch.Generator().manual_seed(5)
    vectors = torch.rand(1000, 3, generator=generator, dtype=dtype)
    weights = torch.rand(1001, generator=generator, dtype=dtype)
    clip = float(torch.linalg.vector_norm(vectors, dim=-1).max()) * 1.001
    alone = compute_clipping(vector_bounds(upper_norm(vectors)), weights[:-1], clip)
    more = torch.cat([vectors, 5.0 * vectors[:1] + 5.0])
    beside = compute_clipping(vector_bounds(upper_norm(more)), weights, clip)
    assert torch.equal(alone.factor, weights[:-1])
    assert torch.equal(beside.factor[:-1], alone.factor)
    assert (int(alone.clipped_count), int(beside.clipped_count)) == (0, 1)
    assert float(beside.factor[-1]) < float(weights[-1])


def test_nothing_is_known_of_values_that_are_no_numbers() -> None:
    assert never_above(torch.tensor([1.0, 2.0]), 2.0)
    assert not never_above(torch.tensor([1.0, 2.1]), 2.0)
    assert not never_above(torch.tensor([1.0, torch.nan]), 2.0)
    assert not never_above(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]]))
    assert never_above(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [3.0]]))
    assert never_above(torch.zeros(0), 0.0)
    assert not never_above(torch.zeros(2, device="meta"), 1.0)


def test_a_device_is_given_larger_pieces_than_a_processor() -> None:
    assert max_values_at_once(2**20, torch.device("cpu")) == 2**20
    assert {max_values_at_once(size, torch.device("meta")) for size in (2**20, 2**28)} == {2**28}


@pytest.mark.slow
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 3), *[st.integers(5, 9)] * 2),
    kernel=st.tuples(*[st.integers(1, 3)] * 2),
    dilation=st.tuples(*[st.integers(1, 2)] * 2),
    padding=st.tuples(*[st.integers(0, 3)] * 2),
    stride=st.tuples(*[st.integers(1, 4)] * 2),
    strided=st.booleans(),
)
@settings(max_examples=200)
def test_patches_by_a_view_are_those_of_torch(
    shape: Any, kernel: Any, dilation: Any, padding: Any, stride: Any, strided: bool
) -> None:
    pictures = torch.randn(shape).mT if strided else torch.randn(shape)
    wanted = functional.unfold(pictures, kernel, dilation, padding, stride)
    assert torch.equal(extract_patches_by_view(pictures, kernel, dilation, padding, stride), wanted)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv2d(1, 1, 2), nn.Flatten(), nn.Linear(1, 2)),
        nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), nn.Unflatten(0, (-1, 1)), nn.Linear(1, 2)),
    ],
    ids=["records in the place of channels", "no axis but that of records"],
)
def test_a_layer_that_misreads_a_batch_of_one_has_no_closed_form(net: nn.Sequential) -> None:
    net = net.to(F64)
    objective, general = (
        make_module_objective(net, 4, CrossEntropy(), 0, F64),
        ModuleObjective(net, CrossEntropy(), 0, F64),
    )
    point, rows = objective.initial(), Records(torch.eye(4, dtype=F64)[:3], torch.tensor([0, 1, 0]))
    totals = [sum_increments(each, point, rows, 0.5).total for each in (objective, general)]
    assert torch.allclose(*totals)


# Evaluations in blocks of test records

TESTED, ROWS = 50, 8


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, outputs))


GENERAL = Net(lambda net, values: net.inner(values).sigmoid(), inner=nn.Linear(FEATURES, 3)).double()
BLOCKS: dict[str, tuple[Objective, Any, str, Callable[..., int]]] = {
    "layers": (
        layered_objective(network(3), FEATURES), LayeredObjective, "_forward",
        lambda _, view, point, first: first.shape[-2],
    ),
    "module": (
        ModuleObjective(GENERAL, CrossEntropy(), 0, F64), module, "map_records",
        lambda _, call, features: len(features),
    ),
}  # fmt: skip
"""An objective, and the function that is shown a block of so many records."""


def holdout() -> Records:
    return random_records(TESTED, FEATURES)


def models(objective: Objective) -> Tensor:
    """Two, side by side."""
    return torch.randn(2, objective.dimension, generator=torch.Generator().manual_seed(5), dtype=F64)


def evaluate(objective: Objective) -> dict[str, Tensor]:
    """Everything that the server's and the silos' evaluations measure."""
    view = ScoreView(objective, ("auc", "balanced_accuracy"), (("north", 20), ("south", 30)))
    scored = view.evaluate(models(objective), holdout()).to_metrics()
    summed = make_summed_scores(objective, 4.0, classes=True).contributions(models(objective), holdout())
    return {**scored, "summed": summed}


@pytest.mark.parametrize("name", BLOCKS)
def test_metrics_in_blocks_are_those_of_all_records_at_once(name: str, monkeypatch: Patch) -> None:
    objective, *function = BLOCKS[name]
    shown = measure_calls(monkeypatch, *function)
    whole = evaluate(objective)
    assert max(shown) == TESTED
    values = 2 * objective.values_per_record if isinstance(objective, LayeredObjective) else FEATURES
    monkeypatch.setattr(layered, "_CHUNK_VALUES", ROWS * values)
    monkeypatch.setattr(module, "_EVALUATION_VALUES", ROWS * values)
    shown.clear()
    in_blocks = evaluate(objective)
    assert max(shown) == ROWS
    assert whole.keys() == in_blocks.keys()
    summed = make_summed_scores(objective, 4.0, classes=True)
    alone = torch.stack([summed.contributions(model, holdout()) for model in models(objective)])
    torch.testing.assert_close(whole["summed"], alone, rtol=1e-12, atol=1e-14)
    for metric, expected in whole.items():
        torch.testing.assert_close(in_blocks[metric], expected, rtol=1e-12, atol=1e-14)


def test_few_records_of_few_features_are_evaluated_at_a_time(monkeypatch: Patch) -> None:
    """A layer inside of a module may have far more values for a record than the record has features."""
    objective, *function = BLOCKS["module"]
    whole = objective.outputs(models(objective), holdout())
    monkeypatch.setattr(module, "_EVALUATION_RECORDS", ROWS)
    shown = measure_calls(monkeypatch, *function)
    torch.testing.assert_close(objective.outputs(models(objective), holdout()), whole, rtol=1e-12, atol=1e-14)
    assert max(shown) == ROWS


def test_losses_of_a_regression_are_those_of_its_outputs_in_blocks_and_by_replicate(monkeypatch: Patch) -> None:
    objective, records = layered_objective(network(1), FEATURES, SquaredError()), holdout()
    points, own = models(objective), Records(records.features, records.labels.double())
    expected = (objective.outputs(points, own).squeeze(-1) - own.labels).square() / 2.0
    assert expected.shape == (2, TESTED)
    monkeypatch.setattr(layered, "_CHUNK_VALUES", 2 * ROWS * objective.values_per_record)
    shown = measure_calls(monkeypatch, *BLOCKS["layers"][1:])
    torch.testing.assert_close(objective.losses(points, own), expected, rtol=1e-12, atol=1e-14)
    assert max(shown) == ROWS
    replicated = Records(*(torch.stack([column, column.flip(0)]) for column in own))
    expected = torch.stack([expected[0], expected[1].flip(0)])
    torch.testing.assert_close(objective.losses(points, replicated), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_records_have_no_outputs(name: str) -> None:
    objective = BLOCKS[name][0]
    assert objective.outputs(models(objective), pick(holdout(), slice(0))).shape == (2, 0, 3)
