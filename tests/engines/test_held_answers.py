"""Empty answers are held until there may be something; everything else passes as the app says it."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from fedpriv.engines.flower_private.superlink import Bells, Held, HeldAnswers

PATH, LONG = "/pull", 20.0
Message = MutableMapping[str, Any]


class App:
    """Answers with what it is told to, after it has read the request; `later` from the second time on."""

    def __init__(
        self, bells: Bells, body: bytes = b"", status: int = 200, *, rings: int | None = None, later: bytes = b""
    ) -> None:
        self.bells, self.body, self.status, self.rings, self.later = bells, body, status, rings, later
        self.read: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more, request = True, b""
        while more:
            message = await receive()
            more, request = message.get("more_body", False), request + message["body"]
        assert "seen" not in scope["state"]
        scope["state"]["seen"] = True
        if self.rings is not None and not self.read:
            self.bells.ring(self.rings)
        self.body = self.later if self.read else self.body
        self.read.append(request)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def ask(app: Any, bells: Bells, *parts: bytes, path: str = PATH, seconds: float = LONG) -> list[Message]:
    waiting = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return waiting.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    held = HeldAnswers(app, {PATH: Held(lambda body: int(body.decode()), seconds)}, bells)
    await held({"type": "http", "path": path, "state": {}}, receive, send)
    return sent


def test_an_empty_answer_is_held_until_its_nodes_bell_rings() -> None:
    """Then the app is asked the same again, and says what came."""

    async def main() -> None:
        bells = Bells()
        app = App(bells, later=b"a message")
        asking = asyncio.create_task(ask(app, bells, b"1", b"2"))
        await asyncio.sleep(0.05)
        bells.ring(1)  # somebody else's
        await asyncio.sleep(0.05)
        assert not asking.done()
        await asyncio.to_thread(bells.ring, 12)
        sent = await asyncio.wait_for(asking, LONG / 2)
        assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 2]
        assert sent[1]["body"] == b"a message"
        assert app.read == [b"12", b"12"]

    asyncio.run(main())


def test_a_bell_for_somebody_elses_message_is_no_answer() -> None:
    """A server's bell rings for the replies of all runs."""

    async def main() -> None:
        bells = Bells()
        asking = asyncio.create_task(ask(App(bells), bells, b"1"))
        for _ in range(3):
            await asyncio.sleep(0.02)
            bells.ring(1)
        await asyncio.sleep(0.02)
        assert not asking.done()
        asking.cancel()

    asyncio.run(main())


def test_it_is_held_for_some_seconds_at_most() -> None:
    bells = Bells()
    assert len(asyncio.run(ask(App(bells), bells, b"3", seconds=0.05))) == 3
    assert not bells._waiting


def test_a_bell_that_rings_while_the_app_looks_is_not_missed() -> None:
    """The message came after the app had looked, and before its answer was held."""
    bells = Bells()
    sent = asyncio.run(asyncio.wait_for(ask(App(bells, rings=3, later=b"it"), bells, b"3"), LONG / 2))
    assert sent[1]["body"] == b"it"


def test_who_is_refused_when_asked_again_hears_that() -> None:
    """A run that has ended meanwhile, say."""
    bells = Bells()
    app = App(bells, rings=3)

    async def ended(scope: Scope, receive: Receive, send: Send) -> None:
        app.status = 403 if app.read else 200
        await app(scope, receive, send)

    sent = asyncio.run(asyncio.wait_for(ask(ended, bells, b"3"), LONG / 2))
    assert sent[0]["status"] == 403


@pytest.mark.parametrize(
    ("app", "parts", "path"),
    [
        (App(Bells(), b"a message"), [b"3"], PATH),
        (App(Bells(), status=401), [b"3"], PATH),
        (App(Bells()), [b"3"], "/elsewhere"),
        (App(Bells()), [b"nobody"], PATH),
        (App(Bells()), [b"3", b" " * 70_000], PATH),
    ],
    ids=["a message", "a refusal", "another path", "nobody", "too long"],
)
def test_everything_else_passes_at_once(app: App, parts: list[bytes], path: str) -> None:
    """Guarantee: only an empty answer with status 200 is held, and what is sent is what the app said."""
    sent = asyncio.run(asyncio.wait_for(ask(app, app.bells, *parts, path=path), LONG / 2))
    assert sent[0]["status"] == app.status
    assert b"".join(message.get("body", b"") for message in sent) == app.body
