"""Cells, plans, runs and refusals, as the tests of engines need them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedpriv.accounting.guarantees import Guarantee
from fedpriv.addons.services.flower_private.control import RunStatus
from fedpriv.claims.claim import PrivacyClaim, compute_claim
from fedpriv.claims.ledger import ReleaseStream, make_release_streams, stream_from_data, stream_to_data
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.core.errors import InputError
from fedpriv.engines.table import IndexedOutcome, make_engine
from fedpriv.engines.vectorized.checkpoints import Checkpoints
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.conftest import small_tree

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("vectorized", "inprocess")
"""Engines that need no other process."""
QUIET: dict[str, Any] = {"relation": "zero-out", "mode": "none"}
"""Privacy section of a run without noise."""


class Recorder(RunObserver):
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.advances: list[int] = []
        self.evaluations: list[tuple[int, int, float, float]] = []
        self.events: list[Any] = []
        """Evaluations, lines and lost workers, in order."""

    @property
    def rounds(self) -> int:
        return sum(self.advances)

    @property
    def lines(self) -> list[str]:
        return [event for event in self.events if isinstance(event, str)]

    def advanced(self, rounds: int) -> None:
        self.advances.append(rounds)

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((place, t, *metrics.values()))
        self.events.append((place, t))

    def notified(self, line: str) -> None:
        self.events.append(line)

    def lost(self, worker: str, places: Sequence[int]) -> None:
        self.events.append((worker, list(places)))


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def superlink_of(statuses: Iterable[RunStatus | Exception] | Exception) -> Any:
    """A SuperLink that answers each question for a run's status with the next one."""
    answers = {"control.run_status.side_effect": statuses, "log_tail.return_value": ""}
    return Mock(has_ended=False, **answers)


class Memory(Checkpoints):
    """Keeps checkpoints in memory; the `stop`-th one is written, and then somebody presses Ctrl-C."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.count = stop, 0
        self.contents: dict[str, bytes] = {}
        self.dropped: list[str] = []

    def latest(self, name: str) -> bytes | None:
        return self.contents.get(name)

    def keep(self, name: str, content: bytes) -> None:
        self.contents[name] = content
        self.count += 1
        if self.count == self.stop:
            raise KeyboardInterrupt

    def drop(self, name: str) -> None:
        self.contents.pop(name, None)
        self.dropped.append(name)


def small_cell(**changes: Any) -> Cell:
    """A small cell; `federation__silos=5` changes a key, also of a section given before it, None removes it."""
    return resolve_cell(small_tree(**deepcopy(changes)), "test")


def plan_cell(cell: Cell) -> Plan:
    return make_plan(cell, load_task(cell).objective)


def streams_of(cell: Cell, rounds: int | None = None) -> list[ReleaseStream]:
    """Streams of a whole run, or of one that stops after these rounds."""
    return make_release_streams(plan_cell(cell), rounds or cell.schedule.rounds)


def claim_of(streams: Iterable[ReleaseStream]) -> PrivacyClaim[Guarantee]:
    claim = compute_claim(list(streams))
    assert claim is not None
    return claim


def store_and_load(streams: Iterable[ReleaseStream]) -> tuple[ReleaseStream, ...]:
    return tuple(stream_from_data(json.loads(json.dumps(stream_to_data(stream)))) for stream in streams)


def run(engine: str, *cells: Cell) -> tuple[list[IndexedOutcome], Recorder]:
    recorder = Recorder()
    outcomes = list(make_engine(engine)(list(cells), recorder))
    return sorted(outcomes, key=lambda outcome: outcome.index), recorder


def run_cell(engine: str, cell: Cell) -> CellOutcome:
    (outcome,), _ = run(engine, cell)
    return outcome.cell_outcome


def check_agreement(
    ours: CellOutcome,
    theirs: CellOutcome,
    rtol: float = 1e-9,
    atol: float = 1e-12,
    share: float = 0.0,
    is_split_by_cells: bool = False,
) -> None:
    """Models differ by `share` of their norm at most, if it is given; what is released and counted is the same.

    In-process silos divide the clipped records by all rows that are read, also by those that a table's cells put
    aside for testing.
    """
    atol = share * float(np.linalg.norm(ours.model)) or atol
    np.testing.assert_allclose(ours.model, theirs.model, rtol=rtol, atol=atol)
    assert dict(ours.metrics) == pytest.approx(dict(theirs.metrics), rel=max(1e-6, share))
    assert ours.releases == theirs.releases
    assert ours.gradient_evaluations == theirs.gradient_evaluations > 0
    if not is_split_by_cells:
        assert ours.fraction_clipped == pytest.approx(theirs.fraction_clipped, abs=1e-12)
    assert dict(ours.missed) == {silo: tuple(rounds) for silo, rounds in theirs.missed.items()}


def run_on_both(cell: Cell, **tolerance: Any) -> tuple[CellOutcome, Recorder]:
    """Outcome of the vectorized engine and what it tells; the in-process engine agrees."""
    (vectorized,), recorder = run("vectorized", cell)
    (inprocess,), other = run("inprocess", cell)
    check_agreement(vectorized.cell_outcome, inprocess.cell_outcome, **tolerance)
    assert recorder.rounds == other.rounds
    np.testing.assert_allclose(recorder.evaluations, other.evaluations, rtol=tolerance.get("share", 1e-9))
    return vectorized.cell_outcome, recorder


def run_together(cells: Sequence[Cell], engine: str = "inprocess", **tolerance: Any) -> list[CellOutcome]:
    """Outcomes of the vectorized engine for all cells together; `engine` agrees about each cell alone."""
    together, _ = run("vectorized", *cells)
    assert [outcome.index for outcome in together] == list(range(len(cells)))
    outcomes = [outcome.cell_outcome for outcome in together]
    for cell, outcome in zip(cells, outcomes, strict=True):
        check_agreement(outcome, run_cell(engine, cell), **tolerance)
    return outcomes


def run_python(*words: str, folder: Path = ROOT, **environment: str) -> str:
    """What a Python process with the sources on its path prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, env=environment)
    return done.stdout


@contextmanager
def refusal(reason: str, kind: type[Exception] = InputError) -> Iterator[None]:
    """Expects an error of one line that matches `reason`."""
    with pytest.raises(kind, match=reason) as caught:
        yield
    assert "\n" not in str(caught.value)


def results_without_times(folder: Path) -> str:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    del results["date"]
    for cell in results["cells"]:
        assert cell.pop("wall_seconds") > 0.0
    return json.dumps(results)


def check_same_folder(ours: Path, theirs: Path) -> None:
    """Results but for times, evaluations in any order, and models are the same, byte for byte."""
    assert results_without_times(ours) == results_without_times(theirs)
    lines = [sorted((folder / "history.jsonl").read_text().splitlines()) for folder in (ours, theirs)]
    assert lines[0] == lines[1]
    for model in (theirs / "models").iterdir():
        assert (ours / "models" / model.name).read_bytes() == model.read_bytes()
