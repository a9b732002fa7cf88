"""Child processes of an engine end with it, by a process of their own if the engine is killed.

python -P -m fedpriv.engines.children HOME   ends what was started in HOME once its standard input is closed
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


def refuse_root(option: str) -> None:
    """InputError for root, unless the environment says that it is meant."""
    if os.geteuid() == 0 and os.environ.get(ALLOW_ROOT) != "1":
        raise InputError(
            f"{option} starts servers that run code they are sent, as root here: run it as another user, "
            f"or set {ALLOW_ROOT}=1 in a container that has nothing else"
        )


@contextmanager
def reap_processes(home: Path) -> Iterator[None]:
    """Whatever is started with a FLWR_HOME in `home` ends with the block, or with this process, however it ends.

    Guarantee: a process that is killed with SIGKILL in the block leaves none of them running and no `home`:
    another process, in a session of its own, sees the end of a pipe that only this one holds, and ends them.  If
    that process is killed, this one starts another within a second.
    """
    command, over = [sys.executable, "-P", "-m", __name__, str(home)], threading.Event()

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    helper = start()

    def replace_lost() -> None:  # its end is seen at once: nobody else would end what is left
        nonlocal helper
        while not over.wait(_CHECK_SECONDS):
            if helper.poll() is not None:
                helper.communicate()
                helper = start()

    thread = threading.Thread(target=replace_lost, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        end_processes_in(home)
        helper.kill()
        helper.communicate()


def end_processes_in(home: Path) -> None:
    """End all that was started with a FLWR_HOME in `home`, some of it in sessions of its own.

    Their children are ours too: Ray's agents overwrite their environment with a title.
    """
    ours = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, or another user's
            if Path(process.environ().get("FLWR_HOME", "/")).is_relative_to(home):
                ours.add(process)
    for parent in list(ours):
        with suppress(psutil.NoSuchProcess):
            ours.update(parent.children(recursive=True))
    end_processes(ours)


def end_processes(processes: Collection[Any], seconds: float = 5.0) -> None:
    """Ask processes, of psutil or of subprocess, to end, and kill those that have not after so many seconds."""
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
