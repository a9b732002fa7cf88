"""End the child processes of an engine with the engine, even if the engine is killed.

An engine gives its children the environment variable FLWR_HOME, which is the engine's temporary folder HOME or a
path in it.  The variable is inherited, so that it marks their children, too.

`python -P -m fedpriv.engines.children HOME` waits until its standard input is closed, then ends the processes
whose FLWR_HOME is HOME or in it, with their descendants, and removes HOME.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from fedpriv.core.errors import InputError

ALLOW_ROOT = "FEDPRIV_ALLOW_ROOT"
_CHECK_SECONDS = 0.5
"""Seconds between two checks that the helper process is alive."""


def refuse_root(option: str) -> None:
    """Raise InputError for root, unless the environment variable FEDPRIV_ALLOW_ROOT is 1.

    The message names `option`, which starts servers.
    """
    if os.geteuid() == 0 and os.environ.get(ALLOW_ROOT) != "1":
        raise InputError(
            f"{option} starts servers that run code they are sent, as root here: run it as another user, "
            f"or set {ALLOW_ROOT}=1 in a container that has nothing else"
        )


@contextmanager
def reap_processes(home: Path) -> Iterator[None]:
    """End the processes whose FLWR_HOME is `home` or in it at the end of this context or of this process.

    Guarantee: if this process is killed with SIGKILL in the block, none of these processes stays, nor does `home`.
    A helper process in its own session then sees the end of a pipe that only this process holds open, ends the
    processes and removes `home`.  If the helper is killed, this process starts another within a second.  If both
    are killed within this second, the processes stay.

    At the usual end of the block the processes are ended as well, and `home` is left to the caller.
    """
    command, stop = [sys.executable, "-P", "-m", __name__, str(home)], threading.Event()

    def start_helper() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            start_new_session=True,
            # This process may have FLWR_HOME by now, with which the helper would end itself.
            env={name: value for name, value in os.environ.items() if name != "FLWR_HOME"},
        )

    helper = start_helper()

    def replace_lost() -> None:  # without a helper, no process would end the children
        nonlocal helper
        while not stop.wait(_CHECK_SECONDS):
            if helper.poll() is not None:
                helper.communicate()
                helper = start_helper()

    thread = threading.Thread(target=replace_lost, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        end_processes_in(home)
        helper.kill()
        helper.communicate()


def end_processes_in(home: Path) -> None:
    """End the processes of this machine whose variable FLWR_HOME is `home` or a path in it.

    The descendants of these processes are ended, too, because Ray's agents overwrite their environment.  Other
    processes whose environment this user may not read are left alone.
    """
    processes = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended meanwhile, or another user's process
            if Path(process.environ().get("FLWR_HOME", "/")).is_relative_to(home):
                processes.add(process)
    for parent in list(processes):
        with suppress(psutil.NoSuchProcess):
            processes.update(parent.children(recursive=True))
    end_processes(processes)


def end_processes(processes: Collection[Any], seconds: float = 5.0) -> None:
    """Terminate processes with SIGTERM, and kill those that still run after `seconds` seconds.

    Args:
        processes: Objects of psutil or of subprocess.
        seconds: Longest wait between SIGTERM and SIGKILL.
    """
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_processes_in(Path(sys.argv[1]))
    shutil.rmtree(sys.argv[1], ignore_errors=True)
