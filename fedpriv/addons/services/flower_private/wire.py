"""Flower's wire: one protobuf message to a path over HTTP, and one back."""

import json
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from google.protobuf.message import DecodeError

from fedpriv.addons.services.flower_private.names import Route
from fedpriv.core.errors import printable

UNIX = "unix:"
MEDIA_TYPE = "application/protobuf"
Headers = Callable[[Route, Any], Mapping[str, str]]


class Wire:
    """One of a SuperLink's APIs, asked over `client`, whose base URL is the SuperLink's."""

    def __init__(self, client: httpx.Client, headers: Headers = lambda _route, _request: {}) -> None:
        """`headers` returns what a request says of its sender."""
        self.client = client
        self._headers = headers

    def ask(self, route: Route, request: Any, timeout: float | None = None) -> Any:
        """Return the SuperLink's answer.

        Raises:
            httpx.HTTPError: there is no answer, or it is a refusal.
        """
        headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, **self._headers(route, request)}
        content = request.SerializeToString(deterministic=True)
        wait = self.client.timeout if timeout is None else timeout
        answer = self.client.post(route.path, content=content, headers=headers, timeout=wait)
        answer.raise_for_status()
        try:
            return route.answer.FromString(answer.content)
        except DecodeError as error:
            raise httpx.DecodingError(f"the answer of {route.path} cannot be read ({error})") from None


def open_client(
    address: str, authority: Path | None, *, seconds: float = 30.0, connect: float = 30.0
) -> httpx.Client:
    """Return a client of `unix:SOCKET`, or of host:port, over TLS if an authority is given; no proxy is used."""
    verify = ssl.create_default_context(cafile=str(authority)) if authority is not None else True
    socket = address.removeprefix(UNIX) if address.startswith(UNIX) else None
    scheme, host = "http" if authority is None else "https", address if socket is None else "superlink"
    return httpx.Client(
        base_url=f"{scheme}://{host}",
        transport=httpx.HTTPTransport(uds=socket, verify=verify, trust_env=False),
        timeout=httpx.Timeout(seconds, connect=connect),
    )


def refusal_of(response: httpx.Response) -> tuple[int, str]:
    """Flower's code for a refusal, 0 if it has none, and its reason in one line."""
    try:
        error = json.loads(response.text)
        code, text = error.get("code", 0), f"{error['detail']} {error.get('extra', '')}".strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        code, text = 0, response.text or response.reason_phrase
    return code if isinstance(code, int) else 0, printable(text)
