"""A silo's own process: it owns records, keys, ledger and policy, and answers its ClientApp on a Unix socket.

The frames on the socket are described in protocol/messages.py.  Nothing is unpickled.  A thread for each
connection reads and writes; the main thread alone has the guard, and answers one question at a time.

Refused requests are logged, the first 100 in full and then every 1,000th.  A scenario of an unknown server may
keep a guard busy for a limited time only.
"""

import json
import logging
import os
import queue
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedpriv.core.errors import FedprivError, InputError, RunError, sanitize_line
from fedpriv.plan.task import DTYPES
from fedpriv.protocol.frames import drain_connection, receive_content, receive_json, receive_length, send_frame
from fedpriv.protocol.messages import (
    MAX_CHECKPOINT_BYTES,
    PREVIEW_ADMISSION,
    PROTOCOL_VERSION,
    REPLY_CHECKPOINT,
    SERVER_CHECKPOINTS,
)
from fedpriv.silo.admission import MAX_SCENARIO_BYTES
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import Guards, open_guards
from fedpriv.silo.ledger import LedgerError
from fedpriv.silo.masks import SIGNED_KEY_BYTES
from fedpriv.silo.memory import limit_memory
from fedpriv.silo.metrics import ServiceMetric, is_listening, serve_metrics
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.seen import GuardEvents

_log = logging.getLogger("fedpriv.guard")


_POLL_SECONDS = 0.1  # seconds


@contextmanager
def limit_time(cpu_seconds: float, clock_seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread if what is inside takes more seconds of the processor, or by the clock.

    What other programs take of the machine, and other threads of this one, counts by the clock only: a busy one
    refuses nothing that an idle one takes.  Who swallows the error gets it again.
    """
    used, began, over = time.thread_time(), time.monotonic(), False

    def look(*_: object) -> None:
        if over:
            return
        if time.thread_time() - used > cpu_seconds:
            raise TimeoutError(f"it takes more than {cpu_seconds:g} s of the processor")
        if time.monotonic() - began > clock_seconds:
            raise TimeoutError(f"it takes more than {clock_seconds:g} s")

    before = signal.signal(signal.SIGALRM, look)

    def stop() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

    try:
        signal.setitimer(signal.ITIMER_REAL, _POLL_SECONDS, _POLL_SECONDS)
        try:
            yield
        finally:
            over = True
            stop()
    except TimeoutError:  # it may have come on the way out, before the end was noted
        over = True
        stop()
        raise


_MAX_CONNECTIONS, _MAX_PENDING_BYTES = 32, 2**26
"""At a time, with requests of at most so many bytes together; whoever comes then is turned away."""
_STACK_BYTES = 2**19
"""Bytes for each thread of a connection."""
_PATIENCE_SECONDS = 20.0
"""Seconds for a request to be there once its connection is, and for a reply to be taken."""
_QUERY_SECONDS, _MIN_BYTES_PER_SECOND = 2.0, 2**23
"""Seconds, and bytes a second on top, for a query that has begun to come: others wait for its place."""
_PLANNING_CPU_SECONDS, _PLANNING_CLOCK_SECONDS = 30.0, 300.0
"""Seconds for a scenario's plan: of the processor, and by the clock."""
_STUCK_SECONDS = 900.0
"""Seconds of one answer after which the guard calls itself ill."""


class Reply(NamedTuple):
    """What goes back: a header, and the bytes of a release if there is one."""

    header: dict[str, Any]
    content: bytes | None = None


class PendingRequest(NamedTuple):
    """A request as it came, and where its reply is waited for."""

    header: dict[str, Any]
    query: bytearray
    reply: "Future[Reply]"


def serve_guard(
    policy_path: Path, ready: Callable[[Path], None] = lambda _: None, metrics_address: str | None = None
) -> None:
    """Answer until the process is ended; InputError if policy, shard or ledger cannot be used.

    `metrics` is where figures are told: see `metrics_served`.
    """
    torch.set_num_threads(1)
    policy = read_policy(policy_path)
    desk = RequestQueue(
        policy,
        open_guards(policy, partial(limit_time, _PLANNING_CPU_SECONDS, _PLANNING_CLOCK_SECONDS)),
        collects_metrics=metrics_address is not None,
    )
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # neither a terminal that closes nor a `reload` ends a guard
    threading.stack_size(_STACK_BYTES)
    limit_memory(policy.allow.memory)
    with _listen(policy) as listener, serve_metrics(metrics_address, desk.metrics):
        threading.Thread(target=desk.accept_connections, args=(listener,), daemon=True).start()
        ready(policy.socket)
        desk.answer_requests()


@contextmanager
def _listen(policy: Policy) -> Iterator[socket.socket]:
    if is_listening(policy.socket):
        raise InputError(f"{policy.socket}: a guard answers there already; end it before you start another")
    policy.socket.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        previous = os.umask(0o177)  # the socket is the silo's own, like the ledger
        try:
            listener.bind(str(policy.socket))
        except OSError as error:
            raise InputError(f"{policy.socket}: cannot be a socket: {error}") from None
        finally:
            os.umask(previous)
        if policy.group is not None:
            _share_with_group(policy.socket, policy.group)
        listener.listen(_MAX_CONNECTIONS)
        yield listener


def _share_with_group(socket: Path, group: str) -> None:
    try:
        shutil.chown(socket, group=int(group) if group.isdigit() else group)
        socket.chmod(0o660)
    except (OSError, LookupError) as error:
        raise InputError(f"group = {group!r}: cannot be given the socket {socket}: {error}") from None


class RequestQueue:
    """Where requests wait for the guard."""

    def __init__(
        self,
        policy: Policy,
        guards: Guards,
        *,
        collects_metrics: bool = False,
    ) -> None:
        """`figures`: somebody will ask for them."""
        self._policy, self._guards = policy, guards
        self._requests: queue.SimpleQueue[PendingRequest] = queue.SimpleQueue()
        self._events = GuardEvents()
        self._collects_metrics = collects_metrics
        self._metrics = self._collect_metrics()
        self._start_time: float | None = None
        cards = SIGNED_KEY_BYTES * (policy.allow.silos or guards.training.peer_count)
        self._max_header_bytes = 4 * MAX_SCENARIO_BYTES + 2 * (
            cards + MAX_CHECKPOINT_BYTES
        )  # JSON in JSON, every quote escaped
        self._max_query_bytes = 8 * policy.allow.dimension
        fit = _MAX_PENDING_BYTES // (self._max_header_bytes + self._max_query_bytes)
        self._connections = threading.Semaphore(_MAX_CONNECTIONS)
        self._query_slots = threading.Semaphore(
            min(_MAX_CONNECTIONS, max(4, fit))
        )  # for queries, one that comes slowly too

    def accept_connections(self, listener: socket.socket) -> None:
        """Take connections, each in a thread of its own; one that is silent costs nobody else anything."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                time.sleep(0.1)  # out of descriptors, for now
                continue
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._handle_connection, args=(connection,), daemon=True).start()
            except RuntimeError:  # no thread is to be had, for now; a guard that takes no connections is none
                self._connections.release()
                connection.close()

    def answer_requests(self) -> None:
        """Answer what is waiting, for ever."""
        while True:
            self.answer_next_request()

    def answer_next_request(self) -> None:
        """Wait for a request and answer it.

        Guarantee: a request, refused or not, takes a whole multiple of `allow.tick`, and nothing else is begun
        until then: neither its reply nor the next one's comes at a time that tells more of the records than that.
        """
        asked = self._requests.get()
        self._start_time = began = time.monotonic()
        reply = self._answer_or_refuse(asked)
        figures = self._collect_metrics()
        if (tick := self._policy.allow.tick) > 0.0:
            time.sleep((began - time.monotonic()) % tick)
        self._metrics = figures
        asked.reply.set_result(reply)
        self._start_time = None

    def _handle_connection(self, connection: socket.socket) -> None:
        """One request and its reply; whoever is silent, gone or sends too much is left alone."""
        try:
            with connection, suppress(OSError):
                reply = self._read_and_answer(connection)
                connection.settimeout(_PATIENCE_SECONDS)
                send_frame(connection, json.dumps(reply.header).encode())
                if reply.content is not None:
                    send_frame(connection, reply.content)
                drain_connection(
                    connection, _PATIENCE_SECONDS
                )  # closed with something unread, the reply would be lost
        except Exception:
            _log.exception("a conversation failed")
        finally:
            self._connections.release()

    def _read_and_answer(self, connection: socket.socket) -> Reply:
        """The reply to a request; what the guard is not asked leaves at a tick, not when it happens to be idle."""
        try:
            header = receive_json(connection, self._max_header_bytes, _PATIENCE_SECONDS)
            if header.get("health"):
                self._wait_for_tick()
                return Reply({"healthy": self._is_healthy()})
            length = receive_length(connection, self._max_query_bytes, _PATIENCE_SECONDS)
            with self._query_slots:  # taken once a query begins to come, which then has to go on
                query = receive_content(connection, length, _QUERY_SECONDS + length / _MIN_BYTES_PER_SECOND)
                asked = PendingRequest(header, query, Future())
                self._requests.put(asked)
                return asked.reply.result()
        except (ValueError, RecursionError):
            self._wait_for_tick()
            return _refusal_reply("the request is malformed or too long", is_final=True)

    def _wait_for_tick(self) -> None:
        if (tick := self._policy.allow.tick) > 0.0:
            time.sleep(-time.monotonic() % tick)

    def _is_healthy(self) -> bool:
        began = self._start_time
        return began is None or time.monotonic() - began < _STUCK_SECONDS

    def metrics(self) -> list[ServiceMetric]:
        """As they were when the last tick was over, for another thread."""
        return [
            *self._metrics,
            ServiceMetric("fedpriv_guard_healthy", "1 if it is at work, or waits.", self._is_healthy()),
        ]

    def _collect_metrics(self) -> list[ServiceMetric]:
        if not self._collects_metrics:
            return []
        guards = {"training": self._guards.training, "tests": self._guards.tests}
        known = {records: guard.budget_status for records, guard in guards.items() if guard is not None}
        return self._events.metrics(self._policy.silo, known)

    def _answer_or_refuse(self, asked: PendingRequest) -> Reply:
        """Never an exception: what is wrong with a request is refused, what is wrong here is logged here."""
        try:
            return self._answer(asked.header, asked.query)
        except FedprivError as error:
            self._events.record_refusal(str(asked.header.get("run")), str(error))
            return _refusal_reply(
                str(error), is_final=not isinstance(error, LedgerError)
            )  # a disk may be full now only
        except Exception:
            self._events.record_failure()
            _log.exception("a request failed")
            return _refusal_reply(
                f"silo {self._policy.silo}: its guard failed, and its own log says why", is_final=True
            )

    def _answer(self, header: dict[str, Any], query: bytearray) -> Reply:
        malformed = _refusal_reply("the request is malformed", is_final=True)
        if (theirs := header.get("protocol", PROTOCOL_VERSION)) != PROTOCOL_VERSION:
            own, other = version("fedpriv"), sanitize_line(str(header.get("fedpriv")), 20)
            raise self._refusal_error(
                f"its guard runs fedpriv {own} (protocol {PROTOCOL_VERSION}), its SuperNode {other} (protocol "
                f"{theirs!r:.20}): install the same version for both"
            )
        if isinstance(cell := header.get("shapes_of"), str):
            return Reply({"shapes": self._guards.training.query_shapes(cell)})
        run, cell, t, keys = (header.get(name) for name in ("run", "cell", "t", "keys"))
        if header.get(PREVIEW_ADMISSION) is True and isinstance(run, str) and isinstance(cell, str):
            if self._guards.training.preview_admission(run, cell).evaluation is not None:
                self._test_guard().preview_admission(run, cell)
            return Reply({PREVIEW_ADMISSION: True})
        seen = header.get(SERVER_CHECKPOINTS, "")
        if not (
            isinstance(run, str)
            and isinstance(cell, str)
            and isinstance(keys, str)
            and isinstance(seen, str)
            and type(t) is int
        ):
            return malformed
        guard = self._guards.training if header.get("tests") is not True else self._test_guard()
        if t == 0:
            return Reply({"dtype": "uint8"}, guard.public_key(run, cell))
        dtype = DTYPES.get(str(header.get("dtype")))
        try:
            cards, commits = bytes.fromhex(keys), bytes.fromhex(seen)
        except ValueError:
            return malformed
        if dtype is None or not query or len(query) % dtype.itemsize:
            return malformed
        release = guard.answer(
            run, cell, t, torch.frombuffer(query, dtype=dtype), cards, checkpoints=commits
        ).numpy()
        self._events.record_answer(run, t, is_evaluation=header.get("tests") is True)
        return Reply(
            {"dtype": str(release.dtype), REPLY_CHECKPOINT: guard.checkpoint(run, cell, t).hex()},
            release.tobytes(),
        )

    def _test_guard(self) -> Guard:
        if self._guards.tests is None:
            raise self._refusal_error("by its policy, which has no [evaluation], it evaluates nothing")
        return self._guards.tests

    def _refusal_error(self, reason: str) -> RunError:
        return RunError(f"silo {self._policy.silo} refuses: {reason}")


def _refusal_reply(reason: str, *, is_final: bool) -> Reply:
    return Reply({"refused": reason, "final": is_final})
