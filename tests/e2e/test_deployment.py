"""`fedpriv run --engine deployment`: processes of this machine, started and ended by the engine."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fedpriv.addons.services import supernode_process
from fedpriv.addons.services.deployment import run_deployment
from fedpriv.addons.services.service import script_path
from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import RunError
from fedpriv.engines.table import LOCAL
from fedpriv.scenario.schema import Cell
from fedpriv.study.results import read_results
from tests.e2e.federation import SCENARIO, wait_until


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder whose name is so short that a guard's socket can be below it: the system takes 107 characters."""
    with tempfile.TemporaryDirectory(prefix="h") as folder:
        yield Path(folder)


def start(out: Path, home: Path, *options: str, engine: str = "deployment") -> "subprocess.Popen[str]":
    command = [script_path("fedpriv"), "run", str(SCENARIO), "--engine", engine, "--out", str(out), *options]
    environment = {**os.environ, "TMPDIR": str(home), "XDG_STATE_HOME": str(home / "state")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def left_running(home: Path) -> list[psutil.Process]:
    """Every process that has to do with this run: its temporary folder is named in its environment or command."""
    found = []
    for process in psutil.process_iter():
        try:
            named = any(f"{home}/" in word for word in process.cmdline())
            if named or process.environ().get("TMPDIR") == str(home):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_a_local_deployment_leaves_results_but_no_processes_or_keys(tmp_path: Path, home: Path) -> None:
    running = start(tmp_path / "run", home, "--set", "federation.rounds=2", "--set", "federation.silos=2")
    output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    results = read_results(tmp_path / "run")
    (cell,) = results.cells
    assert results.complete
    assert (cell["noise"], cell["engine"], cell["rounds"], cell["missed"]) == ("release", "deployment", 2, {})
    assert cell["mu"] == pytest.approx(4.0)
    assert left_running(home) == []
    assert not list((home / "state" / "fedpriv").iterdir())  # shards, ledgers and keys are gone


@pytest.mark.deployment
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_deployment_leaves_no_processes_and_can_be_resumed(
    tmp_path: Path, stop: signal.Signals
) -> None:
    home, out = tmp_path / "h", tmp_path / "run"
    home.mkdir()
    running = start(out, home)
    wait_until(lambda: any(out.glob("deployment/*/progress")) or running.poll() is not None, "a round")
    running.send_signal(stop)
    output, _ = running.communicate(timeout=180)
    assert running.returncode == 130, output
    assert left_running(home) == []
    (journal,) = out.glob("deployment/*/journal/released.bin")
    before = journal.read_bytes()
    again = start(out, home, "--resume")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert journal.read_bytes().startswith(before)
    assert left_running(home) == []


@pytest.mark.deployment
@pytest.mark.parametrize("engine", ["deployment", "ray"])
def test_a_killed_run_command_leaves_no_processes_and_no_keys(tmp_path: Path, engine: str) -> None:
    """SIGKILL leaves it no moment to clean up; a stranger would find servers without an owner."""
    if engine == "ray":
        pytest.importorskip("ray", reason="needs pip install 'fedpriv[ray]'")
    with tempfile.TemporaryDirectory() as name:  # Ray's sockets allow no long path
        home = Path(name)
        running = start(tmp_path / "run", home, "--set", "federation.batch=20", engine=engine)
        wanted = "raylet" if engine == "ray" else "flwr-serverapp"

        def is_there() -> bool:
            for process in left_running(home):
                with suppress(psutil.Error):  # it has ended since
                    if wanted in " ".join(process.cmdline()[:5]):
                        return True
            return False

        wait_until(lambda: is_there() or running.poll() is not None, wanted)
        assert running.poll() is None, running.communicate()
        assert len(left_running(home)) > 3
        running.kill()
        running.wait()
        wait_until(lambda: not left_running(home), "nothing to run", seconds=60.0)
        wait_until(lambda: not list(home.glob("fedpriv-*")), "no folder to be there", seconds=60.0)


@pytest.mark.deployment
def test_a_local_deployment_ends_when_a_supernode_exits_with_an_error(
    tmp_path: Path, small_cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for, in silence, until the patience of the scenario was over."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = [sys.executable, "-c", "raise SystemExit('this node does not want to')"]
    monkeypatch.setattr(supernode_process, "supernode_command", lambda *_: words)
    cell = small_cell(deployment__patience=900.0)
    with pytest.raises(RunError, match=r"silo \d's supernode ended with exit code 1:\n.*does not want to"):
        list(run_deployment([cell], RunObserver(), folder=tmp_path / "run", connection=LOCAL))


@pytest.mark.deployment
def test_a_local_deployment_of_twenty_silos_completes(tmp_path: Path) -> None:
    home = tmp_path / "h"
    home.mkdir()
    sizes = ("federation.silos=20", "federation.rounds=3", "federation.batch=50", "deployment.patience=900")
    running = start(tmp_path / "run", home, *(word for size in sizes for word in ("--set", size)))
    output, _ = running.communicate(timeout=1800)
    assert running.returncode == 0, output
    (cell,) = read_results(tmp_path / "run").cells
    assert (cell["silos"], cell["rounds"], cell["missed"]) == (20, 3, {})
    assert left_running(home) == []
