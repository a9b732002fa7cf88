"""`fedpriv superlink`: Flower's SuperLink, with a separate socket for each of its APIs.

| API | user | address |
|---|---|---|
| Control: start and stop runs | the SuperLink's owner | a Unix socket of mode 0600 |
| Fleet: a SuperNode's messages | SuperNodes whose keys are registered | host:port, TLS |
| Runtime: a task's messages | tasks of its executor | a port of 127.0.0.1, TLS, tokens on no command line |

With --insecure any SuperNode may connect, and without --keys its messages have no TLS.  A simulation has no Fleet
API.  Each API answers /health with 200, or 503 and the reason of a fault.

The service is a process with the servers of these APIs, and its part is an executor.  A task is the server or the
simulation of a run, a process that the executor starts.  An app here is an ASGI app, a function that answers the
requests of a web server.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedpriv.addons.services.certificates import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    SECRET_FILE,
    ExpiryMonitor,
    KeyMonitor,
    check_certificates,
    file_stamps,
    key_fingerprint,
    load_key_pair,
    prepare_isolation,
    read_registered_keys,
    tls_options,
)
from fedpriv.addons.services.flower_private import STATUS_PATH
from fedpriv.addons.services.flower_private.executor import SERVERAPP, SIMULATION, executor_command, find_tasks
from fedpriv.addons.services.flower_private.front import make_superlink_app
from fedpriv.addons.services.flower_private.names import CONTROL_PREFIX, FLEET_PREFIX, RUNTIME_PREFIX
from fedpriv.addons.services.flower_private.presence import Presence, RunHistory
from fedpriv.addons.services.service import (
    EXECUTOR,
    HEARTBEAT_FOLDER_VARIABLE,
    HealthCheck,
    fresh_folder,
    lost_part_error,
    raise_file_limit,
    service_folder,
    why_stalled,
)
from fedpriv.core.errors import InputError, RunError, refuse
from fedpriv.core.logs import configure_service_logging
from fedpriv.engines.children import end_processes
from fedpriv.protocol.messages import REFUSED_SILOS_VARIABLE, REGISTERED_NODES_VARIABLE
from fedpriv.silo.metrics import ServiceMetric, notify_manager, open_private_socket, serve_metrics, watch_socket

_log = logging.getLogger("fedpriv.superlink")
_POLL_SECONDS = 0.5  # seconds between two checks of servers, executor and keys
AsyncCallback = Callable[[], Awaitable[object]]


class PathFilter:
    """App that serves the paths of another app below `prefix`, /health and `STATUS_PATH`.

    Other paths get 404.  `STATUS_PATH` is served only if there is a status function.

    Guarantee: no request that comes through this app reaches another of the inner app's routes: paths are compared
    as the inner app compares them, and of the kinds of connections only HTTP is let through.
    """

    def __init__(
        self, app: ASGIApp, prefix: str, health: HealthCheck = lambda: None, status: AsyncCallback | None = None
    ) -> None:
        self._app, self._prefix, self._health, self._status = app, prefix, health, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request by its path, or forward it to the inner app.

        /health gets 200, or 503 with the fault.  The events by which a server starts and ends an app (lifespan),
        which have no path, go to the inner app.  Other kinds of connections, such as a WebSocket, are not served.
        """
        if scope["type"] not in ("http", "lifespan"):
            return
        app, path = self._app, scope.get("path", self._prefix)
        if path == "/health":
            fault = self._health()
            app = PlainTextResponse(fault or "at work", status_code=503 if fault else 200)
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
    """Serve the Control, Runtime and Fleet APIs until a signal asks the process to end.

    Args:
        control: Path of the control socket, which is made.
        keys: Folder with ca.crt, server.pem, server.key and nodes/silo-N.pub, or None, which needs `simulation` or
            `insecure`.
        host: Address for SuperNodes.
        port: Port for SuperNodes.
        simulation: Whether there are no SuperNodes, and so no Fleet API.
        insecure: Whether any SuperNode may connect, without TLS if `keys` is None.
        runs_path: File with the list of runs, which is kept over restarts, or None for a list in memory.
        metrics_address: Address of the metrics (`serve_metrics`), or None for no metrics.

    Raises:
        InputError: Keys, certificates, an address, a file, an environment variable or the installed Flower cannot
            be used, or the machine allows too few open files.
        RunError: A server or the executor ends without a signal, or Flower refuses to register a key at the start
            or to revoke one.
        httpx.HTTPStatusError: Flower refuses to list its runs.
    """
    # Read keys and certificates, and refuse bad ones, before sockets are made.
    configure_service_logging()
    raise_file_limit("fedpriv superlink")
    runs = RunHistory(runs_path)
    nodes = {} if keys is None else read_registered_keys(keys)
    certificates = [] if keys is None else [keys / AUTHORITY_FILE, keys / CERTIFICATE_FILE]
    check_certificates(*certificates)
    if keys is not None:
        load_key_pair(keys)
    refuse(
        {"fedpriv superlink: give --keys FOLDER (see deploy/make-keys.sh)": not (keys or simulation or insecure)}
    )
    with ExitStack() as stack:  # sockets first, so that a second start is refused before it replaces files
        sockets = [stack.enter_context(open_private_socket(control, "--control"))]
        stack.callback(control.unlink, missing_ok=True)
        sockets += [
            stack.enter_context(_listen_tcp(*address))
            for address in (("127.0.0.1", 0), *([] if simulation else [(host, port)]))
        ]
        folder = stack.enter_context(fresh_folder(service_folder("superlink", control)))
        options = [
            *(
                *prepare_isolation(folder),
                "--disable-runtime-dependency-installation",
                *tls_options(keys or folder),
            ),
            *(["--simulation"] if simulation else [] if insecure else ["--enable-supernode-auth"]),
        ]
        # Make the app of the SuperLink, and a filter of its paths for each API.
        superlink_app = make_superlink_app(options)
        logging.getLogger("flwr").setLevel(os.environ.get("FLWR_LOG_LEVEL", "WARNING"))
        # The same app, which also records when each silo was last heard of.
        app = Presence(superlink_app.app, nodes, folder / "refused.json")
        # Let threads take turns more often: Flower answers in threads, and the event loop waits for them.
        sys.setswitchinterval(0.0005)
        gc.freeze()  # No later garbage collection searches the modules that are loaded by now.

        async def status() -> object:
            runs.update(await superlink_app.list_runs())
            return {**app.snapshot(), "runs": runs.runs()}

        checks: list[HealthCheck] = [
            partial(why_stalled, folder, EXECUTOR, time.monotonic()),
            watch_socket(control),
            runs.why_stuck,
        ]
        health = partial(_why_unhealthy, folder, certificates, checks)
        make_filter = partial(PathFilter, app, health=health)
        # The three servers serve one app, whose lifespan the first of them runs.
        servers = [
            _Server(_make_server_config(make_filter(prefix=CONTROL_PREFIX, status=status), None, lifespan="on")),
            _Server(_make_server_config(make_filter(prefix=RUNTIME_PREFIX), folder)),
            _Server(_make_server_config(make_filter(prefix=FLEET_PREFIX), keys)),
        ]
        expiry_monitor, key_monitor = ExpiryMonitor(*certificates), KeyMonitor(keys or folder, nodes)
        certificate_reloader = _CertificateReloader(servers[2].config, keys or folder)

        async def poll() -> None:
            """Update runs and registered keys, check certificates, and notify the service manager."""
            if runs.is_due():
                runs.update(await superlink_app.list_runs())
            revoked_names, new_keys = key_monitor.poll()
            for name in revoked_names:
                await superlink_app.unregister_node(name)
                app.add_nodes({}, revoked=[name])
                _log.warning("%s: its key is revoked and opens nothing from now on", name)
            for name, key in new_keys.items():
                try:
                    await superlink_app.register_nodes({name: key})
                    app.add_nodes({name: key})
                    _log.info("%s: its key %s is registered from now on", name, key_fingerprint(key))
                except RunError as error:  # others go on
                    _log.warning("%s", error)
            notify_manager("WATCHDOG=1")
            expiry_monitor.poll()
            certificate_reloader.poll()

        # Start the executor and the metrics, and serve.
        runner = stack.enter_context(asyncio.Runner(loop_factory=servers[0].config.get_loop_factory()))
        runner.run(superlink_app.check_access(has_registered_keys=bool(nodes), has_fleet=not simulation))
        runner.run(superlink_app.register_nodes(nodes))
        variables = {
            HEARTBEAT_FOLDER_VARIABLE: str(folder),
            REFUSED_SILOS_VARIABLE: str(folder / "refused.json"),
            **({REGISTERED_NODES_VARIABLE: "1"} if nodes else {}),
        }
        executor = subprocess.Popen(
            executor_command(f"127.0.0.1:{sockets[1].getsockname()[1]}", folder, SERVERAPP, SIMULATION),
            env={**os.environ, **variables},
        )
        # Tasks outlive an executor that is killed, and would go on with a run beside the run's next server.
        stack.callback(lambda: end_processes([executor, *find_tasks(os.getpid())]))
        stack.enter_context(
            serve_metrics(
                metrics_address,
                lambda: [
                    ServiceMetric(
                        "fedpriv_superlink_info", "The SuperLink's version.", 1, {"version": version("fedpriv")}
                    ),
                    ServiceMetric("fedpriv_superlink_healthy", "1 if its parts are at work.", health() is None),
                    *app.metrics(),
                    *runs.metrics(),
                    *expiry_monitor.metrics(),
                ],
            )
        )
        notify_manager("READY=1")
        # A simulation has no socket for SuperNodes, and then the last server is left out.
        runner.run(_serve_until_signal(list(zip(servers, sockets, strict=False)), executor, poll))


def _why_unhealthy(folder: Path, certificates: Sequence[Path], checks: Sequence[HealthCheck]) -> str | None:
    """Return the first fault of the service, or None.

    Certificates have to be valid, and the service's own key and secret readable.

    Args:
        folder: Folder of the service's own certificate, key and secret.
        certificates: Files of the certificates for SuperNodes.
        checks: Further checks.
    """
    try:
        check_certificates(folder / AUTHORITY_FILE, folder / CERTIFICATE_FILE, *certificates)
        refuse(
            {
                f"{folder / name}: the service's own file is gone": not os.access(folder / name, os.R_OK)
                for name in (KEY_FILE, SECRET_FILE)
            }
        )
    except InputError as error:
        return str(error)
    return next((fault for check in checks if (fault := check()) is not None), None)


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
        """Leave signals to `_serve_until_signal`, since they are for all servers of this process."""
        yield


async def _serve_until_signal(
    servers: Sequence[tuple[_Server, socket.socket]],
    executor: "subprocess.Popen[bytes]",
    poll: AsyncCallback,
) -> None:
    """Serve until SIGTERM or SIGINT, and call `poll` about twice a second.

    Args:
        servers: Servers of this process, each with its listening socket.
        executor: Process of the executor.
        poll: Function that is awaited between two checks of whether servers and executor still run.

    Raises:
        RunError: A server or the executor ended before a signal, or `poll` raised it.
    """
    stop_event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_event.set)
    tasks = [asyncio.ensure_future(server.serve([socket])) for server, socket in servers]
    while not (stop_event.is_set() or executor.poll() is not None or any(server.done() for server in tasks)):
        await poll()
        with suppress(TimeoutError):
            await asyncio.wait_for(stop_event.wait(), _POLL_SECONDS)
    for server, _ in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)
    if not stop_event.is_set():
        if (code := executor.poll()) is not None:
            raise lost_part_error("SuperLink", EXECUTOR, code)
        raise RunError("SuperLink: one of its servers ended; start it again")


class _CertificateReloader:
    """Reloader of the certificate for SuperNodes, after its files have changed."""

    def __init__(self, config: uvicorn.Config, keys: Path) -> None:
        self._config, self._files = config, (keys / CERTIFICATE_FILE, keys / KEY_FILE)
        self._stamps = file_stamps(*self._files)

    def poll(self) -> None:
        """Load the certificate into the server's TLS settings if its files have changed and are valid."""
        last_stamps, self._stamps = self._stamps, file_stamps(*self._files)
        # A server that has not started yet loads the files by itself, and one without TLS has none.
        if self._stamps == last_stamps or not self._config.loaded or self._config.ssl is None:
            return
        try:
            load_key_pair(self._files[0].parent, self._config.ssl)
        except InputError as error:
            _log.warning("a certificate that changed is not taken up: %s", error)
        else:
            _log.info("%s: the certificate that is there now is served", self._files[0])
