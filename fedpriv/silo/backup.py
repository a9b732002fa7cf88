"""Back up a silo's ledgers, and put a backup in the place of a ledger that is lost.

A backup has every charge and every digest of the chain, and no key, no state and no reply: runs that were under
way end with it.  It has the number of rounds of every run, and digests of what was asked, beside what an
administrator's `status` shows.

Guarantee: a thief of a backup, of the ledger after a run, or of both, cannot try on them what a record is, if
HMAC-SHA256 is a pseudorandom function: what depends on the records is under keys that were wiped, or, as their
fingerprint is, under one that lies beside the records alone (fedpriv/silo/shard.py).  Replies that a ledger
keeps have their noise, but for sums that a trusted server was sent.  Backups that fedpriv 0.3.0 made have a digest
of the records under no key.

Guarantee: no budget is spent twice by a restore.  If the mark, which lies elsewhere, says that the backup's last
commit was the ledger's last one, nothing was released since.  If it does not, or is gone, the whole budget of the
policy is charged to the restored ledger, since as much may have been released; and the ledger gets another name,
so that nobody takes it for the lost one.  What a server remembers is no evidence: it is the one that would gain.
"""

import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from fedpriv.core.errors import InputError
from fedpriv.core.files import PRIVATE_MODE, sync_folder, write_bytes
from fedpriv.silo.admission import Charge
from fedpriv.silo.chain import Commit, MarkContent, RollbackMark
from fedpriv.silo.fingerprint import is_key_of
from fedpriv.silo.guards import policies_with_shards
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.rows import BACKUP_OFFSET, connect_database, read_header
from fedpriv.silo.shard import load_or_create_key, read_key

RESTORE_CHARGE_NAME = "restored from a backup"
"""The name of the charge for what may have been released since."""


def back_up_ledgers(policy_path: Path, folder: Path) -> list[Path]:
    """Copies of a policy's ledgers in `folder`, mode 0600; older ones there are replaced."""
    return [_copy_ledger(own, folder / own.ledger.name) for own in _ledger_policies(policy_path)]


def _copy_ledger(policy: Policy, copy: Path) -> Path:
    with closing(SiloLedger(policy.ledger, policy.mark_path)) as ledger, ledger.lock():
        content = ledger.copy_without_secrets()
    try:
        write_bytes(copy, content, PRIVATE_MODE)
        sync_folder(copy.parent)
    except OSError as error:
        raise InputError(f"{copy}: the backup cannot be written: {error}") from None
    return copy


def restore_ledgers(policy_path: Path, folder: Path) -> Iterator[str]:
    """Put the copies in `folder` in the place of ledgers that are gone; a line about each.

    InputError, with nothing changed, if no ledger is gone, or for a copy that is damaged.  Where the key beside
    the records is gone, or another one, the ledger goes on with these records, and the whole budget is charged.
    """
    if not (gone := [own for own in _ledger_policies(policy_path) if not own.ledger.exists()]):
        (policy, *_) = _ledger_policies(policy_path)
        raise InputError(
            f"{policy.ledger}: is there; a backup knows less than a ledger.  If this one cannot be used, move it "
            "away first"
        )
    for policy in gone:
        yield _restore_ledger(policy_path, policy, folder / policy.ledger.name)


def _restore_ledger(policy_path: Path, policy: Policy, copy: Path) -> str:
    draft, own = policy.ledger.with_name(policy.ledger.name + ".restored"), RollbackMark(policy.mark_path)
    try:
        with _draft_copy(copy, draft) as draft_mark:
            backup, name, commit = _read_copy(draft)
            draft_mark.write(MarkContent(name, commit, commit))
            with closing(SiloLedger(draft, draft_mark.path, is_backup=backup)) as ledger:
                bound = _is_bound(policy, ledger)
                same = bound and _is_latest(own, name, commit)
                new = name if same else secrets.token_hex(16)
                with ledger.lock():
                    with ledger.transaction():
                        if not bound:
                            ledger.bind_records(*_make_fingerprint(policy_path, policy))
                        ledger.become_ledger(
                            new, None if same else (f"{RESTORE_CHARGE_NAME}, {new}", _full_budget_charge(policy))
                        )
                    ledger.tidy()
            reading = draft_mark.read()
            draft.replace(policy.ledger)
            sync_folder(policy.ledger.parent)
            own.write(reading)
    except (OSError, sqlite3.Error, TypeError, ValueError) as error:
        raise InputError(f"{copy}: cannot be restored: {error}") from None
    if same:
        return f"restored {policy.ledger}: its mark says that nothing was released since this backup"
    unknown = "what was released since" if bound else "whether it was of these records, without its key"
    return (
        f"restored {policy.ledger} as of commit {commit.number}: nobody knows {unknown}, so the whole budget of "
        "the policy is charged.  It answers no new run, unless a person raises allow.budget"
    )


@contextmanager
def _draft_copy(copy: Path, draft: Path) -> Iterator[RollbackMark]:
    """The copy as a file beside the ledger, and a mark for it; nothing of both is left over."""
    mark = RollbackMark(draft.with_name(draft.name + ".mark"))
    left = [draft.with_name(draft.name + end) for end in ("", ".mark", ".mark.new", ".lock", "-journal")]
    with ExitStack() as stack:
        for path in left:
            path.unlink(missing_ok=True)
            stack.callback(path.unlink, missing_ok=True)
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, PRIVATE_MODE))
        shutil.copyfile(copy, draft)
        yield mark


def _read_copy(copy: Path) -> tuple[bool, str, Commit]:
    """Whether a copy that nobody has checked yet is a backup, its ledger's name and its last commit."""
    database = connect_database(copy)
    (version,) = database.execute("PRAGMA user_version").fetchone()
    about = read_header(database)
    database.close()
    return version > BACKUP_OFFSET, about.ledger_name, about.commit


def _is_bound(policy: Policy, ledger: SiloLedger) -> bool:
    """Whether a guard can tell the records that the ledger is for, with the key beside them or without one."""
    return not ledger.is_keyed() or (
        policy.shard_key.exists() and is_key_of(read_key(policy.shard_key), ledger.fingerprint)
    )


def _make_fingerprint(policy_path: Path, policy: Policy) -> tuple[bytes, bytes]:
    """The fingerprint of the policy's records and its key, which is made where there is none."""
    key = load_or_create_key(policy.shard_key)
    records = {of.ledger: own for of, own in policies_with_shards(read_policy(policy_path))}
    return records[policy.ledger].fingerprint(key), key


def _is_latest(own: RollbackMark, name: str, commit: Commit) -> bool:
    """Whether the mark that was kept says that its ledger never had a commit after this one."""
    try:
        mark = own.read()
    except InputError:
        return False
    return (mark.ledger_name, mark.last_commit, mark.pending_commit) == (name, commit, commit)


def _full_budget_charge(policy: Policy) -> Charge:
    """All that the policy allows, charged for its own neighbours."""
    allow = policy.allow
    cell = {
        "name": RESTORE_CHARGE_NAME,
        "privacy": {"relation": allow.relation, "unit": allow.unit},
        "algorithm": {"name": "whatever was released since", "trust": allow.trust},
    }
    return Charge(json.dumps(cell, sort_keys=True), allow.budget, allow.slack)


def _ledger_policies(policy_path: Path) -> list[Policy]:
    policy = read_policy(policy_path)
    return [own for own in (policy, policy.test_policy) if own is not None]
