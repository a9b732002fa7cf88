"""Fingerprint of a silo's records in the silo's ledger: set for a new ledger, checked, and converted.

A fingerprint is an HMAC of the records in their order, with a value that tells keys apart.  Its key is a file of
32 random bytes beside the records.  A rollback mark is a separate file that names the ledger's last commit, and so
reveals an older copy of the ledger.

Ledgers of fedpriv 0.3.0 have a digest of the records without a key, on which a reader who knows all records but
one can test guesses at the last record.  `check_records` replaces it by a fingerprint.
"""

import json
import logging
import math
import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.files import PRIVATE_MODE, acquire_lock, sync_folder, write_bytes
from fedpriv.core.random import system_key
from fedpriv.silo import chain
from fedpriv.silo.admission import Charge
from fedpriv.silo.chain import Commit, MarkContent, RollbackMark
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import Policy
from fedpriv.silo.rows import create_tables, file_digest
from fedpriv.silo.shard import Shard, key_check, load_or_create_key, read_key

_log = logging.getLogger("fedpriv.guard")


SpentBefore = tuple[float, float, str]
"""Budget of records that was spent before their ledger is begun: mu, slack, and who says so."""


def make_charge(policy: Policy, title: str, releases: str, mu: float, slack: float) -> Charge:
    """Return the charge of `releases` that are none of this ledger's runs, for the policy's neighbours."""
    cell = {
        "name": title,
        "privacy": {"relation": policy.allow.relation, "unit": policy.allow.unit},
        "algorithm": {"name": releases, "trust": policy.allow.trust},
    }
    return Charge(json.dumps(cell, sort_keys=True), mu, slack)


def begin_ledger(policy: Policy, shard: Shard, earlier_charge: SpentBefore | None = None) -> None:
    """Begin the ledger of these records.

    A run that is over stands for the budget that was spent before, if any.  A lock keeps out another process that
    begins the ledger.

    Raises:
        InputError: If there is a ledger, or the rollback mark of a former one, or if the ledger cannot be written
            or the key of the records cannot be used.
    """
    run = earlier_charge and (
        f"said by {earlier_charge[2]}",
        make_charge(policy, "spent elsewhere", "other programs", *earlier_charge[:2]),
    )
    # Where no key can be made nothing is left behind.
    key = None if is_begun(policy) else load_or_create_key(policy.shard_key)
    try:
        with open(os.open(f"{policy.ledger}.lock", os.O_CREAT | os.O_RDWR, PRIVATE_MODE), "rb") as lock_file:
            acquire_lock(lock_file.fileno())
            if key is None or is_begun(policy):
                raise InputError(
                    f"{policy.ledger if policy.ledger.exists() else policy.mark_path} exists: a ledger is begun "
                    "once; what it says was released cannot be forgotten"
                )
            create_ledger(policy.ledger, policy.mark_path, shard.fingerprint(key), run)
    except OSError as error:
        raise InputError(f"{policy.ledger}: cannot be made a ledger: {error}") from None


def is_begun(policy: Policy) -> bool:
    """Whether the ledger of a policy was begun, so that it exists or was lost.

    A mark that names the bytes of the draft of `create_ledger` is that of a ledger which was never used.

    Raises:
        InputError: If there is such a draft and no ledger, and the mark cannot be used.
    """
    return policy.ledger.exists() or (
        policy.mark_path.exists()
        and not (
            (draft := _draft_path(policy.ledger)).exists()
            and RollbackMark(policy.mark_path).read().file_digest == file_digest(draft)
        )
    )


def _draft_path(ledger: Path) -> Path:
    return ledger.with_name(ledger.name + ".begun")


def create_ledger(path: Path, mark: Path, fingerprint: bytes, run: tuple[str, Charge] | None = None) -> None:
    """Write a new ledger for the records with this fingerprint, and its rollback mark.

    A draft of the whole ledger is written, then the mark, and then the draft is renamed to the ledger.

    Guarantee: after a kill or an error at any step either the ledger and its mark are complete, or there is no
    ledger and `is_begun` is False, so that it can be begun once more.  The caller has checked that `is_begun` is
    False before.

    Args:
        path: File of the ledger.
        mark: File of the rollback mark.  The mark of an earlier call that failed is replaced.
        fingerprint: Fingerprint of the records under a key, which the ledger does not contain.
        run: Name and charge of a run that is over, which stands for budget that was spent before, or None.

    Raises:
        OSError: If a file cannot be written.
    """
    rollback_mark, ledger_name, draft = RollbackMark(mark), secrets.token_hex(16), _draft_path(path)
    rollback_mark.path.unlink(missing_ok=True)  # It names an earlier draft, which is replaced before the new mark.
    first_commit = Commit(0, chain.first_head(ledger_name, fingerprint))
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        create_tables(database)
        if run is not None:
            first_commit = Commit(
                1,
                chain.next_head(
                    first_commit.head,
                    1,
                    [
                        entry := chain.opening_entry(run[0], *run[1], seal := chain.make_seal(system_key())),
                        chain.ending_entry(run[0]),
                    ],
                ),
            )
            # Commit 1 both opened and ended the run.
            database.execute(
                "INSERT INTO runs (run_id, cell, mu, slack, seal, entry, opened, over) "
                "VALUES (?, ?, ?, ?, ?, ?, 1, 1)",
                (run[0], *run[1], seal, entry.digest),
            )
        # The row has the ledger's present name and its first one.
        database.execute(
            "INSERT INTO about VALUES (?, ?, ?, ?, ?)", (ledger_name, ledger_name, fingerprint, *first_commit)
        )
        write_bytes(draft, database.serialize(), PRIVATE_MODE)
    rollback_mark.write(MarkContent(ledger_name, first_commit, first_commit, file_digest(draft)))
    draft.replace(path)
    sync_folder(path.parent)


def check_records(policy: Policy, ledger: SiloLedger, shard: Shard) -> None:
    """Check that a ledger is for these records, after converting a ledger of fedpriv 0.3.0.

    Guarantee: a key is made only for a ledger without a key, so that no other records get a fingerprint unnoticed.

    Raises:
        InputError: If the ledger is damaged or for other records, or the key of the records is missing, cannot be
            used or made, or is another one.
        LedgerError: If the ledger has to be converted, and another process holds its lock or the disk refuses.
    """
    if not ledger.is_keyed():
        _convert_ledger(policy, ledger, shard)
    key = read_key(policy.shard_key)
    if not is_key_of(key, ledger.fingerprint):
        raise InputError(
            f"{policy.shard_key}: is not the key that {policy.ledger} was begun with, so nobody knows whether "
            "these are its records: put that key back, or move the ledger into a folder of its own, and `fedpriv "
            "silo restore POLICY FOLDER` begins again from it with this key, with the budget counted as spent"
        )
    # The second one is that of a ledger which fedpriv 0.3.1 began.
    if ledger.fingerprint not in (shard.fingerprint(key), shard.fingerprint(key, with_cells=False)):
        raise _other_records_error(policy)


def is_key_of(key: bytes, fingerprint: bytes) -> bool:
    """Whether a fingerprint was made with this key."""
    return fingerprint.startswith(key_check(key))


def _convert_ledger(policy: Policy, ledger: SiloLedger, shard: Shard) -> None:
    """Replace the digest of the records in a ledger of fedpriv 0.3.0 by a fingerprint under a key.

    Runs whose claim by fedpriv 0.3.0 was false (`_unprotected_runs`) are charged an infinite μ.  A ledger that
    another process has just converted stays as it is.

    Raises:
        InputError: If the ledger is damaged or for other records, or the key cannot be used or made.
        LedgerError: If another process holds the ledger's lock, or the disk refuses.
    """
    with ledger.lock():
        if ledger.is_keyed():  # by another process, before this one had the lock
            return
        if ledger.fingerprint != shard.content_digest:
            raise _other_records_error(policy)
        key = load_or_create_key(policy.shard_key)
        unprotected = _unprotected_runs(ledger)
        with ledger.transaction():
            ledger.bind_records(shard.fingerprint(key), key, dict.fromkeys(unprotected, math.inf))
        ledger.tidy()
    for run_id in unprotected:
        _log.warning(
            "the run %s had augmented records in a secret order, for which fedpriv 0.3.0 promised too much: it is "
            "charged as a run without noise, so that no new run fits the budget",
            sanitize_line(repr(run_id), 60),
        )
    _log.warning(
        "%s no longer has a digest of its records, but a fingerprint under the key in %s; backups that fedpriv "
        "0.3.0 made still have the digest: make a new backup and delete them",
        policy.ledger,
        policy.shard_key,
    )


def _unprotected_runs(ledger: SiloLedger) -> list[str]:
    """List the runs whose claim by fedpriv 0.3.0 was false: model.augment in a secret order, with slack.

    The augmented copies of a record depended on the other records that took part.
    """
    return [
        row.run_id
        for row in ledger.list_runs()
        if row.slack and json.loads(row.cell).get("model", {}).get("augment")
    ]


def _other_records_error(policy: Policy) -> InputError:
    return InputError(
        f"{policy.shard}: these are not the records, in the order, that {policy.ledger} was begun for; its "
        "charges are for those records, and say nothing about these"
    )
