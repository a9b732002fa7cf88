"""Show a run while it goes: a live line for people, plain lines for logs, JSON lines for programs, and trackers.

The live line is of the cell that runs now: its place in the sweep, its ε, its loss, and its accuracy so far.
TensorBoard and MLflow need an extra each, which is not installed by default.
"""

import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from rich import progress as rich_progress
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.claims.outcome import Finished, RunObserver
from fedpriv.core.errors import InputError, RunError, printable_lines
from fedpriv.core.figures import epsilon_words
from fedpriv.plan.calibration import Fitted
from fedpriv.scenario.load import Point, Scenario
from fedpriv.scenario.published import dotted
from fedpriv.scenario.schema import Cell

_BARS = "▁▂▃▄▅▆▇█"
_WIDEST = 30


@dataclass
class Current:
    """The latest news of the cell at `place`."""

    place: int
    words: str
    privacy: str
    metric: str = ""
    latest: str = ""
    values: list[float] = field(default_factory=list)

    @staticmethod
    def of(place: int, point: Point) -> "Current":
        return Current(place, _words(point), privacy_words(point.cell))

    def heard(self, t: int, metrics: Mapping[str, float]) -> None:
        """Take an evaluation after round t: the sparkline is of the accuracy, of the loss where there is none."""
        self.metric = "test_accuracy" if "test_accuracy" in metrics else "test_loss"
        self.values.append(metrics[self.metric])
        accuracy = f", {100 * metrics['test_accuracy']:.1f} %" if "test_accuracy" in metrics else ""
        self.latest = f"round {t}: loss {metrics['test_loss']:.4f}{accuracy}"

    def line(self, width: int) -> Text:
        """One line of at most `width` characters; the sparkline goes first where there is no room."""
        text = f"{self.words} · {self.privacy} · {self.latest}"
        room = min(_WIDEST, width - len(text) - 2)
        drawn = Text(text, style="dim", no_wrap=True, overflow="ellipsis")
        return drawn.append(f" {sparkline(self.values, room)}", style="cyan") if room > 3 else drawn


def privacy_words(cell: Cell) -> str:
    """Write the ε that the cell's target gives at its δ."""
    target, delta = cell.privacy.target, cell.privacy.delta
    return "no noise" if target is None else epsilon_words(epsilon_of(target, delta), delta, 3)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last `width` values as bars between their least and their largest."""
    shown = values[-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)


class _RoundsPerSecond(rich_progress.ProgressColumn):
    def render(self, task: rich_progress.Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} rounds/s")


class Progress(RunObserver):
    """On a terminal a panel that moves, elsewhere a line a finished cell; on stderr, nothing if `quiet`."""

    def __init__(self, *, quiet: bool, console: Console | None = None) -> None:
        self._quiet = quiet
        self._console = console or Console(stderr=True, quiet=quiet)
        self._live = self._console.is_terminal and not quiet
        self._folder: Path | None = None
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.fields[cells]}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TextColumn("{task.percentage:>3.0f} %"),
            _RoundsPerSecond(),
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._current: Current | None = None
        self._panel = Live(get_renderable=self._drawn, console=self._console, refresh_per_second=8)

    def fitted(self, fit: Fitted) -> None:
        self._say(fit.line)

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        self._scenario, self._folder = scenario, folder
        self._cells, self._done = len(places), 0
        self._began = time.monotonic()
        rounds = sum(scenario.points[place].cell.schedule.rounds for place in places)
        self._task = self._bar.add_task("", total=rounds, cells=f"0/{self._cells} cells")
        if left := max((scenario.points[place].cell.unread for place in places), default=0):
            self._say(f"up to {left} of federation.samples are left out: they do not fill a round of every silo")
        if self._live:
            self._panel.start()

    def advanced(self, rounds: int) -> None:
        self._bar.advance(self._task, rounds)

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        if self._current is None or self._current.place != place:
            self._current = Current.of(place, self._scenario.points[place])
        self._current.heard(t, metrics)

    def finished(self, place: int, finished: Finished) -> None:
        unforeseen = finished.missed if finished.noise == "release" else {}  # a simulation's are in its scenario
        for silo, rounds in unforeseen.items():  # never silently, and not for --quiet either
            sys.stderr.write(
                f"fedpriv: silo {silo} did not answer in round {', '.join(map(str, rounds))}; it counted with "
                "nothing new\n"
            )
        self._done += 1
        self._bar.update(self._task, cells=f"{self._done}/{self._cells} cells")
        if not self._live:
            accuracy = finished.metrics.get("test_accuracy")
            self._say(
                f"[{self._done}/{self._cells}, {time.monotonic() - self._began:.0f} s] "
                f"{_words(self._scenario.points[place])}: loss {finished.test_loss:.4f}"
                + ("" if accuracy is None else f", accuracy {100 * accuracy:.1f} %")
            )

    def lost(self, worker: str, places: Sequence[int]) -> None:
        sys.stderr.write(f"fedpriv: {worker} died; {len(places)} cells are run again\n")

    def noted(self, line: str) -> None:
        sys.stderr.write(f"fedpriv: {printable_lines(line)}\n")

    def ended(self) -> None:
        if self._live:
            self._panel.stop()

    def _drawn(self) -> RenderableType:
        return self._bar if self._current is None else Group(self._bar, self._current.line(self._console.width))

    def stopped(self, rerun: str) -> None:
        """Say how to go on; `rerun` is the command that was given."""
        if self._folder is None:
            self._say("stopped before the first cell")
            return
        left, cells = self._cells - self._done, len(self._scenario.points)
        self._say(f"stopped, {left} of {cells} cells left; resume with\n    {_resume(rerun, self._folder)}")

    def _say(self, line: str) -> None:
        if not self._quiet:
            self._console.print(printable_lines(line), highlight=False, markup=False, soft_wrap=True)


class JsonLines(RunObserver):
    """One JSON object a line: started, evaluated, finished, and at the end complete or stopped."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._folder: Path | None = None

    def fitted(self, fit: Fitted) -> None:
        self._tell("fitted", {"noise": dict(fit.found), "vectors": fit.vectors, "seconds": fit.seconds})

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        self._scenario, self._folder, self._left = scenario, folder, len(places)
        rounds = sum(scenario.points[place].cell.schedule.rounds for place in places)
        self._tell("started", {"cells": len(places), "rounds": rounds, "folder": str(folder)})
        self._complete_if_nothing_is_left()

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self._tell("evaluated", {**self._where(place), "round": t, **metrics})

    def finished(self, place: int, finished: Finished) -> None:
        self._left -= 1
        self._tell("finished", {**self._where(place), **finished.metrics})
        self._complete_if_nothing_is_left()

    def lost(self, worker: str, places: Sequence[int]) -> None:
        self._tell("lost", {"worker": worker, "cells": list(places)})

    def noted(self, line: str) -> None:
        self._tell("noted", {"line": line})

    def stopped(self, rerun: str) -> None:
        """Say how to go on; `rerun` is the command that was given."""
        folder = self._folder
        self._tell("stopped", {"left": self._left, "resume": _resume(rerun, folder)} if folder else {})

    def _complete_if_nothing_is_left(self) -> None:
        if self._left == 0:
            self._tell("complete", {"folder": str(self._folder)})

    def _where(self, place: int) -> dict[str, Any]:
        point = self._scenario.points[place]
        return {"cell": place, "point": dict(point.swept), "seed": point.cell.seed}

    def _tell(self, event: str, facts: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps({"event": event, **facts}, ensure_ascii=False) + "\n")
        self._stream.flush()


class TensorBoard(RunObserver):
    """TensorBoard runs, one for each cell, in a folder of `directory` that is named after its swept values."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer = _required("torch.utils.tensorboard", "TensorBoard", "tensorboard").SummaryWriter
        self._writers: dict[int, Any] = {}

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        self._writers = {
            place: self._writer(self._directory / scenario.name / _label(scenario.points[place]))
            for place in places
        }

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writers[place].add_scalar(name.replace("_", "/", 1), value, t)

    def ended(self) -> None:
        for writer in self._writers.values():
            writer.close()


class MLflow(RunObserver):
    """MLflow runs, one for each cell, in an experiment that is named after the scenario, at a tracking URI.

    A refusal by MLflow is a RunError of one line; results are kept in any case.
    """

    def __init__(self, uri: str) -> None:
        module = _required("mlflow", "MLflow", "mlflow")
        self._uri, self._error = uri, module.exceptions.MlflowException
        self._runs: dict[int, str] = {}
        with self._one_line():
            self._client = module.MlflowClient(tracking_uri=uri)

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        with self._one_line():
            found = self._client.get_experiment_by_name(scenario.name)
            experiment = found.experiment_id if found else self._client.create_experiment(scenario.name)
            for place in places:
                point = scenario.points[place]
                run = self._client.create_run(experiment, run_name=_label(point)).info.run_id
                self._runs[place] = run
                for key, value in dotted(point.cell.canonical()):
                    self._client.log_param(run, key, value)

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        with self._one_line():
            for name, value in metrics.items():
                self._client.log_metric(self._runs[place], name, value, step=t)

    def finished(self, place: int, finished: Finished) -> None:
        with self._one_line():
            self._client.set_terminated(self._runs.pop(place))

    def ended(self) -> None:
        with self._one_line():
            for run in self._runs.values():
                self._client.set_terminated(run, "KILLED")

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise RunError(f"MLflow at {self._uri}: {str(error).splitlines()[0]}") from None


def _required(module: str, name: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise InputError(f"{name} is not installed; install it with: pip install 'fedpriv[{extra}]'") from None


def _label(point: Point) -> str:
    """ "rho=4.0,silos=10,seed=0": the cell as the name of a folder."""
    swept = [f"{key.rpartition('.')[2]}={value}" for key, value in point.swept.items()]
    return ",".join([*swept, f"seed={point.cell.seed}"]).replace("/", "-")


def _words(point: Point) -> str:
    values = [f"{key.rpartition('.')[2]} {value}" for key, value in point.swept.items()]
    return ", ".join([*values, f"seed {point.cell.seed}"])


def _resume(rerun: str, folder: Path) -> str:
    return f"{rerun} --resume --out {shlex.quote(str(folder))}"
