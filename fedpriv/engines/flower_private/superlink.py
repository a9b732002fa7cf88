"""The SuperLink: it knows SuperNodes, takes a reply from its sender alone, and holds empty replies.

Long polling: hold an empty reply until a message arrives or `seconds` pass.

node ── anything for me? ──▶ the app ── nothing ──▶ held until a bell rings ──▶ the app is asked again
                                     ── a message ──▶ sent

Flower's middleware, of SuperLink and SuperNode, hands whole replies on: Starlette has a task and a stream for each
layer.  Measured on Flower 1.41: a request to a SuperLink goes through nine of them; they take 2 of its 4 ms.  Its
limits are raised for loaded machines.
"""

import asyncio
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from unittest import mock

from flwr.app import Message as FlowerMessage
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.error import FlowerError
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from google.protobuf.message import DecodeError
from starlette.middleware.base import BaseHTTPMiddleware, _CachedRequest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpriv.engines.flower_private import FLEET, RUNTIME
from fedpriv.engines.flower_private.carried import (
    give_contents_to_supernodes,
    give_contents_to_tasks,
    store_what_supernodes_send,
    store_what_tasks_send,
)
from fedpriv.engines.flower_private.kept import create_nodes
from fedpriv.engines.flower_private.unfinished import Pushes

WHOLE = frozenset(path for _, path in PROTOBUF_REQUEST_TYPES if path.startswith((FLEET, RUNTIME)))
"""Paths whose answers are one protobuf message, which is there before any of it is sent."""


def hand_on_whole_answers() -> None:
    """For as long as this process lives.

    Guarantee: every middleware still sees every request and its answer, in the same order, so that nothing is let
    through that Flower refuses.
    """
    mock.patch.object(BaseHTTPMiddleware, "__call__", directly(BaseHTTPMiddleware.__call__)).start()


def directly(streaming: Any) -> Any:
    """`BaseHTTPMiddleware.__call__` for `WHOLE`; others are `streaming`'s."""

    async def call(self: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in WHOLE:
            await streaming(self, scope, receive, send)
            return
        request = _CachedRequest(scope, receive)

        async def call_next(_request: Request) -> Response:
            answer: list[Message] = []

            async def keep(message: Message) -> None:
                answer.append(message)

            await self.app(scope, request.wrapped_receive, keep)
            start, *bodies = answer
            response = Response(b"".join(part.get("body", b"") for part in bodies), start["status"])
            response.raw_headers = start["headers"]
            return response

        response = await self.dispatch_func(request, call_next)
        await response(scope, request.wrapped_receive, send)

    return call


_CLAIM_SECONDS, _BEAT_SECONDS = 300.0, 60.0


def wait_for_slow_starts() -> None:
    """Let a task's process take minutes to start, where Flower takes its token back after 30 s.

    A process that runs sends heartbeats, and is missed after a minute, as always.
    """
    patience = _BEAT_SECONDS / _CLAIM_SECONDS  # a heartbeat counts for PATIENCE * INTERVAL, a claim for INTERVAL
    mock.patch.object(in_memory_corestate, "HEARTBEAT_PATIENCE", patience).start()  # for as long as this process
    mock.patch.object(in_memory_corestate, "HEARTBEAT_DEFAULT_INTERVAL", _CLAIM_SECONDS).start()


_LONGEST_REQUEST = 2**16
"""Bytes; who asks whether something has come says who he is, or names what he waits for."""


class Bells:
    """A bell for each node, rung from any thread, waited for by any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung: Counter[int] = Counter()
        self._waiting: defaultdict[int, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(set)

    def ring(self, node: int) -> None:
        with self._lock:
            self._rung[node] += 1
            waiting = self._waiting.pop(node, set())
        for loop, event in waiting:
            with suppress(RuntimeError):  # a loop that is closed waits for nothing
                loop.call_soon_threadsafe(event.set)

    def rung(self, node: int) -> int:
        """Number of times that the bell rang until now."""
        with self._lock:
            return self._rung[node]

    async def wait(self, node: int, since: int, seconds: float) -> bool:
        """Whether it has rung more than `since` times; waits for that, for so many seconds at most."""
        here = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if self._rung[node] > since:
                return True
            self._waiting[node].add(here)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(here[1].wait(), seconds)
        finally:
            with self._lock:
                self._waiting[node].discard(here)
                if not self._waiting[node]:
                    del self._waiting[node]
        return self.rung(node) > since


class Held(NamedTuple):
    """Long polling: the empty replies that are held."""

    node_of: Callable[[bytes], int]
    """Reads in a request whose bell is waited for; ValueError if there is none."""
    seconds: float
    """For how long at most."""


class HeldAnswers:
    """An app whose empty answers on some paths wait for a bell, after which the app is asked the same again.

    Guarantee: only an empty answer with status 200 is held: who is refused is refused at once, and nothing is sent
    but the app's last answer to the request as it came.
    """

    def __init__(self, app: ASGIApp, paths: Mapping[str, Held], bells: Bells) -> None:
        self.app = app
        self._paths, self._bells = paths, bells

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = self._paths.get(scope["path"]) if scope["type"] == "http" else None
        if held is None:
            await self.app(scope, receive, send)
            return
        request = _Request(receive)
        node = await request.node(held.node_of)
        if node is None:
            await self.app(scope, request.told(), send)
            return
        until = time.monotonic() + held.seconds
        while True:
            since, answer = self._bells.rung(node), _Answer()
            own = {**scope, "state": dict(scope.get("state", {}))}  # what one asking notes is not the next one's
            await self.app(own, request.told(), answer.keep)
            left = until - time.monotonic()
            if not answer.is_empty or left <= 0.0 or not await self._bells.wait(node, since, left):
                break
        for message in answer.messages:
            await send(message)


class _Answer:
    """An answer that is kept."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def keep(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def is_empty(self) -> bool:
        ok = any(message.get("status") == 200 for message in self.messages)
        return ok and not any(message.get("body") for message in self.messages)


class _Request:
    """A request that can be told more than once, if it is short."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []

    async def node(self, node_of: Callable[[bytes], int]) -> int | None:
        """Read the node that the request names, None if it names none or is too long."""
        body, more = b"", True
        while more and len(body) <= _LONGEST_REQUEST:
            message = await self._receive()
            self._messages.append(message)
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if not more and len(body) <= _LONGEST_REQUEST:
            with suppress(ValueError):
                return node_of(body)
        return None

    def told(self) -> Receive:
        """From its beginning."""
        kept = iter(self._messages)

        async def receive() -> Message:
            for message in kept:
                return message
            return await self._receive()

        return receive


PULL, REPLIES = f"{FLEET}pull-messages", f"{RUNTIME}pull-messages"
_HOLD_SECONDS = 2.0  # a SuperNode takes an answer for lost after 5
_HOLD_SERVER_SECONDS = 1.0  # a server has other things to look for


class SuperLinkApp(NamedTuple):
    """Flower's SuperLink and what it knows."""

    app: ASGIApp
    state: LinkState
    pushes: Pushes


def superlink_app(options: Sequence[str], nodes: Mapping[str, bytes]) -> SuperLinkApp:
    """Flower's SuperLink with all its APIs, as `flower-superlink OPTIONS` serves it, that knows SuperNodes.

    `nodes`: a SuperNode's name -> its public key (PEM).  A name can be given here and through the Control API
    only, so that it says who a node is, whatever the node says.
    """
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app
    from flwr.superlink.servicer.runtime import runtime_handlers

    wait_for_slow_starts()
    hand_on_whole_answers()
    store_what_supernodes_send()
    store_what_tasks_send(runtime_handlers, lambda state: state.lock)
    give_contents_to_supernodes()
    give_contents_to_tasks(runtime_handlers)
    pushes = Pushes()
    pushes.watch()
    _refuse_replies_of_others()
    with mock.patch.object(sys, "argv", ["flower-superlink", *options]):
        config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    state = app.state.linkstate_factory.state()
    create_nodes(state, nodes)
    held = {PULL: Held(node_of_pull, _HOLD_SECONDS), REPLIES: Held(server_of_pull, _HOLD_SERVER_SECONDS)}
    return SuperLinkApp(HeldAnswers(app, held, bells_of(state)), state, pushes)


def bells_of(state: LinkState) -> Bells:
    """The bells of nodes, rung when a message for them is stored: `state` is the SuperLink's one and only."""
    bells = Bells()
    store = state.store_message_and_object_tree

    def ringing(message: FlowerMessage, object_tree: ObjectTree, session_id: str) -> tuple[bool, list[str]]:
        stored = store(message, object_tree, session_id)
        bells.ring(message.metadata.dst_node_id)
        return stored

    mock.patch.object(state, "store_message_and_object_tree", ringing).start()
    return bells


def node_of_pull(request: bytes) -> int:
    """Read the node that asks for messages; ValueError for any other request."""
    try:
        return int(PullMessagesRequest.FromString(request).node.node_id)
    except DecodeError as error:
        raise ValueError(str(error)) from None


def server_of_pull(request: bytes) -> int:
    """The node to which replies are sent, for a server that asks for some; ValueError for anything else."""
    try:
        asked = PullAppMessagesRequest.FromString(request)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    if not asked.message_ids:
        raise ValueError("no reply is asked for")
    return SUPERLINK_NODE_ID


def _refuse_replies_of_others() -> None:
    """Check who a reply says it is from, where Flower checks only who sends it.

    Guarantee: a SuperNode's reply counts as that SuperNode's, whatever it is told to say.
    """
    from flwr.supercore.error import ApiErrorCode
    from flwr.superlink.servicer.fleet import fleet_handlers

    push_messages = fleet_handlers.push_messages

    def checked(request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
        node = request.node.node_id
        if any(message.metadata.src_node_id != node for message in request.messages_list):
            raise FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, f"node {node} replies as another node")
        return push_messages(request=request, state=state)

    mock.patch.object(fleet_handlers, "push_messages", checked).start()
