"""The executor: tokens that nobody else sees, and tasks that fail, which are reported at once."""

import errno
import json
import logging
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from fedpriv.addons.services import service
from fedpriv.addons.services.certificates import CERTIFICATE_FILE, KEY_FILE, SECRET_FILE, make_server_keys
from fedpriv.addons.services.flower_private import executor
from fedpriv.addons.services.flower_private.control import ApiClient
from fedpriv.addons.services.flower_private.executor import (
    CLIENTAPP,
    SERVERAPP,
    SIMULATION,
    Executor,
    TaskProcess,
    executor_command,
    start_task,
    task_command,
)
from fedpriv.addons.services.flower_private.names import (
    ACQUIRE_TASK,
    LIST_RUNS,
    RUNTIME_PREFIX,
    TASK_HEARTBEAT,
    TASK_OUTPUT,
)
from fedpriv.engines.children import end_processes
from tests.engines.builders import Clock
from tests.engines.flower_link import Link

TOKEN = "5ec4e7"


def test_the_token_of_a_task_appears_in_no_command_line_environment_or_named_file(tmp_path: Path) -> None:
    """Guarantee: whoever lists processes or files has no task's messages."""
    seen = tmp_path / "seen.json"
    code = (
        "import json, os, sys\nfrom pathlib import Path\n"
        "file = sys.argv[sys.argv.index('--token-file') + 1]\n"
        "file = Path(file)\n"
        "texts = [Path('/proc/self/cmdline').read_text(), str(os.environ), os.readlink(file), file.read_text()]\n"
        f"Path({str(seen)!r}).write_text(json.dumps([*texts, file.is_file()]))\n"
    )
    assert start_task([sys.executable, "-c", code], TOKEN).wait(timeout=30) == 0
    line, environment, file, token, is_file = json.loads(seen.read_text())
    assert token == TOKEN
    assert is_file, "which Flower asks for"
    assert "(deleted)" in file
    assert TOKEN not in line + environment


@pytest.mark.parametrize("kind", [SERVERAPP, CLIENTAPP, SIMULATION])
def test_the_command_of_a_task_starts_the_flower_program_of_its_type(kind: str, tmp_path: Path) -> None:
    program, *options = task_command(kind, "127.0.0.1:1", tmp_path / "ca.crt", 7)
    assert Path(program).name == kind
    assert options == [
        *("--runtime-api-address", "127.0.0.1:1", "--root-certificates", str(tmp_path / "ca.crt")),
        *("--parent-pid", "7"),
    ]


class RuntimeApi:
    """A Runtime API that notes its requests, and answers with one status."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.requests: list[tuple[str, bytes]] = []

    def task(self, program: str | None) -> TaskProcess:
        """A task of run 7 that has ended."""
        client = httpx.Client(transport=httpx.MockTransport(self._answer), base_url="http://link")
        process: Any = None if program is None else subprocess.Popen([sys.executable, "-c", program])
        if process is not None:
            process.wait()
        return TaskProcess(SERVERAPP, 7, process, ApiClient(client), start_time=1000.0)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append((request.url.path, request.content))
        return httpx.Response(self.status)


KILLED = "was ended by SIGKILL; a machine that runs out of memory does that"


@pytest.mark.parametrize(
    ("code", "words"),
    [("import os; os.kill(os.getpid(), 9)", KILLED), ("raise SystemExit(1)", "ended with exit code 1")],
)
@pytest.mark.parametrize("status", [200, 401])
def test_a_killed_or_failed_task_is_reported_to_flower_at_once(
    code: str, words: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: after a minute, and never for one that ended with 1."""
    runtime = RuntimeApi(status)
    runtime.task(code).report_failure()
    assert caplog.messages == [f"run 7: a run's server {words}; fedpriv's own can be resumed"]
    ((path, content),) = runtime.requests
    output = TASK_OUTPUT.request_type.FromString(content)
    assert (path, output.sub_status, output.details) == (TASK_OUTPUT.path, "failed", f"a run's server {words}")


def test_a_task_that_ends_well_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    runtime = RuntimeApi()
    runtime.task("").report_failure()
    assert not runtime.requests
    assert not caplog.messages


def test_heartbeats_keep_a_slowly_starting_task_alive_for_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At load 30 a process needs more than the 30 s after which Flower takes its token back."""
    clock, runtime = Clock(1000.0), RuntimeApi(401)
    monkeypatch.setattr(executor.time, "monotonic", clock.monotonic)
    task = runtime.task(None)
    for clock.now in (1000.0 + second for second in range(0, 400, 5)):
        task.send_heartbeat()
    assert [path for path, _ in runtime.requests] == [TASK_HEARTBEAT.path] * 20  # each 15 s of 300


def test_a_task_that_ignores_sigterm_is_killed() -> None:
    """A server that waits for a SuperLink that was killed would keep the journal, and no run could be resumed."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    task = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert task.stdout is not None
    with task.stdout:
        task.stdout.readline()
        end_processes([task], 0.2)
        assert task.wait(timeout=10) == -signal.SIGKILL


@pytest.fixture
def beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(service.HEARTBEAT_FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Link:
    (tmp_path / "link").mkdir()
    link = Link(tmp_path / "link")
    monkeypatch.setattr(executor, "open_client", lambda *_: link.client(RUNTIME_PREFIX))
    return link


def executor_of(link: Link) -> Executor:
    """An executor of this SuperLink, whose tasks are programs of Python."""
    return Executor("superlink", link.folder, os.getpid(), [SERVERAPP])


def test_flower_reports_a_killed_server_as_a_failed_run_with_the_reason(
    link: Link, beats: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee: a run whose server is gone has ended within seconds, and its status says why."""
    caplog.set_level(logging.ERROR, "fedpriv")
    monkeypatch.setattr(executor, "task_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    running = executor_of(link)
    running.poll()
    (task,) = running.tasks
    assert (task.task_type, task.run_id) == (SERVERAPP, link.run)
    assert service.read_heartbeat(beats, service.EXECUTOR) is not None
    task.process.kill()
    task.process.wait()
    running.poll()
    assert not running.tasks
    run = link.control.ask(LIST_RUNS, LIST_RUNS.request_type(run_id=link.run)).run_dict[link.run]
    assert (run.status.status, run.status.sub_status) == ("finished", "failed")
    assert run.status.details.startswith("a run's server was ended by SIGKILL")


def test_an_executor_without_the_secret_gets_no_task(
    link: Link, beats: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Would gain: the run, as whoever asks first."""
    caplog.set_level(logging.DEBUG, "fedpriv")
    own, stranger = executor_of(link), executor_of(link)
    request = ACQUIRE_TASK.request_type(supported_task_types=[SERVERAPP])
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        ApiClient(link.client(RUNTIME_PREFIX)).ask(ACQUIRE_TASK, request)
    stranger._task_client = link.signing_client(b"x" * 32)
    stranger.poll()
    assert not stranger.tasks
    assert service.read_heartbeat(beats, service.EXECUTOR) is None, "a service whose executor is refused is ill"
    assert "401" in caplog.text
    assert own._task_client.ask(ACQUIRE_TASK, request).token


@pytest.fixture
def certified(tmp_path: Path) -> Path:
    """A folder with certificates and a secret, as a service makes it."""
    make_server_keys(tmp_path)
    (tmp_path / SECRET_FILE).write_bytes(b"x" * 32)
    return tmp_path


def test_a_task_of_another_type_is_not_started(certified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperLink that a silo's executor does not ask names a program."""
    running = Executor("127.0.0.1:1", certified, os.getpid(), [CLIENTAPP])
    answer = ACQUIRE_TASK.answer_type(token=TOKEN)
    answer.task.type = "../../bin/sh"
    monkeypatch.setattr(running._task_client, "ask", lambda *_: answer)
    monkeypatch.setattr(executor, "start_task", None)
    running.poll()
    assert not running.tasks


@pytest.fixture
def address(certified: Path) -> Iterator[str]:
    """Address of a Runtime API that knows nothing, over TLS with the folder's certificate."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certified / CERTIFICATE_FILE, certified / KEY_FILE)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def finish_trial(running: Executor, clock: Clock) -> None:
    """Let the time come for a trial, and wait for its end."""
    clock.now += 601.0
    running.poll_trial()
    assert running.trial is not None
    running.trial.wait(timeout=120)
    running.poll_trial()
    assert running.trial is None


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", ["answered", "nobody there", "another certificate", "not to be loaded"])
def test_a_service_is_unhealthy_if_a_trial_task_cannot_start_or_connect(
    certified: Path, address: str, beats: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: healthy, until a run failed: its loop turned, and asked over a connection from before."""
    clock = Clock(time.monotonic())
    monkeypatch.setattr(executor.time, "monotonic", clock.monotonic)
    if kind in ("nobody there", "another certificate"):  # what a run's server loads takes seconds
        assert "import fedpriv.server.app" in executor._TRIAL
        monkeypatch.setattr(executor, "_TRIAL", executor._TRIAL.replace("import fedpriv.server.app", "pass"))
    running = Executor("127.0.0.1:1" if kind == "nobody there" else address, certified, os.getpid(), [SERVERAPP])
    running.poll_trial()
    assert running.trial is None, "a run that has just been started has no trial beside it"
    if kind == "another certificate":
        make_server_keys(certified)
    elif kind == "not to be loaded":
        (certified / "torch.py").write_text("raise ImportError('half an upgrade')\n")
        monkeypatch.setenv("PYTHONPATH", str(certified))
    finish_trial(running, clock)
    fault = service.why_stalled(beats, service.EXECUTOR, clock.now)
    assert fault == (None if kind == "answered" else "a trial of a task ended with exit code 1")
    if kind == "not to be loaded":
        (certified / "torch.py").unlink()
        finish_trial(running, clock)
        assert service.why_stalled(beats, service.EXECUTOR, clock.now) is None, "the next trial was answered"


def test_a_hanging_trial_task_is_killed_and_no_trial_runs_beside_a_task(
    certified: Path, beats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1000.0)
    monkeypatch.setattr(executor.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(executor, "_TRIAL", "import time; time.sleep(600)")
    running = Executor("127.0.0.1:1", certified, os.getpid(), [SERVERAPP])
    running.tasks = [RuntimeApi().task("")]
    clock.now += 1000.0
    running.poll_trial()
    assert running.trial is None
    running.tasks = []
    running.poll_trial()
    assert running.trial is not None
    clock.now += 301.0
    running.poll_trial()
    running.trial.wait(timeout=60)
    running.poll_trial()
    fault = service.why_stalled(beats, service.EXECUTOR, clock.now)
    assert fault == "a trial of a task was ended by SIGKILL; a machine that runs out of memory does that"


@pytest.mark.parametrize("kind", ["trial", "task"])
def test_an_executor_lives_on_and_is_unhealthy_while_no_process_can_be_started(
    certified: Path, beats: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: the executor ended by an OSError, and its SuperLink with it, at the limit of processes."""
    clock = Clock(1000.0)

    def refuse_process(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    answers = iter([ACQUIRE_TASK.answer_type(token=TOKEN)] if kind == "task" else [])

    def ask(*_: Any) -> Any:
        answer = next(answers, ACQUIRE_TASK.answer_type())
        answer.task.type = SERVERAPP
        return answer

    def sleep(seconds: float) -> None:
        clock.now += 400.0
        if clock.now > 2500.0:
            sys.exit(3)

    monkeypatch.setattr(executor, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=sleep))
    monkeypatch.setattr(subprocess, "Popen", refuse_process)
    monkeypatch.setattr(executor, "exit_on_signals", lambda: None)
    monkeypatch.setattr(executor, "configure_service_logging", lambda: None)
    if kind == "task":
        monkeypatch.setattr(executor, "_TRIAL_SECONDS", 1e9)
    monkeypatch.setattr(ApiClient, "ask", lambda _self, *arguments: ask(*arguments))
    with pytest.raises(SystemExit) as ended:
        executor.main("127.0.0.1:1", str(certified), str(os.getppid()), SERVERAPP)
    assert ended.value.code == 3, "by this test, after some turns"
    fault = service.last_beat(beats, service.TRIAL, 0.0).error
    assert fault == "a task's process cannot be started: [Errno 11] Resource temporarily unavailable"


@pytest.mark.slow
def test_an_executor_ends_with_the_process_that_started_it(certified: Path) -> None:
    command = ", ".join(map(repr, executor_command("127.0.0.1:1", certified, SERVERAPP)))
    command = command.replace(f"'{os.getpid()}'", "str(os.getpid())")  # its parent is the program, not this test
    code = f"import os, subprocess, time; print(subprocess.Popen([{command}]).pid, flush=True); time.sleep(60)"
    environment = {**os.environ, "TMPDIR": str(certified)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True, env=environment) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        time.sleep(1.0)
        parent.kill()
    deadline = time.monotonic() + 60.0
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_tasks_left_by_a_killed_executor_are_found_by_its_process_id() -> None:
    """A run failed for ever: its next server found the one that the killed executor had left at its journal."""
    command = executor.task_command(executor.SERVERAPP, "127.0.0.1:1", Path("ca.crt"), 123456789)
    program = "import time; print(flush=True); time.sleep(60)"
    arguments = command[command.index("--runtime-api-address") :]
    with subprocess.Popen([sys.executable, "-c", program, *arguments, "--token-file", "x"], stdout=-1) as task:
        assert task.stdout is not None
        task.stdout.readline()
        assert [process.pid for process in executor.find_tasks(123456789)] == [task.pid]
        assert executor.find_tasks(12345678) == []
        end_processes(executor.find_tasks(123456789))
        task.wait(timeout=10)
    assert executor.find_tasks(123456789) == []
