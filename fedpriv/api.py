"""Running and reading from Python: `fedpriv.run`, `fedpriv.load`, and what they return."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.reports.page import write_report
from fedpriv.reports.plots import plot_run
from fedpriv.reports.summary import metrics_in
from fedpriv.reports.table import STYLES, Style, render, write_table
from fedpriv.running.observer import RunObserver
from fedpriv.scenario.load import load_scenario, scenario_of
from fedpriv.sweep.results import read_history, read_results
from fedpriv.sweep.runner import rerun_command, run_sweep


@dataclass(frozen=True)
class Evaluation:
    """The test set after one round; the accuracy is a share, 0 … 1."""

    round: int
    metrics: Mapping[str, float]

    @property
    def test_loss(self) -> float:
        return self.metrics["test_loss"]

    @property
    def test_accuracy(self) -> float:
        """KeyError for a regression, which has none."""
        return self.metrics["test_accuracy"]


@dataclass(frozen=True)
class Privacy:
    """What a cell guarantees, computed from what it released; see `fedpriv.accounting` for the conversions.

    Guarantee: it holds for neighbouring data sets under `relation` that differ in one `unit`.  `mu`, `zcdp`,
    `epsilon` (exact) and `epsilon_paper` (ε = μ²/2 + μ√(2 ln(1/δ))) are None if the run adds no noise.
    """

    trust: str
    relation: str
    unit: str
    noise: str
    """"simulation" (seeded: protects nobody), "release" or "none"."""
    delta: float
    mu: float | None
    zcdp: float | None
    epsilon: float | None
    epsilon_paper: float | None


@dataclass(frozen=True)
class CellResults:
    """One sweep point with one seed."""

    point: Mapping[str, Any]
    """Swept values by dotted key."""
    seed: int
    silos: int
    rounds: int
    metrics: Mapping[str, float]
    """On the test set at the end: "test_loss", "test_accuracy" (a share), and what else the objective knows."""
    gradient_evaluations: int | None
    """Gradients of single records, of all silos; None in results that are older than this figure."""
    bytes_sent: int | None
    """By each silo, in all rounds; None in results that are older than this figure."""
    fraction_clipped: float | None
    """Share of the increments that were clipped; None where silos do not tell."""
    wall_seconds: float
    privacy: Privacy
    history: tuple[Evaluation, ...]
    scenario: Mapping[str, Any]
    """The resolved scenario as plain data."""
    model_file: Path

    @property
    def test_loss(self) -> float:
        return self.metrics["test_loss"]

    @property
    def test_accuracy(self) -> float:
        """A share, 0 … 1; KeyError for a regression, which has none."""
        return self.metrics["test_accuracy"]

    def model(self) -> NDArray[np.floating[Any]]:
        """The published model, flat: shape (d,)."""
        vector: NDArray[np.floating[Any]] = np.load(self.model_file, allow_pickle=False)
        return vector


@dataclass(frozen=True)
class RunResults:
    """What a run left in its folder: every finished cell, in the order of the scenario."""

    folder: Path
    name: str
    title: str
    engine: str
    complete: bool
    cells: tuple[CellResults, ...]

    def table(self, style: Style = "markdown") -> str:
        """Measured beside published, as "markdown", "csv" or "latex"; InputError for another style."""
        if style not in STYLES:
            raise InputError(f"style = {style!r}: known styles are {', '.join(STYLES)}")
        return render(read_results(self.folder), style)

    def plot(self) -> list[Path]:
        """Draw into folder/plots; returns the files."""
        return plot_run(self.folder)

    def report(self, file: str | Path | None = None) -> Path:
        """Write one self-contained HTML file, folder/report.html by default; returns it."""
        return write_report(self.folder, None if file is None else Path(file))


def run(
    scenario: str | Path | Mapping[str, Any],
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the command's option
    engine: str = "vectorized",
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[RunObserver] = (),
) -> RunResults:
    """Run every cell of a scenario, as `fedpriv run` does, and return what it gave.

    `scenario` is a file or the same as nested dictionaries; `set` overrides dotted keys and narrows swept ones.
    Results are written to `out`, to runs/NAME by default, as the run goes; with `resume` what is there is kept.

    InputError names the key that cannot be used; RunError says why a run could not be finished.
    """
    overrides = [_assignment(key, value) for key, value in (set or {}).items()]
    if isinstance(scenario, Mapping):
        loaded, rerun = scenario_of(scenario, "scenario", overrides), None
    else:
        loaded = load_scenario(Path(scenario), overrides)
        rerun = rerun_command(str(scenario), engine, overrides)
    target = None if out is None else Path(out)
    folder = run_sweep(loaded, engine, target, resume=resume, rerun=rerun, observers=observers)
    write_table(folder)
    return load(folder)


def load(folder: str | Path) -> RunResults:
    """Read what a run left in its folder; InputError if there is none."""
    path = Path(folder)
    results = read_results(path)
    history: dict[int, list[Evaluation]] = {}
    for line in read_history(path):
        evaluation = Evaluation(line["round"], metrics_in(line))
        history.setdefault(line["cell"], []).append(evaluation)
    cells = tuple(_cell(path, cell, tuple(history.get(cell["cell"], ()))) for cell in results.cells)
    return RunResults(path, results.name, results.title, results.engine, results.complete, cells)


def _cell(folder: Path, record: Mapping[str, Any], history: tuple[Evaluation, ...]) -> CellResults:
    privacy = {name: record[name] for name in Privacy.__dataclass_fields__}
    own = ("point", "seed", "silos", "rounds", "fraction_clipped", "wall_seconds")
    return CellResults(
        **{name: record[name] for name in own},
        metrics=metrics_in(record),
        gradient_evaluations=record.get("gradient_evaluations"),
        bytes_sent=record.get("bytes_sent"),
        privacy=Privacy(**privacy),
        history=history,
        scenario=record["scenario"],
        model_file=folder / record["model"],
    )


def _assignment(key: str, value: Any) -> str:
    """KEY=VALUE as `--set` takes it: JSON of numbers, texts, truth values and lists is TOML."""
    try:
        if isinstance(value, Mapping):
            raise TypeError("a table of keys is no single value")
        return f"{key}={json.dumps(value, ensure_ascii=False, allow_nan=False)}"
    except (TypeError, ValueError):
        raise InputError(f"set: {key} = {value!r}: expected a number, a text, true or false, or a list") from None
