"""Forms that other programs read, a row each: the file in the run's folder, and what goes into it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedpriv.errors import InputError, suggestion
from fedpriv.files import write_json
from fedpriv.privacy.entries import read_ledger
from fedpriv.privacy.events import events_of
from fedpriv.reports.crate import METADATA, crate_of


class Export(NamedTuple):
    """A form of a run."""

    file: str
    made: Callable[[Path], Any]
    """From the run's folder to plain data."""


def _events(folder: Path) -> list[dict[str, Any]]:
    return [events_of(entry) for entry in read_ledger(folder)]


EXPORTS = {
    "dp-accounting": Export("dp-events.json", _events),
    "ro-crate": Export(METADATA, crate_of),
}


def export(folder: Path, form: str) -> Path:
    """Write a form into the run's folder, whole or not at all; returns the file.

    InputError for a form that there is not, a folder without results, and what the form cannot say.
    """
    if form not in EXPORTS:
        raise InputError(f"--as {form}: known forms are {', '.join(EXPORTS)}{suggestion(form, EXPORTS)}")
    chosen = EXPORTS[form]
    write_json(folder / chosen.file, chosen.made(folder))
    return folder / chosen.file
