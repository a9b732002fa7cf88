"""The guard as a process: its socket, its restarts, and whoever talks to it."""

import grp
import io
import json
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import Mock

import numpy as np
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
from fedpriv.protocol.frames import receive_json, send_frame
from fedpriv.protocol.messages import Refusal
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import simulated_strategy
from fedpriv.server.strategy import ReleaseStrategy
from fedpriv.silo import daemon
from fedpriv.silo.daemon import Reply, limit_time
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import Guards, begin_ledgers, open_guards
from fedpriv.silo.ledger import LedgerError, SiloLedger
from fedpriv.silo.metrics import is_listening, notify_manager, watch_socket
from fedpriv.silo.policy import Policy, read_policy
from tests.conftest import small_tree
from tests.parts import in_parts
from tests.silo.charged import charged
from tests.silo.guarded import CELL, ZERO, guard_of, start_daemon, write_silo


@contextmanager
def answering(*paths: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Real guard processes, which are killed in the end."""
    processes = [start_daemon(path) for path in paths]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    with answering(*(write_silo(tmp_path, n, trust="secure-aggregation") for n in range(3))) as processes:
        yield processes


def strategy_of(cell: Cell) -> ReleaseStrategy:
    task = load_task(cell)
    plan = make_plan(cell, task.objective, for_release=True)
    return simulated_strategy(plan, task.objective.initial(), cell)


def answer_at(socket: Path, t: int = 1) -> Any:
    return ask_release(socket, "run", CELL, t, ZERO.numpy())


@pytest.mark.slow
def test_the_socket_of_a_guard_is_accessible_to_the_group_in_its_policy(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    group = grp.getgrgid(os.getgid()).gr_name
    path.write_text(path.read_text().replace("[allow]", f'group = "{group}"\n[allow]'))
    with answering(path):
        assert (tmp_path / "0.sock").stat().st_mode & 0o777 == 0o660


@pytest.mark.parametrize("group", ["supernode", "4711"])
def test_a_socket_is_shared_with_one_group_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    given: list[tuple[Path, object]] = []
    monkeypatch.setattr(daemon.shutil, "chown", lambda path, group: given.append((path, group)))
    path = write_silo(tmp_path)
    with daemon._listen(read_policy(path)), ExitStack() as clients:
        assert stat.S_IMODE((tmp_path / "0.sock").stat().st_mode) == 0o600
        for _ in range(32):  # wait to be accepted
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(str(tmp_path / "0.sock"))
    path.write_text(f'group = "{group}"\n' + path.read_text())
    with daemon._listen(read_policy(path)):
        assert stat.S_IMODE((tmp_path / "0.sock").stat().st_mode) == 0o660
    assert given == [(tmp_path / "0.sock", int(group) if group.isdigit() else group)]


@pytest.mark.parametrize("group", ["no group of this name", "9" * 30, "²", "\\u0000"])
def test_a_group_that_is_not_there_is_refused(tmp_path: Path, group: str) -> None:
    path = write_silo(tmp_path)
    path.write_text(f'group = "{group}"\n' + path.read_text())
    with pytest.raises(InputError, match=r"group = '.*': cannot be given the socket .*0\.sock"):
        daemon._listen(read_policy(path)).__enter__()
    assert not (tmp_path / "0.sock").exists()


class ClosedError(BaseException):
    """Nobody connects any more."""


class Listener:
    """A listening socket with these connections, or errors in their places."""

    def __init__(self, *connections: socket.socket | OSError) -> None:
        self.connections = list(connections)

    def accept(self) -> tuple[socket.socket, None]:
        if not self.connections:
            raise ClosedError
        if isinstance(connection := self.connections.pop(0), OSError):
            raise connection
        return connection, None


def accept(desk: daemon.RequestQueue, *connections: socket.socket | OSError) -> None:
    with pytest.raises(ClosedError):
        desk.accept_connections(cast(Any, Listener(*connections)))


HEALTH = b"\x00\x00\x00\x10" + b'{"health": true}'


def healthy(client: socket.socket) -> bool:
    """Whether a connection gets a whole reply to its request for health."""
    client.settimeout(10.0)
    client.sendall(HEALTH)
    reply = bool(receive_json(client, 1000)["healthy"])
    assert client.recv(1) == b"", "and then its end"
    return reply


def test_of_33_clients_the_last_is_closed_unread_until_another_goes(tmp_path: Path) -> None:
    desk = desk_of(tmp_path, SimpleNamespace(peer_count=0), tick=0.0)
    begin_ledgers(read_policy(tmp_path / "silo-0.toml"))
    with ExitStack() as stack:
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(34)]
        accept(desk, *(theirs for _, theirs in pairs[:33]))
        pairs[32][0].settimeout(10.0)
        assert pairs[32][0].recv(1) == b""
        assert all(healthy(ours) for ours, _ in pairs[:32])
        for ours, _ in pairs[:32]:
            ours.close()
        until = time.monotonic() + 10.0
        while desk._connections._value < 32 and time.monotonic() < until:
            time.sleep(0.001)
        accept(desk, pairs[33][1])
        assert healthy(pairs[33][0])


def test_without_a_file_or_a_thread_to_spare_a_guard_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, waited = desk_of(tmp_path, SimpleNamespace(peer_count=0)), list[float]()
    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(daemon.time, "sleep", waited.append)
        patch.setattr(daemon.threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(40)]
        accept(desk, OSError(24, "Too many open files"), *(theirs for _, theirs in pairs))
        assert len(waited) == 1
        assert 0.0 < waited[0] < 1.0, "a pause, and no loop that takes a core"
        assert [ours.recv(1) for ours, _ in pairs] == [b""] * 40
    assert desk._connections._value == 32, "places of connections that got no thread are free again"


@pytest.mark.parametrize(("dimension", "count"), [(1, 32), (2**20, 7), (2**24, 4)])
def test_the_queries_that_are_read_at_a_time_take_64_mib_or_are_four(
    tmp_path: Path, dimension: int, count: int
) -> None:
    desk = desk_of(tmp_path, SimpleNamespace(peer_count=0), dimension=dimension)
    header = json.dumps({"run": "r", "cell": "{}", "t": 1, "keys": "", "dtype": "float64"}).encode()
    with ExitStack() as stack:
        threads = []
        for _ in range(33):
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            send_frame(ours, header)
            send_frame(ours, bytes(8))
            threads.append(threading.Thread(target=desk._read_and_answer, args=(theirs,), daemon=True))
            threads[-1].start()
        answered = 0
        while answered < 33:
            batch = [desk._requests.get(timeout=10.0) for _ in range(min(count, 33 - answered))]
            with pytest.raises(queue.Empty):
                desk._requests.get(timeout=0.02 if answered == 0 else 0.0001)
            for request in batch:
                request.reply.set_result(Reply({}))
            answered += len(batch)
        for thread in threads:
            thread.join(10.0)


@pytest.mark.parametrize(("silos", "peers", "longest"), [(None, 0, 263_040), (None, 3, 263_616), (5, 3, 264_000)])
def test_a_header_has_room_for_a_scenario_keys_of_all_silos_and_checkpoints_and_a_query_for_all_numbers(
    tmp_path: Path, silos: int | None, peers: int, longest: int
) -> None:
    """In bytes: 4 a character of the scenario, and 2 a byte of 96 for each silo and of 8 checkpoints of 56."""
    desk = desk_of(tmp_path, SimpleNamespace(peer_count=peers), silos=silos, dimension=10, tick=0.0)
    begin_ledgers(read_policy(tmp_path / "silo-0.toml"))
    refusal = Reply({"refused": "the request is malformed or too long", "final": True})

    def answer(header: bytes, query: bytes = b"") -> Reply:
        frames = b"".join(len(frame).to_bytes(4, "big") + frame for frame in (header, query))
        sent = SimpleNamespace(recv=io.BytesIO(frames).read, settimeout=lambda _: None)
        return desk._read_and_answer(cast(Any, sent))

    health = b'{"health": true, "more": "%s"}'
    for size, expected in ((longest, Reply({"healthy": True})), (longest + 1, refusal)):
        assert answer(health % (b"x" * (size - len(health) + 2))) == expected
    desk.why_unreachable = lambda: "its socket is gone"
    assert answer(b'{"health": true}') == Reply({"healthy": False, "why": "its socket is gone"})
    requests: list[daemon.PendingRequest] = []

    def put(request: daemon.PendingRequest) -> None:
        requests.append(request)
        request.reply.set_result(Reply({}))

    desk._requests = cast(Any, SimpleNamespace(put=put))
    for size, expected in ((80, Reply({})), (81, refusal)):
        assert answer(b'{"t": 1}', bytes(size)) == expected
    assert [(request.header, request.query) for request in requests] == [({"t": 1}, bytes(80))]


def test_a_client_has_20_seconds_for_a_header_and_a_length_and_some_for_its_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And 2 s for a query with a second more for every 8 MiB; all other clients wait for its place meanwhile."""
    desk = desk_of(tmp_path, SimpleNamespace(peer_count=0))
    header = json.dumps({"run": "r", "cell": "{}", "t": 1, "keys": "", "dtype": "float64"}).encode()

    class Client:
        pieces: ClassVar = [
            len(header).to_bytes(4, "big"),
            header,
            (2**21).to_bytes(4, "big"),
            *2 * [bytes(2**20)],
        ]
        patience: ClassVar[list[float]] = []
        sent: ClassVar[list[bytes]] = []

        def settimeout(self, seconds: float) -> None:
            self.patience.append(seconds)

        def recv(self, _: int) -> bytes:
            return self.pieces.pop(0)

        def sendall(self, content: bytes) -> None:
            self.sent.append(content)

        def shutdown(self, _: int) -> None:
            self.patience.append(0.0)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("fedpriv.protocol.frames.time", SimpleNamespace(monotonic=lambda: 0.0))
    at_once = SimpleNamespace(put=lambda request: request.reply.set_result(Reply({"dtype": "uint8"}, b"key")))
    monkeypatch.setattr(desk, "_requests", at_once)
    Client.pieces += [b"a third frame", b""]
    desk._handle_connection(cast(Any, Client()))
    # The reply has to be read in 20 s, and after its end what comes is read for 20 s.
    assert Client.patience == [20.0, 20.0, 20.0, 2.25, 2.25, 20.0, 0.0, 20.0, 20.0]
    assert b"".join(Client.sent) == b'\0\0\0\x12{"dtype": "uint8"}\0\0\0\x03key'
    assert desk._connections._value == 33, "the place of the connection is free again"


def test_a_guard_process_serves_from_its_start_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits, its socket and metrics, and the word to a service manager; it ends with its process alone."""
    path = write_silo(tmp_path, memory="300 MiB", tick=0.0)
    begin_ledgers(read_policy(path))
    limits: list[object] = []
    over, replies = threading.Event(), list[Any]()
    serve, accept_connections = daemon.RequestQueue.answer_next_request, daemon.RequestQueue.accept_connections

    class Until:
        """A listener that ends its thread when the test is over."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener = listener
            listener.settimeout(0.01)

        def accept(self) -> Any:
            while not over.is_set():
                with suppress(TimeoutError):
                    return self.listener.accept()
            raise ClosedError

    def accept_until_over(requests: daemon.RequestQueue, listener: socket.socket) -> None:
        with suppress(ClosedError):
            accept_connections(requests, cast(Any, Until(listener)))

    def use(socket_path: Path) -> None:
        limits.append((threading.stack_size(), signal.getsignal(signal.SIGHUP), torch.get_num_threads()))
        replies.append(socket_path)
        clients.start()

    def talk() -> None:
        replies.append(answer_at(tmp_path / "0.sock"))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "0.sock"))
            replies.append(healthy(client))
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5.0)
            client.connect(str(tmp_path / "metrics.sock"))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            replies.append(b"".join(iter(partial(client.recv, 4096), b"")))

    def answer(requests: daemon.RequestQueue) -> None:
        until = time.monotonic() + 5.0
        while requests._requests.empty() and len(replies) == 1 and time.monotonic() < until:
            time.sleep(0.001)
        if requests._requests.empty():
            raise ClosedError
        serve(requests)
        clients.join(5.0)

    def open_limited(policy: Policy, time_limit: Any) -> Guards:
        limits.append((time_limit.func, *time_limit.args))
        return open_guards(policy, time_limit)

    clients = threading.Thread(target=talk, daemon=True)
    monkeypatch.setattr(daemon, "limit_memory", limits.append)
    monkeypatch.setattr(daemon, "open_guards", open_limited)
    monkeypatch.setattr(daemon.RequestQueue, "answer_next_request", answer)
    monkeypatch.setattr(daemon.RequestQueue, "accept_connections", accept_until_over)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    threads, hangup = torch.get_num_threads(), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    torch.set_num_threads(2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10.0)
        try:
            with pytest.raises(ClosedError):
                daemon.serve_guard(path, use, str(tmp_path / "metrics.sock"))
        finally:
            over.set()
            torch.set_num_threads(threads)
            threading.stack_size(0)
            signal.signal(signal.SIGHUP, hangup)
        assert manager.recv(100) == b"READY=1"
    assert limits == [(limit_time, 30.0, 300.0), 300 * 2**20, (2**19, signal.SIG_IGN, 1)]
    socket_path, release, is_healthy, metrics = replies
    assert socket_path == tmp_path / "0.sock"
    assert np.isfinite(release).all()
    assert len(release) == len(ZERO)
    assert is_healthy
    assert b'fedpriv_guard_answered_total{records="training"} 1' in metrics
    assert not (tmp_path / "0.sock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("trust", in_parts(["untrusted", "secure-aggregation"], ["secure-aggregation"]))
def test_a_run_completes_through_guards_that_are_killed_and_restarted(
    tmp_path: Path, daemons: list["subprocess.Popen[str]"], trust: str
) -> None:
    """Three real guard processes behind the real ClientApp and strategy; one is killed hard twice, mid-run."""
    cell = resolve_cell(small_tree(algorithm__trust=trust), "test")

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

    strategy = strategy_of(cell)
    strategy.run(GuardedGrid(client_app, 3, make_run_config(cell, Path())))
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
    last = SiloLedger(tmp_path / "ledger-1.sqlite").find_answer("1", 8)
    assert last is not None
    assert last.reply  # a server that was killed before its journal had it asks again


@pytest.mark.slow
def test_a_guard_process_survives_malformed_frames_and_disconnected_clients(tmp_path: Path) -> None:
    path = tmp_path / "0.sock"
    with answering(write_silo(tmp_path)) as (process,):
        assert path.stat().st_mode & 0o077 == 0
        for nonsense in (b"", b"\x00\x00\x00\x02{}", b"\xff" * 64):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(path))
                raw.sendall(nonsense)
        time.sleep(0.1)
        refusal = ask_release(path, "x", "{}", 1, ZERO.numpy())
        assert isinstance(refusal, Refusal)
        assert "cannot be used" in refusal.reason
        assert refusal.is_final
        assert answer_at(path).shape == (7850,)
        absent = answer_at(tmp_path / "nobody.sock")
        assert isinstance(absent, Refusal)
        assert "does not answer" in absent.reason
        assert not absent.is_final  # a guard may be starting
        process.send_signal(signal.SIGHUP)
        assert not isinstance(answer_at(path, 2), Refusal)
        assert process.poll() is None


def test_a_supernode_without_a_guard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = resolve_cell(small_tree(seed=99), "test")  # no other test's, so that no silo is built yet
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/flwr-clientapp"])
    with pytest.raises(RunError, match="has no guard"):
        strategy_of(cell).run(InProcessGrid(client_app, 3, make_run_config(cell, Path())))


def desk_of(folder: Path, guard: Any, **allow: Any) -> daemon.RequestQueue:
    return daemon.RequestQueue(read_policy(write_silo(folder, **allow)), Guards(cast("Guard", guard), None))


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
def test_replies_and_refusals_are_sent_only_at_multiples_of_the_policy_tick(
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

    class TimedReply(Future[Reply]):
        def set_result(self, result: Reply) -> None:
            clock.replied.append(round(clock.now, 9))
            super().set_result(result)

    monkeypatch.setattr(daemon, "time", clock)
    desk = desk_of(tmp_path, Slow(), tick=tick)
    header = {"run": "r", "cell": "{}", "t": 1, "keys": "", "dtype": "float64"}
    for _ in range(4):
        desk._requests.put(daemon.PendingRequest(header, bytearray(8), TimedReply()))
        desk.answer_next_request()
    assert clock.replied == moments


@pytest.mark.slow
def test_a_second_guard_on_one_socket_is_refused_and_the_first_still_answers(tmp_path: Path) -> None:
    """It took it without a word, and left a dead one when it ended."""
    path = write_silo(tmp_path)
    with answering(path):
        command = [str(Path(sys.executable).with_name("fedpriv")), "silo", "run", str(path)]
        second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert second.returncode == 2
        (line,) = second.stderr.strip().splitlines()
        assert line.endswith("0.sock: a service answers there already; end it before you start another")
        assert not isinstance(answer_at(tmp_path / "0.sock"), Refusal)
    with answering(path):
        assert not isinstance(answer_at(tmp_path / "0.sock"), Refusal), (
            "a killed guard leaves its socket to the next"
        )


@pytest.mark.parametrize("name", ["shard-0.npz", "folder"])
def test_a_guard_does_not_replace_a_file_by_its_socket(tmp_path: Path, name: str) -> None:
    """Gains: the silo's records are gone because of a wrong path in the policy."""
    path = write_silo(tmp_path)
    (tmp_path / "folder").mkdir()
    path.write_text(path.read_text().replace('"0.sock"', f'"{name}"'))
    content = (tmp_path / "shard-0.npz").read_bytes()
    with pytest.raises(InputError, match=rf"{name}: is a file, and no socket; name a path that is free"):
        daemon._listen(read_policy(path)).__enter__()
    assert (tmp_path / "shard-0.npz").read_bytes() == content


def test_guarantee_a_second_guard_is_refused_before_it_opens_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: it wiped the journal and tidied the ledger of the first, and then was refused at the socket."""
    path = write_silo(tmp_path)
    monkeypatch.setattr(daemon, "open_guards", lambda *_: pytest.fail("the ledger was opened"))
    with daemon._listen(read_policy(path)):
        with pytest.raises(InputError, match=r"0\.sock: a service answers there already"):
            daemon.serve_guard(path)
        assert is_listening(tmp_path / "0.sock")
    assert not (tmp_path / "0.sock").exists()


def test_a_guard_that_does_not_start_leaves_no_socket(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    with pytest.raises(InputError, match="no ledger is there"):
        daemon.serve_guard(path)
    assert not (tmp_path / "0.sock").exists()


def test_a_guard_is_unhealthy_without_a_writable_disk_its_socket_or_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: that its loop turned, while no round could be stored and another file was at its socket's place."""
    path = write_silo(tmp_path)
    begin_ledgers(policy := read_policy(path))
    desk = daemon.RequestQueue(policy, cast(Any, SimpleNamespace(training=guard_of(path), tests=None)))
    with daemon._listen(policy):
        desk.why_unreachable = watch_socket(policy.socket)
        assert desk._why_unhealthy() is None
        with monkeypatch.context() as disk:
            disk.setattr("fedpriv.silo.metrics.os.access", lambda *_: False)  # as on a read-only disk
            assert str(tmp_path) in str(desk._why_unhealthy())
        with monkeypatch.context() as disk:
            disk.setattr("fedpriv.silo.metrics.shutil.disk_usage", lambda _: SimpleNamespace(free=2**16 - 1))
            assert "its disk is full" in str(desk._why_unhealthy())
            disk.setattr("fedpriv.silo.metrics.shutil.disk_usage", lambda _: SimpleNamespace(free=2**16))
            assert desk._why_unhealthy() is None
        policy.socket.unlink()
        assert "this service's socket is gone" in str(desk._why_unhealthy())
        policy.socket.write_text("another's")
        assert "this service's socket is gone" in str(desk._why_unhealthy())
        monkeypatch.setattr(daemon.time, "monotonic", lambda: 5000.0)
        for start, is_stuck in ((4099.0, True), (4100.0, False), (None, False)):
            desk._start_time = start
            assert ("one answer for more than 900 s" in str(desk._why_unhealthy())) is is_stuck


def test_a_ready_guard_notifies_its_service_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10.0)
        notify_manager("READY=1")  # nobody asked for it
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_manager("READY=1")
        assert manager.recv(100) == b"READY=1"
    notify_manager("READY=1")  # a manager that is gone stops nothing
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:  # in a path @ is a character
        manager.bind(str(tmp_path / "notify@1"))
        manager.settimeout(10.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify@1"))
        notify_manager("READY=1")
        assert manager.recv(100) == b"READY=1"
    if sys.platform == "linux":  # a name behind @ is an abstract one
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(name := f"\0fedpriv-{os.getpid()}@host")
            manager.settimeout(10.0)
            monkeypatch.setenv("NOTIFY_SOCKET", f"@{name[1:]}")
            notify_manager("READY=1")
            assert manager.recv(100) == b"READY=1"


def test_a_socket_with_a_full_backlog_counts_as_listening(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as waiting:
        listener.bind(str(tmp_path / "busy.sock"))
        listener.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(str(tmp_path / "busy.sock"))
        assert is_listening(tmp_path / "busy.sock")
    assert not is_listening(tmp_path / "busy.sock"), "nobody listens any more"


def test_health_and_malformed_requests_are_answered_at_multiples_of_the_policy_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: when the guard was busy, from a thread that shares the interpreter with it."""
    desk = desk_of(tmp_path, SimpleNamespace(peer_count=0), tick=0.25)
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
def test_clients_that_stall_after_their_header_do_not_block_other_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """Gains: 4 connections of a header each kept a guard from every other client for 20 s, again and again.

    The honest client is answered while all of them are still within their patience, which no test waits for.
    """
    monkeypatch.setattr(daemon, "_QUERY_SECONDS", 0.1, raising=False)
    monkeypatch.setattr(daemon, "_PATIENCE_SECONDS", 5.0)
    desk = desk_of(tmp_path, SimpleNamespace(peer_count=0, answer=lambda *_: ZERO))
    monkeypatch.setattr(desk, "_query_slots", threading.Semaphore(4))
    header = json.dumps({"run": "r", "cell": "{}", "t": 1, "keys": "", "dtype": "float64"}).encode()
    frame = len(header).to_bytes(4, "big") + header
    replies: list[Reply] = []

    def talk(connection: socket.socket) -> None:
        with suppress(OSError):
            replies.append(desk._read_and_answer(connection))

    with ExitStack() as connections:
        for sent in [frame + begun] * 8 + [frame + (8).to_bytes(4, "big") + bytes(8)]:
            ours, theirs = map(connections.enter_context, socket.socketpair())
            ours.sendall(sent)
            last = threading.Thread(target=talk, args=(theirs,), daemon=True)
            last.start()
        asked = desk._requests.get(timeout=2.5)
        asked.reply.set_result(Reply({"dtype": "float64"}, bytes(8)))
        last.join(2.0)
        assert replies == [Reply({"dtype": "float64"}, bytes(8))]
