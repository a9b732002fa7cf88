"""Records of several rounds gathered together, and factors that do not depend on the company."""

import pytest
import torch

from fedpriv.core.replicates import never_above
from fedpriv.loss.clipping import clipping, formed, upper_norm
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.softmax import Block, OfBlock, SoftmaxRegression, of_records, once

ROUNDS, REPLICATES, BATCH, FEATURES, CLASSES = 3, 2, 5, 7, 4
OBJECTIVE = SoftmaxRegression(FEATURES, CLASSES, feature_norm=10.0, dtype=torch.float64)


def gathered() -> Records:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(ROUNDS, BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return Records(features, torch.randint(CLASSES, (ROUNDS, BATCH), generator=generator))


def test_a_round_of_a_block_is_its_records_once_for_all_replicates() -> None:
    whole = gathered()
    for t, records in enumerate(Block(whole, REPLICATES).rounds()):
        for column, single, own in zip(records, once(records), whole, strict=True):
            assert torch.equal(single, own[t])
            assert torch.equal(column, own[t].expand(REPLICATES, *own[t].shape))
            assert column.data_ptr() == own[t].data_ptr()


@pytest.mark.parametrize("clip", [0.05, 1.0, 1e6])
def test_increments_are_those_of_plain_records(clip: float) -> None:
    generator = torch.Generator().manual_seed(4)
    points = torch.randn(2, REPLICATES, OBJECTIVE.dimension, generator=generator, dtype=torch.float64).unbind()
    weights = torch.rand(BATCH, generator=generator, dtype=torch.float64)
    for records in Block(gathered(), REPLICATES).rounds():
        ours = OBJECTIVE.increment(Query(points, (3.0, -2.0)), Batch(records, weights), clip)
        plain = OBJECTIVE.increment(Query(points, (3.0, -2.0)), Batch(Records(*records), weights), clip)
        torch.testing.assert_close(ours.total, plain.total, rtol=1e-12, atol=1e-14)
        assert torch.equal(ours.clipped, plain.clipped)


def test_a_quantity_of_records_is_computed_once_a_block() -> None:
    asked = []

    def sums(records: Records) -> torch.Tensor:
        asked.append(records.labels.shape)
        return records.features.sum(-1)

    for t, records in enumerate(Block(gathered(), REPLICATES).rounds()):
        assert torch.equal(of_records(records, "sums", sums), gathered().features[t].sum(-1))
    assert asked == [(ROUNDS, BATCH)]


def test_a_part_of_a_round_has_nothing_of_its_block() -> None:
    (records, *_) = Block(gathered(), REPLICATES).rounds()
    part = Records(*(column.narrow(1, 0, 2) for column in records))
    assert not isinstance(part, OfBlock)
    assert once(part) is part
    assert of_records(part, "sums", lambda some: some.features.sum(-1)).shape == (REPLICATES, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_is_the_same_beside_records_that_are_clipped(dtype: torch.dtype) -> None:
    """A batch in which nothing is clipped takes a shortcut: it must not show in any record's factor."""
    generator = torch.Generator().manual_seed(5)
    vectors = torch.rand(1000, 3, generator=generator, dtype=dtype)
    weights = torch.rand(1001, generator=generator, dtype=dtype)
    clip = float(torch.linalg.vector_norm(vectors, dim=-1).max()) * 1.001
    alone = clipping(formed(upper_norm(vectors)), weights[:-1], clip)
    beside = clipping(formed(upper_norm(torch.cat([vectors, 5.0 * vectors[:1] + 5.0]))), weights, clip)
    assert torch.equal(alone.factor, weights[:-1])
    assert torch.equal(beside.factor[:-1], alone.factor)
    assert (int(alone.clipped), int(beside.clipped)) == (0, 1)
    assert float(beside.factor[-1]) < float(weights[-1])


def test_nothing_is_known_of_values_that_are_no_numbers() -> None:
    assert never_above(torch.tensor([1.0, 2.0]), 2.0)
    assert not never_above(torch.tensor([1.0, 2.1]), 2.0)
    assert not never_above(torch.tensor([1.0, torch.nan]), 2.0)
    assert not never_above(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]]))
    assert never_above(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [4.0]]))
    assert never_above(torch.zeros(0), 0.0)
    assert not never_above(torch.zeros(2, device="meta"), 1.0)
