"""`fedpriv run --watch`: the report's page of a run that is under way, on loopback only."""

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedpriv.core.errors import FedprivError
from fedpriv.rounds.outcome import Finished, RunObserver
from fedpriv.scenario.load import Scenario
from fedpriv.show.page import page_of
from fedpriv.study.results import read_claims

_REFRESH_SECONDS = 1.0
_LAST_LOOK_SECONDS = 3.0


class Watched(RunObserver):
    """Keeps the page of a run's folder, drawn anew when there is news, and at most once a second."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._news, self._drawn, self._at = 0, -1, 0.0
        self._page, self._version = b"", ""

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        self._folder = folder
        self._news += 1

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self._news += 1

    def finished(self, place: int, finished: Finished) -> None:
        self._news += 1

    def ended(self) -> None:
        self._news += 1

    def page(self) -> tuple[bytes, str]:
        """The page and its version."""
        with self._lock:
            due = self._news != self._drawn and time.monotonic() - self._at > _REFRESH_SECONDS
            if self._folder is not None and (due or not self._page):
                news, text = self._news, ""
                try:
                    results = read_claims(self._folder)
                    version = hashlib.sha256(f"{news}".encode()).hexdigest()[:12]
                    text = page_of(self._folder, results, version, live=True)
                except FedprivError:
                    return self._page or b"The run has not begun.", self._version
                self._page, self._version = text.encode(), version
                self._drawn, self._at = news, time.monotonic()
            return self._page or b"The run has not begun.", self._version


def _handler(watched: Watched) -> type[BaseHTTPRequestHandler]:
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
def watching(watched: Watched) -> Iterator[str]:
    """Serve the page on loopback, at the address that is given, until the block ends.

    Guarantee: it listens on 127.0.0.1 only, answers GET / and /version, and refuses other host names.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(watched))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        time.sleep(_LAST_LOOK_SECONDS)  # for a browser's last question
    finally:
        server.shutdown()
        server.server_close()
