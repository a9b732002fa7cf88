"""Write files whole or not at all, append to journals, and find scenarios by name.  Imports no torch.

A write that fails (OSError, as from a full disk) leaves the file as it was, and no draft beside it.  A journal is
a file of JSON lines: a process that is killed may leave its last line cut short, and readers leave that line out.
Scenarios are those that fedpriv ships, and files of one's own.
"""

import errno
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, suggestion

_READABLE_MODE = 0o666  # less the umask
PRIVATE_MODE = 0o600
"""The mode of a file for its owner alone."""


def write_json(path: Path, value: Any, mode: int = _READABLE_MODE) -> None:
    """Write plain data as JSON; ValueError for numbers that are not finite."""
    write_bytes(path, f"{json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)}\n".encode(), mode)


def write_vector(path: Path, vector: NDArray[Any], mode: int = _READABLE_MODE) -> None:
    """Write a NumPy array as .npy."""
    _replace_file(path, lambda file: np.save(file, vector, allow_pickle=False), mode)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, mode: int = _READABLE_MODE, *, durable: bool = True) -> None:
    """Write `content`; without `durable` a crash of the machine may damage the file, a kill of the process not."""
    _replace_file(path, lambda file: file.write(content), mode, durable=durable)


def create_secret_file(path: Path, size: int) -> None:
    """Write so many random bytes for their owner alone, where there is no file.

    Guarantee: of several that make one at once all find the same, and none is replaced or cut short.
    """
    draft = path.with_name(f"{path.stem}.{secrets.token_hex(8)}{path.suffix}")  # left by a power cut, a *.key too
    try:
        write_bytes(draft, secrets.token_bytes(size), PRIVATE_MODE)
        with suppress(FileExistsError):
            os.link(draft, path)
        sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def append_line(path: Path, value: Any, *, allow_nan: bool = True) -> None:
    """Append plain data as one JSON line; ValueError for numbers that are not finite, if they are not allowed."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, allow_nan=allow_nan) + "\n")


def read_complete_lines(path: Path) -> list[bytes]:
    """Read the lines of a journal, but for a last one that was cut short; none where there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def sync_folder(folder: Path) -> None:
    """Have names that were made or removed in `folder` on the disk before this returns."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_file(path: Path, write: Callable[[IO[bytes]], Any], mode: int, *, durable: bool = True) -> None:
    if path.is_dir():  # before a draft is written beside it
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # of a process of this number that was killed: its mode may be another one
    try:
        with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(draft):  # nobody asked for a file of that name
            error.filename = str(path)
        raise


def find_shipped_folder() -> Path:
    """Find the shipped scenarios: in an installed package, or beside it in a checkout and Flower's bundle."""
    inside = Path(__file__).parents[1] / "scenario" / "shipped"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "scenarios"


def list_shipped_scenarios() -> dict[str, Path]:
    """List every shipped scenario by name."""
    return {path.stem: path for path in sorted(find_shipped_folder().glob("*.toml"))}


def find_scenario_file(given: Path) -> Path:
    """Find the file that a person means by a path, or by a shipped scenario's name.

    A file that exists is that file; otherwise NAME, NAME.toml and scenarios/NAME.toml mean the shipped scenario.
    InputError if there is neither.
    """
    if given.exists():
        return given
    known, name = list_shipped_scenarios(), given.name.removesuffix(".toml")
    if name in known and given.parent in (Path(), Path("scenarios")) and given.suffix in ("", ".toml"):
        return known[name]
    raise InputError(
        f"{given}: no such file, and no scenario of that name is shipped; `fedpriv list scenarios` names them"
        f"{suggestion(name, known)}"
    )
