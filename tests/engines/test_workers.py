"""Cells on workers: the same results, whoever dies; and nothing left running."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from fedpriv.claims.outcome import CellOutcome, cell_digest
from fedpriv.core.errors import InputError, RunError
from fedpriv.engines import workers as engine
from fedpriv.engines.table import IndexedOutcome, find_engine_row, make_engine
from fedpriv.engines.vectorized.checkpoints import Checkpoints, checkpoint_name, installed_versions
from fedpriv.engines.workers import Event, RemoteCall, Workers, make_worker_engine, run_worker
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.cli.command import FEDPRIV, SMALL
from tests.engines.builders import Memory, Recorder, check_same_folder, refusal

SCENARIO = f"""
title = "Three groups of two cells"
{SMALL}[run]
evaluations = 4
[sweep]
"federation.silos" = [1, 2, 3]
seeds = 2
"""
OUTCOMES = [
    IndexedOutcome(index, CellOutcome({"test_loss": 1.0}, 0.0, 0.1, (), 1, np.zeros(2))) for index in (0, 1)
]


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


class TaskError(Exception):
    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


class DiedError(Exception):
    pass


class FakeRay:
    """Ray of one worker, which does at each attempt what `script` says: events, or an exception at the end."""

    exceptions = SimpleNamespace(RayTaskError=TaskError, RayError=DiedError)

    def __init__(self, script: list[list[Event | BaseException]]) -> None:
        self.script = script
        self.cancelled = 0
        self.checkpoints: list[Mapping[str, bytes]] = []

    def remote(self, _: object) -> "FakeRay":
        return self

    def options(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(remote=self._started)

    def _started(self, *arguments: Any) -> Iterator[Event | BaseException]:
        self.checkpoints.append(dict(arguments[-1]))
        return iter(self.script.pop(0))

    def wait(self, streams: list[object], **_: object) -> tuple[list[object], list[object]]:
        return streams[:1], streams[1:]

    def get(self, event: Event | BaseException) -> Event:
        if isinstance(event, BaseException):
            raise event
        return event

    def cancel(self, *_: object, **__: object) -> None:
        self.cancelled += 1


def run_group(
    script: list[list[Event | BaseException]], monkeypatch: pytest.MonkeyPatch, memory: Checkpoints | None = None
) -> tuple[list[IndexedOutcome], Recorder, FakeRay]:
    """What comes of two cells in one group."""
    ray, recorder = FakeRay([*script]), Recorder()
    monkeypatch.setattr(engine, "_connect_ray", lambda _: nullcontext(ray))
    cell: Any = SimpleNamespace(schedule=SimpleNamespace(rounds=2), batch_sizes=(1,), canonical_data=dict)
    monkeypatch.setattr(engine, "find_engine_row", lambda _: SimpleNamespace(group_cells=lambda _: [[1, 0]]))
    return (
        list(make_worker_engine("vectorized", Workers(1), memory or Checkpoints())([cell, cell], recorder)),
        recorder,
        ray,
    )


BEGAN, LOST = RemoteCall("began", ("here", 12, installed_versions())), DiedError("the node was taken away")


def test_a_group_of_a_dead_worker_runs_again_without_duplicate_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = [RemoteCall("evaluated", (0, t, {})) for t in (1, 2)]
    first = [BEGAN, RemoteCall("advanced", (3,)), evaluated[0], OUTCOMES[0], LOST]
    began, two_rounds = RemoteCall("began", ("there", 7, installed_versions())), RemoteCall("advanced", (2,))
    again = [began, two_rounds, evaluated[0], two_rounds, evaluated[1], *OUTCOMES]
    outcomes, recorder, ray = run_group([first, again], monkeypatch)
    assert [outcome.index for outcome in outcomes] == [1, 0]  # as the list of cells numbers them
    assert recorder.events == [(1, 1), ("worker 12 on here", [1, 0]), (1, 2)]
    assert recorder.rounds == 4
    assert ray.cancelled == 0


def test_the_last_checkpoint_of_a_dead_worker_is_passed_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cell: Any = SimpleNamespace(canonical_data=dict)
    name, memory = checkpoint_name([cell_digest(cell)] * 2), Memory()
    first = [BEGAN, *(RemoteCall("keep", (name, content)) for content in (b"early", b"late")), LOST]
    again = [BEGAN, RemoteCall("noted", ("a line",)), *OUTCOMES, RemoteCall("drop", (name,))]
    outcomes, recorder, ray = run_group([first, again], monkeypatch, memory)
    assert [outcome.index for outcome in outcomes] == [1, 0]
    assert ray.checkpoints == [{}, {name: b"late"}]
    assert memory.dropped == [name]
    assert "a line" in recorder.events


def test_a_group_that_killed_three_workers_fails_with_the_names_of_its_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with refusal("cells 1, 0: worker 12 on here died, 3 times in a row: killed: out of mem", RunError):
        run_group([[BEGAN, DiedError("killed: out of memory\nmore")]] * 3, monkeypatch)


def test_workers_that_die_before_they_begin_and_without_a_reason_are_not_called_by_an_earlier_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with refusal("cells 1, 0: a worker died, 3 times in a row: DiedError$", RunError):
        run_group([[BEGAN, LOST], [LOST], [DiedError()]], monkeypatch)


@pytest.mark.parametrize("reason", ["no cluster", ""])
def test_a_cluster_is_used_from_any_thread_and_one_that_cannot_be_reached_is_named(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Python sets handlers of signals in the main thread only."""

    def refuse(**_: object) -> None:
        raise ConnectionError(*([reason] if reason else []))

    ray, results = SimpleNamespace(__spec__=object(), init=lambda **_: None, shutdown=lambda: None), list[object]()
    monkeypatch.setitem(sys.modules, "ray", cast(Any, ray))

    def connect() -> None:
        with engine._connect_ray(Workers(None, "auto")) as module:
            results.append(module)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    assert results == [ray]
    ray.init = refuse
    with refusal(f"Ray at auto cannot be used: {reason or 'ConnectionError'}$", RunError):
        connect()


@pytest.mark.parametrize("package", ["torch", "scipy"])  # scipy calibrates the noise
def test_a_worker_with_other_versions_is_refused(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: what a worker computes is what this process would."""
    began = RemoteCall("began", ("there", 7, {**installed_versions(), package: "1.0"}))
    with refusal(rf"worker 7 on there has {package} 1\.0 where this machine has", RunError):
        run_group([[began, OUTCOMES[0]]], monkeypatch)


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (RunError("cell 3 is not finite"), RunError, "^cell 3 is not finite$"),
        (InputError("a key"), InputError, "^a key$"),
        (ZeroDivisionError("division"), RunError, "^worker 12 on here: ZeroDivisionError: division$"),
    ],
)
def test_an_error_on_a_worker_is_raised_locally_with_the_same_text(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], reason: str
) -> None:
    with refusal(reason, kind):
        run_group([[BEGAN, TaskError(error)]], monkeypatch)


def cells_of(scenario: Path) -> list[Cell]:
    return [point.cell for point in load_scenario(scenario).points]


@pytest.mark.parametrize("name", ["vectorized", "inprocess"])
def test_a_worker_reports_the_outcomes_of_the_local_engine(scenario: Path, name: str) -> None:
    """And each group alone computes the bits that it computes among the others."""
    cells, whole = cells_of(scenario), Recorder()
    row = find_engine_row(name)
    assert row.group_cells is not None
    expected = {outcome.index: outcome.cell_outcome for outcome in make_engine(name)(cells, whole)}
    advances = 0
    for group in row.group_cells(cells):
        began, *events = run_worker(name, [cells[place].canonical_data() for place in group], [])
        assert began == RemoteCall("began", (socket.gethostname(), os.getpid(), installed_versions()))
        for event in events:
            if isinstance(event, IndexedOutcome):
                ours, theirs = event.cell_outcome, expected.pop(group[event.index])
                assert np.array_equal(ours.model, theirs.model)
                assert (ours.metrics, ours.fraction_clipped) == (theirs.metrics, theirs.fraction_clipped)
            elif event.method == "advanced":
                advances += event.arguments[0]
    assert (expected, advances) == ({}, whole.rounds)


def test_a_worker_raises_the_errors_of_its_engine(scenario: Path) -> None:
    with pytest.raises(InputError, match="known engines"):
        list(run_worker("none", [cell.canonical_data() for cell in cells_of(scenario)], []))


@pytest.mark.parametrize(
    ("count", "address", "words"), [(0, None, "--workers 0"), (None, None, "give one"), (1, "auto", "give one")]
)
def test_workers_are_given_either_as_a_number_or_as_a_cluster_address(
    count: int | None, address: str | None, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        Workers(count, address)


@pytest.mark.parametrize("name", ["deployment", "ray"])
def test_engines_that_start_processes_themselves_refuse_workers(name: str) -> None:
    with pytest.raises(InputError, match=f"--engine {name}: it has processes of its own"):
        make_worker_engine(name, Workers(2))


def test_running_workers_as_root_requires_explicit_permission(
    monkeypatch: pytest.MonkeyPatch, scenario: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("FEDPRIV_ALLOW_ROOT")
    with pytest.raises(InputError, match="--workers 2 starts servers"):
        list(make_worker_engine("vectorized", Workers(2))(cells_of(scenario), Recorder()))


@pytest.mark.long
def test_two_workers_write_the_same_result_files_as_one_process(scenario: Path, tmp_path: Path) -> None:
    """But for the seconds it took; and a line in history.jsonl for each evaluation."""
    pytest.importorskip("ray", reason="needs pip install 'fedpriv[ray]'")
    loaded = load_scenario(scenario)
    one = run_sweep(loaded, RunOptions(out=tmp_path / "one"))
    two = run_sweep(loaded, RunOptions(out=tmp_path / "two", workers=Workers(2)))
    check_same_folder(two, one)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_ctrl_c_ends_every_process(scenario: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs pip install 'fedpriv[ray]'")
    command = [FEDPRIV, "run", scenario, "--workers", "1", "--json", "--out", tmp_path / "out"]
    command += ["--set", "federation.rounds=600", "--set", "run.evaluations=300"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for(name: str) -> Any:
        event: Any = None
        for line in running.stdout or ():
            event = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError((event, running.communicate()))

    wait_for("evaluated")
    ours = psutil.Process(running.pid).children(recursive=True)
    (worker,) = (process for process in ours if "ray::run_worker" in " ".join(process.cmdline()))
    worker.kill()
    lost = wait_for("lost")
    assert lost["worker"].startswith(f"worker {worker.pid} on ")
    wait_for("finished")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=120)
    assert running.returncode == 130
    deadline = time.monotonic() + 60.0
    while (left := [process for process in ours if process.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    loaded = load_scenario(scenario, ["federation.rounds=600", "run.evaluations=300"])
    whole = run_sweep(loaded, RunOptions(out=tmp_path / "out", resume=True))
    assert json.loads((whole / "results.json").read_text())["complete"]


def test_output_of_the_ray_listener_thread_is_suppressed() -> None:
    """Would stand between lines of JSON; it comes as an exception, too."""
    lines = io.StringIO()
    output: Any = engine.StreamWithoutRay(lines)
    print("ours", file=output)
    for name in ("ray_listen_error_messages", "another"):
        thread = threading.Thread(target=print, args=(name,), kwargs={"file": output}, name=name)
        thread.start()
        thread.join()
    assert lines.getvalue() == "ours\nanother\n"
