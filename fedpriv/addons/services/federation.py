"""What a coordinator sees of its federation: silos and runs at a SuperLink, asked on its control socket."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.addons.services.flower_private.control import Control, Status
from fedpriv.addons.services.flower_private.presence import clock_words
from fedpriv.core.errors import printable
from fedpriv.protocol.cell_folder import FolderReader
from fedpriv.protocol.messages import difference

_SHOWN = 100
_AWAY = 60.0
"""Seconds without a word after which a silo is not connected, and a run is followed by nobody."""


@dataclass(frozen=True)
class SiloSeen:
    """A silo whose key is registered; times in seconds of the epoch, None for what never happened."""

    silo: int
    connected: bool
    seen: float | None
    fedpriv: str | None
    clock_ahead: float | None
    """Seconds by which its clock was ahead of the coordinator's, the way of the request included."""
    refused: str | None

    def line(self) -> str:
        """One line for a person."""
        ago = "never" if self.seen is None else f"{time.time() - self.seen:.0f} s ago"
        if self.refused:
            return f"silo {self.silo}: not let in (last connected: {ago}): {self.refused}"
        if self.seen is None or self.clock_ahead is None:
            return f"silo {self.silo}: not connected since the SuperLink was started"
        clock = "as here" if abs(self.clock_ahead) < 1.0 else f"{difference(self.clock_ahead)} the coordinator's"
        state = "connected" if self.connected else "away"
        return f"silo {self.silo}: {state}, last seen {ago}, fedpriv {self.fedpriv}, clock {clock}"


@dataclass(frozen=True)
class RunSeen:
    """A run; times as Flower writes them, "" for what has not happened."""

    run: str
    state: str
    started: str
    finished: str
    rounds: int
    """Number of rounds that its server has reported."""
    folder: str
    orphan: bool
    """Whether it is not over, and no `fedpriv run` has asked for it for a minute."""
    details: str = ""
    """Details that Flower gives of its end, "" if there are none."""

    def line(self) -> str:
        """One line for a person."""
        done = f"{self.rounds} round{'' if self.rounds == 1 else 's'} done"
        said = f" ({self.details})" if self.details else ""
        at = f", started {self.started[:19]}Z" if self.started else ""
        orphan = (
            f"; no `fedpriv run` follows it: `fedpriv federation stop {self.run}` ends it" if self.orphan else ""
        )
        return f"run {self.run}: {self.state}{at}, {done}, in {self.folder or 'an unknown folder'}{said}{orphan}"


def silos_of(control: Control) -> list[SiloSeen]:
    """Every silo whose key is registered; RunError if no SuperLink of fedpriv answers."""
    told = control.seen()["silos"]
    return sorted((_silo(name, entry) for name, entry in told.items()), key=lambda silo: silo.silo)


def _silo(name: str, entry: Mapping[str, Any]) -> SiloSeen:
    seen, refused, ahead = entry.get("seen"), entry.get("refused"), entry.get("ahead")
    out = refused is not None and time.time() - refused < 2 * _AWAY
    return SiloSeen(
        silo=int(name.removeprefix("silo-")),
        connected=seen is not None and not out and time.time() - seen < _AWAY,
        seen=seen,
        fedpriv=entry.get("fedpriv"),
        clock_ahead=ahead,
        refused=clock_words(ahead) if out and ahead is not None else None,
    )


def runs_of(control: Control) -> list[RunSeen]:
    """The last hundred runs, the newest first; RunError if no SuperLink of fedpriv answers."""
    told = control.seen()
    return [_run(run, told) for run in told["runs"][: -_SHOWN - 1 : -1]]


def _run(run: Mapping[str, Any], told: Mapping[str, Any]) -> RunSeen:
    folder, followed = str(run["folder"]), told["followed"].get(run["run"], told["since"])
    return RunSeen(
        **{name: str(run.get(name, "")) for name in ("run", "state", "started", "finished", "details")},
        rounds=FolderReader(Path(folder)).round() if folder else 0,
        folder=printable(folder),
        orphan=not Status(run["state"]).is_over and time.time() - followed > _AWAY,
    )
