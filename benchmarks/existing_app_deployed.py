"""The existing app as SuperNodes run it: a SuperLink, a SuperNode a silo, its bundle from the server.

Run in the environment that has Opacus, by `existing_app_point`.  The bundle holds two lines for each app, so that
deployment and simulation run the same training.
"""

import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.clientapp import ClientApp
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.fab import Fab

from benchmarks.existing_app_clients import SERVER_ROUNDS, SILOS, Setting, guarded_train, guards, own_train
from benchmarks.existing_app_model import Net
from fedpriv.addons.services import supernode_process
from fedpriv.addons.services.deployment import SuperLink, federation_superlink, node_key_folder
from fedpriv.addons.services.flower_private.names import START_RUN
from fedpriv.addons.services.service import flower_environment
from fedpriv.data.named import load

_SECONDS = 500.0
_APP = "from benchmarks.existing_app_deployed import {made}\n\napp = {made}()\n"
_PYPROJECT = """\
[project]
name = "existing"
version = "1.0.0"
description = "the template's app"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "benchmarks"

[tool.flwr.app.components]
serverapp = "existing.server_app:app"
clientapp = "existing.client_app:app"

[tool.flwr.app.config]
"""


def client_app() -> ClientApp:
    """Opacus or the silo's guard, as the run configuration says."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        config = context.run_config
        if config["who"] == "guard":
            return guarded_train(Path(str(config["scenario"])))(msg, context)
        noise = float(config["noise"])
        return own_train(load("mnist"), Setting(0.0, float(config["step"])), noise)(msg, context)

    return app


def server_app() -> ServerApp:
    """Stock FedAvg, or a server that lies to one silo; what came of it is written as JSON."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        config = context.run_config
        torch.manual_seed(int(config["seed"]))
        found = lied(grid) if config["lies"] else trained(grid, float(config["step"]))
        Path(str(config["out"])).write_text(json.dumps(found))

    return app


def trained(grid: Grid, step: float) -> dict[str, float]:
    """FedAvg over all rounds: the test accuracy, and the seconds of a round, the first one left out."""
    ended: list[float] = []

    def ticked(_round: int, _arrays: ArrayRecord) -> MetricRecord:
        ended.append(time.perf_counter())
        return MetricRecord({})

    result = FedAvg(fraction_evaluate=0.0, min_available_nodes=SILOS, min_train_nodes=SILOS).start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": step}),
        num_rounds=SERVER_ROUNDS,
        evaluate_fn=ticked,
    )
    final, data = Net(), load("mnist")
    final.load_state_dict(result.arrays.to_torch_state_dict())
    with torch.no_grad():
        logits = final(torch.from_numpy(data.test_images).float().unsqueeze(1) / 255)
    accuracy = (logits.argmax(1) == torch.from_numpy(data.test_labels)).float().mean().item()
    return {"accuracy": accuracy, "round": float(np.diff(ended)[1:].mean())}


def lied(grid: Grid) -> dict[str, Any]:
    """Three lies to one silo, one after another: a model of NaN, round 1 twice, twice the rounds."""
    while len(nodes := sorted(grid.get_node_ids())) < SILOS:
        time.sleep(0.5)

    def ask(arrays: ArrayRecord, server_round: int) -> list[np.ndarray] | str:
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": server_round})})
        (reply,) = grid.send_and_receive([Message(content, nodes[0], "train")], timeout=_SECONDS)
        return reply.error.reason if reply.has_error() else reply.content["arrays"].to_numpy_ndarrays()

    model = Net().state_dict()
    missing = ask(ArrayRecord({name: value * float("nan") for name, value in model.items()}), 1)
    answers = [ask(ArrayRecord(model), t) for t in (1, 1, *range(2, 2 * SERVER_ROUNDS + 1))]
    first, again = answers[:2]
    same = not isinstance(first, str) and not isinstance(again, str)
    same = same and all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    refused = [answer for answer in answers if isinstance(answer, str)]
    return {
        "nan": missing if isinstance(missing, str) else "",
        "same": same,
        "answered": len(answers) - 1 - len(refused),
        "reason": (refused or [""])[0],
    }


def deployed(who: str, setting: Setting, seed: int, *, lies: bool = False) -> dict[str, Any]:
    """One run over SuperNodes: `trained`, or `lied`; RuntimeError with the logs' ends if it fails."""
    noise = 0.0 if who == "guard" else setting.noise_multiplier()
    silos = guards(load("mnist"), setting) if who == "guard" else nullcontext(None)
    with tempfile.TemporaryDirectory(prefix="fedpriv-existing-") as name, silos as sites:
        home = Path(name)
        config = {
            "who": who, "step": setting.step, "noise": noise, "seed": seed, "lies": lies,
            "out": str(home / "found.json"), "scenario": str((sites or home) / "guard.toml"),
        }  # fmt: skip
        with federation_superlink(home, SILOS) as link, _nodes(link, home, sites):
            run, deadline = _submitted(link, config), time.monotonic() + _SECONDS
            while not (status := link.control.run_status(run)).is_over and time.monotonic() < deadline:
                time.sleep(0.5)
            if status.state != "finished:completed" or not (home / "found.json").exists():
                logs = "".join(path.read_text(errors="replace")[-800:] for path in home.glob("silo-*.log"))
                raise RuntimeError(f"{status}: {link.log_tail()[-800:]} {logs}")
            found: dict[str, Any] = json.loads((home / "found.json").read_text())
    return found


@contextmanager
def _nodes(link: SuperLink, home: Path, sites: Path | None) -> Iterator[None]:
    """A SuperNode for each silo; an app that trains by itself is told of a guard that is not there."""
    assert link.address is not None
    started = []
    try:
        for silo in range(SILOS):
            socket = (sites or home) / f"silo-{silo}" / "s.sock"
            words = supernode_process.supernode_command(
                link.address, silo, socket, node_key_folder(home, silo), "--apps"
            )
            with (home / f"silo-{silo}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        words, cwd=home, env=flower_environment(home), stdout=log, stderr=subprocess.STDOUT
                    )
                )
        yield
    finally:
        for node in started:
            psutil.Process(node.pid).terminate()
            node.wait(30)


def _submitted(link: SuperLink, config: dict[str, Any]) -> int:
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    files: dict[str, bytes | Path] = {
        "pyproject.toml": (_PYPROJECT + keys).encode(),
        "existing/__init__.py": b"",
        **{f"existing/{made}.py": _APP.format(made=made).encode() for made in ("client_app", "server_app")},
    }
    content, _ = build_fab_from_files(files)
    request = StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})))
    return int(link.control._ask(START_RUN, request).run_id)
