"""The guard as a process: its socket, its restarts, and whoever talks to it."""

import grp
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from flwr.app import Message

from fedpriv.clients.app import app as client_app
from fedpriv.clients.app import ask_release
from fedpriv.core.errors import InputError, RunError
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import Refusal
from fedpriv.scenario.load import resolve_cell
from fedpriv.server.app import simulated_strategy
from fedpriv.silo import daemon
from fedpriv.silo.daemon import Reply
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import Guards
from fedpriv.silo.ledger import LedgerError, SiloLedger
from fedpriv.silo.policy import read_policy
from tests.conftest import small_tree
from tests.parts import in_parts
from tests.silo.charged import charged
from tests.silo.guarded import CELL, ZERO, start_daemon, write_silo


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    started = [start_daemon(write_silo(tmp_path, number, trust="secure-aggregation")) for number in range(3)]
    yield started
    for process in started:
        process.kill()
        process.communicate()


@contextmanager
def answering(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """One real guard process, which is killed in the end."""
    process = start_daemon(path)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_socket_is_given_to_the_group_that_may_ask(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    group = grp.getgrgid(os.getgid()).gr_name
    path.write_text(path.read_text().replace("[allow]", f'group = "{group}"\n[allow]'))
    with answering(path):
        assert (tmp_path / "0.sock").stat().st_mode & 0o777 == 0o660


@pytest.mark.slow
@pytest.mark.parametrize("trust", in_parts(["untrusted", "secure-aggregation"], ["secure-aggregation"]))
def test_a_whole_run_through_guards_that_are_killed_and_restarted(
    tmp_path: Path, daemons: list["subprocess.Popen[str]"], trust: str
) -> None:
    """Three real guard processes behind the real ClientApp and strategy; one is killed hard twice, mid-run."""
    cell = resolve_cell(small_tree(algorithm__trust=trust), "test")
    run_config = make_run_config(cell, Path())

    class GuardedGrid(InProcessGrid):
        rounds = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for context in self._contexts.values():
                context.node_config["guard"] = str(tmp_path / f"{context.node_config['partition-id']}.sock")

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            self.rounds += 1
            if self.rounds in (4, 7):
                daemons[1].send_signal(signal.SIGKILL)
                daemons[1].wait()
                daemons[1] = start_daemon(tmp_path / "silo-1.toml")
            return list(super().send_and_receive(messages, timeout=timeout))

    task = load_task(cell)
    plan = make_plan(cell, task.objective, for_release=True)
    strategy = simulated_strategy(plan, task.objective.initial(), cell)
    strategy.run(GuardedGrid(client_app, 3, run_config))
    assert strategy.rounds_done == 8
    assert strategy.counts is None  # a guard does not tell, and nobody takes that for none
    assert torch.isfinite(strategy.model).all()
    keys = b""
    for number in range(3):
        ledger = SiloLedger(tmp_path / f"ledger-{number}.sqlite")
        if cell.algorithm.trust_setting.masked:
            agreed = ledger.find_answer("1", 0)
            assert agreed is not None
            keys += agreed.reply
        assert [ledger.find_answer("1", t) is not None for t in range(1, 10)] == [True] * 8 + [False]
        assert charged(ledger) == [pytest.approx(4.0)]
    repeated = ask_release(tmp_path / "1.sock", "1", json.dumps(cell.canonical_data()), 1, ZERO.numpy(), keys)
    assert isinstance(repeated, Refusal)
    assert repeated.reason == (
        "silo 1 refuses: round 1 was answered, and this run is over: only a digest of its reply is kept"
    )
    answer = SiloLedger(tmp_path / "ledger-1.sqlite").find_answer("1", 8)
    assert answer is not None
    assert answer.reply  # a server that was killed before its journal had it asks again


@pytest.mark.slow
def test_the_daemon_survives_nonsense_and_clients_that_vanish(tmp_path: Path) -> None:
    with answering(write_silo(tmp_path)) as process:
        nonsense_is_refused(tmp_path)
        process.send_signal(signal.SIGHUP)
        assert not isinstance(ask_release(tmp_path / "0.sock", "run", CELL, 2, ZERO.numpy()), Refusal)
        assert process.poll() is None


def nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.sock"
    assert path.stat().st_mode & 0o077 == 0
    for nonsense in (b"", b"\x00\x00\x00\x02{}", b"\xff" * 64):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.sendall(nonsense)
    time.sleep(0.1)
    refused = ask_release(path, "x", "{}", 1, ZERO.numpy())
    assert isinstance(refused, Refusal)
    assert "cannot be used" in refused.reason
    assert refused.is_final
    answer = ask_release(path, "run", CELL, 1, ZERO.numpy())
    assert not isinstance(answer, Refusal)
    assert answer.shape == (7850,)
    absent = ask_release(tmp_path / "nobody.sock", "run", CELL, 1, ZERO.numpy())
    assert isinstance(absent, Refusal)
    assert "does not answer" in absent.reason
    assert not absent.is_final  # a guard may be starting


def test_a_supernode_without_a_guard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = resolve_cell(small_tree(seed=99), "test")  # no other test's, so that no silo is built yet
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/flwr-clientapp"])
    task = load_task(cell)
    plan = make_plan(cell, task.objective, for_release=True)
    strategy = simulated_strategy(plan, task.objective.initial(), cell)
    with pytest.raises(RunError, match="has no guard"):
        strategy.run(InProcessGrid(client_app, 3, make_run_config(cell, Path())))


class Clock:
    """Time that passes only where somebody works or sleeps; a guard works for so long at each request."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.work, self.replied = 0.0, list(seconds), []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("tick", "moments"), [(0.05, [0.05, 0.1, 0.2, 0.35]), (0.0, [0.013, 0.062, 0.113, 0.233])]
)
def test_replies_and_refusals_leave_at_multiples_of_the_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tick: float, moments: list[float]
) -> None:
    """Guarantee: a request takes a whole multiple of `allow.tick`, and nothing else is begun until then."""
    clock = Clock(0.013, 0.049, 0.051, 0.12)

    class Slow:
        peer_count = 0

        def checkpoint(self, *_: object) -> bytes:
            return b""

        def ledger_run_id(self, run_id: str, _: str) -> str:
            return run_id

        def answer(self, *_: object, **__: object) -> torch.Tensor:
            clock.now += (seconds := clock.work.pop(0))
            if seconds < 0.04:
                raise RunError("refused")
            if seconds < 0.05:
                raise LedgerError("full")
            return ZERO

    class Kept(Future[Reply]):
        def set_result(self, result: Reply) -> None:
            clock.replied.append(round(clock.now, 9))
            super().set_result(result)

    monkeypatch.setattr(daemon, "time", clock)
    desk = daemon.RequestQueue(read_policy(write_silo(tmp_path, tick=tick)), Guards(cast("Guard", Slow()), None))
    header = {"run": "r", "cell": "{}", "t": 1, "keys": "", "dtype": "float64"}
    for _ in range(4):
        desk._requests.put(daemon.PendingRequest(header, bytearray(8), Kept()))
        desk.answer_next_request()
    assert clock.replied == moments


@pytest.mark.slow
def test_a_second_guard_leaves_the_first_its_socket(tmp_path: Path) -> None:
    """It took it without a word, and left a dead one when it ended."""
    path = write_silo(tmp_path)
    with answering(path):
        words = [str(Path(sys.executable).with_name("fedpriv")), "silo", "run", str(path)]
        second = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
        assert second.returncode == 2
        (line,) = second.stderr.strip().splitlines()
        assert line.endswith("0.sock: a guard answers there already; end it before you start another")
        assert not isinstance(ask_release(tmp_path / "0.sock", "run", CELL, 1, ZERO.numpy()), Refusal)
    assert not isinstance(start_and_ask(path), Refusal), "a guard that was killed leaves its socket to the next"


@pytest.mark.parametrize("name", ["shard-0.npz", "folder"])
def test_a_socket_replaces_no_file(tmp_path: Path, name: str) -> None:
    """Gains: the silo's records are gone because of a wrong path in the policy."""
    path = write_silo(tmp_path)
    (tmp_path / "folder").mkdir()
    path.write_text(path.read_text().replace('"0.sock"', f'"{name}"'))
    content = (tmp_path / "shard-0.npz").read_bytes()
    with pytest.raises(InputError, match=rf"{name}: is a file and no socket; set `socket` in the policy"):
        daemon._listen(read_policy(path)).__enter__()
    assert (tmp_path / "shard-0.npz").read_bytes() == content


def test_a_guard_at_which_others_wait_is_there(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as waiting:
        listener.bind(str(tmp_path / "busy.sock"))
        listener.listen(0)
        for _ in range(4):
            one = waiting.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect(str(tmp_path / "busy.sock"))
        assert daemon.is_listening(tmp_path / "busy.sock")
    assert not daemon.is_listening(tmp_path / "busy.sock"), "nobody listens any more"


def start_and_ask(path: Path) -> Any:
    with answering(path):
        return ask_release(path.with_name("0.sock"), "run", CELL, 1, ZERO.numpy())


def test_health_and_nonsense_are_answered_at_ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains: when the guard was busy, from a thread that shares the interpreter with it."""
    nobody = Guards(cast("Guard", SimpleNamespace(peer_count=0)), None)
    desk = daemon.RequestQueue(read_policy(write_silo(tmp_path, tick=0.25)), nobody)
    monkeypatch.setattr(daemon.time, "monotonic", lambda: 10.1)
    waited: list[float] = []
    monkeypatch.setattr(daemon.time, "sleep", waited.append)
    for sent in (b'{"health": true}', b"no JSON"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(len(sent).to_bytes(4, "big") + sent)
            desk._read_and_answer(theirs)
    assert waited == [pytest.approx(0.15), pytest.approx(0.15)]


@pytest.mark.parametrize("begun", [b"", (8).to_bytes(4, "big") + b"0"], ids=["no-query", "one-byte"])
def test_clients_that_are_silent_after_their_header_keep_no_place_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """Gains: 4 connections of a header each kept a guard from every other client for 20 s, again and again.

    The honest client is answered while all of them are still within their patience, which no test waits for.
    """
    monkeypatch.setattr(daemon, "_QUERY_SECONDS", 0.1, raising=False)
    monkeypatch.setattr(daemon, "_PATIENCE_SECONDS", 5.0)
    nobody = Guards(cast("Guard", SimpleNamespace(peer_count=0, answer=lambda *_: ZERO)), None)
    desk = daemon.RequestQueue(read_policy(write_silo(tmp_path)), nobody)
    monkeypatch.setattr(desk, "_query_slots", threading.Semaphore(4))
    header = json.dumps({"run": "r", "cell": "{}", "t": 1, "keys": "", "dtype": "float64"}).encode()
    frame = len(header).to_bytes(4, "big") + header
    replies: list[Reply] = []

    def talk(connection: socket.socket) -> None:
        with suppress(OSError):
            replies.append(desk._read_and_answer(connection))

    with ExitStack() as open_ones:
        for sent in [frame + begun] * 8 + [frame + (8).to_bytes(4, "big") + bytes(8)]:
            ours, theirs = (open_ones.enter_context(each) for each in socket.socketpair())
            ours.sendall(sent)
            last = threading.Thread(target=talk, args=(theirs,), daemon=True)
            last.start()
        asked = desk._requests.get(timeout=2.5)
        asked.reply.set_result(Reply({"dtype": "float64"}, bytes(8)))
        last.join(2.0)
        assert replies == [Reply({"dtype": "float64"}, bytes(8))]
