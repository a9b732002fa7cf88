"""The server's mean of long messages, computed piece by piece."""

from collections.abc import Callable

import pytest
import torch

from fedpriv.rounds import round as rounds
from fedpriv.rounds.plan import plan_of
from fedpriv.rounds.round import FloatArithmetic
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.schema import Cell


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pieces_of_the_mean_are_bit_for_bit_those_of_the_whole(
    dtype: str, small_cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = small_cell(run__dtype=dtype)
    task = task_of_cell(cell)
    plan = plan_of(cell, task.objective)
    initial = task.objective.initial()
    generator = torch.Generator().manual_seed(1)
    messages = [torch.randn(len(initial), generator=generator).to(initial.dtype) for _ in plan.weights]
    weights = torch.tensor(plan.weights, dtype=initial.dtype)
    assert len(plan.weights) > 1
    for piece in (64, len(initial) - 1, rounds._PIECE):
        monkeypatch.setattr(rounds, "_PIECE", piece)
        mean = FloatArithmetic(plan).added(messages, 1)
        assert torch.equal(mean, weights @ torch.stack(messages))
