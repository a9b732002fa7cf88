"""The quickstart app as SuperNodes run it: its bundle from the server, its guards from the sites."""

import hashlib
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.fab import Fab

from fedpriv.engines import supernode_process
from fedpriv.engines.processes import environment
from fedpriv.engines.superlink import SubmittedRun, SuperLink, federation_superlink, node_keys
from tests.flower.quickstart.task import Net, load_centralized_dataset
from tests.flower.quickstart.task import test as evaluate
from tests.flower.silos import app_files, guards, ledger_of, run_config


def submitted(link: SuperLink, folder: Path) -> SubmittedRun:
    """The app as `flwr run` bundles it: its own code, and the scenario beside it."""
    config = {key: value for key, value in run_config(folder).items() if key != "guard"}
    files: dict[str, bytes | Path] = {name: text.encode() for name, text in app_files(config).items()}
    content, _ = build_fab_from_files(files)
    request = StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})))
    return SubmittedRun(link, link.control._ask(lambda client: client.StartRun(request)).run_id)


@pytest.mark.deployment
def test_supernodes_of_a_stock_app_train_through_their_sites_guards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = evaluate(Net(), load_centralized_dataset())[1]
    with (
        tempfile.TemporaryDirectory(prefix="fedpriv-flower-") as name,
        federation_superlink(Path(name), 2) as link,
        guards(tmp_path, 2),
    ):
        home, nodes = Path(name), []
        assert link.address is not None
        for silo in (0, 1):
            own = home / f"silo-{silo}"
            own.mkdir()
            socket = tmp_path / f"silo-{silo}" / "s.sock"
            words = supernode_process.command(link.address, silo, socket, node_keys(home, silo))
            with (own / "log").open("wb") as log:
                nodes.append(
                    subprocess.Popen(words, cwd=own, env=environment(own), stdout=log, stderr=subprocess.STDOUT)
                )
        run = submitted(link, tmp_path)
        deadline = time.monotonic() + 300
        while not (status := run.status()).startswith("finished") and time.monotonic() < deadline:
            time.sleep(0.3)
        logs = "".join((home / f"silo-{silo}" / "log").read_text(errors="replace")[-3000:] for silo in (0, 1))
        assert status == "finished:completed", f"{status}\n{link.log_tail(40)}\n{logs}"
        for node in nodes:
            psutil.Process(node.pid).terminate()
            node.wait(30)
    model = Net()  # a strategy that got no reply at all ends without parameters
    model.load_state_dict(torch.load(tmp_path / "final_model.pt", weights_only=True))
    assert evaluate(model, load_centralized_dataset())[1] > before + 0.2, logs
    for silo in (0, 1):
        ((name_of_run, _, answered),) = ledger_of(tmp_path, silo)
        assert (name_of_run, answered) == (str(run.run_id), 12)
