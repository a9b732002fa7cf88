"""Running a scenario: its missing cells on an engine, everything written as it goes."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from fedpriv.engines.base import LOCAL, Connection, Engine
from fedpriv.engines.table import engine_named, engine_row
from fedpriv.engines.workers import Workers, on_workers
from fedpriv.errors import FedprivError, RunError
from fedpriv.running.first_step import scaled_scenario
from fedpriv.running.fitted import fitted_scenario
from fedpriv.running.observer import Observers, RunObserver
from fedpriv.running.outcome import Finished
from fedpriv.running.task import check_records
from fedpriv.scenario import Cell, Scenario
from fedpriv.sweep.checkpoints import CheckpointFolder
from fedpriv.sweep.lock import locked
from fedpriv.sweep.results import RunFolder, check_free, fits_of

_RUNS = Path("runs")


def run_sweep(
    scenario: Scenario,
    engine_name: str,
    out: Path | None,
    *,
    resume: bool,
    rerun: str | None = None,
    observers: Sequence[RunObserver] = (),
    connection: Connection = LOCAL,
    workers: Workers | None = None,
) -> Path:
    """Run the cells of a scenario that have no result yet; returns the folder with the results.

    A run that is resumed may have more seeds than before: theirs are run, and what is finished stays as it is.
    `out` is the folder, runs/NAME by default; `rerun` is the command that would run the same again; `workers` run
    the cells if there are any, and change no result.  Stopped at any moment, by an exception of an observer too,
    the folder is valid and can be resumed: cells that were in the middle go on from their checkpoints, if the
    engine keeps them.  InputError for what cannot be run, a folder that another run is using among it, RunError
    for what could not be finished.
    """
    path = out or free_folder(scenario.name, resume=resume)
    kept = CheckpointFolder(path, Observers((), observers))
    engine = engine_named(engine_name, path, connection, kept)
    if workers is not None:
        engine = on_workers(engine_name, workers, kept)
    if connection.superlink is None:  # silos elsewhere have records of their own
        for point in scenario.points:
            check_records(point.cell)
    with locked(path), ExitStack() as stack:
        told = Observers((), observers).fitted
        scenario, fits = fitted_scenario(scenario, fits_of(path) if resume else {}, told)
        check_free(path, resume=resume)  # before anything is released
        alone = engine_named(engine_name, path, connection)
        released = engine_row(engine_name).releases
        scenario, first_steps = scaled_scenario(scenario, partial(_alone, alone), released=released)
        groups = engine_row(engine_name).groups
        folder = RunFolder(path, scenario, engine_name, resume=resume, rerun=rerun, fits=fits, groups=groups)
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
            raise RunError(f"engine {engine_name} left {len(folder.missing)} cells without a result")
        kept.clear()
    return path


def _alone(engine: Engine, cell: Cell) -> Finished:
    """One cell's outcome, of which nobody hears; it rounds as it does wherever it is run."""
    (outcome,) = engine([cell], RunObserver())
    return outcome.finished


def rerun_command(
    path: str,
    engine: str,
    overrides: Sequence[str],
    connection: Connection = LOCAL,
    imports: Sequence[Path] = (),
) -> str:
    """The command line that runs a scenario file with these options."""
    options = [word for override in overrides for word in ("--set", override)]
    options += [word for file in imports for word in ("--import", str(file))]
    if engine != "vectorized":
        options = ["--engine", engine, *options]
    if connection.superlink is not None:
        options += ["--superlink", connection.superlink]
    if connection.root_certificates is not None:
        options += ["--root-certificates", str(connection.root_certificates)]
    return shlex.join(["fedpriv", "run", path, *options])


def free_folder(name: str, *, resume: bool = False) -> Path:
    """runs/NAME, or the first of runs/NAME-2, … that is free; with `resume` the latest that is not."""
    taken = [path for path in _numbered(name) if (path / "results.json").exists()]
    if resume and taken:
        return taken[-1]
    return next(path for path in _numbered(name, len(taken) + 1) if path not in taken)


def _numbered(name: str, count: int = 1000) -> list[Path]:
    return [_RUNS / (name if number == 1 else f"{name}-{number}") for number in range(1, count + 1)]
