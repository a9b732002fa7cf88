"""Run the missing cells of a scenario on an engine, one run in a folder at a time; write results as it goes.

First steps of a scenario whose tables are scaled: each is run once, before the rounds that use its numbers.
"""

import fcntl
import json
import os
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fedpriv.claims.ledger import FIRST_STEP
from fedpriv.claims.outcome import CellOutcome, ObserverGroup, RunObserver
from fedpriv.core.errors import FedprivError, InputError, RunError, sanitize_line
from fedpriv.data.encode import scaling_from_moments
from fedpriv.engines.table import (
    LOCAL,
    Connection,
    Engine,
    MemoryNeed,
    check_memory,
    estimate_memory,
    find_engine_row,
    make_engine,
)
from fedpriv.engines.workers import Workers, make_worker_engine
from fedpriv.plan.calibration import fit_scenario_noise
from fedpriv.plan.evaluation import apply_scaling, assume_scaling, first_step_cell
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import check_record_count, make_schema_task
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import Cell
from fedpriv.study.results import RunFolder, check_no_results, read_fits
from fedpriv.study.stored import CheckpointFolder


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of a scenario gave, by the cell with their numbers."""

    results_by_cell: Mapping[str, CellOutcome]

    def prepend_releases(self, cell: Cell, finished: CellOutcome) -> CellOutcome:
        """A cell's outcome, with what its first step released in its ledger.

        Guarantee: the claim that follows from the ledger is of both together.
        """
        if (first := self.results_by_cell.get(_cell_text(cell))) is None:
            return finished
        return replace(
            finished,
            releases=(*(replace(stream, step=FIRST_STEP) for stream in first.releases), *finished.releases),
            bytes_sent=finished.bytes_sent + first.bytes_sent,
            wall_seconds=finished.wall_seconds + first.wall_seconds,
        )


def scale_scenario(
    scenario: Scenario, run_first_step: Callable[[Cell], CellOutcome], *, for_release: bool = False
) -> tuple[Scenario, FirstSteps]:
    """The scenario with numbers in every cell; `take` runs a first step, once for cells that ask for the same.

    InputError, before the first one is taken, for rounds that cannot be planned; `released` as for `plan_of`.
    """
    for point in scenario.points:
        if point.cell.data.needs_first_step and (schema := point.cell.data.table_schema) is not None:
            cell = assume_scaling(point.cell)  # a plan takes what is public about the table, and no record
            make_plan(cell, make_schema_task(cell, schema).objective, for_release=for_release)
    asked, points, taken = dict[str, CellOutcome](), [], dict[str, CellOutcome]()
    for point in scenario.points:
        cell, schema = point.cell, point.cell.data.table_schema
        if schema is not None and (first := first_step_cell(cell)) is not None:
            if _cell_text(first) not in asked:
                asked[_cell_text(first)] = run_first_step(first)
            finished = asked[_cell_text(first)]
            moments = np.asarray(finished.model) / schema.counted_share(for_testing=False)
            cell = apply_scaling(cell, scaling_from_moments(schema.number_features, moments))
            taken[_cell_text(cell)] = finished
        points.append(replace(point, cell=cell))
    return replace(scenario, points=points), FirstSteps(taken)


def _cell_text(cell: Cell) -> str:
    return json.dumps(cell.canonical_data(), sort_keys=True)


_MAX_LOCK_BYTES = 200  # bytes of a lock that are shown


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made, for this process; InputError, with who has it, while another run does.

    The lock is the kernel's (`flock`), so that it ends with the process, however that ends; the file says whose it
    is and means nothing without it.
    """
    new, path = not folder.exists(), folder / ".lock"
    folder.mkdir(parents=True, exist_ok=True)
    file = _open_locked(path)
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may have the descriptor too
        os.close(file)
        if new:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


def _open_locked(path: Path) -> int:
    """Open and lock the file that bears the name; return its descriptor."""
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # somebody may have removed the name between opening and locking
                if os.path.samestat(path.stat(), os.fstat(file)):
                    return file
        except BlockingIOError:
            holder = (
                sanitize_line(os.pread(file, _MAX_LOCK_BYTES, 0).decode(errors="replace")) or "another process"
            )
            os.close(file)
            raise InputError(
                f"{path.parent}: {holder} is running there; give another --out, or wait until it ends"
            ) from None
        os.close(file)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run, as `fedpriv run` and `fedpriv.run` are given them; all but the scenario and displays."""

    engine: str = "vectorized"
    out: Path | None = None
    """The folder of the results; runs/NAME by default."""
    resume: bool = False
    connection: Connection = LOCAL
    workers: Workers | None = None
    """Other processes that run the cells; they change no result."""
    overrides: Sequence[str] = ()
    """KEY=VALUE, as they were given: the scenario has them already."""
    imports: Sequence[Path] = ()

    @property
    def process_count(self) -> int:
        """Of this machine, that run cells at a time."""
        return (self.workers.count or 1) if self.workers is not None else 1

    def format_command(self, scenario: str) -> str:
        """The command line that runs a scenario file with these options."""
        options = [
            *([] if self.engine == "vectorized" else [("--engine", self.engine)]),
            *(("--set", override) for override in self.overrides),
            *(("--import", file) for file in self.imports),
            ("--superlink", self.connection.superlink),
            ("--root-certificates", self.connection.root_certificates),
        ]
        words = [str(word) for option, value in options if value is not None for word in (option, value)]
        return shlex.join(["fedpriv", "run", scenario, *words])


def run_sweep(
    scenario: Scenario,
    options: RunOptions,
    observers: Sequence[RunObserver] = (),
    rerun: str | None = None,
) -> Path:
    """Run the cells of a scenario that have no result yet; returns the folder with the results.

    A run that is resumed may have more seeds than before: theirs are run, and what is finished stays as it is.
    `rerun` is the command that would run the same again.  Stopped at any moment, by an exception of an observer
    too, the folder is valid and can be resumed: cells that were in the middle go on from their checkpoints, if the
    engine keeps them.  InputError for what cannot be run, a folder that another run is using among it, RunError
    for what could not be finished.
    """
    path, resume = options.out or find_free_folder(scenario.name, resume=options.resume), options.resume
    row, kept = find_engine_row(options.engine), CheckpointFolder(path, ObserverGroup((), observers))
    engine = make_engine(options.engine, path, options.connection, kept)
    if options.workers is not None:
        engine = make_worker_engine(options.engine, options.workers, kept)
    if options.connection.superlink is None:  # silos elsewhere have records of their own
        for point in scenario.points:
            check_record_count(point.cell)
    with lock_folder(path), ExitStack() as stack:
        scenario, fits = fit_scenario_noise(
            scenario, read_fits(path) if resume else {}, ObserverGroup((), observers).fitted
        )
        check_no_results(path, resume=resume)  # before anything is released
        scenario, first_steps = scale_scenario(
            scenario,
            partial(_run_single_cell, make_engine(options.engine, path, options.connection)),
            for_release=row.makes_release,
        )
        if options.connection.superlink is None:
            check_memory([point.cell for point in scenario.points], options.engine, options.process_count)
        folder = RunFolder(
            path, scenario, options.engine, resume=resume, rerun=rerun, fits=fits, group_cells=row.group_cells
        )
        scenario, places, everybody = folder.scenario, folder.missing_indices, [folder, *observers]
        kept.check_scenario(scenario)
        for observer in everybody:
            stack.callback(observer.ended)
            observer.started(scenario, places, path)
        try:
            for together in folder.missing_by_batch:
                heard = ObserverGroup(together, everybody)
                for outcome in engine([scenario.points[place].cell for place in together], heard):
                    cell = scenario.points[together[outcome.index]].cell
                    heard.finished(outcome.index, first_steps.prepend_releases(cell, outcome.cell_outcome))
        except FedprivError as error:
            ObserverGroup(places, everybody).failed(error)
            raise
        if folder.missing_indices:
            raise RunError(f"engine {options.engine} left {len(folder.missing_indices)} cells without a result")
        kept.clear()
    return path


def estimate_run_memory(scenario: Scenario, options: RunOptions) -> MemoryNeed | None:
    """Check records and fit noise as a run does, and count the memory that it takes; InputError as for a run."""
    for point in scenario.points:
        check_record_count(point.cell)
    cells = [point.cell for point in fit_scenario_noise(scenario, {})[0].points]
    check_memory(cells, options.engine, options.process_count)
    return estimate_memory(cells, options.engine, options.process_count)


def _run_single_cell(engine: Engine, cell: Cell) -> CellOutcome:
    """Run one cell without observers; it rounds as it does wherever it is run."""
    (outcome,) = engine([cell], RunObserver())
    return outcome.cell_outcome


def find_free_folder(name: str, *, resume: bool = False) -> Path:
    """Find runs/NAME, or the first of runs/NAME-2, … that is free; with `resume` the latest that is not."""
    numbered = [Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 1002)]
    taken = [path for path in numbered[:-1] if (path / "results.json").exists()]
    return taken[-1] if resume and taken else next(path for path in numbered if path not in taken)
