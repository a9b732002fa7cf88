"""Chunks of one shape: a record's row does not show how others fared, and a record that fails is zeros."""

import numpy as np
import pytest
import torch

from fedpriv.exact.chunks import chunk_rows, evaluated, outer_sum_of
from fedpriv.exact.increments import integers

DIMENSION, ROWS, NORM = 50, 8, 2**36
WEIGHTS = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 10)))
Columns = tuple[np.ndarray, ...]


def softmax_rows(columns: Columns, poison: float | None = None) -> np.ndarray:
    """Per-record gradients of softmax regression by a matrix product; raises for a record that holds `poison`."""
    features, labels = columns
    if poison is not None and np.any(features == poison):
        raise FloatingPointError("a record that a model chokes on")
    x = torch.from_numpy(features)
    scores = torch.softmax(x @ WEIGHTS, dim=1)
    scores[torch.arange(len(x)), torch.from_numpy(labels)] -= 1.0
    return (scores[:, :, None] * x[:, None, :]).reshape(len(x), -1).numpy()


def records_of(count: int, seed: int = 2) -> Columns:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(count, 5)), generator.integers(0, 10, count)


DUMMY = (np.zeros((1, 5)), np.zeros(1, np.int64))


def rows_of(records: Columns, poison: float | None = None, rows: int = ROWS) -> np.ndarray:
    return np.concatenate(list(evaluated(lambda c: softmax_rows(c, poison), records, DUMMY, rows, DIMENSION)))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 20])
def test_all_records_and_no_dummy_are_evaluated(count: int) -> None:
    records = records_of(count)
    assert np.allclose(rows_of(records), softmax_rows(records), atol=1e-12)


@pytest.mark.parametrize("slot", [0, 3, 7, 10])
def test_a_record_that_fails_changes_no_other_row(slot: int) -> None:
    """What the attacker would gain: 71 of 100 rows had other bits when a neighbour made the batch fail."""
    records = records_of(12)
    before = rows_of(records)
    records[0][slot, 0] = 777.0
    after = rows_of(records, poison=777.0)
    others = np.arange(12) != slot
    assert np.array_equal(after[others], before[others])
    assert not after[slot].any()


def test_rows_have_other_bits_in_other_shapes() -> None:
    """Control: evaluated one by one in a batch of 1, rows do differ; this is why the shape is kept."""
    generator = np.random.default_rng(5)
    wide = torch.from_numpy(generator.normal(size=(512, 10)).astype(np.float32))
    features = generator.normal(size=(100, 512)).astype(np.float32)
    together = torch.from_numpy(features) @ wide
    alone = torch.cat([torch.from_numpy(row[None]) @ wide for row in features])
    if torch.equal(together, alone):
        pytest.skip("this platform's matrix products have the same bits in every shape")
    assert torch.allclose(together, alone, atol=1e-3)


@pytest.mark.parametrize("hostile", [np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_values_of_other_records_change_no_row(hostile: float, kind: type) -> None:
    """Matrix products keep rows apart on this machine: tested, not proven."""
    generator = np.random.default_rng(6)
    weights = torch.from_numpy(generator.normal(size=(785, 10)).astype(kind))
    features = generator.normal(size=(64, 785)).astype(kind)
    before = (torch.from_numpy(features) @ weights).numpy()
    with np.errstate(over="ignore"):
        features[::2] = kind(hostile)
    after = (torch.from_numpy(features) @ weights).numpy()
    assert np.array_equal(after[1::2], before[1::2])


def test_shapes_are_public() -> None:
    seen = []

    def watched(columns: Columns) -> np.ndarray:
        seen.append(columns[0].shape)
        return softmax_rows(columns, 777.0)

    records = records_of(11)
    records[0][4, 0] = 777.0
    list(evaluated(watched, records, DUMMY, ROWS, DIMENSION))
    assert set(seen) == {(ROWS, 5)}
    assert chunk_rows(7850, 2, 100) == 100
    assert chunk_rows(7850, 2, 10_000) == 267
    assert chunk_rows(10**8, 1, 100) == 1


def test_outer_products_in_chunks() -> None:
    """The rank-one path on 20 records, of which two fail: as without them, and with no d values a record."""
    generator = np.random.default_rng(7)
    pixels = generator.integers(0, 256, (20, 5))
    records = (pixels / 255.0, generator.integers(0, 10, 20))

    def residuals(columns: Columns) -> np.ndarray:
        if np.any(columns[0] == 777.0):
            raise FloatingPointError
        scores = torch.softmax(torch.from_numpy(columns[0]) @ WEIGHTS, dim=1).numpy()
        scores[np.arange(len(scores)), columns[1]] -= 1.0
        return scores

    arguments = (ROWS, NORM, 2.0**36 / 255.0, 10)
    whole = outer_sum_of(residuals, records, DUMMY, pixels, *arguments)
    general = integers(softmax_rows(records), NORM, 2.0**36).sum(axis=0)
    assert np.linalg.norm(whole - general) < 2.0**-20 * np.linalg.norm(general)
    kept = np.ones(20, bool)
    kept[[3, 17]] = False
    without = outer_sum_of(residuals, tuple(c[kept] for c in records), DUMMY, pixels[kept], *arguments)
    records[0][~kept] = 777.0
    failing = outer_sum_of(residuals, records, DUMMY, pixels, *arguments)
    assert np.linalg.norm((failing - without).astype(float)) < 18 * 50  # slots differ, so a last bit may


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("signs", [(1, -1), (1, 1), (-1, -1)])
def test_a_query_that_makes_nan_moves_the_sum_by_no_more_than_a_record(kind: type, signs: tuple[int, int]) -> None:
    """What the attacker would gain: a reply that is finite or not as one pixel is dark or bright."""
    weights = np.zeros((5, 10), kind)
    weights[0, 0], weights[1, 0] = (sign * 0.6 * np.finfo(kind).max for sign in signs)
    hostile = torch.from_numpy(weights)

    def rows(columns: Columns) -> np.ndarray:
        x = torch.from_numpy(columns[0])
        scores = torch.softmax(x @ hostile, dim=1)
        scores[torch.arange(len(x)), torch.from_numpy(columns[1])] -= 1.0
        return (scores[:, :, None] * x[:, None, :]).reshape(len(x), -1).numpy()

    features, labels = records_of(12)
    sums = []
    for pixel in (0.0, 1.0):
        features[4, :2] = pixel
        sums.append(integers(rows((features.astype(kind), labels)), NORM, 2.0**36).sum(axis=0))
    moved = sum(int(value) ** 2 for value in (sums[1] - sums[0]).tolist())
    assert moved <= (2 * NORM) ** 2
