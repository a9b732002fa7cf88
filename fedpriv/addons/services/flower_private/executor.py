"""Executor of a SuperLink's or SuperNode's tasks, which starts a process for each of them.

    python -P -m fedpriv.addons.services.flower_private.executor ADDRESS FOLDER PARENT TYPE...

ADDRESS is that of a Runtime API.  FOLDER has the API's certificate and the executor's secret.  PARENT is the id of
the process whose end also ends the executor.  TYPE is a type of task, and the name of the program that runs it.

A task is the server, the simulation or a client app of a run.  By its token, a task's process proves to the
Runtime API which task it runs.  Heartbeats tell Flower that the process is alive.

A trial is a process that loads what a run's server loads, and asks the Runtime API over a connection of its own.
It shows before a run whether processes of this machine can start, load their modules and be answered.
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
import psutil
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

from fedpriv.addons.services.certificates import AUTHORITY_FILE, SECRET_FILE
from fedpriv.addons.services.flower_private.control import ApiClient, open_client
from fedpriv.addons.services.flower_private.names import ACQUIRE_TASK, TASK_HEARTBEAT, TASK_OUTPUT
from fedpriv.addons.services.service import (
    EXECUTOR,
    TRIAL,
    describe_exit,
    exit_on_signals,
    script_path,
    write_heartbeat,
)
from fedpriv.core.errors import sanitize_line
from fedpriv.core.logs import configure_service_logging
from fedpriv.engines.children import end_processes

_log = logging.getLogger("fedpriv.executor")
SERVERAPP, SIMULATION, CLIENTAPP = "flwr-serverapp", "flwr-simulation", "flwr-clientapp"
"""Types of tasks, which are the names of Flower's programs for them."""
_SIGNED_METHOD = "/flwr.proto.Runtime/AcquireTask"  # name of the request in the signature by the secret
_POLL_SECONDS = 0.5
# Heartbeats during the start of a task, since Flower takes a task back if its process needs 30 s to start.
_START_SECONDS, _HEARTBEAT_SECONDS = 300.0, 10.0
_END_SECONDS = 2.0  # seconds, since Flower kills a process after 5
_TRIAL_SECONDS = 600.0  # seconds between the starts of two trials, each of which takes a few of a processor
_TRIAL = """import sys
from pathlib import Path
try:
    import fedpriv.server.app
    from fedpriv.addons.services.flower_private.control import open_client
    open_client(sys.argv[1], Path(sys.argv[2])).get("/")
except Exception as error:
    sys.exit(f"a trial of a task failed, as a run's server would: {error!r}"[:300])
"""
"""Program of a trial, whose arguments are the address and the certificate of a Runtime API."""
_TASK_TITLES = {SERVERAPP: "a run's server", SIMULATION: "a run's simulation", CLIENTAPP: "an app"}


def executor_command(address: str, folder: Path, *types: str) -> list[str]:
    """Return the command of an executor for the Runtime API at `address`, which ends with this process."""
    return [sys.executable, "-P", "-m", __name__, address, str(folder), str(os.getpid()), *types]


@dataclass
class TaskProcess:
    """A task's process, and a client of the Runtime API with the task's token."""

    task_type: str
    """Type of the task, the name of its program."""
    run_id: int
    """Run to which the task belongs."""
    process: "subprocess.Popen[bytes]"
    client: ApiClient
    start_time: float = field(default_factory=time.monotonic)
    """Start of the task, on the monotonic clock."""
    last_heartbeat: float = 0.0
    """Last heartbeat from here, on the monotonic clock, or 0."""

    def send_heartbeat(self) -> None:
        """Send a heartbeat for a task that may still be starting.

        Once it has started, its process sends heartbeats.
        """
        now = time.monotonic()
        if now - self.start_time < _START_SECONDS and now - self.last_heartbeat > _HEARTBEAT_SECONDS:
            self.last_heartbeat = now
            with suppress(httpx.HTTPError):  # for example because the run was stopped
                self.client.ask(TASK_HEARTBEAT, TASK_HEARTBEAT.request_type(), timeout=2.0)

    def report_failure(self) -> None:
        """Report to the log and to Flower how the ended process failed, or nothing if its exit code is 0."""
        if self.process.returncode == 0:
            return
        details = f"{_TASK_TITLES.get(self.task_type, 'a task')} {describe_exit(self.process.returncode)}"
        _log.error(
            "run %d: %s%s",
            self.run_id,
            details,
            "; fedpriv's own can be resumed" if self.task_type == SERVERAPP else "",
        )
        # The failed process has mostly reported the reason itself, and then Flower refuses the task's token.
        with suppress(httpx.HTTPError):
            self.client.ask(
                TASK_OUTPUT, TASK_OUTPUT.request_type(sub_status="failed", details=details), timeout=2.0
            )


def task_command(type_: str, address: str, certificate: Path, parent: int) -> list[str]:
    """Return the command of a task's process, without a token."""
    return [
        *(script_path(type_), "--runtime-api-address", address),
        *("--root-certificates", str(certificate), "--parent-pid", str(parent)),
    ]


def find_tasks(parent: int) -> list[psutil.Process]:
    """Find this user's processes of tasks whose executor, which may be gone, belongs to `parent`.

    Those of other users do not count, since anybody can write such a command line.
    """
    return [
        process
        for process in psutil.process_iter(["cmdline", "uids"])
        if f"--parent-pid {parent} " in " ".join(process.info["cmdline"] or ())
        and process.info["uids"].real == os.getuid()
    ]


def start_task(command: Sequence[str], token: str) -> "subprocess.Popen[bytes]":
    """Start a task's process, which reads its token from the descriptor of an unnamed file.

    Guarantee: no command line, environment or named file has the token; a holder of the token may read and answer
    the task's messages.

    Raises:
        OSError: The process or the file cannot be made, such as at the limit of processes.
    """
    with tempfile.TemporaryFile() as file:
        file.write(token.encode())
        file.flush()
        return subprocess.Popen([*command, "--token-file", f"/dev/fd/{file.fileno()}"], pass_fds=[file.fileno()])


class Executor:
    """Executor of one Runtime API's tasks, with a process for each task."""

    def __init__(self, address: str, folder: Path, parent: int, types: Sequence[str]) -> None:
        """Set up an executor without tasks.

        Args:
            address: Address of the Runtime API.
            folder: Folder with the API's certificate and the executor's secret.
            parent: Id of the process to which the executor belongs.
            types: Types of tasks to run.

        Raises:
            OSError: The certificate or the secret cannot be read.
        """
        self._address, self._certificate, self._parent, self._types = (
            address,
            folder / AUTHORITY_FILE,
            parent,
            types,
        )
        signer = SuperExecAuthHttpInterceptor(
            master_secret=(folder / SECRET_FILE).read_bytes(), protected_methods=[_SIGNED_METHOD]
        )
        self._task_client = ApiClient(
            open_client(address, self._certificate), lambda _, request: _signed_headers(signer, request)
        )
        self.tasks: list[TaskProcess] = []
        self.trial: subprocess.Popen[bytes] | None = None
        self._trial_start = time.monotonic()

    def poll_trial(self) -> None:
        """Start a trial every ten minutes, and write how it ended as the heartbeat `TRIAL`.

        None is started beside a task, which needs the memory.  A trial that takes five minutes is killed.

        Raises:
            OSError: The trial cannot be started.  The next call tries again.
        """
        age = time.monotonic() - self._trial_start
        if self.trial is None and age > _TRIAL_SECONDS and not self.tasks:
            self.trial, self._trial_start = (
                subprocess.Popen([sys.executable, "-P", "-c", _TRIAL, self._address, str(self._certificate)]),
                time.monotonic(),
            )
        elif self.trial is not None and (code := self.trial.poll()) is not None:
            self.trial = None
            write_heartbeat(TRIAL, f"a trial of a task {describe_exit(code)}" if code else "")
        elif self.trial is not None and age > _START_SECONDS:
            self.trial.kill()

    def poll(self) -> None:
        """Start the next task, if there is one, and look after the processes of all tasks.

        Flower gets heartbeats of tasks that may still be starting, and reports of tasks that failed.  The
        executor's own heartbeat, on which the health of its service depends, is written after an answer that is no
        refusal.

        Raises:
            OSError: The next task cannot be started.  Flower gets no heartbeat of it, and fails its run.
        """
        try:
            answer = self._task_client.ask(
                ACQUIRE_TASK, ACQUIRE_TASK.request_type(supported_task_types=self._types)
            )
        except httpx.HTTPError as error:
            # No heartbeat: a service whose executor gets no answers is unhealthy.
            _log.debug("no answer: %s", sanitize_line(str(error)))
        else:
            write_heartbeat(EXECUTOR)
            if (token := answer.token) and answer.task.type in self._types:
                self.tasks.append(
                    TaskProcess(
                        answer.task.type,
                        answer.task.run_id,
                        # Before the process, since no process may be left behind if the client cannot be made.
                        client=ApiClient(
                            open_client(self._address, self._certificate), lambda *_: {TASK_TOKEN_HEADER: token}
                        ),
                        process=start_task(
                            task_command(answer.task.type, self._address, self._certificate, self._parent), token
                        ),
                    )
                )
        for task in list(self.tasks):
            if task.process.poll() is None:
                task.send_heartbeat()
            else:
                task.report_failure()
                task.client.client.close()
                self.tasks.remove(task)


def _signed_headers(signer: SuperExecAuthHttpInterceptor, request: Any) -> Mapping[str, str]:
    """Return headers that prove that the sender of a request for tasks has the secret."""
    context: Any = SimpleNamespace(rpc_method=_SIGNED_METHOD, message=request, request=SimpleNamespace(headers={}))
    signer.intercept(context, lambda _: httpx.Response(200))
    return dict(context.request.headers)


def main(address: str, folder: str, parent: str, *types: str) -> NoReturn:
    """Start tasks, and end them when the parent process has ended or SIGTERM or SIGINT comes.

    A process that cannot be started makes the service unhealthy until a trial has ended well (`TRIAL`).

    The arguments are those of the module's command line.
    """
    configure_service_logging()
    exit_on_signals()
    executor = Executor(address, Path(folder), int(parent), types)
    try:
        while os.getppid() == int(parent):
            try:
                executor.poll()
                executor.poll_trial()
            except OSError as error:
                write_heartbeat(TRIAL, f"a task's process cannot be started: {error}")
            time.sleep(_POLL_SECONDS)
        sys.exit("the service that this executor belongs to is gone")
    finally:  # a task that waits for a SuperLink that is gone may never notice that it should end
        end_processes([*filter(None, [executor.trial]), *(task.process for task in executor.tasks)], _END_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
