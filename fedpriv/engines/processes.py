"""Processes that an engine starts on this machine: their environment, their ports, and that none is left behind.

python -P -m fedpriv.engines.processes HOME   ends what was started in HOME once its standard input is closed
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from fedpriv.errors import InputError, RunError

ALLOW_ROOT = "FEDPRIV_ALLOW_ROOT"
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_LOG_LEVEL": "WARNING",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # for runs; a SuperNode says when there is a message
}


def refuse_root(option: str) -> None:
    """InputError for root, unless the environment says that it is meant."""
    if os.geteuid() == 0 and os.environ.get(ALLOW_ROOT) != "1":
        raise InputError(
            f"{option} starts servers that run code they are sent, as root here: run it as another user, "
            f"or set {ALLOW_ROOT}=1 in a container that has nothing else"
        )


@contextmanager
def left_by_nobody(home: Path) -> Iterator[None]:
    """Whatever is started with a FLWR_HOME in `home` ends with the block, or with this process, however it ends.

    Guarantee: a process that is killed with SIGKILL in the block leaves none of them running and no `home`:
    another process, in a session of its own, sees the end of a pipe that only this one holds, and ends them.
    """
    command = [sys.executable, "-P", "-m", __name__, str(home)]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        stop_all_of(home)
        watch.kill()
        watch.wait()
        if watch.stdin is not None:
            watch.stdin.close()


def stop_all_of(home: Path) -> None:
    """End all that was started with a FLWR_HOME in `home`, some of it in sessions of its own.

    Their children are ours too: Ray's agents overwrite their environment with a title.
    """
    ours = {process for process in psutil.process_iter() if _is_within(_home_of(process), home)}
    for parent in list(ours):
        with suppress(psutil.NoSuchProcess):
            ours.update(parent.children(recursive=True))
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(ours, timeout=5.0)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)


def _home_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("FLWR_HOME")
    except psutil.Error:
        return None  # gone meanwhile, or another user's


def _is_within(folder: str | None, home: Path) -> bool:
    return folder is not None and Path(folder).is_relative_to(home)


def script(name: str) -> str:
    """A console script of this very Python environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise RunError(f"{path} is missing: install fedpriv with its dependencies into this environment")
    return str(path)


def environment(home: Path) -> dict[str, str]:
    """The environment of a Flower process with a home of its own."""
    scripts = str(Path(sys.executable).parent)
    path = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"  # executors look for flwr-* scripts on the path
    return {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PATH": path}


def free_ports(count: int) -> list[int]:
    """Different TCP ports of this machine that nobody listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


if __name__ == "__main__":
    sys.stdin.buffer.read()
    stop_all_of(Path(sys.argv[1]))
    shutil.rmtree(sys.argv[1], ignore_errors=True)
