"""Real guards with the records of a quickstart app, and the app's messages."""

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

from fedpriv.cli import main
from fedpriv.data.named import load
from fedpriv.silo.demo import format_policy, write_shard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import read_policy
from tests.flower.quickstart.task import Net, load_centralized_dataset
from tests.flower.quickstart.task import test as evaluate

HELD, TESTS = 1200, 300
"""Records of a silo that train, and that evaluate."""
APPS = {"message": ("server_app:app", "client_app:app"), "numpy": ("numpy_app:server", "numpy_app:app")}
"""ServerApp and ClientApp of the quickstart in Flower's present way, and in its older one."""

PYPROJECT = """\
[project]
name = "quickstart"
version = "1.0.0"
description = "the template's app"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "quickstart.{server}"
clientapp = "quickstart.{client}"

[tool.flwr.app.config]
"""
HERE = Path(__file__).parent


def write_policy(folder: Path, silo: int, evaluation: Mapping[str, Any] | None = None, **allow: Any) -> Path:
    """A silo's folder, as its administrator makes it: its records, and what it allows."""
    own = folder / f"silo-{silo}"
    own.mkdir(mode=0o700)
    tests = None if evaluation is None else np.arange(silo * TESTS, (silo + 1) * TESTS)
    write_shard(own / "shard.npz", load("synthetic"), np.arange(silo * HELD, (silo + 1) * HELD), tests)
    keys = {"silo": silo, "classes": 10, "shard": "shard.npz", "ledger": "l.sqlite", "socket": "s.sock"}
    allowed = {
        "relation": "zero-out", "clip": 1.0, "rounds": 12, "budget": 2.0, "tick": 0.0,
        "models": ["quickstart.task:net"], **allow,
    }  # fmt: skip
    (own / "policy.toml").write_text(format_policy(keys, allowed, evaluation=evaluation))
    return own / "policy.toml"


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [__name__, "fedpriv.silo.daemon", "fedpriv.cli.silo", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"]
)


def serve(policy: Path, answering: Connection) -> None:
    """Run the guard's command in this process; its log is beside its policy."""
    os.dup2(answering.fileno(), 1)
    with policy.with_name("log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path.insert(0, str(HERE))
    sys.argv = ["fedpriv", "silo", "run", str(policy)]
    main()


def start_guard(policy: Path) -> BaseProcess:
    """A guard process at the point where it answers: a fork of one that has imported what guards do."""
    begin_ledgers(read_policy(policy))
    answers, answering = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=serve, args=(policy, answering), daemon=True)
    process.start()
    answering.close()
    with answers, open(answers.fileno(), closefd=False) as lines:
        line = lines.readline()
    assert line.startswith("answering on"), (line, policy.with_name("log").read_text())
    return process


@contextmanager
def guards(folder: Path, silos: int, /, **allow: Any) -> Iterator[list[BaseProcess]]:
    """A guard process for each silo; the app's model is installed where they run."""
    started = [start_guard(write_policy(folder, silo, **allow)) for silo in range(silos)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def run_config(folder: Path, **keys: Any) -> dict[str, Any]:
    """Of `flwr run`: the template's keys, and where guards are."""
    return {
        "num-server-rounds": 12,
        "learning-rate": 0.1,
        "local-steps": 1,
        "strategy": "FedAvg",
        "model": str(folder / "final_model.pt"),
        "guard": f"{folder}/silo-{{silo}}/s.sock",
        **keys,
    }


def app_files(config: dict[str, Any], style: str = "message") -> dict[str, str]:
    """The app's folder as `flwr new` lays it out: file -> text; `config` are the defaults of its keys."""
    server, client = APPS[style]
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    own = {path.name: path.read_text() for path in (HERE / "quickstart").iterdir() if path.is_file()}
    return {
        "pyproject.toml": PYPROJECT.format(server=server, client=client) + keys,
        "quickstart/__init__.py": "",
        **{f"quickstart/{name}": text for name, text in own.items()},
    }


def context_of(folder: Path, run: int, silo: int = 0, **keys: Any) -> Context:
    """A node's context in one run."""
    return Context(run, 1000 + silo, {"partition-id": silo}, RecordDict(), run_config(folder, **keys))


def ledger_of(folder: Path, silo: int = 0, *, tests: bool = False) -> list[tuple[str, float, int]]:
    """(run, price, rounds answered) of all runs, as the silo's administrator sees them; or those of `tests`."""
    policy = read_policy(folder / f"silo-{silo}" / "policy.toml")
    if tests:
        assert policy.test_policy is not None
        policy = policy.test_policy
    ledger = SiloLedger(policy.ledger, policy.mark_path)
    rows = [(row.run_id, row.mu, row.answered_count) for row in ledger.list_runs()]
    ledger.close()
    return rows


def accuracy_of(saved: str) -> float:
    """The test accuracy of the model that a ServerApp saved."""
    model = Net()
    model.load_state_dict(torch.load(saved, weights_only=True))
    return evaluate(model, load_centralized_dataset())[1]
