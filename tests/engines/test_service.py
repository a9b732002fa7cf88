"""Services: what ends them, with which code and words, what they wait for, and how they say that they are well."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import httpx
import pytest
from starlette.applications import Starlette

from fedpriv.addons.services import deployment, service, supernode_process
from fedpriv.addons.services.flower_private.control import RunStatus, UnreachableError
from fedpriv.addons.services.flower_private.names import CONTROL_PREFIX
from fedpriv.addons.services.flower_private.silo_node import describe_clock_error
from fedpriv.addons.services.service import (
    EXECUTOR,
    LOST_EXIT_CODE,
    SUPERNODE,
    OutageLog,
    free_port,
    read_heartbeat,
    write_heartbeat,
)
from fedpriv.addons.services.superlink_process import PathFilter, _make_server_config, _serve_until_signal, _Server
from fedpriv.claims.outcome import RunObserver, cell_digest
from fedpriv.core.errors import RunError
from fedpriv.core.logs import configure_service_logging, log_fields
from fedpriv.engines.table import LOCAL
from fedpriv.protocol.cell_folder import FolderReader, report_waiting
from fedpriv.protocol.frames import send_frame
from fedpriv.scenario.schema import Cell
from fedpriv.silo.metrics import open_private_socket
from tests.engines.builders import Clock, Recorder, refusal, superlink_of

HEALTH = Path(__file__).resolve().parents[2] / "deploy" / "health.py"
SLEEP = "import time; time.sleep(60)"


def run_parts(
    monkeypatch: pytest.MonkeyPatch, folder: Path, node: str, executor: str = SLEEP, *, apps: bool = False
) -> NoReturn:
    """`run_supernode` with programs of Python in the place of its parts; Flower's node is told its port."""
    program = folder / "flower-supernode"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.argv[1] = sys.argv[-1].partition('=')[2]\n{node}\n")
    program.chmod(0o755)
    (folder / "node.py").write_text(node)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setattr(supernode_process, "script_path", lambda _: str(program))
    monkeypatch.setattr(supernode_process, "executor_command", lambda *_: [sys.executable, "-c", executor])
    monkeypatch.setattr(supernode_process, "NODE_MODULE", "node")
    monkeypatch.setattr(supernode_process, "_MIN_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(supernode_process, "_POLL_SECONDS", 0.1)
    monkeypatch.setenv(service.HEARTBEAT_FOLDER_VARIABLE, "")
    for name in ("configure_service_logging", "exit_on_signals", "check_names"):  # of a process of its own
        monkeypatch.setattr(supernode_process, name, lambda **_: None)
    supernode_process.run_supernode("127.0.0.1:1", 0, folder / "guard.sock", None, insecure=True, apps=apps)


LISTEN = """
import socket, sys
from pathlib import Path
try:
    socket.socket().bind(('127.0.0.1', int(sys.argv[1])))
except OSError:
    sys.exit(3)
print('listening', flush=True)
import os; os.kill(os.getppid(), 15)
"""


def test_a_supernode_retries_with_another_port_when_its_port_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twenty SuperNodes that start at once pick the same free port now and then."""
    free = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        ports = iter([other.getsockname()[1], free])
        monkeypatch.setattr(supernode_process, "free_port", lambda: next(ports))
        before = signal.signal(signal.SIGTERM, Mock(side_effect=RunError("as asked")))
        try:
            with refusal("as asked", RunError):
                run_parts(monkeypatch, tmp_path, LISTEN, apps=True)
        finally:
            signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr().out == "listening\n"


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its executor was ended by SIGKILL; a machine that runs out"),
        ("", "its executor ended with exit code 0"),
    ],
)
def test_a_service_whose_executor_dies_ends_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str, words: str
) -> None:
    """Was: a SuperNode without executor stayed, and answered nothing."""
    with refusal(f"SuperNode: {words}", RunError):
        run_parts(monkeypatch, tmp_path, SLEEP, executor, apps=True)
    assert not list((tmp_path / "state" / "fedpriv").iterdir())


def test_the_outage_time_of_the_flower_node_program_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves no sign of the SuperLink's answers: neither since when it is away, nor for how long."""
    monitor = supernode_process.SupernodeMonitor("127.0.0.1:1", tmp_path, None, EXECUTOR)
    monitor._start_time -= 3600.0
    monitor.poll()
    assert not caplog.messages
    monitor.poll(is_lost=True)
    line = "its SuperNode has ended: no SuperLink, or one that refuses it; it is started again"
    assert caplog.messages == [line]
    assert "fedpriv_supernode_silent_seconds" not in {figure.name for figure in monitor.metrics(0)}
    own = supernode_process.SupernodeMonitor("127.0.0.1:1", tmp_path, None)
    assert "fedpriv_supernode_silent_seconds" in {figure.name for figure in own.metrics(0)}


def test_a_node_process_that_exits_with_an_error_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that cannot be read, say: to start it again helps nobody."""
    with refusal("SuperNode: its SuperNode ended with exit code 2, and the service ends", RunError):
        run_parts(monkeypatch, tmp_path, "raise SystemExit(2)")


COUNTING = """
import os, sys
from pathlib import Path
file = Path(os.environ["PYTHONPATH"], "starts")
file.write_text((file.read_text() if file.exists() else "") + "x")
if len(file.read_text()) > 3:
    sys.exit(2)
"""


def test_a_killed_node_process_is_restarted_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: the service ended, or, for a fork server, nobody noticed for five minutes."""
    with refusal("exit code 2", RunError):
        run_parts(monkeypatch, tmp_path, f"{COUNTING}\nos.kill(os.getpid(), 9)")
    line = "its SuperNode was ended by SIGKILL; a machine that runs out of memory does that; it is started again"
    assert caplog.messages == [line] * 3


def test_a_supernode_without_superlink_is_restarted_repeatedly_and_logs_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: exit code 0, which a service manager takes for a wish."""
    clock = Clock(1000.0)
    monkeypatch.setattr(supernode_process.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(supernode_process.time, "sleep", clock.sleep)
    (tmp_path / SUPERNODE).write_text("1000.0 1000.0\nConnection refused\x1b[2J")
    monitor = supernode_process.SupernodeMonitor("fl.example.org:8000", tmp_path, None)
    ends = iter([LOST_EXIT_CODE, 0] * 50 + [1])
    with refusal("exit code 1", RunError):
        supernode_process.keep_running(lambda: (SUPERNODE, next(ends)), monitor)
    assert len(clock.pauses) == 100
    assert clock.pauses[:3] == [4.0, 8.0, 16.0]
    assert max(clock.pauses) == 30.0
    assert 40 <= len(caplog.messages) <= 55  # fifty minutes
    assert re.fullmatch(
        r"no answer of the SuperLink at fl\.example\.org:8000 since \d\d:\d\d:\d\d UTC \(\d+ min\): "
        r"Connection refused\\x1b\[2J; trying again",
        caplog.messages[-1],
    )


def test_the_end_of_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedpriv")
    log = OutageLog("answer")
    log.report_recovery()
    log.report_outage(time.monotonic() - 7.0, "")
    log.report_outage(time.monotonic(), "")
    log.report_recovery()
    log.report_recovery()
    assert [message.split(" (")[0][:12] for message in caplog.messages] == ["no answer si", "answer is ba"]


DATE = "Mon, 23 Nov 2026 07:00:00 GMT"


@pytest.mark.parametrize(
    ("date", "ahead", "words"),
    [
        (DATE, 0.0, None),
        (DATE, 4.0, None),
        (DATE, 20.0, "20 s ahead of the SuperLink's"),
        (DATE, -200.0, None),
        (DATE, -600.0, "600 s behind the SuperLink's"),
        (DATE, 86_400.0, "86400 s ahead of the SuperLink's"),
        *[(date, 86_400.0, None) for date in (None, "", "yesterday", f"{DATE[:-3]}+{'9' * 20}")],
    ],
)
def test_a_clock_offset_that_the_superlink_refuses_is_described(
    date: str | None, ahead: float, words: str | None
) -> None:
    """Was: 401, and no word of a clock in any log."""
    message = describe_clock_error(date, 1_795_417_200.0 + ahead)
    assert message == words if words is None else words in str(message)


def test_a_failed_heartbeat_retains_the_time_of_the_last_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(service.HEARTBEAT_FOLDER_VARIABLE, str(tmp_path))
    assert read_heartbeat(tmp_path, EXECUTOR) is None
    write_heartbeat(EXECUTOR)
    first = read_heartbeat(tmp_path, EXECUTOR)
    write_heartbeat(EXECUTOR, "the network")
    second = read_heartbeat(tmp_path, EXECUTOR)
    assert first is not None
    assert second is not None
    assert (second.last_success, second.error) == (first.last_success, "the network")
    assert second.last_attempt > first.last_attempt
    (tmp_path / EXECUTOR).write_text("nonsense")
    assert read_heartbeat(tmp_path, EXECUTOR) is None


def health(address: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-IS", HEALTH, address], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("part", [EXECUTOR, SUPERNODE])
def test_the_health_socket_reports_the_health_of_the_service(tmp_path: Path, part: str) -> None:
    """Was: the SuperLink's health in the place of the SuperNode's."""
    monitor = supernode_process.SupernodeMonitor("127.0.0.1:1", tmp_path, None, part)
    path = tmp_path / "health.sock"
    with service.health_socket(path, monitor.why_unhealthy):
        assert path.stat().st_mode & 0o777 == 0o600
        now = time.monotonic()
        (tmp_path / part).write_text(f"{now} {now}\n")
        assert health(f"unix:{path}").returncode == 0
        monitor._start_time -= 3600.0
        if part == SUPERNODE:  # a SuperLink that is away makes no SuperNode ill
            (tmp_path / part).write_text(f"{now - 900.0} {now}\nConnection refused")
            assert health(f"unix:{path}").returncode == 0
        (tmp_path / part).write_text(f"{now - 100.0} {now - 100.0}\n")
        ill = health(f"unix:{path}")
        assert ill.returncode == 1
        assert f"its {part} has done nothing for 1" in ill.stderr
        with socket.socket(socket.AF_UNIX) as silent:  # asks nothing, and keeps nobody else from asking
            silent.connect(str(path))
            silent.sendall(b"\xff\xff\xff\xff")
            assert "nothing for" in health(f"unix:{path}").stderr
    assert not path.exists()
    assert health(f"unix:{path}").returncode == 1
    with refusal("--health"), service.health_socket(tmp_path / "no" / "s", lambda: None):
        pass


async def look_at_nothing() -> None:
    """A SuperLink without runs and keys."""


def serve(tmp_path: Path, executor: str, then: Any) -> None:
    """`_serve_until_signal` with a program of Python as executor, both of which a thread hands to `then`."""
    control, process = tmp_path / "control.sock", subprocess.Popen([sys.executable, "-c", executor])
    ails: list[str | None] = [None]

    def talk() -> None:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(control)), timeout=5.0) as client:
            for _ in range(50):
                with suppress(httpx.TransportError):
                    client.get("http://superlink/health")
                    break
                time.sleep(0.1)
            then(client, process, ails)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        app = PathFilter(Starlette(), CONTROL_PREFIX, lambda: ails[0])
        server = _Server(_make_server_config(app, None, lifespan="on"))
        sockets = [(server, open_private_socket(control, "--control"))]
        asyncio.run(_serve_until_signal(sockets, process, look_at_nothing))
    finally:
        thread.join()
        process.kill()
        process.wait()


def test_a_superlink_whose_executor_is_killed_ends_with_an_error(tmp_path: Path) -> None:
    """Was: a SuperLink that started no run any more, and said that it was well."""

    def then(client: httpx.Client, executor: "subprocess.Popen[bytes]", ails: list[str | None]) -> None:
        assert client.get("http://superlink/health").status_code == 200
        ails[0] = "its executor has done nothing for 61 s"
        answer = client.get("http://superlink/health")
        assert (answer.status_code, answer.text) == (503, "its executor has done nothing for 61 s")
        assert client.get("http://superlink/v1/fleet/x").status_code == 404
        executor.kill()
        signal.setitimer(signal.ITIMER_REAL, 5.0)  # a SuperLink that stays is asked to end, and says that it was

    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with refusal("its executor was ended by SIGKILL", RunError):
            serve(tmp_path, SLEEP, then)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_superlink_that_receives_sigterm_ends_without_an_error(tmp_path: Path) -> None:
    serve(tmp_path, SLEEP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_line_has_time_level_silo_run_and_round(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("fedpriv")
    before = log.handlers[:], log.level, log.propagate
    monkeypatch.setenv("FEDPRIV_LOG", form)
    try:
        configure_service_logging(silo=2)
        logging.getLogger("fedpriv.guard").info("answered\nnothing", extra=log_fields("5f0c", 7))
    finally:
        log.handlers[:], log.propagate = before[0], before[2]
        log.setLevel(before[1])
    line = capsys.readouterr().err
    if form == "json":
        fields = json.loads(line)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", fields.pop("time"))
        assert fields == {"level": "info", "silo": 2, "run": "5f0c", "round": 7, "message": "answered\nnothing"}
    else:
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO silo=2 run=5f0c round=7 answered", line)


def test_an_unknown_log_format_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRIV_LOG", "xml")
    with refusal("FEDPRIV_LOG='xml': expected text or json"):
        configure_service_logging()


UNREACHABLE = UnreachableError("the SuperLink cannot be reached: timed out")


def test_a_waiting_run_logs_the_missing_silos_and_the_start_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: nothing, until patience was over."""
    monkeypatch.setattr(deployment, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.0)
    recorder = Recorder()
    report_waiting(tmp_path, [1, 4], time.time() - 25.0)
    pending, running = RunStatus("pending"), RunStatus("running")
    failed = RunStatus("finished:failed", "it could not write /srv")
    superlink = superlink_of([pending, UNREACHABLE, running, running, failed])
    progress = deployment.RunProgress(recorder, 0, 6)
    with refusal(r"Flower ended the run without a result \(it could not write /srv\)", RunError):
        deployment.follow_run(superlink, 1, FolderReader(tmp_path), lambda: None, progress)
    start, silos, answer, _ = recorder.lines
    pattern = r"waiting for the SuperLink to start the run, which is pending since .* UTC \(0 s\)"
    assert re.fullmatch(pattern, start)
    assert re.fullmatch(r"waiting for silo 1, 4 in round 1 of 6 since \d\d:\d\d:\d\d UTC \(25 s\)", silos)
    assert answer.startswith("waiting for an answer of the SuperLink since ")
    report_waiting(tmp_path, [], 0.0)
    assert FolderReader(tmp_path).read_waiting() is None


def test_a_superlink_that_stays_unreachable_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: one lost question ended it."""
    monkeypatch.setattr(deployment, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_UNREACHABLE_SECONDS", 0.3)
    start, progress = time.monotonic(), deployment.RunProgress(RunObserver(), 0, 6)
    with refusal("cannot be reached", UnreachableError):
        deployment.follow_run(superlink_of(UNREACHABLE), 1, FolderReader(tmp_path), lambda: None, progress)
    assert time.monotonic() - start > 0.3


def test_malformed_requests_do_not_stop_the_health_socket(tmp_path: Path) -> None:
    """A thousand brackets did, and the service was unhealthy from then on."""
    path = tmp_path / "health.sock"
    with service.health_socket(path, lambda: None):
        for content in (b"[" * 999, b"{", b"\xff", b""):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                with suppress(ConnectionError):  # the service may hang up before all of a frame is sent
                    send_frame(connection, content)
                    assert connection.recv(1) == b""
        assert health(f"unix:{path}").returncode == 0


@pytest.mark.parametrize("token", ["", ".", "../shards", "a/b", "\udce9"])
def test_a_damaged_token_of_a_run_names_no_folder(
    small_cell: Callable[..., Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """The folder of this name has ledgers, and is removed after the run."""
    monkeypatch.setenv("FEDPRIV_ALLOW_ROOT", "1")
    folder = tmp_path / "deployment" / cell_digest(small_cell())[:16]
    folder.mkdir(parents=True)
    (folder / "token").write_text(token, encoding="utf-8", errors="surrogateescape")
    with refusal("damaged; it has the name of a run", RunError):
        next(deployment.run_deployment([small_cell()], RunObserver(), folder=tmp_path, connection=LOCAL))
