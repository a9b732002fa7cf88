"""Runs of real processes that are killed in the middle of their cells, and two that want the same folder."""

import json
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fedpriv.core import extensions
from fedpriv.engines.vectorized import engine as keeper
from tests.cli.command import fedpriv, running

SCENARIO = """
name = "long"
title = "Cells that take some seconds"
[data]
name = "synthetic"
[federation]
silos = 2
rounds = 3000
epochs = 2
[algorithm]
name = "dp-ftrl"
trust = "untrusted"
mechanism = "tree"
clip = 1.0
step = 0.01
[privacy]
relation = "replace-one"
mu = 1.0
[run]
evaluations = 3
[sweep]
"privacy.mu" = [1.0, 2.0]
seeds = 2
"""
HURRY = """
from fedpriv.engines.vectorized import engine as keeper
keeper._MIN_CHECKPOINT_SECONDS = 0.02
keeper._MAX_CHECKPOINT_SHARE = 1.0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; what hurry.py changes in the process of the tests is changed back."""
    monkeypatch.delenv(extensions.IMPORT_VARIABLE, raising=False)
    monkeypatch.setattr(extensions, "_imported_extensions", set())
    for name in ("_MIN_CHECKPOINT_SECONDS", "_MAX_CHECKPOINT_SHARE"):
        monkeypatch.setattr(keeper, name, getattr(keeper, name))
    (tmp_path / "long.toml").write_text(SCENARIO)
    (tmp_path / "hurry.py").write_text(HURRY)
    return tmp_path


def command(*options: str) -> list[str]:
    return ["run", "long.toml", "--import", "hurry.py", *options]


def kill_after(here: Path, rounds: int, *options: str) -> None:
    """Start the command, and kill it when so many rounds are kept."""
    with running(here, *command("--out", "out", *options)) as process:
        wait_for(process, here / "out", rounds)


def rounds_kept(folder: Path) -> int:
    """The rounds that are in the checkpoint of a run, 0 where there is none."""
    import torch

    from fedpriv.engines.vectorized.checkpoints import unpack_checkpoint

    paths = list((folder / "checkpoints").glob("[!.]*.npz"))
    try:
        contents = [unpack_checkpoint(path.read_bytes(), None, torch.device("cpu")) for path in paths]
        return max((content.t for content in contents), default=0)
    except FileNotFoundError:  # finished meanwhile
        return 0


def wait_for(process: "subprocess.Popen[str]", folder: Path, rounds: int) -> int:
    deadline = time.monotonic() + 200.0
    while (count := rounds_kept(folder)) < rounds:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return count


def without_times(folder: Path) -> str:
    """results.json, byte for byte but for what says when and how long."""
    tree: dict[str, Any] = json.loads((folder / "results.json").read_text())
    for cell in tree["cells"]:
        assert cell.pop("wall_seconds") > 0.0
    return json.dumps({key: value for key, value in tree.items() if key != "date"}, indent=1)


def lines(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines())


@pytest.mark.parametrize(
    ("workers", "signals"),
    [
        pytest.param([], [signal.SIGINT], id="here", marks=pytest.mark.long),
        pytest.param([], [signal.SIGKILL, signal.SIGINT], id="here, twice", marks=pytest.mark.slow),
        pytest.param(
            ["--workers", "1"], [signal.SIGKILL, signal.SIGINT], id="on a worker, twice", marks=pytest.mark.long
        ),
    ],
)
def test_a_killed_run_resumes_from_its_checkpoint_with_identical_results(
    here: Path, workers: list[str], signals: list[signal.Signals]
) -> None:
    """SIGKILL, then Ctrl-C: what was kept is not run again, and not a byte is another."""
    whole = fedpriv(*command("--out", "whole"), cwd=here)
    assert whole.returncode == 0, whole.stderr
    kept = 0
    for sent in signals:
        with running(here, *command(*workers, "--out", "out", "--resume")) as process:
            kept = wait_for(process, here / "out", kept + 300)
            process.send_signal(sent)
            _, said = process.communicate(timeout=100)
        assert process.returncode == (130 if sent == signal.SIGINT else -sent)
        folder = here / "out" / "checkpoints"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
        assert json.loads((here / "out" / "results.json").read_text())["cells"] == []
        kept = rounds_kept(here / "out")
    resume = said.splitlines()[-1].strip()
    assert resume == shlex.join(["fedpriv", *command("--resume", "--out", "out")])
    done = fedpriv(*shlex.split(resume)[1:], "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    assert without_times(here / "out") == without_times(here / "whole")
    assert lines(here / "out" / "history.jsonl") == lines(here / "whole" / "history.jsonl")
    for model in (here / "whole" / "models").iterdir():
        assert (here / "out" / "models" / model.name).read_bytes() == model.read_bytes()
    left = sorted(path.name for path in (here / "out").iterdir())
    assert left == ["history.jsonl", "models", "results.json", "table.md"]


@pytest.mark.slow
def test_adding_seeds_to_a_killed_run_keeps_its_checkpoint_in_use(here: Path) -> None:
    kill_after(here, 1500)
    kill_after(here, rounds_kept(here / "out") + 300, "--resume", "--set", "seeds=3")
    files = list((here / "out" / "checkpoints").glob("[!.]*.npz"))
    assert len(files) == 1, "the cells that were there go on by themselves, from what they had"
    tree = json.loads((here / "out" / "results.json").read_text())
    assert (tree["seeds"], tree["added_seeds"], tree["cells"]) == ([0, 1, 2], [[2]], [])


@pytest.mark.slow
def test_checkpoints_of_a_killed_run_are_neither_overwritten_nor_used_by_another_scenario(here: Path) -> None:
    kill_after(here, 100, "--set", "run.evaluations=1")
    again = fedpriv(*command("--out", "out"), cwd=here)
    assert again.returncode == 2
    assert again.stderr == "fedpriv: out holds results already; give another --out, or --resume to resume there\n"
    other = fedpriv(*command("--out", "out", "--resume", "--set", "federation.silos=1"), cwd=here)
    assert other.returncode == 2
    (line,) = other.stderr.splitlines()
    assert line.startswith("fedpriv: out holds another run: ")
    assert "is a checkpoint of cells that this scenario does not have; give another --out" in line
    assert rounds_kept(here / "out") >= 100, "nothing of it is lost"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_its_rounds_are_run_again(here: Path) -> None:
    kill_after(here, 100)
    (path,) = (here / "out" / "checkpoints").glob("[!.]*")
    path.write_bytes(path.read_bytes()[:1000])
    options = ["--out", "out", "--resume", "--quiet", "--set", "federation.rounds=100"]
    done = fedpriv(*command(*options), cwd=here)
    assert done.returncode == 0
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("note: "))
    reason = "not used, and its rounds are run again: not a whole"
    assert line.startswith(f"fedpriv: out/checkpoints/{path.name}: {reason}")
    assert not path.parent.exists()


@pytest.mark.slow
def test_a_run_folder_is_locked_by_a_live_process_but_not_by_a_killed_one(here: Path) -> None:
    with running(here, *command("--out", "out")) as process:
        wait_for(process, here / "out", 1)
        process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
        for more in ([], ["--resume"]):
            second = fedpriv(*command("--out", "out", *more), cwd=here)
            assert second.returncode == 2
            (line,) = second.stderr.splitlines()
            assert line.startswith(f"fedpriv: out: process {process.pid} on ")
            assert line.endswith(" is running there; give another --out, or wait until it ends")
    assert (here / "out" / ".lock").exists(), "the file of the killed process is still there"
    done = fedpriv(*command("--out", "out", "--resume", "--quiet"), cwd=here)
    assert done.returncode == 0
    assert all(line.startswith("note: ") for line in done.stderr.splitlines())
    assert not (here / "out" / ".lock").exists()
