"""Ledger of a silo: its own record of what it has released, in SQLite, written before a reply leaves.

    about    one row: the ledger's own name, how many commits it has had, the fingerprint of the records it is for
    runs     one row a run: its scenario, its price (μ, and the probability with which it may fail), its key and
             its state (both wiped when the run is over)
    answers  one row a round: a digest of the query, and the bytes of the reply; without a reply, what may have
             been looked at, and can be answered for that query only

Guarantee: a reply exists outside the silo only if its row was committed to the disk before (synchronous = FULL),
and records are read for a round only if its query was, so that a restarted silo neither uses a record for two
queries nor draws other noise for an old one.  What is wiped is overwritten in the file (secure_delete), and
in SQLite's journal, which is one file for good: unlinked, its blocks would keep keys and sums on the disk.
An older copy of the file, or another one, is refused by the mark beside it (fedpriv/silo/ledger.py).

The mark is a file of its own.  It has the ledger's name and two numbers: the commit that is on the disk for sure,
and the one that is being made.  It is written before and after each commit, and a reply leaves after that.
"""

import fcntl
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fedpriv.core.errors import InputError, RunError
from fedpriv.silo.admission import Charge

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


_TABLES = """
CREATE TABLE about (name TEXT NOT NULL, commits INTEGER NOT NULL, shard BLOB NOT NULL);
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    cell TEXT NOT NULL,
    mu REAL NOT NULL,
    key BLOB,
    state BLOB,
    slack REAL NOT NULL DEFAULT 0
);
CREATE TABLE answers (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    t INTEGER NOT NULL,
    query BLOB NOT NULL,
    reply BLOB,
    PRIMARY KEY (run_id, t)
);
"""
_HOT = bytes.fromhex("d9d505f920a163d7")
"""What a journal begins with that SQLite has not done with: of a commit that is being made, or was cut short."""
_SECONDS = 10.0
"""To wait for another process that has the ledger."""


class LedgerError(RunError):
    """The disk refuses; nothing was released, and the same question may be asked again."""


class Run(NamedTuple):
    """A run that was opened: its scenario as canonical JSON, its price, and its key and state while it lasts."""

    cell: str
    mu: float
    key: bytes | None
    state: bytes | None
    slack: float = 0.0


class AnswerRow(NamedTuple):
    """A round that was asked: the digest of its query, and the bytes that were replied, None until they are."""

    query: bytes
    reply: bytes | None


class Row(NamedTuple):
    """A run as an administrator sees it."""

    run_id: str
    cell: str
    mu: float
    underway: bool
    answered: int
    slack: float


def create_ledger(path: Path, mark: Path, shard: bytes) -> None:
    """A new ledger for the records with this fingerprint; InputError if there is one, or was."""
    for there in (path, mark):
        if there.exists():
            raise InputError(
                f"{there} exists: a ledger is begun once; what it says was released cannot be forgotten"
            )
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        database = _connected(path)
        name = secrets.token_hex(16)
        database.executescript(_TABLES)
        database.execute("INSERT INTO about VALUES (?, 0, ?)", (name, shard))
        database.close()
        Mark(mark).write(Reading(name, 0, 0))
    except (OSError, sqlite3.Error) as error:
        raise InputError(f"{path}: cannot be made a ledger: {error}") from None


class SiloLedger:
    """One file, one silo, any number of runs."""

    def __init__(self, path: Path, mark: Path | None = None) -> None:
        """InputError if there is no ledger, if others may read it (it holds keys), or if it is an older copy."""
        self._path, self._mark = path, Mark(mark or path.with_name(path.name + ".mark"))
        if not path.exists() or path.stat().st_size == 0:
            raise InputError(
                f"{path}: no ledger is there; `fedpriv silo init POLICY` begins one, once.  If there was one, it "
                "knew what has been released, and a new one would release it again"
            )
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise InputError(f"{path}: others can read this ledger, which holds noise keys; chmod 600 it")
        try:
            self._database = _connected(path)
            self._name, _, self.shard = self._about()
            self._lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        except (OSError, sqlite3.Error, TypeError) as error:
            raise InputError(f"{path}: cannot be used as a ledger: {error}") from None
        self._check_age()
        self._wiped = False  # by a process that was killed: nobody knows
        self._wipe_if_idle()

    def close(self) -> None:
        self._database.close()
        os.close(self._lock)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process writes to the ledger meanwhile; LedgerError if one does for too long."""
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise LedgerError("another process has the silo's ledger, so nothing is released") from None
                time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it on the disk and on the mark, or none; LedgerError if the disk refuses.  For `alone`."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                commits, written = self._check_age(), self._database.total_changes
                yield
                changed = self._database.total_changes > written
                if changed:
                    self._database.execute("UPDATE about SET commits = ?", (commits + 1,))
                    self._mark.write(Reading(self._name, commits, commits + 1))
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # SQLite itself has rolled back when a disk is full
                    self._database.execute("ROLLBACK")
                raise
            if changed:
                self._mark.write(Reading(self._name, commits + 1, commits + 1))
            if not self._wiped:
                self._wipe_journal()
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"the silo's ledger could not be written, so nothing is released: {error}") from None

    def prices(self) -> list[float]:
        """μ of every run ever opened."""
        return [mu for (mu,) in self._database.execute("SELECT mu FROM runs")]

    def charges(self, other_than: str = "") -> list[Charge]:
        """What every run was charged, except that of one name."""
        return [
            Charge(*row)
            for row in self._database.execute("SELECT cell, mu, slack FROM runs WHERE run_id != ?", (other_than,))
        ]

    def open_runs(self) -> int:
        """How many runs are not over."""
        return int(self._database.execute("SELECT COUNT(*) FROM runs WHERE key IS NOT NULL").fetchone()[0])

    def overview(self) -> list[Row]:
        """Every run, the first that was opened first."""
        return [
            Row(run_id, cell, mu, bool(underway), answered, slack)
            for run_id, cell, mu, underway, answered, slack in self._database.execute(
                "SELECT run_id, cell, mu, key IS NOT NULL, (SELECT COUNT(*) FROM answers WHERE t > 0 "
                "AND reply IS NOT NULL AND answers.run_id = runs.run_id), slack FROM runs ORDER BY rowid"
            )
        ]

    def run(self, run_id: str) -> Run | None:
        row = self._database.execute(
            "SELECT cell, mu, key, state, slack FROM runs WHERE run_id = ?", (run_id,)
        ).fetchone()
        return None if row is None else Run(*row)

    def open_run(self, run_id: str, charge: Charge, key: bytes) -> None:
        self._database.execute(
            "INSERT INTO runs (run_id, cell, mu, slack, key) VALUES (?, ?, ?, ?, ?)", (run_id, *charge, key)
        )

    def answer(self, run_id: str, t: int) -> AnswerRow | None:
        row = self._database.execute(
            "SELECT query, reply FROM answers WHERE run_id = ? AND t = ?", (run_id, t)
        ).fetchone()
        return None if row is None else AnswerRow(*row)

    def intend(self, run_id: str, t: int, query: bytes) -> None:
        """Note the query that round t is answered for: no other one from now on."""
        self._database.execute("INSERT INTO answers VALUES (?, ?, ?, NULL)", (run_id, t, query))

    def record(self, run_id: str, t: int, reply: bytes, state: bytes | None) -> None:
        """Note the reply to a query that is on file, and the state after it, None if nobody will need one."""
        done = self._database.execute(
            "UPDATE answers SET reply = ? WHERE run_id = ? AND t = ? AND reply IS NULL", (reply, run_id, t)
        )
        if done.rowcount != 1:
            raise RunError(f"round {t} has a reply already")
        if state is not None:
            self._database.execute("UPDATE runs SET state = ? WHERE run_id = ?", (state, run_id))

    def finish(self, run_id: str) -> None:
        """Forget the key and the state of a run that is over; repeats are served from the replies."""
        self._wiped = False
        self._database.execute("UPDATE runs SET key = NULL, state = NULL WHERE run_id = ?", (run_id,))

    def _wipe_if_idle(self) -> None:
        """Wipe what another process has left, unless one is at work: then that one does."""
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._about()  # SQLite uses a journal that it needs when it reads
                self._wipe_journal()
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _wipe_journal(self) -> None:
        """Overwrite the pages that the journal has of before the last commit; for `alone`, between transactions.

        Guarantee: a journal that SQLite still needs is left as it is.
        """
        journal = self._path.with_name(self._path.name + "-journal")
        if journal.exists():
            with journal.open("r+b") as file:
                if file.read(len(_HOT)) == _HOT:
                    return
                size = os.fstat(file.fileno()).st_size
                file.seek(0)
                file.write(bytes(size))
                file.flush()
                os.fsync(file.fileno())
        self._wiped = True

    def _about(self) -> tuple[str, int, bytes]:
        name, commits, shard = self._database.execute("SELECT name, commits, shard FROM about").fetchone()
        return name, commits, shard

    def _check_age(self) -> int:
        """How many commits the ledger has had; InputError if its mark has seen more, or is another's."""
        mark, (name, commits, _) = self._mark.read(), self._about()
        if mark.ledger != name or not self._path.exists():
            raise InputError(f"{self._path}: is not the ledger that {self._mark.path} belongs to")
        if commits not in (mark.done, mark.begun):
            raise InputError(
                f"{self._path}: has had {commits} commits, and its mark has seen {mark.done}: one of them is an "
                "older copy that was put back.  What was released since is not on file, so nothing more is "
                "released: put the newest ledger back, or begin a new one for other records"
            )
        return commits


def _connected(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    for setting in ("synchronous = FULL", "secure_delete = ON", "journal_mode = PERSIST"):
        database.execute(f"PRAGMA {setting}")
    return database
