"""SQLite file of a ledger: its tables, the check of all rows, and the wiping of values.

* `about` has one row: the names of the ledger, now and at first; the fingerprint of the records, under a key that
  lies beside the records (without a key in a ledger of fedpriv 0.3.0); the number of commits and the last head.
* `runs` has one row a run: its scenario; its price, μ and the probability with which it may fail; the commits that
  opened and ended the run; its key and its state, both wiped when the run is over.
* `answers` has a row for each round of which a query was stored: a digest of the query, the bytes of the reply,
  and the commits that stored them (`asked`, `answered`).  Round 0 has no query, and the silo's public key with a
  signature as its reply.

A commit is a transaction that adds entries (a run opened or ended, a query or a reply recorded).  The head after a
commit is a digest of the head before it, of the commit's number and of its entries, and the chain is the sequence
of heads.  The first head is a digest of the ledger's first name and of the fingerprint.  A backup is a copy of a
ledger without keys, states and replies.

`seal`, `entry`, `replied` and `after` are digests of the key, of the opened run with its charge, of the reply
under the key `blind`, and of the state after the reply.  `head` is the head that the reply's commit would have
with the reply as its only entry.
"""

import hashlib
import os
import sqlite3
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fedpriv.silo import chain
from fedpriv.silo.chain import Commit

_TABLES = (
    """CREATE TABLE about (
    name TEXT NOT NULL, begun_as TEXT NOT NULL, shard BLOB NOT NULL, commits INTEGER NOT NULL, head BLOB NOT NULL
)""",
    """CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    cell TEXT NOT NULL,
    mu REAL NOT NULL,
    slack REAL NOT NULL,
    opened INTEGER NOT NULL,
    over INTEGER,
    seal BLOB NOT NULL,
    entry BLOB NOT NULL,
    key BLOB,
    state BLOB
)""",
    """CREATE TABLE answers (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    t INTEGER NOT NULL,
    query BLOB NOT NULL,
    asked INTEGER NOT NULL,
    answered INTEGER,
    replied BLOB,
    after BLOB,
    head BLOB,
    blind BLOB,
    reply BLOB,
    PRIMARY KEY (run_id, t)
)""",
    "CREATE INDEX told ON answers (answered)",
)
UNKEYED_VERSION, LEDGER_VERSION = 2, 3
"""Version (PRAGMA user_version) of a ledger of fedpriv 0.3.0, without a key, and of a current one."""
BACKUP_OFFSET = 100
"""Difference between the user_version of a backup, without keys and replies, and that of its ledger."""
_HOT_JOURNAL_HEADER = bytes.fromhex("d9d505f920a163d7")
"""First bytes of a journal that SQLite still needs, for a commit in progress or interrupted."""
MAX_RUNS_WITH_REPLY = 8
"""Number of the runs that ended last whose replies to round 0 and to the last answered round are kept.

A server that was killed may ask for them again.
"""
KEPT_REPLIES = 32
"""Number of the last answered rounds of a run under way whose replies are kept, besides round 0.

A server that was killed asks again for the round that its journal lacks, and a Flower app that takes several
steps between two averages repeats the steps since the last one.
"""
DROP_EARLIER_REPLY = """
UPDATE answers SET reply = NULL, blind = NULL WHERE run_id = ? AND t = (
    SELECT t FROM answers WHERE run_id = ? AND t > 0 AND answered IS NOT NULL ORDER BY t DESC LIMIT 1 OFFSET ?
)"""
MAX_ROOM = 2**27
"""Most free bytes that a ledger has set aside after the first query of a run."""
_DROP_BATCH_SIZE = 64
"""Most replies that are dropped in one transaction, which bounds their pages in SQLite's journal."""


class RunRow(NamedTuple):
    """Row of a run: scenario as JSON, price, and key and state until the run is over."""

    cell: str
    mu: float
    """inf for a run that no μ is known to bound, such as one without noise."""
    key: bytes | None
    """Key of the run, or None if the run is over, and in a backup."""
    state: bytes | None
    """Packed state after the last reply, or None before the first, if the run is over, and in a backup."""
    slack: float = 0.0


class AnswerRow(NamedTuple):
    """Row of a round: digest of its query, bytes of its reply, and whether it was answered."""

    query_digest: bytes
    reply: bytes | None
    """Bytes of the reply, or None before there is one and after it was dropped."""
    is_answered: bool


class LedgerHeader(NamedTuple):
    """Only row of the table `about`."""

    ledger_name: str
    fingerprint: bytes
    original_name: str
    """First name of the ledger, from which the first head of the chain follows."""
    commit: Commit
    """Last commit."""


def connect_database(path: Path) -> sqlite3.Connection:
    """Connect to the database, with the settings on which the guarantees of a ledger depend."""
    database = sqlite3.connect(path, isolation_level=None)
    # A journal that is kept can be overwritten.  If it were unlinked, its blocks would keep keys and sums.
    for setting in ("synchronous = FULL", "secure_delete = ON", "journal_mode = PERSIST", "temp_store = MEMORY"):
        database.execute(f"PRAGMA {setting}")
    return database


def create_tables(database: sqlite3.Connection, schema: str = "main", version: int = LEDGER_VERSION) -> None:
    """Create the empty tables of a ledger."""
    for table in _TABLES:
        database.execute(table.replace("TABLE ", f"TABLE {schema}.").replace("INDEX ", f"INDEX {schema}."))
    database.execute(f"PRAGMA {schema}.user_version = {version}")


def read_header(database: sqlite3.Connection) -> LedgerHeader:
    """Read the header of a ledger.

    Raises:
        TypeError or ValueError: If the table has another number of rows than one, or of columns than five.
        sqlite3.Error: If the database has no such table, or cannot be read.
    """
    ((name, begun_as, shard, *commit),) = database.execute("SELECT * FROM about").fetchall()
    return LedgerHeader(name, shard, begun_as, Commit(*commit))


def last_state_digest(database: sqlite3.Connection, run_id: str) -> bytes:
    """Return the digest of the state after the last reply of a run, or b"" before the first.

    It is b"" after the last round, too, which no state follows.
    """
    row = database.execute(
        "SELECT after FROM answers WHERE run_id = ? AND answered IS NOT NULL ORDER BY t DESC LIMIT 1", (run_id,)
    ).fetchone()
    return b"" if row is None else bytes(row[0])


def check_rows(database: sqlite3.Connection, *, keyless: bool = False) -> None:
    """Check that all rows reproduce the chain of commits.

    Args:
        database: Database of a ledger or of a backup.
        keyless: Whether keys, states and replies are missing, as in a backup.

    Raises:
        ValueError: If SQLite's check fails, the tables are not those of a ledger, or a digest or a head does not
            follow from the rows.  Rows that are damaged or missing can cause other exceptions.
    """
    require(database.execute("PRAGMA integrity_check").fetchall() == [("ok",)])
    statements = database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
    require(statements == [(table,) for table in _TABLES])
    entries, heads = _collect_entries(database, keyless=keyless)
    header = read_header(database)
    head = chain.first_head(header.original_name, header.fingerprint)
    for number in range(1, header.commit.number + 1):
        if number in heads:
            entry, stored_head = heads[number]
            require(chain.next_head(head, number, [entry]) == stored_head)
        head = chain.next_head(head, number, entries.pop(number))
    require(not entries and head == header.commit.head)


def bind_rows(
    database: sqlite3.Connection,
    fingerprint: bytes,
    key: bytes,
    new_mus: Mapping[str, float] = MappingProxyType({}),
) -> bytes:
    """Chain the commits of checked rows again, from a fingerprint under a new key.

    Every commit gets a new head, every run a new seal, and the ledger a new name.

    Guarantee: nothing that remains was made from the former fingerprint.  The rows that remain once the runs are
    over do not reproduce the former heads: the former seal of the first run, which is gone, was part of all of
    these heads but the first.

    Args:
        database: Database whose rows were checked, in a transaction.
        fingerprint: New fingerprint of the records.
        key: Key of the fingerprint.
        new_mus: μ by name of the run, in place of the charged one.

    Returns:
        New head of the chain.
    """
    for run_id, cell, charged_mu, slack, seal, run_key in database.execute(
        "SELECT run_id, cell, mu, slack, seal, key FROM runs"
    ).fetchall():
        new_seal, mu = chain.reseal(seal, run_key, key), new_mus.get(run_id, charged_mu)
        entry = chain.opening_entry(run_id, cell, mu, slack, new_seal).digest
        database.execute(
            "UPDATE runs SET mu = ?, seal = ?, entry = ? WHERE run_id = ?", (mu, new_seal, entry, run_id)
        )
    # Keys and states were checked before.
    entries, heads = _collect_entries(database, keyless=True)
    header = read_header(database)
    head = chain.first_head(header.original_name, fingerprint)
    for number in range(1, header.commit.number + 1):
        if number in heads:
            answer_head = chain.next_head(head, number, [heads[number][0]])
            database.execute("UPDATE answers SET head = ? WHERE answered = ?", (answer_head, number))
        head = chain.next_head(head, number, entries[number])
    database.execute(
        "UPDATE about SET name = ?, shard = ?, head = ?",
        (chain.converted_name(header.ledger_name), fingerprint, head),
    )
    return head


def _collect_entries(
    database: sqlite3.Connection, *, keyless: bool
) -> tuple[dict[int, list[chain.ChainEntry]], dict[int, tuple[chain.ChainEntry, bytes]]]:
    """Collect the entries of every commit from the rows, and check the digests in the rows.

    Args:
        database: Database of a ledger or of a backup.
        keyless: Whether keys and states of open runs are not checked, as in a backup, which has none.

    Returns:
        Entries of each commit by its number, and for each commit with a reply the reply's entry and the stored
        head after this entry alone.

    Raises:
        ValueError: If a row contradicts its digests.  Damaged rows can cause other exceptions.
    """
    entries = defaultdict[int, list[chain.ChainEntry]](list)
    for run_id, cell, mu, slack, opening_commit, ending_commit, seal, entry_digest, key, state in database.execute(
        "SELECT * FROM runs"
    ):
        chain_entry = chain.opening_entry(run_id, cell, mu, slack, seal)
        require(chain_entry.digest == entry_digest)
        entries[opening_commit].append(chain_entry)
        if ending_commit is not None:
            require(key is None and state is None)
            entries[ending_commit].append(chain.ending_entry(run_id))
        elif not keyless:
            require(
                chain.is_seal_of(seal, key)
                and chain.digest_state(key, state) == last_state_digest(database, run_id)
            )
    heads = dict[int, tuple[chain.ChainEntry, bytes]]()
    for (
        run_id,
        t,
        query,
        query_commit,
        reply_commit,
        reply_digest,
        state_digest,
        head,
        blind,
        reply,
    ) in database.execute("SELECT * FROM answers"):
        entries[query_commit].append(chain.query_entry(run_id, t, query))
        if reply_commit is None:
            require((reply_digest, state_digest, head, blind, reply) == (None,) * 5)
            continue
        require((reply is None and blind is None) or chain.digest_reply(blind, reply) == reply_digest)
        heads[reply_commit] = chain.reply_entry(run_id, t, reply_digest, state_digest), head
        entries[reply_commit].append(heads[reply_commit][0])
    return entries, heads


def drop_replies(database: sqlite3.Connection) -> bool:
    """Drop some of the replies that need not be kept, and return whether there were any."""
    return bool(database.execute(_DROP_REPLIES, (MAX_RUNS_WITH_REPLY, _DROP_BATCH_SIZE)).rowcount)


_DROP_REPLIES = """
UPDATE answers SET reply = NULL, blind = NULL WHERE rowid IN (
    SELECT answers.rowid FROM answers JOIN runs USING (run_id)
    WHERE reply IS NOT NULL AND over IS NOT NULL AND (
        run_id NOT IN (SELECT run_id FROM runs WHERE over IS NOT NULL ORDER BY over DESC LIMIT ?)
        OR 0 < t AND t < (SELECT MAX(t) FROM answers AS a WHERE a.run_id = runs.run_id AND a.answered IS NOT NULL)
    ) LIMIT ?
)"""


def copy_without_secrets(database: sqlite3.Connection) -> bytes:
    """Return the bytes of a backup's file, without keys, states, blinds and replies.

    A blind is the key of a reply's digest.
    """
    database.execute("ATTACH ':memory:' AS copy")
    try:
        create_tables(database, "copy", LEDGER_VERSION + BACKUP_OFFSET)
        for table, columns, null_columns in (
            ("about", "name, begun_as, shard, commits, head", ""),
            ("runs", "run_id, cell, mu, slack, opened, over, seal, entry", ", NULL, NULL"),
            ("answers", "run_id, t, query, asked, answered, replied, after, head", ", NULL, NULL"),
        ):
            database.execute(
                f"INSERT INTO copy.{table} SELECT {columns}{null_columns} FROM main.{table} ORDER BY rowid"
            )
        return database.serialize(name="copy")
    finally:
        database.execute("DETACH copy")


def wipe_journal(ledger: Path) -> bool:
    """Overwrite SQLite's journal of a ledger with zeros, unless SQLite still needs it.

    The journal can have pages from before the last commit, with values that were wiped in the ledger.  The caller
    holds the ledger's lock, with no transaction open.

    Guarantee: a journal from which SQLite has to restore the file after a crash is left as it is, and the result
    is False.

    Returns:
        True if the journal is zeros now or does not exist, or False if SQLite still needs it.
    """
    journal = Path(f"{ledger.resolve()}-journal")  # SQLite keeps it beside the file, and not beside a link to it.
    if journal.exists():
        with journal.open("r+b") as file:
            if file.read(len(_HOT_JOURNAL_HEADER)) == _HOT_JOURNAL_HEADER:
                return False
            file.seek(0)
            file.write(bytes(os.fstat(file.fileno()).st_size))
            file.flush()
            os.fsync(file.fileno())
    return True


def require(condition: bool) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the whole file, in hexadecimal digits.

    Closing the file releases the locks that SQLite has on it in this process.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
