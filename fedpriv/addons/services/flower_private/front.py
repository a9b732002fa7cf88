"""ASGI app in front of Flower's SuperLink, which reads a few of its wire messages.

silo ── query for me? ──▶ front ──▶ SuperLink ── none ──▶ request held until a query is complete, about 2 s at most

| event | Flower | here |
|---|---|---|
| a silo replies as another silo | counts the reply | refused with 403 |
| a silo asks, or a server asks for replies, and there is none | answers at once | held: long polling |
| a server asks for a reply whose objects are on their way | waits for these, up to 180 s | gets the others first |
| a reply is announced again, since the answer was lost | wants no object of it | wants the missing ones |
| an object is sent again, since the answer was lost | refuses it, and the reply is lost | stored |

Other requests go to Flower unchanged.

* A message is a tree of objects, each named by the SHA-256 of its content.  A sender announces a message with the
  names of its objects, Flower answers which of them it lacks and gives the id of a session, and the sender then
  sends these objects.  A message is complete when Flower has all its objects.
* A query is a message of a run's server to a node, and a reply is the node's answer to it.
* A node is a SuperNode of Flower.  The server has the id SUPERLINK_NODE_ID as if it were one.
* A route is a path of the SuperLink with the types of its request and its answer.
* Long polling holds a request until there is an answer, instead of answering at once that there is none.
"""

import asyncio
import hashlib
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.error import ApiErrorCode
from google.protobuf.message import DecodeError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fedpriv.addons.services.flower_private.control import MEDIA_TYPE, parse_refusal
from fedpriv.addons.services.flower_private.names import (
    ACQUIRE_TASK,
    GET_RUN,
    LIST_RUNS,
    PULL_MESSAGES,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    REGISTER_NODE,
    ROUTES,
    SERVER_PULL_MESSAGES,
    SERVER_PUSH_MESSAGES,
    SERVER_PUSH_OBJECT,
    UNREGISTER_NODE,
    Route,
    check_names,
)
from fedpriv.core.errors import InputError, RunError

_HOLD_SECONDS = 2.0  # seconds; Flower's clients wait 30 s for an answer
_HOLD_SERVER_SECONDS = 1.0  # seconds; a server has other work between its requests
_SESSION_SECONDS = 180.0  # seconds since the last object, after which Flower drops a reply
_MAX_QUERIES = 10_000


@dataclass
class MessageSession:
    """An announced message whose objects are on their way."""

    sender: int
    """Node that announced the message."""
    missing_ids: set[str]
    """Ids of the objects that the SuperLink lacks."""
    waiting_nodes: set[int]
    """Nodes that wait for the message."""
    announcement: bytes = b""
    """Answer to the announcement."""
    reply_id: str = ""
    """Id of a reply, or "" for a query."""
    query_id: str = ""
    """Id of the query that the reply answers, or "" for a query."""
    stored_ids: set[str] = field(default_factory=set)
    """Ids of the objects that have come since the announcement."""
    last_activity: float = field(default_factory=time.monotonic)
    """Time of the announcement or of the last object, on the monotonic clock."""


class Exchange:
    """A request with its body, and the app that answers it."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes, receive: Receive) -> None:
        self._app, self._scope, self.body, self.receive = app, scope, body, receive

    async def forward(self, body: bytes | None = None, route: Route | None = None) -> Response:
        """Return Flower's answer to the request, or to one with another body or route.

        Args:
            body: Body in place of the request's, or None.
            route: Route in place of the request's path, or None.
        """
        # httpx writes the length of the body that is sent, which may be another one.
        request = httpx.Request(
            self._scope["method"],
            httpx.URL(
                f"http://superlink{self._scope['path'] if route is None else route.path}",
                query=self._scope["query_string"],
            ),
            headers=[(name, value) for name, value in self._scope["headers"] if name.lower() != b"content-length"],
            content=self.body if body is None else body,
        )
        answer = await httpx.ASGITransport(self._app).handle_async_request(request)
        response = Response(b"".join([part async for part in answer.aiter_raw()]), answer.status_code)
        response.raw_headers = answer.headers.raw
        return response


class Front:
    """App that forwards requests to the SuperLink's app.

    Guarantee: a reply counts as that of the node whose key has signed the request, whatever the reply says; a
    request that Flower refuses is refused, except a repeated object that its sender has stored before; and nobody
    gets a message that Flower did not give out for that very request.
    """

    def __init__(self, app: ASGIApp, *, long_polling: bool = True) -> None:
        """Wrap the SuperLink's app.

        Args:
            app: App of the SuperLink.
            long_polling: Whether to handle the whole of the module's table, or only its first event.
        """
        self.app = app
        self._waiting_events: defaultdict[int, set[asyncio.Event]] = defaultdict(set)
        self._node_by_query: dict[str, int] = {}  # node to which a query went, by the query's id
        self._sessions: dict[str, MessageSession] = {}  # by Flower's session ids
        handlers = [
            (PUSH_MESSAGES, self._on_silo_push),
            (PULL_MESSAGES, self._on_silo_pull),
            (PUSH_OBJECT, self._on_object_push),
            (SERVER_PULL_MESSAGES, self._on_server_pull),
            (SERVER_PUSH_MESSAGES, self._on_server_push),
            (SERVER_PUSH_OBJECT, self._on_object_push),
        ]
        # Only the first handler protects; the others save time, and objects whose answer was lost.
        self._handlers = {route.path: (route, handle) for route, handle in handlers[: None if long_polling else 1]}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the handler of its route, or forward it unchanged."""
        route, handle = self._handlers.get(scope["path"] if scope["type"] == "http" else "", (None, None))
        if route is None or handle is None:
            await self.app(scope, receive, send)
            return
        with suppress(ClientDisconnect):
            exchange = Exchange(self.app, scope, await Request(scope, receive).body(), receive)
            try:
                request = route.request_type.FromString(exchange.body)
            except DecodeError:
                answer = await exchange.forward()
            else:
                answer = await handle(request, exchange)
            await answer(scope, receive, send)

    async def _on_silo_pull(self, request: Any, exchange: Exchange) -> Response:
        return await self._hold(exchange, request.node.node_id, _HOLD_SECONDS, lambda: exchange.body)

    async def _on_server_pull(self, request: Any, exchange: Exchange) -> Response:
        """Hold a server's request for replies, and leave out the queries whose replies miss objects.

        Flower would let the whole request wait for the missing objects.  A request without a query is not held.
        """

        def finished_only() -> bytes:
            unfinished = {session.query_id for session in self._unfinished_sessions()}
            ids = [query for query in request.message_ids if query not in unfinished]
            return bytes(SERVER_PULL_MESSAGES.request_type(message_ids=ids).SerializeToString())

        if not request.message_ids:
            return await exchange.forward()
        answer = await self._hold(exchange, SUPERLINK_NODE_ID, _HOLD_SERVER_SECONDS, finished_only)
        if answer.status_code == 200:
            for message in SERVER_PULL_MESSAGES.answer_type.FromString(bytes(answer.body)).messages_list:
                self._node_by_query.pop(message.metadata.reply_to_message_id, None)
        return answer

    async def _hold(self, exchange: Exchange, node: int, seconds: float, body: Callable[[], bytes]) -> Response:
        """Forward a request repeatedly until the answer is not empty, time is up, or the sender is gone.

        The pause between two attempts ends when the node is woken (`_wake`), or time is up.  A refusal is returned
        at once.

        Args:
            exchange: The request.
            node: Node that waits for messages.
            seconds: Longest wait.
            body: Function that returns the body to forward, called for each attempt.
        """
        # The body has been read, so that `receive` returns only when the sender has gone.
        departure, event = asyncio.ensure_future(exchange.receive()), asyncio.Event()
        deadline = time.monotonic() + seconds
        self._waiting_events[node].add(event)
        try:
            while True:
                event.clear()
                answer = await exchange.forward(body())
                remaining = deadline - time.monotonic()
                if answer.status_code != 200 or answer.body or remaining <= 0.0:
                    return answer
                wakening = asyncio.ensure_future(event.wait())
                await asyncio.wait({wakening, departure}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                wakening.cancel()
                if departure.done():
                    return answer
        finally:
            departure.cancel()
            self._waiting_events[node].discard(event)
            if not self._waiting_events[node]:
                del self._waiting_events[node]

    async def _on_server_push(self, request: Any, exchange: Exchange) -> Response:
        """Forward a server's queries, and remember the nodes of the last 10,000.

        The nodes are woken when all objects of the queries have come.
        """
        answer = await exchange.forward()
        if answer.status_code == 200:
            nodes = {
                message.metadata.message_id: message.metadata.dst_node_id for message in request.messages_list
            }
            self._node_by_query = dict([*self._node_by_query.items(), *nodes.items()][-_MAX_QUERIES:])
            self._track_session(SERVER_PUSH_MESSAGES, answer, SUPERLINK_NODE_ID, set(nodes.values()))
        return answer

    async def _on_silo_push(self, request: Any, exchange: Exchange) -> Response:
        """Forward the announcement of a reply, or refuse one in another node's name.

        The server is woken when the reply is complete.  A node that lost the answer announces its reply again, and
        is answered here with the names of the missing objects, because Flower would want none of them.  A request
        with several replies, or none, is forwarded unchanged.
        """
        node, replies = request.node.node_id, [message.metadata for message in request.messages_list]
        if any(reply.src_node_id != node for reply in replies):
            return PlainTextResponse(f"node {node} replies as another node", 403)
        if len(replies) != 1:
            return await exchange.forward()
        (reply,) = replies
        sessions = {(session.sender, session.reply_id): session for session in self._unfinished_sessions()}
        if (previous := sessions.get((node, reply.message_id))) is not None:
            # Flower's answer tells whether the sender is this node, in a run that has not ended.
            run_request = GET_RUN.request_type(run_id=reply.run_id, node={"node_id": node}).SerializeToString()
            answer = await exchange.forward(run_request, GET_RUN)
            if answer.status_code != 200:
                return answer
            announcement = PUSH_MESSAGES.answer_type.FromString(previous.announcement)
            announcement.objects_to_push[:] = sorted(previous.missing_ids)
            return Response(announcement.SerializeToString(), media_type=MEDIA_TYPE)
        answer = await exchange.forward()
        if answer.status_code == 200 and self._node_by_query.get(reply.reply_to_message_id) == node:
            self._track_session(
                PUSH_MESSAGES, answer, node, {SUPERLINK_NODE_ID}, reply.message_id, reply.reply_to_message_id
            )
        else:  # refused by Flower, or no reply to a remembered query of this node: the server asks Flower at once
            self._wake({SUPERLINK_NODE_ID})
        return answer

    def _track_session(
        self, route: Route, answer: Response, node: int, receivers: set[int], reply: str = "", query: str = ""
    ) -> None:
        """Remember the missing objects of an announced message, or wake its receivers if there are none."""
        announcement = route.answer_type.FromString(bytes(answer.body))
        if missing := set(announcement.objects_to_push):
            self._sessions[announcement.session_id] = MessageSession(
                node, missing, receivers, bytes(answer.body), reply, query
            )
        else:
            self._wake(receivers)

    async def _on_object_push(self, request: Any, exchange: Exchange) -> Response:
        """Forward an object of a message, and wake the message's receivers if it was the last missing one.

        A node that repeats an object, because the answer was lost, is told that the object is stored.
        """
        answer = await exchange.forward()
        session, name = self._sessions.get(request.session_id), request.object_id
        if session is None or session.sender != request.node.node_id or answer.status_code != 200:
            return answer
        if PUSH_OBJECT.answer_type.FromString(bytes(answer.body)).stored:
            session.last_activity = time.monotonic()
            session.missing_ids.discard(name)
            session.stored_ids.add(name)
            if not session.missing_ids:
                self._wake(session.waiting_nodes)
        elif name in session.stored_ids and hashlib.sha256(request.object_content).hexdigest() == name:
            return Response(PUSH_OBJECT.answer_type(stored=True).SerializeToString(), media_type=MEDIA_TYPE)
        return answer

    def _unfinished_sessions(self) -> list[MessageSession]:
        """Drop sessions that Flower has forgotten, and return those of the others whose messages miss objects."""
        oldest = time.monotonic() - _SESSION_SECONDS
        self._sessions = {
            key: session for key, session in self._sessions.items() if session.last_activity > oldest
        }
        return [session for session in self._sessions.values() if session.missing_ids]

    def _wake(self, nodes: set[int]) -> None:
        for node in nodes:
            for event in self._waiting_events.get(node, ()):
                event.set()


_log = logging.getLogger("fedpriv.superlink")


class SuperLinkApp:
    """A SuperLink's app behind the front, with a client in this process."""

    def __init__(self, flower_app: ASGIApp, *, long_polling: bool) -> None:
        """Wrap Flower's app."""
        self.app = Front(flower_app, long_polling=long_polling)
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(flower_app, raise_app_exceptions=False), base_url="http://superlink"
        )
        self._nodes: dict[str, int] = {}

    async def post(self, route: Route, request: Any) -> httpx.Response:
        """Return Flower's answer to a request without a key, a token or a secret."""
        return await self._client.post(
            route.path,
            content=request.SerializeToString(),
            headers={"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE},
        )

    async def register_nodes(self, nodes: Mapping[str, bytes]) -> None:
        """Admit the SuperNodes with these names and public keys (PEM).

        A node cannot choose its name, so the name identifies it.

        Raises:
            RunError: Flower refuses a key.
        """
        for name, key in nodes.items():
            answer = await self.post(REGISTER_NODE, REGISTER_NODE.request_type(public_key=key, name=name))
            if not answer.is_success:
                raise RunError(f"SuperLink: {name} cannot be registered: {parse_refusal(answer)[1]}")
            self._nodes[name] = REGISTER_NODE.answer_type.FromString(answer.content).node_id

    async def unregister_node(self, name: str) -> None:
        """Revoke the key of the SuperNode with this name, if Flower knows one.

        For a node that never connected, Flower forgets the node and yet answers with an error.  The answer to a
        second request then says that there is no such node.

        Guarantee: once this function returns, the SuperLink treats a holder of the key as unknown, and its node is
        offline for every run.

        Raises:
            RunError: Flower may still know the key.
        """
        for _ in range(2):
            answer = await self.post(
                UNREGISTER_NODE, UNREGISTER_NODE.request_type(node_id=self._nodes.get(name, 0))
            )
            code, reason = parse_refusal(answer)
            if answer.is_success or code == ApiErrorCode.NODE_NOT_FOUND:
                return
        raise RunError(f"SuperLink: the key of {name} cannot be revoked ({reason}), and the service ends")

    async def list_runs(self) -> list[Any]:
        """Return the last hundred runs, the oldest first.

        Raises:
            httpx.HTTPStatusError: Flower refuses the request.
        """
        answer = (await self.post(LIST_RUNS, LIST_RUNS.request_type(limit=100))).raise_for_status()
        return sorted(
            LIST_RUNS.answer_type.FromString(answer.content).run_dict.values(), key=lambda run: str(run.pending_at)
        )

    async def check_access(self, *, has_registered_keys: bool, has_fleet: bool) -> None:
        """Check that the routes exist, and that protected ones refuse strangers.

        Guarantee: nobody without the executor's secret gets a task, and no SuperNode without a registered key gets
        a message, if `has_registered_keys`; or the service does not start.

        Args:
            has_registered_keys: Whether SuperNodes need a registered key.
            has_fleet: Whether SuperNodes can connect.

        Raises:
            InputError: A route of `ROUTES` is missing, or a protected one does not refuse a stranger (401, 403).
        """
        for route in ROUTES:
            # A path that exists answers POST only, and so refuses GET in this way.
            if (await self._client.get(route.path)).status_code != httpx.codes.METHOD_NOT_ALLOWED:
                raise InputError(
                    f"Flower's SuperLink has no {route.path}, which fedpriv needs; see `pip show flwr`"
                )
        protected = [(ACQUIRE_TASK, ACQUIRE_TASK.request_type(supported_task_types=["flwr-serverapp"]))]
        for route, request in [
            *protected,
            *([(PULL_MESSAGES, PULL_MESSAGES.request_type())] if has_registered_keys and has_fleet else []),
        ]:
            answer = await self.post(route, request)
            if answer.status_code not in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise InputError(
                    f"Flower's SuperLink answers {route.path} to strangers ({answer.status_code}): it is not the "
                    "one that fedpriv was tested with; see `pip show flwr`"
                )


def make_superlink_app(options: Sequence[str]) -> SuperLinkApp:
    """Make Flower's SuperLink with all its APIs, as served by `flower-superlink OPTIONS`, with a front.

    If the messages of a route that only serves to save time have changed in the installed Flower, a warning is
    logged, and there is no long polling.

    Args:
        options: Options of Flower's command.

    Raises:
        InputError: The installed Flower lacks a name that fedpriv needs, or the environment has a variable
            FLWR_INTERNAL_*, with which Flower may open an API to everybody.
    """
    if variables := sorted(name for name in os.environ if name.startswith("FLWR_INTERNAL_")):
        raise InputError(f"{variables[0]}: opens an API of Flower's on a port of its own, to everybody; unset it")
    if slower := check_names():
        _log.warning("rounds take seconds longer: Flower has changed (%s)", slower[0])
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    # Flower's parser has no arguments: it reads the command line of the process.
    arguments, sys.argv = sys.argv, ["flower-superlink", *options]
    try:
        config = _parse_superlink_lifespan_config()
    finally:
        sys.argv = arguments
    return SuperLinkApp(create_app(config, SuperLinkLifespan), long_polling=not slower)
