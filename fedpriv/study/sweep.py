"""Run the missing cells of a scenario on an engine, one run in a folder at a time; write results as it goes."""

import fcntl
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedpriv.claims.outcome import Finished, Observers, RunObserver
from fedpriv.core.errors import FedprivError, InputError, RunError, printable
from fedpriv.engines.memory import Need, check_memory, need_of
from fedpriv.engines.table import LOCAL, Connection, Engine, engine_named, engine_row
from fedpriv.engines.workers import Workers, on_workers
from fedpriv.plan.fitted import fitted_scenario
from fedpriv.plan.task import check_records
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import Cell
from fedpriv.study.first_steps import scaled_scenario
from fedpriv.study.results import RunFolder, check_free, fits_of
from fedpriv.study.stored import CheckpointFolder

_NAME = ".lock"
_LONGEST = 200  # bytes of a lock that are shown


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made, for this process; InputError, with who has it, while another run does.

    The lock is the kernel's (`flock`), so that it ends with the process, however that ends; the file says whose it
    is and means nothing without it.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME
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
            if _is_named(file, path):
                return file
        except BlockingIOError:
            holder = printable(os.pread(file, _LONGEST, 0).decode(errors="replace")) or "another process"
            os.close(file)
            raise InputError(
                f"{path.parent}: {holder} is running there; give another --out, or wait until it ends"
            ) from None
        os.close(file)


def _is_named(file: int, path: Path) -> bool:
    """Tell whether the name still is of our file, and nobody removed it between opening and locking."""
    try:
        named, ours = path.stat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)


_RUNS = Path("runs")


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
        words = [] if self.engine == "vectorized" else ["--engine", self.engine]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += [word for file in self.imports for word in ("--import", str(file))]
        if self.connection.superlink is not None:
            words += ["--superlink", self.connection.superlink]
        if self.connection.root_certificates is not None:
            words += ["--root-certificates", str(self.connection.root_certificates)]
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
    row, kept = engine_row(options.engine), CheckpointFolder(path, Observers((), observers))
    engine = engine_named(options.engine, path, options.connection, kept)
    if options.workers is not None:
        engine = on_workers(options.engine, options.workers, kept)
    if options.connection.superlink is None:  # silos elsewhere have records of their own
        for point in scenario.points:
            check_records(point.cell)
    with locked(path), ExitStack() as stack:
        told = Observers((), observers).fitted
        scenario, fits = fitted_scenario(scenario, fits_of(path) if resume else {}, told)
        check_free(path, resume=resume)  # before anything is released
        alone = engine_named(options.engine, path, options.connection)
        scenario, first_steps = scaled_scenario(scenario, partial(_alone, alone), released=row.releases)
        if options.connection.superlink is None:
            check_memory([point.cell for point in scenario.points], options.engine, options.processes)
        folder = RunFolder(
            path, scenario, options.engine, resume=resume, rerun=rerun, fits=fits, groups=row.groups
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
                    heard.finished(outcome.index, first_steps.with_rounds(cell, outcome.finished))
        except FedprivError as error:
            Observers(places, everybody).failed(error)
            raise
        if folder.missing:
            raise RunError(f"engine {options.engine} left {len(folder.missing)} cells without a result")
        kept.clear()
    return path


def weighed(scenario: Scenario, options: RunOptions) -> Need | None:
    """Check records and fit noise as a run does, and count the memory that it takes; InputError as for a run."""
    for point in scenario.points:
        check_records(point.cell)
    fitted, _ = fitted_scenario(scenario, {})
    cells = [point.cell for point in fitted.points]
    check_memory(cells, options.engine, options.processes)
    return need_of(cells, options.engine, options.processes)


def _alone(engine: Engine, cell: Cell) -> Finished:
    """Run one cell without observers; it rounds as it does wherever it is run."""
    (outcome,) = engine([cell], RunObserver())
    return outcome.finished


def free_folder(name: str, *, resume: bool = False) -> Path:
    """Find runs/NAME, or the first of runs/NAME-2, … that is free; with `resume` the latest that is not."""
    taken = [path for path in _numbered(name) if (path / "results.json").exists()]
    if resume and taken:
        return taken[-1]
    return next(path for path in _numbered(name, len(taken) + 1) if path not in taken)


def _numbered(name: str, count: int = 1000) -> list[Path]:
    return [_RUNS / (name if number == 1 else f"{name}-{number}") for number in range(1, count + 1)]
