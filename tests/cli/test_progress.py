"""What a run shows while it goes: a live line on a terminal, lines elsewhere, JSON for programs."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedpriv.claims.outcome import CellOutcome, ObserverGroup, RunObserver
from fedpriv.cli.progress import CurrentCell, JsonLines, Progress, draw_sparkline
from fedpriv.cli.run import LivePage
from fedpriv.scenario.load import Scenario, parse_scenario
from fedpriv.study.sweep import RunOptions
from tests.conftest import small_tree


def scenario() -> Scenario:
    return parse_scenario({**small_tree(), "sweep": {"federation.silos": [1, 2], "seeds": 2}}, "test")


def outcome(loss: float = 2.25) -> CellOutcome:
    return CellOutcome({"test_loss": loss, "test_accuracy": 0.5}, None, 1.0, (), 0, np.zeros(2))


def two_cells(display: RunObserver) -> None:
    """A run of two cells, of which one finishes."""
    display.started(scenario(), [0, 3], Path("runs/small"))
    display.evaluated(3, 4, {"test_loss": 2.5, "test_accuracy": 0.25})
    display.advanced(8)
    display.finished(3, outcome())


def output_of(*events: Callable[[Progress], None], terminal: bool = False, quiet: bool = False) -> str:
    """What is shown of these events, on a terminal or elsewhere."""
    stream = io.StringIO()
    display = Progress(quiet=quiet, console=Console(file=stream, force_terminal=terminal, width=100, quiet=quiet))
    for event in events:
        event(display)
    return stream.getvalue()


def stopped(display: RunObserver) -> None:
    display.stopped("fedpriv run small.toml")


def test_the_terminal_progress_shows_finished_cells_loss_and_time_left() -> None:
    text = output_of(two_cells, Progress.ended, terminal=True)
    cell = "silos 2, seed 1", "ε = 24.4 at δ = 1e-05", "round 4: loss 2.5000, 25.0 %"
    for part in ("1/2 cells", "50 %", *cell, "left"):
        assert part in text
    assert "[1/2" not in text  # no line a cell: the panel says it


def test_a_sparkline_scales_the_latest_values_from_least_to_largest() -> None:
    assert draw_sparkline([9.0, 0.0, 0.5, 1.0], 3) == "▁▅█"
    assert draw_sparkline([2.0, 2.0], 9) == "▁▁"
    assert draw_sparkline([1.0], 0) == ""


@pytest.mark.parametrize("width", [30, 60, 120])
def test_the_progress_line_of_a_cell_fits_the_terminal_width(width: int) -> None:
    current = CurrentCell.from_point(0, scenario().points[0])
    for t in range(1, 60):
        current.add_evaluation(t, {"test_loss": 2.0, "test_accuracy": t / 60})
    console = Console(file=io.StringIO(), width=width)
    assert max(map(len, current.format_line(width).wrap(console, width))) <= width


def test_progress_outside_a_terminal_is_one_plain_line_for_each_cell() -> None:
    line = "[1/2, 0 s] silos 2, seed 1: loss 2.2500, accuracy 50.0 %\n"
    assert output_of(two_cells, Progress.ended) == line


def test_the_quiet_option_suppresses_all_progress_output() -> None:
    assert output_of(two_cells, Progress.ended, stopped, terminal=True, quiet=True) == ""


def test_stopping_a_run_prints_the_command_that_resumes_it() -> None:
    command = "fedpriv run small.toml --resume --out runs/small"
    assert output_of(two_cells, stopped).endswith(f"stopped, 1 of 4 cells left; resume with\n    {command}\n")


def test_stopping_before_the_first_cell_prints_one_line() -> None:
    assert output_of(stopped) == "stopped before the first cell\n"


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_progress_lines_report_every_event_with_its_sweep_point() -> None:
    stream = io.StringIO()
    display = JsonLines(stream)
    two_cells(display)
    display.finished(0, outcome(2.0))
    where = {"cell": 3, "point": {"federation.silos": 2}, "seed": 1}
    assert events(stream) == [
        {"event": "started", "cells": 2, "rounds": 16, "folder": "runs/small"},
        {"event": "evaluated", **where, "round": 4, "test_loss": 2.5, "test_accuracy": 0.25},
        {"event": "finished", **where, "test_loss": 2.25, "test_accuracy": 0.5},
        {"event": "finished", "cell": 0, "point": {"federation.silos": 1}, "seed": 0, "test_loss": 2.0,
         "test_accuracy": 0.5},
        {"event": "complete", "folder": "runs/small"},
    ]  # fmt: skip


def test_json_progress_of_a_stopped_run_ends_with_the_command_that_resumes_it() -> None:
    stream = io.StringIO()
    display = JsonLines(stream)
    two_cells(display)
    display.stopped("fedpriv run 'my file.toml'")
    resume = "fedpriv run 'my file.toml' --resume --out runs/small"
    assert events(stream)[-1] == {"event": "stopped", "left": 1, "resume": resume}


def test_a_live_page_that_is_opened_before_the_run_reloads_itself() -> None:
    """Was: the sentence stayed, since only the report's page asks for its version."""
    page, version = LivePage().page()
    assert b'<meta http-equiv="refresh"' in page
    assert (b"The run has not begun." in page, version) == (True, "")


def test_observers_receive_the_scenario_index_of_a_cell_and_not_the_engine_index() -> None:
    heard: list[tuple[int, int]] = []

    class Listener(RunObserver):
        def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
            heard.append((place, t))

    ObserverGroup([5, 9], [Listener()]).evaluated(1, 4, {"test_loss": 2.0, "test_accuracy": 0.5})
    assert heard == [(9, 4)]


@pytest.mark.parametrize(
    ("engine", "overrides", "words"),
    [
        ("vectorized", [], "fedpriv run a.toml"),
        ("ray", ["name=my run"], "fedpriv run a.toml --engine ray --set 'name=my run'"),
    ],
)
def test_the_recorded_run_command_is_quoted_for_a_shell(engine: str, overrides: list[str], words: str) -> None:
    assert RunOptions(engine, overrides=overrides).format_command("a.toml") == words
