"""What every engine does: run cells, tell an observer how it goes, hand back outcomes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedpriv.errors import InputError
from fedpriv.running.observer import RunObserver
from fedpriv.running.outcome import Finished
from fedpriv.scenario import Cell


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
