"""The executor: tokens that nobody else sees, and tasks that fail, which are reported at once."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedpriv.addons.services import service
from fedpriv.addons.services.certificates import SECRET_FILE, make_server_keys
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
from tests.engines.flower_link import Link

TOKEN = "5ec4e7"


def test_a_tasks_token_is_on_no_command_line_and_in_no_environment_or_named_file(tmp_path: Path) -> None:
    """Guarantee: whoever lists processes or files has no task's messages."""
    seen = tmp_path / "seen.json"
    code = (
        "import json, os, sys\nfrom pathlib import Path\n"
        "file = sys.argv[sys.argv.index('--token-file') + 1]\n"
        "told = [Path('/proc/self/cmdline').read_text(), str(os.environ), os.readlink(file)]\n"
        "told.append(Path(file).read_text())\n"
        f"Path({str(seen)!r}).write_text(json.dumps([*told, Path(file).is_file()]))\n"
    )
    assert start_task([sys.executable, "-c", code], TOKEN).wait(timeout=30) == 0
    line, environment, file, token, is_file = json.loads(seen.read_text())
    assert token == TOKEN
    assert is_file, "which Flower asks for"
    assert "(deleted)" in file
    assert TOKEN not in line + environment


@pytest.mark.parametrize("kind", [SERVERAPP, CLIENTAPP, SIMULATION])
def test_a_tasks_command_is_flowers_own(kind: str, tmp_path: Path) -> None:
    program, *options = task_command(kind, "127.0.0.1:1", tmp_path / "ca.crt", 7)
    assert Path(program).name == kind
    assert options == [
        *("--runtime-api-address", "127.0.0.1:1", "--root-certificates", str(tmp_path / "ca.crt")),
        *("--parent-pid", "7"),
    ]


class Said:
    """A Runtime API that notes what it is asked, and refuses where it should."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.requests: list[tuple[str, bytes]] = []

    def wire(self) -> ApiClient:
        def answer(request: httpx.Request) -> httpx.Response:
            self.requests.append((request.url.path, request.content))
            return httpx.Response(self.status)

        return ApiClient(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://link"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "was ended by SIGKILL; a machine that runs out of memory does that",
        ),
        ("raise SystemExit(1)", "ended with exit code 1"),
    ],
)
@pytest.mark.parametrize("status", [200, 401])
def test_a_task_that_is_killed_or_fails_is_reported_at_once(
    code: str, words: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: after a minute, and never for one that ended with 1."""
    said = Said(status)
    task = TaskProcess(SERVERAPP, 7, subprocess.Popen([sys.executable, "-c", code]), said.wire())
    task.process.wait()
    task.report_failure()
    assert caplog.messages == [f"run 7: a run's server {words}; it can be resumed"]
    ((path, content),) = said.requests
    told = TASK_OUTPUT.request_type.FromString(content)
    assert (path, told.sub_status, told.details) == (TASK_OUTPUT.path, "failed", f"a run's server {words}")


def test_a_task_that_ends_well_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    said = Said()
    task = TaskProcess(SERVERAPP, 7, subprocess.Popen([sys.executable, "-c", ""]), said.wire())
    task.process.wait()
    task.report_failure()
    assert not said.requests
    assert not caplog.messages


def test_a_task_that_starts_slowly_is_kept_alive_for_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At load 30 a process needs more than the 30 s after which Flower takes its token back."""
    clock, said = [1000.0], Said(401)
    monkeypatch.setattr(executor.time, "monotonic", lambda: clock[0])
    task = TaskProcess(SERVERAPP, 7, None, said.wire(), start_time=1000.0)  # type: ignore[arg-type]
    for clock[0] in [1000.0 + second for second in range(0, 400, 5)]:
        task.send_heartbeat()
    assert {path for path, _ in said.requests} == {TASK_HEARTBEAT.path}
    assert len(said.requests) == 20  # each 15 s of 300


def test_a_task_that_does_not_end_when_told_is_ended_with_its_executor() -> None:
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


def of_link(link: Link, monkeypatch: pytest.MonkeyPatch) -> Executor:
    """An executor of this SuperLink, whose tasks are programs of Python."""
    monkeypatch.setattr(executor, "open_client", lambda *_: link.client(RUNTIME_PREFIX))
    return Executor("superlink", link.folder, os.getpid(), [SERVERAPP])


def test_a_server_that_is_killed_is_told_to_flower_with_its_reason(
    tmp_path: Path, beats: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee: a run whose server is gone has ended within seconds, and its status says why."""
    caplog.set_level(logging.ERROR, "fedpriv")
    folder = tmp_path / "link"
    folder.mkdir()
    link = Link(folder)
    monkeypatch.setattr(executor, "task_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    running = of_link(link, monkeypatch)
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


def test_nobody_without_the_secret_gets_a_task(
    tmp_path: Path, beats: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would gain: the run, as whoever asks first."""
    caplog.set_level(logging.DEBUG, "fedpriv")
    folder = tmp_path / "link"
    folder.mkdir()
    link = Link(folder)
    own, stranger = of_link(link, monkeypatch), of_link(link, monkeypatch)
    request = ACQUIRE_TASK.request_type(supported_task_types=[SERVERAPP])
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        ApiClient(link.client(RUNTIME_PREFIX)).ask(ACQUIRE_TASK, request)
    signer = executor.SuperExecAuthHttpInterceptor(
        master_secret=b"x" * 32, protected_methods=[executor._SIGNED_METHOD]
    )
    stranger._task_client = ApiClient(
        link.client(RUNTIME_PREFIX), lambda _, request: executor._signed_headers(signer, request)
    )
    stranger.poll()
    assert not stranger.tasks
    assert service.read_heartbeat(beats, service.EXECUTOR) is None, "a service whose executor is refused is ill"
    assert "401" in caplog.text
    assert own._task_client.ask(ACQUIRE_TASK, request).token


def test_a_task_of_another_type_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperLink that a silo's executor does not ask names a program."""
    make_server_keys(tmp_path)
    (tmp_path / SECRET_FILE).write_bytes(b"x" * 32)
    running = Executor("127.0.0.1:1", tmp_path, os.getpid(), [CLIENTAPP])

    def ask(*_: Any) -> Any:
        answer = ACQUIRE_TASK.answer_type(token=TOKEN)
        answer.task.type = "../../bin/sh"
        return answer

    monkeypatch.setattr(running._task_client, "ask", ask)
    monkeypatch.setattr(executor, "start_task", None)
    running.poll()
    assert not running.tasks


def test_an_executor_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    make_server_keys(tmp_path)
    (tmp_path / SECRET_FILE).write_bytes(b"x" * 32)
    command = executor_command("127.0.0.1:1", tmp_path, SERVERAPP)
    code = f"import subprocess, time; print(subprocess.Popen({command!r}).pid, flush=True); time.sleep(60)"
    environment: Mapping[str, str] = {**os.environ, "TMPDIR": str(tmp_path)}
    # its parent is the program, not this test
    code = code.replace(f"'{os.getpid()}'", "str(os.getpid())").replace(
        "import subprocess", "import os, subprocess"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        time.sleep(1.0)
        parent.kill()
        deadline = time.monotonic() + 60.0
        while Path(f"/proc/{number}").exists() and time.monotonic() < deadline:
            if "Z" in Path(f"/proc/{number}/stat").read_text().split()[2]:
                break
            time.sleep(0.1)
        else:
            assert not Path(f"/proc/{number}").exists()


def test_tasks_of_an_executor_that_was_killed_are_found_by_their_parent() -> None:
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
