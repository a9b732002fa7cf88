"""Requests go through the same middleware, whether answers are handed on whole or streamed."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import httpx
import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.main import create_app as create_superlink_app
from flwr.supernode.main import create_app as create_supernode_app
from flwr.supernode.nodestate import NodeStateFactory
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from fedpriv.engines.flower_private.superlink import WHOLE, directly

PATH = "/v1/fleet/pull-messages"
PROTOBUF = {"content-type": "application/x-protobuf"}
STREAMING = BaseHTTPMiddleware.__call__


@pytest.fixture(params=[False, True], ids=["streamed", "whole"])
def whole(request: pytest.FixtureRequest) -> Iterator[bool]:
    with mock.patch.object(BaseHTTPMiddleware, "__call__", directly(STREAMING) if request.param else STREAMING):
        yield request.param


def test_which_answers_are_whole() -> None:
    """Streams are for the Control API only."""
    assert {PATH, "/v1/runtime/pull-messages", "/v1/runtime/push-object"} < WHOLE
    assert not [path for path in WHOLE if "stream" in path or "control" in path]


def post(app: Any, path: str, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(asked())


async def echo(request: Request) -> Response:
    body = await request.body()
    if body == b"fail":
        raise ValueError("no")
    if body == b"stream":
        return StreamingResponse(iter([b"a", b"b"]))
    return PlainTextResponse(body + b" heard", status_code=201, headers={"x-app": "1"})


def noting(name: str, *, reads: bool) -> Callable[..., Any]:
    async def dispatch(request: Request, call_next: Callable[[Request], Any]) -> Response:
        read = await request.body() if reads else b""
        if read == b"refuse":
            return PlainTextResponse("refused", status_code=403)
        try:
            response: Response = await call_next(request)
        except ValueError as error:
            return PlainTextResponse(f"{name} caught {error}", status_code=500)
        response.headers[f"x-{name}"] = f"{len(request.scope['seen'])}"
        request.scope["seen"].append(name)
        return response

    return dispatch


class Seen:
    """The list of who has seen an answer, in a request's scope."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app({**scope, "seen": []}, receive, send)


@pytest.mark.parametrize("path", [PATH, "/v1/control/start-run"])
def test_every_middleware_sees_the_request_and_its_answer_in_order(whole: bool, path: str) -> None:
    """Guarantee: of a middleware that answers itself nothing gets past it."""
    layers = [
        Middleware(Seen),
        Middleware(BaseHTTPMiddleware, dispatch=noting("outer", reads=False)),
        Middleware(BaseHTTPMiddleware, dispatch=noting("middle", reads=True)),
        Middleware(BaseHTTPMiddleware, dispatch=noting("inner", reads=False)),
    ]
    app = Starlette(routes=[Route(path, echo, methods=["POST"])], middleware=layers)
    said = post(app, path, b"x" * 100_000)
    assert (said.status_code, said.content) == (201, b"x" * 100_000 + b" heard")
    assert [said.headers[f"x-{name}"] for name in ("app", "inner", "middle", "outer")] == ["1", "0", "1", "2"]
    assert post(app, path, b"stream").content == b"ab"
    failed = post(app, path, b"fail")
    assert (failed.status_code, failed.text, failed.headers["x-outer"]) == (500, "inner caught no", "1")
    refused = post(app, path, b"refuse")
    assert (refused.status_code, refused.text, refused.headers["x-outer"]) == (403, "refused", "0")
    assert "x-inner" not in refused.headers


CASES = {
    "nobody": (PATH, PullMessagesRequest().SerializeToString(), PROTOBUF),
    "no message": (PATH, b"\xff\xff", PROTOBUF),
    "no protobuf": (PATH, b"", {"content-type": "text/plain"}),
    "a task without its token": ("/v1/runtime/pull-task-input", b"", PROTOBUF),
    "no such path": ("/v1/fleet/nothing", b"", PROTOBUF),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("program", ["superlink", "supernode"])
def test_what_flower_refuses_is_refused_in_the_same_words(program: str, case: str) -> None:
    path, content, headers = CASES[case]
    said = []
    for call in (STREAMING, directly(STREAMING)):
        state = NodeStateFactory(ObjectStoreFactory())
        app = create_superlink_app() if program == "superlink" else create_supernode_app(state, b"secret")
        with mock.patch.object(BaseHTTPMiddleware, "__call__", call):
            answer = post(app, path, content, headers)
        said.append((answer.status_code, answer.content, dict(answer.headers)))
    assert said[0] == said[1]
    assert said[0][0] >= 400
