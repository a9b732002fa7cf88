"""A clean checkout in which the containers are prepared and run, as README says."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.e2e.docker_host import ROOT, Docker, run

UP_SECONDS = 3600.0  # a limit for what hangs; on a quiet machine it is minutes


@dataclass(frozen=True)
class Containers:
    """A checkout in which deploy/prepare.sh has been run."""

    checkout: Path
    environment: Mapping[str, str]

    def compose(self, *words: str, scenario: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["docker-compose", "--ansi=never", *words],
            cwd=self.checkout,
            env=self._environment(scenario),
            capture_output=True,
            text=True,
            timeout=UP_SECONDS,
            check=False,
        )

    def up(self, scenario: str, during: Callable[[], None] = lambda: None) -> "subprocess.CompletedProcess[str]":
        """README's command, and the containers taken away after it; the ledgers stay."""
        try:
            running = subprocess.Popen(
                ["deploy/up.sh"],
                cwd=self.checkout,
                env=self._environment(scenario),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            during()
            output, _ = running.communicate(timeout=UP_SECONDS)
            return subprocess.CompletedProcess(["deploy/up.sh"], running.returncode, output)
        finally:
            self.compose("down")

    def clear(self) -> None:
        """Take containers, networks and volumes away, ledgers and all, whether .env is there or not."""
        user = {"FEDPRIV_USER": "0:0"}  # which user it is does not matter to what goes
        done = Containers(self.checkout, {**self.environment, **user}).compose("down", "--volumes")
        assert done.returncode == 0, done.stderr

    def inside(self, name: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """A shell command, the last of `words`, in a running container; options of `exec` before it."""
        return self.compose("exec", "-T", *words[:-1], name, "sh", "-c", words[-1])

    def simulate(self, scenario: str, out: str, *overrides: str) -> list[Mapping[str, Any]]:
        """The in-process engine, in the job's own container: the same torch, whatever is installed here."""
        options = [word for override in overrides for word in ("--set", override)]
        words = ("fedpriv", "run", scenario, "--engine", "inprocess", "--out", f"runs/{out}", *options)
        done = self.compose("run", "--rm", "--no-deps", "job", *words)
        assert done.returncode == 0, done.stderr
        return self.results(out)["cells"]  # type: ignore[no-any-return]

    def results(self, name: str) -> Mapping[str, Any]:
        return dict(json.loads((self.checkout / "runs" / name / "results.json").read_text(encoding="utf-8")))

    def model(self, name: str, cell: int = 0) -> NDArray[np.float32]:
        return np.load(self.checkout / "runs" / name / "models" / f"{cell:04d}.npy")

    def _environment(self, scenario: str) -> dict[str, str]:
        return {**self.environment, **({"SCENARIO": scenario} if scenario else {})}


@contextmanager
def prepared(
    docker: Docker, folder: Path, *options: str, change: Callable[[Path], None] = lambda _: None, **own: str
) -> Iterator[Containers]:
    """The containers of a clean checkout after `deploy/prepare.sh OPTIONS`; gone, ledgers and all, with the block.

    `change` may change the checkout before; `own` are environment variables.
    """
    checkout = clean_checkout(folder / "fedpriv")
    for wheel in docker.wheels.iterdir():
        os.link(wheel, checkout / "deploy" / "wheels" / wheel.name)
    change(checkout)
    environment = {
        **docker.environment,
        "BASE_IMAGE": docker.base,
        "PIP_NO_INDEX": "1",
        "FEDPRIV_IMAGE": "fedpriv:e2e",
        "COMPOSE_PROJECT_NAME": "fedpriv-e2e",
        "FLWR_LOG_LEVEL": "INFO",
        **own,
    }
    ready = Containers(checkout, environment)
    ready.clear()  # what an earlier test left that was killed: its ledgers exist, and none is begun twice
    try:
        subprocess.run(
            ["deploy/prepare.sh", *options], cwd=checkout, env=environment, check=True, timeout=UP_SECONDS
        )
        yield ready
    finally:
        ready.clear()


def clean_checkout(folder: Path) -> Path:
    """The files that git knows, as they are now, links as links."""
    listed = run("git", "ls-files", "-z", env={"PATH": "/usr/bin:/bin"}, cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder
