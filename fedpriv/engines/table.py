"""Engines by name, and what all of them do: run cells, tell an observer of their progress, return outcomes.

Each engine is imported when it is asked for, because each is heavy in its own way.

During a run glibc is made to keep freed memory (`mallopt`), so that rounds do not fault in new pages: it asks the
system for every long piece of memory anew and gives it back when it is freed.  A round of a large model allocates
the vectors of the round before, and to get and clear their pages takes longer than to compute with them.  Very
long vectors still go back: memory for two of each is worse than a round that takes longer.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from fedpriv.claims.outcome import Finished, RunObserver
from fedpriv.core.addons import added
from fedpriv.core.errors import InputError, suggestion
from fedpriv.engines.vectorized.checkpoints import NO_CHECKPOINTS, Checkpoints
from fedpriv.scenario.schema import Cell


@dataclass(frozen=True)
class Outcome:
    """A finished cell and its place in the list the engine was given."""

    index: int
    finished: Finished


class Engine(Protocol):
    """Runs cells one after another or many at once, and yields each as soon as it is finished.

    The observer hears `advanced` and `evaluated` only, in the engine's own process and thread; a cell's place is
    its place in the list.
    """

    def __call__(self, cells: Sequence[Cell], observer: RunObserver) -> Iterator[Outcome]: ...


@dataclass(frozen=True)
class Connection:
    """A SuperLink that runs already, and the certificates it is trusted by; nothing for what is started here.

    InputError for what is no address, and for certificates without one or that are not there.
    """

    superlink: str | None = None
    root_certificates: Path | None = None

    def __post_init__(self) -> None:
        address, certificates = self.superlink, self.root_certificates
        if address is not None and not re.fullmatch(r"unix:.+|.+:\d+", address):
            raise InputError(f"--superlink {address}: expected unix:SOCKET, or HOST:PORT of somebody's SuperLink")
        if certificates is not None and (address is None or not certificates.is_file()):
            raise InputError(f"--root-certificates {certificates}: expected a file, and --superlink with it")


LOCAL = Connection()
"""Everything is started here."""


Grouping = Callable[[Sequence[Cell]], list[list[int]]]


@dataclass(frozen=True)
class EngineRow:
    """What a caller has to know of an engine."""

    groups: Grouping | None = None
    """The cells that it computes together, as places in the list; None if it has processes of its own."""
    connects: bool = False
    """Whether it can use a SuperLink that runs already, with records that are not here."""
    resumes_cells: bool = False
    """Whether a cell that failed goes on from its last round: its silos and server keep what they released."""
    releases: bool = False
    """Whether its noise protects somebody: releases are integers, with keys of the operating system."""


def _vectorized_groups(cells: Sequence[Cell]) -> list[list[int]]:
    from fedpriv.engines.vectorized.silos import groups_of

    return groups_of(cells)


ENGINES = {
    "vectorized": EngineRow(_vectorized_groups),
    "inprocess": EngineRow(lambda cells: [[place] for place in range(len(cells))]),
    "ray": EngineRow(),
    "deployment": EngineRow(connects=True, resumes_cells=True, releases=True),
}


def engine_row(name: str) -> EngineRow:
    """InputError for an engine that there is not."""
    if name not in ENGINES:
        raise InputError(f"--engine {name}: known engines are {', '.join(ENGINES)}{suggestion(name, ENGINES)}")
    return ENGINES[name]


def engine_named(
    name: str, folder: Path = Path(), connection: Connection = LOCAL, kept: Checkpoints = NO_CHECKPOINTS
) -> Engine:
    """The engine for a run whose results go to `folder`; InputError for a connection that it cannot use.

    `kept` is where it keeps checkpoints of cells that it is in the middle of, if it does.
    """
    if not engine_row(name).connects and connection != LOCAL:
        able = ", ".join(other for other, each in ENGINES.items() if each.connects)
        raise InputError(f"--engine {name}: --superlink and --root-certificates are for --engine {able}")
    if name == "vectorized":
        from fedpriv.engines.vectorized.engine import run_vectorized

        return partial(run_vectorized, kept=kept)
    if name == "inprocess":
        from fedpriv.engines.inprocess import run_inprocess

        return run_inprocess
    engine: Any = added("engine", name)
    return cast(Engine, engine) if name == "ray" else partial(engine, folder=folder, connection=connection)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_NEVER = -1
_LONGEST_KEPT = 2**27
"""Bytes.  A heap with holes where pieces were freed can take twice what is held; longer pieces go back at once."""
_NAMES = ("gnu_get_libc_version", "mallopt", "malloc_trim")
_LONGEST_ALLOWED = 2**25  # glibc before 2.35 refuses more
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")


@contextmanager
def kept_pages() -> Iterator[None]:
    """While a run is in here, memory that is freed stays with the process; afterwards it goes to the system.

    Afterwards the thresholds are those up to which glibc itself raises them in a process with long vectors.
    Nothing happens where malloc is not glibc's, or its thresholds were set by hand.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    _USERS.append(libc)
    if not libc.mallopt(_MMAP_THRESHOLD, _LONGEST_KEPT):
        libc.mallopt(_MMAP_THRESHOLD, _LONGEST_ALLOWED)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        _USERS.pop()
        if not _USERS:  # a run that begins here in another thread is slower, and no more
            libc.mallopt(_MMAP_THRESHOLD, _LONGEST_ALLOWED)
            libc.mallopt(_TRIM_THRESHOLD, 2 * _LONGEST_ALLOWED)
            libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return libc if all(hasattr(libc, name) for name in _NAMES) else None


_USERS: list[ctypes.CDLL] = []
"""An entry for each run of this process, in all threads, that wants pages to be kept."""
