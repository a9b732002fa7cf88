"""`fedpriv run`: load, check, run, write, show; with --watch serve the report page meanwhile, on loopback only."""

import hashlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

from pydantic_core import PydanticSerializationError

from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.cli.explore import show_run
from fedpriv.cli.options import DisplayOptions
from fedpriv.cli.progress import JsonLines, MLflow, Progress, TensorBoard
from fedpriv.core.errors import FedprivError, InputError, RunError
from fedpriv.core.extensions import import_files
from fedpriv.core.figures import format_count
from fedpriv.engines.table import describe_available_memory, find_engine_row
from fedpriv.scenario.load import Scenario, load_scenario
from fedpriv.show.table import write_table
from fedpriv.study.results import read_claims
from fedpriv.study.sweep import RunOptions, estimate_run_memory, run_sweep

_REFRESH_SECONDS = 1.0
_FINAL_SERVE_SECONDS = 3.0


class LivePage(RunObserver):
    """Keeps the page of a run's folder, drawn anew when there is news, and at most once a second."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._event_count, self._rendered_count, self._render_time = 0, -1, 0.0
        self._page, self._version = b"", ""

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        self._folder = folder
        self._event_count += 1

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self._event_count += 1

    def finished(self, place: int, finished: CellOutcome) -> None:
        self._event_count += 1

    def ended(self) -> None:
        self._event_count += 1

    def page(self) -> tuple[bytes, str]:
        """The page and its version."""
        from fedpriv.show.page import render_page  # slow to import: only --watch pays for it

        with self._lock:
            due = (
                self._event_count != self._rendered_count
                and time.monotonic() - self._render_time > _REFRESH_SECONDS
            )
            if self._folder is not None and (due or not self._page):
                news, text = self._event_count, ""
                try:
                    results = read_claims(self._folder)
                    version = hashlib.sha256(f"{news}".encode()).hexdigest()[:12]
                    text = render_page(self._folder, results, version, live=True)
                except FedprivError:
                    return self._page or b"The run has not begun.", self._version
                self._page, self._version = text.encode(), version
                self._rendered_count, self._render_time = news, time.monotonic()
            return self._page or b"The run has not begun.", self._version


def _make_handler(watched: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            names = [f"{host}:{self.connection.getsockname()[1]}" for host in ("127.0.0.1", "localhost")]
            if self.headers.get("Host") not in names:  # a page elsewhere that gave its name our address
                self.send_error(403)
                return
            page, version = watched.page()
            if self.path not in ("/", "/version"):
                self.send_error(404)
                return
            body = version.encode() if self.path == "/version" else page
            self.send_response(200)
            self.send_header(
                "Content-Type", f"text/{'plain' if self.path == '/version' else 'html'}; charset=utf-8"
            )
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it overrides
            """Nothing: the terminal shows the run."""

    return Handler


@contextmanager
def serve_page(watched: LivePage) -> Iterator[str]:
    """Serve the page on loopback, at the address that is given, until the block ends.

    Guarantee: it listens on 127.0.0.1 only, answers GET / and /version, and refuses other host names.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(watched))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        time.sleep(_FINAL_SERVE_SECONDS)  # for a browser's last question
    finally:
        server.shutdown()
        server.server_close()


INTERRUPTED = 130


def print_memory_need(path: Path, options: RunOptions) -> None:
    """Check a scenario as a run does, and say what it takes; InputError for what would not be run."""
    import_files(options.imports)
    scenario = load_scenario(path, options.overrides)
    need = estimate_run_memory(scenario, options)
    sys.stdout.write(f"{format_count(len(scenario.points), 'cell')}, engine {options.engine}\n")
    told = "not counted, its silos are processes of their own" if need is None else f"at most {need.describe()}"
    sys.stdout.write(f"memory: {told}; {describe_available_memory()} here\n")


def run_scenario(path: Path, options: RunOptions, shown: DisplayOptions) -> None:
    """Run a scenario's missing cells; exits with code 130 when interrupted, leaving what is finished.

    An engine that can go on with the cell that failed says how, too.
    """
    if shown.quiet and shown.as_json:
        raise InputError("--quiet and --json: give only one of them")
    display = JsonLines(sys.stdout) if shown.as_json else Progress(quiet=shown.quiet)
    observers: list[RunObserver] = [
        display,
        *([] if shown.tensorboard is None else [TensorBoard(shown.tensorboard)]),
        *([] if shown.mlflow is None else [MLflow(shown.mlflow)]),
    ]
    import_files(options.imports)
    scenario = load_scenario(path, options.overrides)
    rerun = options.format_command(str(path))
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _serve_live_page(observers) if shown.watch else nullcontext():
            folder = run_sweep(scenario, options, observers, rerun)
    except RunError:
        if find_engine_row(options.engine).can_resume_cells:
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
def _serve_live_page(observers: list[RunObserver]) -> Iterator[None]:
    """Serve the run's page, and say where."""
    watched = LivePage()
    observers.append(watched)
    with serve_page(watched) as address:
        sys.stderr.write(f"fedpriv: watch this run at {address}\n")
        yield


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
