"""`fedpriv supernode`: the node of one silo, and the process that supervises it.

The parts of the service are one process, the silo's node.  With --apps they are Flower's own SuperNode, and an
executor of the apps that a SuperLink sends.

A node that lost its SuperLink, ended with code 0 or was killed by a signal is started again, without limit.  With
--apps so is a SuperNode that ended in any other way.  Another end of a part ends the service.
"""

import fcntl
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from fedpriv.addons.services.certificates import (
    AUTHORITY_FILE,
    NODE_KEY_FILE,
    ExpiryMonitor,
    check_certificates,
    prepare_isolation,
    read_node_key,
    tls_options,
)
from fedpriv.addons.services.flower_private.executor import CLIENTAPP, executor_command
from fedpriv.addons.services.flower_private.names import check_names
from fedpriv.addons.services.service import (
    EXECUTOR,
    HEARTBEAT_FOLDER_VARIABLE,
    LOST_EXIT_CODE,
    SUPERNODE,
    OutageLog,
    describe_exit,
    exit_on_signals,
    free_port,
    fresh_folder,
    health_socket,
    last_beat,
    lost_part_error,
    raise_file_limit,
    script_path,
    service_folder,
    why_stalled,
)
from fedpriv.core.errors import InputError, refuse
from fedpriv.core.logs import configure_service_logging
from fedpriv.engines.children import end_processes
from fedpriv.silo.metrics import ServiceMetric, notify_manager, serve_metrics

_log = logging.getLogger("fedpriv.supernode")
NODE_MODULE = "fedpriv.addons.services.flower_private.silo_node"
"""Module of the silo's node."""
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 2.0, 30.0
"""Shortest and longest pause before a lost or killed SuperNode is started again."""
_STABLE_SECONDS = 90.0
"""Seconds after which the end of a SuperNode makes the pause the shortest.  An earlier end doubles it."""
_POLL_SECONDS = 0.5  # seconds between two checks of the parts
_END_SECONDS = 20.0
"""Seconds that a part has to end, more than the 5 after which Flower forces its own exit."""
_OUTAGE_SECONDS = 40.0  # seconds without an answer of the SuperLink, which gets a heartbeat every 10 seconds


def supernode_command(superlink: str, silo: int, guard: Path, keys: Path, *options: str) -> list[str]:
    """Return the command that runs the SuperNode of silo `silo`, with the folder `keys`."""
    return [
        *(script_path("fedpriv"), "supernode", "--superlink", superlink, "--silo", str(silo)),
        *("--guard", str(guard), "--keys", str(keys), *options),
    ]


def run_supernode(
    superlink: str,
    silo: int,
    guard: Path,
    keys: Path | None,
    *,
    insecure: bool = False,
    health_path: Path | None = None,
    metrics_address: str | None = None,
    apps: bool = False,
) -> NoReturn:
    """Run the SuperNode of silo `silo` until this process is asked to end.

    Args:
        superlink: Address of the SuperLink.
        silo: Number of the silo.
        guard: Socket of the silo's guard.
        keys: Folder with ca.crt and node.key, or None for no TLS and no key.
        insecure: Whether to connect without TLS and a key.
        health_path: Socket that answers health checks, or None for no socket.
        metrics_address: Address of the metrics (`serve_metrics`), or None for no metrics.
        apps: Whether to run the apps that the SuperLink sends.

    Raises:
        InputError: `insecure` does not say whether `keys` is None, or the machine allows too few open files.  Or
            keys, a socket, a folder, an address or the installed Flower cannot be used.
        RunError: A part ended, and is not started again (`keep_running`).  Or Flower's program is missing.
    """
    configure_service_logging(silo=silo)
    exit_on_signals()
    raise_file_limit("fedpriv supernode")
    check_names()  # refuses a Flower without the private names that fedpriv needs
    refuse(
        {
            "fedpriv supernode: give --keys FOLDER, or --insecure on a machine of your own": (
                (keys is None) != insecure
            )
        }
    )
    # Serve health and metrics while the parts run.  With `apps` the executor has the heartbeats, since Flower's
    # own SuperNode has none.
    folder = service_folder(f"supernode-{silo}", health_path)
    monitor = SupernodeMonitor(superlink, folder, keys, EXECUTOR if apps else SUPERNODE)
    with (
        _lock_key(keys),
        nullcontext() if health_path is None else health_socket(health_path, monitor.why_unhealthy),
        serve_metrics(metrics_address, lambda: monitor.metrics(silo)),
        fresh_folder(folder),
    ):
        os.environ[HEARTBEAT_FOLDER_VARIABLE] = str(folder)
        notify_manager("READY=1")
        if apps:
            options = [
                *prepare_isolation(folder),
                *(f"--superlink={superlink}", "--node-config", f"partition-id={silo} guard='{guard}'"),
                *tls_options(folder),
                *(
                    ["--insecure"]
                    if keys is None
                    else [
                        f"--root-certificates={keys / AUTHORITY_FILE}",
                        f"--auth-supernode-private-key={keys / NODE_KEY_FILE}",
                    ]
                ),
            ]
            keep_running(lambda: _run_apps(options, folder, monitor), monitor)  # does not return
        node = [
            *(sys.executable, "-P", "-m", NODE_MODULE, superlink, str(silo), str(guard)),
            "-" if keys is None else str(keys.absolute()),  # "-" stands for no TLS, and may be a folder's name
        ]
        keep_running(lambda: _run_parts({SUPERNODE: node}, monitor), monitor)


@contextmanager
def _lock_key(keys: Path | None) -> Iterator[None]:
    """Check certificate and key of a SuperNode, and lock the key for the block.

    Where files can be locked, a second SuperNode with this file of a key is refused.  Without `keys` there is
    nothing to check or to lock.

    Raises:
        InputError: A file cannot be used, or another SuperNode has the key.
    """
    with ExitStack() as stack:
        if keys is not None:
            check_certificates(keys / AUTHORITY_FILE)
            read_node_key(keys / NODE_KEY_FILE)
            file = stack.enter_context((keys / NODE_KEY_FILE).open("rb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{file.name}: another SuperNode runs with this key; end it first") from None
            except OSError:  # a file system without locks
                _log.debug("%s: cannot be locked", file.name)
        yield


class SupernodeMonitor:
    """Monitor of the parts while they run, which logs outages and certificates that expire soon."""

    def __init__(self, superlink: str, heartbeat_folder: Path, keys: Path | None, part: str = SUPERNODE) -> None:
        """Monitor the service, in which `part` writes the heartbeats that its health depends on."""
        self._part, self._heartbeat_folder, self._keys = part, heartbeat_folder, keys
        self._outage_log = OutageLog(f"answer of the SuperLink at {superlink}")
        self._expiry_monitor = ExpiryMonitor(*([] if keys is None else [keys / AUTHORITY_FILE]))
        self._start_time = time.monotonic()

    def why_unhealthy(self) -> str | None:
        """Return the fault of the service itself, or None.

        The certificate and the key have to be valid, if there are any, and the part with heartbeats has to be at
        work.  Attempts of a silo's node to reach a SuperLink that is away count as work.  With --apps the last
        trial of a task, if there was one, has to have succeeded.
        """
        try:
            if self._keys is not None:
                check_certificates(self._keys / AUTHORITY_FILE)
                read_node_key(self._keys / NODE_KEY_FILE)
        except InputError as error:
            return str(error)
        return why_stalled(self._heartbeat_folder, self._part, self._start_time)

    def metrics(self, silo: int) -> list[ServiceMetric]:
        """Return metrics for Prometheus."""
        labels, help_text = {"silo": str(silo), "version": version("fedpriv")}, "Since the SuperLink answered."
        silent_seconds = math.floor(
            time.monotonic() - last_beat(self._heartbeat_folder, SUPERNODE, self._start_time).last_success
        )
        return [
            ServiceMetric("fedpriv_supernode_info", "The SuperNode's silo and version.", 1, labels),
            ServiceMetric(
                "fedpriv_supernode_healthy", "1 if it is healthy, else 0.", self.why_unhealthy() is None
            ),
            *(
                [ServiceMetric("fedpriv_supernode_silent_seconds", help_text, silent_seconds)]
                if self._part == SUPERNODE
                else []
            ),
            *self._expiry_monitor.metrics(),
        ]

    def poll(self, *, is_lost: bool = False) -> None:
        """Log an outage of the SuperLink, its end, and certificates that expire soon.

        With --apps nothing tells whether the SuperLink answers, and an end of the SuperNode is logged in place of
        outages.

        Args:
            is_lost: Whether the node has just ended, and counts as one that lost its SuperLink (`keep_running`).
        """
        heartbeat = last_beat(self._heartbeat_folder, SUPERNODE, self._start_time)
        if self._part != SUPERNODE:  # Flower's own SuperNode does not report answers
            if is_lost:
                _log.warning("its SuperNode has ended: no SuperLink, or one that refuses it; it is started again")
        elif is_lost or time.monotonic() - heartbeat.last_success > _OUTAGE_SECONDS:
            self._outage_log.report_outage(heartbeat.last_success, heartbeat.error)
        elif heartbeat.last_success > self._start_time and not heartbeat.error:
            self._outage_log.report_recovery()
        self._expiry_monitor.poll()


def keep_running(run_once: Callable[[], tuple[str, int]], monitor: SupernodeMonitor) -> NoReturn:
    """Run a node, and start it again without limit if it lost its SuperLink or was killed.

    A SuperNode that ended with code 0 or `LOST_EXIT_CODE` counts as one that lost its SuperLink, and one with a
    negative code (minus the number of a signal) as killed.

    Args:
        run_once: Function that runs the parts of the node, and returns the name and the exit code of the part that
            ended.
        monitor: Monitor of the parts.

    Raises:
        RunError: A part ended in another way, or is no SuperNode.
    """
    pause = _MIN_PAUSE_SECONDS
    while True:
        start_time = time.monotonic()
        part, code = run_once()
        if part != SUPERNODE or (code not in (0, LOST_EXIT_CODE) and code >= 0):
            raise lost_part_error("SuperNode", part, code)
        if code < 0:
            _log.error("its %s %s; it is started again", part, describe_exit(code))
        else:
            monitor.poll(is_lost=True)
        pause = (
            _MIN_PAUSE_SECONDS
            if time.monotonic() - start_time > _STABLE_SECONDS
            else min(2.0 * pause, _MAX_PAUSE_SECONDS)
        )
        time.sleep(pause)


def _run_apps(options: Sequence[str], folder: Path, monitor: SupernodeMonitor) -> tuple[str, int]:
    """Run Flower's SuperNode and an executor, and return the name and the exit code of the one that ended.

    A SuperNode that no signal ended gets code 0, which stands for a lost SuperLink, because Flower's exit codes do
    not distinguish it from other ends.
    """
    port = free_port()  # of this start, since another process may take it before the SuperNode listens
    commands = {
        EXECUTOR: executor_command(f"127.0.0.1:{port}", folder, CLIENTAPP),
        SUPERNODE: [script_path("flower-supernode"), *options, f"--port={port}"],
    }
    part, code = _run_parts(commands, monitor)
    return part, min(code, 0) if part == SUPERNODE else code


def _run_parts(commands: Mapping[str, Sequence[str]], monitor: SupernodeMonitor) -> tuple[str, int]:
    """Run parts until one of them ends, and return its name and exit code.

    The other parts are then ended, so that the SuperLink learns of the end of a node.
    """
    parts: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            parts[name] = subprocess.Popen(command)
        while True:
            for name, process in parts.items():
                if (code := process.poll()) is not None:
                    return name, code
            monitor.poll()
            notify_manager("WATCHDOG=1")
            time.sleep(_POLL_SECONDS)
    finally:
        end_processes(parts.values(), _END_SECONDS)
