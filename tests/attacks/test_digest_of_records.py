"""Somebody who knows all records of a silo but one, and has its ledger, a backup of it, both, or the whole disk.

The last record is one of two; the thief tries both on every byte of what was stolen.
"""

import hashlib
import random
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedpriv.protocol.messages import Checkpoint, unpack_checkpoints
from fedpriv.silo import chain, fingerprint, rows, shard
from fedpriv.silo.admission import Charge
from fedpriv.silo.backup import back_up_ledgers, restore_ledgers
from fedpriv.silo.guards import end_run
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import read_policy
from fedpriv.silo.rows import read_header
from fedpriv.silo.shard import Shard, key_check
from tests.attacks.guards import guard_for, random_records, scenario, write_policy, zeros
from tests.silo.guarded import guard_of
from tests.silo.unkeyed import begin_unkeyed, candidates_in, copied, stolen

TRIALS = 20
STOLEN = ["backup", "ledger", "both"]


def candidates() -> list[Shard]:
    """What the records can be: the last has one of two labels."""
    images, labels = random_records()
    return [Shard(images, np.append(labels[:-1], label)) for label in (0, 1)]


def folds(ledger: Path, digest: bytes) -> Iterator[bytes]:
    """All heads of a stolen ledger's chain, were it begun for records with this digest."""
    database = sqlite3.connect(ledger)
    entries, heads = rows._collect_entries(database, keyless=True)
    about = read_header(database)
    database.close()
    head = chain.first_head(about.original_name, digest)
    yield head
    for number in range(1, about.commit.number + 1):
        if number in heads:
            yield chain.next_head(head, number, [heads[number][0]])
        head = chain.next_head(head, number, entries[number])
        yield head


def pointed_out(files: Iterable[Path], possible: list[Shard], remembered: Iterable[Checkpoint] = ()) -> list[int]:
    """The candidates that what was stolen agrees with: by a digest, by a head of the chain, or by a key in it."""
    contents = [path.read_bytes() for path in files]
    everything = b"".join([*contents, *(told.head for told in remembered)])
    ledgers = [path for path in files if path.read_bytes().startswith(b"SQLite")]
    windows = {content[at : at + 32] for content in contents for at in range(len(content) - 31)}
    keys = [b"", bytes(32), *(each for each in windows if key_check(each) in everything)]
    found = []
    for number, each in enumerate(possible):
        tried = [each.content_digest, *(each.fingerprint(key)[32:] for key in keys)]
        tried += [head for ledger in ledgers for head in folds(ledger, each.content_digest)]
        if any(value in everything for value in tried):
            found.append(number)
    return found


def theft(folder: Path, truth: Shard, what: str, *, run: bool = True) -> list[Path]:
    """What is stolen of a silo with these records, after a run that is over."""
    guard = guard_for(folder, truth.images, truth.labels)
    for t in range(1, 9) if run else ():
        guard.answer("run", scenario(), t, zeros())
    guard._ledger.close()
    back_up_ledgers(folder / "silo-0.toml", folder / "kept")
    own = {"backup": ["kept/ledger-0.sqlite"], "ledger": ["ledger-0.sqlite", "ledger-0.sqlite.mark"]}
    own["both"] = own["backup"] + own["ledger"]
    own["whole disk"] = [*own["both"], "shard-0.npz.key"]
    return [folder / name for name in own[what]]


@pytest.mark.every(3)
@pytest.mark.parametrize("what", STOLEN)
def test_guarantee_a_stolen_ledger_or_backup_cannot_confirm_a_guess_of_a_record(tmp_path: Path, what: str) -> None:
    """Gains: a record, with one hash a guess; 20 of 20 where μ = 0.5 permits 60 %.  Without a hint: a coin."""
    possible, coin = candidates(), random.Random(0)
    for trial in range(TRIALS):
        truth = coin.randrange(2)
        files = theft(tmp_path / str(trial), possible[truth], what, run=trial == 0)
        assert pointed_out(files, possible) == []


@pytest.mark.every(3)
@pytest.mark.parametrize("what", STOLEN)
def test_the_guessing_attack_identifies_every_record_from_a_ledger_of_fedpriv_0_3_0(
    tmp_path: Path, what: str
) -> None:
    """What the attack above would find: the digest without a key, and every head that follows from it."""
    possible, coin = candidates(), random.Random(0)
    for trial in range(TRIALS):
        folder, truth = tmp_path / str(trial), coin.randrange(2)
        policy = read_policy(write_policy(folder, possible[truth].images, possible[truth].labels))
        begin_unkeyed(policy.ledger, policy.mark_path, possible[truth])
        assert pointed_out([policy.ledger], possible) == [truth]
    run = copied(tmp_path / "run")
    own = {"backup": [run / "backup" / "ledger.sqlite"], "ledger": [run / "ledger.sqlite"]}
    for path in own["backup"] + own["ledger"] if what == "both" else own[what]:
        with sqlite3.connect(path) as database:
            database.execute("UPDATE about SET shard = zeroblob(32)")
        database.close()
        assert pointed_out([path], candidates_in(run)) == [1], "the chain alone says it"


def test_the_guessing_attack_succeeds_when_the_record_key_is_stolen_too(tmp_path: Path) -> None:
    """The stated exception, and that the attack uses a key where it is given one."""
    possible = candidates()
    for truth, each in enumerate(possible):
        files = theft(tmp_path / str(truth), each, "whole disk", run=False)
        assert pointed_out(files, possible) == [truth]


def test_two_candidate_records_leave_the_same_bytes_except_for_keyed_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HMAC under a key that nobody has is a draw: with one draw ledger, mark and backup are the same bytes."""
    drawn = SimpleNamespace(digest=lambda _, message, __: hashlib.sha256(message[:15]).digest())
    monkeypatch.setattr(shard, "hmac", drawn)
    monkeypatch.setattr(fingerprint.secrets, "token_hex", lambda count: "0" * 2 * count)
    left = []
    for truth, each in enumerate(candidates()):
        files = theft(tmp_path / str(truth), each, "both", run=False)
        left.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
    assert left[0] == left[1]


def test_a_converted_ledger_and_old_checkpoints_confirm_no_guess_once_the_first_run_has_ended(
    tmp_path: Path,
) -> None:
    """Gains: the record, from one head of before and the stolen chain, with the seal of the only run as it was."""
    folder = copied(tmp_path / "silo")
    possible, policy = candidates_in(folder), read_policy(folder / "policy.toml")
    for path in stolen(folder):
        path.unlink()
    begin_unkeyed(policy.ledger, policy.mark_path, possible[1])
    ledger = SiloLedger(policy.ledger, policy.mark_path)
    with ledger.lock():
        with ledger.transaction():
            ledger.open_run("first", Charge((folder / "scenario.json").read_text(), 0.1, 0.0), bytes(range(32)))
        with ledger.transaction():
            ledger.record_query("first", 1, bytes(32))
        with ledger.transaction():
            ledger.record_reply("first", 1, b"reply", b"state")
    remembered = [ledger.checkpoint("first", 1)]
    ledger.close()
    assert pointed_out(stolen(folder), possible, remembered) == [1]
    guard_of(folder / "policy.toml")._ledger.close()
    end_run(folder / "policy.toml", "first")
    assert pointed_out(stolen(folder), possible, remembered) == []


@pytest.mark.parametrize("how", ["its ledger", "its backup"])
def test_checkpoints_of_a_converted_ledger_confirm_no_guess_of_a_record(tmp_path: Path, how: str) -> None:
    """Gains: the record again, from heads that a coordinator keeps, or a certificate has, and the stolen chain.

    A head of before follows from the digest and from the rows: those of runs that are over are no more what it
    was made of.
    """
    folder = copied(tmp_path / "silo")
    possible, packed = candidates_in(folder), (folder / "commits").read_bytes()
    remembered = [unpack_checkpoints(packed[at : at + 56])[0] for at in range(0, len(packed), 56)]
    bare = copied(tmp_path / "bare") / "ledger.sqlite"
    with sqlite3.connect(bare) as database:
        database.execute("UPDATE about SET shard = zeroblob(32), head = zeroblob(32)")
        database.execute("UPDATE answers SET head = zeroblob(32)")
    database.close()
    assert pointed_out([bare], possible) == []
    assert pointed_out([bare], possible, remembered) == [1], "what a server remembers is enough"
    if how == "its backup":
        (folder / "ledger.sqlite").unlink()
        list(restore_ledgers(folder / "policy.toml", folder / "backup"))
    guard_of(folder / "policy.toml")._ledger.close()
    back_up_ledgers(folder / "policy.toml", tmp_path / "new")
    left = [*stolen(folder), tmp_path / "new" / "ledger.sqlite"]
    assert pointed_out(left, possible, remembered) == []
