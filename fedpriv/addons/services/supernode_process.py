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
    AUTHORITY,
    NODE_KEY,
    Ends,
    check_certificates,
    isolate,
    tls_options,
)
from fedpriv.addons.services.flower_private.executor import CLIENTAPP, executor_command
from fedpriv.addons.services.flower_private.names import check_names
from fedpriv.addons.services.service import (
    BEATS,
    EXECUTOR,
    LOST,
    SUPERNODE,
    Absence,
    end_when_asked,
    free_port,
    health_socket,
    how,
    last_beat,
    late,
    made_anew,
    part_lost,
    script,
    service_folder,
)
from fedpriv.core.errors import refuse
from fedpriv.core.logs import log_as_service
from fedpriv.engines.children import end_processes
from fedpriv.silo.metrics import Figure, metrics_served

_log = logging.getLogger("fedpriv.supernode")
NODE = "fedpriv.addons.services.flower_private.silo_node"
"""Module of the silo's node."""
_SHORTEST, _LONGEST = 2.0, 30.0  # seconds before a SuperNode that was lost is started again, doubled each time
_STAYED = 90.0  # seconds after which the next loss counts as a first one
_LOOK = 0.5  # seconds between two looks at the parts
_END_SECONDS = 20.0  # Flower ends itself hard after 5, and a service manager us after 90
_AWAY = 40.0  # seconds without an answer of the SuperLink, which is asked every two


def command(superlink: str, silo: int, guard: Path, keys: Path, *options: str) -> list[str]:
    """The command that runs silo `silo`'s SuperNode; `keys` has ca.crt and node.key."""
    return [
        *(script("fedpriv"), "supernode", "--superlink", superlink, "--silo", str(silo)),
        *("--guard", str(guard), "--keys", str(keys), *options),
    ]


def run_supernode(
    superlink: str,
    silo: int,
    guard: Path,
    keys: Path | None,
    *,
    insecure: bool = False,
    health: Path | None = None,
    metrics: str | None = None,
    apps: bool = False,
) -> NoReturn:
    """Run silo `silo`'s SuperNode until this process is asked to end.

    `metrics` is where figures are told: see `metrics_served`.

    Raises:
        InputError: keys that cannot be used.
        RunError: a part ended for another reason than those above.
    """
    log_as_service(silo=silo)
    end_when_asked()
    check_names()
    refuse(
        {
            "fedpriv supernode: give --keys FOLDER, or --insecure on a machine of your own": (
                (keys is None) != insecure
            )
        }
    )
    if keys is not None:
        check_certificates(keys / AUTHORITY)
        key = keys / NODE_KEY
        refuse({f"{key}: no such key; run deploy/make-keys.sh, or ssh-keygen": not key.exists()})
    folder = service_folder(f"supernode-{silo}", health)
    watch = Watch(superlink, folder, keys, EXECUTOR if apps else SUPERNODE)
    with (
        nullcontext() if health is None else health_socket(health, watch.ails),
        metrics_served(metrics, lambda: watch.figures(silo)),
        made_anew(folder),
    ):
        os.environ[BEATS] = str(folder)
        if apps:
            options = [
                *isolate(folder),
                *(f"--superlink={superlink}", "--node-config", f"partition-id={silo} guard='{guard}'"),
                *tls_options(folder),
                *(
                    ["--insecure"]
                    if keys is None
                    else [
                        f"--root-certificates={keys / AUTHORITY}",
                        f"--auth-supernode-private-key={keys / NODE_KEY}",
                    ]
                ),
            ]
            stay(lambda: _run_apps(options, folder, watch), watch)
        node = [sys.executable, "-P", "-m", NODE, superlink, str(silo), str(guard), str(keys or "-")]
        stay(lambda: _run({SUPERNODE: node}, watch), watch)


class Watch:
    """Looks at the parts while they run, and says what it sees."""

    def __init__(self, superlink: str, beats: Path, keys: Path | None, part: str = SUPERNODE) -> None:
        """`part` is the one by whose beats the service is well or ill."""
        self._part, self._beats = part, beats
        self._absence = Absence(f"answer of the SuperLink at {superlink}")
        self._ends = Ends(*([] if keys is None else [keys / AUTHORITY]))
        self._began = time.monotonic()

    def ails(self) -> str | None:
        """What ails the service itself; a SuperLink that is away does not."""
        return late(self._beats, self._part, self._began)

    def figures(self, silo: int) -> list[Figure]:
        """For Prometheus."""
        labels, words = {"silo": str(silo), "version": version("fedpriv")}, "Since the SuperLink answered."
        silent = math.floor(time.monotonic() - last_beat(self._beats, SUPERNODE, self._began).at)
        return [
            Figure("fedpriv_supernode_info", "The SuperNode's silo and version.", 1, labels),
            Figure("fedpriv_supernode_healthy", "1 if its parts are at work.", self.ails() is None),
            *([Figure("fedpriv_supernode_silent_seconds", words, silent)] if self._part == SUPERNODE else []),
            *self._ends.figures(),
        ]

    def look(self, *, lost: bool = False) -> None:
        """Say it if the SuperLink is away, `lost` for sure, or if a certificate ends soon, once a day."""
        beat = last_beat(self._beats, SUPERNODE, self._began)
        if self._part != SUPERNODE:  # Flower's own does not say whether it had an answer
            if lost:
                _log.warning("its SuperNode has ended: no SuperLink, or one that refuses it; it is started again")
        elif lost or time.monotonic() - beat.at > _AWAY:
            self._absence.away(beat.at, beat.trouble)
        elif beat.at > self._began and not beat.trouble:
            self._absence.back()
        self._ends.look()


def stay(run_once: Callable[[], tuple[str, int]], watch: Watch) -> NoReturn:
    """Run a node again that lost its SuperLink or was killed, for ever; RunError for any other end of a part."""
    pause = _SHORTEST
    while True:
        started = time.monotonic()
        part, code = run_once()
        if part != SUPERNODE or (code not in (0, LOST) and code >= 0):
            raise part_lost("SuperNode", part, code)
        if code < 0:
            _log.error("its %s %s; it is started again", part, how(code))
        else:
            watch.look(lost=True)
        pause = _SHORTEST if time.monotonic() - started > _STAYED else min(2.0 * pause, _LONGEST)
        time.sleep(pause)


def _run_apps(options: Sequence[str], folder: Path, watch: Watch) -> tuple[str, int]:
    """Run Flower's SuperNode and an executor.

    A port that is free now may be another's when the SuperNode listens, so that every start takes one of its own.
    Flower's exit codes do not tell a SuperLink that is lost from other ends, so that each is one.
    """
    port = free_port()
    commands = {
        EXECUTOR: executor_command(f"127.0.0.1:{port}", folder, CLIENTAPP),
        SUPERNODE: [script("flower-supernode"), *options, f"--port={port}"],
    }
    part, code = _run(commands, watch)
    return part, min(code, 0) if part == SUPERNODE else code


def _run(commands: Mapping[str, Sequence[str]], watch: Watch) -> tuple[str, int]:
    """Run parts until one of them ends: which, and its exit code.  The SuperLink hears of a node's end."""
    parts: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, words in commands.items():
            parts[name] = subprocess.Popen(words)
        while True:
            for name, process in parts.items():
                if (code := process.poll()) is not None:
                    return name, code
            watch.look()
            time.sleep(_LOOK)
    finally:
        end_processes(parts.values(), _END_SECONDS)
