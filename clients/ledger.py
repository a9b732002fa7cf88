"""The silo's own record of what it has released: SQLite, written before a reply leaves.

    runs     one row a run: its cell, its price in μ, its noise key (wiped after the last round), its state
    answers  one row a round: a digest of the query, and the bytes of the reply

Guarantee: a reply exists outside the silo only if its row was committed to the disk before (synchronous = FULL),
so that a restarted silo neither uses a record twice nor draws fresh noise for an old round.
"""

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fedpriv.errors import InputError, RunError

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    run_id TEXT PRIMARY KEY,
    cell TEXT NOT NULL,
    mu REAL NOT NULL,
    key BLOB,
    state BLOB
);
CREATE TABLE IF NOT EXISTS answers (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    t INTEGER NOT NULL,
    query BLOB NOT NULL,
    reply BLOB NOT NULL,
    PRIMARY KEY (run_id, t)
);
"""


class LedgerError(RunError):
    """The disk refuses; nothing was released, and the same question may be asked again."""


class Run(NamedTuple):
    """A run that was opened: its cell as canonical JSON, its price, its key while it is needed, its state."""

    cell: str
    mu: float
    key: bytes | None
    state: bytes | None


class Answer(NamedTuple):
    """A round that was answered: the digest of its query, and the bytes that were replied."""

    query: bytes
    reply: bytes


class SiloLedger:
    """One file, one silo, any number of runs."""

    def __init__(self, path: Path) -> None:
        """InputError if others may read the file: it holds the keys of the noise."""
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise InputError(f"{path}: others can read this ledger, which holds noise keys; chmod 600 it")
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{path}: cannot be used as a ledger: {error}") from None

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it on the disk, or none; LedgerError if the disk refuses."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # SQLite itself has rolled back when a disk is full
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise LedgerError(f"the silo's ledger could not be written, so nothing is released: {error}") from None

    def prices(self) -> list[float]:
        """μ of every run ever opened."""
        return [mu for (mu,) in self._database.execute("SELECT mu FROM runs")]

    def run(self, run_id: str) -> Run | None:
        row = self._database.execute(
            "SELECT cell, mu, key, state FROM runs WHERE run_id = ?", (run_id,)
        ).fetchone()
        return None if row is None else Run(*row)

    def open_run(self, run_id: str, cell: str, mu: float, key: bytes) -> None:
        self._database.execute(
            "INSERT INTO runs (run_id, cell, mu, key) VALUES (?, ?, ?, ?)", (run_id, cell, mu, key)
        )

    def answer(self, run_id: str, t: int) -> Answer | None:
        row = self._database.execute(
            "SELECT query, reply FROM answers WHERE run_id = ? AND t = ?", (run_id, t)
        ).fetchone()
        return None if row is None else Answer(*row)

    def record(self, run_id: str, t: int, answer: Answer, state: bytes) -> None:
        """Note a reply and the state after it."""
        self._database.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (run_id, t, *answer))
        self._database.execute("UPDATE runs SET state = ? WHERE run_id = ?", (state, run_id))

    def wipe_key(self, run_id: str) -> None:
        """Forget the noise key of a run whose last round is answered; repeats are served from the replies."""
        self._database.execute("PRAGMA secure_delete = ON")
        self._database.execute("UPDATE runs SET key = NULL WHERE run_id = ?", (run_id,))
