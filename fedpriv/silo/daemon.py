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

from fedpriv.core.errors import FedprivError, InputError, RunError, printable
from fedpriv.plan.task import DTYPES
from fedpriv.protocol.frames import discard, receive_content, receive_json, receive_length, send_frame
from fedpriv.protocol.messages import AGREE, COMMIT, LONGEST, PROTOCOL, SEEN
from fedpriv.silo.admission import LONGEST_SCENARIO
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import Guards, open_guards
from fedpriv.silo.ledger import LedgerError
from fedpriv.silo.masks import CARD_BYTES
from fedpriv.silo.memory import hold_to
from fedpriv.silo.metrics import Figure, metrics_served, somebody_listens
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.seen import Events

_log = logging.getLogger("fedpriv.guard")


_LOOK = 0.1  # seconds


@contextmanager
def within(processor: float, clock: float) -> Iterator[None]:
    """TimeoutError in the main thread if what is inside takes more seconds of the processor, or by the clock.

    What other programs take of the machine, and other threads of this one, counts by the clock only: a busy one
    refuses nothing that an idle one takes.  Who swallows the error gets it again.
    """
    used, began, over = time.thread_time(), time.monotonic(), False

    def look(*_: object) -> None:
        if over:
            return
        if time.thread_time() - used > processor:
            raise TimeoutError(f"it takes more than {processor:g} s of the processor")
        if time.monotonic() - began > clock:
            raise TimeoutError(f"it takes more than {clock:g} s")

    before = signal.signal(signal.SIGALRM, look)

    def stop() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

    try:
        signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)
        try:
            yield
        finally:
            over = True
            stop()
    except TimeoutError:  # it may have come on the way out, before the end was noted
        over = True
        stop()
        raise


_CONNECTIONS, _WAITED_FOR = 32, 2**26
"""At a time, with requests of at most so many bytes together; whoever comes then is turned away."""
_STACK = 2**19
"""Bytes for each thread of a connection."""
_PATIENCE = 20.0
"""Seconds for a request to be there once its connection is, and for a reply to be taken."""
_COMING, _LEAST_RATE = 2.0, 2**23
"""Seconds, and bytes a second on top, for a query that has begun to come: others wait for its place."""
_PLANNING, _WAITING = 30.0, 300.0
"""Seconds for a scenario's plan: of the processor, and by the clock."""
_STUCK = 900.0
"""Seconds of one answer after which the guard calls itself ill."""


class Reply(NamedTuple):
    """What goes back: a header, and the bytes of a release if there is one."""

    header: dict[str, Any]
    content: bytes | None = None


class Asked(NamedTuple):
    """A request as it came, and where its reply is waited for."""

    header: dict[str, Any]
    query: bytearray
    reply: "Future[Reply]"


def serve(policy_path: Path, ready: Callable[[Path], None] = lambda _: None, metrics: str | None = None) -> None:
    """Answer until the process is ended; InputError if policy, shard or ledger cannot be used.

    `metrics` is where figures are told: see `metrics_served`.
    """
    torch.set_num_threads(1)
    policy = read_policy(policy_path)
    desk = Desk(policy, open_guards(policy, partial(within, _PLANNING, _WAITING)), figures=metrics is not None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # neither a terminal that closes nor a `reload` ends a guard
    threading.stack_size(_STACK)
    hold_to(policy.allow.memory)
    with _listening(policy) as listener, metrics_served(metrics, desk.figures):
        threading.Thread(target=desk.accept, args=(listener,), daemon=True).start()
        ready(policy.socket)
        desk.work()


@contextmanager
def _listening(policy: Policy) -> Iterator[socket.socket]:
    if somebody_listens(policy.socket):
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
            _open_to(policy.socket, policy.group)
        listener.listen(_CONNECTIONS)
        yield listener


def _open_to(socket: Path, group: str) -> None:
    try:
        shutil.chown(socket, group=int(group) if group.isdigit() else group)
        socket.chmod(0o660)
    except (OSError, LookupError) as error:
        raise InputError(f"group = {group!r}: cannot be given the socket {socket}: {error}") from None


class Desk:
    """Where requests wait for the guard."""

    def __init__(
        self,
        policy: Policy,
        guards: Guards,
        *,
        figures: bool = False,
    ) -> None:
        """`figures`: somebody will ask for them."""
        self._policy, self._guards = policy, guards
        self._waiting: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._events = Events()
        self._watched = figures
        self._figures = self._seen()
        self._began: float | None = None
        cards = CARD_BYTES * (policy.allow.silos or guards.training.peers)
        self._longest_header = 4 * LONGEST_SCENARIO + 2 * (cards + LONGEST)  # JSON in JSON, every quote escaped
        self._longest_query = 8 * policy.allow.dimension
        fit = _WAITED_FOR // (self._longest_header + self._longest_query)
        self._connections = threading.Semaphore(_CONNECTIONS)
        self._room = threading.Semaphore(min(_CONNECTIONS, max(4, fit)))  # for queries, one that comes slowly too

    def accept(self, listener: socket.socket) -> None:
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
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()
            except RuntimeError:  # no thread is to be had, for now; a guard that takes no connections is none
                self._connections.release()
                connection.close()

    def work(self) -> None:
        """Answer what is waiting, for ever."""
        while True:
            self.work_once()

    def work_once(self) -> None:
        """Wait for a request and answer it.

        Guarantee: a request, refused or not, takes a whole multiple of `allow.tick`, and nothing else is begun
        until then: neither its reply nor the next one's comes at a time that tells more of the records than that.
        """
        asked = self._waiting.get()
        self._began = began = time.monotonic()
        reply = self._replied(asked)
        figures = self._seen()
        if (tick := self._policy.allow.tick) > 0.0:
            time.sleep((began - time.monotonic()) % tick)
        self._figures = figures
        asked.reply.set_result(reply)
        self._began = None

    def _converse(self, connection: socket.socket) -> None:
        """One request and its reply; whoever is silent, gone or sends too much is left alone."""
        try:
            with connection, suppress(OSError):
                reply = self._conversed(connection)
                connection.settimeout(_PATIENCE)
                send_frame(connection, json.dumps(reply.header).encode())
                if reply.content is not None:
                    send_frame(connection, reply.content)
                discard(connection, _PATIENCE)  # closed with something unread, the reply would be lost
        except Exception:
            _log.exception("a conversation failed")
        finally:
            self._connections.release()

    def _conversed(self, connection: socket.socket) -> Reply:
        """The reply to a request; what the guard is not asked leaves at a tick, not when it happens to be idle."""
        try:
            header = receive_json(connection, self._longest_header, _PATIENCE)
            if header.get("health"):
                self._wait_for_a_tick()
                return Reply({"healthy": self._healthy()})
            length = receive_length(connection, self._longest_query, _PATIENCE)
            with self._room:  # taken once a query begins to come, which then has to go on
                query = receive_content(connection, length, _COMING + length / _LEAST_RATE)
                asked = Asked(header, query, Future())
                self._waiting.put(asked)
                return asked.reply.result()
        except (ValueError, RecursionError):
            self._wait_for_a_tick()
            return _refused("the request is malformed or too long", final=True)

    def _wait_for_a_tick(self) -> None:
        if (tick := self._policy.allow.tick) > 0.0:
            time.sleep(-time.monotonic() % tick)

    def _healthy(self) -> bool:
        began = self._began
        return began is None or time.monotonic() - began < _STUCK

    def figures(self) -> list[Figure]:
        """As they were when the last tick was over, for another thread."""
        return [*self._figures, Figure("fedpriv_guard_healthy", "1 if it is at work, or waits.", self._healthy())]

    def _seen(self) -> list[Figure]:
        if not self._watched:
            return []
        guards = {"training": self._guards.training, "tests": self._guards.tests}
        known = {records: guard.standing for records, guard in guards.items() if guard is not None}
        return self._events.figures(self._policy.silo, known)

    def _replied(self, asked: Asked) -> Reply:
        """Never an exception: what is wrong with a request is refused, what is wrong here is logged here."""
        try:
            return self._answer(asked.header, asked.query)
        except FedprivError as error:
            self._events.refused(str(asked.header.get("run")), str(error))
            return _refused(str(error), final=not isinstance(error, LedgerError))  # a disk may be full now only
        except Exception:
            self._events.failed()
            _log.exception("a request failed")
            return _refused(f"silo {self._policy.silo}: its guard failed, and its own log says why", final=True)

    def _answer(self, header: dict[str, Any], query: bytearray) -> Reply:
        malformed = _refused("the request is malformed", final=True)
        if (theirs := header.get("protocol", PROTOCOL)) != PROTOCOL:
            own, other = version("fedpriv"), printable(str(header.get("fedpriv")), 20)
            raise self._refusal(
                f"its guard runs fedpriv {own} (protocol {PROTOCOL}), its SuperNode {other} (protocol "
                f"{theirs!r:.20}): install the same version for both"
            )
        if isinstance(cell := header.get("shapes_of"), str):
            return Reply({"shapes": self._guards.training.shapes(cell)})
        run, cell, t, keys = (header.get(name) for name in ("run", "cell", "t", "keys"))
        if header.get(AGREE) is True and isinstance(run, str) and isinstance(cell, str):
            if self._guards.training.agree(run, cell).evaluation is not None:
                self._tests().agree(run, cell)
            return Reply({AGREE: True})
        seen = header.get(SEEN, "")
        if not (
            isinstance(run, str)
            and isinstance(cell, str)
            and isinstance(keys, str)
            and isinstance(seen, str)
            and type(t) is int
        ):
            return malformed
        guard = self._guards.training if header.get("tests") is not True else self._tests()
        if t == 0:
            return Reply({"dtype": "uint8"}, guard.public_key(run, cell))
        dtype = DTYPES.get(str(header.get("dtype")))
        try:
            cards, commits = bytes.fromhex(keys), bytes.fromhex(seen)
        except ValueError:
            return malformed
        if dtype is None or not query or len(query) % dtype.itemsize:
            return malformed
        release = guard.answer(run, cell, t, torch.frombuffer(query, dtype=dtype), cards, seen=commits).numpy()
        self._events.answered(run, t, tests=header.get("tests") is True)
        return Reply({"dtype": str(release.dtype), COMMIT: guard.told(run, cell, t).hex()}, release.tobytes())

    def _tests(self) -> Guard:
        if self._guards.tests is None:
            raise self._refusal("by its policy, which has no [evaluation], it evaluates nothing")
        return self._guards.tests

    def _refusal(self, reason: str) -> RunError:
        return RunError(f"silo {self._policy.silo} refuses: {reason}")


def _refused(reason: str, *, final: bool) -> Reply:
    return Reply({"refused": reason, "final": final})
