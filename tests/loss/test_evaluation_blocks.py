"""Evaluations go through test records in blocks: memory does not grow with their number, and metrics are equal."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedpriv.loss import layered, module
from fedpriv.loss.alone import map_records
from fedpriv.loss.layered import LayeredObjective
from fedpriv.loss.losses import CrossEntropy, SquaredError
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Objective, Records
from fedpriv.loss.scores import ScoreView, make_summed_scores

FEATURES, COUNT, ROWS = 6, 50, 8


class General(nn.Module):
    """A layer without gradients in closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 3)

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.inner(values).sigmoid()
        return outputs


def records() -> Records:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(COUNT, FEATURES, generator=generator, dtype=torch.float64)
    return Records(features, torch.randint(0, 3, (COUNT,), generator=generator))


def models(objective: Objective) -> Tensor:
    """Two, side by side."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, objective.dimension, generator=generator, dtype=torch.float64)


def evaluated(objective: Objective) -> dict[str, Tensor]:
    """Everything that the server's and the silos' evaluations measure."""
    silos = (("north", 20), ("south", 30))
    scored = (
        ScoreView(objective, ("auc", "balanced_accuracy"), silos)
        .evaluate(models(objective), records())
        .to_metrics()
    )
    summed = make_summed_scores(objective, 4.0, classes=True).contributions(models(objective), records())
    return {**scored, "summed": summed}


def layered_blocks(monkeypatch: pytest.MonkeyPatch) -> tuple[Objective, list[int]]:
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 3))
    found = LayeredObjective.from_module(net, FEATURES, CrossEntropy(), 0, torch.float64)
    assert found is not None
    shown: list[int] = []
    forward = LayeredObjective._forward

    def noted(self: LayeredObjective, point: dict[str, Tensor], first: Tensor) -> object:
        shown.append(first.shape[-2])
        return forward(self, point, first)

    monkeypatch.setattr(LayeredObjective, "_forward", noted)
    return found, shown


def module_blocks(monkeypatch: pytest.MonkeyPatch) -> tuple[Objective, list[int]]:
    shown: list[int] = []

    def noted(call: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
        shown.append(len(features))
        return map_records(call, features)

    monkeypatch.setattr(module, "map_records", noted)
    return ModuleObjective(General(), CrossEntropy(), 0, torch.float64), shown


@pytest.mark.parametrize("made", [layered_blocks, module_blocks])
def test_metrics_in_blocks_are_those_of_all_records_at_once(
    made: Callable[[pytest.MonkeyPatch], tuple[Objective, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, shown = made(monkeypatch)
    whole = evaluated(objective)
    assert max(shown) == COUNT
    values = 2 * objective.values_per_record if isinstance(objective, LayeredObjective) else FEATURES
    monkeypatch.setattr(layered, "_CHUNK_VALUES", ROWS * values)
    monkeypatch.setattr(module, "_EVALUATION_VALUES", ROWS * values)
    shown.clear()
    in_blocks = evaluated(objective)
    assert max(shown) == ROWS
    assert whole.keys() == in_blocks.keys()
    for name, expected in whole.items():
        torch.testing.assert_close(in_blocks[name], expected, rtol=1e-12, atol=1e-14)


def test_losses_of_a_regression_in_blocks_are_those_of_all_records_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
    objective = LayeredObjective.from_module(net, FEATURES, SquaredError(), 0, torch.float64)
    assert objective is not None
    own = Records(records().features, records().labels.double())
    whole = objective.losses(models(objective), own)
    monkeypatch.setattr(layered, "_CHUNK_VALUES", 2 * ROWS * objective.values_per_record)
    torch.testing.assert_close(objective.losses(models(objective), own), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("made", [layered_blocks, module_blocks])
def test_no_records_have_no_outputs(
    made: Callable[[pytest.MonkeyPatch], tuple[Objective, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, _ = made(monkeypatch)
    nobody = Records(*(column[:0] for column in records()))
    assert objective.outputs(models(objective), nobody).shape == (2, 0, 3)
