"""How far a ledger has come, kept outside of it: an older copy of the ledger that is put back is noticed.

A mark says the ledger's own name and two numbers: the commit that is on the disk for sure, and the one that is
being made.  It is written before and after each commit, and a reply leaves after that.
"""

import os
from pathlib import Path
from typing import NamedTuple

from fedpriv.errors import InputError

_TITLE = "fedpriv ledger mark"


class Reading(NamedTuple):
    """What a mark says: whose it is, the last commit that is done, and the one after it that may be."""

    ledger: str
    done: int
    begun: int


class Mark:
    """The file; OSError where the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Reading:
        """InputError if it is not there or is no mark."""
        try:
            title, ledger, done, begun = self.path.read_text(encoding="utf-8").splitlines()
            if title == _TITLE:
                return Reading(ledger, int(done), int(begun))
        except FileNotFoundError:
            raise InputError(
                f"{self.path}: no such mark of the ledger; without it nobody knows whether the ledger is an older "
                "copy"
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path}: cannot be read as a ledger's mark: {error}") from None
        raise InputError(f"{self.path}: is no mark of a ledger")

    def write(self, reading: Reading) -> None:
        """On the disk, whole or not at all, when this returns."""
        draft = self.path.with_name(self.path.name + ".new")
        draft.unlink(missing_ok=True)  # whoever made it: a link would lead elsewhere
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write("\n".join((_TITLE, reading.ledger, str(reading.done), str(reading.begun), "")))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
