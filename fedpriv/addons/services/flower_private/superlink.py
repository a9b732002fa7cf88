"""Flower's SuperLink behind the front, the check of its doors, its nodes and its runs."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from flwr.supercore.error import ApiErrorCode
from starlette.types import ASGIApp

from fedpriv.addons.services.flower_private.front import Front
from fedpriv.addons.services.flower_private.names import (
    ACQUIRE_TASK,
    LIST_RUNS,
    PULL,
    REGISTER_NODE,
    ROUTES,
    UNREGISTER_NODE,
    Route,
    check_names,
)
from fedpriv.addons.services.flower_private.wire import MEDIA_TYPE, refusal_of
from fedpriv.core.errors import InputError, RunError

_log = logging.getLogger("fedpriv.superlink")
_INTERNAL = "FLWR_INTERNAL_"
"""Flower's variables that open its APIs on ports of their own."""


class SuperLinkApp:
    """A SuperLink's app, and its Control API, asked in this process."""

    def __init__(self, inner: ASGIApp, *, polls: bool) -> None:
        """`inner` is Flower's app."""
        self.app = Front(inner, polls=polls)
        self._inner = inner
        self._nodes: dict[str, int] = {}

    async def post(self, route: Route, request: Any) -> httpx.Response:
        """Flower's answer to somebody without a key, a token or a secret."""
        headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE}
        async with self._client() as client:
            return await client.post(route.path, content=request.SerializeToString(), headers=headers)

    async def register(self, nodes: Mapping[str, bytes]) -> None:
        """Let in the SuperNodes with these names and public keys (PEM).

        A name can be given here and through the Control API only, so that it says who a node is, whatever the node
        says.

        Raises:
            RunError: Flower refuses one.
        """
        for name, key in nodes.items():
            answer = await self.post(REGISTER_NODE, REGISTER_NODE.request(public_key=key, name=name))
            if not answer.is_success:
                raise RunError(f"SuperLink: {name} cannot be registered: {refusal_of(answer)[1]}")
            self._nodes[name] = REGISTER_NODE.answer.FromString(answer.content).node_id

    async def forget(self, name: str) -> None:
        """Answer no request of the SuperNode with this name and its key any more.

        Flower's first answer is an error where the node never came, although it has forgotten it; the second says
        that it knows no such node.

        Guarantee: whoever has the key is nobody for this SuperLink once this returns, and its node is offline for
        every run.

        Raises:
            RunError: Flower may know the key still; a service that goes on would let it in.
        """
        for _ in range(2):
            answer = await self.post(UNREGISTER_NODE, UNREGISTER_NODE.request(node_id=self._nodes[name]))
            code, reason = refusal_of(answer)
            if answer.is_success or code == ApiErrorCode.NODE_NOT_FOUND:
                return
        raise RunError(f"SuperLink: the key of {name} cannot be revoked ({reason}), and the service ends")

    async def runs(self) -> list[Any]:
        """The last hundred runs, the oldest first."""
        answer = await self.post(LIST_RUNS, LIST_RUNS.request(limit=100))
        runs = LIST_RUNS.answer.FromString(answer.raise_for_status().content).run_dict.values()
        return sorted(runs, key=lambda run: str(run.pending_at))

    async def check(self, *, registered: bool, fleet: bool) -> None:
        """Try the doors that have to be there and to be shut before anybody else can.

        Guarantee: nobody without the executor's secret gets a task, and no SuperNode without a registered key a
        message, where keys are `registered`; or the service does not start.

        Raises:
            InputError: a path is gone, or one is open that has to be shut.
        """
        async with self._client() as client:
            for route in ROUTES:
                if (await client.get(route.path)).status_code != httpx.codes.METHOD_NOT_ALLOWED:
                    raise InputError(
                        f"Flower's SuperLink has no {route.path}, which fedpriv needs; see `pip show flwr`"
                    )
        shut = [(ACQUIRE_TASK, ACQUIRE_TASK.request(supported_task_types=["flwr-serverapp"]))]
        shut += [(PULL, PULL.request())] if registered and fleet else []
        for route, request in shut:
            answer = await self.post(route, request)
            if answer.status_code not in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise InputError(
                    f"Flower's SuperLink answers {route.path} to strangers ({answer.status_code}): it is not the "
                    "one that fedpriv was tested with; see `pip show flwr`"
                )

    def _client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self._inner, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://superlink")


def superlink_app(options: Sequence[str]) -> SuperLinkApp:
    """Flower's SuperLink with all its APIs, as `flower-superlink OPTIONS` serves it, behind the front.

    Raises:
        InputError: the installed Flower or its environment is not what a protection needs.
    """
    if variables := sorted(name for name in os.environ if name.startswith(_INTERNAL)):
        raise InputError(f"{variables[0]}: opens an API of Flower's on a port of its own, to everybody; unset it")
    slower = check_names()
    for fault in slower[:1]:
        _log.warning("rounds take seconds longer: Flower has changed (%s)", fault)
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    arguments, sys.argv = sys.argv, ["flower-superlink", *options]
    try:
        config = _parse_superlink_lifespan_config()
    finally:
        sys.argv = arguments
    return SuperLinkApp(create_app(config, SuperLinkLifespan), polls=not slower)
