"""The SQLite file of a ledger: its tables, the check of all its rows, and what is wiped of it.

    about    one row: the ledger's own name, the one it was begun with, the fingerprint of the records it is for
             under a key that lies beside them, how many commits it has had and the head of their chain
    runs     one row a run: its scenario, its price (μ, and the probability with which it may fail), the commits
             that opened and ended it, its key and its state (both wiped when the run is over)
    answers  one row a round: a digest of the query, and the bytes of the reply; without a reply, what may have
             been looked at, and can be answered for that query only.  Of a run that is over digests are left, and
             the reply to its last round, which a server that was killed may have to ask for again

`seal`, `entry`, `replied` and `after` are digests of the chain (fedpriv/silo/chain.py): of the key, of what was
charged, of the reply under `blind`, of the state after it; `head` is the chain's with this answer.
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
"""PRAGMA user_version of a ledger of fedpriv 0.3.0, whose fingerprint is under no key, and of one of today."""
BACKUP_OFFSET = 100
"""What user_version of a copy without keys and replies is beyond that of its ledger."""
_HOT_JOURNAL_HEADER = bytes.fromhex("d9d505f920a163d7")
"""What a journal begins with that SQLite has not done with: of a commit that is being made, or was cut short."""
MAX_RUNS_WITH_REPLY = 8
"""Runs that ended last, whose last reply is kept."""
_DROP_BATCH_SIZE = 64
"""Replies that are dropped in one go: what SQLite's journal holds of them."""


class RunRow(NamedTuple):
    """A run that was opened: its scenario as canonical JSON, its price, and its key and state while it lasts."""

    cell: str
    mu: float
    key: bytes | None
    state: bytes | None
    slack: float = 0.0


class AnswerRow(NamedTuple):
    """A round that was asked: the digest of its query, the bytes that were replied, and whether any were."""

    query_digest: bytes
    reply: bytes | None
    """None before there is one, and when it is not kept any more."""
    is_answered: bool


class LedgerHeader(NamedTuple):
    """The first row of a ledger."""

    ledger_name: str
    fingerprint: bytes
    original_name: str
    commit: Commit


def connect_database(path: Path) -> sqlite3.Connection:
    """The database, with what the guarantees need."""
    database = sqlite3.connect(path, isolation_level=None)
    for setting in ("synchronous = FULL", "secure_delete = ON", "journal_mode = PERSIST", "temp_store = MEMORY"):
        database.execute(f"PRAGMA {setting}")
    return database


def create_tables(database: sqlite3.Connection, schema: str = "main", version: int = LEDGER_VERSION) -> None:
    """Make the empty tables of a ledger."""
    for table in _TABLES:
        database.execute(table.replace("TABLE ", f"TABLE {schema}.").replace("INDEX ", f"INDEX {schema}."))
    database.execute(f"PRAGMA {schema}.user_version = {version}")


def read_header(database: sqlite3.Connection) -> LedgerHeader:
    """TypeError or ValueError where there is no such row."""
    name, begun_as, shard, *commit = database.execute("SELECT * FROM about").fetchone()
    return LedgerHeader(name, shard, begun_as, Commit(*commit))


def last_state_digest(database: sqlite3.Connection, run_id: str) -> bytes:
    """The digest of the state after the last round that was answered; b"" before the first."""
    found = database.execute(
        "SELECT after FROM answers WHERE run_id = ? AND answered IS NOT NULL ORDER BY t DESC LIMIT 1", (run_id,)
    ).fetchone()
    return b"" if found is None else bytes(found[0])


def check_rows(database: sqlite3.Connection, *, keyless: bool = False) -> None:
    """ValueError, or whatever else damaged rows lead to, unless they give the chain.

    The rows of a copy are `keyless`.
    """
    require(database.execute("PRAGMA integrity_check").fetchall() == [("ok",)])
    written = database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
    require(written == [(table,) for table in _TABLES])
    entries, heads = _collect_entries(database, keyless=keyless)
    about = read_header(database)
    head = chain.first_head(about.original_name, about.fingerprint)
    for number in range(1, about.commit.number + 1):
        if number in heads:
            made, kept = heads[number]
            require(chain.next_head(head, number, [made]) == kept)
        head = chain.next_head(head, number, entries.pop(number))
    require(not entries and head == about.commit.head)


def bind_rows(
    database: sqlite3.Connection,
    fingerprint: bytes,
    key: bytes,
    new_mus: Mapping[str, float] = MappingProxyType({}),
) -> bytes:
    """Chain the commits of checked rows again, from this fingerprint under this key; the last head.

    `prices` are other μ for some of the runs.

    Guarantee: nothing that is left was made from the fingerprint before, and what is left once the runs are over
    does not give the heads before again: the seal of the first run was part of them all.
    """
    of_runs = "SELECT run_id, cell, mu, slack, seal, key FROM runs"
    for run_id, cell, charged, slack, seal, own in database.execute(of_runs).fetchall():
        other, mu = chain.reseal(seal, own, key), new_mus.get(run_id, charged)
        entry = chain.opening_entry(run_id, cell, mu, slack, other).digest
        changed = "UPDATE runs SET mu = ?, seal = ?, entry = ? WHERE run_id = ?"
        database.execute(changed, (mu, other, entry, run_id))
    entries, heads = _collect_entries(database, keyless=True)
    about = read_header(database)
    head = chain.first_head(about.original_name, fingerprint)
    for number in range(1, about.commit.number + 1):
        if number in heads:
            after = chain.next_head(head, number, [heads[number][0]])
            database.execute("UPDATE answers SET head = ? WHERE answered = ?", (after, number))
        head = chain.next_head(head, number, entries[number])
    database.execute(
        "UPDATE about SET name = ?, shard = ?, head = ?",
        (chain.converted_name(about.ledger_name), fingerprint, head),
    )
    return head


def _collect_entries(
    database: sqlite3.Connection, *, keyless: bool
) -> tuple[dict[int, list[chain.ChainEntry]], dict[int, tuple[chain.ChainEntry, bytes]]]:
    """The entries of every commit, and of those with an answer that entry and the head that is stored with it."""
    entries = defaultdict[int, list[chain.ChainEntry]](list)
    for run_id, cell, mu, slack, opened, over, seal, entry, key, state in database.execute("SELECT * FROM runs"):
        made = chain.opening_entry(run_id, cell, mu, slack, seal)
        require(made.digest == entry)
        entries[opened].append(made)
        if over is not None:
            require(key is None and state is None)
            entries[over].append(chain.ending_entry(run_id))
        elif not keyless:
            require(
                chain.is_seal_of(seal, key)
                and chain.digest_state(key, state) == last_state_digest(database, run_id)
            )
    heads = dict[int, tuple[chain.ChainEntry, bytes]]()
    for run_id, t, query, asked, answered, replied, after, head, blind, reply in database.execute(
        "SELECT * FROM answers"
    ):
        entries[asked].append(chain.query_entry(run_id, t, query))
        if answered is None:
            require((replied, after, head, blind, reply) == (None,) * 5)
            continue
        require((reply is None and blind is None) or chain.digest_reply(blind, reply) == replied)
        heads[answered] = made, _ = chain.reply_entry(run_id, t, replied, after), head
        entries[answered].append(made)
    return entries, heads


def drop_replies(database: sqlite3.Connection) -> bool:
    """Drop some of the replies that are not asked for again; False if there are none."""
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
    """The file of a copy without keys, states and replies, which are not even read."""
    database.execute("ATTACH ':memory:' AS copy")
    try:
        create_tables(database, "copy", LEDGER_VERSION + BACKUP_OFFSET)
        for table, columns, wiped in (
            ("about", "name, begun_as, shard, commits, head", ""),
            ("runs", "run_id, cell, mu, slack, opened, over, seal, entry", ", NULL, NULL"),
            ("answers", "run_id, t, query, asked, answered, replied, after, head", ", NULL, NULL"),
        ):
            database.execute(f"INSERT INTO copy.{table} SELECT {columns}{wiped} FROM main.{table} ORDER BY rowid")
        return database.serialize(name="copy")
    finally:
        database.execute("DETACH copy")


def wipe_journal(ledger: Path) -> bool:
    """Overwrite the pages that the journal has of before the last commit.

    False for a journal that SQLite still needs.

    Guarantee: a journal that SQLite still needs is left as it is.
    """
    journal = ledger.with_name(ledger.name + "-journal")
    if journal.exists():
        with journal.open("r+b") as file:
            if file.read(len(_HOT_JOURNAL_HEADER)) == _HOT_JOURNAL_HEADER:
                return False
            file.seek(0)
            file.write(bytes(os.fstat(file.fileno()).st_size))
            file.flush()
            os.fsync(file.fileno())
    return True


def require(holds: bool) -> None:
    """ValueError unless it holds."""
    if not holds:
        raise ValueError


def file_digest(path: Path) -> str:
    """Of the whole file; ends the locks that SQLite has on it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
