"""`fedpriv` as a person or a script uses it: a run, its files, stopping and going on, tables, help."""

import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pydantic_core import PydanticSerializationError

from fedpriv.cli import main, run
from fedpriv.cli.options import DisplayOptions
from fedpriv.show.table import render_tables
from fedpriv.study.results import read_results
from fedpriv.study.sweep import RunOptions
from tests.cli.command import SMALL, fedpriv, fedpriv_process, running
from tests.parts import in_parts

SCENARIO = f"""
title = "A small run"
{SMALL}delta = 1e-5
[run]
evaluations = 4
[sweep]
"privacy.rho" = [4.0, 8.0]
"algorithm.trust" = ["untrusted"]
seeds = 2
[paper]
rows = "privacy.rho"
columns = "algorithm.trust"
test_loss = [[2.3], [2.2]]
"""
COMMANDS = [
    *("run", "table", "plot", "report", "data fetch"),
    *(f"privacy {name}" for name in ("convert", "noise", "spent", "compare")),
]


def write_scenario(folder: Path) -> Path:
    path = folder / "small.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


def results_of(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The lines by cell and round, which engines write in any order."""
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda line: (line["cell"], line["round"]))


def timeless(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell without the one figure that differs from run to run."""
    return {key: value for key, value in cell.items() if key != "wall_seconds"}


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished run in `out` below the folder, and what the command said; read only."""
    folder = tmp_path_factory.mktemp("run")
    return folder, fedpriv("run", write_scenario(folder), "--out", "out", cwd=folder)


@pytest.fixture
def copied(finished: tuple[Path, Any], tmp_path: Path) -> Path:
    """A finished run in `out`, to be damaged."""
    subprocess.run(["cp", "-r", f"{finished[0]}/.", tmp_path], check=True)
    return tmp_path


def test_the_run_command_succeeds_and_prints_its_table(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = finished
    assert done.returncode == 0, done.stderr
    table = (folder / "out" / "table.md").read_text(encoding="utf-8")
    figures = re.findall(r"\d\.\d{4} ± \d\.\d{4}[^|]*?(?= *\|)", table)
    assert len(figures) == 2
    assert [figure for figure in figures if figure not in done.stdout] == []
    assert "**" not in done.stdout
    assert "|" not in done.stdout.replace("|difference|", "")
    assert "results: out" in done.stdout
    assert "[4/4, " in done.stderr
    assert "Traceback" not in done.stderr


def test_results_json_holds_plausible_values_in_every_field_of_a_cell(finished: tuple[Path, Any]) -> None:
    tree = results_of(finished[0] / "out")
    expected = {"complete": True, "engine": "vectorized", "seeds": [0, 1]}
    expected |= {"rerun": f"fedpriv run {finished[0] / 'small.toml'}"}
    assert {key: tree[key] for key in expected} == expected
    assert [(cell["point"]["privacy.rho"], cell["seed"]) for cell in tree["cells"]] == [
        (4.0, 0), (4.0, 1), (8.0, 0), (8.0, 1)
    ]  # fmt: skip
    for index, cell in enumerate(tree["cells"]):
        assert cell["cell"] == index
        assert 0.0 < cell["test_loss"] < 10.0
        assert 0.0 <= cell["test_accuracy"] <= 1.0
        assert 0.0 <= cell["fraction_clipped"] <= 1.0
        assert cell["wall_seconds"] > 0.0
        assert (cell["silos"], cell["rounds"], cell["engine"]) == (3, 8, "vectorized")
        assert cell["scenario"]["privacy"]["rho"] == cell["point"]["privacy.rho"]
        assert cell["scenario"]["seed"] == cell["seed"]
        assert (cell["trust"], cell["relation"], cell["noise"]) == ("untrusted", "replace-one", "simulation")
        model = np.load(finished[0] / "out" / cell["model"])
        assert model.shape == (7850,)
        assert 0.0 < np.linalg.norm(model) <= 0.05 + 1e-6  # the ball of diameter 0.1


def test_the_privacy_figures_of_a_cell_match_the_papers_formulas(finished: tuple[Path, Any]) -> None:
    """μ = 4 at δ = 1e-5: 24.38 exactly, 27.19 by the paper's μ²/2 + μ√(2 ln(1/δ))."""
    cell = results_of(finished[0] / "out")["cells"][0]
    paper = 8.0 + 4.0 * math.sqrt(2.0 * math.log(1e5))
    expected = {"mu": 4.0, "zcdp": 8.0, "epsilon_paper": paper}
    assert {key: cell[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert (cell["rho"], cell["delta"]) == (cell["mu"], 1e-5)
    assert (cell["epsilon"], cell["epsilon_paper"]) == pytest.approx((24.38, 27.19), abs=0.005)


def test_the_history_has_one_line_for_each_evaluated_round(finished: tuple[Path, Any]) -> None:
    tree, history = results_of(finished[0] / "out"), history_of(finished[0] / "out")
    evaluated = [(cell, t) for cell in range(4) for t in (2, 4, 6, 8)]
    assert [(line["cell"], line["round"]) for line in history] == evaluated
    for line in history:
        cell = tree["cells"][line["cell"]]
        assert (line["privacy.rho"], line["seed"]) == (cell["point"]["privacy.rho"], cell["seed"])
        if line["round"] == 8:
            assert (line["test_loss"], line["test_accuracy"]) == (cell["test_loss"], cell["test_accuracy"])


@pytest.mark.parametrize("style", ["markdown", "csv", "latex"])
def test_the_table_command_prints_what_the_library_renders(finished: tuple[Path, Any], style: Any) -> None:
    folder = finished[0]
    done = fedpriv("table", "out", "--format", style, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == render_tables(read_results(folder / "out"), style)
    if style == "markdown":
        assert done.stdout == (folder / "out" / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "fedpriv: out holds results already; give another --out, or --resume to resume there\n"),
        (["--resume", "--set", "federation.rounds=9"], "fedpriv: out holds another run: its cell 0 differs from"),
    ],
)
def test_a_run_into_a_folder_of_another_run_is_refused_and_changes_nothing(
    copied: Path, options: list[str], reason: str
) -> None:
    before = bytes_of(copied)
    done = fedpriv("run", "small.toml", "--out", "out", *options, cwd=copied)
    assert done.returncode == 2
    assert done.stderr.startswith(reason)
    assert done.stderr.count("\n") == 1
    assert bytes_of(copied) == before


def test_resuming_computes_whole_groups_with_missing_cells_to_the_same_figures(copied: Path) -> None:
    """Killed after two cells, in the middle of a history line: the same numbers in the end."""
    out = copied / "out"
    whole, history = results_of(out), history_of(out)
    kept = [whole["cells"][1], whole["cells"][2]]
    (out / "results.json").write_text(json.dumps({**whole, "complete": False, "cells": kept}))
    for place in (0, 3):
        (out / "models" / f"{place:04d}.npy").unlink()
    with (out / "history.jsonl").open("a") as file:
        file.write('{"cell": 3, "round": 2, "test_l')
    done = fedpriv("run", "small.toml", "--out", "out", "--resume", cwd=copied)
    assert done.returncode == 0, done.stderr
    again = results_of(out)
    assert again["complete"] is True
    assert "[4/4, " in done.stderr  # the four run together, so that all are run again: fewer might round otherwise
    assert list(map(timeless, again["cells"])) == list(map(timeless, whole["cells"]))
    assert history_of(out) == history
    assert all((out / cell["model"]).exists() for cell in again["cells"])


def test_resuming_a_finished_run_changes_no_figure(copied: Path) -> None:
    whole = results_of(copied / "out")
    done = fedpriv("run", "small.toml", "--out", "out", "--resume", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert results_of(copied / "out") == whole


def test_runs_without_an_out_option_get_numbered_folders(tmp_path: Path) -> None:
    write_scenario(tmp_path)
    one_cell = ("--set", "privacy.rho=4.0", "--set", "sweep.seeds=1", "--quiet")
    for _ in range(2):
        assert fedpriv("run", "small.toml", *one_cell, cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["small", "small-2"]


def test_the_quiet_option_prints_only_the_folder(tmp_path: Path) -> None:
    done = fedpriv("run", write_scenario(tmp_path), "--out", "out", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert all(line.startswith("note: ") for line in done.stderr.splitlines())
    assert results_of(tmp_path / "out")["complete"] is True
    assert (tmp_path / "out" / "table.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sent", in_parts([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM]))
def test_an_interrupted_run_is_marked_incomplete_and_resumes_by_the_printed_command(
    tmp_path: Path, sent: signal.Signals
) -> None:
    """Stopped as soon as its first cell is done, by Ctrl-C or by a scheduler."""
    write_scenario(tmp_path)
    arguments = ["run", "small.toml", "--engine", "inprocess", "--out", "out"]
    settings = ["--set", "federation.rounds=400", "--set", "sweep.seeds=3"]
    with running(tmp_path, *arguments, *settings) as process:
        deadline = time.monotonic() + 120.0
        while not (tmp_path / "out" / "results.json").exists() or not results_of(tmp_path / "out")["cells"]:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(sent)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "cells left; resume with\n" in said
    command = said.splitlines()[-1].strip()
    assert command == shlex.join(["fedpriv", *arguments[:4], *settings, "--resume", "--out", "out"])
    assert "Traceback" not in said
    stopped = results_of(tmp_path / "out")
    assert stopped["complete"] is False
    assert 1 <= len(stopped["cells"]) < 6
    assert not (tmp_path / "out" / "table.md").exists()
    table = fedpriv("table", "out", cwd=tmp_path)
    assert table.returncode == 0
    assert f"INCOMPLETE: {len(stopped['cells'])} of 6 cells" in table.stdout
    resumed = fedpriv(*shlex.split(command)[1:], "--quiet", cwd=tmp_path)  # as it was told
    assert resumed.returncode == 0, resumed.stderr
    whole = results_of(tmp_path / "out")
    assert whole["complete"] is True
    assert len(whole["cells"]) == 6
    assert all(cell in whole["cells"] for cell in stopped["cells"])
    history = [(line["cell"], line["round"]) for line in history_of(tmp_path / "out")]
    assert history == [(cell, t) for cell in range(6) for t in (100, 200, 300, 400)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, tmp_path: Path) -> None:
    done = fedpriv(*command.split(), "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    example = " ".join(done.stdout.partition("Example")[2].split())
    assert f"fedpriv {command} " in example


def test_the_help_page_lists_the_commands(tmp_path: Path) -> None:
    done = fedpriv("--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in ("run", "table", "plot", "report", "data", "privacy"):
        assert f" {name} " in done.stdout


def test_the_version_option_prints_the_program_name_and_succeeds(tmp_path: Path) -> None:
    done = fedpriv_process("--version", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("fedpriv ")


@pytest.mark.slow
def test_the_json_option_prints_only_json_lines_to_stdout(tmp_path: Path) -> None:
    done = fedpriv_process("run", write_scenario(tmp_path), "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert all(line.startswith("note: ") for line in done.stderr.splitlines())
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events].count("finished") == 4
    assert (events[0]["event"], events[-1]) == ("started", {"event": "complete", "folder": "out"})
    assert len([event for event in events if event["event"] == "evaluated"]) == 16


def test_the_report_command_writes_a_page_with_the_run_command(copied: Path) -> None:
    done = fedpriv("report", "out", cwd=copied)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out/report.html\n", "")
    page = (copied / "out" / "report.html").read_text(encoding="utf-8")
    assert results_of(copied / "out")["rerun"] in page
    assert "A small run" in page


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "inside of pydantic"])
def test_an_interrupt_ends_the_run_with_exit_code_130_even_inside_pydantic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrapped: bool
) -> None:
    def stopped(*_: object) -> Path:
        if not wrapped:
            raise KeyboardInterrupt
        raise PydanticSerializationError("Error calling function `str`") from KeyboardInterrupt()

    monkeypatch.setattr(run, "run_sweep", stopped)
    with pytest.raises(SystemExit) as ended:
        run.run_scenario(Path("quickstart"), RunOptions(out=tmp_path), DisplayOptions())
    assert ended.value.code == 130
    assert "stopped before the first cell" in capsys.readouterr().err


def test_an_interrupt_during_the_import_of_the_commands_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: Python's traceback, after Ctrl-C in the first seconds."""

    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "fedpriv.cli.app", Interrupted("fedpriv.cli.app"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "fedpriv: stopped\n"
