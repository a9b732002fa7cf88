"""Run the cells of a scenario that have no result yet, and write results as cells finish.

A cell is one run of a scenario: a value of each swept key, and a seed.  A point is the cell with its values of the
swept keys.  A scenario whose table is scaled privately has first steps: runs of one round that release the moments
of the columns, with noise in a private run, before the rounds that use them.
"""

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
from filelock import FileLock, Timeout

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
    find_engine_row,
    make_engine,
)
from fedpriv.engines.workers import Workers, make_worker_engine
from fedpriv.plan.evaluation import apply_scaling, assume_scaling, prepare_scenario
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import Cell
from fedpriv.study.results import RunFolder, check_no_results, read_fits
from fedpriv.study.stored import CheckpointFolder


@dataclass(frozen=True)
class FirstSteps:
    """Outcomes of a scenario's first steps."""

    results_by_cell: Mapping[str, CellOutcome]
    """Outcome of a cell's first step, by the JSON text of the cell with its scaling."""

    def prepend_releases(self, cell: Cell, outcome: CellOutcome) -> CellOutcome:
        """Prepend the releases of a cell's first step to those of the cell, and add its bytes and time.

        A cell without a first step keeps its outcome.

        Guarantee: the claim that follows from the ledger is on both steps together.
        """
        if (first := self.results_by_cell.get(_cell_text(cell))) is None:
            return outcome
        return replace(
            outcome,
            releases=(*(replace(stream, step=FIRST_STEP) for stream in first.releases), *outcome.releases),
            bytes_sent=outcome.bytes_sent + first.bytes_sent,
            wall_seconds=outcome.wall_seconds + first.wall_seconds,
        )


def scale_scenario(
    scenario: Scenario, first_steps: Sequence[Cell | None], run_first_step: Callable[[Cell], CellOutcome]
) -> tuple[Scenario, FirstSteps]:
    """Run the first steps of a scenario, and write the scaling of the columns into its cells.

    The model of a first step is the moments of the columns, as means over all rows that are read.  Divided by the
    public share of rows that count, they give the scaling.

    Args:
        scenario: Scenario of the run.
        first_steps: First step of each point, or None where there is none to take (`prepare_scenario`).
        run_first_step: Function that runs a first step, called once for all cells with the same first step.

    Returns:
        The scenario with these scalings, and the outcomes of the first steps.
    """
    outcomes, points, results_by_cell = dict[str, CellOutcome](), [], dict[str, CellOutcome]()
    for point, first in zip(scenario.points, first_steps, strict=True):
        cell, schema = point.cell, point.cell.data.table_schema
        if schema is not None and first is not None:
            outcome = outcomes[_cell_text(first)] = outcomes.get(_cell_text(first)) or run_first_step(first)
            moments = np.asarray(outcome.model) / schema.counted_share(for_testing=False)
            cell = apply_scaling(cell, scaling_from_moments(schema.number_features, moments))
            results_by_cell[_cell_text(cell)] = outcome
        points.append(replace(point, cell=cell))
    return replace(scenario, points=points), FirstSteps(results_by_cell)


def _cell_text(cell: Cell) -> str:
    return json.dumps(cell.canonical_data(), sort_keys=True)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create `folder` if it is missing, and lock it for this process.

    Folders that did not exist before, and are empty in the end, are removed.

    Raises:
        InputError: Another run has the lock.
    """
    new_folders = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    lock, holder_file = FileLock(folder / ".lock"), folder / ".lock-holder"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = sanitize_line(holder_file.read_bytes().decode(errors="replace")) if holder_file.exists() else ""
        raise InputError(
            f"{folder}: {holder or 'another process'} is running there; give another --out, or wait until it ends"
        ) from None
    try:
        holder_file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        holder_file.unlink(missing_ok=True)
        with suppress(OSError):  # Windows removes no open file; others lock a new one if this one is gone
            Path(lock.lock_file).unlink()
        lock.release()
        for new_folder in new_folders:
            with suppress(OSError):  # the folder is not empty
                new_folder.rmdir()


@dataclass(frozen=True)
class RunOptions:
    """Options of `fedpriv run` and `fedpriv.run`, except for the scenario and displays."""

    engine: str = "vectorized"
    """Name of the engine, a key of `ENGINES`."""
    out: Path | None = None
    """Folder of the results, or None for one of runs/NAME, runs/NAME-2, …, as `find_free_folder` finds it."""
    resume: bool = False
    """Whether to keep the folder's finished groups of cells, and to run only the others."""
    connection: Connection = LOCAL
    """SuperLink of the run, or the default for a run that starts its processes itself."""
    workers: Workers | None = None
    """Worker processes that run groups of cells, or None without them."""
    overrides: Sequence[str] = ()
    """Overrides as KEY=VALUE texts, which are applied to the scenario already."""
    imports: Sequence[Path] = ()
    """Files that define the user's algorithms, models and data."""

    @property
    def process_count(self) -> int:
        """Number of processes of this machine that run cells at a time, 1 with a cluster of workers."""
        return (self.workers.count or 1) if self.workers is not None else 1

    def format_command(self, scenario: str) -> str:
        """Format the command line that runs a scenario file with these options.

        The options --out, --resume, --workers and --ray are left out.
        """
        options = [
            *([] if self.engine == "vectorized" else [("--engine", self.engine)]),
            *(("--set", override) for override in self.overrides),
            *(("--import", file) for file in self.imports),
            ("--superlink", self.connection.superlink),
            ("--root-certificates", self.connection.root_certificates),
        ]
        arguments = [
            str(argument) for option, value in options if value is not None for argument in (option, value)
        ]
        return shlex.join(["fedpriv", "run", scenario, *arguments])


def run_sweep(
    scenario: Scenario,
    options: RunOptions,
    observers: Sequence[RunObserver] = (),
    rerun: str | None = None,
) -> Path:
    """Run the cells of a scenario that have no result yet, and return the folder with the results.

    A run that is stopped leaves a folder that can be resumed, also with more seeds.  Unfinished cells then
    continue from their checkpoints, if there are any.  A group of cells is computed again if one of them is
    missing.

    Args:
        scenario: Scenario of the run.
        options: Options of the run.
        observers: Observers of the run's events.
        rerun: Command that runs the same again, or None if it is not known, as for a program's own records.

    Raises:
        InputError: The scenario or an option cannot be used, or another run uses the folder or has results there.
        RunError: A cell could not be finished, or workers cannot be started.
    """
    # With a running SuperLink, its silos have the records, and this process has none.
    engine_row, has_records = find_engine_row(options.engine), options.connection.superlink is None
    path, resume = options.out or find_free_folder(scenario.name, resume=options.resume), options.resume
    checkpoints = CheckpointFolder(path, ObserverGroup((), observers))
    with lock_folder(path), ExitStack() as stack:
        check_no_results(path, resume=resume)
        # Engine of the cells, and of first steps, which have no checkpoints.
        first_step_engine = make_engine(options.engine, path, options.connection)
        engine = (
            make_engine(options.engine, path, options.connection, checkpoints)
            if options.workers is None
            else make_worker_engine(options.engine, options.workers, checkpoints)
        )
        # Numbers that the cells need: fitted noise, and the scaling that first steps release.
        scenario, fits, first_step_cells = prepare_scenario(
            scenario,
            read_fits(path) if resume else {},
            ObserverGroup((), observers).fitted,
            has_records=has_records,
            for_release=engine_row.makes_release,
        )
        # Another run's folder, and a run without the memory, are refused before first steps are taken.
        open_folder = partial(
            RunFolder,
            path,
            engine=options.engine,
            resume=resume,
            rerun=rerun,
            fits=fits,
            group_cells=engine_row.group_cells,
        )
        stored_folder = open_folder(scenario, check_only=True)
        for cell_indices in stored_folder.missing_by_batch if has_records else ():
            check_memory(
                [assume_scaling(stored_folder.scenario.points[index].cell) for index in cell_indices],
                options.engine,
                options.process_count,
            )
        scenario, first_steps = scale_scenario(
            scenario, first_step_cells, partial(_run_single_cell, first_step_engine)
        )
        # Folder with its finished cells, from which the missing ones follow.
        folder = open_folder(scenario, checkpoints=checkpoints)
        scenario, missing_indices, observers_of_run = folder.scenario, folder.missing_indices, [folder, *observers]
        # Runs of the missing cells, one batch of seeds at a time.
        for observer in observers_of_run:
            stack.callback(observer.ended)  # Called even if the `started` of an observer raises.
            observer.started(scenario, missing_indices, path)
        try:
            for cell_indices in folder.missing_by_batch:
                batch_observers = ObserverGroup(cell_indices, observers_of_run)
                for outcome in engine([scenario.points[index].cell for index in cell_indices], batch_observers):
                    cell = scenario.points[cell_indices[outcome.index]].cell
                    cell_outcome = first_steps.prepend_releases(cell, outcome.cell_outcome)
                    batch_observers.finished(outcome.index, cell_outcome)
        except FedprivError as error:
            ObserverGroup(missing_indices, observers_of_run).failed(error)
            raise
        if folder.missing_indices:
            raise RunError(f"engine {options.engine} left {len(folder.missing_indices)} cells without a result")
        checkpoints.clear()
    return path


def estimate_run_memory(scenario: Scenario, options: RunOptions) -> MemoryNeed | None:
    """Estimate the memory of a run, after checking its scenario, and check that there is as much.

    The result is None for an engine with processes of its own.

    Raises:
        InputError: The scenario cannot be run with records of this machine, or there is too little memory.
    """
    return check_memory(
        [assume_scaling(point.cell) for point in prepare_scenario(scenario, {})[0].points],
        options.engine,
        options.process_count,
    )


def _run_single_cell(engine: Engine, cell: Cell) -> CellOutcome:
    """Run one cell without observers, and by itself, so that its roundings do not depend on other cells."""
    (outcome,) = engine([cell], RunObserver())
    return outcome.cell_outcome


def find_free_folder(name: str, *, resume: bool = False) -> Path:
    """Find the first of runs/NAME, runs/NAME-2, …, runs/NAME-1001 that has no results.json.

    If all have one, the last folder is returned.  With `resume`, find the last of the first 1,000 with one, if
    any.
    """
    paths = [Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 1002)]
    used_paths = [path for path in paths[:-1] if (path / "results.json").exists()]
    return used_paths[-1] if resume and used_paths else next(path for path in paths if path not in used_paths)
