"""A stock Flower app whose silos' guards train: strategies at the server are Flower's own, unchanged."""

import math
from pathlib import Path

import pytest
import torch

from fedpriv.engines.inprocess_grid import InProcessGrid
from tests.flower.quickstart.client_app import app as client_app
from tests.flower.quickstart.server_app import app as server_app
from tests.flower.quickstart.task import Net, load_centralized_dataset
from tests.flower.quickstart.task import test as evaluate
from tests.flower.silos import guards, ledger_of, run_config


def trained_accuracy(folder: Path, **keys: object) -> float:
    config = run_config(folder, **keys)
    grid = InProcessGrid(client_app, 2, config)
    server_app(grid, grid.server_context(config))
    model = Net()
    model.load_state_dict(torch.load(config["model"], weights_only=True))
    return evaluate(model, load_centralized_dataset())[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "steps"), [("FedAvg", 1), ("FedAvg", 3), ("FedAdam", 1)], ids=["FedAvg", "local steps", "FedAdam"]
)
def test_a_stock_strategy_trains_through_guards(tmp_path: Path, strategy: str, steps: int) -> None:
    torch.manual_seed(0)
    before = evaluate(Net(), load_centralized_dataset())[1]
    with guards(tmp_path, 2):
        keys = {"strategy": strategy, "local-steps": steps, "num-server-rounds": 12 // steps}
        accuracy = trained_accuracy(tmp_path, **keys)
    assert accuracy > before + 0.2
    for silo in (0, 1):
        ((run, mu, answered),) = ledger_of(tmp_path, silo)
        assert (run, answered) == ("1", 12)
        assert math.isclose(mu, 2.0)
