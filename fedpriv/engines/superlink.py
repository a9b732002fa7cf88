"""A Flower SuperLink, our own as a child process in an empty folder or somebody's, and runs submitted to it.

Measured facts on Flower 1.41 that this is built around: the SuperLink's working directory precedes the app on the
import path, so it must be empty; `flwr run` exits 0 whatever becomes of the run, so its status is asked for;
telemetry, update check and the installation of dependencies at run time are off by environment variables.
"""

import json
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedpriv.errors import RunError

POLL_INTERVAL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
"""The variable with the seconds between an executor's looks for messages."""

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_LOG_LEVEL": "WARNING",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
    POLL_INTERVAL: "0.1",
}
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
serverapp = "server.app:app"
clientapp = "clients.app:app"

[tool.flwr.app.config]
"""
_START_SECONDS = 60.0


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink: our home folder for it, its address, and its process if it is ours."""

    home: Path
    address: str
    process: subprocess.Popen[bytes] | None

    @property
    def ended(self) -> bool:
        """Whether it was ours and is gone."""
        return self.process is not None and self.process.poll() is not None

    def submit(self, run_config: Mapping[str, str | int], *options: str) -> "SubmittedRun":
        """Submit fedpriv's app, as installed where it runs, with a run configuration."""
        app = self.home / "app"
        app.mkdir(exist_ok=True)
        keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in run_config.items())
        (app / "pyproject.toml").write_text(_APP + keys, encoding="utf-8")
        answer = self.flwr("run", str(app), "fedpriv", *options, "--format", "json")
        if not answer.get("success"):
            raise RunError(f"Flower refused the run: {answer.get('error-message', answer)}")
        return SubmittedRun(self, str(answer["run-id"]))

    def log_tail(self, lines: int = 12) -> str:
        """The end of its log, to be put behind a message; empty for a SuperLink that is not ours."""
        if self.process is None:
            return ""
        text = (self.home / "superlink.log").read_text(encoding="utf-8", errors="replace")
        return ":\n" + "\n".join(text.splitlines()[-lines:])

    def flwr(self, *arguments: str) -> dict[str, object]:
        """What a `flwr` command says as JSON; RunError if it says none."""
        command = [script("flwr"), *arguments]
        done = subprocess.run(command, cwd=self.home, env=environment(self.home), capture_output=True, text=True)
        try:
            answer: dict[str, object] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            raise RunError(
                f"`flwr {arguments[0]}` failed: {(done.stderr or done.stdout).strip()[-500:]}"
            ) from None
        return answer


@dataclass(frozen=True)
class SubmittedRun:
    """A run on a SuperLink."""

    superlink: SuperLink
    run_id: str

    def status(self) -> str:
        """Flower's word for it, such as `running` or `finished:failed`."""
        answer = self.superlink.flwr("list", "fedpriv", "--run-id", self.run_id, "--format", "json")
        runs = answer["runs"]
        assert isinstance(runs, list)
        return str(runs[0]["status"])

    def stop(self) -> None:
        """End it, wherever it runs; nothing if it has ended."""
        with suppress(RunError):
            self.superlink.flwr("stop", self.run_id, "fedpriv", "--format", "json")

    def wait(self, seconds: float = 60.0) -> None:
        """Until Flower itself is done with the run, which is a little after the server has its result."""
        deadline = time.monotonic() + seconds
        while not self.status().startswith("finished") and time.monotonic() < deadline:
            time.sleep(0.2)


@contextmanager
def superlink(home: Path, options: Sequence[str]) -> Iterator[SuperLink]:
    """A SuperLink that is gone, with everything it started, when the block is left."""
    (port,) = free_ports(1)
    try:
        yield start_superlink(home, port, ["--insecure", *options])
    finally:
        stop_all_of(home)


def start_superlink(
    home: Path, port: int, options: Sequence[str], root_certificates: Path | None = None
) -> SuperLink:
    """A SuperLink on a port of 127.0.0.1, once it answers; over TLS if its `options` say so."""
    address = f"127.0.0.1:{port}"
    _write_connection(home, address, root_certificates)
    empty = home / "empty"
    empty.mkdir(exist_ok=True)
    command = [script("flower-superlink"), "--port", str(port), *options]
    with (home / "superlink.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=empty, env=environment(home), stdout=log, stderr=log, start_new_session=True
        )
    link = SuperLink(home, address, process)
    _wait_until_healthy(link, root_certificates)
    return link


def remote_superlink(home: Path, address: str, root_certificates: Path | None) -> SuperLink:
    """A SuperLink that somebody else runs, over TLS if there are root certificates."""
    _write_connection(home, address, root_certificates)
    return SuperLink(home, address, None)


def _write_connection(home: Path, address: str, root_certificates: Path | None) -> None:
    """Flower's own configuration file, which says how `flwr` reaches a SuperLink."""
    security = "insecure = true"
    if root_certificates is not None:
        security = f"root-certificates = {json.dumps(str(root_certificates.resolve()))}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "fedpriv"\n\n[superlink.fedpriv]\naddress = {json.dumps(address)}\n{security}\n',
        encoding="utf-8",
    )


def _wait_until_healthy(link: SuperLink, root_certificates: Path | None) -> None:
    trusted = None if root_certificates is None else ssl.create_default_context(cafile=str(root_certificates))
    scheme = "http" if trusted is None else "https"
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if link.ended:
            raise RunError(f"Flower's SuperLink did not start{link.log_tail()}")
        try:
            with urllib.request.urlopen(f"{scheme}://{link.address}/health", timeout=2.0, context=trusted):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.1)
    raise RunError(f"Flower's SuperLink did not answer within {_START_SECONDS:.0f} s{link.log_tail()}")


def stop_all_of(home: Path) -> None:
    """End all that was started with a FLWR_HOME in `home`, some of it in sessions of its own.

    Their children are ours too: Ray's agents overwrite their environment with a title.
    """
    ours = {process for process in psutil.process_iter() if _is_within(_home_of(process), home)}
    for parent in list(ours):
        with suppress(psutil.NoSuchProcess):
            ours.update(parent.children(recursive=True))
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(ours, timeout=5.0)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)


def _home_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("FLWR_HOME")
    except psutil.Error:
        return None  # gone meanwhile, or another user's


def _is_within(folder: str | None, home: Path) -> bool:
    return folder is not None and Path(folder).is_relative_to(home)


def script(name: str) -> str:
    """A console script of this very Python environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise RunError(f"{path} is missing: install fedpriv with its dependencies into this environment")
    return str(path)


def environment(home: Path) -> dict[str, str]:
    """The environment of a Flower process with a home of its own."""
    scripts = str(Path(sys.executable).parent)
    path = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"  # executors look for flwr-* scripts on the path
    return {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PATH": path}


def free_ports(count: int) -> list[int]:
    """Different TCP ports of this machine that nobody listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
