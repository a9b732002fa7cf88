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

from fedpriv.core.errors import InputError, RunError, sanitize_line
from fedpriv.core.random import system_key
from fedpriv.protocol.messages import Checkpoint, unpack_checkpoints
from fedpriv.silo import chain
from fedpriv.silo.admission import Charge
from fedpriv.silo.chain import Commit, MarkContent, RollbackMark
from fedpriv.silo.rows import (
    BACKUP_OFFSET,
    LEDGER_VERSION,
    UNKEYED_VERSION,
    AnswerRow,
    LedgerHeader,
    RunRow,
    bind_rows,
    check_rows,
    connect_database,
    copy_without_secrets,
    drop_replies,
    file_digest,
    last_state_digest,
    read_header,
    require,
    wipe_journal,
)

_LOCK_SECONDS = 10.0
"""To wait for another process that has the ledger."""
_TRANSIENT_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL}
"""What is not the ledger's fault."""
_REMEDY = (
    "nothing is released.  Move it away, and `fedpriv silo restore POLICY FOLDER` puts a backup in its place; "
    "`fedpriv silo backup` makes one"
)


class LedgerError(RunError):
    """The disk refuses; nothing was released, and the same question may be asked again."""


class LedgerRun(NamedTuple):
    """A run as an administrator sees it."""

    run_id: str
    cell: str
    mu: float
    is_open: bool
    answered_count: int
    slack: float


class SiloLedger:
    """One file, one silo, any number of runs."""

    def __init__(self, path: Path, mark: Path | None = None, *, is_backup: bool = False) -> None:
        """InputError if there is no ledger, if others may read it (it holds keys), or if it is an older copy.

        It is checked as a whole.  A `backup` is read as one.
        """
        self._path, self._mark = path, RollbackMark(mark or path.with_name(path.name + ".mark"))
        self._version, self._pending_entries, self._last_commit = (
            LEDGER_VERSION + BACKUP_OFFSET * is_backup,
            list[chain.ChainEntry](),
            Commit(0, b""),
        )
        if not path.exists() or path.stat().st_size == 0:
            raise InputError(
                f"{path}: no ledger is there; `fedpriv silo init POLICY` begins one, once.  If there was one, it "
                "knew what has been released, and a new one would release it again"
            )
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise InputError(f"{path}: others can read this ledger, which holds noise keys; chmod 600 it")
        try:
            with self._convert_damage("its file"):
                self._database = connect_database(path)
            self._lock_file = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
            self._check_version()
            self._check_file()
            self._journal_is_wiped = False  # by a process that was killed: nobody knows
            self._tidy_if_idle()
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{path}: cannot be used as a ledger: {sanitize_line(str(error), 100)}") from None

    def close(self) -> None:
        self._database.close()
        os.close(self._lock_file)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """No other process writes to the ledger meanwhile; LedgerError if one does for too long."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise LedgerError("another process has the silo's ledger, so nothing is released") from None
                time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it on the disk and on the mark, or none; LedgerError if the disk refuses.  For `alone`."""
        try:
            self._check_file_digest()
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._pending_entries, self._last_commit = [], (before := self._check_mark())
                changes = self._database.total_changes
                yield
                after = self._next_commit
                if changed := self._database.total_changes != changes:
                    self._database.execute("UPDATE about SET commits = ?, head = ?", after)
                    self._mark.write(MarkContent(self._ledger_name, before, after))
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # SQLite itself has rolled back when a disk is full
                    self._database.execute("ROLLBACK")
                raise
            finally:
                self._pending_entries = []
            if changed:
                self._mark.write(MarkContent(self._ledger_name, after, after))
            if not self._journal_is_wiped:
                self._wipe()
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"the silo's ledger could not be written, so nothing is released: {error}") from None

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the records that it is for."""
        return self._read_header().fingerprint

    def is_keyed(self) -> bool:
        """Whether that fingerprint is under a key: not in a ledger of fedpriv 0.3.0."""
        self._check_version()
        return self._version % BACKUP_OFFSET != UNKEYED_VERSION

    def bind_records(
        self, fingerprint: bytes, key: bytes, new_mus: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Put a fingerprint under this key in the place of the one before; for `transaction`, before all else.

        `prices` are μ for some of its runs, in the place of what they were charged.

        Guarantee: of the one before, and of what was made from it, nothing is left in the file (`bind_rows`).
        """
        self.check_all_rows()
        self._last_commit = self._last_commit._replace(head=bind_rows(self._database, fingerprint, key, new_mus))
        self._version += LEDGER_VERSION - self._version % BACKUP_OFFSET
        self._database.execute(f"PRAGMA user_version = {self._version}")
        self._ledger_name, self._journal_is_wiped = self._read_header().ledger_name, False

    def charges(self, except_run: str = "") -> list[Charge]:
        """What every run was charged, except that of one name."""
        return [
            Charge(*row)
            for row in self._database.execute("SELECT cell, mu, slack FROM runs WHERE run_id != ?", (except_run,))
        ]

    def count_open_runs(self) -> int:
        """How many runs are not over."""
        return int(self._database.execute("SELECT COUNT(*) FROM runs WHERE over IS NULL").fetchone()[0])

    def list_runs(self) -> list[LedgerRun]:
        """Every run, the first that was opened first."""
        return [
            LedgerRun(run_id, cell, mu, bool(underway), answered, slack)
            for run_id, cell, mu, underway, answered, slack in self._database.execute(
                "SELECT run_id, cell, mu, over IS NULL, (SELECT COUNT(*) FROM answers WHERE t > 0 "
                "AND answered IS NOT NULL AND answers.run_id = runs.run_id), slack FROM runs ORDER BY opened"
            )
        ]

    def find_run(self, run_id: str) -> RunRow | None:
        """InputError for a row that is not the one that was written."""
        found = self._database.execute(
            "SELECT cell, mu, key, state, slack, seal, entry FROM runs WHERE run_id = ?", (run_id,)
        ).fetchone()
        if found is None:
            return None
        *row, seal, entry = found
        run = RunRow(*row)
        with self._convert_damage(f"the run {run_id!r}"):
            require(chain.opening_entry(run_id, run.cell, run.mu, run.slack, seal).digest == entry)
            if run.key is not None:
                require(chain.is_seal_of(seal, run.key))
                require(chain.digest_state(run.key, run.state) == last_state_digest(self._database, run_id))
        return run

    def open_run(self, run_id: str, charge: Charge, key: bytes) -> None:
        seal = chain.make_seal(key)
        entry = chain.opening_entry(run_id, *charge, seal)
        self._database.execute(
            "INSERT INTO runs (run_id, cell, mu, slack, opened, seal, entry, key) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (run_id, *charge, self._commit_number, seal, entry.digest, key),
        )
        self._pending_entries.append(entry)

    def find_answer(self, run_id: str, t: int) -> AnswerRow | None:
        """InputError for a reply that is not the one that was written."""
        found = self._database.execute(
            "SELECT query, reply, answered, blind, replied FROM answers WHERE run_id = ? AND t = ?", (run_id, t)
        ).fetchone()
        if found is None:
            return None
        query, reply, answered, blind, replied = found
        if reply is not None:
            with self._convert_damage(f"round {t} of the run {run_id!r}"):
                require(chain.digest_reply(blind, reply) == replied)
        return AnswerRow(query, reply, answered is not None)

    def record_query(self, run_id: str, t: int, query: bytes) -> None:
        """Note the query that round t is answered for: no other one from now on."""
        self._database.execute(
            "INSERT INTO answers (run_id, t, query, asked) VALUES (?, ?, ?, ?)",
            (run_id, t, query, self._commit_number),
        )
        self._pending_entries.append(chain.query_entry(run_id, t, query))

    def record_reply(self, run_id: str, t: int, reply: bytes, state: bytes | None) -> None:
        """Note the reply to a query that is on file, and the state after it, None if nobody will need one."""
        (key,) = self._database.execute("SELECT key FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        blind, after = chain.derive_blind(key, t), chain.digest_state(key, state)
        replied = chain.digest_reply(blind, reply)
        entry = chain.reply_entry(run_id, t, replied, after)
        head = chain.next_head(self._last_commit.head, self._commit_number, [entry])
        done = self._database.execute(
            "UPDATE answers SET answered = ?, replied = ?, after = ?, head = ?, blind = ?, reply = ? "
            "WHERE run_id = ? AND t = ? AND answered IS NULL",
            (self._commit_number, replied, after, head, blind, reply, run_id, t),
        )
        if done.rowcount != 1:
            raise RunError(f"round {t} has a reply already")
        if state is not None:
            self._database.execute("UPDATE runs SET state = ? WHERE run_id = ?", (state, run_id))
        self._pending_entries.append(entry)

    def end_run(self, run_id: str) -> None:
        """Forget the key and the state of a run that is over."""
        self._journal_is_wiped = False
        done = self._database.execute(
            "UPDATE runs SET key = NULL, state = NULL, over = ? WHERE run_id = ? AND over IS NULL",
            (self._commit_number, run_id),
        )
        if done.rowcount:
            self._pending_entries.append(chain.ending_entry(run_id))

    def become_ledger(self, name: str, charge: tuple[str, Charge] | None) -> None:
        """Make a copy a ledger of this name: its runs are over, and a `charge` is for what it may lack."""
        for row in self.list_runs():
            self.end_run(row.run_id)
        if charge is not None:
            self.open_run(*charge, system_key())
            self.end_run(charge[0])
        self._database.execute("UPDATE about SET name = ?", (name,))
        self._ledger_name, self._version = name, self._version % BACKUP_OFFSET
        self._database.execute(f"PRAGMA user_version = {self._version}")

    def copy_without_secrets(self) -> bytes:
        """The file of a copy without keys, states and replies; for `alone`.

        InputError for a ledger whose fingerprint of the records is under no key.
        """
        self.check_all_rows()
        if not self.is_keyed():
            raise InputError(
                f"{self._path}: has a digest of the records, as fedpriv 0.3.0 wrote it, which no backup may have; "
                "`fedpriv silo status POLICY --check`, or a start of the guard, takes it out: then make the backup"
            )
        return copy_without_secrets(self._database)

    def checkpoint(self, run_id: str, t: int) -> Checkpoint:
        """What whoever gets the reply to round t may remember: the commit that it is in."""
        row = self._database.execute(
            "SELECT answered, head FROM answers WHERE run_id = ? AND t = ?", (run_id, t)
        ).fetchone()
        return Checkpoint(self._ledger_name, *row)

    def check_checkpoints(self, checkpoints: bytes) -> None:
        """RunError if `seen` has a commit of this ledger that it has not made; ValueError for what is no commits.

        Guarantee: a claim is compared, and changes nothing: no row, no mark, no other request.  Of commits from
        before the ledger's conversion the numbers are compared, since their heads can not be given again.
        """
        for told in unpack_checkpoints(checkpoints):
            before = chain.converted_name(told.ledger_name) == self._ledger_name
            if told.ledger_name != self._ledger_name and not before:
                continue
            number = min(told.number, 2**63 - 1)  # SQLite's largest
            known = self._database.execute("SELECT head FROM answers WHERE answered = ?", (number,)).fetchone()
            if known is None or (known != (told.head,) and not before):
                raise RunError(
                    f"the coordinator has seen commit {told.number} of this silo's ledger, which is not in it: "
                    "ledger and mark are an older copy that was put back, so nothing is released.  Put the newest "
                    "ledger back, or move it away for `fedpriv silo restore`"
                )

    def check_all_rows(self) -> None:
        """InputError unless all rows are the ones that were written; for `transaction`, before it writes."""
        with self._convert_damage("its file"):
            check_rows(self._database, keyless=self._version > BACKUP_OFFSET)
            self._check_mark()

    @property
    def _commit_number(self) -> int:
        """Of the commit that is being made."""
        return self._last_commit.number + 1

    @property
    def _next_commit(self) -> Commit:
        """The last commit with what is being made."""
        if not self._pending_entries:
            return self._last_commit
        return Commit(
            self._commit_number,
            chain.next_head(self._last_commit.head, self._commit_number, self._pending_entries),
        )

    def _check_version(self) -> None:
        with self._convert_damage("its header"):
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version - BACKUP_OFFSET * (self._version > BACKUP_OFFSET) not in (UNKEYED_VERSION, LEDGER_VERSION):
            known = f"has version {version}, and this fedpriv knows {LEDGER_VERSION}"
            what = "is a backup" if version - BACKUP_OFFSET in (UNKEYED_VERSION, LEDGER_VERSION) else known
            raise InputError(f"{self._path}: cannot be used as a ledger: it {what}, or it is damaged; {_REMEDY}")
        self._version = version

    def _check_file(self) -> None:
        """All of it, in one reading that no other process has written into."""
        for _ in range(20):
            before = self._mark.read()
            try:
                self._database.execute("BEGIN")
                try:
                    self.check_all_rows()
                finally:
                    self._database.execute("COMMIT")
                self._check_file_digest()
                return
            except (InputError, sqlite3.Error) as error:
                if self._mark.read() == before:
                    if isinstance(error, InputError):
                        raise
                    raise self._damage_error("its file", error) from None
                time.sleep(0.05)
        raise InputError(f"{self._path}: another process writes to this ledger all the time; try again")

    def _check_file_digest(self) -> None:
        """The whole file, while no run is under way; between transactions: it ends SQLite's locks."""
        if (whole := self._mark.read().file_digest) and self._read_header() and whole != file_digest(self._path):
            raise self._damage_error("its file", None)

    @contextmanager
    def _convert_damage(self, what: str) -> Iterator[None]:
        """InputError in one line for whatever damaged rows lead to."""
        try:
            yield
        except Exception as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if isinstance(error, InputError) or code in _TRANSIENT_CODES:
                raise
            raise self._damage_error(what, error) from None

    def _damage_error(self, what: str, error: Exception | None) -> InputError:
        found = f" ({sanitize_line(str(error), 100)})" if isinstance(error, sqlite3.Error) else ""
        return InputError(
            f"{self._path}: cannot be used as a ledger: {what} is not what was written{found}, so {_REMEDY}"
        )

    def _tidy_if_idle(self) -> None:
        """Wipe and drop what another process has left, unless one is at work: then that one does."""
        with suppress(BlockingIOError):
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._read_header()  # SQLite uses a journal that it needs when it reads
                self._wipe()
                self.tidy()
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def tidy(self) -> None:
        """Drop the replies that are not asked for again, and note the file's bytes once no run is under way.

        For `alone`, between transactions.  A full disk leaves this for another time.

        Guarantee: all commits stay as they are; what is dropped is overwritten.
        """
        with suppress(OSError, sqlite3.Error):
            while drop_replies(self._database):
                self._journal_is_wiped = False
            if self._mark.read().file_digest or self.count_open_runs():
                if not self._journal_is_wiped:
                    self._wipe()
                return
            self._database.execute("VACUUM")
            self._wipe()
            commit = self._check_mark()
            self._mark.write(MarkContent(self._ledger_name, commit, commit, file_digest(self._path)))

    def _wipe(self) -> None:
        self._journal_is_wiped = wipe_journal(self._path)

    def _read_header(self) -> LedgerHeader:
        with self._convert_damage("its first row"):
            return read_header(self._database)

    def _check_mark(self) -> Commit:
        """The last commit that the ledger has had; InputError if its mark has seen more, or is another's."""
        mark, about = self._mark.read(), self._read_header()
        self._ledger_name = about.ledger_name  # another process may have bound it
        if (
            mark.ledger_name not in (about.ledger_name, chain.converted_name(about.ledger_name))
            or not self._path.exists()
        ):
            raise InputError(f"{self._path}: is not the ledger that {self._mark.path} belongs to")
        if about.commit not in (mark.last_commit, mark.pending_commit):
            raise InputError(
                f"{self._path}: has had {about.commit.number} commits, and its mark has seen "
                f"{mark.last_commit.number}: "
                "one of them is an older copy that was put back.  What was released since is not on file, so "
                "nothing more is released: put the newest ledger back, or move this one away for `fedpriv silo "
                "restore`"
            )
        return about.commit
