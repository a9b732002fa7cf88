"""Figures of a service for Prometheus: its text format 0.0.4, over HTTP, to this machine only.

A service that is given `--metrics PLACE` answers GET /metrics there: on a port of the loopback interface, or on a
Unix socket of mode 0600.  One request is answered at a time, in a thread of its own.
"""

import fcntl
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

from fedpriv.core.errors import InputError

_PATIENCE_SECONDS = 5.0
"""Seconds that a request may take to come; others wait for it."""


_MAX_WAITING_CONNECTIONS = 8
"""Connections that wait to be accepted."""


class ServiceMetric(NamedTuple):
    """A number with its name; figures of one name differ in their labels."""

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = {}


def format_metrics(metrics: Iterable[ServiceMetric]) -> str:
    """The figures in the text format; those of one name follow each other."""
    by_name: dict[str, list[ServiceMetric]] = {}
    for figure in metrics:
        by_name.setdefault(figure.name, []).append(figure)
    lines = []
    for name, group in by_name.items():
        kind = "counter" if name.endswith("_total") else "gauge"  # by the format's own convention of names
        lines += [f"# HELP {name} {group[0].help}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_format_labels(each.labels)} {_format_number(each.value)}" for each in group]
    return "".join(f"{line}\n" for line in lines)


def _format_labels(labels: Mapping[str, str]) -> str:
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = ",".join(f'{name}="{value.translate(escaped)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _format_number(value: float) -> str:
    if math.isfinite(value):
        return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def is_listening(path: Path) -> bool:
    """Whether a service answers on the Unix socket `path`; not where one that was killed has left it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
        except (TimeoutError, BlockingIOError):  # it is busy, and others wait for it
            return True
        except OSError:
            return False
    return True


def open_private_socket(path: Path, option: str) -> socket.socket:
    """A Unix socket at `path`, of mode 0600 from the start, on which connections wait to be accepted.

    Guarantee: what is there stays as it is, unless it is the socket of a service that has ended; of two services
    that start at once, one is refused.

    Raises:
        InputError: none can be made there; the message names `option`.
    """
    bound = socket.socket(socket.AF_UNIX)
    try:
        with ExitStack() as stack:
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
            if path.is_socket() and not path.is_symlink():
                if is_listening(path):
                    raise InputError(
                        f"{option} {path}: a service answers there already; end it before you start another"
                    )
                path.unlink()
            stack.callback(os.umask, os.umask(0o177))
            bound.bind(str(path))
            bound.listen(_MAX_WAITING_CONNECTIONS)
    except (OSError, InputError) as error:
        bound.close()
        if isinstance(error, InputError):
            raise
        taken = path.exists() and not path.is_socket()
        why = "is a file, and no socket; name a path that is free" if taken else str(error)
        raise InputError(f"{option} {path}: {why}") from None
    return bound


@contextmanager
def serve_metrics(address: str | None, collect_metrics: Callable[[], Iterable[ServiceMetric]]) -> Iterator[None]:
    """Answer GET /metrics at `place` with what `figures` says then; nothing is opened for None.

    `place` is a port's number, for 127.0.0.1, or the path of a socket to be made; InputError for another, or one
    that is taken.

    Guarantee: no other machine is answered.
    """
    if address is None:
        yield
        return
    bound = _open_socket(address)

    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_SECONDS

        def do_GET(self) -> None:
            known = self.path.partition("?")[0] == "/metrics"
            content = format_metrics(collect_metrics()).encode() if known else b"only /metrics is here\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Scrapes are no events."""

        def address_string(self) -> str:
            return "this machine"

    class Server(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Whoever asks and goes away is no error."""

    server = Server(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = bound
    bound.listen(_MAX_WAITING_CONNECTIONS)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        if not address.isdigit():
            Path(address).unlink(missing_ok=True)


def _open_socket(place: str) -> socket.socket:
    if not place.isdigit():
        if ":" in place and "/" not in place:
            raise InputError(
                f"--metrics {place}: expected a port's number, for this machine only, or the path of a socket"
            )
        return open_private_socket(Path(place), "--metrics")
    try:
        return socket.create_server(("127.0.0.1", int(place)))
    except (OSError, OverflowError) as error:
        raise InputError(f"--metrics {place}: {error}") from None
