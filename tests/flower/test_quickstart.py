"""A stock Flower app whose silos' guards train: strategies at the server are Flower's own, unchanged."""

import hashlib
import math
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from flwr.cli.build import build_fab_from_files
from flwr.clientapp import ClientApp
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.serverapp import ServerApp
from flwr.supercore.fab import Fab

from fedpriv.addons.services import supernode_process
from fedpriv.addons.services.deployment import SuperLink, federation_superlink, node_key_folder
from fedpriv.addons.services.flower_private.control import ApiClient
from fedpriv.addons.services.flower_private.names import START_RUN
from fedpriv.addons.services.service import flower_environment
from fedpriv.data.named import load
from fedpriv.engines.inprocess import InProcessGrid
from tests.e2e.flwr_command import flwr_run
from tests.flower.quickstart import evaluating_app, numpy_app
from tests.flower.quickstart.client_app import app
from tests.flower.quickstart.server_app import app as server
from tests.flower.quickstart.task import Net, load_centralized_dataset
from tests.flower.quickstart.task import test as evaluate
from tests.flower.silos import APPS, TESTS, accuracy_of, app_files, guards, ledger_of, run_config


def trained_accuracy(
    folder: Path, client_app: ClientApp = app, server_app: ServerApp = server, **keys: object
) -> float:
    config = run_config(folder, **keys)
    grid = InProcessGrid(client_app, 2, config)
    server_app(grid, grid.server_context(config))
    return accuracy_of(config["model"])


@pytest.fixture
def before() -> float:
    """The accuracy of the model before it is trained."""
    torch.manual_seed(0)
    return evaluate(Net(), load_centralized_dataset())[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "steps"), [("FedAvg", 1), ("FedAvg", 3), ("FedAdam", 1)], ids=["FedAvg", "local steps", "FedAdam"]
)
def test_a_flower_strategy_trains_through_guards(tmp_path: Path, before: float, strategy: str, steps: int) -> None:
    with guards(tmp_path, 2):
        keys = {"strategy": strategy, "local-steps": steps, "num-server-rounds": 12 // steps}
        accuracy = trained_accuracy(tmp_path, **keys)
    assert accuracy > before + 0.2
    for silo in (0, 1):
        ((run, mu, answered),) = ledger_of(tmp_path, silo)
        assert (run, answered) == ("1", 12)
        assert math.isclose(mu, 2.0)


@pytest.mark.slow
def test_guards_evaluate_for_a_flower_strategy_on_their_own_test_records(tmp_path: Path) -> None:
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
def test_a_numpy_client_trains_through_guards(tmp_path: Path, before: float) -> None:
    """Its arrays are lists without names, and its strategy is Flower's older FedAvg."""
    with guards(tmp_path, 2):
        keys = {"local-steps": 2, "num-server-rounds": 6}
        accuracy = trained_accuracy(tmp_path, numpy_app.app, numpy_app.server, **keys)
    assert accuracy > before + 0.2
    assert [ledger_of(tmp_path, silo) for silo in (0, 1)] == [[("1", pytest.approx(2.0), 12)]] * 2


@pytest.mark.deployment
@pytest.mark.parametrize("style", APPS)
def test_flwr_run_trains_a_flower_app_through_guards(tmp_path: Path, before: float, style: str) -> None:
    app, sites, elsewhere = tmp_path / "app", tmp_path / "sites", tmp_path / "elsewhere"
    for name, text in app_files(run_config(sites), style).items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text)
    sites.mkdir()
    elsewhere.mkdir()
    with guards(sites, 2):
        said = flwr_run(app, 2, {}, elsewhere)
        ledgers = [ledger_of(sites, silo) for silo in (0, 1)]
    assert accuracy_of(run_config(sites)["model"]) > before + 0.2, said[-3000:]
    for ((run, price, answered),) in ledgers:
        assert (price, answered) == (pytest.approx(2.0), 12)
        assert f"`{run}`" in said  # Flower's run is the ledger's
    assert list(elsewhere.iterdir()) == []


def submitted(link: SuperLink, folder: Path) -> int:
    """The app as `flwr run` bundles it: its own code, and the scenario beside it."""
    config = {key: value for key, value in run_config(folder).items() if key != "guard"}
    files: dict[str, bytes | Path] = {name: text.encode() for name, text in app_files(config).items()}
    content, _ = build_fab_from_files(files)
    request = StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})))
    return int(link.control._answer(lambda client: ApiClient(client).ask(START_RUN, request)).run_id)


@pytest.mark.deployment
def test_supernodes_train_a_flower_app_through_the_guards_of_their_sites(tmp_path: Path, before: float) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="fedpriv-flower-") as name,
        federation_superlink(Path(name), 2) as link,
        guards(tmp_path, 2),
    ):
        home, nodes = Path(name), []
        assert link.address is not None
        for silo in (0, 1):
            site, socket = home / f"silo-{silo}", tmp_path / f"silo-{silo}" / "s.sock"
            site.mkdir()
            key = node_key_folder(home, silo)
            words = supernode_process.supernode_command(link.address, silo, socket, key, "--apps")
            with (site / "log").open("wb") as log:
                process = subprocess.Popen(
                    words, cwd=site, env=flower_environment(site), stdout=log, stderr=subprocess.STDOUT
                )
                nodes.append(process)
        run = submitted(link, tmp_path)
        deadline = time.monotonic() + 300
        while not (status := link.control.run_status(run)).is_over and time.monotonic() < deadline:
            time.sleep(0.3)
        logs = "".join((home / f"silo-{silo}" / "log").read_text(errors="replace")[-3000:] for silo in (0, 1))
        assert status.state == "finished:completed", f"{status}\n{link.log_tail()}\n{logs}"
        for node in nodes:
            psutil.Process(node.pid).terminate()
            node.wait(30)
    saved = tmp_path / "final_model.pt"  # a strategy that got no reply at all ends without parameters
    assert accuracy_of(str(saved)) > before + 0.2, logs
    for silo in (0, 1):
        ((name_of_run, _, answered),) = ledger_of(tmp_path, silo)
        assert (name_of_run, answered) == (str(run), 12)
