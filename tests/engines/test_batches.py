"""Batches of the vectorized engine: what is gathered once, and that it changes no bit."""

from collections.abc import Iterator

import pytest

from fedpriv.engines.vectorized import noise
from fedpriv.loss.objective import Records
from tests.engines.builders import run_cell, small_cell


@pytest.mark.parametrize(("read", "gathered"), [("every batch in every round", 1), ("one batch a round", 8)])
def test_rounds_reading_the_same_records_gather_their_batch_once_without_changing_a_bit(
    monkeypatch: pytest.MonkeyPatch, read: str, gathered: int
) -> None:
    """Where a round fills a block; the model is that of rounds gathered in one block."""
    algorithm = {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}
    federation = {"silos": 3, "rounds": 8} | ({"epochs": 8, "batch": 20} if read.startswith("every") else {})
    cell = small_cell(algorithm=algorithm, privacy={"mu": 1.0, "relation": "zero-out"}, federation=federation)
    in_a_block = run_cell("vectorized", cell)
    monkeypatch.setattr(noise, "_MAX_GATHERED_VALUES", 1)
    calls = []
    real = noise.OrderedBatches._expand_replicates

    def counting(self: noise.OrderedBatches, records: Records) -> Iterator[Records]:
        calls.append(records)
        yield from real(self, records)

    monkeypatch.setattr(noise.OrderedBatches, "_expand_replicates", counting)
    assert run_cell("vectorized", cell).model.tobytes() == in_a_block.model.tobytes()
    assert len(calls) == gathered
