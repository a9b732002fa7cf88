"""Observers that display a run: for people, log files and programs.

`Progress` shows a live panel on a terminal, and plain lines elsewhere.  The panel has a progress bar, and a line
on the cell that was evaluated last, with a sparkline (a row of bars) if it fits.  `JsonLines` writes JSON lines.

A cell is one run of a scenario: a value of each swept key, and a seed.  A place is a cell's index.
"""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich import progress as rich_progress
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.core.errors import sanitize_lines
from fedpriv.core.figures import format_count, format_epsilon_delta
from fedpriv.plan.calibration import FittedNoise
from fedpriv.scenario.load import Scenario, SweepPoint
from fedpriv.scenario.schema import Cell

_SPARKLINE_BARS = "▁▂▃▄▅▆▇█"
_MAX_SPARKLINE_WIDTH = 30


@dataclass
class CurrentCell:
    """Evaluations of the cell that a live line shows."""

    index: int
    """Number of the cell."""
    label: str
    """Swept values and seed of the cell."""
    privacy: str
    """ε that the cell's target gives at its δ, or "no noise"."""
    metric_name: str = ""
    """Name of the metric in `values`, or "" before the first evaluation."""
    latest: str = ""
    """Text of the latest evaluation, or "" before the first."""
    values: list[float] = field(default_factory=list)
    """Metric of each evaluation since the line shows this cell."""

    @staticmethod
    def from_point(index: int, point: SweepPoint) -> "CurrentCell":
        return CurrentCell(index, _describe_point(point), format_privacy(point.cell))

    def add_evaluation(self, t: int, metrics: Mapping[str, float]) -> None:
        """Add an evaluation after round t.

        The sparkline shows the accuracy, or the loss without one.
        """
        self.metric_name = "test_accuracy" if "test_accuracy" in metrics else "test_loss"
        self.values.append(metrics[self.metric_name])
        accuracy = f", {100 * metrics['test_accuracy']:.1f} %" if "test_accuracy" in metrics else ""
        self.latest = f"round {t}: loss {metrics['test_loss']:.4f}{accuracy}"

    def format_line(self, width: int) -> Text:
        """Format one line, with a sparkline if `width` characters have room for four bars or more."""
        text = f"{self.label} · {self.privacy} · {self.latest}"
        sparkline_width = min(_MAX_SPARKLINE_WIDTH, width - len(text) - 2)
        line = Text(text, style="dim", no_wrap=True, overflow="ellipsis")
        return (
            line.append(f" {draw_sparkline(self.values, sparkline_width)}", style="cyan")
            if sparkline_width > 3
            else line
        )


def format_privacy(cell: Cell) -> str:
    """Format the ε that the cell's target gives at its δ, or "no noise" without a target."""
    target, delta = cell.privacy.target_mu, cell.privacy.delta
    return "no noise" if target is None else format_epsilon_delta(epsilon_of(target, delta), delta, 3)


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last `width` values as bars of eight heights, from the least to the largest of them.

    Equal values are the lowest bars.

    Args:
        values: Finite numbers.
        width: Largest number of bars.  The result is "" for 0 or less.
    """
    recent_values = values[-width:] if width > 0 else []
    if not recent_values:
        return ""
    low, high = min(recent_values), max(recent_values)
    span = (high - low) or 1.0
    return "".join(
        _SPARKLINE_BARS[round((value - low) / span * (len(_SPARKLINE_BARS) - 1))] for value in recent_values
    )


class _RoundsPerSecond(rich_progress.ProgressColumn):
    def render(self, task: rich_progress.Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} rounds/s")


class Progress(RunObserver):
    """Progress on a console: a live panel on a terminal, otherwise a line for each finished cell.

    With `quiet`, only absent silos, lost workers and other notices are shown, on stderr.
    """

    def __init__(self, *, quiet: bool, console: Console | None = None) -> None:
        """Prepare the progress bar and its panel, which `started` shows.

        Args:
            quiet: Whether to show no progress.
            console: Console of the panel, or None for stderr.
        """
        self._quiet = quiet
        self._console = console or Console(stderr=True, quiet=quiet)
        self._is_live = self._console.is_terminal and not quiet
        self._folder: Path | None = None
        self._progress_bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.fields[cells]}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TextColumn("{task.percentage:>3.0f} %"),
            _RoundsPerSecond(),
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._current: CurrentCell | None = None
        self._panel = Live(get_renderable=self._render, console=self._console, refresh_per_second=8)

    def fitted(self, fit: FittedNoise) -> None:
        self._print(fit.summary)

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        """Begin to count cells and rounds, and show the panel on a terminal.

        If the rounds of a cell leave some samples unread, the largest such number is printed, unless quiet.

        Args:
            scenario: Scenario of the run.
            places: Numbers of the cells that are about to be run.
            folder: Folder of the results.
        """
        self._scenario, self._folder = scenario, folder
        self._cell_count, self._finished_count = len(places), 0
        self._start_time = time.monotonic()
        rounds = sum(scenario.points[place].cell.schedule.rounds for place in places)
        self._task = self._progress_bar.add_task("", total=rounds, cells=f"0/{self._cell_count} cells")
        if unread_count := max((scenario.points[place].cell.unread_count for place in places), default=0):
            self._print(
                f"up to {unread_count} of federation.samples are never read, because no batch of a silo has them"
            )
        if self._is_live:
            self._panel.start()

    def advanced(self, rounds: int) -> None:
        self._progress_bar.advance(self._task, rounds)

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        if self._current is None or self._current.index != place:
            self._current = CurrentCell.from_point(place, self._scenario.points[place])
        self._current.add_evaluation(t, metrics)

    def finished(self, place: int, finished: CellOutcome) -> None:
        """Count a finished cell, and print a line on it if there is no panel and the display is not quiet.

        Rounds that silos missed in a deployment are reported on stderr, even if quiet.

        Args:
            place: Number of the cell.
            finished: Outcome of the cell, with the rounds that each silo missed.
        """
        # Absences of a simulation follow from its scenario.
        missed_rounds = finished.missed if finished.noise == "release" else {}
        for silo, rounds in missed_rounds.items():
            sys.stderr.write(
                f"fedpriv: silo {silo} did not answer in round {', '.join(map(str, rounds))}; its increment "
                "counted as 0 there\n"
            )
        self._finished_count += 1
        self._progress_bar.update(self._task, cells=f"{self._finished_count}/{self._cell_count} cells")
        if not self._is_live:
            accuracy = finished.metrics.get("test_accuracy")
            self._print(
                f"[{self._finished_count}/{self._cell_count}, {time.monotonic() - self._start_time:.0f} s] "
                f"{_describe_point(self._scenario.points[place])}: loss {finished.test_loss:.4f}"
                + ("" if accuracy is None else f", accuracy {100 * accuracy:.1f} %")
            )

    def lost(self, worker: str, places: Sequence[int]) -> None:
        sys.stderr.write(
            f"fedpriv: {worker} died; the run continues its {format_count(len(places), 'cell')}, or ends\n"
        )

    def notified(self, line: str) -> None:
        sys.stderr.write(f"fedpriv: {sanitize_lines(line)}\n")

    def ended(self) -> None:
        if self._is_live:
            self._panel.stop()

    def _render(self) -> RenderableType:
        return (
            self._progress_bar
            if self._current is None
            else Group(self._progress_bar, self._current.format_line(self._console.width))
        )

    def stopped(self, rerun: str) -> None:
        """Print how to resume the run of command `rerun`, or that no cell was begun, or nothing if quiet."""
        if self._folder is None:
            self._print("stopped before the first cell")
            return
        left_count, cells = self._cell_count - self._finished_count, len(self._scenario.points)
        self._print(
            f"stopped, {left_count} of {cells} cells left; resume with\n    {_resume_command(rerun, self._folder)}"
        )

    def _print(self, line: str) -> None:
        if not self._quiet:
            self._console.print(sanitize_lines(line), highlight=False, markup=False, soft_wrap=True)


class JsonLines(RunObserver):
    """JSON objects of a run's events, one a line.

    The key `event` is "fitted", "started", "evaluated", "finished", "lost", "noted", "complete" when no cell is
    left, or "stopped" after an interrupt or after a failure from which single cells can be resumed.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._folder: Path | None = None

    def fitted(self, fit: FittedNoise) -> None:
        self._write_event("fitted", {"noise": dict(fit.found), "vectors": fit.vectors, "seconds": fit.seconds})

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        self._scenario, self._folder, self._remaining_count = scenario, folder, len(places)
        rounds = sum(scenario.points[place].cell.schedule.rounds for place in places)
        self._write_event("started", {"cells": len(places), "rounds": rounds, "folder": str(folder)})
        self._write_if_complete()

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self._write_event("evaluated", {**self._cell_fields(place), "round": t, **metrics})

    def finished(self, place: int, finished: CellOutcome) -> None:
        self._remaining_count -= 1
        self._write_event("finished", {**self._cell_fields(place), **finished.metrics})
        self._write_if_complete()

    def lost(self, worker: str, places: Sequence[int]) -> None:
        self._write_event("lost", {"worker": worker, "cells": list(places)})

    def notified(self, line: str) -> None:
        self._write_event("noted", {"line": line})

    def stopped(self, rerun: str) -> None:
        """Report how to resume the stopped run, whose command was `rerun`."""
        folder = self._folder
        self._write_event(
            "stopped", {"left": self._remaining_count, "resume": _resume_command(rerun, folder)} if folder else {}
        )

    def _write_if_complete(self) -> None:
        if self._remaining_count == 0:
            self._write_event("complete", {"folder": str(self._folder)})

    def _cell_fields(self, place: int) -> dict[str, Any]:
        point = self._scenario.points[place]
        return {"cell": place, "point": dict(point.swept_values), "seed": point.cell.seed}

    def _write_event(self, event: str, facts: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps({"event": event, **facts}, ensure_ascii=False) + "\n")
        self._stream.flush()


def _describe_point(point: SweepPoint) -> str:
    values = [f"{key.rpartition('.')[2]} {value}" for key, value in point.swept_values.items()]
    return ", ".join([*values, f"seed {point.cell.seed}"])


def _resume_command(rerun: str, folder: Path) -> str:
    return f"{rerun} --resume --out {shlex.quote(str(folder))}"
