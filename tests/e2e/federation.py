"""A federation of real processes that a test can hurt, and what it should have computed."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import DTypeLike

from fedpriv.addons.services.deployment import (
    LocalSilo,
    SuperLink,
    federation_superlink,
    node_key_folder,
    write_silos,
)
from fedpriv.addons.services.service import flower_environment, script_path
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell
from tests.e2e.replay import replayed

SCENARIO = Path(__file__).with_name("federation.toml")
Command = subprocess.Popen[str]


def kill_process(silo: LocalSilo, name: str) -> None:
    """SIGKILL its guard or its SuperNode, with all it started, and wait until it is gone."""
    os.killpg(silo.processes[name].pid, signal.SIGKILL)
    silo.processes[name].wait()


_ENTRY_EXTRA = 48
"""Bytes of an entry of the server's journal beside the vector: the link of its noise, and a check."""


def entries(size: int, dtype: DTypeLike) -> int:
    """Rounds in a server's journal of so many bytes, of softmax regression on images."""
    return size // (7850 * np.dtype(dtype).itemsize + _ENTRY_EXTRA)


class Federation:
    """A SuperLink and silos that no engine watches, and `fedpriv run --superlink` against them."""

    def __init__(
        self, folder: Path, home: Path, link: SuperLink, overrides: Sequence[str], budget: float = 1.0
    ) -> None:
        """`budget` times the price of one run is what each silo allows."""
        self.folder, self.home, self.link, self.overrides = folder, home, link, overrides
        self.cell: Cell = load_scenario(SCENARIO, overrides).points[0].cell
        policies = write_silos(self.cell, folder / "silos", home)
        for policy in policies:
            allowed = budget * (self.cell.privacy.target_mu or 0.0)
            text = re.sub(r"budget = .*", f"budget = {allowed}", policy.read_text())
            policy.write_text(text)
        assert link.address is not None
        self.silos = [
            LocalSilo(number, policy, link.address, node_key_folder(home, number))
            for number, policy in enumerate(policies)
        ]

    def start_silos(self) -> None:
        for silo in self.silos:
            silo.start()

    def command(self, *options: str, out: str = "run") -> list[str]:
        """`fedpriv run` against this federation."""
        command = [
            script_path("fedpriv"),
            "run",
            str(SCENARIO),
            "--engine",
            "deployment",
            "--out",
            str(self.folder / out),
        ]
        command += ["--superlink", self.link.control.address, *options]
        for override in self.overrides:
            command += ["--set", override]
        return command

    def run(self, *options: str, out: str = "run") -> Command:
        """`fedpriv run` in the background."""
        command, env = self.command(*options, out=out), flower_environment(self.home)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    def own(self, out: str = "run") -> Path:
        """The folder below RUN_DIR where the server writes."""
        (path,) = (self.folder / out / "deployment").iterdir()
        return path

    def rounds_done(self, out: str = "run") -> int:
        try:
            size = (self.own(out) / "journal" / "released.bin").stat().st_size
        except (FileNotFoundError, ValueError):
            return 0
        return entries(size, self.cell.run.dtype)

    def wait_for_round(self, t: int, running: Command, out: str = "run") -> None:
        wait_until(lambda: self.rounds_done(out) >= t or running.poll() is not None, f"round {t}")
        assert running.poll() is None, running.communicate()[0]

    def server_key(self) -> bytes:
        return (self.own() / "journal" / "noise.key").read_bytes()

    def silo_keys(self, token: str) -> list[bytes]:
        return [
            self.ledger(silo, "SELECT key FROM runs WHERE run_id = ?", token)[0][0]
            for silo in range(len(self.silos))
        ]

    def token(self, out: str = "run") -> str:
        return (self.own(out) / "token").read_text()

    def ledger(self, silo: int, query: str, *values: Any) -> list[Any]:
        path = self.folder / "silos" / f"silo-{silo}" / "ledger.sqlite"
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0) as database:
            return database.execute(query, values).fetchall()

    def model(self, out: str = "run") -> np.ndarray:
        return np.load(self.folder / out / "models" / "0000.npy")

    def processes(self, name: str) -> list[psutil.Process]:
        """Flower's own processes of this federation by the name of their script."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = Path(process.environ().get("FLWR_HOME", "/")).is_relative_to(self.home)
                if ours and any(Path(word).name == name for word in process.cmdline()[:5]):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_each_round_was_released_once(self, token: str, rounds: int | None = None) -> None:
        """Every ledger: one run of this token at the scenario's price, one answer for each round.

        Where messages are masked, the public key stands first, as the answer to round 0.
        """
        first = 0 if self.cell.algorithm.trust_setting.masked else 1
        for silo in range(len(self.silos)):
            assert self.ledger(silo, "SELECT run_id FROM runs") == [(token,)]
            ((price,),) = self.ledger(silo, "SELECT mu FROM runs")
            assert abs(price - (self.cell.privacy.target_mu or 0.0)) < 1e-9
            answered = [t for (t,) in self.ledger(silo, "SELECT t FROM answers ORDER BY t")]
            assert answered == list(range(first, (rounds or self.cell.schedule.rounds) + 1))

    def assert_no_round_was_released_twice(self, token: str) -> None:
        """Every ledger: one run of this token, and answers for rounds 1, 2, … without a gap."""
        for silo in range(len(self.silos)):
            answered = [
                t for (t,) in self.ledger(silo, "SELECT t FROM answers WHERE run_id = ? ORDER BY t", token)
            ]
            assert answered == list(range(1, len(answered) + 1))
            assert len(self.ledger(silo, "SELECT 1 FROM runs")) == 1

    def replay(self, silo_keys: list[bytes], server_key: bytes) -> np.ndarray:
        """The model of the same run in one process, uninterrupted, with the keys that the federation used."""
        return replayed(self.cell, silo_keys, server_key)


@contextmanager
def federation(tmp_path: Path, *overrides: str, budget: float = 1.0) -> Iterator[Federation]:
    """A federation whose processes are gone when the block is left."""
    with tempfile.TemporaryDirectory(prefix="fedpriv-e2e-") as name:
        home = Path(name)
        silos = load_scenario(SCENARIO, overrides).points[0].cell.federation.silos
        with federation_superlink(home, silos) as link:
            yield Federation(tmp_path, home, link, overrides, budget)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.1)


def finish(running: Command, code: int = 0, seconds: float = 300.0) -> str:
    """Wait for `fedpriv run`; its output, once its exit code is the one expected."""
    output, _ = running.communicate(timeout=seconds)
    assert running.returncode == code, output
    return output


def results(folder: Path, out: str = "run") -> dict[str, Any]:
    (cell,) = json.loads((folder / out / "results.json").read_text())["cells"]
    return dict(cell)


def say(line: str) -> None:
    """What the test did, for people who read `make e2e`."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr)
