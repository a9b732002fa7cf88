"""`fedpriv run`: load, check, run, write, show."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from fedpriv.cli.explore import show_run
from fedpriv.cli.progress import JsonLines, Progress
from fedpriv.cli.watch import Watched, watching
from fedpriv.engines.base import Connection
from fedpriv.engines.table import engine_row
from fedpriv.engines.workers import Workers
from fedpriv.errors import InputError, RunError
from fedpriv.extensions import import_files
from fedpriv.reports.page import write_report
from fedpriv.reports.table import write_table
from fedpriv.running.observer import RunObserver
from fedpriv.scenario import load_scenario
from fedpriv.sweep.runner import rerun_command, run_sweep
from fedpriv.sweep.trackers import MLflow, TensorBoard

INTERRUPTED = 130


def run_scenario(
    path: Path,
    engine: str,
    overrides: Sequence[str],
    out: Path | None,
    connection: Connection,
    workers: Workers | None,
    *,
    resume: bool,
    quiet: bool,
    as_json: bool,
    tensorboard: Path | None,
    mlflow: str | None,
    imports: Sequence[Path] = (),
    watch: bool = False,
) -> None:
    """Run a scenario's missing cells; exits with code 130 when interrupted, leaving what is finished.

    An engine that can go on with the cell that failed says how, too.
    """
    if quiet and as_json:
        raise InputError("--quiet and --json: give only one of them")
    display = JsonLines(sys.stdout) if as_json else Progress(quiet=quiet)
    observers: list[RunObserver] = [display]
    if tensorboard is not None:
        observers.append(TensorBoard(tensorboard))
    if mlflow is not None:
        observers.append(MLflow(mlflow))
    import_files(imports)
    scenario = load_scenario(path, overrides)
    rerun = rerun_command(str(path), engine, overrides, connection, imports)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _page(observers) if watch else nullcontext():
            folder = run_sweep(
                scenario,
                engine,
                out,
                resume=resume,
                rerun=rerun,
                observers=observers,
                connection=connection,
                workers=workers,
            )
    except KeyboardInterrupt:
        display.stopped(rerun)
        sys.exit(INTERRUPTED)
    except RunError:
        if engine_row(engine).resumes_cells:
            display.stopped(rerun)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    write_table(folder)
    if watch:
        sys.stderr.write(f"fedpriv: report: {write_report(folder)}\n")
    if not (quiet or as_json):
        show_run(folder)


@contextmanager
def _page(observers: list[RunObserver]) -> Iterator[None]:
    """Serve the run's page, and say where."""
    watched = Watched()
    observers.append(watched)
    with watching(watched) as address:
        sys.stderr.write(f"fedpriv: watch this run at {address}\n")
        yield


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
