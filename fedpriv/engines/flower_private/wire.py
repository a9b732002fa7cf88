"""Flower's wire: one protobuf message to a path over HTTP, and one back."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from google.protobuf.message import DecodeError

from fedpriv.core.errors import printable
from fedpriv.engines.flower_private.names import Route

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


def refusal_of(response: httpx.Response) -> tuple[int, str]:
    """Flower's code for a refusal, 0 if it has none, and its reason in one line."""
    try:
        error = json.loads(response.text)
        code, text = error.get("code", 0), f"{error['detail']} {error.get('extra', '')}".strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        code, text = 0, response.text or response.reason_phrase
    return code if isinstance(code, int) else 0, printable(text)
