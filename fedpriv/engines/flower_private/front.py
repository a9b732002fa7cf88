"""ASGI app before Flower's SuperLink, which reads a few of its wire messages.

No code of Flower is changed.

silo ── anything for me? ──▶ front ──▶ SuperLink ── nothing ──▶ held until a query is there whole, or 2 s are over

| what happens | Flower | here |
|---|---|---|
| a silo replies as another silo | counts the reply | refused with 403 |
| a silo asks, or a server does, and nothing is there | answered at once | held: long polling |
| a server asks for a reply whose objects are on their way | waits for these, up to 180 s | gets the others first |
| a reply is announced again, since the answer was lost | wants no object of it | wants the missing ones |
| an object is sent again, since the answer was lost | refused, and so the reply is lost | stored |

Requests that the front cannot read, and all others, go to Flower as they came.
"""

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flwr.common.constant import SUPERLINK_NODE_ID
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpriv.engines.flower_private.names import (
    GET_RUN,
    PULL,
    PUSH,
    PUSH_OBJECT,
    SERVER_PULL,
    SERVER_PUSH,
    SERVER_PUSH_OBJECT,
    Route,
)

_HOLD_SECONDS = 2.0  # clients of Flower wait 30 s for an answer
_HOLD_SERVER_SECONDS = 1.0  # a server has other things to look for
_SESSION_SECONDS = 180.0  # since the last object, after which Flower forgets a reply
_MAX_QUESTIONS = 10_000


class Answer(NamedTuple):
    """A whole answer of Flower's, or one of the front's own."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def with_body(self, body: bytes) -> "Answer":
        """The same with another body."""
        headers = [(name, value) for name, value in self.headers if name.lower() != b"content-length"]
        return Answer(self.status, [*headers, (b"content-length", str(len(body)).encode())], body)

    async def send_to(self, send: Send) -> None:
        """Send it as the answer to a request."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


@dataclass
class Session:
    """A message that was announced, whose objects are on their way."""

    number: str
    missing: set[str]
    receivers: set[int]
    """Nodes that wait for the message."""
    question: str = ""
    """Query that a reply answers, or "" for a query."""
    announced: bytes = b""
    """Answer to the announcement."""
    stored: set[str] = field(default_factory=set)
    last: float = field(default_factory=time.monotonic)


Ask = Callable[[bytes], Awaitable[Answer]]
Handle = Callable[[Any, "Exchange"], Awaitable[Answer]]


class Exchange:
    """A request that was read, and the app that answers it."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes, receive: Receive) -> None:
        self._app, self._scope, self.body, self.receive = app, scope, body, receive

    async def ask(self, body: bytes | None = None, route: Route | None = None) -> Answer:
        """Flower's answer to the request, or to another body or route from the same sender."""
        content = self.body if body is None else body
        path = self._scope["path"] if route is None else route.path
        headers = [(name, value) for name, value in self._scope["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(content)).encode()))
        scope = {**self._scope, "path": path, "raw_path": path.encode(), "headers": headers}
        scope["state"] = dict(scope.get("state", {}))  # what one asking notes is not the next one's
        parts: list[Message] = []

        async def keep(message: Message) -> None:
            parts.append(message)

        await self._app(scope, _replay([{"type": "http.request", "body": content, "more_body": False}]), keep)
        return Answer(
            parts[0]["status"], list(parts[0]["headers"]), b"".join(part.get("body", b"") for part in parts)
        )


def _replay(messages: list[Message], receive: Receive | None = None) -> Receive:
    """Return a receiver of these messages, then of those that `receive` has, if there is one."""
    rest = iter(messages)

    async def next_message() -> Message:
        for message in rest:
            return message
        if receive is not None:
            return await receive()
        await asyncio.Event().wait()
        raise AssertionError("an event that nobody sets was set")

    return next_message


def _is_named(name: str, content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == name


class Front:
    """The SuperLink's app behind the front.

    Guarantee: a reply counts as that of the node whose key has signed the request, whatever it says; what Flower
    refuses is refused, and nobody gets a message that Flower did not give out for that very request.
    """

    def __init__(self, app: ASGIApp, *, polls: bool = True) -> None:
        """Take the SuperLink's app.  Without `polls`, senders are checked and nothing else is done."""
        self.app = app
        self._waiting: defaultdict[int, set[asyncio.Event]] = defaultdict(set)
        self._questions: dict[str, int] = {}  # a query's id: the node that it went to
        self._replies: dict[tuple[int, str], Session] = {}  # by node and reply
        self._queries: dict[str, Session] = {}
        handlers: list[tuple[Route, Handle]] = [(PUSH, self._silo_replies)]
        if polls:
            handlers += [
                (PULL, self._silo_asks),
                (PUSH_OBJECT, self._silo_sends),
                (SERVER_PULL, self._server_asks),
                (SERVER_PUSH, self._server_queries),
                (SERVER_PUSH_OBJECT, self._server_sends),
            ]
        self._handlers = {route.path: (route, handle) for route, handle in handlers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, handle = self._handlers.get(scope["path"] if scope["type"] == "http" else "", (None, None))
        if route is None or handle is None:
            await self.app(scope, receive, send)
            return
        messages, more = list[Message](), True
        while more:
            messages.append(await receive())
            more = messages[-1].get("more_body", False)
        body = b"".join(message.get("body", b"") for message in messages)
        try:
            request = route.request.FromString(body)
        except DecodeError:
            await self.app(scope, _replay(messages, receive), send)
            return
        answer = await handle(request, Exchange(self.app, scope, body, receive))
        await answer.send_to(send)

    async def _silo_asks(self, request: Any, exchange: Exchange) -> Answer:
        return await self._hold(exchange, request.node.node_id, _HOLD_SECONDS, lambda: exchange.body)

    async def _server_asks(self, request: Any, exchange: Exchange) -> Answer:
        def finished_only() -> bytes:
            unfinished = self._unfinished()
            ids = [query for query in request.message_ids if query not in unfinished]
            return bytes(SERVER_PULL.request(message_ids=ids).SerializeToString())

        if not request.message_ids:
            return await exchange.ask()
        answer = await self._hold(exchange, SUPERLINK_NODE_ID, _HOLD_SERVER_SECONDS, finished_only)
        if answer.status == 200:
            for message in SERVER_PULL.answer.FromString(answer.body).messages_list:
                self._questions.pop(message.metadata.reply_to_message_id, None)
        return answer

    async def _hold(self, exchange: Exchange, node: int, seconds: float, body: Callable[[], bytes]) -> Answer:
        """Ask until there is more than an empty answer, `seconds` are over, or the sender is gone."""
        departure = asyncio.ensure_future(exchange.receive())
        until = time.monotonic() + seconds
        try:
            while True:
                event = asyncio.Event()
                self._waiting[node].add(event)
                try:
                    answer = await exchange.ask(body())
                    remaining = until - time.monotonic()
                    if answer.status != 200 or answer.body or remaining <= 0.0:
                        return answer
                    wakening = asyncio.ensure_future(event.wait())
                    await asyncio.wait(
                        {wakening, departure}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED
                    )
                    wakening.cancel()
                    if departure.done():
                        return answer
                finally:
                    self._waiting[node].discard(event)
                    if not self._waiting[node]:
                        del self._waiting[node]
        finally:
            departure.cancel()

    async def _server_queries(self, request: Any, exchange: Exchange) -> Answer:
        answer = await exchange.ask()
        if answer.status == 200:
            announcement = SERVER_PUSH.answer.FromString(answer.body)
            nodes = {
                message.metadata.message_id: message.metadata.dst_node_id for message in request.messages_list
            }
            self._questions |= nodes
            while len(self._questions) > _MAX_QUESTIONS:
                del self._questions[next(iter(self._questions))]
            if announcement.objects_to_push:
                self._queries[announcement.session_id] = Session(
                    announcement.session_id, set(announcement.objects_to_push), set(nodes.values())
                )
            else:
                self._wake(set(nodes.values()))
        return answer

    async def _server_sends(self, request: Any, exchange: Exchange) -> Answer:
        answer = await exchange.ask()
        session = self._queries.get(request.session_id)
        if (
            session is not None
            and answer.status == 200
            and SERVER_PUSH_OBJECT.answer.FromString(answer.body).stored
        ):
            session.missing.discard(request.object_id)
            if not session.missing:
                del self._queries[session.number]
                self._wake(session.receivers)
        return answer

    async def _silo_replies(self, request: Any, exchange: Exchange) -> Answer:
        node, replies = request.node.node_id, [message.metadata for message in request.messages_list]
        if any(reply.src_node_id != node for reply in replies):
            return Answer(403, [(b"content-type", b"text/plain")], f"node {node} replies as another node".encode())
        if len(replies) != 1:
            return await exchange.ask()
        reply = replies[0]
        before = self._replies.get((node, reply.message_id))
        if before is not None and before.missing and time.monotonic() - before.last < _SESSION_SECONDS:
            same = GET_RUN.request(run_id=reply.run_id)
            same.node.node_id = node
            answer = await exchange.ask(
                same.SerializeToString(), GET_RUN
            )  # is it the node, in a run that goes on?
            if answer.status != 200:
                return answer
            announcement = PUSH.answer.FromString(before.announced)
            del announcement.objects_to_push[:]
            announcement.objects_to_push.extend(sorted(before.missing))
            return answer.with_body(announcement.SerializeToString())
        answer = await exchange.ask()
        if answer.status == 200 and self._questions.get(reply.reply_to_message_id) == node:
            announcement = PUSH.answer.FromString(answer.body)
            if announcement.objects_to_push:
                self._replies[node, reply.message_id] = Session(
                    *(announcement.session_id, set(announcement.objects_to_push), {SUPERLINK_NODE_ID}),
                    question=reply.reply_to_message_id,
                    announced=answer.body,
                )
                return answer
        self._wake({SUPERLINK_NODE_ID})
        return answer

    async def _silo_sends(self, request: Any, exchange: Exchange) -> Answer:
        answer = await exchange.ask()
        numbers = {(node, session.number): session for (node, _), session in self._replies.items()}
        session = numbers.get((request.node.node_id, request.session_id))
        if session is None or answer.status != 200:
            return answer
        if PUSH_OBJECT.answer.FromString(answer.body).stored:
            session.last = time.monotonic()
            session.missing.discard(request.object_id)
            session.stored.add(request.object_id)
            if not session.missing:
                self._wake(session.receivers)
        elif request.object_id in session.stored and _is_named(request.object_id, request.object_content):
            return answer.with_body(PUSH_OBJECT.answer(stored=True).SerializeToString())
        return answer

    def _unfinished(self) -> set[str]:
        """Queries whose reply is on its way, after dropping sessions that Flower has forgotten by now."""
        oldest = time.monotonic() - _SESSION_SECONDS
        self._replies = {key: session for key, session in self._replies.items() if session.last > oldest}
        self._queries = {key: session for key, session in self._queries.items() if session.last > oldest}
        return {session.question for session in self._replies.values() if session.missing}

    def _wake(self, nodes: set[int]) -> None:
        for node in nodes:
            for event in self._waiting.get(node, ()):
                event.set()
