"""Metrics of a service for Prometheus, in text format 0.0.4 over HTTP, for this machine only.

A service answers GET /metrics at a port of the loopback interface or a Unix socket of mode 0600.  A separate
thread answers one request at a time.
"""

import errno
import fcntl
import math
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

from fedpriv.core.errors import InputError

_PATIENCE_SECONDS = 5.0
"""Longest wait for the next bytes of a request, in seconds, while other requests wait."""
_MAX_WAITING_CONNECTIONS = 8
"""Backlog of a socket: about the most connections that wait to be accepted."""
_MIN_FREE_BYTES = 2**16
"""Free bytes below which a disk counts as full."""


class ServiceMetric(NamedTuple):
    """Metric with its name and value.  Metrics of one name differ in their labels."""

    name: str
    """Name, with the suffix "_total" for a counter and without it for a gauge."""
    help: str
    """Description, which is read from the first metric of a name."""
    value: float
    labels: Mapping[str, str] = {}


def format_metrics(metrics: Iterable[ServiceMetric]) -> str:
    """Format metrics as text: help and type of each name, then a line for each metric of this name."""
    by_name: dict[str, list[ServiceMetric]] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, []).append(metric)
    lines = []
    for name, group in by_name.items():
        lines += [
            f"# HELP {name} {group[0].help}",
            # The suffix is a naming convention of the format.
            f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}",
            *(f"{name}{_format_labels(sample.labels)} {_format_number(sample.value)}" for sample in group),
        ]
    return "".join(f"{line}\n" for line in lines)


def _format_labels(labels: Mapping[str, str]) -> str:
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = ",".join(f'{name}="{value.translate(escaped)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _format_number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def is_listening(path: Path) -> bool:
    """Whether this user reaches a service on the Unix socket `path`, which a killed service may have left."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        # EAGAIN: the service is busy.
        return connection.connect_ex(str(path)) in (0, errno.EAGAIN)


def open_private_socket(path: Path, option: str) -> socket.socket:
    """Open a Unix socket at `path`, of mode 0600 from the start, on which connections wait to be accepted.

    Guarantee: an existing file stays as it is, unless it is a socket on which this user reaches no service.  Of
    two services of one user that start at once, one is refused.

    Args:
        path: Path of the socket.
        option: Option that names the path, for errors.

    Raises:
        InputError: If a service listens on the socket, or no socket can be made there.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with ExitStack() as stack:
            # A second service waits for this lock before it checks the path or makes a socket.
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
            if path.is_socket() and not path.is_symlink():
                if is_listening(path):
                    raise InputError(
                        f"{option} {path}: a service answers there already; end it before you start another"
                    )
                path.unlink()
            stack.callback(os.umask, os.umask(0o177))  # leaves mode 0600, until the block ends
            listener.bind(str(path))
            listener.listen(_MAX_WAITING_CONNECTIONS)
    except (OSError, InputError) as error:
        listener.close()
        if isinstance(error, InputError):
            raise
        is_file = path.exists() and not path.is_socket()
        raise InputError(
            f"{option} {path}: {'is a file, and no socket; name a path that is free' if is_file else error}"
        ) from None
    return listener


def watch_socket(path: Path) -> Callable[[], str | None]:
    """Return a function that returns a fault if the socket at `path` is not the one of now, or None.

    A socket with a new mode or owner counts as another one.
    """
    first_status = path.stat()
    return lambda: (
        None
        if path.is_socket()
        and os.path.samestat(first_status, path.stat())
        and path.stat().st_ctime_ns == first_status.st_ctime_ns
        else f"{path}: this service's socket is gone from there"
    )


def why_unwritable(*files: Path) -> str | None:
    """Return a fault if a folder of these files is read-only or its disk is full, or None."""
    return next(
        (
            f"{folder}: cannot be written, or its disk is full"
            for folder in (file.parent for file in files)
            if not os.access(folder, os.W_OK) or shutil.disk_usage(folder).free < _MIN_FREE_BYTES
        ),
        None,
    )


def notify_manager(state: str) -> None:
    """Report a state of this service, such as "READY=1", to the manager that NOTIFY_SOCKET names, if any."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            # A leading "@" stands for an abstract socket, and any other is a character of a path.
            manager.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


@contextmanager
def serve_metrics(address: str | None, collect_metrics: Callable[[], Iterable[ServiceMetric]]) -> Iterator[None]:
    """Serve GET /metrics at an address with the current metrics until the block ends.

    Guarantee: no other machine is answered.

    Args:
        address: Number of a port on 127.0.0.1, path of a socket to be made, or None for no service.
        collect_metrics: Function that returns the current metrics, called in the thread of the service.

    Raises:
        InputError: If the address is in use, or cannot be used.
    """
    if address is None:
        yield
        return
    listener = _open_socket(address)

    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_SECONDS

        def do_GET(self) -> None:
            """Answer /metrics with the current metrics as text, and any other path with status 404."""
            is_metrics_path = self.path.partition("?")[0] == "/metrics"
            content = format_metrics(collect_metrics()).encode() if is_metrics_path else b"only /metrics is here\n"
            self.send_response(200 if is_metrics_path else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Log nothing, since requests for metrics are no events."""

    class Server(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore all errors of a request, those of `collect_metrics` included."""

    server = Server(("", 0), Handler, bind_and_activate=False)
    # The listener, which only this machine reaches, takes the place of the socket that the server made.
    server.socket.close()
    server.socket = listener
    listener.listen(_MAX_WAITING_CONNECTIONS)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        if not address.isdecimal():  # before the close, while the socket is this service's own
            Path(address).unlink(missing_ok=True)
        server.server_close()


def _open_socket(address: str) -> socket.socket:
    """Open a socket at a port of 127.0.0.1, or a private Unix socket at a path.

    Raises:
        InputError: If `address` is neither, or no socket can be made there.
    """
    if not address.isdecimal():
        if ":" in address and "/" not in address:
            raise InputError(
                f"--metrics {address}: expected a port's number, for this machine only, or the path of a socket"
            )
        return open_private_socket(Path(address), "--metrics")
    try:
        return socket.create_server(("127.0.0.1", int(address)))
    except (OSError, OverflowError) as error:
        raise InputError(f"--metrics {address}: {error}") from None
