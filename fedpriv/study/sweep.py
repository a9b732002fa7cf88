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
from fedpriv.claims.outcome import Finished, Observers, RunObserver
from fedpriv.core.errors import FedprivError, InputError, RunError, printable
from fedpriv.data.encode import scaling_from
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
from fedpriv.plan.calibration import fitted_scenario
from fedpriv.plan.evaluation import first_step_of, presumed, scaled
from fedpriv.plan.plan import plan_of
from fedpriv.plan.task import check_records, task_of_schema
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import Cell
from fedpriv.study.results import RunFolder, check_free, fits_of
from fedpriv.study.stored import CheckpointFolder


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of a scenario gave, by the cell with their numbers."""

    taken: Mapping[str, Finished]

    def with_rounds(self, cell: Cell, finished: Finished) -> Finished:
        """A cell's outcome, with what its first step released in its ledger.

        Guarantee: the claim that follows from the ledger is of both together.
        """
        if (first := self.taken.get(_name(cell))) is None:
            return finished
        return replace(
            finished,
            releases=(*(replace(stream, step=FIRST_STEP) for stream in first.releases), *finished.releases),
            bytes_sent=finished.bytes_sent + first.bytes_sent,
            wall_seconds=finished.wall_seconds + first.wall_seconds,
        )


def scaled_scenario(
    scenario: Scenario, take: Callable[[Cell], Finished], *, released: bool = False
) -> tuple[Scenario, FirstSteps]:
    """The scenario with numbers in every cell; `take` runs a first step, once for cells that ask for the same.

    InputError, before the first one is taken, for rounds that cannot be planned; `released` as for `plan_of`.
    """
    for point in scenario.points:
        if point.cell.data.unscaled and (schema := point.cell.data.table_schema) is not None:
            cell = presumed(point.cell)  # a plan takes what is public about the table, and no record
            plan_of(cell, task_of_schema(cell, schema).objective, released=released)
    asked, points, taken = dict[str, Finished](), [], dict[str, Finished]()
    for point in scenario.points:
        cell, schema = point.cell, point.cell.data.table_schema
        if schema is not None and (first := first_step_of(cell)) is not None:
            if _name(first) not in asked:
                asked[_name(first)] = take(first)
            finished = asked[_name(first)]
            moments = np.asarray(finished.model) / schema.counted_share(tests=False)
            cell = scaled(cell, scaling_from(schema.numbers, moments))
            taken[_name(cell)] = finished
        points.append(replace(point, cell=cell))
    return replace(scenario, points=points), FirstSteps(taken)


def _name(cell: Cell) -> str:
    return json.dumps(cell.canonical(), sort_keys=True)


_LONGEST = 200  # bytes of a lock that are shown


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made, for this process; InputError, with who has it, while another run does.

    The lock is the kernel's (`flock`), so that it ends with the process, however that ends; the file says whose it
    is and means nothing without it.
    """
    new, path = not folder.exists(), folder / ".lock"
    folder.mkdir(parents=True, exist_ok=True)
    file = _taken(path)
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


def _taken(path: Path) -> int:
    """Open and lock the file that bears the name; return its descriptor."""
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # somebody may have removed the name between opening and locking
                if os.path.samestat(path.stat(), os.fstat(file)):
                    return file
        except BlockingIOError:
            holder = printable(os.pread(file, _LONGEST, 0).decode(errors="replace")) or "another process"
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
    def processes(self) -> int:
        """Of this machine, that run cells at a time."""
        return (self.workers.count or 1) if self.workers is not None else 1

    def command(self, scenario: str) -> str:
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
    path, resume = options.out or free_folder(scenario.name, resume=options.resume), options.resume
    row, kept = find_engine_row(options.engine), CheckpointFolder(path, Observers((), observers))
    engine = make_engine(options.engine, path, options.connection, kept)
    if options.workers is not None:
        engine = make_worker_engine(options.engine, options.workers, kept)
    if options.connection.superlink is None:  # silos elsewhere have records of their own
        for point in scenario.points:
            check_records(point.cell)
    with locked(path), ExitStack() as stack:
        scenario, fits = fitted_scenario(
            scenario, fits_of(path) if resume else {}, Observers((), observers).fitted
        )
        check_free(path, resume=resume)  # before anything is released
        scenario, first_steps = scaled_scenario(
            scenario,
            partial(_alone, make_engine(options.engine, path, options.connection)),
            released=row.makes_release,
        )
        if options.connection.superlink is None:
            check_memory([point.cell for point in scenario.points], options.engine, options.processes)
        folder = RunFolder(
            path, scenario, options.engine, resume=resume, rerun=rerun, fits=fits, groups=row.group_cells
        )
        scenario, places, everybody = folder.scenario, folder.missing, [folder, *observers]
        kept.check(scenario)
        for observer in everybody:
            stack.callback(observer.ended)
            observer.started(scenario, places, path)
        try:
            for together in folder.missing_together:
                heard = Observers(together, everybody)
                for outcome in engine([scenario.points[place].cell for place in together], heard):
                    cell = scenario.points[together[outcome.index]].cell
                    heard.finished(outcome.index, first_steps.with_rounds(cell, outcome.cell_outcome))
        except FedprivError as error:
            Observers(places, everybody).failed(error)
            raise
        if folder.missing:
            raise RunError(f"engine {options.engine} left {len(folder.missing)} cells without a result")
        kept.clear()
    return path


def weighed(scenario: Scenario, options: RunOptions) -> MemoryNeed | None:
    """Check records and fit noise as a run does, and count the memory that it takes; InputError as for a run."""
    for point in scenario.points:
        check_records(point.cell)
    cells = [point.cell for point in fitted_scenario(scenario, {})[0].points]
    check_memory(cells, options.engine, options.processes)
    return estimate_memory(cells, options.engine, options.processes)


def _alone(engine: Engine, cell: Cell) -> Finished:
    """Run one cell without observers; it rounds as it does wherever it is run."""
    (outcome,) = engine([cell], RunObserver())
    return outcome.cell_outcome


def free_folder(name: str, *, resume: bool = False) -> Path:
    """Find runs/NAME, or the first of runs/NAME-2, … that is free; with `resume` the latest that is not."""
    numbered = [Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 1002)]
    taken = [path for path in numbered[:-1] if (path / "results.json").exists()]
    return taken[-1] if resume and taken else next(path for path in numbered if path not in taken)
