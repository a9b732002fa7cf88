"""The mark of a ledger: a file of its own that says how far the ledger has come.

It has the ledger's name and two commits, by number and head of the chain: the one that is on the disk for sure,
and the one that is being made; and, while no run is under way, a digest of the ledger's whole file.  It is written
before and after each commit, and a reply leaves after that.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from fedpriv.core.errors import InputError
from fedpriv.core.files import sync_folder

_TITLE = "fedpriv ledger mark 2"


class Commit(NamedTuple):
    """How many commits a ledger has had, and the head of their chain."""

    number: int
    head: bytes


class Reading(NamedTuple):
    """What a mark says: whose it is, the last commit that is done, and the one after it that may be."""

    ledger: str
    done: Commit
    begun: Commit
    whole: str = ""
    """SHA-256 of the ledger's file, while no run is under way."""

    @property
    def content(self) -> bytes:
        """The file: a line each, and a check of all."""
        commits = (f"{commit.number} {commit.head.hex()}" for commit in (self.done, self.begun))
        lines = "\n".join((_TITLE, self.ledger, *commits, self.whole or "-", ""))
        return f"{lines}{hashlib.sha256(lines.encode()).hexdigest()}\n".encode()


class Mark:
    """The file; OSError where the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Reading:
        """InputError if it is not there, is no mark, or is not byte for byte what was written."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            raise self._unusable("no such mark of the ledger") from None
        except OSError as error:
            raise self._unusable(f"cannot be read as a ledger's mark: {error}") from None
        try:
            _, ledger, done, begun, whole, _ = content.decode("ascii").split("\n", 5)
            reading = Reading(ledger, _commit(done), _commit(begun), "" if whole == "-" else whole)
        except ValueError:
            raise self._unusable("is no mark of a ledger of this version, or is damaged") from None
        if reading.content != content:
            raise self._unusable("is damaged, its check does not match")
        return reading

    def write(self, reading: Reading) -> None:
        """On the disk, whole or not at all, when this returns."""
        draft = self.path.with_name(self.path.name + ".new")
        draft.unlink(missing_ok=True)  # whoever made it: a link would lead elsewhere
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(reading.content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        sync_folder(self.path.parent)

    def _unusable(self, what: str) -> InputError:
        return InputError(
            f"{self.path}: {what}; without it nobody knows whether the ledger is an older copy, so nothing is "
            "released: move the ledger into a folder of its own, and `fedpriv silo restore POLICY FOLDER` begins "
            "again from it, with the budget counted as spent"
        )


def _commit(line: str) -> Commit:
    number, head = line.split(" ")
    return Commit(int(number), bytes.fromhex(head))
