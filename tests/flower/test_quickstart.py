"""A stock Flower app whose silos' guards train: strategies at the server are Flower's own, unchanged."""

import math
from pathlib import Path

import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedpriv.engines.inprocess_grid import InProcessGrid
from tests.flower.quickstart import numpy_app
from tests.flower.quickstart.client_app import app
from tests.flower.quickstart.server_app import app as server
from tests.flower.quickstart.task import Net, load_centralized_dataset
from tests.flower.quickstart.task import test as evaluate
from tests.flower.silos import accuracy_of, guards, ledger_of, run_config


def trained_accuracy(
    folder: Path, client_app: ClientApp = app, server_app: ServerApp = server, **keys: object
) -> float:
    config = run_config(folder, **keys)
    grid = InProcessGrid(client_app, 2, config)
    server_app(grid, grid.server_context(config))
    return accuracy_of(config["model"])


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


@pytest.mark.slow
def test_a_numpy_client_trains_through_guards_as_a_message_app_does(tmp_path: Path) -> None:
    """Its arrays are lists without names, and its strategy is Flower's older FedAvg."""
    torch.manual_seed(0)
    before = evaluate(Net(), load_centralized_dataset())[1]
    with guards(tmp_path, 2):
        keys = {"local-steps": 2, "num-server-rounds": 6}
        accuracy = trained_accuracy(tmp_path, numpy_app.app, numpy_app.server, **keys)
    assert accuracy > before + 0.2
    assert [ledger_of(tmp_path, silo) for silo in (0, 1)] == [[("1", pytest.approx(2.0), 12)]] * 2
