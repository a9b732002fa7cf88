"""Batches of the vectorized engine: what is gathered once, and that it changes no bit."""

from collections.abc import Iterator
from typing import Any

import pytest

from fedpriv.claims.outcome import RunObserver
from fedpriv.engines.table import make_engine
from fedpriv.engines.vectorized import noise
from fedpriv.loss.objective import Records
from tests.engines.builders import small_cell


@pytest.mark.parametrize(("read", "gathered"), [("every batch in every round", 1), ("one batch a round", 8)])
def test_rounds_that_read_the_same_records_gather_them_once(
    monkeypatch: pytest.MonkeyPatch, read: str, gathered: int
) -> None:
    """Where a round fills a block; the model is that of rounds gathered in one block."""
    changes: dict[str, Any] = {
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        "privacy": {"mu": 1.0, "relation": "zero-out"},
    }
    if read.startswith("every"):
        changes |= {"federation__epochs": 8, "federation__batch": 20}
    cell = small_cell(**changes)
    (in_a_block,) = make_engine("vectorized")([cell], RunObserver())
    monkeypatch.setattr(noise, "_MAX_GATHERED_VALUES", 1)
    calls = []
    real = noise.OrderedBatches._expand_replicates

    def counting(self: noise.OrderedBatches, records: Records) -> Iterator[Records]:
        calls.append(records)
        yield from real(self, records)

    monkeypatch.setattr(noise.OrderedBatches, "_expand_replicates", counting)
    (alone,) = make_engine("vectorized")([cell], RunObserver())
    assert len(calls) == gathered
    assert alone.cell_outcome.model.tobytes() == in_a_block.cell_outcome.model.tobytes()
