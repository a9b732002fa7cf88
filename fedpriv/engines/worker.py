"""What a worker does: it runs an engine, and says as it goes what the engine says."""

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.engines.base import Outcome
from fedpriv.engines.table import engine_named
from fedpriv.extensions import import_files
from fedpriv.running.checkpoint import Checkpoints, installed
from fedpriv.running.observer import RunObserver
from fedpriv.scenario import Cell, resolve_cell

_TELL_SECONDS = 0.1


@dataclass(frozen=True)
class Began:
    """The first thing a worker says: who it is."""

    machine: str
    process: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Advanced:
    rounds: int


@dataclass(frozen=True)
class Evaluated:
    place: int
    t: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Noted:
    line: str


@dataclass(frozen=True)
class Kept:
    """A checkpoint, which the process that asked for the work keeps; None: it is not needed any more."""

    name: str
    content: bytes | None


Event = Began | Advanced | Evaluated | Noted | Kept | Outcome
_Said = Event | BaseException | None


def work(
    engine: str,
    cells: Sequence[Mapping[str, Any]],
    imports: Sequence[str],
    before: Mapping[str, bytes] | None = None,
) -> Iterator[Event]:
    """Run cells on the engine of this name; what it would tell an observer comes as events, and its outcomes.

    `cells` are resolved ones as plain data (`Cell.canonical`), `imports` files of algorithms, models and data of
    one's own: what they define is not known here before they are imported.  `before` are the checkpoints that
    were kept of them, by name.
    """
    yield Began(socket.gethostname(), os.getpid(), installed())
    import_files([Path(file) for file in imports])
    resolved = [resolve_cell(cell, "a worker's cell") for cell in cells]
    said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
    threading.Thread(target=_run, args=(engine, resolved, before or {}, said), daemon=True).start()
    while (event := said.get()) is not None:
        if isinstance(event, BaseException):
            raise event
        yield event


def _run(
    engine: str, cells: Sequence[Cell], before: Mapping[str, bytes], said: "queue.SimpleQueue[_Said]"
) -> None:
    teller = _Teller(said)
    try:
        for outcome in engine_named(engine, kept=_Sent(before, said))(cells, teller):
            teller.flush()
            said.put(outcome)
        said.put(None)
    except BaseException as error:
        said.put(error)


class _Teller(RunObserver):
    """Puts what an engine says into the queue, rounds not more often than a person reads."""

    def __init__(self, said: "queue.SimpleQueue[_Said]") -> None:
        self._said, self._rounds, self._last = said, 0, time.monotonic()

    def advanced(self, rounds: int) -> None:
        self._rounds += rounds
        if time.monotonic() - self._last > _TELL_SECONDS:
            self.flush()

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self._said.put(Evaluated(place, t, metrics))

    def noted(self, line: str) -> None:
        self._said.put(Noted(line))

    def flush(self) -> None:
        if self._rounds:
            self._said.put(Advanced(self._rounds))
        self._rounds, self._last = 0, time.monotonic()


class _Sent(Checkpoints):
    """Checkpoints that go to the process that asked: its folder may be on another machine, and is its own."""

    def __init__(self, before: Mapping[str, bytes], said: "queue.SimpleQueue[_Said]") -> None:
        self._before, self._said = before, said

    def latest(self, name: str) -> bytes | None:
        return self._before.get(name)

    def keep(self, name: str, content: bytes) -> None:
        self._said.put(Kept(name, content))

    def drop(self, name: str) -> None:
        self._said.put(Kept(name, None))
