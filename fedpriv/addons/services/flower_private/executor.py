"""Executor of a SuperLink's tasks, each a process, of which one that is killed or fails is reported.

    python -P -m fedpriv.addons.services.flower_private.executor ADDRESS FOLDER PARENT TYPE...

ADDRESS is that of a Runtime API, FOLDER has its certificate and the executor's secret, and TYPE is a task's type,
which is the name of the program that does it.
"""

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

from fedpriv.addons.services.certificates import AUTHORITY, SECRET
from fedpriv.addons.services.flower_private.control import Wire, open_client
from fedpriv.addons.services.flower_private.names import ACQUIRE_TASK, TASK_HEARTBEAT, TASK_OUTPUT
from fedpriv.addons.services.service import EXECUTOR, end_when_asked, how, leave_beat, script
from fedpriv.core.errors import printable
from fedpriv.core.logs import log_as_service
from fedpriv.engines.children import end_processes

_log = logging.getLogger("fedpriv.executor")
SERVERAPP, SIMULATION, CLIENTAPP = "flwr-serverapp", "flwr-simulation", "flwr-clientapp"
"""Types of tasks, and Flower's programs for them."""
_METHOD = "/flwr.proto.Runtime/AcquireTask"  # as the secret's signature names the request
_LOOK_SECONDS = 0.5
_START_SECONDS, _BEAT_SECONDS = 300.0, 10.0  # Flower itself takes a task back whose process needs 30 s to start
_END_SECONDS = 2.0  # Flower itself ends a process hard after 5
_NAMES = {SERVERAPP: "a run's server", SIMULATION: "a run's simulation", CLIENTAPP: "an app"}


def executor_command(address: str, folder: Path, *types: str) -> list[str]:
    """The executor of the Runtime API at `address`, which ends when this process does."""
    return [sys.executable, "-P", "-m", __name__, address, str(folder), str(os.getpid()), *types]


@dataclass
class Task:
    """A task's process, and the Runtime API asked with its token."""

    type: str
    run: int
    process: "subprocess.Popen[bytes]"
    wire: Wire
    began: float = field(default_factory=time.monotonic)
    last_beat: float = 0.0

    def beat(self) -> None:
        """Send a heartbeat for a task that takes long to start.  Later its own process does."""
        now = time.monotonic()
        if now - self.began < _START_SECONDS and now - self.last_beat > _BEAT_SECONDS:
            self.last_beat = now
            with suppress(httpx.HTTPError):  # the run was stopped, say
                self.wire.ask(TASK_HEARTBEAT, TASK_HEARTBEAT.request(), timeout=2.0)

    def report(self) -> None:
        """Tell the log and Flower how a process ended that has failed."""
        if self.process.returncode == 0:
            return
        details = f"{_NAMES.get(self.type, 'a task')} {how(self.process.returncode)}"
        _log.error("run %d: %s%s", self.run, details, "; it can be resumed" if self.type == SERVERAPP else "")
        with suppress(httpx.HTTPError):  # Flower's process has mostly said why by itself, and its token is void
            self.wire.ask(TASK_OUTPUT, TASK_OUTPUT.request(sub_status="failed", details=details), timeout=2.0)


def command_of(type_: str, address: str, certificate: Path, parent: int) -> list[str]:
    """The command line of a task's process, which has no token."""
    return [
        *(script(type_), "--runtime-api-address", address),
        *("--root-certificates", str(certificate), "--parent-pid", str(parent)),
    ]


def start_task(command: Sequence[str], token: str) -> "subprocess.Popen[bytes]":
    """Start a task's process, which reads its token from a descriptor of a file that has no name.

    Guarantee: no command line, environment or named file has the token; who has it may read and answer the task's
    messages.
    """
    with tempfile.TemporaryFile() as file:
        file.write(token.encode())
        file.flush()
        number = file.fileno()
        return subprocess.Popen([*command, "--token-file", f"/dev/fd/{number}"], pass_fds=[number])


class Executor:
    """The tasks of one Runtime API."""

    def __init__(self, address: str, folder: Path, parent: int, types: Sequence[str]) -> None:
        self._address, self._certificate, self._parent, self._types = address, folder / AUTHORITY, parent, types
        signer = SuperExecAuthHttpInterceptor(
            master_secret=(folder / SECRET).read_bytes(), protected_methods=[_METHOD]
        )
        self._asking = Wire(open_client(address, self._certificate), lambda _, request: _signed(signer, request))
        self.tasks: list[Task] = []

    def look(self) -> None:
        """Start the next task, and see how those that run are."""
        try:
            answer = self._asking.ask(ACQUIRE_TASK, ACQUIRE_TASK.request(supported_task_types=self._types))
        except httpx.HTTPError as error:  # no beat: a service whose executor gets no answers is ill
            _log.debug("no answer: %s", printable(str(error)))
        else:
            leave_beat(EXECUTOR)
            if (token := answer.token) and answer.task.type in self._types:
                command = command_of(answer.task.type, self._address, self._certificate, self._parent)
                wire = Wire(open_client(self._address, self._certificate), lambda *_: {TASK_TOKEN_HEADER: token})
                self.tasks.append(Task(answer.task.type, answer.task.run_id, start_task(command, token), wire))
        for task in list(self.tasks):
            if task.process.poll() is None:
                task.beat()
            else:
                task.report()
                task.wire.client.close()
                self.tasks.remove(task)


def _signed(signer: SuperExecAuthHttpInterceptor, request: Any) -> Mapping[str, str]:
    """Headers by which a request for tasks shows that its sender has the secret."""
    context: Any = SimpleNamespace(rpc_method=_METHOD, message=request, request=SimpleNamespace(headers={}))
    signer.intercept(context, lambda _: httpx.Response(200))
    return dict(context.request.headers)


def main(address: str, folder: str, parent: str, *types: str) -> NoReturn:
    """Run the command line of `executor_command`."""
    log_as_service()
    end_when_asked()
    executor = Executor(address, Path(folder), int(parent), types)
    try:
        while os.getppid() == int(parent):
            executor.look()
            time.sleep(_LOOK_SECONDS)
        sys.exit("the service that this executor belongs to is gone")
    finally:  # a task that waits for a SuperLink that is gone may never see that it should end
        end_processes([task.process for task in executor.tasks], _END_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
