"""examples/flower-app, as `flwr new` lays an app out: in this process, by `flwr run`, and with SuperNodes."""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.addons.services.service import flower_environment, script_path
from fedpriv.engines.children import reap_processes
from fedpriv.engines.inprocess import InProcessGrid
from tests.doc_pages import ROOT
from tests.e2e.flwr_command import flwr_run

APP = ROOT / "examples" / "flower-app"
CONFIG = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
SHORT = {"num-server-rounds": 3, "batch-size": 20}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The app's package, with a folder of its own for what it saves."""
    monkeypatch.syspath_prepend(str(APP))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "flowerapp"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("flowerapp.server_app")
    for name in [name for name in sys.modules if name.split(".")[0] == "flowerapp"]:
        del sys.modules[name]


def run_here(app: Any, **keys: Any) -> None:
    """Run the app in this process, which saves its model."""
    config = {**CONFIG, **keys}
    torch.manual_seed(0)
    grid = InProcessGrid(importlib.import_module("flowerapp.client_app").app, config["silos"], config)
    app.app(grid, grid.server_context(config))


def accuracy(app: Any) -> float:
    model = app.Net()
    model.load_state_dict(torch.load("final_model.pt", weights_only=True))
    return float(app.test(model, app.load_centralized_dataset())[1])


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_the_example_app_prints_its_guarantee(app: Any, trust: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(app, trust=trust, **SHORT | {"num-server-rounds": 2, "batch-size": 5})
    said = capsys.readouterr().out
    assert "The guarantee: one record of a silo, zero-out neighbours" in said
    assert "(4, 1e-05)" in said


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_the_example_app_learns_above_chance(app: Any, trust: str) -> None:
    run_here(app, trust=trust)
    assert accuracy(app) > 0.35


def test_the_example_app_names_fedpriv_in_strategy_client_and_dependency_only() -> None:
    """Strategy, client, dependency: nothing else of the app knows of privacy."""
    texts = {path.name: path.read_text() for path in (APP / "flowerapp").glob("*.py")}
    naming = [name for name, text in texts.items() if "fedpriv.flower" in text]
    assert sorted(naming) == ["client_app.py", "server_app.py"]
    assert "fedpriv" in (APP / "pyproject.toml").read_text()


@pytest.mark.deployment
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_flwr_run_trains_the_example_app_on_the_simulation_engine(app: Any, tmp_path: Path, trust: str) -> None:
    said = flwr_run(APP, 2, {**SHORT, "trust": trust}, tmp_path)
    assert "The guarantee: one record of a silo" in said, said[-3000:]
    assert "ε = 4 at δ = 1e-05 after round 3" in said, said[-3000:]
    assert 0.0 < accuracy(app) < 1.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.deployment
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_a_superlink_and_two_supernodes_run_the_example(app: Any, tmp_path: Path, trust: str) -> None:
    """Flower's own commands, without keys, on this machine."""
    link, *nodes = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="fedpriv-flower-app-") as name, reap_processes(Path(name)):
        homes = {part: Path(name) / part for part in ("link", "node-0", "node-1", "user")}
        for home in homes.values():
            home.mkdir()
        address = f"127.0.0.1:{link}"
        commands = {
            "link": [script_path("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(link)]
        }
        for silo, port in enumerate(nodes):
            commands[f"node-{silo}"] = [
                script_path("flower-supernode"), "--insecure", "--superlink", address, "--port", str(port),
                "--node-config", f"partition-id={silo} num-partitions=2",
            ]  # fmt: skip
        (homes["user"] / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        )
        with started(commands, homes, tmp_path):
            status = submitted(homes["user"], trust)
        logs = "\n".join((home / "log").read_text(errors="replace")[-2500:] for home in list(homes.values())[:3])
        assert status == "finished:completed", logs
    assert 0.0 < accuracy(app) < 1.0


def own(home: Path) -> dict[str, str]:
    return {**flower_environment(home), "FLWR_HOME": str(home), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}


@contextmanager
def started(commands: dict[str, list[str]], homes: dict[str, Path], cwd: Path) -> Iterator[None]:
    """Run processes with a log each, and end them with the block."""
    processes = []
    try:
        for part, words in commands.items():
            with (homes[part] / "log").open("wb") as log:
                keys = {"cwd": cwd, "env": own(homes[part]), "stdout": log, "stderr": subprocess.STDOUT}
                processes.append(subprocess.Popen(words, **keys))
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def submitted(home: Path, trust: str) -> str:
    """Submit the app once the SuperLink answers, and return how its run ended."""
    keys = " ".join(f"{key}={value}" for key, value in SHORT.items()) + f' trust="{trust}"'
    deadline = time.monotonic() + 400
    while True:
        words = [script_path("flwr"), "run", str(APP), "here", "--run-config", keys]
        done = subprocess.run(words, env=own(home), capture_output=True, text=True, check=False)
        if done.returncode == 0 or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    while time.monotonic() < deadline:
        words = [script_path("flwr"), "list", "here", "--format", "json"]
        listed = subprocess.run(words, env=own(home), capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            runs = json.loads(listed.stdout)["runs"]
            if runs and runs[0]["status"].startswith("finished"):
                return str(runs[0]["status"])
        time.sleep(2.0)
    return "not finished in time"
