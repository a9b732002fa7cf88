"""Write files whole or not at all, append to journals, and find scenarios by name.

A whole file is written to a draft, a new file beside it, which then takes its place by a rename.  So a write that
fails, as on a full disk, leaves the file unchanged.  A journal is a file of JSON lines, whose last line may be
incomplete after a kill of the process.
"""

import errno
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, refuse, suggestion

_READABLE_MODE = 0o666  # minus the umask
PRIVATE_MODE = 0o600
"""Mode of a file that only its user can read and write."""


def write_json(path: Path, value: Any, mode: int = _READABLE_MODE) -> None:
    """Write plain data as JSON.

    Raises:
        ValueError: A number is not finite.
    """
    write_text(path, f"{json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)}\n", mode)


def write_vector(path: Path, vector: NDArray[Any], mode: int = _READABLE_MODE) -> None:
    """Write a NumPy array as .npy."""
    _replace_file(path, lambda file: np.save(file, vector, allow_pickle=False), mode)


def write_text(path: Path, text: str, mode: int = _READABLE_MODE) -> None:
    r"""Write a text in UTF-8, and surrogates, as in a file's name that is not UTF-8, as escapes (\udce9)."""
    write_bytes(path, text.encode(errors="backslashreplace"), mode)


def write_bytes(path: Path, content: bytes, mode: int = _READABLE_MODE, *, durable: bool = True) -> None:
    """Write bytes to a file, which keeps its old content until all of the new is written.

    Without `durable` a crash of the machine may damage the file, but a kill of the process does not.
    """
    _replace_file(path, lambda file: file.write(content), mode, durable=durable)


def create_secret_file(path: Path, size: int) -> None:
    """Write `size` random bytes to a private file, unless it exists.

    The bytes are written to a draft, and a hard link gives it the name of the file, since a link replaces no file.

    Guarantee: if several processes create the file at once, all of them read the same content, and no file is
    replaced or cut short.
    """
    # A kill may leave this draft, which is as private as the file.
    draft = path.with_name(f"{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    try:
        write_bytes(draft, secrets.token_bytes(size), PRIVATE_MODE)
        with suppress(FileExistsError):
            os.link(draft, path)
        sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def append_line(path: Path, value: Any, *, allow_nan: bool = True) -> None:
    """Append plain data as one JSON line.

    Raises:
        ValueError: A number is not finite, and `allow_nan` is False.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, allow_nan=allow_nan) + "\n")


def read_complete_lines(path: Path) -> list[bytes]:
    """Read the complete lines of a journal, or none if there is no file."""
    return [
        line
        for line in (path.read_bytes().splitlines(keepends=True) if path.exists() else [])
        if line.endswith(b"\n")
    ]


def refuse_pipe(path: Path) -> Path:
    """Return a path that is no named pipe, since a reader would wait for another program to write into it.

    Pipes in /dev and /dev/fd, such as /dev/stdin and those of a shell's process substitution, have a writer.

    Raises:
        InputError: The path is a named pipe.
    """
    refuse(
        {
            f"{path}: is a named pipe; expected a file": path.is_fifo()
            and str(path.parent) not in ("/dev", "/dev/fd")
        }
    )
    return path


def load_json(text: str | bytes) -> Any:
    """Parse JSON, and refuse a whole number of more than 300 digits, which may be too large for a float.

    NaN, Infinity and -Infinity are parsed as floats.

    Raises:
        ValueError: The text is no JSON, or has a whole number of more than 300 digits.
        RecursionError: Arrays or objects are nested too deeply for Python's parser.
    """
    return json.loads(text, parse_int=_parse_integer)


def _parse_integer(digits: str) -> int:
    if len(digits.lstrip("-")) > 300:
        raise ValueError("it has a whole number of more than 300 digits")
    return int(digits)


def sync_folder(folder: Path) -> None:
    """Wait until the creations, removals and renames of files in `folder` are on the disk.

    Nothing is done on a system that cannot open a folder.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows opens no folder, and only files are synced there
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_file(path: Path, write: Callable[[IO[bytes]], Any], mode: int, *, durable: bool = True) -> None:
    """Write a draft beside the file, and rename it to the file.

    Args:
        path: File to be replaced or created, whose folder is created if it is missing.
        write: Function that writes the content to a binary file.
        mode: Mode of the written file, less the umask.
        durable: Whether the content has to be on the disk before the rename.

    Raises:
        OSError: The file cannot be written, or is a folder.
    """
    if path.is_dir():  # checked before a draft is written
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft_path = path.with_name(f".{path.name}.{os.getpid()}")
    draft_path.unlink(missing_ok=True)  # a killed process of this number may have left a draft of another mode
    try:
        with open(os.open(draft_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft_path.replace(path)
    except BaseException as error:
        draft_path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(draft_path):  # users do not know the draft
            error.filename = str(path)
        raise


def acquire_lock(file: int, seconds: float = 10.0) -> None:
    """Lock an open file against other processes that lock it, too.

    A killed process may take some seconds to give up its lock, so the lock is attempted again and again.

    Args:
        file: Descriptor of an open file.
        seconds: Approximate longest wait for the present holder of the lock.

    Raises:
        BlockingIOError: The lock is held elsewhere even after the wait.
    """
    import fcntl  # missing on Windows

    for _ in range(int(100.0 * seconds)):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def find_shipped_folder() -> Path:
    """Return the folder of shipped scenarios, in the package or, as in a checkout, beside it."""
    inside = Path(__file__).parents[1] / "scenario" / "shipped"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "scenarios"


def list_shipped_scenarios() -> dict[str, Path]:
    """Return the path of every shipped scenario by name."""
    return {path.stem: path for path in sorted(find_shipped_folder().glob("*.toml"))}


def find_scenario_file(path: Path) -> Path:
    """Return the file of a scenario that is named by a path or by a shipped scenario's name.

    A file at the path goes first.  Otherwise NAME, NAME.toml, scenarios/NAME and scenarios/NAME.toml stand for the
    shipped scenario NAME.

    Raises:
        InputError: There is neither a file nor a shipped scenario of this name, or the path is a named pipe.
    """
    if path.exists() and not path.is_dir():
        return refuse_pipe(path)
    scenarios, name = list_shipped_scenarios(), path.name.removesuffix(".toml")
    if name in scenarios and path.parent in (Path(), Path("scenarios")) and path.suffix in ("", ".toml"):
        return scenarios[name]
    raise InputError(
        f"{path}: no such file, and no scenario of that name is shipped; `fedpriv list scenarios` names them"
        f"{suggestion(name, scenarios)}"
    )
