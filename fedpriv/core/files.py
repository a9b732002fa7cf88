"""Write files whole or not at all, and find scenarios by name.

A write that fails (OSError, as from a full disk) leaves the file as it was, and no draft beside it.

Scenarios have the names of those that fedpriv ships, or paths of files.  The lookup imports no torch, so that a
wrong name is reported at once.
"""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, suggestion

_READABLE = 0o666  # less the umask
OWN = 0o600
"""The mode of a file for its owner alone."""


def write_json(path: Path, value: Any, mode: int = _READABLE) -> None:
    """Plain data as JSON; ValueError for numbers that are not finite."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode(), mode)


def write_vector(path: Path, vector: NDArray[Any], mode: int = _READABLE) -> None:
    """A NumPy array as .npy."""
    _replace(path, lambda file: np.save(file, vector, allow_pickle=False), mode)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, mode: int = _READABLE, *, durable: bool = True) -> None:
    """Without `durable` a crash of the machine may leave a damaged file, the end of this process none."""
    _replace(path, lambda file: file.write(content), mode, durable=durable)


def sync_folder(folder: Path) -> None:
    """Names that were made or removed in `folder` are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, write: Callable[[IO[bytes]], Any], mode: int, *, durable: bool = True) -> None:
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
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def shipped_folder() -> Path:
    """Where the shipped scenarios are: in an installed package, or beside it in a checkout and Flower's bundle."""
    inside = Path(__file__).parents[1] / "scenario" / "shipped"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "scenarios"


def shipped() -> dict[str, Path]:
    """Every shipped scenario by name."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.toml"))}


def scenario_file(given: Path) -> Path:
    """The file that a person means by a path, or by a shipped scenario's name.

    A file that exists is that file; otherwise NAME, NAME.toml and scenarios/NAME.toml mean the shipped scenario.
    InputError if there is neither.
    """
    if given.exists():
        return given
    plain = given.parent in (Path(), Path("scenarios")) and given.suffix in ("", ".toml")
    known = shipped()
    name = given.name.removesuffix(".toml")
    if plain and name in known:
        return known[name]
    raise InputError(
        f"{given}: no such file, and no scenario of that name is shipped; `fedpriv list scenarios` names them"
        f"{suggestion(name, known)}"
    )
