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
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

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
from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.logs import configure_service_logging, log_fields
from fedpriv.protocol.cell_folder import FolderReader, report_waiting
from fedpriv.protocol.frames import send_frame
from fedpriv.silo.metrics import open_private_socket

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


def test_a_port_that_is_anothers_by_now_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twenty SuperNodes that start at once pick the same free port now and then."""
    free = free_port()

    def ended(*_: Any) -> NoReturn:
        raise RunError("as asked")

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        ports = iter([other.getsockname()[1], free])
        monkeypatch.setattr(supernode_process, "free_port", lambda: next(ports))
        before = signal.signal(signal.SIGTERM, ended)
        try:
            with pytest.raises(RunError, match="as asked"):
                run_parts(monkeypatch, tmp_path, LISTEN, apps=True)
        finally:
            signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr().out == "listening\n"


@pytest.mark.parametrize(
    ("node", "executor", "words"),
    [
        (
            SLEEP,
            "import os; os.kill(os.getpid(), 9)",
            "its executor was ended by SIGKILL; a machine that runs out",
        ),
        (SLEEP, "", "its executor ended with exit code 0"),
    ],
)
def test_an_executor_that_dies_ends_the_service_with_its_name_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, executor: str, words: str
) -> None:
    """Was: a SuperNode without executor stayed, and answered nothing."""
    with pytest.raises(RunError, match=f"SuperNode: {words}"):
        run_parts(monkeypatch, tmp_path, node, executor, apps=True)
    assert not list((tmp_path / "state" / "fedpriv").iterdir())


def test_of_flowers_own_node_nothing_is_said_that_nobody_knows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves no sign of the SuperLink's answers: neither since when it is away, nor for how long."""
    watch = supernode_process.SupernodeMonitor("127.0.0.1:1", tmp_path, None, EXECUTOR)
    watch._start_time -= 3600.0
    watch.poll()
    assert not caplog.messages
    watch.poll(is_lost=True)
    assert caplog.messages == [
        "its SuperNode has ended: no SuperLink, or one that refuses it; it is started again"
    ]
    assert "fedpriv_supernode_silent_seconds" not in {figure.name for figure in watch.metrics(0)}
    own = supernode_process.SupernodeMonitor("127.0.0.1:1", tmp_path, None)
    assert "fedpriv_supernode_silent_seconds" in {figure.name for figure in own.metrics(0)}


def test_a_node_that_fails_by_itself_ends_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that cannot be read, say: to start it again helps nobody."""
    with pytest.raises(RunError, match="SuperNode: its SuperNode ended with exit code 2, and the service ends"):
        run_parts(monkeypatch, tmp_path, "raise SystemExit(2)")


COUNTING = """
import os, sys
from pathlib import Path
file = Path(os.environ["PYTHONPATH"], "starts")
file.write_text((file.read_text() if file.exists() else "") + "x")
if len(file.read_text()) > 3:
    sys.exit(2)
"""


def test_a_node_that_is_killed_is_started_again_at_once_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: the service ended, or, for a fork server, nobody noticed for five minutes."""
    with pytest.raises(RunError, match="exit code 2"):
        run_parts(monkeypatch, tmp_path, f"{COUNTING}\nos.kill(os.getpid(), 9)")
    told = "its SuperNode was ended by SIGKILL; a machine that runs out of memory does that; it is started again"
    assert caplog.messages == [told] * 3


def test_a_supernode_that_lost_its_superlink_is_started_again_for_ever_and_says_so_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: exit code 0, which a service manager takes for a wish."""
    clock = [1000.0]
    monkeypatch.setattr(supernode_process.time, "monotonic", lambda: clock[0])
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(supernode_process.time, "sleep", sleep)
    (tmp_path / SUPERNODE).write_text("1000.0 1000.0\nConnection refused\x1b[2J")
    watch = supernode_process.SupernodeMonitor("fl.example.org:8000", tmp_path, None)
    ends = iter([LOST_EXIT_CODE, 0] * 50 + [1])
    with pytest.raises(RunError, match="exit code 1"):
        supernode_process.keep_running(lambda: (SUPERNODE, next(ends)), watch)
    assert len(pauses) == 100
    assert pauses[:3] == [4.0, 8.0, 16.0]
    assert max(pauses) == 30.0
    assert 40 <= len(caplog.messages) <= 55  # fifty minutes
    assert re.fullmatch(
        r"no answer of the SuperLink at fl\.example\.org:8000 since \d\d:\d\d:\d\d UTC \(\d+ min\): "
        r"Connection refused\\x1b\[2J; trying again",
        caplog.messages[-1],
    )


def test_what_is_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedpriv")
    absence = OutageLog("answer")
    absence.report_recovery()
    absence.report_outage(time.monotonic() - 7.0, "")
    absence.report_outage(time.monotonic(), "")
    absence.report_recovery()
    absence.report_recovery()
    assert [message.split(" (")[0][:12] for message in caplog.messages] == ["no answer si", "answer is ba"]


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        (0.0, None),
        (4.0, None),
        (20.0, "20 s ahead of the SuperLink's"),
        (-200.0, None),
        (-600.0, "600 s behind the SuperLink's"),
        (86_400.0, "86400 s ahead of the SuperLink's"),
    ],
)
def test_a_clock_that_is_refused_is_named(ahead: float, words: str | None) -> None:
    """Was: 401, and no word of a clock in any log."""
    said = describe_clock_error("Mon, 23 Nov 2026 07:00:00 GMT", 1_795_417_200.0 + ahead)
    assert said == words if words is None else words in str(said)


@pytest.mark.parametrize("date", [None, "", "yesterday"])
def test_an_answer_without_a_date_says_nothing_of_clocks(date: str | None) -> None:
    assert describe_clock_error(date, 1.0) is None


def test_a_beat_keeps_the_last_good_time_and_is_read_as_it_was_left(
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
def test_health_is_that_of_the_service_itself(tmp_path: Path, part: str) -> None:
    """Was: the SuperLink's health in the place of the SuperNode's."""
    watch = supernode_process.SupernodeMonitor("127.0.0.1:1", tmp_path, None, part)
    path = tmp_path / "health.sock"
    with service.health_socket(path, watch.why_unhealthy):
        assert path.stat().st_mode & 0o777 == 0o600
        now = time.monotonic()
        (tmp_path / part).write_text(f"{now} {now}\n")
        assert health(f"unix:{path}").returncode == 0
        watch._start_time -= 3600.0
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
    with pytest.raises(InputError, match="--health"), service.health_socket(tmp_path / "no" / "s", lambda: None):
        pass


async def look_at_nothing() -> None:
    """A SuperLink without runs and keys."""


def serve(tmp_path: Path, executor: str, then: Any) -> None:
    """`_serve_until_signal` with a program of Python as executor; `then` is called in a thread with a client
    and it.
    """
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
        server = _Server(
            _make_server_config(PathFilter(Starlette(), CONTROL_PREFIX, lambda: ails[0]), None, lifespan="on")
        )
        asyncio.run(
            _serve_until_signal([(server, open_private_socket(control, "--control"))], process, look_at_nothing)
        )
    finally:
        thread.join()
        process.kill()
        process.wait()


def test_a_superlink_whose_executor_is_killed_ends_unasked(tmp_path: Path) -> None:
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
        with pytest.raises(RunError, match="its executor was ended by SIGKILL"):
            serve(tmp_path, SLEEP, then)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_superlink_that_is_asked_to_end_ends_without_an_error(tmp_path: Path) -> None:
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
        said = json.loads(line)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", said.pop("time"))
        assert said == {"level": "info", "silo": 2, "run": "5f0c", "round": 7, "message": "answered\nnothing"}
    else:
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO silo=2 run=5f0c round=7 answered", line)


def test_a_log_format_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRIV_LOG", "xml")
    with pytest.raises(InputError, match="FEDPRIV_LOG='xml': expected text or json"):
        configure_service_logging()


class Unanswering:
    """A SuperLink of which `answers` come, one a question."""

    has_ended = False

    @staticmethod
    def log_tail() -> str:
        return ""

    @property
    def control(self) -> "Unanswering":
        return self

    def __init__(self, answers: list[str | None]) -> None:
        self._answers = iter(answers)

    def run_status(self, _: int) -> RunStatus:
        answer = next(self._answers)
        if answer is None:
            raise UnreachableError("the SuperLink cannot be reached: timed out")
        return RunStatus(answer, "it could not write /srv" if answer.startswith("finished") else "")


def test_a_run_says_for_whom_it_waits_and_since_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: nothing, until patience was over."""
    monkeypatch.setattr(deployment, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.0)
    lines: list[str] = []

    class Hears(RunObserver):
        def notified(self, line: str) -> None:
            lines.append(line)

    report_waiting(tmp_path, [1, 4], time.time() - 25.0)
    run: Any = Unanswering(["pending", None, "running", "running", "finished:failed"])
    with pytest.raises(RunError, match=r"Flower ended the run without a result \(it could not write /srv\)"):
        deployment.follow_run(run, 1, FolderReader(tmp_path), lambda: None, deployment.RunProgress(Hears(), 0, 6))
    assert re.fullmatch(
        r"waiting for the SuperLink to start the run, which is pending since .* UTC \(0 s\)", lines[0]
    )
    assert re.fullmatch(r"waiting for silo 1, 4 in round 1 of 6 since \d\d:\d\d:\d\d UTC \(25 s\)", lines[1])
    assert lines[2].startswith("waiting for an answer of the SuperLink since ")
    assert len(lines) == 4
    report_waiting(tmp_path, [], 0.0)
    assert FolderReader(tmp_path).read_waiting() is None


def test_a_superlink_that_stays_away_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: one lost question ended it."""
    monkeypatch.setattr(deployment, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_UNREACHABLE_SECONDS", 0.3)
    began, run = time.monotonic(), Unanswering([None] * 1000)
    asked: Any = run
    with pytest.raises(UnreachableError, match="cannot be reached"):
        deployment.follow_run(
            asked, 1, FolderReader(tmp_path), lambda: None, deployment.RunProgress(RunObserver(), 0, 6)
        )
    assert time.monotonic() - began > 0.3


def test_nothing_that_is_sent_to_a_health_socket_ends_its_answers(tmp_path: Path) -> None:
    """A thousand brackets did, and the service was unhealthy from then on."""
    path = tmp_path / "health.sock"
    with service.health_socket(path, lambda: None):
        for content in (b"[" * 999, b"{", b"\xff", b""):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                send_frame(connection, content)
                assert connection.recv(1) == b""
        assert health(f"unix:{path}").returncode == 0
