"""Ledger of a silo: SQLite file of runs, query digests and replies, written before a reply leaves.

* A commit is a transaction that opens or ends a run, or records a query or a reply.  Commits are numbered, and
  each has a head: a digest of the head before it, of its number and of the entries that it adds.
* The rollback mark is a separate file that names the ledger's last commit, and so reveals an older copy.
* A checkpoint, which a server remembers, names a ledger, and the number of one of its commits with a reply.  Its
  head is the one that this commit would have with the reply as its only entry.
* A run has a secret key, and a state that continues from round to round.  Both are erased when the run ends, and a
  digest of the key, its seal, stays.
* The journal is the file in which SQLite keeps old pages, to undo a transaction that does not finish.

Guarantee: a reply exists outside the silo only if its row was committed to the disk before (synchronous = FULL),
and records are read for a round only if its query was committed before.  So a restarted silo neither answers two
queries in one round nor draws other noise for an old query.  Values that the end of a run wipes are overwritten in
the file (secure_delete) and in SQLite's journal, where former states and replies can lie until then.

Guarantee: rows that differ from those that were written, but for missing replies, are refused by these checks.
All rows reproduce the chain of commits, whose head is in the mark, when a ledger or a run is opened.  Between
these checks, key, state and charge of the run that is asked, and a stored reply, are checked when they are read,
and digests of queries and charges of other runs are not.  After the last run has ended and `tidy` has succeeded,
and until the next commit, the file has the bytes whose digest is in the mark.  An older copy of the file, or
another file, is refused by the mark.  If the mark is put back too, the copy is refused with the help of a server
that remembers a later commit (`check_checkpoints`).
"""

import errno
import fcntl
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fedpriv.core.errors import InputError, RunError, refuse, sanitize_line
from fedpriv.core.files import PRIVATE_MODE, acquire_lock, write_bytes
from fedpriv.core.random import system_key
from fedpriv.protocol.messages import Checkpoint, unpack_checkpoints
from fedpriv.silo import chain
from fedpriv.silo.admission import Charge
from fedpriv.silo.chain import Commit, MarkContent, RollbackMark
from fedpriv.silo.rows import (
    BACKUP_OFFSET,
    DROP_EARLIER_REPLY,
    KEPT_REPLIES,
    LEDGER_VERSION,
    MAX_ROOM,
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

_TRANSIENT_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL}
"""SQLite errors that are not caused by a damaged ledger."""
_PROBE_BYTES = 4096
"""Bytes that `check_disks` writes."""
_REMEDY = (
    "nothing is released.  Move it away, and `fedpriv silo restore POLICY FOLDER` puts a backup in its place; "
    "`fedpriv silo backup` makes one"
)


class LedgerError(RunError):
    """Failure of the disk, or lock of another process, at which nothing was released.

    The same query may be sent again.
    """


class LedgerRun(NamedTuple):
    """Run as an administrator sees it."""

    run_id: str
    cell: str
    """Scenario as JSON."""
    mu: float
    is_open: bool
    answered_count: int
    """Number of answered rounds, without round 0."""
    slack: float


class SiloLedger:
    """Ledger of one silo in one file, with any number of runs."""

    def __init__(self, path: Path, mark: Path | None = None, *, is_backup: bool = False) -> None:
        """Open a ledger, check all its rows, and remove leftovers of a killed process.

        While another process holds the lock, leftovers stay.

        Args:
            path: File of the ledger, which has to exist.
            mark: File of the rollback mark, by default beside the ledger with the suffix ".mark".
            is_backup: Whether the file is a backup, without keys, states and replies.

        Raises:
            InputError: If there is no usable ledger or mark, others have permissions on the ledger, or the ledger
                is of another version, damaged or an older copy.
        """
        # Expected version until that of the file is read, and no last commit until the mark is checked.
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
            self._journal_is_wiped = False  # A process that was killed may have left it unwiped.
            self._tidy_if_idle()
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{path}: cannot be used as a ledger: {sanitize_line(str(error), 100)}") from None

    def close(self) -> None:
        self._database.close()
        os.close(self._lock_file)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the ledger against other processes that use this lock.

        Raises:
            LedgerError: If another process holds the lock for ten seconds.
        """
        try:
            acquire_lock(self._lock_file)
        except OSError:
            raise LedgerError("another process has the silo's ledger, so nothing is released") from None
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all changes of the block to the disk, or none of them if the block raises.

        The mark then names the new commit.  A block that changes no row makes no commit.  The caller holds `lock`.

        Raises:
            LedgerError: If the disk or SQLite refuses.  After a failure that follows the commit, the changes are
                in the ledger all the same.
            InputError: If the ledger is damaged, or the mark cannot be read or contradicts it.
        """
        try:
            self._check_file_digest()
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._pending_entries, self._last_commit = [], (before := self._check_mark())
                changes = self._database.total_changes
                yield
                after = self._next_commit
                # A block that changed no row makes no commit.
                if changed := self._database.total_changes != changes:
                    self._database.execute("UPDATE about SET commits = ?, head = ?", after)
                    # The mark names both commits, so that it agrees with the file wherever a crash falls.
                    self._mark.write(MarkContent(self._ledger_name, before, after))
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # SQLite itself has rolled back when a disk is full.
                    self._database.execute("ROLLBACK")
                raise
            finally:
                self._pending_entries = []
            if changed:
                self._mark.write(MarkContent(self._ledger_name, after, after))
            # The journal may have keys and states that the block erased.
            if not self._journal_is_wiped:
                self._wipe()
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"the silo's ledger could not be written, so nothing is released: {error}") from None

    def check_disks(self, size: int = 0) -> None:
        """Check that the disks of ledger and mark can be written, by a small file that is removed again.

        Args:
            size: Bytes that have to be free on the ledger's disk.

        Raises:
            LedgerError: If a disk refuses, or the ledger's has less free.
        """
        for path, needed in ((self._path, size), (self._mark.path, 0)):
            try:
                write_bytes(probe := path.with_name(path.name + ".probe"), bytes(_PROBE_BYTES), PRIVATE_MODE)
                probe.unlink()
                refuse({os.strerror(errno.ENOSPC): shutil.disk_usage(path.parent).free < needed}, OSError)
            except OSError as error:
                raise LedgerError(
                    f"the silo's disk of {path.name} cannot be written, so nothing is released: "
                    f"{error.strerror or error}"
                ) from None

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the ledger's records, or their digest in a ledger of fedpriv 0.3.0."""
        return self._read_header().fingerprint

    def is_keyed(self) -> bool:
        """Whether the fingerprint is computed under a key, unlike those of fedpriv 0.3.0."""
        self._check_version()
        return self._version % BACKUP_OFFSET != UNKEYED_VERSION

    def bind_records(
        self, fingerprint: bytes, key: bytes, new_mus: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Replace the fingerprint of the records by one under this key.

        The call is the first one in a block of `transaction`.

        Guarantee: nothing of the former fingerprint, and of values that were computed from it, is left in the
        file.

        Args:
            fingerprint: Fingerprint of the records under `key`.
            key: Key of the fingerprint.
            new_mus: By run, a μ that replaces the charged one.

        Raises:
            InputError: If the ledger is damaged.
        """
        self.check_all_rows()
        self._last_commit = self._last_commit._replace(head=bind_rows(self._database, fingerprint, key, new_mus))
        self._version += LEDGER_VERSION - self._version % BACKUP_OFFSET
        self._database.execute(f"PRAGMA user_version = {self._version}")
        self._ledger_name, self._journal_is_wiped = self._read_header().ledger_name, False

    def charges(self, except_run: str = "") -> list[Charge]:
        """Return the charges of all runs but `except_run`."""
        return [
            Charge(*row)
            for row in self._database.execute("SELECT cell, mu, slack FROM runs WHERE run_id != ?", (except_run,))
        ]

    def count_open_runs(self) -> int:
        """Return the number of runs that are not over."""
        return int(self._database.execute("SELECT COUNT(*) FROM runs WHERE over IS NULL").fetchone()[0])

    def list_runs(self) -> list[LedgerRun]:
        """List all runs in the order in which they were opened."""
        return [
            LedgerRun(run_id, cell, mu, bool(is_open), answered_count, slack)
            for run_id, cell, mu, is_open, answered_count, slack in self._database.execute(
                "SELECT run_id, cell, mu, over IS NULL, (SELECT COUNT(*) FROM answers WHERE t > 0 "
                "AND answered IS NOT NULL AND answers.run_id = runs.run_id), slack FROM runs ORDER BY opened"
            )
        ]

    def find_run(self, run_id: str) -> RunRow | None:
        """Return the row of a run, or None if the ledger has no such run.

        Raises:
            InputError: If values of the row contradict their digests.
        """
        columns = self._database.execute(
            "SELECT cell, mu, key, state, slack, seal, entry FROM runs WHERE run_id = ?", (run_id,)
        ).fetchone()
        if columns is None:
            return None
        *row, seal, entry = columns
        run = RunRow(*row)
        # `require` raises ValueError, which becomes an InputError.
        with self._convert_damage(f"the run {run_id!r}"):
            require(chain.opening_entry(run_id, run.cell, run.mu, run.slack, seal).digest == entry)
            if run.key is not None:
                require(chain.is_seal_of(seal, run.key))
                require(chain.digest_state(run.key, run.state) == last_state_digest(self._database, run_id))
        return run

    def open_run(self, run_id: str, charge: Charge, key: bytes) -> None:
        """Store a new run with its charge and its key, in a block of `transaction`."""
        seal = chain.make_seal(key)
        self._pending_entries.append(entry := chain.opening_entry(run_id, *charge, seal))
        self._database.execute(
            "INSERT INTO runs (run_id, cell, mu, slack, opened, seal, entry, key) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (run_id, *charge, self._commit_number, seal, entry.digest, key),
        )

    def find_answer(self, run_id: str, t: int) -> AnswerRow | None:
        """Return the row of a round, or None if no query of the round is stored.

        The row's reply is None before the round is answered, and again after the reply was dropped.

        Raises:
            InputError: If the stored reply contradicts its digest.
        """
        row = self._database.execute(
            "SELECT query, reply, answered, blind, replied FROM answers WHERE run_id = ? AND t = ?", (run_id, t)
        ).fetchone()
        if row is None:
            return None
        query, reply, answer_commit, blind, reply_digest = row
        if reply is not None:
            with self._convert_damage(f"round {t} of the run {run_id!r}"):
                require(chain.digest_reply(blind, reply) == reply_digest)
        return AnswerRow(query, reply, answer_commit is not None)

    def record_query(self, run_id: str, t: int, query: bytes, room: int = 0) -> None:
        """Store the digest of round t's query, in a block of `transaction`.

        Args:
            run_id: Name of an open run.
            t: Round, or 0 for the public key.
            query: Digest of the query.
            room: Bytes that the run adds to the ledger, for the query before its first reply, or 0.  They are set
                aside now, so that the file does not grow later, up to `MAX_ROOM` free bytes in all.
        """
        # SQLite keeps the pages of a value that was erased, and fills them before the file grows.  Pages that are
        # free already may have been set aside for another run.
        free = "(SELECT freelist_count * page_size FROM pragma_freelist_count, pragma_page_size)"
        for state in (f"zeroblob(min({room} + {free}, {MAX_ROOM}))", "NULL") if room else ():
            self._database.execute(f"UPDATE runs SET state = {state} WHERE run_id = ?", (run_id,))
        self._database.execute(
            "INSERT INTO answers (run_id, t, query, asked) VALUES (?, ?, ?, ?)",
            (run_id, t, query, self._commit_number),
        )
        self._pending_entries.append(chain.query_entry(run_id, t, query))

    def record_reply(self, run_id: str, t: int, reply: bytes, state: bytes | None) -> None:
        """Store the reply to a stored query, and the state after it, in a block of `transaction`.

        Of the replies to rounds of this run the last `KEPT_REPLIES` are kept, and the one before them is dropped.

        Args:
            run_id: Name of an open run.
            t: Round, or 0 for the public key.
            reply: Bytes of the reply.
            state: Packed state after the round, or None after the last one.

        Raises:
            RunError: If the round has a reply already, or no stored query.
        """
        (key,) = self._database.execute("SELECT key FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        # The blind is the key of the reply's digest.
        blind, state_digest = chain.derive_blind(key, t), chain.digest_state(key, state)
        reply_digest = chain.digest_reply(blind, reply)
        entry = chain.reply_entry(run_id, t, reply_digest, state_digest)
        # Head for the round's checkpoint, of a commit with this entry alone.
        head = chain.next_head(self._last_commit.head, self._commit_number, [entry])
        cursor = self._database.execute(
            "UPDATE answers SET answered = ?, replied = ?, after = ?, head = ?, blind = ?, reply = ? "
            "WHERE run_id = ? AND t = ? AND answered IS NULL",
            (self._commit_number, reply_digest, state_digest, head, blind, reply, run_id, t),
        )
        if cursor.rowcount != 1:
            raise RunError(f"round {t} has a reply already, or no stored query")
        self._database.execute(DROP_EARLIER_REPLY, (run_id, run_id, KEPT_REPLIES))
        if state is not None:
            self._database.execute("UPDATE runs SET state = ? WHERE run_id = ?", (state, run_id))
        self._pending_entries.append(entry)

    def end_run(self, run_id: str) -> None:
        """End a run: erase its key and its state.  Without an open run of this name nothing is changed."""
        self._journal_is_wiped = False  # The journal gets the pages from before, with the key.
        if self._database.execute(
            "UPDATE runs SET key = NULL, state = NULL, over = ? WHERE run_id = ? AND over IS NULL",
            (self._commit_number, run_id),
        ).rowcount:
            self._pending_entries.append(chain.ending_entry(run_id))

    def become_ledger(self, name: str, charge: tuple[str, Charge] | None) -> None:
        """Turn a copy into a ledger of this name, in which all runs are over, in a block of `transaction`.

        The copy is a whole one, or a backup: a copy without keys, states and replies, whose version is that of a
        ledger plus an offset.

        Args:
            name: Name of the ledger.
            charge: Name and charge of a run that stands for releases which the copy may lack, or None.
        """
        for row in self.list_runs():
            self.end_run(row.run_id)
        if charge is not None:
            self.open_run(*charge, system_key())
            self.end_run(charge[0])
        self._database.execute("UPDATE about SET name = ?", (name,))
        self._ledger_name, self._version = name, self._version % BACKUP_OFFSET
        self._database.execute(f"PRAGMA user_version = {self._version}")

    def copy_without_secrets(self) -> bytes:
        """Return the file of a copy without keys, states and replies.

        The caller holds `lock`.

        Raises:
            InputError: If the ledger is damaged, or its fingerprint of the records is not under a key.
        """
        self.check_all_rows()
        if not self.is_keyed():
            raise InputError(
                f"{self._path}: has a digest of the records, as fedpriv 0.3.0 wrote it, which no backup may have; "
                "`fedpriv silo status POLICY --check`, or a start of the guard, takes it out: then make the backup"
            )
        return copy_without_secrets(self._database)

    def checkpoint(self, run_id: str, t: int) -> Checkpoint:
        """Return the checkpoint after the reply to round t, which was answered, for its receiver to remember."""
        return Checkpoint(
            self._ledger_name,
            *self._database.execute(
                "SELECT answered, head FROM answers WHERE run_id = ? AND t = ?", (run_id, t)
            ).fetchone(),
        )

    def check_checkpoints(self, checkpoints: bytes) -> None:
        """Compare checkpoints, which a server remembers, with the commits of this ledger.

        Checkpoints of other ledgers are ignored.  A ledger that was converted from fedpriv 0.3.0 has another name
        and other heads than before.  Of checkpoints under its former name the numbers are compared.

        Guarantee: checkpoints of the server are compared and change nothing: no row, no mark, no other request.

        Args:
            checkpoints: Checkpoints in the bytes in which they are sent.

        Raises:
            RunError: If a checkpoint of this ledger names a commit that stored no reply, or has another head.
            ValueError: If the bytes are no checkpoints, or too many.
        """
        for claim in unpack_checkpoints(checkpoints):
            is_converted = chain.converted_name(claim.ledger_name) == self._ledger_name
            row = self._database.execute(
                "SELECT head FROM answers WHERE answered = ?",
                (min(claim.number, 2**63 - 1),),  # SQLite's largest
            ).fetchone()
            if (is_converted or claim.ledger_name == self._ledger_name) and (
                row is None or (row != (claim.head,) and not is_converted)
            ):
                raise RunError(
                    f"the coordinator has seen commit {claim.number} of this silo's ledger, which is not in it: "
                    "ledger and mark are an older copy that was put back, so nothing is released.  Put the newest "
                    "ledger back, or move it away for `fedpriv silo restore`"
                )

    def check_all_rows(self) -> None:
        """Check that all rows are the ones that were written, but for dropped replies.

        Within a block of `transaction` the call precedes all changes.

        Raises:
            InputError: If rows and chain do not agree, or the mark cannot be read or contradicts them.
        """
        with self._convert_damage("its file"):
            check_rows(self._database, keyless=self._version > BACKUP_OFFSET)
            self._check_mark()

    @property
    def _commit_number(self) -> int:
        """Number of the commit of the current transaction."""
        return self._last_commit.number + 1

    @property
    def _next_commit(self) -> Commit:
        """Commit of the current transaction, or the last commit if the transaction has no entries."""
        if not self._pending_entries:
            return self._last_commit
        return Commit(
            self._commit_number,
            chain.next_head(self._last_commit.head, self._commit_number, self._pending_entries),
        )

    def _check_version(self) -> None:
        """Check the version of the file (PRAGMA user_version), and store it in `_version`.

        The version of a backup is that of a ledger plus `BACKUP_OFFSET`.  Before the call `_version` says which of
        the two the file has to be.

        Raises:
            InputError: If the file has another version, is a backup in place of a ledger or the reverse, or
                is damaged.
        """
        with self._convert_damage("its header"):
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version - BACKUP_OFFSET * (self._version > BACKUP_OFFSET) not in (UNKEYED_VERSION, LEDGER_VERSION):
            fault = (
                "is a backup"
                if version - BACKUP_OFFSET in (UNKEYED_VERSION, LEDGER_VERSION)
                else f"has version {version}, and this fedpriv knows {LEDGER_VERSION}"
            )
            raise InputError(f"{self._path}: cannot be used as a ledger: it {fault}, or it is damaged; {_REMEDY}")
        self._version = version

    def _check_file(self) -> None:
        """Check all rows and the file's digest, again if that fails and another process wrote meanwhile.

        Raises:
            InputError: If the file is damaged, an older copy or not readable by SQLite, the mark cannot be read,
                or other processes write all the time.
        """
        for _ in range(20):
            content = self._mark.read()
            try:
                # In a transaction, so that rows do not change between the checks.
                self._database.execute("BEGIN")
                try:
                    self.check_all_rows()
                finally:
                    self._database.execute("COMMIT")
                self._check_file_digest()
                return
            except (InputError, sqlite3.Error) as error:
                if self._mark.read() == content:  # No other process wrote, so the error is the file's.
                    if isinstance(error, InputError):
                        raise
                    raise self._damage_error("its file", error) from None
                time.sleep(0.05)
        raise InputError(f"{self._path}: another process writes to this ledger all the time; try again")

    def _check_file_digest(self) -> None:
        """Compare the whole file with the digest in the mark, if the mark has one (`tidy`).

        The call has to be outside of transactions, because reading the file drops SQLite's locks.

        Raises:
            InputError: If they differ, the header is damaged, or the mark cannot be read.
        """
        # Reading the header makes SQLite apply a journal that it still needs, before the file is digested.
        if (digest := self._mark.read().file_digest) and self._read_header() and digest != file_digest(self._path):
            raise self._damage_error("its file", None)

    @contextmanager
    def _convert_damage(self, part: str) -> Iterator[None]:
        """Turn errors of the block, such as damaged rows cause, into an InputError of one line.

        An InputError passes unchanged, and so does an SQLite error that no damage causes, such as a full disk.

        Args:
            part: Part of the ledger that the block reads, for the message.
        """
        try:
            yield
        except Exception as error:
            # The low byte of SQLite's code is the kind of its error.  Exceptions of other modules get 0.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if isinstance(error, InputError) or code in _TRANSIENT_CODES:
                raise
            raise self._damage_error(part, error) from None

    def _damage_error(self, part: str, error: Exception | None) -> InputError:
        return InputError(
            f"{self._path}: cannot be used as a ledger: {part} is not what was written"
            + (f" ({sanitize_line(str(error), 100)})" if isinstance(error, sqlite3.Error) else "")
            + f", so {_REMEDY}"
        )

    def _tidy_if_idle(self) -> None:
        """Wipe the journal and drop replies that a killed process left, unless another one holds the lock."""
        with suppress(BlockingIOError):
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._read_header()  # Reading makes SQLite apply a journal that it still needs.
                self._wipe()
                self.tidy()
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def tidy(self) -> None:
        """Drop replies that are not needed any more, and store the file's digest once no run is under way.

        Not needed are replies of runs that are over, except to round 0 and to the last answered round of the few
        runs that ended last.  The caller holds `lock`, outside of transactions.  An error of SQLite or of the disk
        ends the call without an exception.

        Guarantee: commits stay as they are, and dropped replies are overwritten, after an error by a later call.

        Raises:
            InputError: If the mark cannot be read or contradicts the ledger, or the ledger's header is damaged.
        """
        with suppress(OSError, sqlite3.Error):
            while drop_replies(self._database):
                self._journal_is_wiped = False
            # With a digest in the mark nothing was committed since; with an open run the file goes on changing.
            if self._mark.read().file_digest or self.count_open_runs():
                if not self._journal_is_wiped:
                    self._wipe()
                return
            # The file is built anew, without the pages that dropped replies left free.
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
        """Return the last commit of the ledger, if the mark agrees.

        The mark names the ledger's last commit, or the one before and a pending commit: one that was about to be
        made when the mark was written.

        Raises:
            InputError: If the mark cannot be read, has other commits or belongs to another ledger, or the
                ledger's header is damaged.
            sqlite3.Error: If the ledger's file is gone or cannot be read.
        """
        mark, header = self._mark.read(), self._read_header()
        # The conversion of a ledger of fedpriv 0.3.0 changes its name.  A crash before its commit leaves the new
        # name in the mark, and the former one in the file.
        self._ledger_name = header.ledger_name
        if (
            mark.ledger_name not in (header.ledger_name, chain.converted_name(header.ledger_name))
            or not self._path.exists()
        ):
            raise InputError(f"{self._path}: is not the ledger that {self._mark.path} belongs to")
        if header.commit not in (mark.last_commit, mark.pending_commit):
            raise InputError(
                f"{self._path}: has had {header.commit.number} commits, and its mark has seen "
                f"{mark.last_commit.number}: one of them is an older copy that was put back.  "
                + (
                    "The mark knows nothing of the newer commits, so nothing more is released: put the newest "
                    "mark back"
                    if header.commit.number > mark.last_commit.number
                    else "What was released since is not on file, so nothing more is released: put the newest "
                    "ledger back"
                )
                + ", or move this one away for `fedpriv silo restore`"
            )
        return header.commit
