"""A SuperLink, our own as a child process or another organisation's, and runs submitted to it."""

import json
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from fedpriv.addons.services.flower_private.control import Control
from fedpriv.addons.services.flower_private.wire import UNIX, open_client
from fedpriv.addons.services.processes import (
    AUTHORITY,
    free_port,
    log_tail,
    make_node_key,
    make_server_keys,
    script,
    start_logged,
)
from fedpriv.core.errors import RunError
from fedpriv.engines.children import left_by_nobody

_APP = """\
[project]
name = "fedpriv"
version = "0.0.0"
description = "fedpriv, as installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedpriv"

[tool.flwr.app.components]
serverapp = "fedpriv.server.app:app"
clientapp = "fedpriv.clients.app:app"

[tool.flwr.app.config]
"""
_START_SECONDS = 60.0


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink: who may start runs on it, and our folder for it, its process and its silos' address."""

    control: Control
    home: Path | None = None
    address: str | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def ended(self) -> bool:
        """Whether it was ours and is gone."""
        return self.process is not None and self.process.poll() is not None

    def submit(self, run_config: Mapping[str, str | int], simulation: Mapping[str, int] | None = None) -> int:
        """Submit fedpriv's app, as installed where it runs, with a run configuration; the run's id."""
        keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in run_config.items())
        return self.control.start_run(_APP + keys, str(run_config["out"]), simulation)

    def log_tail(self) -> str:
        """The end of its log, to be put behind a message; empty for a SuperLink that is not ours."""
        return "" if self.home is None else log_tail(self.home, "superlink", 12)


@contextmanager
def simulating_superlink(home: Path) -> Iterator[SuperLink]:
    """A SuperLink for Flower's own simulation engine; gone, with everything it started, when the block is left.

    Guarantee: Ray, which listens on every address of the machine and runs what it is sent, asks for a token that
    only our processes have, and keeps its sockets and files in `home`.
    """
    script("flwr-simulation")  # without it Flower's executor would wait for ever
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": str(home)}
    with left_by_nobody(home):
        yield start_superlink(home, ["--simulation"], None, **ray)


@contextmanager
def federation_superlink(home: Path, silos: int) -> Iterator[SuperLink]:
    """A SuperLink for the SuperNodes of `silos` silos, whose keys are in home/node-N, and for no others.

    Gone, with everything that was started with a home in `home`, when the block is left.
    """
    keys = home / "keys"
    (keys / "nodes").mkdir(mode=0o700, parents=True)
    make_server_keys(keys)
    for silo in range(silos):
        node = node_keys(home, silo)
        node.mkdir(mode=0o700)
        make_node_key(node / "node.key", keys / "nodes" / f"silo-{silo}.pub")
        (node / AUTHORITY).write_bytes((keys / AUTHORITY).read_bytes())
    port = free_port()
    with left_by_nobody(home):
        yield start_superlink(home, ["--keys", str(keys)], port)


def node_keys(home: Path, silo: int) -> Path:
    """Where silo `silo`'s SuperNode finds its key and whom to trust."""
    return home / f"node-{silo}"


def start_superlink(home: Path, options: Sequence[str], port: int | None = None, **variables: str) -> SuperLink:
    """`fedpriv superlink OPTIONS`, for SuperNodes on a port of 127.0.0.1, once it answers.

    Guarantee: who cannot enter `home`, which has to be of mode 0700, cannot start a run on it.
    """
    socket = home / "control.sock"
    command = [script("fedpriv"), "superlink", "--control", str(socket), *options]
    command += [] if port is None else ["--port", str(port)]
    process = start_logged(command, home, "superlink", **variables)
    link = SuperLink(Control(f"{UNIX}{socket}"), home, None if port is None else f"127.0.0.1:{port}", process)
    deadline = time.monotonic() + _START_SECONDS
    with open_client(link.control.address, None, seconds=2.0) as client:
        while time.monotonic() < deadline:
            if link.ended:
                raise RunError(f"Flower's SuperLink did not start{link.log_tail()}")
            with suppress(httpx.RequestError):
                if client.get("/health").is_success:
                    return link
            time.sleep(0.1)
    raise RunError(f"Flower's SuperLink did not answer within {_START_SECONDS:.0f} s{link.log_tail()}")
