"""Who asks again and again whether something has come is answered when it has: empty answers are held.

node ── anything for me? ──▶ the app ── nothing ──▶ held until a bell rings, or some seconds
                                     ── a message ──▶ sent
"""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_LONGEST_REQUEST = 4096
"""Bytes; who asks whether something has come says little more than his number."""


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
        """How often, until now."""
        with self._lock:
            return self._rung[node]

    async def wait(self, node: int, since: int, seconds: float) -> None:
        """Until it has rung more than `since` times, for so many seconds at most."""
        here = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if self._rung[node] > since:
                return
            self._waiting[node].add(here)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(here[1].wait(), seconds)
        finally:
            with self._lock:
                self._waiting[node].discard(here)
                if not self._waiting[node]:
                    del self._waiting[node]


class HeldAnswers:
    """An app whose empty answers on `path` wait for the node's bell, for so many seconds at most.

    Guarantee: it holds what the app has already decided to say, and only an empty answer with status 200: who is
    refused is refused at once, and nothing is sent that the app has not sent.
    """

    def __init__(
        self, app: ASGIApp, path: str, node_of: Callable[[bytes], int], bells: Bells, seconds: float
    ) -> None:
        """`node_of` reads the node's number in a request; ValueError if there is none."""
        self.app = app
        self._path, self._node_of = path, node_of
        self._bells, self._seconds = bells, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != self._path:
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(self._node_of, self._bells, receive)
        await self.app(scope, exchange.receive, exchange.decay)
        if exchange.node is not None and exchange.is_empty:
            await self._bells.wait(exchange.node, exchange.since, self._seconds)
        for message in exchange.answer:
            await send(message)


class _Exchange:
    """One request and its answer, which is kept."""

    def __init__(self, node_of: Callable[[bytes], int], bells: Bells, receive: Receive) -> None:
        self._node_of, self._bells, self._receive = node_of, bells, receive
        self._body = b""
        self.node: int | None = None
        self.since = 0
        self.answer: list[MutableMapping[str, Any]] = []

    async def receive(self) -> MutableMapping[str, Any]:
        """The next part of the request; after the last one it is known whose it is, before the app looks."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._body = (self._body + message.get("body", b""))[: _LONGEST_REQUEST + 1]
            if not message.get("more_body") and len(self._body) <= _LONGEST_REQUEST:
                with suppress(ValueError):
                    self.node = self._node_of(self._body)
                    self.since = self._bells.rung(self.node)
        return message

    async def decay(self, message: MutableMapping[str, Any]) -> None:
        self.answer.append(message)

    @property
    def is_empty(self) -> bool:
        ok = any(message.get("status") == 200 for message in self.answer)
        return ok and not any(message.get("body") for message in self.answer)
