"""The SuperNode's loop, which waits for events where Flower's waits for a time, and its end, which is told apart.

Measured on Flower 1.41: when the SuperLink forgets a SuperNode, this ends with 0; when its loop ends by an error,
its other threads keep the process.  Here it ends with LOST then.
"""

import email.utils
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, NoReturn, ParamSpec, TypeVar
from unittest import mock

import httpx
from flwr.app import Message
from flwr.common.constant import Status
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supernode import fleet_http_connection
from flwr.supernode import start_client_internal as loop
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.servicer.runtime import runtime_handlers

from fedpriv.engines.flower_private import SOON
from fedpriv.engines.flower_private.carried import (
    give_contents_to_tasks,
    sending_contents,
    store_what_tasks_send,
    take_contents,
)
from fedpriv.engines.flower_private.presence import VERSION
from fedpriv.engines.flower_private.superlink import hand_on_whole_answers, wait_for_slow_starts
from fedpriv.engines.service import LOST, SUPERNODE, leave_beat
from fedpriv.protocol.clocks import difference, is_tolerated
from fedpriv.protocol.messages import PROTOCOL

_LONGEST_WAIT = 3.0  # seconds between two looks at a SuperLink that answers "nothing" at once
_NO_REPLY = 30.0  # seconds without a ClientApp at work after which no reply comes
_HELD = 1.0  # seconds after which such an answer was held back
_AT_WORK = (Status.PENDING, Status.STARTING, Status.RUNNING)
P = ParamSpec("P")
R = TypeVar("R")
Pulled = tuple[Message, ObjectTree]


class Waits:
    """A stand-in for the loop's module `time`: a sleep that ends when there is something to do.

    The loop sleeps after it asked the SuperLink in vain, and while it waits for the ClientApp's reply and objects.
    A SuperLink of ours holds its answers, so that asking again at once costs nothing; others are asked after
    times that double.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._happened = threading.Event()
        self._wait, self._woke = SOON, now()
        self._working: Callable[[], bool] | None = None
        self._idle: float | None = None

    def happened(self) -> None:
        """A reply or an object of one is there; called by any thread."""
        self._happened.set()

    def message(self) -> None:
        """The SuperLink had one."""
        self._wait = SOON

    @contextmanager
    def for_reply(self, working: Callable[[], bool]) -> Iterator[None]:
        """A block that waits for a ClientApp's reply; it ends by an error once none is `working` any more."""
        self._working, self._idle = working, None
        try:
            yield
        finally:
            self._working = None

    def sleep(self, seconds: float) -> None:
        if seconds < _LONGEST_WAIT:
            self._happened.wait(seconds)
            self._happened.clear()
            if self._working is None or self._working():
                self._idle = None
            elif self._idle is None:
                self._idle = self._now()
            elif self._now() - self._idle > _NO_REPLY:
                raise RuntimeError(
                    "a ClientApp ended without a reply, and nothing else brings one; a clock that jumped ahead or "
                    "a machine that was suspended does that"
                )
        else:
            self._wait = SOON if self._now() - self._woke > _HELD else min(2.0 * self._wait, _LONGEST_WAIT)
            threading.Event().wait(self._wait)
        self._woke = self._now()


class Question:
    """The message that was pulled last, and whether a reply to it was sent.

    Flower's loop pulls one message, then sends the replies that are there, once.  Its task begins before all of
    the message is there: where a run ends meanwhile, the loop goes on, and the task's reply is left.  It would be
    sent in the place of the next one, which would stay in turn: one behind for ever, each reply leaving only once
    the server has asked again, after half a minute.
    """

    def __init__(self) -> None:
        self._pulled: str | None = None

    def received(self, receive: Callable[[], Pulled | None]) -> Pulled | None:
        """`receive`, noting the message that it returns."""
        if (found := receive()) is not None:
            self._pulled = found[0].metadata.message_id
        return found

    def sent(self, send: Callable[..., R], reply: Message, *given: Any, **named: Any) -> R:
        """`send`, noting which message it is a reply to, also where it fails."""
        if reply.metadata.reply_to_message_id == self._pulled:
            self._pulled = None
        return send(reply, *given, **named)

    def push(self, push: Callable[..., None], *given: Any, send: Callable[..., Any], **named: Any) -> None:
        """Call `push` until a reply to the message that was pulled was sent, whatever was left of others."""
        while True:
            push(*given, send=partial(self.sent, send), **named)
            if self._pulled is None:
                return


def clock_trouble(date: str | None, now: float) -> str | None:
    """Say by how much this machine's clock differs from the one of an answer's `date`, where that is refused."""
    try:
        ahead = now - email.utils.parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None
    if is_tolerated(ahead):
        return None
    return f"this machine's clock is {difference(ahead)} the SuperLink's; set it by NTP"


def _beating(send: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """`FleetHttpClient._send` that says its version, and leaves a beat for each answer, or why there is none."""
    own = f"{version('fedpriv')} (protocol {PROTOCOL})"

    def sent(client: FleetHttpClient, context: ProtobufRequestContext, **named: Any) -> httpx.Response:
        context.request.headers[VERSION] = own
        try:
            answer = send(client, context, **named)
        except httpx.HTTPError as error:
            leave_beat(SUPERNODE, str(error) or type(error).__name__)
            raise
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            clock = clock_trouble(answer.headers.get("date"), time.time())
            leave_beat(SUPERNODE, clock or "the SuperLink does not know this SuperNode's key")
        elif answer.is_success:
            leave_beat(SUPERNODE)
        return answer

    return sent


def _not_connected(_code: int, message: str | None = None, **_: Any) -> NoReturn:
    """`flwr_exit` where a connection could not be made, or no port was to be had."""
    said = (message or "").strip().rpartition("\n")[2]
    if f"[code: {ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED.value}]" in said:
        said = "the SuperLink does not know this SuperNode's key, or heard of another with it within a minute"
    leave_beat(SUPERNODE, said)
    sys.exit(LOST)


def run_supernode(options: Sequence[str], bell: int) -> NoReturn:
    """`flower-supernode OPTIONS`, a byte written to `bell` for each message whose objects are all there.

    Its exit code is LOST where it lost its SuperLink, and that of Flower, or 1, for any other end.
    """
    code = 1
    threading.excepthook = _end_with_a_thread
    try:
        _run_supernode(options, bell)
        code = LOST  # Flower's loop is for ever, and ends by an error that it has written
    except SystemExit as end:
        code = LOST if end.code in (0, None) else end.code if isinstance(end.code, int) else 1
    except RuntimeError as error:
        traceback.print_exc()
        code = LOST if "API failed to start" in str(error) else 1  # another program took its port: another port
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Flower's threads would keep the process


def _end_with_a_thread(said: threading.ExceptHookArgs) -> None:
    """A SuperNode without its heartbeats, or without its Runtime API, is none."""
    traceback.print_exception(said.exc_type, said.exc_value, said.exc_traceback)
    sys.stderr.flush()
    os._exit(LOST)


def _run_supernode(options: Sequence[str], bell: int) -> None:
    start_parent_process_monitor(os.getppid())
    wait_for_slow_starts()
    hand_on_whole_answers()
    store_what_tasks_send(runtime_handlers, unseen)
    give_contents_to_tasks(runtime_handlers)
    take_contents(FleetHttpClient)
    waits, question = Waits(), Question()
    pull, push = loop._pull_and_store_message, loop._push_messages

    def pulled(*, receive: Callable[[], Any], **named: Any) -> int | None:
        run = pull(receive=partial(question.received, receive), **named)
        if run is not None:
            waits.message()
            os.write(bell, b"\n")
        return run

    def pushed(
        state: InMemoryNodeState,
        object_store: ObjectStore,
        send: Callable[..., Any],
        push_object: Callable[..., None],
    ) -> None:
        with waits.for_reply(lambda: bool(state.get_tasks(statuses=_AT_WORK))):
            whole = sending_contents(send, object_store)
            question.push(push, state, object_store, send=whole, push_object=push_object)

    with (
        mock.patch.object(loop, "time", waits),
        mock.patch.object(loop, "_push_messages", pushed),
        mock.patch.object(loop, "pull_objects", partial(pull_objects, initial_backoff=SOON)),
        mock.patch.object(loop, "_pull_and_store_message", pulled),
        mock.patch.object(FleetHttpClient, "_send", _beating(FleetHttpClient._send)),
        mock.patch.object(fleet_http_connection, "flwr_exit", _not_connected),
        mock.patch.object(
            InMemoryNodeState, "store_message", _then(InMemoryNodeState.store_message, waits.happened)
        ),
        mock.patch.object(InMemoryObjectStore, "put", _then(InMemoryObjectStore.put, waits.happened)),
        mock.patch.object(sys, "argv", ["flower-supernode", *options]),
    ):
        flower_supernode()


@contextmanager
def unseen(state: InMemoryNodeState) -> Iterator[None]:
    """A block in which nobody sees the state's messages; Flower takes these locks in this order."""
    with state._lock_object_push_sessions, state.lock_msg_store:
        yield


def _then(function: Callable[P, R], afterwards: Callable[[], None]) -> Callable[P, R]:
    def both(*given: P.args, **named: P.kwargs) -> R:
        result = function(*given, **named)
        afterwards()
        return result

    return both
