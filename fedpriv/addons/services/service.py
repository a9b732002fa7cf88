"""The life of a service: one process owns it, and the processes that it starts are its parts.

A part that dies ends the service: with an exit code that is not 0, and a line that says which part and how.  One
that only lost the other side of the network is started again, for ever.  Unasked, a service never ends with 0.

Each part that works in turns leaves a beat in a file after a turn.  The service's health is read off these: it is
that of this service and of no other.
"""

import json
import logging
import os
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

from fedpriv.core.errors import InputError, RunError, refuse, sanitize_line
from fedpriv.protocol.frames import receive_json, send_frame
from fedpriv.silo.metrics import open_private_socket

_log = logging.getLogger("fedpriv.service")

HEARTBEAT_FOLDER_VARIABLE = "FEDPRIV_BEATS"
"""The environment variable that names the folder with the beats of a service's parts."""
EXECUTOR, SUPERNODE = "executor", "SuperNode"
LOST_EXIT_CODE = 75
"""The exit code of a part that lost the other side of the network, and of nothing else."""
_STALL_SECONDS = 60.0
"""Seconds since the last beat of a part after which its service calls itself ill; a turn takes 5."""


class Heartbeat(NamedTuple):
    """The last turn of a part, and what went wrong since then, or nothing; times by the monotonic clock."""

    last_success: float
    last_attempt: float
    """Time of the last try, whether it did its work or not."""
    error: str


def write_heartbeat(part: str, error: str = "") -> None:
    """Note that `part`, which is this process, did its work, or the `trouble` for which it could not."""
    if (folder := os.environ.get(HEARTBEAT_FOLDER_VARIABLE)) is None:
        return
    path, now = Path(folder, part), time.monotonic()
    at = last_beat(path.parent, part, now).last_success if error else now
    new = path.with_suffix(f".{threading.get_native_id()}")
    with suppress(OSError):  # the folder goes with the service
        new.write_text(f"{at} {now}\n{error}", encoding="utf-8")
        new.replace(path)


def read_heartbeat(folder: Path, part: str) -> Heartbeat | None:
    """The last beat of `part`, None if there was none yet."""
    try:
        times, _, trouble = (folder / part).read_text(encoding="utf-8").partition("\n")
        at, tried = times.split()
        return Heartbeat(float(at), float(tried), sanitize_line(trouble, 200))
    except (OSError, ValueError):
        return None


def last_beat(folder: Path, part: str, began: float) -> Heartbeat:
    """Return the last beat of `part`, or one at `began` if there was none yet."""
    return read_heartbeat(folder, part) or Heartbeat(began, began, "")


def why_stalled(folder: Path, part: str, began: float) -> str | None:
    """Say that `part` has left no beat for a minute; None if it has, or began since."""
    silent = time.monotonic() - max(began, last_beat(folder, part, began).last_attempt)
    return f"its {part} has done nothing for {silent:.0f} s" if silent > _STALL_SECONDS else None


def describe_exit(code: int) -> str:
    """Say in words how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    why = "; a machine that runs out of memory does that" if code == -signal.SIGKILL else ""
    return f"was ended by {name}{why}"


def lost_part_error(service: str, part: str, code: int) -> RunError:
    """The error with which a service ends whose part has ended."""
    return RunError(f"{service}: its {part} {describe_exit(code)}, and the service ends with it; start it again")


class OutageLog:
    """Say once that the other side is away, then once a minute since when, and once that it is back."""

    def __init__(self, subject: str) -> None:
        self._subject, self._last_report = subject, 0.0
        self._outage_start: float | None = None

    def report_outage(self, since: float, reason: str) -> None:
        """`since` is by the monotonic clock."""
        now = time.monotonic()
        if self._outage_start is not None and now - self._last_report < 60.0:
            return
        self._outage_start = since if self._outage_start is None else self._outage_start
        self._last_report, seconds = now, now - self._outage_start
        clock, why = time.strftime("%H:%M:%S", time.gmtime(time.time() - seconds)), f": {reason}" if reason else ""
        _log.warning("no %s since %s UTC (%.0f min)%s; trying again", self._subject, clock, seconds / 60.0, why)

    def report_recovery(self) -> None:
        if self._outage_start is not None:
            _log.info("%s is back after %.0f s", self._subject, time.monotonic() - self._outage_start)
            self._outage_start = None


def exit_on_signals() -> None:
    """Let SIGTERM and SIGINT end this process as asked: with 128 and their number."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda asked, _: sys.exit(128 + asked))


HealthCheck = Callable[[], str | None]
"""Says what ails a service, None if nothing does."""


@contextmanager
def health_socket(path: Path, health: HealthCheck) -> Iterator[None]:
    """Answer {"healthy": true} on a Unix socket of mode 0600, as a guard does; InputError if it cannot be made."""
    with open_private_socket(path, "--health") as listener:
        threading.Thread(target=_answer_health, args=(listener, health), daemon=True).start()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _answer_health(listener: socket.socket, health: HealthCheck) -> None:
    while listener.fileno() >= 0:
        with suppress(OSError, ValueError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(2.0)
                receive_json(connection, 1000, 2.0)
                ails = health()
                answer = {"healthy": ails is None} | ({"why": ails} if ails else {})
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
    """A console script of this very Python environment."""
    path = Path(sys.executable).with_name(name)
    refuse(
        {f"{path} is missing: install fedpriv with its dependencies into this environment": not path.exists()},
        RunError,
    )
    return str(path)


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of a Flower process with a home of its own."""
    return {
        **os.environ,
        **_FLOWER_SETTINGS,
        "FLWR_HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # has Flower's programs
    }


def start_logged(command: Sequence[str], home: Path, name: str, **variables: str) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, which has `home`, and appends what it says to NAME.log there."""
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
    """The end of a log, to be put behind a message."""
    text = (home / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    return "\n".join([":", *map(sanitize_line, text.splitlines()[-lines:])]) if text else ""


def free_port() -> int:
    """A TCP port of this machine that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def state_root() -> Path:
    """Folder for what fedpriv keeps between starts, for this user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedpriv"


def service_folder(name: str, socket: Path | None) -> Path:
    """Folder for the files of a running service: beside its socket, or in its user's state folder.

    Neither is a folder from which hosts delete old files, as they do from /tmp.
    """
    return state_root() / f"{name}-{os.getpid()}" if socket is None else socket.with_name(f"{socket.name}.d")


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """`folder`, empty and of mode 0700, gone when the block is left; one of a service that was killed is replaced.

    Raises:
        InputError: it cannot be made.
    """
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
