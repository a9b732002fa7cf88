"""The executor: start a process for each task, that of a ClientApp by a fork of the zygote."""

import logging
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from unittest import mock

from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec import run_superexec as loop
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

from fedpriv.core.logs import log_as_service
from fedpriv.engines.flower_private import serverapp_command
from fedpriv.engines.flower_private.carried import send_contents, take_contents, take_message_with_input
from fedpriv.engines.fork_server import ForkServer
from fedpriv.engines.service import EXECUTOR, how, leave_beat

_log = logging.getLogger("fedpriv.executor")

_END_SECONDS = 2.0  # Flower itself ends a process hard after 5
_FIRST_BEAT = 10.0  # seconds; a task that does not beat is missed after 60
_LOOK_SECONDS = 5.0  # between looks for tasks that no bell announced


class Turns:
    """A stand-in for the loop's module `time`: a sleep after the loop had an answer to its question for tasks.

    A task's process that was killed is told of at once: Flower misses it after a minute.
    """

    def __init__(self, tasks: "list[subprocess.Popen[bytes]]") -> None:
        self._tasks = tasks

    def sleep(self, seconds: float) -> None:
        leave_beat(EXECUTOR)
        for task in [task for task in self._tasks if task.poll() is not None]:
            self._tasks.remove(task)
            if task.returncode < 0:
                _log.error(
                    "a run's server %s; the run ends within a minute, and can be resumed", how(task.returncode)
                )
        time.sleep(seconds)


class Bell:
    """A stand-in for the loop's module `time`: a sleep that ends with the byte that announces a task."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def sleep(self, _seconds: float) -> None:
        leave_beat(EXECUTOR)
        ready, _, _ = select.select([self._descriptor], [], [], _LOOK_SECONDS)
        if ready and not os.read(self._descriptor, 1):
            time.sleep(_LOOK_SECONDS)  # the SuperNode is gone; its launcher ends us, or starts another


def run_superexec(options: Sequence[str], bell: int | None) -> None:
    """`flower-superexec OPTIONS`; with a bell it is a SuperNode's, whose ClientApps are forked."""
    log_as_service()
    server = None if bell is None else _clientapp_server()
    tasks: list[subprocess.Popen[bytes]] = []

    def launch(_executor: SubprocessExecutor, spec: ExecutionSpec) -> LaunchResult:
        if server is not None and spec.task_type == TaskType.CLIENT_APP:
            with suppress(OSError), _token_file(spec) as token:
                server.launch(words_of(spec), token.fileno(), quiet=spec.suppress_output)
                return LaunchResult.accepted()
        tasks.append(launch_process(spec))
        return LaunchResult.accepted()

    with (
        mock.patch.object(SubprocessExecutor, "launch", launch),
        mock.patch.object(sys, "argv", ["flower-superexec", *options]),
        mock.patch.object(loop, "time", Turns(tasks) if bell is None else Bell(bell)),
    ):
        try:
            flower_superexec()
        finally:
            end(tasks)
            if server is not None:
                server.close()


def _clientapp_server() -> ForkServer:
    """Of processes that have imported what every ClientApp needs, and nothing of an app."""
    import httpcore  # noqa: F401 - imported by httpx at a client's first request
    import numpy.random  # noqa: F401 - what a message's arrays are made of
    from flwr.clientapp import ClientApp  # noqa: F401
    from flwr.supernode.cli import flwr_clientapp  # noqa: F401

    return ForkServer.start(run_clientapp)


class LaterHeartbeats(HeartbeatSender):
    """Heartbeats of a task that has just begun, which counts for one: they take a connection of their own.

    A ClientApp has mostly ended before the first.
    """

    def _run(self) -> None:
        if not self._stop_event.wait(_FIRST_BEAT):
            super()._run()


def run_clientapp(words: list[str], token: int) -> None:
    """`flwr-clientapp`, in a process of its own.

    Guarantee: the app that the run names is the app that is imported: what this process has of fedpriv is not in
    its way, since a bundle may have a fedpriv of its own.
    """
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    take_message_with_input()
    take_contents(RuntimeHttpClient)
    send_contents(runtime)
    mock.patch.object(runtime, "HeartbeatSender", LaterHeartbeats).start()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fedpriv", "server", "clients")]:
        del sys.modules[name]
    sys.argv = [*words, "--token-file", f"/dev/fd/{token}"]
    flwr_clientapp()


def launch_process(spec: ExecutionSpec) -> subprocess.Popen[bytes]:
    """Start a task's process with its token in a file without a name, where Flower writes it on the command line.

    Guarantee: no command line says the token; who has it may read and answer the task's messages.
    """
    words = words_of(spec)
    if spec.task_type == TaskType.SERVER_APP:
        words = serverapp_command(words[1:])
    with _token_file(spec) as token:
        return subprocess.Popen(
            [*words, "--token-file", f"/dev/fd/{token.fileno()}"],
            pass_fds=[token.fileno()],
            stdout=subprocess.DEVNULL if spec.suppress_output else None,
            stderr=subprocess.DEVNULL if spec.suppress_output else None,
        )


@contextmanager
def _token_file(spec: ExecutionSpec) -> Iterator[IO[bytes]]:
    """The task's token in a file without a name."""
    with tempfile.TemporaryFile() as token:
        token.write(spec.token.encode())
        token.flush()
        yield token


def words_of(spec: ExecutionSpec) -> list[str]:
    """The command line of a task's process, less its token."""
    return [
        str(Path(sys.executable).with_name(TASK_TYPE_TO_COMMAND[spec.task_type])),
        *(TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type], spec.runtime_api_address),
        *("--root-certificates", str(spec.root_certificates_path), "--parent-pid", str(spec.parent_pid)),
    ]


def end(tasks: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End tasks with their executor: one that waits for a SuperLink that is gone may never see that it should."""
    for task in tasks:
        task.terminate()
    deadline = time.monotonic() + _END_SECONDS
    while any(task.poll() is None for task in tasks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for task in tasks:
        task.kill()
