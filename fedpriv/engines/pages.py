"""Memory that a run keeps: what a round frees, the next one takes again, and no fresh pages for it.

glibc asks the system for every long piece of memory anew and gives it back when it is freed.  A round of a large
model allocates the vectors of the round before, and to get and clear their pages takes longer than to compute with
them.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_NEVER = -1
_LONGEST_KEPT = 2**30
_NAMES = ("gnu_get_libc_version", "mallopt", "malloc_trim")
_LONGEST_ALLOWED = 2**25  # glibc before 2.35 refuses more
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")


@contextmanager
def kept_pages() -> Iterator[None]:
    """While anybody is in here, memory that is freed stays with the process; afterwards it goes to the system.

    Afterwards the thresholds are those up to which glibc itself raises them in a process with long vectors.
    Nothing happens where malloc is not glibc's, or whoever started the process has set its thresholds.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    _USERS.enter(libc)
    try:
        yield
    finally:
        _USERS.leave(libc)


def _glibc() -> ctypes.CDLL | None:
    if any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return libc if all(hasattr(libc, name) for name in _NAMES) else None


class _Users:
    """How many runs of this process, in whatever thread, want pages to be kept."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def enter(self, libc: ctypes.CDLL) -> None:
        with self._lock:
            self._count += 1
            if not libc.mallopt(_MMAP_THRESHOLD, _LONGEST_KEPT):
                libc.mallopt(_MMAP_THRESHOLD, _LONGEST_ALLOWED)
            libc.mallopt(_TRIM_THRESHOLD, _NEVER)

    def leave(self, libc: ctypes.CDLL) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                libc.mallopt(_MMAP_THRESHOLD, _LONGEST_ALLOWED)
                libc.mallopt(_TRIM_THRESHOLD, 2 * _LONGEST_ALLOWED)
                libc.malloc_trim(0)


_USERS = _Users()
