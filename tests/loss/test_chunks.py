"""How many records a network's increments are computed of at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.loss import layered
from fedpriv.loss.layered import LayeredObjective
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.objective import Batch, Query, Records

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

    def noted(self: LayeredObjective, query: Query, chunk: Records) -> Any:
        sizes.append(len(chunk.labels))
        return terms(self, query, chunk)

    monkeypatch.setattr(LayeredObjective, "_terms", noted)
    whole = objective.increment(Query([point]), Batch(records, weights), 1.0)
    monkeypatch.setattr(layered, "_CHUNK_VALUES", 1)
    in_chunks = objective.increment(Query([point]), Batch(records, weights), 1.0)
    least = layered._VALUES_PER_PARAMETER * objective.dimension // objective.record_values
    assert COUNT / 2 > least > 10
    assert sizes == [COUNT, least, least, COUNT - 2 * least]
    torch.testing.assert_close(in_chunks.total, whole.total, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("leading", [(3,), (2, 3)])
def test_models_side_by_side_have_the_gradients_of_each_by_itself(
    leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken a few at a time along the last of the leading axes, two of three here."""
    objective = LayeredObjective.of(nn.Sequential(nn.Linear(5, 3)), 5, CrossEntropy(), 0, torch.float64)
    assert objective is not None
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(*leading, objective.dimension, generator=generator, dtype=torch.float64)
    features = torch.randn(*leading, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (*leading, 4), generator=generator)
    weights = torch.rand(*leading, 4, generator=generator, dtype=torch.float64)
    counts: list[int] = []
    one_part = LayeredObjective._gradient

    def noted(self: LayeredObjective, point: torch.Tensor, batch: Batch) -> torch.Tensor:
        counts.append(point.shape[:-1].numel())
        return one_part(self, point, batch)

    rows = 4 * int(np.prod(leading[:-1]))
    monkeypatch.setattr(layered, "_CHUNK_VALUES", 2 * rows * objective.record_values)
    monkeypatch.setattr(LayeredObjective, "_gradient", noted)
    together = objective.gradient(points, Batch(Records(features, labels), weights))
    assert counts == [2 * rows // 4, rows // 4]
    for place in np.ndindex(leading):
        alone = objective.gradient(points[place], Batch(Records(features[place], labels[place]), weights[place]))
        torch.testing.assert_close(together[place], alone, rtol=1e-12, atol=1e-15)
