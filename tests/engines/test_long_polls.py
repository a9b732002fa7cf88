"""Long polling by the front: empty answers are held until there may be something, and nothing else is."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, MutableMapping
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from fedpriv.addons.services.flower_private import front
from fedpriv.addons.services.flower_private.front import Front, MessageSession
from fedpriv.addons.services.flower_private.names import (
    PULL_MESSAGES,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    SERVER_PULL_MESSAGES,
    SERVER_PUSH_MESSAGES,
)
from tests.engines.builders import Clock


def test_message_sessions_without_recent_activity_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Front(nothing)
    clock = Clock(1000.0)
    monkeypatch.setattr(front.time, "monotonic", clock.monotonic)
    before._sessions["s"] = MessageSession(7, {"a"}, {1}, b"", "r", "q", last_activity=clock.now)
    before._sessions["t"] = MessageSession(1, {"a"}, {7}, last_activity=clock.now)
    assert {session.query_id for session in before._unfinished_sessions()} == {"q", ""}
    clock.now += 181.0
    assert before._unfinished_sessions() == []
    assert not before._sessions


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An app with an empty answer."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


class Inbox:
    """An app that has messages for nodes, or refuses."""

    def __init__(self) -> None:
        self.status, self.body, self.asked = 200, b"", 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert "seen" not in scope.setdefault("state", {}), "what one asking notes is not the next one's"
        scope["state"]["seen"] = True
        self.asked += 1
        while (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": self.body[:1], "more_body": True})
        await send({"type": "http.response.body", "body": self.body[1:]})


def run_async(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    del run.__wrapped__  # or pytest would see a coroutine
    return run


def pulling(node: int = 7) -> bytes:
    request = PULL_MESSAGES.request_type()
    request.node.node_id = node
    return bytes(request.SerializeToString())


def post(path: str) -> Scope:
    return {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "state": {}}


async def ask(
    app: Any, body: bytes, path: str = PULL_MESSAGES.path, gone: asyncio.Event | None = None
) -> httpx.Response:
    """A request in two parts; its sender is gone once the event is set."""
    parts: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": body[:2], "more_body": True},
        {"type": "http.request", "body": body[2:], "more_body": False},
    ]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        if parts:
            return parts.pop(0)
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def keep(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(post(path), receive, keep)
    return httpx.Response(sent[0]["status"], content=b"".join(message.get("body", b"") for message in sent))


@run_async
async def test_an_empty_reply_is_delayed_until_a_message_for_its_node_arrives() -> None:
    app = Inbox()
    before = Front(app)
    asking = asyncio.create_task(ask(before, pulling(7)))
    await asyncio.sleep(0.05)
    before._wake({8})
    await asyncio.sleep(0.05)
    assert not asking.done()
    app.body = b"a message"
    before._wake({7})
    assert (await asyncio.wait_for(asking, 1.5)).content == b"a message"
    assert app.asked == 2
    assert not before._waiting_events


@run_async
async def test_a_message_that_arrives_during_the_lookup_is_delivered() -> None:
    app = Inbox()
    before = Front(app)

    async def comes_meanwhile(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        if app.asked == 1:
            app.body = b"it"
            before._wake({7})

    before.app = comes_meanwhile
    assert (await asyncio.wait_for(ask(before, pulling()), 1.5)).content == b"it"


@run_async
async def test_a_disconnected_client_does_not_consume_a_message() -> None:
    """Was: a silo that was killed while it asked lost its next query, which came again after half a minute."""
    app, gone = Inbox(), asyncio.Event()
    before = Front(app)
    asking = asyncio.create_task(ask(before, pulling(), gone=gone))
    await asyncio.sleep(0.05)
    app.body = b"a message"
    gone.set()
    assert (await asyncio.wait_for(asking, 1.5)).content == b""
    assert app.asked == 1


@pytest.mark.parametrize(
    ("status", "body", "path"),
    [
        (200, b"a message", PULL_MESSAGES.path),
        (401, b"", PULL_MESSAGES.path),
        (403, b"", SERVER_PULL_MESSAGES.path),
        (200, b"", "/v1/fleet/elsewhere"),
    ],
)
def test_messages_refusals_and_other_routes_are_answered_without_delay(
    status: int, body: bytes, path: str
) -> None:
    """Guarantee: what Flower refuses is refused at once."""
    app = Inbox()
    app.status, app.body, request = status, body, pulling()
    if path == SERVER_PULL_MESSAGES.path:
        request = SERVER_PULL_MESSAGES.request_type(message_ids=["a"]).SerializeToString()
    answer = asyncio.run(asyncio.wait_for(ask(Front(app), request, path), 0.9))
    assert (answer.status_code, answer.content) == (status, body)


ROUTES = (PULL_MESSAGES, PUSH_MESSAGES, PUSH_OBJECT, SERVER_PULL_MESSAGES, SERVER_PUSH_MESSAGES)


@pytest.mark.parametrize("path", [route.path for route in ROUTES])
def test_an_unparsable_request_body_is_forwarded_unchanged(path: str) -> None:
    read: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message: MutableMapping[str, Any] = {"more_body": True}
        while message["more_body"]:
            message = await receive()
            read.append(message["body"])
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    answer = asyncio.run(asyncio.wait_for(ask(Front(app), b"\xff\xff\xff", path), 0.9))
    assert answer.status_code == 400
    assert b"".join(read) == b"\xff\xff\xff"


def test_sender_checks_remain_active_without_long_polling() -> None:
    """A Flower whose messages have changed costs seconds a round, and no protection."""
    app = Inbox()
    before = Front(app, long_polling=False)
    assert asyncio.run(asyncio.wait_for(ask(before, pulling()), 0.9)).content == b""
    request = PUSH_MESSAGES.request_type()
    request.node.node_id = 7
    request.messages_list.add().metadata.src_node_id = 8
    answer = asyncio.run(ask(before, request.SerializeToString(), PUSH_MESSAGES.path))
    assert (answer.status_code, answer.content) == (403, b"node 7 replies as another node")
    assert app.asked == 1


def test_the_number_of_remembered_queries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_MAX_QUERIES", 3)
    before = Front(nothing)
    for number in range(5):
        request = SERVER_PUSH_MESSAGES.request_type()
        metadata = request.messages_list.add().metadata
        metadata.message_id, metadata.dst_node_id = f"{number}", 7
        asyncio.run(ask(before, request.SerializeToString(), SERVER_PUSH_MESSAGES.path))
    assert list(before._node_by_query) == ["2", "3", "4"]


def test_a_truncated_request_is_not_forwarded() -> None:
    """A message of which a part came may read as another one."""
    app, parts = Inbox(), [{"type": "http.request", "body": pulling()[:1], "more_body": True}]

    async def receive() -> MutableMapping[str, Any]:
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError(message)

    asyncio.run(Front(app)(post(PULL_MESSAGES.path), receive, send))
    assert app.asked == 0
