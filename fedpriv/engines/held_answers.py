"""Who asks again and again whether something has come is answered when it has: empty answers are held.

node ── anything for me? ──▶ the app ── nothing ──▶ held until a bell rings ──▶ the app is asked again
                                     ── a message ──▶ sent
"""

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
        """How often, until now."""
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
    """Which empty answers are held."""

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
        """Whose it is, None if it does not say or is too long."""
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
