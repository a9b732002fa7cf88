"""Ledgers that are lost and come back from a backup, and servers that remember more than a ledger says."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.core.errors import InputError
from fedpriv.protocol.messages import (
    MAX_CHECKPOINT_BYTES,
    MAX_CHECKPOINTS,
    Checkpoint,
    unpack_checkpoints,
    update_checkpoints,
)  # fmt: skip
from fedpriv.silo.backup import back_up_ledgers, restore_ledgers
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import format_status
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.silo.charged import charged
from tests.silo.guarded import find_run, guard_of, refused

LEDGER = "ledger-0.sqlite"


def ask(guard: Guard, run: str, t: int, seen: bytes = b"", query: float = 0.0) -> torch.Tensor:
    return guard.answer(run, scenario(), t, zeros() + query, checkpoints=seen)


def refuse(guard: Guard, reason: str, run: str, t: int, seen: bytes = b"") -> None:
    refused(guard, reason, scenario(), t=t, run=run, checkpoints=seen)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A silo with a run that is over, one that is under way, and a budget for one more."""
    folder = tmp_path_factory.mktemp("written") / "silo"
    guard = guard_for(folder, *random_records(), budget=7.0)
    for t in range(1, 9):
        ask(guard, "a", t)
    for t in range(1, 4):
        ask(guard, "b", t)
    guard._ledger.close()
    return folder


@pytest.fixture
def policy(written: Path, tmp_path: Path) -> Path:
    """The policy of a copy of that silo, whose backups go to `kept`."""
    return Path(shutil.copytree(written, tmp_path / "silo")) / "silo-0.toml"


def lose_ledger(policy: Path) -> Path:
    """A backup of the silo, whose ledger is gone then."""
    back_up_ledgers(policy, kept := policy.parent.with_name("kept"))
    policy.with_name(LEDGER).unlink()
    return kept


def test_a_backup_into_the_folder_of_the_ledger_is_refused_and_leaves_the_ledger(policy: Path) -> None:
    before = policy.with_name(LEDGER).read_bytes()
    (link := policy.parent.with_name("link")).symlink_to(policy.parent)
    for folder in (policy.parent, link):
        with pytest.raises(InputError, match="is the ledger, which a backup would replace; give another folder"):
            back_up_ledgers(policy, folder)
    assert policy.with_name(LEDGER).read_bytes() == before


def test_a_backup_into_the_folder_of_another_silos_ledger_is_refused_and_leaves_that_ledger(
    policy: Path, tmp_path: Path
) -> None:
    """Gains: the memory of what the other silo released."""
    other = Path(shutil.copytree(policy.parent, tmp_path / "other"))
    before = (other / LEDGER).read_bytes()
    with pytest.raises(InputError, match="is a ledger and no backup, and is not replaced; give another folder"):
        back_up_ledgers(policy, other)
    assert (other / LEDGER).read_bytes() == before
    for _ in range(2):  # a backup is replaced by another one
        back_up_ledgers(policy, tmp_path / "kept")


def checkpoint(guard: Guard, run: str, t: int) -> bytes:
    return guard.checkpoint(run, scenario(), t)


def put_back(policy: Path) -> Callable[[], Guard]:
    """A snapshot of ledger and mark; what puts both back, as a restored machine does."""
    folder, snapshot = policy.parent, policy.parent.with_name("snapshot")
    shutil.copytree(folder, snapshot)

    def restored() -> Guard:
        shutil.rmtree(folder)
        shutil.copytree(snapshot, folder)
        return guard_of(policy)

    return restored


def test_guarantee_a_rollback_of_ledger_and_mark_is_refused_to_a_server_with_newer_checkpoints(
    policy: Path,
) -> None:
    """Gains: the budget since the snapshot once more; nothing on the silo's machine could tell."""
    snapshot, guard = put_back(policy), guard_of(policy)
    ask(guard, "b", 4)
    seen, again = checkpoint(guard, "b", 4), snapshot()
    before = {path.name: path.read_bytes() for path in policy.parent.iterdir()}
    for run, t in (("b", 4), ("b", 5), ("c", 1), ("a", 8)):
        refuse(again, "has seen commit 24 of this silo's ledger, which is not in it", run, t, seen)
    assert {path.name: path.read_bytes() for path in policy.parent.iterdir()} == before, "a hint changes nothing"
    assert torch.isfinite(ask(again, "b", 4)).all(), "for another server all is as it was"


def test_guarantee_a_rolled_back_ledger_with_different_later_commits_is_refused(policy: Path) -> None:
    """As many commits as the server remembers, and others."""
    snapshot, guard = put_back(policy), guard_of(policy)
    ask(guard, "b", 4)
    seen, again = checkpoint(guard, "b", 4), snapshot()
    ask(again, "b", 4, query=1.0)
    refuse(again, "which is not in it", "b", 5, seen)
    same = snapshot()
    assert torch.equal(ask(same, "b", 4), ask(guard_of(policy), "b", 4))
    assert torch.isfinite(ask(same, "b", 5, seen)).all(), "asked the same, it is the same ledger again"


def test_checkpoints_of_earlier_commits_and_of_other_ledgers_cause_no_refusal(policy: Path) -> None:
    guard = guard_of(policy)
    others = [Checkpoint(f"{n:032x}", 2**64 - 1, bytes(32)).wire_bytes for n in range(MAX_CHECKPOINTS - 1)]
    for run, t in (("a", 1), ("a", 8), ("b", 3)):
        assert torch.isfinite(ask(guard, "b", 3, b"".join(others) + checkpoint(guard, run, t))).all()
    assert torch.isfinite(ask(guard, "b", 4)).all(), "a first contact has nothing to remember"


@pytest.mark.parametrize("seen", [b"x", bytes(55), bytes(MAX_CHECKPOINT_BYTES + 56)], ids=len)
def test_malformed_or_unknown_checkpoints_are_refused_without_side_effects(policy: Path, seen: bytes) -> None:
    guard = guard_of(policy)
    refuse(guard, r"^silo 0 refuses: .* bytes are no checkpoints$", "b", 4, seen)
    (mine,) = unpack_checkpoints(checkpoint(guard, "b", 3))
    for number in (0, 2**63, 2**64 - 1):
        refuse(guard, "which is not in it", "b", 4, mine._replace(number=number).wire_bytes)
    assert torch.isfinite(ask(guard, "b", 4)).all()


def test_guarantee_checkpoints_of_the_same_records_and_queries_differ_between_ledgers(tmp_path: Path) -> None:
    """With the key unknown a head is random: the same records and questions have others each time."""
    guards = [guard_for(tmp_path / name, *random_records(), budget=7.0) for name in "ab"]
    for guard in guards:
        ask(guard, "a", 1)
    one, other = (unpack_checkpoints(checkpoint(guard, "a", 1))[0] for guard in guards)
    assert one.number == other.number
    assert one.head != other.head


def test_a_server_remembers_the_newest_checkpoint_of_a_bounded_number_of_ledgers() -> None:
    known = b""
    for number in range(MAX_CHECKPOINTS + 2):
        known = update_checkpoints(known, Checkpoint(f"{number:032x}", 1, bytes(32)).wire_bytes)
    known = update_checkpoints(known, Checkpoint(f"{5:032x}", 9, bytes(32)).wire_bytes)
    assert [int(checkpoint.ledger_name, 16) for checkpoint in unpack_checkpoints(known)] == [
        2,
        3,
        4,
        6,
        7,
        8,
        9,
        5,
    ]
    assert unpack_checkpoints(known)[-1].number == 9
    with pytest.raises(ValueError, match="values to unpack"):
        update_checkpoints(known, b"")


def command(*words: object) -> str:
    done = CliRunner().invoke(app, ["silo", *map(str, words)])
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_a_backup_has_every_charge_and_no_key_state_or_reply(policy: Path, tmp_path: Path) -> None:
    guard = guard_of(policy)
    run, copy = find_run(guard, "b"), tmp_path / "kept" / LEDGER
    assert run.key
    assert run.state
    assert command("backup", policy, tmp_path / "kept") == f"copied {copy}\n"
    assert copy.stat().st_mode & 0o777 == 0o600
    raw = copy.read_bytes()
    assert run.key not in raw
    assert len(raw) < len(run.state)
    with sqlite3.connect(copy) as database:
        charges = [("a", pytest.approx(4.0)), ("b", pytest.approx(4.0))]
        assert database.execute("SELECT run_id, mu FROM runs").fetchall() == charges
        assert database.execute("SELECT DISTINCT key, state FROM runs").fetchall() == [(None, None)]
        assert database.execute("SELECT DISTINCT reply, blind FROM answers").fetchall() == [(None, None)]
    assert torch.isfinite(ask(guard, "b", 4)).all()
    shutil.copy(copy, policy.with_name(LEDGER))
    with pytest.raises(InputError, match="it is a backup"):
        guard_of(policy)


def test_restoring_a_backup_of_the_last_commit_preserves_the_charges_and_ends_open_runs(policy: Path) -> None:
    seen = checkpoint(guard_of(policy), "b", 3)
    assert "its mark says that nothing was released since" in command("restore", policy, lose_ledger(policy))
    guard = guard_of(policy)
    assert charged(guard) == pytest.approx([4.0, 4.0])
    refuse(guard, "round 4: this run is over", "b", 4, seen)
    assert torch.isfinite(ask(guard, "c", 1, seen)).all()
    refuse(guard, "the budget is 7", "d", 1, seen)
    assert [path for path in policy.parent.iterdir() if "restored" in path.name] == []


@pytest.mark.parametrize("mark", ["newer", "gone", "damaged", "another's"])
def test_guarantee_restoring_a_backup_that_may_lack_a_release_charges_the_whole_budget(
    policy: Path, tmp_path: Path, mark: str
) -> None:
    """Gains: what was released after the backup once more, by a disk that failed."""
    ledger, marked = policy.with_name(LEDGER), policy.with_name(LEDGER + ".mark")
    back_up_ledgers(policy, tmp_path / "kept")
    guard = guard_of(policy)
    ask(guard, "c", 1)
    seen = checkpoint(guard, "c", 1)
    guard._ledger.close()
    ledger.unlink()
    if mark == "gone":
        marked.unlink()
    elif mark == "damaged":
        marked.write_bytes(marked.read_bytes().replace(b"fedpriv", b"fedprjv"))
    elif mark == "another's":
        guard_for(tmp_path / "other", *random_records())._ledger.close()
        shutil.copy(tmp_path / "other" / (LEDGER + ".mark"), marked)
    assert "the whole budget of the policy is charged" in command("restore", policy, tmp_path / "kept")
    again = guard_of(policy)
    for run, t in (("c", 1), ("d", 1), ("b", 4)):
        refuse(again, r"the budget is 7|this run is over", run, t, seen)
    assert charged(again) == pytest.approx([4.0, 4.0, 7.0])
    assert any("whatever was released since" in line for line in format_status(policy))
    policy.write_text(policy.read_text().replace("budget = 7.0", "budget = 20.0"))
    decided = guard_of(policy)
    assert torch.isfinite(ask(decided, "e", 1, seen)).all(), "a person has decided, and it is a new ledger"


def test_restoring_a_ledger_without_its_rollback_mark_charges_the_whole_budget(
    policy: Path, tmp_path: Path
) -> None:
    policy.with_name(LEDGER + ".mark").unlink()
    (tmp_path / "kept").mkdir()
    shutil.move(policy.with_name(LEDGER), tmp_path / "kept" / LEDGER)
    (line,) = restore_ledgers(policy, tmp_path / "kept")
    assert "the whole budget of the policy is charged" in line
    refuse(guard_of(policy), "the budget is 7", "c", 1)


def test_a_journal_of_the_lost_ledger_is_not_replayed_into_the_restored_ledger(
    policy: Path, tmp_path: Path
) -> None:
    guard = guard_of(policy)
    back_up_ledgers(policy, tmp_path / "kept")
    guard._ledger.close()
    ledger = policy.with_name(LEDGER)
    with closing(sqlite3.connect(ledger, isolation_level=None)) as writer:
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("CREATE TABLE filling (text)")
        writer.executemany("INSERT INTO filling VALUES (?)", [("x" * 4000,)] * 100)
        journal = policy.with_name(LEDGER + "-journal").read_bytes()  # as a killed process leaves it
        assert journal.startswith(bytes.fromhex("d9d505f920a163d7"))
        writer.execute("ROLLBACK")
    ledger.rename(tmp_path / "moved away")
    policy.with_name(LEDGER + "-journal").write_bytes(journal)
    command("restore", policy, tmp_path / "kept")
    assert format_status(policy)
    assert policy.with_name(LEDGER + "-journal.lost").read_bytes() == journal


def test_a_restore_is_refused_over_an_existing_ledger_and_from_a_damaged_backup(
    policy: Path, tmp_path: Path
) -> None:
    def refuse_restore(reason: str) -> None:
        with pytest.raises(InputError, match=reason) as refusal:
            list(restore_ledgers(policy, tmp_path / "kept"))
        assert "\n" not in str(refusal.value)

    refuse_restore("is there; a backup knows less than a ledger")
    copy = lose_ledger(policy) / LEDGER
    content, before = copy.read_bytes(), sorted(policy.parent.iterdir())
    for damaged in (b"", content[:5000], content.replace(b"replace-one", b"replace-two"), bytes(9000)):
        copy.write_bytes(damaged)
        refuse_restore(".")
        assert sorted(policy.parent.iterdir()) == before
    copy.unlink()
    refuse_restore("cannot be restored: ")
