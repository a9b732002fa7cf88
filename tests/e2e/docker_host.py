"""What a test with containers needs of its machine: a Docker daemon, a base image, wheels.

Each is had in the first way that works here.  Where none does, `UnavailableError` says why in one line.
"""

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED_BASE = "python:3.11-slim-bookworm"
LOCAL_BASE = "fedpriv-base:bookworm"
PULL_SECONDS, START_SECONDS, STEP_SECONDS = 120.0, 60.0, 1800.0


class UnavailableError(Exception):
    """This machine cannot run containers, or cannot get what they are built from."""


def run(*command: object, env: Mapping[str, str], cwd: Path | None = None, seconds: float = STEP_SECONDS) -> str:
    """Standard output; UnavailableError with the end of the standard error if the command fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, env=env, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{words[0]}: {error}") from None
    if done.returncode:
        raise UnavailableError(f"`{' '.join(words)}` failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def works(*command: object, env: Mapping[str, str], seconds: float = STEP_SECONDS) -> bool:
    try:
        run(*command, env=env, seconds=seconds)
    except UnavailableError:
        return False
    return True


@contextmanager
def docker_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `docker` finds a daemon: the one that runs, or one for as long as the block."""
    environment = dict(os.environ)
    for tool in ("docker", "docker-compose"):
        if not shutil.which(tool):
            raise UnavailableError(f"{tool} is not installed: `make e2e-tools` installs it on Debian")
    if works("docker", "info", env=environment):
        yield environment
        return
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        raise UnavailableError(
            "no Docker daemon answers, and none can be started here (it takes dockerd and root)"
        )
    folder.mkdir()
    environment["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
    options = {
        "host": environment["DOCKER_HOST"],
        "data-root": folder / "data",
        "exec-root": folder / "exec",
        "pidfile": folder / "pid",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["dockerd", *(f"--{name}={value}" for name, value in options.items())], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not works("docker", "info", env=environment):
            if process.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(f"dockerd does not start: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.5)
        yield environment
    finally:
        process.terminate()
        process.wait(START_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)  # gigabytes of layers


def base_image(folder: Path, env: Mapping[str, str]) -> str:
    """The published base image, or one made of Debian's packages where it cannot be pulled."""
    for image in (PUBLISHED_BASE, LOCAL_BASE):
        if works("docker", "image", "inspect", image, env=env):
            return image
    if works("docker", "pull", "--quiet", PUBLISHED_BASE, env=env, seconds=PULL_SECONDS):
        return PUBLISHED_BASE
    root, archive = folder / "root", folder / "root.tar"
    packages = "python3.11,python3.11-venv,python3,python3-venv,ca-certificates"
    run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root, env=env)
    run("tar", "--directory", root, "--create", "--file", archive, ".", env=env)
    run("docker", "import", archive, LOCAL_BASE, env=env)
    return LOCAL_BASE


def fetch_wheels(folder: Path, env: Mapping[str, str]) -> Path:
    """`folder`, with everything the image installs as wheels, from wherever this machine's pip gets it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--python-version=3.11", "--only-binary=:all:"),
        *("--constraint", "constraints.txt", "--dest", folder),
        *(*project["project"]["dependencies"], *project["build-system"]["requires"]),
        env=env,
        cwd=ROOT,
    )
    return folder


class Docker(NamedTuple):
    """A daemon, as the environment in which `docker` finds it, and what images are built from."""

    environment: Mapping[str, str]
    base: str
    wheels: Path


@contextmanager
def docker(folder: Path) -> Iterator[Docker]:
    """All of it, for as long as the block; UnavailableError where it cannot be had."""
    with docker_daemon(folder / "daemon") as found:
        yield Docker(found, base_image(folder, found), fetch_wheels(folder / "wheels", found))
