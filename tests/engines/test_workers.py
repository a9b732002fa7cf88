"""Cells on workers: the same results, whoever dies; and nothing left running."""

import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from fedpriv.claims.outcome import CellOutcome, RunObserver, cell_digest
from fedpriv.core.errors import InputError, RunError
from fedpriv.engines import workers as engine
from fedpriv.engines.table import IndexedOutcome, find_engine_row, make_engine
from fedpriv.engines.vectorized.checkpoints import Checkpoints, checkpoint_name, installed_versions
from fedpriv.engines.workers import Event, RemoteCall, Workers, make_worker_engine, run_worker
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.cli.command import FEDPRIV, SMALL

SCENARIO = f"""
title = "Three groups of two cells"
{SMALL}[run]
evaluations = 4
[sweep]
"federation.silos" = [1, 2, 3]
seeds = 2
"""
FINISHED = CellOutcome({"test_loss": 1.0}, 0.0, 0.1, (), 1, np.zeros(2))


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


class Recorder(RunObserver):
    def __init__(self) -> None:
        self.rounds = 0
        self.heard: list[Any] = []

    def advanced(self, rounds: int) -> None:
        self.rounds += rounds

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self.heard.append((place, t))

    def notified(self, line: str) -> None:
        self.heard.append(line)

    def lost(self, worker: str, places: Sequence[int]) -> None:
        self.heard.append((worker, list(places)))


class TaskError(Exception):
    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


class DiedError(Exception):
    pass


class FakeRay:
    """Ray of one worker, which does what `script` says at each attempt: events, or an exception at the end."""

    exceptions = SimpleNamespace(RayTaskError=TaskError, RayError=DiedError)

    def __init__(self, script: list[list[Event | BaseException]]) -> None:
        self.script = script
        self.cancelled = 0
        self.before: list[Mapping[str, bytes]] = []

    def remote(self, _: object) -> "FakeRay":
        return self

    def options(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(remote=self._started)

    def _started(
        self, _: str, __: object, ___: object, before: Mapping[str, bytes]
    ) -> Iterator[Event | BaseException]:
        self.before.append(dict(before))
        return iter(self.script.pop(0))

    def wait(self, streams: list[object], **_: object) -> tuple[list[object], list[object]]:
        return streams[:1], streams[1:]

    def get(self, event: Event | BaseException) -> Event:
        if isinstance(event, BaseException):
            raise event
        return event

    def cancel(self, *_: object, **__: object) -> None:
        self.cancelled += 1


def heard_of(
    script: list[list[Event | BaseException]],
    monkeypatch: pytest.MonkeyPatch,
    kept: Checkpoints | None = None,
) -> tuple[list[IndexedOutcome], Recorder, FakeRay]:
    """What comes of two cells in one group."""
    ray, recorder = FakeRay(script), Recorder()

    @contextmanager
    def connected(_: Workers) -> Iterator[FakeRay]:
        yield ray

    monkeypatch.setattr(engine, "_connect_ray", connected)
    cell: Any = SimpleNamespace(schedule=SimpleNamespace(rounds=2), batch_sizes=(1,), canonical_data=dict)
    monkeypatch.setattr(engine, "find_engine_row", lambda _: SimpleNamespace(group_cells=lambda _: [[1, 0]]))
    run = make_worker_engine("vectorized", Workers(1), kept or Checkpoints())([cell, cell], recorder)
    try:
        return list(run), recorder, ray
    finally:
        ray.script.append([])  # so that a failure can be looked at


BEGAN = RemoteCall("began", ("here", 12, installed_versions()))


def test_a_group_whose_worker_died_is_run_again_and_nothing_is_told_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = [
        BEGAN,
        RemoteCall("advanced", (3,)),
        RemoteCall("evaluated", (0, 1, {})),
        IndexedOutcome(0, FINISHED),
        DiedError("the node was taken away"),
    ]
    again = [
        RemoteCall("began", ("there", 7, installed_versions())),
        *(
            RemoteCall("advanced", (2,)),
            RemoteCall("evaluated", (0, 1, {})),
            RemoteCall("advanced", (2,)),
            RemoteCall("evaluated", (0, 2, {})),
        ),
        *(IndexedOutcome(0, FINISHED), IndexedOutcome(1, FINISHED)),
    ]
    outcomes, recorder, ray = heard_of([first, again], monkeypatch)
    assert [outcome.index for outcome in outcomes] == [1, 0]  # as the list of cells numbers them
    assert recorder.heard == [(1, 1), ("worker 12 on here", [1, 0]), (1, 2)]
    assert recorder.rounds == 4
    assert ray.cancelled == 0


def test_what_a_worker_kept_is_given_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory(Checkpoints):
        def __init__(self) -> None:
            self.kept: dict[str, bytes] = {}
            self.dropped: list[str] = []

        def latest(self, name: str) -> bytes | None:
            return self.kept.get(name)

        def keep(self, name: str, content: bytes) -> None:
            self.kept[name] = content

        def drop(self, name: str) -> None:
            self.dropped.append(name)

    cell: Any = SimpleNamespace(canonical_data=dict)
    name, memory = checkpoint_name([cell_digest(cell)] * 2), Memory()
    first = [
        BEGAN,
        RemoteCall("keep", (name, b"early")),
        RemoteCall("keep", (name, b"late")),
        DiedError("the node was taken away"),
    ]
    again = [
        BEGAN,
        RemoteCall("noted", ("a line",)),
        IndexedOutcome(0, FINISHED),
        IndexedOutcome(1, FINISHED),
        RemoteCall("drop", (name,)),
    ]
    outcomes, recorder, ray = heard_of([first, again], monkeypatch, memory)
    assert [outcome.index for outcome in outcomes] == [1, 0]
    assert ray.before == [{}, {name: b"late"}]
    assert memory.dropped == [name]
    assert "a line" in recorder.heard


def test_a_group_that_kills_its_workers_is_named_after_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    script: list[list[Event | BaseException]] = [[BEGAN, DiedError("killed: out of memory\nmore")]] * 3
    with pytest.raises(RunError, match="cells 1, 0: worker 12 on here died, 3 times in a row: killed: out of mem"):
        heard_of(list(script), monkeypatch)


def test_a_worker_with_other_versions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: what a worker computes is what this process would."""
    began = RemoteCall("began", ("there", 7, {**installed_versions(), "torch": "1.0"}))
    with pytest.raises(RunError, match=r"worker 7 on there has torch 1\.0 where this machine has"):
        heard_of([[began, IndexedOutcome(0, FINISHED)]], monkeypatch)


@pytest.mark.parametrize("error", [RunError("cell 3 is not finite"), InputError("a key")])
def test_what_an_engine_refuses_on_a_worker_is_refused_here_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with pytest.raises(type(error), match=f"^{error}$"):
        heard_of([[BEGAN, TaskError(error)]], monkeypatch)


def test_a_bug_on_a_worker_is_one_line_with_the_workers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"^worker 12 on here: ZeroDivisionError: division$"):
        heard_of([[BEGAN, TaskError(ZeroDivisionError("division"))]], monkeypatch)


def cells_of(scenario: Path) -> list[Cell]:
    return [point.cell for point in load_scenario(scenario).points]


@pytest.mark.parametrize("name", ["vectorized", "inprocess"])
def test_a_worker_says_what_its_engine_says(scenario: Path, name: str) -> None:
    """And each group alone computes the bits that it computes among the others."""
    cells, whole = cells_of(scenario), Recorder()
    row = find_engine_row(name)
    assert row.group_cells is not None
    expected = {outcome.index: outcome.cell_outcome for outcome in make_engine(name)(cells, whole)}
    told = 0
    for group in row.group_cells(cells):
        began, *events = run_worker(name, [cells[place].canonical_data() for place in group], [])
        assert began == RemoteCall("began", (socket.gethostname(), os.getpid(), installed_versions()))
        told += sum(
            event.arguments[0] for event in events if isinstance(event, RemoteCall) and event.method == "advanced"
        )
        for outcome in (event for event in events if isinstance(event, IndexedOutcome)):
            same = expected.pop(group[outcome.index])
            assert np.array_equal(outcome.cell_outcome.model, same.model)
            assert outcome.cell_outcome.metrics == same.metrics
            assert outcome.cell_outcome.fraction_clipped == same.fraction_clipped
    assert (expected, told) == ({}, whole.rounds)


def test_an_error_of_the_engine_is_raised_by_the_worker(scenario: Path) -> None:
    with pytest.raises(InputError, match="known engines"):
        list(run_worker("none", [cell.canonical_data() for cell in cells_of(scenario)], []))


@pytest.mark.parametrize(
    ("count", "address", "words"), [(0, None, "--workers 0"), (None, None, "give one"), (1, "auto", "give one")]
)
def test_workers_are_a_number_or_a_cluster(count: int | None, address: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Workers(count, address)


@pytest.mark.parametrize("name", ["deployment", "ray"])
def test_engines_with_processes_of_their_own_take_no_workers(name: str) -> None:
    with pytest.raises(InputError, match=f"--engine {name}: it has processes of its own"):
        make_worker_engine(name, Workers(2))


def test_root_needs_leave(monkeypatch: pytest.MonkeyPatch, scenario: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("FEDPRIV_ALLOW_ROOT")
    with pytest.raises(InputError, match="--workers 2 starts servers"):
        list(make_worker_engine("vectorized", Workers(2))(cells_of(scenario), Recorder()))


def without_times(folder: Path) -> Any:
    results = json.loads((folder / "results.json").read_text())
    for cell in results["cells"]:
        assert cell.pop("wall_seconds") > 0.0
    return json.dumps(results)


@pytest.mark.long
def test_two_workers_leave_the_results_of_one_process_byte_for_byte(scenario: Path, tmp_path: Path) -> None:
    """But for the seconds it took; and a line in history.jsonl for each evaluation."""
    pytest.importorskip("ray", reason="needs pip install 'fedpriv[ray]'")
    loaded = load_scenario(scenario)
    one = run_sweep(loaded, RunOptions(out=tmp_path / "one"))
    two = run_sweep(loaded, RunOptions(out=tmp_path / "two", workers=Workers(2)))
    assert without_times(two) == without_times(one)
    lines = [sorted((folder / "history.jsonl").read_text().splitlines()) for folder in (one, two)]
    assert lines[0] == lines[1]
    for model in (one / "models").iterdir():
        assert (two / "models" / model.name).read_bytes() == model.read_bytes()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_and_its_cells_run_again_and_ctrl_c_leaves_nothing(
    scenario: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="needs pip install 'fedpriv[ray]'")
    command = [FEDPRIV, "run", scenario, "--workers", "1", "--json", "--out", tmp_path / "out"]
    command += ["--set", "federation.rounds=600", "--set", "run.evaluations=300"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stderr is not None
    heard: list[Any] = []

    def until(event: str) -> Any:
        for line in running.stdout or ():
            heard.append(json.loads(line))
            if heard[-1]["event"] == event:
                return heard[-1]
        raise AssertionError((heard[-3:], running.communicate()))

    until("evaluated")
    ours = psutil.Process(running.pid).children(recursive=True)
    (worker,) = (process for process in ours if "ray::run_worker" in " ".join(process.cmdline()))
    worker.kill()
    lost = until("lost")
    assert lost["worker"].startswith(f"worker {worker.pid} on ")
    until("finished")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=120)
    assert running.returncode == 130
    deadline = time.monotonic() + 60.0
    while (left := [process for process in ours if process.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    whole = run_sweep(
        load_scenario(scenario, ["federation.rounds=600", "run.evaluations=300"]),
        RunOptions(out=tmp_path / "out", resume=True),
    )
    assert json.loads((whole / "results.json").read_text())["complete"]


def test_what_rays_own_thread_prints_is_no_line_of_ours() -> None:
    """Would stand between lines of JSON; it comes as an exception, too."""
    lines = io.StringIO()
    output: Any = engine.StreamWithoutRay(lines)
    print("ours", file=output)
    for name in ("ray_listen_error_messages", "another"):
        thread = threading.Thread(target=print, args=(name,), kwargs={"file": output}, name=name)
        thread.start()
        thread.join()
    assert lines.getvalue() == "ours\nanother\n"
