"""Ledger of a silo: its own record of what it has released, in SQLite, written before a reply leaves.

Its tables are in fedpriv/silo/rows.py.

Guarantee: a reply exists outside the silo only if its row was committed to the disk before (synchronous = FULL),
and records are read for a round only if its query was, so that a restarted silo neither uses a record for two
queries nor draws other noise for an old one.  What is wiped is overwritten in the file (secure_delete), and
in SQLite's journal, which is one file for good: unlinked, its blocks would keep keys and sums on the disk.

Guarantee: nothing is charged or answered on rows that are not those that were written.  All rows give the chain of
commits again (fedpriv/silo/chain.py), whose head the mark has (fedpriv/silo/chain.py): when a ledger is opened and
before a run is; and each row that an answer rests on is checked when it is read.  While no run is under way the
file has the bytes that the mark has a digest of.  An older copy of the file, or another one, is refused by the
mark; with the mark put back too, by a server that remembers a later commit (`check_seen`).
"""

import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fedpriv.core.errors import InputError, RunError, printable
from fedpriv.core.random import system_key
from fedpriv.protocol.messages import Told, commits_in
from fedpriv.silo import chain
from fedpriv.silo.admission import Charge
from fedpriv.silo.chain import Commit, Mark, Reading
from fedpriv.silo.rows import (
    BACKUP,
    LEDGER,
    UNKEYED,
    About,
    AnswerRow,
    Run,
    about_of,
    bind_rows,
    check_rows,
    confirm,
    connected,
    digest_of,
    drop_replies,
    last_state,
    wipe_journal,
    without_secrets,
)

_SECONDS = 10.0
"""To wait for another process that has the ledger."""
_PASSING = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL}
"""What is not the ledger's fault."""
_REMEDY = (
    "nothing is released.  Move it away, and `fedpriv silo restore POLICY FOLDER` puts a backup in its place; "
    "`fedpriv silo backup` makes one"
)


class LedgerError(RunError):
    """The disk refuses; nothing was released, and the same question may be asked again."""


class Row(NamedTuple):
    """A run as an administrator sees it."""

    run_id: str
    cell: str
    mu: float
    underway: bool
    answered: int
    slack: float


class SiloLedger:
    """One file, one silo, any number of runs."""

    def __init__(self, path: Path, mark: Path | None = None, *, backup: bool = False) -> None:
        """InputError if there is no ledger, if others may read it (it holds keys), or if it is an older copy.

        It is checked as a whole.  A `backup` is read as one.
        """
        self._path, self._mark = path, Mark(mark or path.with_name(path.name + ".mark"))
        self._version, self._entries, self._before = LEDGER + BACKUP * backup, list[chain.Entry](), Commit(0, b"")
        if not path.exists() or path.stat().st_size == 0:
            raise InputError(
                f"{path}: no ledger is there; `fedpriv silo init POLICY` begins one, once.  If there was one, it "
                "knew what has been released, and a new one would release it again"
            )
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise InputError(f"{path}: others can read this ledger, which holds noise keys; chmod 600 it")
        try:
            with self._damage("its file"):
                self._database = connected(path)
            self._lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
            self._check_version()
            self._check_opened()
            self._wiped = False  # by a process that was killed: nobody knows
            self._tidy_if_idle()
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{path}: cannot be used as a ledger: {printable(str(error), 100)}") from None

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
            self._check_bytes()
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._entries, self._before = [], (before := self._check_age())
                changes = self._database.total_changes
                yield
                after = self._after
                if changed := self._database.total_changes != changes:
                    self._database.execute("UPDATE about SET commits = ?, head = ?", after)
                    self._mark.write(Reading(self._name, before, after))
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # SQLite itself has rolled back when a disk is full
                    self._database.execute("ROLLBACK")
                raise
            finally:
                self._entries = []
            if changed:
                self._mark.write(Reading(self._name, after, after))
            if not self._wiped:
                self._wipe()
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"the silo's ledger could not be written, so nothing is released: {error}") from None

    @property
    def shard(self) -> bytes:
        """The fingerprint of the records that it is for."""
        return self._about().shard

    def is_keyed(self) -> bool:
        """Whether that fingerprint is under a key: not in a ledger of fedpriv 0.3.0."""
        self._check_version()
        return self._version % BACKUP != UNKEYED

    def bind(self, shard: bytes, key: bytes, prices: Mapping[str, float] = MappingProxyType({})) -> None:
        """Put a fingerprint under this key in the place of the one before; for `transaction`, before all else.

        `prices` are μ for some of its runs, in the place of what they were charged.

        Guarantee: of the one before, and of what was made from it, nothing is left in the file (`bind_rows`).
        """
        self.check()
        self._before = self._before._replace(head=bind_rows(self._database, shard, key, prices))
        self._version += LEDGER - self._version % BACKUP
        self._database.execute(f"PRAGMA user_version = {self._version}")
        self._name, self._wiped = self._about().name, False

    def charges(self, other_than: str = "") -> list[Charge]:
        """What every run was charged, except that of one name."""
        return [
            Charge(*row)
            for row in self._database.execute("SELECT cell, mu, slack FROM runs WHERE run_id != ?", (other_than,))
        ]

    def open_runs(self) -> int:
        """How many runs are not over."""
        return int(self._database.execute("SELECT COUNT(*) FROM runs WHERE over IS NULL").fetchone()[0])

    def overview(self) -> list[Row]:
        """Every run, the first that was opened first."""
        return [
            Row(run_id, cell, mu, bool(underway), answered, slack)
            for run_id, cell, mu, underway, answered, slack in self._database.execute(
                "SELECT run_id, cell, mu, over IS NULL, (SELECT COUNT(*) FROM answers WHERE t > 0 "
                "AND answered IS NOT NULL AND answers.run_id = runs.run_id), slack FROM runs ORDER BY opened"
            )
        ]

    def run(self, run_id: str) -> Run | None:
        """InputError for a row that is not the one that was written."""
        found = self._database.execute(
            "SELECT cell, mu, key, state, slack, seal, entry FROM runs WHERE run_id = ?", (run_id,)
        ).fetchone()
        if found is None:
            return None
        *row, seal, entry = found
        run = Run(*row)
        with self._damage(f"the run {run_id!r}"):
            confirm(chain.opened(run_id, run.cell, run.mu, run.slack, seal).digest == entry)
            if run.key is not None:
                confirm(chain.is_seal_of(seal, run.key))
                confirm(chain.after(run.key, run.state) == last_state(self._database, run_id))
        return run

    def open_run(self, run_id: str, charge: Charge, key: bytes) -> None:
        seal = chain.seal_of(key)
        entry = chain.opened(run_id, *charge, seal)
        self._database.execute(
            "INSERT INTO runs (run_id, cell, mu, slack, opened, seal, entry, key) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (run_id, *charge, self._number, seal, entry.digest, key),
        )
        self._entries.append(entry)

    def answer(self, run_id: str, t: int) -> AnswerRow | None:
        """InputError for a reply that is not the one that was written."""
        found = self._database.execute(
            "SELECT query, reply, answered, blind, replied FROM answers WHERE run_id = ? AND t = ?", (run_id, t)
        ).fetchone()
        if found is None:
            return None
        query, reply, answered, blind, replied = found
        if reply is not None:
            with self._damage(f"round {t} of the run {run_id!r}"):
                confirm(chain.replied(blind, reply) == replied)
        return AnswerRow(query, reply, answered is not None)

    def intend(self, run_id: str, t: int, query: bytes) -> None:
        """Note the query that round t is answered for: no other one from now on."""
        self._database.execute(
            "INSERT INTO answers (run_id, t, query, asked) VALUES (?, ?, ?, ?)", (run_id, t, query, self._number)
        )
        self._entries.append(chain.asked(run_id, t, query))

    def record(self, run_id: str, t: int, reply: bytes, state: bytes | None) -> None:
        """Note the reply to a query that is on file, and the state after it, None if nobody will need one."""
        (key,) = self._database.execute("SELECT key FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        blind, after = chain.blind_of(key, t), chain.after(key, state)
        replied = chain.replied(blind, reply)
        entry = chain.answered(run_id, t, replied, after)
        head = chain.linked(self._before.head, self._number, [entry])
        done = self._database.execute(
            "UPDATE answers SET answered = ?, replied = ?, after = ?, head = ?, blind = ?, reply = ? "
            "WHERE run_id = ? AND t = ? AND answered IS NULL",
            (self._number, replied, after, head, blind, reply, run_id, t),
        )
        if done.rowcount != 1:
            raise RunError(f"round {t} has a reply already")
        if state is not None:
            self._database.execute("UPDATE runs SET state = ? WHERE run_id = ?", (state, run_id))
        self._entries.append(entry)

    def finish(self, run_id: str) -> None:
        """Forget the key and the state of a run that is over."""
        self._wiped = False
        done = self._database.execute(
            "UPDATE runs SET key = NULL, state = NULL, over = ? WHERE run_id = ? AND over IS NULL",
            (self._number, run_id),
        )
        if done.rowcount:
            self._entries.append(chain.over(run_id))

    def become_ledger(self, name: str, charge: tuple[str, Charge] | None) -> None:
        """Make a copy a ledger of this name: its runs are over, and a `charge` is for what it may lack."""
        for row in self.overview():
            self.finish(row.run_id)
        if charge is not None:
            self.open_run(*charge, system_key())
            self.finish(charge[0])
        self._database.execute("UPDATE about SET name = ?", (name,))
        self._name, self._version = name, self._version % BACKUP
        self._database.execute(f"PRAGMA user_version = {self._version}")

    def without_secrets(self) -> bytes:
        """The file of a copy without keys, states and replies; for `alone`.

        InputError for a ledger whose fingerprint of the records is under no key.
        """
        self.check()
        if not self.is_keyed():
            raise InputError(
                f"{self._path}: has a digest of the records, as fedpriv 0.3.0 wrote it, which no backup may have; "
                "`fedpriv silo status POLICY --check`, or a start of the guard, takes it out: then make the backup"
            )
        return without_secrets(self._database)

    def told(self, run_id: str, t: int) -> Told:
        """What whoever gets the reply to round t may remember: the commit that it is in."""
        row = self._database.execute(
            "SELECT answered, head FROM answers WHERE run_id = ? AND t = ?", (run_id, t)
        ).fetchone()
        return Told(self._name, *row)

    def check_seen(self, seen: bytes) -> None:
        """RunError if `seen` has a commit of this ledger that it has not made; ValueError for what is no commits.

        Guarantee: a claim is compared, and changes nothing: no row, no mark, no other request.  Of commits from
        before the ledger's conversion the numbers are compared, since their heads can not be given again.
        """
        for told in commits_in(seen):
            before = chain.converted(told.ledger) == self._name
            if told.ledger != self._name and not before:
                continue
            number = min(told.number, 2**63 - 1)  # SQLite's largest
            known = self._database.execute("SELECT head FROM answers WHERE answered = ?", (number,)).fetchone()
            if known is None or (known != (told.head,) and not before):
                raise RunError(
                    f"the coordinator has seen commit {told.number} of this silo's ledger, which is not in it: "
                    "ledger and mark are an older copy that was put back, so nothing is released.  Put the newest "
                    "ledger back, or move it away for `fedpriv silo restore`"
                )

    def check(self) -> None:
        """InputError unless all rows are the ones that were written; for `transaction`, before it writes."""
        with self._damage("its file"):
            check_rows(self._database, keyless=self._version > BACKUP)
            self._check_age()

    @property
    def _number(self) -> int:
        """Of the commit that is being made."""
        return self._before.number + 1

    @property
    def _after(self) -> Commit:
        """The last commit with what is being made."""
        if not self._entries:
            return self._before
        return Commit(self._number, chain.linked(self._before.head, self._number, self._entries))

    def _check_version(self) -> None:
        with self._damage("its header"):
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version - BACKUP * (self._version > BACKUP) not in (UNKEYED, LEDGER):
            known = f"has version {version}, and this fedpriv knows {LEDGER}"
            what = "is a backup" if version - BACKUP in (UNKEYED, LEDGER) else known
            raise InputError(f"{self._path}: cannot be used as a ledger: it {what}, or it is damaged; {_REMEDY}")
        self._version = version

    def _check_opened(self) -> None:
        """All of it, in one reading that no other process has written into."""
        for _ in range(20):
            before = self._mark.read()
            try:
                self._database.execute("BEGIN")
                try:
                    self.check()
                finally:
                    self._database.execute("COMMIT")
                self._check_bytes()
                return
            except (InputError, sqlite3.Error) as error:
                if self._mark.read() == before:
                    if isinstance(error, InputError):
                        raise
                    raise self._damaged("its file", error) from None
                time.sleep(0.05)
        raise InputError(f"{self._path}: another process writes to this ledger all the time; try again")

    def _check_bytes(self) -> None:
        """The whole file, while no run is under way; between transactions: it ends SQLite's locks."""
        if (whole := self._mark.read().whole) and self._about() and whole != digest_of(self._path):
            raise self._damaged("its file", None)

    @contextmanager
    def _damage(self, what: str) -> Iterator[None]:
        """InputError in one line for whatever damaged rows lead to."""
        try:
            yield
        except Exception as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if isinstance(error, InputError) or code in _PASSING:
                raise
            raise self._damaged(what, error) from None

    def _damaged(self, what: str, error: Exception | None) -> InputError:
        found = f" ({printable(str(error), 100)})" if isinstance(error, sqlite3.Error) else ""
        return InputError(
            f"{self._path}: cannot be used as a ledger: {what} is not what was written{found}, so {_REMEDY}"
        )

    def _tidy_if_idle(self) -> None:
        """Wipe and drop what another process has left, unless one is at work: then that one does."""
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._about()  # SQLite uses a journal that it needs when it reads
                self._wipe()
                self.tidy()
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def tidy(self) -> None:
        """Drop the replies that are not asked for again, and note the file's bytes once no run is under way.

        For `alone`, between transactions.  A full disk leaves this for another time.

        Guarantee: all commits stay as they are; what is dropped is overwritten.
        """
        with suppress(OSError, sqlite3.Error):
            while drop_replies(self._database):
                self._wiped = False
            if self._mark.read().whole or self.open_runs():
                if not self._wiped:
                    self._wipe()
                return
            self._database.execute("VACUUM")
            self._wipe()
            commit = self._check_age()
            self._mark.write(Reading(self._name, commit, commit, digest_of(self._path)))

    def _wipe(self) -> None:
        self._wiped = wipe_journal(self._path)

    def _about(self) -> About:
        with self._damage("its first row"):
            return about_of(self._database)

    def _check_age(self) -> Commit:
        """The last commit that the ledger has had; InputError if its mark has seen more, or is another's."""
        mark, about = self._mark.read(), self._about()
        self._name = about.name  # another process may have bound it
        if mark.ledger not in (about.name, chain.converted(about.name)) or not self._path.exists():
            raise InputError(f"{self._path}: is not the ledger that {self._mark.path} belongs to")
        if about.commit not in (mark.done, mark.begun):
            raise InputError(
                f"{self._path}: has had {about.commit.number} commits, and its mark has seen {mark.done.number}: "
                "one of them is an older copy that was put back.  What was released since is not on file, so "
                "nothing more is released: put the newest ledger back, or move this one away for `fedpriv silo "
                "restore`"
            )
        return about.commit
