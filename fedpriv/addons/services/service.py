"""Life of a service: a process that owns the processes it starts, which are its parts.

A silo's node and an executor write heartbeats to files, on which the service's health depends.
"""

import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_state_path

from fedpriv.core.errors import InputError, RunError, refuse, sanitize_line
from fedpriv.data.named import RECORDS_FOLDER_VARIABLE
from fedpriv.protocol.frames import receive_json, send_frame
from fedpriv.silo.metrics import open_private_socket

_log = logging.getLogger("fedpriv.service")

HEARTBEAT_FOLDER_VARIABLE = "FEDPRIV_BEATS"
"""Environment variable that names the folder with the heartbeats of a service's parts."""
EXECUTOR, SUPERNODE, TRIAL = "executor", "SuperNode", "trial"
LOST_EXIT_CODE = 75
"""Exit code of a silo's node that lost its SuperLink, or the process that supervises it."""
_STALL_SECONDS = 60.0
"""Seconds without a heartbeat after which a service is unhealthy."""
_MIN_FILES = 256
"""Open files that a service needs, with some silos and runs."""


class Heartbeat(NamedTuple):
    """Last attempt of a part to do its work.  Times are in seconds of the monotonic clock."""

    last_success: float
    """Time of the last attempt that did its work, or of the first attempt if none did."""
    last_attempt: float
    """Time of the last attempt, successful or not."""
    error: str
    """Error of the last attempt, or ""."""


def write_heartbeat(part: str, error: str = "") -> None:
    """Record that `part` did its work, or the error that prevented it.

    With an error the time of the last success stays, or is the present time if there is no heartbeat yet.  Outside
    a service nothing is recorded.
    """
    if (folder := os.environ.get(HEARTBEAT_FOLDER_VARIABLE)) is None:
        return
    path, now = Path(folder, part), time.monotonic()
    last_success = last_beat(path.parent, part, now).last_success if error else now
    # Several threads write heartbeats, each to a file of its own that then replaces the last heartbeat.
    temporary_file = path.with_suffix(f".{threading.get_native_id()}")
    with suppress(OSError):  # the folder is deleted with the service
        temporary_file.write_text(f"{last_success} {now}\n{error}", encoding="utf-8")
        temporary_file.replace(path)


def read_heartbeat(folder: Path, part: str) -> Heartbeat | None:
    """Return the last heartbeat of `part`, or None without a readable one."""
    try:
        times, _, error = (folder / part).read_text(encoding="utf-8").partition("\n")
        last_success, last_attempt = times.split()
        return Heartbeat(float(last_success), float(last_attempt), sanitize_line(error, 200))
    except (OSError, ValueError):
        return None


def last_beat(folder: Path, part: str, began: float) -> Heartbeat:
    """Return the last heartbeat of `part`, or before the first one a heartbeat at time `began`."""
    return read_heartbeat(folder, part) or Heartbeat(began, began, "")


def why_stalled(folder: Path, part: str, began: float) -> str | None:
    """Return the fault of `part`, which was started at time `began`, or None.

    A part without an attempt for a minute is at fault.  Otherwise the error of the last trial of a task is the
    fault, if there is one.
    """
    idle_seconds = time.monotonic() - max(began, last_beat(folder, part, began).last_attempt)
    fault = f"its {part} has done nothing for {idle_seconds:.0f} s" if idle_seconds > _STALL_SECONDS else ""
    return fault or last_beat(folder, TRIAL, began).error or None


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its exit code.

    A negative code is minus the number of the signal that ended the process.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    return (
        f"was ended by {signal.Signals(-code).name if -code in set(signal.Signals) else -code}"
        + "; a machine that runs out of memory does that" * (code == -signal.SIGKILL)
    )


def lost_part_error(service: str, part: str, code: int) -> RunError:
    """Return the error with which a service ends if a part has ended."""
    return RunError(f"{service}: its {part} {describe_exit(code)}, and the service ends with it; start it again")


class OutageLog:
    """Log of outages: a line at the start, at most one a minute after it, and one at the end."""

    def __init__(self, subject: str) -> None:
        self._subject, self._last_report = subject, 0.0
        self._outage_start: float | None = None

    def report_outage(self, since: float, reason: str) -> None:
        """Log an outage, unless the last line about it is less than a minute old.

        Args:
            since: Start of the outage by the monotonic clock.  The value in the first call for an outage counts.
            reason: Reason that the line names, or "".
        """
        now = time.monotonic()
        if self._outage_start is not None and now - self._last_report < 60.0:
            return
        self._outage_start = since if self._outage_start is None else self._outage_start
        self._last_report, seconds = now, now - self._outage_start
        start, suffix = (
            time.strftime("%H:%M:%S", time.gmtime(time.time() - seconds)),
            f": {reason}" if reason else "",
        )
        _log.warning("no %s since %s UTC (%.0f min)%s; trying again", self._subject, start, seconds / 60.0, suffix)

    def report_recovery(self) -> None:
        """Log the end of an outage if there was one."""
        if self._outage_start is not None:
            _log.info("%s is back after %.0f s", self._subject, time.monotonic() - self._outage_start)
            self._outage_start = None


def raise_file_limit(service: str) -> None:
    """Raise this process's limit of open files to the largest that the machine allows.

    Raises:
        InputError: The machine allows fewer than a service needs.
    """
    _, allowed_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    refuse(
        {
            f"{service}: {allowed_files} open files are allowed, and {_MIN_FILES} are needed; raise LimitNOFILE= "
            "of its unit, or `ulimit -n`": allowed_files != resource.RLIM_INFINITY and allowed_files < _MIN_FILES
        }
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed_files, allowed_files))


def exit_on_signals() -> None:
    """Let SIGTERM and SIGINT end this process, with exit code 128 plus their number."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signal_number, _: sys.exit(128 + signal_number))


HealthCheck = Callable[[], str | None]
"""Function that returns the fault of a service, or None if it is healthy."""


@contextmanager
def health_socket(path: Path, health: HealthCheck) -> Iterator[None]:
    """Answer {"healthy": true} or {"healthy": false, "why": fault} on a Unix socket of mode 0600.

    The socket is removed at the end of the block.

    Raises:
        InputError: The socket cannot be made.
    """
    with open_private_socket(path, "--health") as listener:
        threading.Thread(target=_answer_health, args=(listener, health), daemon=True).start()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _answer_health(listener: socket.socket, health: HealthCheck) -> None:
    """Answer requests to the socket with the health of the service, one after another.

    A request is any JSON object of at most 1,000 bytes.  Others get no answer.
    """
    while listener.fileno() >= 0:
        # A stranger may send anything.
        with suppress(OSError, ValueError, RecursionError), listener.accept()[0] as connection:
            connection.settimeout(2.0)
            receive_json(connection, 1000, 2.0)
            answer = {"healthy": True} if (fault := health()) is None else {"healthy": False, "why": fault}
            send_frame(connection, json.dumps(answer).encode())


_FLOWER_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_LOG_LEVEL": "WARNING",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
}


def script_path(name: str) -> str:
    """Return the path of a console script of this Python environment.

    Raises:
        RunError: The script is missing.
    """
    path = Path(sys.executable).with_name(name)
    refuse(
        {f"{path} is missing: install fedpriv with its dependencies into this environment": not path.exists()},
        RunError,
    )
    return str(path)


def flower_environment(home: Path) -> dict[str, str]:
    """Return this process's environment with Flower's settings, and `home` as Flower's home."""
    return {
        **os.environ,
        **_FLOWER_SETTINGS,
        "FLWR_HOME": str(home),
        RECORDS_FOLDER_VARIABLE: os.environ.get(RECORDS_FOLDER_VARIABLE, os.getcwd()),  # Flower starts elsewhere
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # has Flower's programs
    }


def start_logged(command: Sequence[str], home: Path, name: str, **variables: str) -> "subprocess.Popen[bytes]":
    """Start a process in a new session, which appends its output to NAME.log in the folder `home`.

    The environment is that of `flower_environment`, with `variables` added.
    """
    (home / "empty").mkdir(exist_ok=True)  # a working directory precedes an app on Flower's import path
    with (home / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=home / "empty",
            env={**flower_environment(home), **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def log_tail(home: Path, name: str, lines: int) -> str:
    """Return the last lines of NAME.log, to be appended to a message, or "" for an empty log.

    The text begins with a colon and a line break.
    """
    text = (home / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    return "\n".join([":", *map(sanitize_line, text.splitlines()[-lines:])]) if text else ""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def state_root() -> Path:
    """Return the folder for files that fedpriv keeps between starts, for this user."""
    return user_state_path("fedpriv", appauthor=False)


def service_folder(name: str, socket: Path | None) -> Path:
    """Return the folder for a running service's files: beside its socket, or in its user's state folder.

    The state folder is not /tmp, where hosts delete old files.
    """
    return state_root() / f"{name}-{os.getpid()}" if socket is None else socket.with_name(f"{socket.name}.d")


_OWN_STEMS = {"ca", "server", "superexec", "refused", "node", EXECUTOR, SUPERNODE, TRIAL}
"""Names, without endings, of the files in the folder of a running service."""


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """Make an empty `folder` of mode 0700, and delete it with its files at the end of the block.

    The folder that a killed service has left behind is replaced.

    Raises:
        InputError: The folder cannot be made, or has files that are none of a service's.
        OSError: An existing folder cannot be read.
    """
    refuse(
        {
            f"{path}: is no file of a service, and its folder would be replaced; move it away": (
                # The draft of NAME is .NAME.PID (`write_bytes`), and a killed service may leave it.
                (path.stem if path.name[0] != "." else path.name.split(".")[1]) not in _OWN_STEMS
            )
            for path in (folder.iterdir() if folder.is_dir() else ())
        }
    )
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise InputError(f"{folder}: the service's own files cannot be there ({error.strerror})") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
