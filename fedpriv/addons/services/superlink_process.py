"""`fedpriv superlink`: Flower's SuperLink, each of its APIs open to the programs that need it, and to no others.

| API | who | where |
|---|---|---|
| Control: start and stop runs | the SuperLink's owner | a Unix socket of mode 0600 |
| Fleet: a SuperNode's messages | SuperNodes whose keys are registered | host:port, TLS |
| Runtime: a task's messages | the tasks it started itself | a port of 127.0.0.1, TLS, tokens on no command line |

Its parts are these servers, which are one process, and an executor.  /health of each API is that of the service:
200 while the executor asks for tasks and gets answers, 503 with a reason otherwise.  A certificate that is renewed
is served from the next connection on, and a SuperNode whose key is taken away is turned away, without a restart.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedpriv.addons.services.certificates import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    ExpiryMonitor,
    RevocationMonitor,
    check_certificates,
    file_stamps,
    prepare_isolation,
    read_registered_keys,
    tls_options,
)
from fedpriv.addons.services.flower_private import STATUS_PATH
from fedpriv.addons.services.flower_private.executor import SERVERAPP, SIMULATION, executor_command
from fedpriv.addons.services.flower_private.front import make_superlink_app
from fedpriv.addons.services.flower_private.names import CONTROL_PREFIX, FLEET_PREFIX, RUNTIME_PREFIX
from fedpriv.addons.services.flower_private.presence import Presence, RunHistory
from fedpriv.addons.services.service import (
    EXECUTOR,
    HEARTBEAT_FOLDER_VARIABLE,
    HealthCheck,
    fresh_folder,
    lost_part_error,
    service_folder,
    why_stalled,
)
from fedpriv.core.errors import InputError, RunError, refuse
from fedpriv.core.logs import configure_service_logging
from fedpriv.engines.children import end_processes
from fedpriv.protocol.messages import REFUSED_SILOS_VARIABLE, REGISTERED_NODES_VARIABLE
from fedpriv.silo.metrics import ServiceMetric, open_private_socket, serve_metrics

_log = logging.getLogger("fedpriv.superlink")
_POLL_SECONDS = 0.5  # seconds between two looks at the executor
AsyncCallback = Callable[[], Awaitable[object]]


class PathFilter:
    """The part of an ASGI app below `prefix`, and /health and `status`, which are ours; nothing else is there.

    Guarantee: no request that comes through this reaches another of the app's routes: paths are compared as the
    app compares them, and no other kind of connection is let through.
    """

    def __init__(
        self, app: ASGIApp, prefix: str, health: HealthCheck = lambda: None, status: AsyncCallback | None = None
    ) -> None:
        self._app, self._prefix, self._health, self._status = app, prefix, health, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "lifespan"):
            return
        app, path = self._app, scope.get("path", self._prefix)
        if path == "/health":
            ails = self._health()
            app = PlainTextResponse(ails or "at work", status_code=503 if ails else 200)
        elif path == STATUS_PATH and self._status is not None:
            app = JSONResponse(await self._status())
        elif not path.startswith(self._prefix):
            app = PlainTextResponse("not here", status_code=404)
        await app(scope, receive, send)


def serve_superlink(
    control: Path,
    keys: Path | None,
    *,
    host: str,
    port: int,
    simulation: bool = False,
    insecure: bool = False,
    runs_path: Path | None = None,
    metrics_address: str | None = None,
) -> None:
    """Serve until asked to end; RunError if a part ends unasked.

    `control` is the socket to be made; `keys` a folder with ca.crt, server.pem, server.key and nodes/silo-N.pub.
    `kept` is a file with the runs of before; `metrics` is where figures are told (`metrics_served`).
    `insecure`: SuperNodes connect without TLS and keys.  `simulation`: there are none.
    InputError for keys or certificates that cannot be used.
    """
    configure_service_logging()
    runs = RunHistory(runs_path)
    nodes = {} if keys is None else read_registered_keys(keys)
    certificates = [] if keys is None else [keys / AUTHORITY_FILE, keys / CERTIFICATE_FILE]
    check_certificates(*certificates)
    refuse(
        {"fedpriv superlink: give --keys FOLDER (see deploy/make-keys.sh)": not (keys or simulation or insecure)}
    )
    with ExitStack() as stack:  # sockets first: a second start is refused before it touches anything
        sockets = [stack.enter_context(open_private_socket(control, "--control"))]
        stack.callback(control.unlink, missing_ok=True)
        places = [("127.0.0.1", 0)] if simulation else [("127.0.0.1", 0), (host, port)]
        sockets += [stack.enter_context(_listen_tcp(*place)) for place in places]
        folder = stack.enter_context(fresh_folder(service_folder("superlink", control)))
        options = [
            *(
                *prepare_isolation(folder),
                "--disable-runtime-dependency-installation",
                *tls_options(keys or folder),
            ),
            *(["--simulation"] if simulation else [] if insecure else ["--enable-supernode-auth"]),
        ]
        link = make_superlink_app(options)
        app = Presence(link.app, nodes, folder / "refused.json")
        sys.setswitchinterval(0.0005)  # a thread gives way soon: Flower answers in threads, the loop waits
        gc.freeze()

        async def status() -> object:
            runs.update(await link.list_runs())
            return {**app.snapshot(), "runs": runs.runs()}

        health = partial(why_stalled, folder, EXECUTOR, time.monotonic())
        only = partial(PathFilter, app, health=health)
        servers = [
            _Server(_make_server_config(only(prefix=CONTROL_PREFIX, status=status), None, lifespan="on")),
            _Server(_make_server_config(only(prefix=RUNTIME_PREFIX), folder)),
            _Server(_make_server_config(only(prefix=FLEET_PREFIX), keys)),
        ]
        ends, revoked = ExpiryMonitor(*certificates), RevocationMonitor(keys or folder, nodes)
        fleet = _CertificateReloader(servers[2].config, keys or folder)

        async def look() -> None:
            """Keep the list of runs, forget keys that were revoked, and take up a certificate that was renewed."""
            if runs.is_due():
                runs.update(await link.list_runs())
            for name in revoked.poll():
                await link.unregister_node(name)
                _log.warning("%s: its key is revoked and opens nothing from now on", name)
            ends.poll()
            fleet.poll()

        runner = stack.enter_context(asyncio.Runner(loop_factory=uvicorn.Config(app).get_loop_factory()))
        runner.run(link.check_access(has_registered_keys=bool(nodes), has_fleet=not simulation))
        runner.run(link.register_nodes(nodes))
        told = {
            HEARTBEAT_FOLDER_VARIABLE: str(folder),
            REFUSED_SILOS_VARIABLE: str(folder / "refused.json"),
            **({REGISTERED_NODES_VARIABLE: "1"} if nodes else {}),
        }
        executor = subprocess.Popen(
            executor_command(f"127.0.0.1:{sockets[1].getsockname()[1]}", folder, SERVERAPP, SIMULATION),
            env={**os.environ, **told},
        )
        stack.callback(end_processes, [executor])
        stack.enter_context(
            serve_metrics(metrics_address, lambda: [*_superlink_metrics(app.snapshot(), health), *ends.metrics()])
        )
        runner.run(_serve_until_signal(list(zip(servers, sockets, strict=False)), executor, look))


def _superlink_metrics(seen: Mapping[str, Any], health: HealthCheck) -> list[ServiceMetric]:
    """For Prometheus: each silo by its name, whether it was heard of or not."""
    return [
        ServiceMetric("fedpriv_superlink_info", "The SuperLink's version.", 1, {"version": version("fedpriv")}),
        ServiceMetric("fedpriv_superlink_healthy", "1 if its parts are at work.", health() is None),
        *(
            ServiceMetric(f"fedpriv_superlink_silo_{name}", words, silo.get(key, 0.0), {"silo": silo_name})
            for name, words, key in (
                ("seen_seconds", "When it was heard of, since 1970; 0 if never.", "seen"),
                ("ahead_seconds", "By how much its clock is ahead.", "ahead"),
                ("refused_seconds", "When its clock kept it out, since 1970; 0 if it is let in.", "refused"),
            )
            for silo_name, silo in seen["silos"].copy().items()
        ),
    ]


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise InputError(f"{host}:{port}: {error}") from None


def _make_server_config(app: ASGIApp, keys: Path | None, lifespan: Literal["on", "off"] = "off") -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan=lifespan,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        ssl_certfile=None if keys is None else keys / CERTIFICATE_FILE,
        ssl_keyfile=None if keys is None else keys / KEY_FILE,
    )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for all servers of this process: see `_serve`."""
        yield


async def _serve_until_signal(
    servers: Sequence[tuple[_Server, socket.socket]],
    executor: "subprocess.Popen[bytes]",
    poll: AsyncCallback,
) -> None:
    """Serve until a signal; RunError if a server or the executor ends before."""
    asked = asyncio.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(ending, asked.set)
    serving = [asyncio.ensure_future(server.serve([socket])) for server, socket in servers]
    while not (asked.is_set() or executor.poll() is not None or any(server.done() for server in serving)):
        await poll()
        with suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), _POLL_SECONDS)
    for server, _ in servers:
        server.should_exit = True
    await asyncio.gather(*serving)
    if not asked.is_set():
        if (code := executor.poll()) is not None:
            raise lost_part_error("SuperLink", EXECUTOR, code)
        raise RunError("SuperLink: one of its servers ended; start it again")


class _CertificateReloader:
    """The certificate that SuperNodes see, taken up anew when its files change."""

    def __init__(self, config: uvicorn.Config, keys: Path) -> None:
        self._config, self._files = config, (keys / CERTIFICATE_FILE, keys / KEY_FILE)
        self._stamps = file_stamps(*self._files)

    def poll(self) -> None:
        before, self._stamps = self._stamps, file_stamps(*self._files)
        if self._stamps == before or not self._config.loaded or self._config.ssl is None:
            return
        try:
            check_certificates(self._files[0])
            trial = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)  # where a broken one breaks nothing
            for context in (trial, self._config.ssl):
                context.load_cert_chain(*self._files)
        except (InputError, OSError) as error:
            _log.warning("a certificate that changed is not taken up: %s", error)
        else:
            _log.info("%s: the certificate that is there now is served", self._files[0])
