"""What a SuperLink has of the one before it: a list of runs."""

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fedpriv.addons.services import deployment
from fedpriv.addons.services.deployment import RunProgress, follow_run, simulation_superlink
from fedpriv.addons.services.flower_private import presence
from fedpriv.addons.services.flower_private.control import LostRunError, UnreachableError
from fedpriv.addons.services.flower_private.names import LIST_RUNS
from fedpriv.addons.services.flower_private.presence import RunHistory
from fedpriv.core.errors import InputError, RunError
from fedpriv.protocol.cell_folder import FolderReader
from tests.engines.builders import Recorder, superlink_of


def run(number: int, status: str, sub_status: str = "", finished: str = "") -> Any:
    """A run as the Control API lists it."""
    (made,) = [LIST_RUNS.answer_type().run_dict[number]]
    made.run_id, made.finished_at, made.running_at = number, finished, "2026-11-23T10:00:00+00:00"
    made.status.status, made.status.sub_status = status, sub_status
    made.override_config["out"].string = "/srv/run"
    return made


def test_the_run_history_survives_a_restart_and_marks_interrupted_runs_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.json"
    RunHistory(path).update([run(7, "running"), run(8, "finished", "completed", "then")])
    assert path.stat().st_mode & 0o777 == 0o600
    assert [set(listed) for listed in json.loads(path.read_text())] == [
        {"run", "state", "started", "finished", "folder"}
    ] * 2
    after = RunHistory(path)
    assert [listed["state"] for listed in after.runs()] == [
        "finished:failed (the SuperLink was started again)",
        "finished:completed",
    ]
    monkeypatch.setattr(presence, "_MAX_RUNS", 3)
    after.update(run(number, "pending") for number in range(10, 12))
    with pytest.raises(InputError, match="another SuperLink keeps its runs there"):
        RunHistory(path)
    assert [listed["run"] for listed in json.loads(path.read_text())] == ["8", "10", "11"]
    unwritten = RunHistory(None)
    assert unwritten.runs() == []
    unwritten.update([run(7, "running")])
    assert [listed["run"] for listed in unwritten.runs()] == ["7"]
    assert [unwritten.is_due(), unwritten.is_due()] == [True, False]
    assert [after.is_due(), after.is_due()] == [True, False]


def test_a_run_history_not_written_on_a_full_disk_is_written_at_the_next_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: at the next change of a run, and a run that had ended came back as failed by the restart."""
    path = tmp_path / "runs.json"
    history = RunHistory(path)
    history.update([run(7, "running")])
    ended = [run(7, "finished", "completed", "then")]
    with monkeypatch.context() as full_disk:
        full_disk.setattr(presence, "write_bytes", Mock(side_effect=OSError(28, "No space left on device")))
        history.update(ended)
    history.update(ended)
    assert [listed["state"] for listed in json.loads(path.read_text())] == ["finished:completed"]


@pytest.mark.parametrize("broken", ["{", "[1]", '[{"state": "running"}]', "7"])
def test_a_malformed_or_unsafe_run_history_is_refused_in_one_line(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(broken)
    path.chmod(0o600)
    with pytest.raises(InputError, match=r"--state .*runs\.json: cannot be used .*; move it away"):
        RunHistory(path)
    path.write_text("[]")
    path.chmod(0o644)
    with pytest.raises(InputError, match="others can read it; chmod 600"):
        RunHistory(path)
    with pytest.raises(InputError, match="cannot be written there"):
        RunHistory(tmp_path / "nowhere" / "runs.json")


def test_a_lost_run_raises_its_own_error_and_rounds_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.0)
    recorder = Recorder()
    progress, reader = RunProgress(recorder, 0, 9), FolderReader(tmp_path)
    for rounds in ("4", "1", "6"):  # the second server begins again, from its journal
        (tmp_path / "progress").write_text(rounds)
        with pytest.raises(LostRunError):
            follow_run(superlink_of(LostRunError("started again")), 1, reader, lambda: None, progress)
    assert recorder.advances == [4, 2]


@pytest.mark.slow
def test_a_wait_for_the_superlink_includes_the_request_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a request that timed out after 30 s was reported as a wait of a few seconds."""
    monkeypatch.setattr(deployment, "_STATUS_SECONDS", 0.0)
    recorder, link = Recorder(), superlink_of([])

    def time_out(run: int) -> None:
        time.sleep(0.7)
        raise UnreachableError("timed out") if not recorder.lines else LostRunError("started again")

    link.control.run_status.side_effect = time_out
    with pytest.raises(LostRunError):
        follow_run(link, 1, FolderReader(tmp_path), lambda: None, RunProgress(recorder, 0, 9))
    (line,) = recorder.lines
    assert line.startswith("waiting for an answer of the SuperLink since ")
    assert line.endswith(" UTC (1 s)")


def test_the_ray_engine_without_the_flower_simulation_program_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: the executor could not start the simulation, and `fedpriv run --engine ray` waited for ever."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with (
        pytest.raises(RunError, match="flwr-simulation is missing: install fedpriv"),
        simulation_superlink(tmp_path),
    ):
        pass
