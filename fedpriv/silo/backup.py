"""Backups of a silo's ledgers, and the restoring of a lost ledger from a backup.

A ledger is an SQLite file with the charge of every run, digests of the queries, and replies, and with key and
state of runs under way.  Its rollback mark is a separate file that names the ledger's last commit, and so reveals
an older copy.  The fingerprint of the records is an HMAC of them, and its key is a file beside the records.

A backup has no key, no state and no reply, so that runs which were under way are over after a restore.

Guarantee: a thief of a backup, of a ledger without a run under way, or of both, can test guesses at a record on
replies that the ledger keeps, and on nothing else, if HMAC-SHA256 is a pseudorandom function.  These replies,
beside the keys of their digests, have their noise, except sums that were sent to a trusted server and replies of
runs without noise.  All other values that depend on the records are under keys that were wiped, or, like the
fingerprint of the records, under a key that lies beside the records alone (fedpriv/silo/shard.py).  Ledgers and
backups that fedpriv 0.3.0 made have a digest of the records under no key, a ledger until it is converted.

Guarantee: no budget is spent twice by a restore, unless the mark itself was replaced by an older copy, or more was
released since the backup, under an earlier policy, than the present one allows.  If the mark, which no backup
contains, says that the backup's last commit was the ledger's last one, nothing was released since.  If the mark
does not say so, or is gone, or the key of the fingerprint does not lie beside the records, the whole budget of the
policy is charged to the restored ledger, since as much may have been released; and the ledger gets another name,
so that nobody takes it for the lost one.  A restore that was killed, or that the disk refused, can be repeated.
The checkpoints of a server are no evidence, because the server would gain from a wrong one.
"""

import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from fedpriv.core.errors import InputError, refuse
from fedpriv.core.files import PRIVATE_MODE, sync_folder, write_bytes
from fedpriv.silo.chain import Commit, MarkContent, RollbackMark
from fedpriv.silo.fingerprint import is_key_of, make_charge
from fedpriv.silo.guards import policies_with_shards
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.rows import BACKUP_OFFSET, LEDGER_VERSION, UNKEYED_VERSION, connect_database, read_header
from fedpriv.silo.shard import load_or_create_key, read_key

RESTORE_CHARGE_NAME = "restored from a backup"
"""Name of the charge for releases that may have been made since the backup."""


def back_up_ledgers(policy_path: Path, folder: Path) -> list[Path]:
    """Copy a policy's ledgers to files of mode 0600 in `folder`, and replace older copies there.

    Returns:
        Files of the copies: of the training records' ledger, and of the test records' ledger if the policy has a
        section [evaluation].

    Raises:
        InputError: If policy or ledger cannot be used, a copy cannot be written, or `folder` is the ledger's.
        LedgerError: If another process holds a ledger's lock.
    """
    return [_copy_ledger(policy, folder / policy.ledger.name) for policy in _ledger_policies(policy_path)]


def _copy_ledger(policy: Policy, copy: Path) -> Path:
    """Write a policy's ledger without keys, states and replies to the path `copy`, and return this path.

    Raises:
        InputError: If the ledger cannot be used, is one of fedpriv 0.3.0, or is the file `copy`, or if `copy` is
            another ledger or cannot be written.
        LedgerError: If another process holds the ledger's lock.
    """
    with closing(SiloLedger(policy.ledger, policy.mark_path)) as ledger, ledger.lock():
        content = ledger.copy_without_secrets()
    try:
        refuse(
            {
                f"{copy}: is the ledger, which a backup would replace; give another folder": (
                    copy.exists() and copy.samefile(policy.ledger)
                ),
                # SQLite keeps the version in bytes 60 to 63 of its file.
                f"{copy}: is a ledger and no backup, and is not replaced; give another folder": (
                    copy.exists()
                    and int.from_bytes(copy.read_bytes()[60:64], "big") in (UNKEYED_VERSION, LEDGER_VERSION)
                ),
            }
        )
        write_bytes(copy, content, PRIVATE_MODE)
        sync_folder(copy.parent)
    except OSError as error:
        raise InputError(f"{copy}: the backup cannot be written: {error}") from None
    return copy


def restore_ledgers(policy_path: Path, folder: Path) -> Iterator[str]:
    """Restore lost ledgers of a policy from the copies in `folder`, and yield a line about each.

    A ledger is lost if its file does not exist.

    Raises:
        InputError: If no ledger is lost, a copy, the policy, the records or their key cannot be used, or the disk
            refuses a file.  Ledgers whose lines were yielded before stay restored.
        LedgerError: If the disk refuses a change of the draft.
    """
    if not (
        lost_policies := [
            ledger_policy for ledger_policy in _ledger_policies(policy_path) if not ledger_policy.ledger.exists()
        ]
    ):
        raise InputError(
            f"{read_policy(policy_path).ledger}: is there; a backup knows less than a ledger.  If this one cannot "
            "be used, move it away first"
        )
    for policy in lost_policies:
        yield _restore_ledger(policy_path, policy, folder / policy.ledger.name)


def _restore_ledger(policy_path: Path, policy: Policy, copy: Path) -> str:
    """Restore one ledger from its copy, and return a line for the administrator.

    A draft of the copy, in the ledger's folder, is checked and changed, and then renamed to the ledger.  The
    ledger keeps its name and is charged nothing if the lost ledger's mark says that the copy has its last commit,
    and the key of the copy's fingerprint, if it has one, lies beside the records.  Otherwise it gets a new random
    name and is charged the whole budget.  A fingerprint whose key is gone is replaced by one of the records here.

    Args:
        policy_path: File of the policy for training.
        policy: Policy of this ledger, for training or for evaluations.
        copy: File of the backup, or of a ledger.

    Raises:
        InputError: If the copy, the records or their key cannot be used, or the disk refuses a file.
        LedgerError: If the disk refuses a change of the draft.
    """
    draft, mark = policy.ledger.with_name(policy.ledger.name + ".restored"), RollbackMark(policy.mark_path)
    full_budget = policy.allow.budget, policy.allow.slack
    try:
        with _draft_copy(copy, draft) as draft_mark:
            is_backup, name, commit = _read_copy(draft)
            # `SiloLedger` opens no file without a mark that agrees with it.
            draft_mark.write(MarkContent(name, commit, commit))
            with closing(SiloLedger(draft, draft_mark.path, is_backup=is_backup)) as ledger:
                is_bound = _is_bound(policy, ledger)
                is_latest = is_bound and _is_latest(mark, name, commit)
                new_name = name if is_latest else secrets.token_hex(16)
                with ledger.lock():
                    with ledger.transaction():
                        if not is_bound:
                            ledger.bind_records(*_make_fingerprint(policy_path, policy))
                        ledger.become_ledger(
                            new_name,
                            None
                            if is_latest
                            else (
                                f"{RESTORE_CHARGE_NAME}, {new_name}",
                                make_charge(
                                    policy, RESTORE_CHARGE_NAME, "whatever was released since", *full_budget
                                ),
                            ),
                        )
                    ledger.tidy()
            journal = policy.ledger.with_name(policy.ledger.name + "-journal")
            with suppress(FileNotFoundError):  # SQLite would play the lost ledger's journal into the restored one
                journal.replace(journal.with_name(journal.name + ".lost"))
            # The lost ledger's mark goes first.  After a kill in between, another restore charges the whole budget
            # if this one added a commit.
            mark.write(draft_mark.read())
            draft.replace(policy.ledger)
            sync_folder(policy.ledger.parent)
    except (OSError, sqlite3.Error, TypeError, ValueError) as error:
        raise InputError(f"{copy}: cannot be restored: {error}") from None
    if is_latest:
        return f"restored {policy.ledger}: its mark says that nothing was released since this backup"
    return (
        f"restored {policy.ledger} as of commit {commit.number}: nobody knows "
        f"{'what was released since' if is_bound else 'whether it was of these records, without its key'}, so the "
        "whole budget of the policy is charged.  No new run has a budget, unless a person raises allow.budget"
    )


@contextmanager
def _draft_copy(copy: Path, draft: Path) -> Iterator[RollbackMark]:
    """Copy a backup, or a ledger, to a draft, and remove the draft's files at the end of the block.

    A draft that the block has renamed stays under its new name.

    Yields:
        Mark of the draft, whose file the caller writes.

    Raises:
        OSError: If the copy cannot be read, or a file cannot be written or removed.
    """
    mark = RollbackMark(draft.with_name(draft.name + ".mark"))
    draft_files = [draft.with_name(draft.name + suffix) for suffix in ("", ".mark", ".lock", "-journal")]
    with ExitStack() as stack:
        for path in draft_files:
            path.unlink(missing_ok=True)
            stack.callback(path.unlink, missing_ok=True)
        # The draft is private before it has content.
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, PRIVATE_MODE))
        shutil.copyfile(copy, draft)
        yield mark


def _read_copy(copy: Path) -> tuple[bool, str, Commit]:
    """Return whether an unchecked copy is a backup, the ledger's name, and the copy's last commit."""
    database = connect_database(copy)
    (version,) = database.execute("PRAGMA user_version").fetchone()
    header = read_header(database)
    database.close()
    return version > BACKUP_OFFSET, header.ledger_name, header.commit


def _is_bound(policy: Policy, ledger: SiloLedger) -> bool:
    """Whether the ledger's fingerprint has no key, or one that lies beside the records."""
    return not ledger.is_keyed() or (
        policy.shard_key.exists() and is_key_of(read_key(policy.shard_key), ledger.fingerprint)
    )


def _make_fingerprint(policy_path: Path, policy: Policy) -> tuple[bytes, bytes]:
    """Return the fingerprint of the ledger's records and its key, which is created if it is missing.

    Args:
        policy_path: File of the policy for training.
        policy: Policy of the ledger, for training or for evaluations.
    """
    key, pairs = load_or_create_key(policy.shard_key), policies_with_shards(read_policy(policy_path))
    return {record_policy.ledger: shard for record_policy, shard in pairs}[policy.ledger].fingerprint(key), key


def _is_latest(rollback_mark: RollbackMark, name: str, commit: Commit) -> bool:
    """Whether the ledger's mark says that `commit` was the ledger's last one, and none was in progress."""
    try:
        content = rollback_mark.read()
    except InputError:
        return False
    return (content.ledger_name, content.last_commit, content.pending_commit) == (name, commit, commit)


def _ledger_policies(policy_path: Path) -> list[Policy]:
    policy = read_policy(policy_path)
    return [ledger_policy for ledger_policy in (policy, policy.test_policy) if ledger_policy is not None]
