"""`fedpriv run`: load, check, run, write, show."""

import re
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedpriv.engines.deployment import run_deployment
from fedpriv.engines.table import engine_named
from fedpriv.errors import InputError, RunError
from fedpriv.federation import check_records
from fedpriv.files import write_text
from fedpriv.outcome import Finished
from fedpriv.reports.results import RunFolder, read_results
from fedpriv.reports.table import render
from fedpriv.scenario import Scenario, load_scenario

INTERRUPTED = 130


@dataclass(frozen=True)
class Connection:
    """A SuperLink that runs already, and the certificates it is trusted by; nothing for a local federation."""

    superlink: str | None = None
    root_certificates: Path | None = None


def run_scenario(
    path: Path,
    engine_name: str,
    overrides: list[str],
    out: Path | None,
    connection: Connection,
    *,
    resume: bool,
    quiet: bool,
) -> None:
    """Run a scenario's missing cells; exits with code 130 when interrupted, leaving what is finished."""
    engine = engine_named(engine_name)
    _check(connection, engine_name)
    scenario = load_scenario(path, overrides)
    if connection.superlink is None:  # silos elsewhere have records of their own
        for point in scenario.points:
            check_records(point.cell)
    folder = RunFolder(_folder(out, scenario.name, resume=resume), scenario, engine_name, resume=resume)
    if engine_name == "deployment":
        engine = partial(
            run_deployment,
            folder=folder.path,
            address=connection.superlink,
            root_certificates=connection.root_certificates,
        )
    missing = folder.missing
    cells = [scenario.points[place].cell for place in missing]
    signal.signal(signal.SIGTERM, _interrupt)
    with _Display(scenario, missing, folder, quiet=quiet) as display:
        try:
            for outcome in engine(cells, display):
                display.finished(outcome.index, outcome.finished)
        except KeyboardInterrupt:
            left = len(folder.missing)
            display.say(
                f"stopped, {left} of {len(scenario.points)} cells left; go on with --resume --out {folder.path}"
            )
            sys.exit(INTERRUPTED)
    if folder.missing:
        raise RunError(f"engine {engine_name} left {len(folder.missing)} cells without a result")
    text = render(read_results(folder.path), "markdown")
    write_text(folder.path / "table.md", text)
    if not quiet:
        sys.stdout.write(f"\n{text}\nresults: {folder.path}\n")


def _check(connection: Connection, engine_name: str) -> None:
    address, certificates = connection.superlink, connection.root_certificates
    if engine_name != "deployment" and connection != Connection():
        raise InputError(
            f"--engine {engine_name}: --superlink and --root-certificates are for --engine deployment"
        )
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise InputError(f"--superlink {address}: expected HOST:PORT, such as superlink.example.org:8000")
    if certificates is not None and (address is None or not certificates.is_file()):
        raise InputError(f"--root-certificates {certificates}: expected a file, and --superlink with it")


def _folder(out: Path | None, name: str, *, resume: bool) -> Path:
    """runs/NAME, or the first of runs/NAME-2, … that is free; with `resume` the latest that is not."""
    if out is not None:
        return out
    taken = [path for path in _numbered(name) if (path / "results.json").exists()]
    if resume and taken:
        return taken[-1]
    return next(path for path in _numbered(name, len(taken) + 1) if path not in taken)


def _numbered(name: str, count: int = 1000) -> list[Path]:
    return [Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, count + 1)]


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _RoundsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} rounds/s")


class _Display:
    """The observer of a run: writes history and results, and shows progress where somebody is looking."""

    def __init__(self, scenario: Scenario, missing: list[int], folder: RunFolder, *, quiet: bool) -> None:
        self._scenario, self._missing, self._folder, self._quiet = scenario, missing, folder, quiet
        console = Console(stderr=True, quiet=quiet)
        self._live = console.is_terminal and not quiet
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            _RoundsPerSecond(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        rounds = sum(scenario.points[place].cell.federation.total_rounds for place in missing)
        self._bar = self._progress.add_task(scenario.name, total=rounds)
        self._done = 0
        self._started = time.monotonic()

    def __enter__(self) -> "_Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advanced(self, client_rounds: int) -> None:
        self._progress.advance(self._bar, client_rounds)

    def evaluated(self, index: int, t: int, test_loss: float, test_accuracy: float) -> None:
        self._folder.evaluated(self._missing[index], t, test_loss, test_accuracy)

    def finished(self, index: int, finished: Finished) -> None:
        place = self._missing[index]
        self._folder.finished(place, finished)
        for silo, rounds in finished.missed.items():  # never silently, and not for --quiet either
            late = ", ".join(map(str, rounds))
            sys.stderr.write(f"fedpriv: silo {silo} did not answer in round {late}; its last release stood in\n")
        self._done += 1
        point = self._scenario.points[place]
        values = [f"{key.rpartition('.')[2]} {value}" for key, value in point.swept.items()]
        where = ", ".join([*values, f"seed {point.cell.seed}"])
        line = f"loss {finished.test_loss:.4f}, accuracy {100 * finished.test_accuracy:.1f} %"
        self._progress.update(self._bar, description=f"{self._done}/{len(self._missing)} cells, {line}")
        if not self._live:
            elapsed = time.monotonic() - self._started
            self.say(f"[{self._done}/{len(self._missing)}, {elapsed:.0f} s] {where}: {line}")

    def say(self, line: str) -> None:
        if not self._quiet:
            self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
