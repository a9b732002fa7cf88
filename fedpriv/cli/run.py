"""`fedpriv run`: load, check, run, write, show."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from pydantic_core import PydanticSerializationError

from fedpriv.cli.explore import show_run
from fedpriv.cli.options import Display
from fedpriv.cli.progress import JsonLines, MLflow, Progress, TensorBoard
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.extensions import import_files
from fedpriv.core.figures import counted
from fedpriv.engines.memory import memory_words
from fedpriv.engines.table import engine_row
from fedpriv.rounds.outcome import RunObserver
from fedpriv.scenario.load import load_scenario
from fedpriv.show.table import write_table
from fedpriv.study.sweep import RunOptions, run_sweep, weighed

INTERRUPTED = 130


def weigh(path: Path, options: RunOptions) -> None:
    """Check a scenario as a run does, and say what it takes; InputError for what would not be run."""
    import_files(options.imports)
    scenario = load_scenario(path, options.overrides)
    need = weighed(scenario, options)
    sys.stdout.write(f"{counted(len(scenario.points), 'cell')}, engine {options.engine}\n")
    told = "not counted, its silos are processes of their own" if need is None else f"at most {need.words()}"
    sys.stdout.write(f"memory: {told}; {memory_words()} here\n")


def run_scenario(path: Path, options: RunOptions, shown: Display) -> None:
    """Run a scenario's missing cells; exits with code 130 when interrupted, leaving what is finished.

    An engine that can go on with the cell that failed says how, too.
    """
    if shown.quiet and shown.as_json:
        raise InputError("--quiet and --json: give only one of them")
    display = JsonLines(sys.stdout) if shown.as_json else Progress(quiet=shown.quiet)
    observers: list[RunObserver] = [display]
    if shown.tensorboard is not None:
        observers.append(TensorBoard(shown.tensorboard))
    if shown.mlflow is not None:
        observers.append(MLflow(shown.mlflow))
    import_files(options.imports)
    scenario = load_scenario(path, options.overrides)
    rerun = options.command(str(path))
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _page(observers) if shown.watch else nullcontext():
            folder = run_sweep(scenario, options, observers, rerun)
    except RunError:
        if engine_row(options.engine).resumes_cells:
            display.stopped(rerun)
        raise
    except (KeyboardInterrupt, PydanticSerializationError) as error:
        # An interrupt while pydantic writes a record is the cause of an error of its own.
        if not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
        display.stopped(rerun)
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)
    write_table(folder)
    if shown.watch:
        from fedpriv.show.page import write_report

        sys.stderr.write(f"fedpriv: report: {write_report(folder)}\n")
    if not (shown.quiet or shown.as_json):
        show_run(folder)


@contextmanager
def _page(observers: list[RunObserver]) -> Iterator[None]:
    """Serve the run's page, and say where."""
    from fedpriv.cli.watch import Watched, watching

    watched = Watched()
    observers.append(watched)
    with watching(watched) as address:
        sys.stderr.write(f"fedpriv: watch this run at {address}\n")
        yield


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
