"""`fedpriv superlink`: Flower's SuperLink, each of its APIs open to the programs that need it, and to no others.

| API | who | where |
|---|---|---|
| Control: start and stop runs | the SuperLink's owner | a Unix socket of mode 0600 |
| Fleet: a SuperNode's messages | SuperNodes whose keys are registered | host:port, TLS |
| Runtime: a task's messages | the tasks it started itself | a port of 127.0.0.1, TLS, tokens on no command line |
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedpriv.core.errors import InputError
from fedpriv.engines.flower_private import CONTROL, FLEET, RUNTIME, superexec_command
from fedpriv.engines.flower_private.superlink import superlink_app
from fedpriv.engines.processes import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    check_certificates,
    isolated,
    node_public_key,
    tls_options,
)
from fedpriv.protocol.messages import REGISTERED


@dataclass(frozen=True)
class Listener:
    """A socket on which requests to `prefix` are answered, and the folder with its certificate, if it has one."""

    socket: socket.socket
    prefix: str
    keys: Path | None


class Only:
    """The part of an ASGI app below `prefix`, and /health; nothing else of it is there.

    Guarantee: no request that comes through this reaches another of the app's routes: paths are compared as the
    app compares them, and no other kind of connection is let through.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            path = scope["path"]
            let_through = path == "/health" or path.startswith(self._prefix)
            app = self._app if let_through else PlainTextResponse("not here", status_code=404)
            await app(scope, receive, send)


def serve_superlink(
    control: Path, keys: Path | None, *, host: str, port: int, simulation: bool = False, insecure: bool = False
) -> None:
    """Serve until ended.

    `control` is the socket to be made; `keys` a folder with ca.crt, server.pem, server.key and nodes/silo-N.pub.
    `insecure`: SuperNodes connect without TLS and keys.  `simulation`: there are none.
    InputError for keys or certificates that cannot be used.
    """
    nodes = {} if keys is None else _nodes(keys)
    if keys is not None:
        check_certificates(keys / AUTHORITY, keys / CERTIFICATE)
    elif not (simulation or insecure):
        raise InputError("fedpriv superlink: give --keys FOLDER (see deploy/make-keys.sh)")
    with isolated("superlink") as (runtime_keys, secret, options):
        options += ["--disable-runtime-dependency-installation", *tls_options(keys or runtime_keys)]
        options += ["--simulation"] if simulation else [] if insecure else ["--enable-supernode-auth"]
        app = superlink_app(options, nodes)
        listeners = [
            Listener(_unix(control), CONTROL, None),
            Listener(_tcp("127.0.0.1", 0), RUNTIME, runtime_keys),
        ]
        if not simulation:
            listeners.append(Listener(_tcp(host, port), FLEET, keys))
        address = f"127.0.0.1:{listeners[1].socket.getsockname()[1]}"
        environment = {**os.environ, REGISTERED: "1"} if nodes else dict(os.environ)
        command = superexec_command(address, runtime_keys / AUTHORITY, secret, os.getpid())
        executor = subprocess.Popen(command, env=environment)
        try:
            with asyncio.Runner(loop_factory=uvicorn.Config(app).get_loop_factory()) as runner:
                runner.run(_serve(app, listeners))
        finally:
            executor.terminate()
            executor.wait()
            control.unlink(missing_ok=True)


def _nodes(keys: Path) -> dict[str, bytes]:
    found = sorted((keys / "nodes").glob("*.pub"))
    if not found:
        raise InputError(f"{keys / 'nodes'}: no public key of a SuperNode; run deploy/make-keys.sh")
    if wrong := [path.name for path in found if not re.fullmatch(r"silo-(0|[1-9][0-9]*)\.pub", path.name)]:
        raise InputError(f"{keys / 'nodes' / wrong[0]}: expected silo-N.pub, which says whose key it is")
    nodes = {path.stem: node_public_key(path) for path in found}
    if len(set(nodes.values())) < len(nodes):
        raise InputError(f"{keys / 'nodes'}: two silos have one key; each needs its own")
    return nodes


def _unix(path: Path) -> socket.socket:
    """A listening socket of mode 0600 at `path`, from its first moment on."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    previous = os.umask(0o177)
    try:
        listening.bind(str(path))
    except OSError as error:
        raise InputError(f"--control {path}: {error}") from None
    finally:
        os.umask(previous)
    return listening


def _tcp(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise InputError(f"{host}:{port}: {error}") from None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for all servers of this process: see `_serve`."""
        yield


async def _serve(app: ASGIApp, listeners: Sequence[Listener]) -> None:
    servers = []
    for index, listener in enumerate(listeners):
        keys = listener.keys
        config = uvicorn.Config(
            Only(app, listener.prefix),
            lifespan="off" if index else "on",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
            ssl_certfile=None if keys is None else keys / CERTIFICATE,
            ssl_keyfile=None if keys is None else keys / KEY,
        )
        servers.append(_Server(config))

    def end() -> None:
        for server in servers:
            server.should_exit = True

    for ending in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(ending, end)
    await asyncio.gather(
        *(server.serve([listener.socket]) for server, listener in zip(servers, listeners, strict=True))
    )
