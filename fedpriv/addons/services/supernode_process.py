"""`fedpriv supernode`: the node of one silo, which is one process, and its supervisor.

With --apps it is Flower's own SuperNode, which runs the apps that a SuperLink sends, and an executor for these.

A node that lost its SuperLink, which was restarted, is away or refuses the key, is started again, for ever, and so
is one that was killed.  Any other end of a part ends the service.
"""

import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from fedpriv.addons.services.certificates import (
    AUTHORITY_FILE,
    NODE_KEY_FILE,
    ExpiryMonitor,
    check_certificates,
    prepare_isolation,
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
    script_path,
    service_folder,
    why_stalled,
)
from fedpriv.core.errors import refuse
from fedpriv.core.logs import configure_service_logging
from fedpriv.engines.children import end_processes
from fedpriv.silo.metrics import ServiceMetric, serve_metrics

_log = logging.getLogger("fedpriv.supernode")
NODE_MODULE = "fedpriv.addons.services.flower_private.silo_node"
"""Module of the silo's node."""
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = (
    2.0,
    30.0,
)  # seconds before a SuperNode that was lost is started again, doubled each time
_STABLE_SECONDS = 90.0  # seconds after which the next loss counts as a first one
_POLL_SECONDS = 0.5  # seconds between two looks at the parts
_END_SECONDS = 20.0  # Flower ends itself hard after 5, and a service manager us after 90
_OUTAGE_SECONDS = 40.0  # seconds without an answer of the SuperLink, which is asked every two


def supernode_command(superlink: str, silo: int, guard: Path, keys: Path, *options: str) -> list[str]:
    """The command that runs silo `silo`'s SuperNode; `keys` has ca.crt and node.key."""
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
    """Run silo `silo`'s SuperNode until this process is asked to end.

    `metrics` is where figures are told: see `metrics_served`.

    Raises:
        InputError: keys that cannot be used.
        RunError: a part ended for another reason than those above.
    """
    configure_service_logging(silo=silo)
    exit_on_signals()
    check_names()
    refuse(
        {
            "fedpriv supernode: give --keys FOLDER, or --insecure on a machine of your own": (
                (keys is None) != insecure
            )
        }
    )
    if keys is not None:
        check_certificates(keys / AUTHORITY_FILE)
        key = keys / NODE_KEY_FILE
        refuse({f"{key}: no such key; run deploy/make-keys.sh, or ssh-keygen": not key.exists()})
    folder = service_folder(f"supernode-{silo}", health_path)
    watch = SupernodeMonitor(superlink, folder, keys, EXECUTOR if apps else SUPERNODE)
    with (
        nullcontext() if health_path is None else health_socket(health_path, watch.why_unhealthy),
        serve_metrics(metrics_address, lambda: watch.metrics(silo)),
        fresh_folder(folder),
    ):
        os.environ[HEARTBEAT_FOLDER_VARIABLE] = str(folder)
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
            keep_running(lambda: _run_apps(options, folder, watch), watch)
        node = [sys.executable, "-P", "-m", NODE_MODULE, superlink, str(silo), str(guard), str(keys or "-")]
        keep_running(lambda: _run_parts({SUPERNODE: node}, watch), watch)


class SupernodeMonitor:
    """Looks at the parts while they run, and says what it sees."""

    def __init__(self, superlink: str, heartbeat_folder: Path, keys: Path | None, part: str = SUPERNODE) -> None:
        """`part` is the one by whose beats the service is well or ill."""
        self._part, self._heartbeat_folder = part, heartbeat_folder
        self._outage_log = OutageLog(f"answer of the SuperLink at {superlink}")
        self._expiry_monitor = ExpiryMonitor(*([] if keys is None else [keys / AUTHORITY_FILE]))
        self._start_time = time.monotonic()

    def why_unhealthy(self) -> str | None:
        """What ails the service itself; a SuperLink that is away does not."""
        return why_stalled(self._heartbeat_folder, self._part, self._start_time)

    def metrics(self, silo: int) -> list[ServiceMetric]:
        """For Prometheus."""
        labels, words = {"silo": str(silo), "version": version("fedpriv")}, "Since the SuperLink answered."
        silent = math.floor(
            time.monotonic() - last_beat(self._heartbeat_folder, SUPERNODE, self._start_time).last_success
        )
        return [
            ServiceMetric("fedpriv_supernode_info", "The SuperNode's silo and version.", 1, labels),
            ServiceMetric(
                "fedpriv_supernode_healthy", "1 if its parts are at work.", self.why_unhealthy() is None
            ),
            *(
                [ServiceMetric("fedpriv_supernode_silent_seconds", words, silent)]
                if self._part == SUPERNODE
                else []
            ),
            *self._expiry_monitor.metrics(),
        ]

    def poll(self, *, is_lost: bool = False) -> None:
        """Say it if the SuperLink is away, `lost` for sure, or if a certificate ends soon, once a day."""
        beat = last_beat(self._heartbeat_folder, SUPERNODE, self._start_time)
        if self._part != SUPERNODE:  # Flower's own does not say whether it had an answer
            if is_lost:
                _log.warning("its SuperNode has ended: no SuperLink, or one that refuses it; it is started again")
        elif is_lost or time.monotonic() - beat.last_success > _OUTAGE_SECONDS:
            self._outage_log.report_outage(beat.last_success, beat.error)
        elif beat.last_success > self._start_time and not beat.error:
            self._outage_log.report_recovery()
        self._expiry_monitor.poll()


def keep_running(run_once: Callable[[], tuple[str, int]], monitor: SupernodeMonitor) -> NoReturn:
    """Run a node again that lost its SuperLink or was killed, for ever; RunError for any other end of a part."""
    pause = _MIN_PAUSE_SECONDS
    while True:
        started = time.monotonic()
        part, code = run_once()
        if part != SUPERNODE or (code not in (0, LOST_EXIT_CODE) and code >= 0):
            raise lost_part_error("SuperNode", part, code)
        if code < 0:
            _log.error("its %s %s; it is started again", part, describe_exit(code))
        else:
            monitor.poll(is_lost=True)
        pause = (
            _MIN_PAUSE_SECONDS
            if time.monotonic() - started > _STABLE_SECONDS
            else min(2.0 * pause, _MAX_PAUSE_SECONDS)
        )
        time.sleep(pause)


def _run_apps(options: Sequence[str], folder: Path, monitor: SupernodeMonitor) -> tuple[str, int]:
    """Run Flower's SuperNode and an executor.

    A port that is free now may be another's when the SuperNode listens, so that every start takes one of its own.
    Flower's exit codes do not tell a SuperLink that is lost from other ends, so that each is one.
    """
    port = free_port()
    commands = {
        EXECUTOR: executor_command(f"127.0.0.1:{port}", folder, CLIENTAPP),
        SUPERNODE: [script_path("flower-supernode"), *options, f"--port={port}"],
    }
    part, code = _run_parts(commands, monitor)
    return part, min(code, 0) if part == SUPERNODE else code


def _run_parts(commands: Mapping[str, Sequence[str]], monitor: SupernodeMonitor) -> tuple[str, int]:
    """Run parts until one of them ends: which, and its exit code.  The SuperLink hears of a node's end."""
    parts: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, words in commands.items():
            parts[name] = subprocess.Popen(words)
        while True:
            for name, process in parts.items():
                if (code := process.poll()) is not None:
                    return name, code
            monitor.poll()
            time.sleep(_POLL_SECONDS)
    finally:
        end_processes(parts.values(), _END_SECONDS)
