"""How many records a network's increments are computed of at a time."""

from typing import Any

import pytest
import torch
from torch import nn

from fedpriv.objectives import CrossEntropy, LayeredObjective, Records, layered

COUNT = 300


def test_chunks_of_many_parameters_have_many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk's sum is as long as the model: one of few records would be a pass over memory for little."""
    net = nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 3))
    objective = LayeredObjective.of(net, 200, CrossEntropy(), 0, torch.float64)
    assert objective is not None
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(COUNT, 200, generator=generator, dtype=torch.float64)
    records = Records(features, torch.randint(0, 3, (COUNT,), generator=generator))
    point, weights = objective.initial(), torch.full((COUNT,), 1.0 / COUNT, dtype=torch.float64)
    sizes: list[int] = []
    terms = LayeredObjective._terms

    def noted(self: LayeredObjective, named: Any, coefficients: Any, chunk: Records) -> Any:
        sizes.append(len(chunk.labels))
        return terms(self, named, coefficients, chunk)

    monkeypatch.setattr(LayeredObjective, "_terms", noted)
    whole = objective.increment([point], [1.0], records, weights, 1.0)
    monkeypatch.setattr(layered, "_CHUNK_VALUES", 1)
    in_chunks = objective.increment([point], [1.0], records, weights, 1.0)
    least = layered._VALUES_PER_PARAMETER * objective.dimension // objective.record_values
    assert COUNT / 2 > least > 10
    assert sizes == [COUNT, least, least, COUNT - 2 * least]
    torch.testing.assert_close(in_chunks.total, whole.total, rtol=1e-12, atol=1e-15)
