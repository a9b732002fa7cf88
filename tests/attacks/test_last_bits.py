"""A server whose queries turn last bits into other classes, and a sum that is to tell nobody who else was drawn.

Records are one-hot: the dummies of a column sum to 1, so weights that are the same within a column and cancel over
all columns give every record the same scores, and rounding alone decides which class is ahead.  Rows of matrix
products round by their place in a batch, by its size and by addresses, and with secret participation places follow
from who else was drawn.

Before scores were exact, one record in or out of a round of 40, in chunks of 7, moved the sum by 2.9 times (10.3
with another table) the norm that a record may have, on an AMD EPYC with AVX-512; 1 is promised. Now it moves the
sum by its own integers.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.objective import Query, Records
from fedpriv.noise.integers.increments import sum_integer_increments
from tests.disordered import at_address, disordered

COLUMNS, WORDS, CLASSES = 56, 14, 10
FEATURES = COLUMNS * WORDS + 1
COUNT = 40
NORM, FACTOR = 2**36, 2.0**36


def one_hot(count: int = COUNT) -> Records:
    """Tables of words, each column as dummies, and a constant 1."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (count, COLUMNS), generator=generator)
    dummies = torch.nn.functional.one_hot(words, WORDS).flatten(1).float()
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return Records(torch.cat([dummies, torch.ones(count, 1)], 1), labels)


def amplifying(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights of 2^36, the same for all words of a column, that cancel over the columns of every class."""
    generator = torch.Generator().manual_seed(seed)
    by_column = torch.randn(CLASSES, COLUMNS, generator=generator, dtype=dtype) * 2.0**36
    by_column -= by_column.mean(1, keepdim=True)
    weights = by_column.repeat_interleave(WORDS, 1)
    return torch.cat([weights, torch.zeros(CLASSES, 1, dtype=dtype)], 1).flatten()


def loss(dtype: torch.dtype = torch.float32) -> SoftmaxRegression:
    return SoftmaxRegression(FEATURES, CLASSES, float(COLUMNS + 1) ** 0.5, dtype, denominator=255)


@contextlib.contextmanager
def on(processor: str) -> Iterator[None]:
    with disordered() if processor == "disordered" else contextlib.nullcontext():
        yield


def chosen(records: Records, rows: list[int], offset: int = 0) -> Records:
    """Rows of a table, at another address."""
    return Records(at_address(records.features[rows], offset), records.labels[rows])


def sum_of(
    records: Records, query: list[Tensor], coefficients: tuple[float, ...] = (1.0,), least: int = 0
) -> Tensor:
    return torch.from_numpy(
        sum_integer_increments(loss(), Query(query, coefficients), 1.0, records, NORM, FACTOR, least)
    )


@pytest.mark.every(8)
@pytest.mark.parametrize("processor", ["here", "disordered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("coefficients", [(1.0,), (3.0, -2.0)])
def test_adding_or_removing_one_record_changes_the_sum_by_exactly_one_increment(
    processor: str, coefficients: tuple[float, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: what a record adds to a sum is a function of its own row, in any chunk, place and company."""
    monkeypatch.setattr("fedpriv.noise.integers.increments.MAX_CHUNK_VALUES", 7 * FEATURES)
    records = one_hot()
    for seed in range(4):
        query = [amplifying(seed + 100 * place, dtype) for place in range(len(coefficients))]
        with on(processor):
            whole = sum_of(records, query, coefficients)
            for left_out in range(0, COUNT, 5):
                others = [row for row in range(COUNT) if row != left_out]
                moved = whole - sum_of(chosen(records, others, left_out), query, coefficients)
                alone = sum_of(chosen(records, [left_out]), query, coefficients)
                assert torch.equal(moved, alone)
                assert float(moved.double().norm()) <= NORM


@pytest.mark.parametrize("processor", ["here", "disordered"])
def test_the_integer_sum_does_not_depend_on_record_order_or_padding(processor: str) -> None:
    """Rounds in secret are padded to one size, and records come in any order: the sum has the same integers."""
    records, query = one_hot(), [amplifying(1)]
    with on(processor):
        whole = sum_of(records, query)
        for seed in range(5):
            order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed)).tolist()
            assert torch.equal(sum_of(chosen(records, order, seed), query, least=COUNT + seed), whole)


def test_reordered_floating_point_products_do_change_the_residuals_of_a_record() -> None:
    """Control: the loss's own products, in batches of seven, give a record other residuals by its place."""
    records, query = one_hot(), amplifying(1)
    with disordered(), torch.no_grad():
        together = loss().outputs(query, chosen(records, list(range(7)))).softmax(-1)
        moved = loss().outputs(query, chosen(records, [1, 2, 3, 4, 5, 6, 0])).softmax(-1)
    assert float((together[1:] - moved[:-1]).abs().max()) > 0.1
