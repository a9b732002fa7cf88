"""Process of a silo's guard: it owns records, keys, ledger and policy, and answers on a Unix socket.

The silo's ClientApp connects to the socket.  A request is two frames, a header (a JSON object) and the bytes of a
query, which may be empty, and a request for health is a header alone.  A reply is a header, with a second frame if
a message or a public key follows.  A thread for each connection reads and writes, and the main thread answers one
request to the guard at a time.

The policy sets a tick, a time in seconds.  Unless the tick is 0, the guard takes a whole multiple of it for the
answer to a query, so that the time of a reply reveals little about the records.
"""

import json
import logging
import queue
import shutil
import signal
import socket
import sqlite3
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
from fedpriv.silo.guard import Guard, GuardFailureError
from fedpriv.silo.guards import Guards, open_guards
from fedpriv.silo.ledger import LedgerError
from fedpriv.silo.masks import SIGNED_KEY_BYTES
from fedpriv.silo.memory import limit_memory
from fedpriv.silo.metrics import (
    ServiceMetric,
    notify_manager,
    open_private_socket,
    serve_metrics,
    watch_socket,
    why_unwritable,
)
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.seen import GuardEvents

_log = logging.getLogger("fedpriv.guard")


_POLL_SECONDS = 0.1
"""Time between two checks of the limits of `limit_time`, in seconds."""


@contextmanager
def limit_time(cpu_seconds: float, clock_seconds: float) -> Iterator[None]:
    """Limit the time of the block, which has to run in the main thread.

    A timer's signal interrupts the block about ten times a second, to check both limits.  A long call of compiled
    code can delay the check.  Blocks cannot be nested.

    Args:
        cpu_seconds: Limit of processor time of the thread, in seconds.
        clock_seconds: Limit of elapsed time, in seconds.

    Raises:
        TimeoutError: If the block still runs at a check after one of the limits.
    """
    cpu_start, clock_start, is_over = time.thread_time(), time.monotonic(), False

    def check_time(*_: object) -> None:
        """Raise TimeoutError after a limit."""
        # A last signal can arrive after the block.
        if is_over:
            return
        if time.thread_time() - cpu_start > cpu_seconds:
            raise TimeoutError(f"it takes more than {cpu_seconds:g} s of the processor")
        if time.monotonic() - clock_start > clock_seconds:
            raise TimeoutError(f"it takes more than {clock_seconds:g} s")

    previous_handler = signal.signal(signal.SIGALRM, check_time)

    def stop_timer() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous_handler)

    try:
        signal.setitimer(signal.ITIMER_REAL, _POLL_SECONDS, _POLL_SECONDS)
        try:
            yield
        finally:
            is_over = True
            stop_timer()
    except TimeoutError:  # The error may be raised on the way out, before `is_over` was set.
        is_over = True
        stop_timer()
        raise


_MAX_CONNECTIONS, _MAX_PENDING_BYTES = 32, 2**26
"""Most connections at a time, and most bytes of the queries that are read at a time.

Further connections are closed.  Four queries are read at a time even if they take more bytes.
"""
_STACK_BYTES = 2**19
"""Stack size of a connection's thread, in bytes."""
_PATIENCE_SECONDS = 20.0
"""Longest wait, in seconds, for a header, for a query's length, and in each step of sending a reply."""
_QUERY_SECONDS, _MIN_BYTES_PER_SECOND = 2.0, 2**23
"""Limits of the time to send a query: a number of seconds, plus the query's bytes over the rate.

A query occupies a slot, for which other queries wait, until it is answered.
"""
_PLANNING_CPU_SECONDS, _PLANNING_CLOCK_SECONDS = 30.0, 300.0
"""Limits for planning a scenario: seconds of processor time, and seconds by the clock."""
_STUCK_SECONDS = 900.0
"""Seconds of one answer after which the guard reports that it is not healthy."""


class Reply(NamedTuple):
    """Reply to a request: a header, and the bytes of a message or of a public key, or None."""

    header: dict[str, Any]
    content: bytes | None = None


class PendingRequest(NamedTuple):
    """Request that waits for its reply."""

    header: dict[str, Any]
    query: bytearray
    reply: "Future[Reply]"


def serve_guard(
    policy_path: Path, ready: Callable[[Path], None] = lambda _: None, metrics_address: str | None = None
) -> None:
    """Answer requests until the process is ended.

    Args:
        policy_path: File of the policy.
        ready: Function that is called with the path of the socket once it accepts connections.
        metrics_address: Port of this machine, or path of a socket, on which metrics are served, or None.

    Raises:
        InputError: If policy, extensions, shard, ledger, keys, socket or `metrics_address` cannot be used, or a
            memory limit of the process or of its container is too small for `allow.memory`.
        LedgerError: If a ledger of fedpriv 0.3.0 cannot be converted now.
    """
    torch.set_num_threads(1)
    policy = read_policy(policy_path)
    with _listen(policy) as listener:  # First, so that a second start is refused before it opens the ledger.
        request_queue = RequestQueue(
            policy,
            open_guards(policy, partial(limit_time, _PLANNING_CPU_SECONDS, _PLANNING_CLOCK_SECONDS)),
            collects_metrics=metrics_address is not None,
        )
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Neither a closed terminal nor a `reload` ends a guard.
        threading.stack_size(_STACK_BYTES)
        limit_memory(policy.allow.memory)
        request_queue.why_unreachable = watch_socket(policy.socket)
        with serve_metrics(metrics_address, request_queue.metrics):
            threading.Thread(target=request_queue.accept_connections, args=(listener,), daemon=True).start()
            ready(policy.socket)
            notify_manager("READY=1")
            while True:
                request_queue.answer_next_request()


@contextmanager
def _listen(policy: Policy) -> Iterator[socket.socket]:
    """Open the silo's socket, of mode 0600, or of mode 0660 and the group that the policy names.

    A socket that a killed guard has left at this path is replaced, and the socket is removed at the end of the
    block.

    Raises:
        InputError: If a guard answers on the socket, if there is a file that is no socket, or if the socket cannot
            be made or given to the group.
    """
    with open_private_socket(policy.socket, "socket") as listener:
        try:
            if policy.group is not None:
                _share_with_group(policy.socket, policy.group)
            listener.listen(_MAX_CONNECTIONS)
            yield listener
        finally:
            policy.socket.unlink(missing_ok=True)


def _share_with_group(socket: Path, group: str) -> None:
    try:
        shutil.chown(socket, group=int(group) if group.isdecimal() else group)
        socket.chmod(0o660)
    except (OSError, LookupError, OverflowError, ValueError) as error:
        raise InputError(f"group = {group!r}: cannot be given the socket {socket}: {error}") from None


class RequestQueue:
    """Queue between the threads that read requests and the main thread, which answers them one by one."""

    def __init__(
        self,
        policy: Policy,
        guards: Guards,
        *,
        collects_metrics: bool = False,
    ) -> None:
        """Start with an empty queue, and set the limits on headers and queries.

        Args:
            policy: Policy of the silo.
            guards: Guards that answer the requests.
            collects_metrics: Whether metrics are collected at the start, and after each request to the guard.
        """
        self._policy, self._guards = policy, guards
        self._requests: queue.SimpleQueue[PendingRequest] = queue.SimpleQueue()
        self._events, self._collects_metrics = GuardEvents(), collects_metrics
        self._metrics = self._collect_metrics()
        self._start_time: float | None = None  # of the request that is answered now
        self.why_unreachable: Callable[[], str | None] = lambda: None  # of a queue without a socket
        key_bytes = SIGNED_KEY_BYTES * (policy.allow.silos or guards.training.peer_count)
        # The scenario is JSON in JSON, with every quote escaped, and keys and checkpoints are hexadecimal.
        self._max_header_bytes = 4 * MAX_SCENARIO_BYTES + 2 * (key_bytes + MAX_CHECKPOINT_BYTES)
        self._max_query_bytes = 8 * policy.allow.dimension
        query_count = _MAX_PENDING_BYTES // (self._max_header_bytes + self._max_query_bytes)
        self._connections = threading.Semaphore(_MAX_CONNECTIONS)
        # A query that is sent slowly occupies one slot, and others are still read.
        self._query_slots = threading.Semaphore(min(_MAX_CONNECTIONS, max(4, query_count)))

    def accept_connections(self, listener: socket.socket) -> None:
        """Accept connections without end, and handle each in a separate thread.

        Beyond `_MAX_CONNECTIONS` at a time, and while the system gives no thread, a new connection is closed
        unread.
        """
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                time.sleep(0.1)  # For example, no file descriptor is free for now.
                continue
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._handle_connection, args=(connection,), daemon=True).start()
            except RuntimeError:  # No thread for now: keep accepting connections.
                self._connections.release()
                connection.close()

    def answer_next_request(self) -> None:
        """Wait for the next request of the queue, and hand its reply to the thread that waits for it.

        Guarantee: unless `allow.tick` is 0, a request, refused or not, takes a whole multiple of `allow.tick`, and
        the next request is begun only then.  So neither the time of its reply nor that of the next request's reply
        reveals more about the records than that multiple.
        """
        request = self._requests.get()
        self._start_time = start_time = time.monotonic()
        reply, metrics = self._answer_or_refuse(request), self._metrics
        # Metrics change at the end of the tick, like the reply, and not at all if the ledger cannot be read.
        with suppress(InputError, RunError, OSError, sqlite3.Error):
            metrics = self._collect_metrics()
        if (tick := self._policy.allow.tick) > 0.0:
            time.sleep((start_time - time.monotonic()) % tick)
        self._metrics = metrics
        request.reply.set_result(reply)
        self._start_time = None

    def _handle_connection(self, connection: socket.socket) -> None:
        """Read one request, send its reply, and close the connection.

        An error of the connection is ignored, such as a client that is silent or gone.
        """
        try:
            with connection, suppress(OSError):
                reply = self._read_and_answer(connection)
                connection.settimeout(_PATIENCE_SECONDS)
                send_frame(connection, json.dumps(reply.header).encode())
                if reply.content is not None:
                    send_frame(connection, reply.content)
                # If unread bytes remained at the close, the reply could be lost.
                drain_connection(connection, _PATIENCE_SECONDS)
        except Exception:
            _log.exception("a conversation failed")
        finally:
            self._connections.release()

    def _read_and_answer(self, connection: socket.socket) -> Reply:
        """Read a request and return its reply.

        A request to the guard is put into the queue, and this thread waits for the main thread's reply.  Requests
        for health, and malformed or too long frames, are answered here, at a multiple of the tick.

        Raises:
            OSError: If a part of the request does not arrive in time, or the other end closes the connection.
        """
        try:
            header = receive_json(connection, self._max_header_bytes, _PATIENCE_SECONDS)
            if header.get("health"):
                self._wait_for_tick()
                fault = self._why_unhealthy()
                return Reply({"healthy": not fault} | ({"why": fault} if fault else {}))
            length = receive_length(connection, self._max_query_bytes, _PATIENCE_SECONDS)
            with self._query_slots:  # held from the query's first byte, which then has to arrive, to the reply
                query = receive_content(connection, length, _QUERY_SECONDS + length / _MIN_BYTES_PER_SECOND)
                self._requests.put(request := PendingRequest(header, query, Future()))
                return request.reply.result()
        except (ValueError, RecursionError):
            self._wait_for_tick()
            return _refusal_reply("the request is malformed or too long", is_final=True)

    def _wait_for_tick(self) -> None:
        if (tick := self._policy.allow.tick) > 0.0:
            time.sleep(-time.monotonic() % tick)

    def _why_unhealthy(self) -> str | None:
        """Return a fault if an answer takes too long, a disk cannot be written or the socket is gone, or None."""
        start_time = self._start_time
        if start_time is not None and time.monotonic() - start_time > _STUCK_SECONDS:
            return f"it has worked on one answer for more than {_STUCK_SECONDS:.0f} s"
        return why_unwritable(self._policy.ledger, self._policy.mark_path) or self.why_unreachable()

    def metrics(self) -> list[ServiceMetric]:
        """Return the metrics as of the last request to the guard, and whether the guard is healthy now."""
        return [
            *self._metrics,
            ServiceMetric("fedpriv_guard_healthy", "1 if it is at work, or waits.", not self._why_unhealthy()),
        ]

    def _collect_metrics(self) -> list[ServiceMetric]:
        if not self._collects_metrics:
            return []
        statuses = {
            records: guard.budget_status
            for records, guard in (("training", self._guards.training), ("tests", self._guards.tests))
            if guard is not None
        }
        return [
            *self._events.metrics(self._policy.silo, statuses),
            *(
                ServiceMetric(f"fedpriv_guard_{name}_bytes", help_text, value, {"file": file})
                for file, path in (("ledger", self._policy.ledger), ("mark", self._policy.mark_path))
                if path.exists()
                for name, help_text, value in (
                    ("file", "Size of the file.", path.stat().st_size),
                    ("disk_free", "Free on its disk.", shutil.disk_usage(path.parent).free),
                )
            ),
        ]

    def _answer_or_refuse(self, request: PendingRequest) -> Reply:
        """Answer a request, where an error becomes a refusal.

        Only a `FedprivError` gives its reason.  Other reasons may depend on the records, and are only logged.
        """
        try:
            return self._answer(request.header, request.query)
        except FedprivError as error:
            if isinstance(error, GuardFailureError):
                self._events.record_failure()
            else:
                self._events.record_refusal(str(request.header.get("run")), str(error))
            # After a `LedgerError` the request may be sent again: the disk may have space later.
            return _refusal_reply(str(error), is_final=not isinstance(error, LedgerError))
        except Exception:
            self._events.record_failure()
            _log.exception("a request failed")
            return _refusal_reply(
                f"silo {self._policy.silo}: its guard failed, and its own log says why", is_final=True
            )

    def _answer(self, header: dict[str, Any], query: bytearray) -> Reply:
        """Answer a request of one of four kinds.

        Its header asks for the shapes of a model's parameters ("shapes_of"), whether the policy would admit a run
        now (`PREVIEW_ADMISSION`), or for the silo's public key (round "t" = 0) or message (any other round) of a
        run.  Keys and messages are those of the guard of the test records if "tests" is true in the header, and
        else of the guard of the training records.

        Args:
            header: Header of the request.
            query: Bytes of the query, if the request is for a message.

        Returns:
            The reply, or a refusal of a malformed request.

        Raises:
            FedprivError: If a guard refuses the request, the request is about test records and the policy has no
                [evaluation], or the SuperNode has another version of the protocol.
        """
        malformed = _refusal_reply("the request is malformed", is_final=True)
        if (protocol := header.get("protocol", PROTOCOL_VERSION)) != PROTOCOL_VERSION:
            local, remote = version("fedpriv"), sanitize_line(str(header.get("fedpriv")), 20)
            raise self._refusal_error(
                f"its guard runs fedpriv {local} (protocol {PROTOCOL_VERSION}), its SuperNode {remote} (protocol "
                f"{protocol!r:.20}): install the same version for both"
            )
        if isinstance(cell := header.get("shapes_of"), str):
            return Reply({"shapes": self._guards.training.query_shapes(cell)})
        run, cell, t, key_hex = (header.get(name) for name in ("run", "cell", "t", "keys"))
        if header.get(PREVIEW_ADMISSION) is True and isinstance(run, str) and isinstance(cell, str):
            # A run with evaluations needs the consent of both guards.
            if self._guards.training.preview_admission(run, cell).evaluation is not None:
                self._test_guard().preview_admission(run, cell)
            return Reply({PREVIEW_ADMISSION: True})
        checkpoint_hex = header.get(SERVER_CHECKPOINTS, "")
        if not (
            isinstance(run, str)
            and isinstance(cell, str)
            and isinstance(key_hex, str)
            and isinstance(checkpoint_hex, str)
            and type(t) is int  # and no truth value
        ):
            return malformed
        guard = self._guards.training if header.get("tests") is not True else self._test_guard()
        if t == 0:  # Round 0 has no query, and its reply is the silo's public key.
            return Reply({"dtype": "uint8"}, guard.public_key(run, cell))
        dtype = DTYPES.get(str(header.get("dtype")))
        try:
            signed_keys, checkpoints = bytes.fromhex(key_hex), bytes.fromhex(checkpoint_hex)
        except ValueError:
            return malformed
        if dtype is None or not query or len(query) % dtype.itemsize:
            return malformed
        release = guard.answer(
            run, cell, t, torch.frombuffer(query, dtype=dtype), signed_keys, checkpoints=checkpoints
        ).numpy()
        self._events.record_answer(guard.ledger_run_id(run, cell), t, is_evaluation=header.get("tests") is True)
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
