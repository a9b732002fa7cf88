"""A stock Flower app whose silos' guards train: strategies at the server are Flower's own, unchanged."""

import math
from pathlib import Path

import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedpriv.data.named import load
from fedpriv.engines.inprocess import InProcessGrid
from tests.flower.quickstart import evaluating_app, numpy_app
from tests.flower.quickstart.client_app import app
from tests.flower.quickstart.server_app import app as server
from tests.flower.quickstart.task import Net, load_centralized_dataset
from tests.flower.quickstart.task import test as evaluate
from tests.flower.silos import TESTS, accuracy_of, guards, ledger_of, run_config


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
def test_guards_evaluate_for_a_stock_strategy_on_records_that_only_they_have(tmp_path: Path) -> None:
    """Three of six server rounds have noisy metrics of the silos' own records, and the others have none."""
    config = run_config(tmp_path, **{"local-steps": 2, "num-server-rounds": 6})
    grid = InProcessGrid(evaluating_app.app, 2, config)
    with guards(tmp_path, 2, evaluation={"budget": 2.0, "evaluations": 3}):
        evaluating_app.server(grid, grid.server_context(config))
    left = torch.load(config["model"], weights_only=True)
    assert {t for t, metrics in left["told"].items() if metrics} == {"2", "4", "6"}
    model, data = Net(), load("synthetic")
    model.load_state_dict(left["model"])
    images = torch.from_numpy(data.test_images[: 2 * TESTS]).float().unsqueeze(1) / 255
    loss, accuracy = evaluate(model, (images, torch.from_numpy(data.test_labels[: 2 * TESTS])))
    std = math.sqrt(2) / 2 * math.sqrt(3) / (TESTS * 2.0) / math.sqrt(2)  # of the mean over two silos
    assert abs(left["told"]["6"]["eval_acc"] - accuracy) < 5 * std
    assert abs(left["told"]["6"]["eval_loss"] - loss) < 5 * std * 10.0
    for silo in (0, 1):
        assert ledger_of(tmp_path, silo, tests=True) == [("1", pytest.approx(2.0), 3)]
        assert ledger_of(tmp_path, silo) == [("1", pytest.approx(2.0), 12)]


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
