"""Command `fedpriv run`: load a scenario, run it, write the table and show the results.

A cell is one run of a scenario: a value of each swept key, and a seed.  An observer handles events of a run.
"""

import hashlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

from pydantic_core import PydanticSerializationError

from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.cli.explore import show_run
from fedpriv.cli.options import DisplayOptions, print_text
from fedpriv.cli.progress import JsonLines, Progress
from fedpriv.core.errors import FedprivError, InputError, RunError
from fedpriv.core.extensions import import_files, load_add_on_part
from fedpriv.core.figures import format_count
from fedpriv.engines.table import describe_available_memory, find_engine_row
from fedpriv.scenario.load import Scenario, load_scenario
from fedpriv.show.summary import list_findings
from fedpriv.show.table import write_table
from fedpriv.study.results import read_claims, read_results
from fedpriv.study.sweep import RunOptions, estimate_run_memory, run_sweep

_REFRESH_SECONDS = 1.0
_FINAL_SERVE_SECONDS = 3.0


class LivePage(RunObserver):
    """Report page of a run's folder, rendered again on request after new events of the run."""

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
        """Return the page, as encoded HTML, and its version.

        The page is rendered again if there were events since the last time, and more than a second has passed.
        Results that cannot be read leave the last page.  Before the first page there is a sentence that reloads
        itself.
        """
        from fedpriv.show.page import render_page  # slow to import, so imported for --watch only

        with self._lock:  # requests come in several threads, and one of them renders
            is_due = (
                self._event_count != self._rendered_count
                and time.monotonic() - self._render_time > _REFRESH_SECONDS
            )
            if self._folder is not None and (is_due or not self._page):
                event_count = self._event_count
                with suppress(FedprivError):
                    results = read_claims(self._folder)
                    version = hashlib.sha256(f"{event_count}".encode()).hexdigest()[:12]
                    text = render_page(self._folder, results, version, live=True)
                    self._page, self._version = text.encode(), version
                    self._rendered_count, self._render_time = event_count, time.monotonic()
            return self._page or b'<meta http-equiv="refresh" content="2">The run has not begun.', self._version


def _make_handler(live_page: LivePage) -> type[BaseHTTPRequestHandler]:
    """Make the request handler of a live page, which reloads itself when the answer to /version changes."""

    class PageHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer / with the page and /version with its version."""
            names = [f"{host}:{self.connection.getsockname()[1]}" for host in ("127.0.0.1", "localhost")]
            # Against DNS rebinding: a foreign page whose host name resolves to this address.
            if self.headers.get("Host") not in names:
                self.send_error(403)
                return
            page, version = live_page.page()
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
            """Log no request, because the terminal shows the run."""

    return PageHandler


@contextmanager
def serve_page(live_page: LivePage) -> Iterator[str]:
    """Serve the page on loopback during the block, and yield its address.

    After a block without an exception the page is served for 3 more seconds, for a browser's last request.

    Guarantee: the server listens on 127.0.0.1 only, answers GET / and /version, and refuses host names other than
    127.0.0.1 and localhost.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(live_page))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        time.sleep(_FINAL_SERVE_SECONDS)
    finally:
        server.shutdown()
        server.server_close()


INTERRUPTED = 130


def print_memory_need(path: Path, options: RunOptions) -> None:
    """Check a scenario without running it, and print the memory that is needed and that is available.

    Args:
        path: Scenario file, or name of a shipped scenario.
        options: Options of the run, such as the engine.

    Raises:
        InputError: A file of --import, the scenario or the engine cannot be used, or there is too little memory.
    """
    import_files(options.imports)
    scenario = load_scenario(path, options.overrides)
    need = estimate_run_memory(scenario, options)
    sys.stdout.write(f"{format_count(len(scenario.points), 'cell')}, engine {options.engine}\n")
    need_text = (
        "not counted, its silos are processes of their own" if need is None else f"at most {need.describe()}"
    )
    sys.stdout.write(f"memory: {need_text}; {describe_available_memory()} here\n")


def run_scenario(path: Path, options: RunOptions, display_options: DisplayOptions) -> None:
    """Run a scenario's missing cells, write the table of results, and show the results.

    With --quiet stdout has the folder of the results alone, and with --json the run's events as lines of JSON.
    With --watch the report page is also written into the folder, after the last cell.  An interrupt or SIGTERM
    during the run ends the process with exit code 130, and finished cells stay stored.

    Args:
        path: Scenario file, or name of a shipped scenario.
        options: Options of the run, such as the engine and the folder.
        display_options: Options of the display.

    Raises:
        InputError: An option, the scenario or the folder cannot be used.
        RunError: A cell could not be finished, or a claim that is shown differs from the releases.
    """
    if display_options.quiet and display_options.as_json:
        raise InputError("--quiet and --json: give only one of them")
    display = JsonLines(sys.stdout) if display_options.as_json else Progress(quiet=display_options.quiet)
    observers: list[RunObserver] = [
        display,
        *(
            load_add_on_part("tracker", "make")(name, place)
            for name in ("tensorboard", "mlflow", "wandb")
            if (place := getattr(display_options, name)) is not None
        ),
    ]
    import_files(options.imports)
    scenario = load_scenario(path, options.overrides)
    rerun = options.format_command(str(path))
    # Run, in which SIGTERM acts as an interrupt.
    previous_handler = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _serve_live_page(observers) if display_options.watch else nullcontext():
            folder = run_sweep(scenario, options, observers, rerun)
    except RunError:
        # A failed cell of such an engine continues from its last round, so that the display says how to resume.
        if find_engine_row(options.engine).can_resume_cells:
            display.stopped(rerun)
        raise
    except (KeyboardInterrupt, PydanticSerializationError) as error:
        # pydantic raises its own error for an interrupt during serialization, with the interrupt as its cause.
        if not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
        display.stopped(rerun)
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    write_table(folder)
    if display_options.watch:
        from fedpriv.show.page import write_report

        sys.stderr.write(f"fedpriv: report: {write_report(folder)}\n")
    if display_options.quiet:
        print_text(f"{folder}\n")
    if display_options.quiet or display_options.as_json:
        print_text("".join(f"note: {line}\n" for line in list_findings(read_results(folder))), sys.stderr)
    else:
        show_run(folder)


@contextmanager
def _serve_live_page(observers: list[RunObserver]) -> Iterator[None]:
    """Serve the run's page, which joins the observers, and print its address."""
    live_page = LivePage()
    observers.append(live_page)
    with serve_page(live_page) as address:
        sys.stderr.write(f"fedpriv: watch this run at {address}\n")
        yield


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
