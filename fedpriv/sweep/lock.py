"""One run in a folder at a time."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedpriv.errors import InputError, printable

_NAME = ".lock"
_LONGEST = 200  # bytes of a lock that are shown


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made, for this process; InputError, with who has it, while another run does.

    The lock is the kernel's (`flock`), so that it ends with the process, however that ends; the file says whose it
    is and means nothing without it.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME
    file = _taken(path)
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may have the descriptor too
        os.close(file)
        if new:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


def _taken(path: Path) -> int:
    """A descriptor of the file that bears the name, locked."""
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(file, path):
                return file
        except BlockingIOError:
            holder = printable(os.pread(file, _LONGEST, 0).decode(errors="replace")) or "another process"
            os.close(file)
            raise InputError(
                f"{path.parent}: {holder} is running there; give another --out, or wait until it ends"
            ) from None
        os.close(file)


def _is_named(file: int, path: Path) -> bool:
    """Whether nobody removed the name between our opening the file and locking it."""
    try:
        named, ours = path.stat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)
