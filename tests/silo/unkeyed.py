"""Ledgers of fedpriv 0.3.0: their fingerprint of the records is SHA-256 under no key.

`data/ledger-0.3.0` was written by fedpriv 0.3.0: a table with its policy, a ledger with a run that is over and one
that is under way, its mark and its backup, the scenario of both runs, and the commits that a server was told.
"""

import shutil
import sqlite3
from pathlib import Path

import numpy as np

from fedpriv.silo.chain import RollbackMark
from fedpriv.silo.fingerprint import create_ledger
from fedpriv.silo.policy import read_policy
from fedpriv.silo.rows import UNKEYED_VERSION, file_digest
from fedpriv.silo.shard import Shard

DATA = Path(__file__).parent / "data" / "ledger-0.3.0"


def copied(folder: Path, data: Path = DATA) -> Path:
    """A copy of what fedpriv 0.3.0, or another release, wrote, with the modes that it had."""
    shutil.copytree(data, folder)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


def stolen(folder: Path) -> list[Path]:
    """Every file of its ledger."""
    return list(folder.glob("ledger.sqlite*"))


def begin_unkeyed(ledger: Path, mark: Path, shard: Shard) -> None:
    """A ledger as fedpriv 0.3.0 began it."""
    create_ledger(ledger, mark, shard.content_digest)
    with sqlite3.connect(ledger) as database:
        database.execute(f"PRAGMA user_version = {UNKEYED_VERSION}")
    database.close()
    rollback = RollbackMark(mark)
    rollback.write(rollback.read()._replace(file_digest=file_digest(ledger)))


def candidates_in(folder: Path) -> list[Shard]:
    """What the records of such a copy can be: the last has one of two labels, and the second has its own."""
    truth = read_policy(folder / "policy.toml").load_shard()
    other = truth.labels.copy()
    last = int(np.flatnonzero(other >= 0)[-1])
    other[last] = 1 - other[last]
    return [Shard(truth.images, other), truth]
