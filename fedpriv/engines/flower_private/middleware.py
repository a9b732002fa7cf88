"""Flower's middleware as functions that hand whole replies on, and its limits, raised for loaded machines.

Starlette has a task and a stream for each layer.  Measured on Flower 1.41: a request to a SuperLink goes through
nine of them; they take 2 of its 4 ms.
"""

from typing import Any
from unittest import mock

from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from starlette.middleware.base import BaseHTTPMiddleware, _CachedRequest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fedpriv.engines.flower_private import FLEET, RUNTIME

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
    from flwr.supercore.corestate import in_memory_corestate

    patience = _BEAT_SECONDS / _CLAIM_SECONDS  # a heartbeat counts for PATIENCE * INTERVAL, a claim for INTERVAL
    mock.patch.object(in_memory_corestate, "HEARTBEAT_PATIENCE", patience).start()  # for as long as this process
    mock.patch.object(in_memory_corestate, "HEARTBEAT_DEFAULT_INTERVAL", _CLAIM_SECONDS).start()
