"""Ledgers that are lost and come back from a backup, and servers that remember more than a ledger says."""

import math
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.protocol.messages import (
    MAX_CHECKPOINT_BYTES,
    MAX_CHECKPOINTS,
    Checkpoint,
    unpack_checkpoints,
    update_checkpoints,
)
from fedpriv.silo.backup import back_up_ledgers, restore_ledgers
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import format_status
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.silo.charged import charged
from tests.silo.guarded import guard_of

LEDGER = "ledger-0.sqlite"


def ask(guard: Guard, run: str, t: int, seen: bytes = b"", query: float = 0.0) -> torch.Tensor:
    return guard.answer(run, scenario(), t, zeros() + query, checkpoints=seen)


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
def silo(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "silo"))


def told(guard: Guard, run: str, t: int) -> bytes:
    return guard.checkpoint(run, scenario(), t)


def put_back(folder: Path) -> Callable[[], Guard]:
    """A snapshot of ledger and mark; what puts both back, as a restored machine does."""
    kept = folder.with_name("snapshot")
    shutil.copytree(folder, kept)

    def restored() -> Guard:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        return guard_of(folder / "silo-0.toml")

    return restored


def test_guarantee_ledger_and_mark_put_back_together_are_refused_where_a_server_remembers(silo: Path) -> None:
    """Gains: the budget since the snapshot once more; nothing on the silo's machine could tell."""
    snapshot, guard = put_back(silo), guard_of(silo / "silo-0.toml")
    ask(guard, "b", 4)
    seen = told(guard, "b", 4)
    again = snapshot()
    before = {path.name: path.read_bytes() for path in silo.iterdir()}
    for run, t in (("b", 4), ("b", 5), ("c", 1), ("a", 8)):
        with pytest.raises(RunError, match="has seen commit 24 of this silo's ledger, which is not in it"):
            ask(again, run, t, seen)
    assert {path.name: path.read_bytes() for path in silo.iterdir()} == before, "a hint changes nothing"
    assert torch.isfinite(ask(again, "b", 4)).all(), "for another server all is as it was"


def test_guarantee_a_ledger_that_was_put_back_and_went_on_is_refused_too(silo: Path) -> None:
    """As many commits as the server remembers, and others."""
    snapshot, guard = put_back(silo), guard_of(silo / "silo-0.toml")
    ask(guard, "b", 4)
    seen = told(guard, "b", 4)
    again = snapshot()
    ask(again, "b", 4, query=1.0)
    with pytest.raises(RunError, match="which is not in it"):
        ask(again, "b", 5, seen)
    same = snapshot()
    assert torch.equal(ask(same, "b", 4), ask(guard_of(silo / "silo-0.toml"), "b", 4))
    assert torch.isfinite(ask(same, "b", 5, seen)).all(), "asked the same, it is the same ledger again"


def test_what_a_server_remembers_of_before_and_of_other_ledgers_is_no_reason_to_refuse(silo: Path) -> None:
    guard = guard_of(silo / "silo-0.toml")
    others = [
        Checkpoint(f"{number:032x}", 2**64 - 1, bytes(32)).wire_bytes for number in range(MAX_CHECKPOINTS - 1)
    ]
    for run, t in (("a", 1), ("a", 8), ("b", 3)):
        assert torch.isfinite(ask(guard, "b", 3, b"".join(others) + told(guard, run, t))).all()
    assert torch.isfinite(ask(guard, "b", 4)).all(), "a first contact has nothing to remember"


@pytest.mark.parametrize("seen", [b"x", bytes(55), bytes(MAX_CHECKPOINT_BYTES + 56)], ids=len)
def test_what_is_no_commit_is_refused_and_changes_nothing(silo: Path, seen: bytes) -> None:
    guard = guard_of(silo / "silo-0.toml")
    with pytest.raises(RunError, match=r"^silo 0 refuses: .* bytes are no checkpoints$"):
        ask(guard, "b", 4, seen)
    (mine,) = unpack_checkpoints(told(guard, "b", 3))
    for number in (0, 2**63, 2**64 - 1):
        with pytest.raises(RunError, match="which is not in it"):
            ask(guard, "b", 4, mine._replace(number=number).wire_bytes)
    assert torch.isfinite(ask(guard, "b", 4)).all()


def test_guarantee_a_commit_that_is_told_is_no_function_of_records(tmp_path: Path) -> None:
    """With the key unknown a head is random: the same records and questions have others each time."""
    heads = []
    for number in range(2):
        guard = guard_for(tmp_path / str(number), *random_records(), budget=7.0)
        ask(guard, "a", 1)
        heads.append(unpack_checkpoints(guard.checkpoint("a", scenario(), 1))[0])
    assert heads[0].number == heads[1].number
    assert heads[0].head != heads[1].head


def test_a_server_remembers_the_last_commit_of_each_of_a_few_ledgers() -> None:
    known = b""
    for number in range(MAX_CHECKPOINTS + 2):
        known = update_checkpoints(known, Checkpoint(f"{number:032x}", 1, bytes(32)).wire_bytes)
    known = update_checkpoints(known, Checkpoint(f"{5:032x}", 9, bytes(32)).wire_bytes)
    assert [int(each.ledger_name, 16) for each in unpack_checkpoints(known)] == [2, 3, 4, 6, 7, 8, 9, 5]
    assert unpack_checkpoints(known)[-1].number == 9
    with pytest.raises(ValueError, match="values to unpack"):
        update_checkpoints(known, b"")


def command(*words: object) -> str:
    done = CliRunner().invoke(app, ["silo", *map(str, words)])
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_a_backup_has_every_charge_and_no_key_state_or_reply(silo: Path, tmp_path: Path) -> None:
    guard = guard_of(silo / "silo-0.toml")
    run = guard._ledger.find_run("b")
    assert run is not None
    assert run.key
    assert run.state
    assert command("backup", silo / "silo-0.toml", tmp_path / "kept") == f"copied {tmp_path / 'kept' / LEDGER}\n"
    copy = tmp_path / "kept" / LEDGER
    assert copy.stat().st_mode & 0o777 == 0o600
    raw = copy.read_bytes()
    assert run.key not in raw
    with sqlite3.connect(copy) as database:
        assert database.execute("SELECT run_id, mu FROM runs").fetchall() == [
            ("a", pytest.approx(4.0)),
            ("b", pytest.approx(4.0)),
        ]
        assert database.execute("SELECT DISTINCT key, state FROM runs").fetchall() == [(None, None)]
        assert database.execute("SELECT DISTINCT reply, blind FROM answers").fetchall() == [(None, None)]
    assert len(raw) < len(run.state)
    assert torch.isfinite(ask(guard, "b", 4)).all()
    shutil.copy(copy, silo / LEDGER)
    with pytest.raises(InputError, match="it is a backup"):
        guard_of(silo / "silo-0.toml")


def test_a_backup_of_the_last_commit_comes_back_as_it_was(silo: Path, tmp_path: Path) -> None:
    seen = told(guard_of(silo / "silo-0.toml"), "b", 3)
    back_up_ledgers(silo / "silo-0.toml", tmp_path / "kept")
    (silo / LEDGER).unlink()
    assert "its mark says that nothing was released since" in command(
        "restore", silo / "silo-0.toml", tmp_path / "kept"
    )
    guard = guard_of(silo / "silo-0.toml")
    assert charged(guard._ledger) == pytest.approx([4.0, 4.0])
    with pytest.raises(RunError, match="round 4: this run is over"):
        ask(guard, "b", 4, seen)
    assert torch.isfinite(ask(guard, "c", 1, seen)).all()
    with pytest.raises(RunError, match="the budget is 7"):
        ask(guard, "d", 1, seen)
    assert sorted(path.name for path in silo.iterdir() if "restored" in path.name) == []


@pytest.mark.parametrize("mark", ["newer", "gone", "damaged", "another's"])
def test_guarantee_a_backup_that_may_lack_a_release_costs_the_whole_budget(
    silo: Path, tmp_path: Path, mark: str
) -> None:
    """Gains: what was released after the backup once more, by a disk that failed."""
    policy, marked = silo / "silo-0.toml", silo / (LEDGER + ".mark")
    back_up_ledgers(policy, tmp_path / "kept")
    guard = guard_of(policy)
    ask(guard, "c", 1)
    seen = told(guard, "c", 1)
    guard._ledger.close()
    (silo / LEDGER).unlink()
    if mark == "gone":
        marked.unlink()
    elif mark == "damaged":
        marked.write_bytes(marked.read_bytes().replace(b"fedpriv", b"fedprjv"))
    elif mark == "another's":
        guard_for(tmp_path / "other", *random_records())._ledger.close()
        shutil.copy(tmp_path / "other" / (LEDGER + ".mark"), marked)
    assert "the whole budget of the policy is charged" in command("restore", policy, tmp_path / "kept")
    again = guard_of(policy)
    for run in ("c", "d", "b"):
        with pytest.raises(RunError, match=r"the budget is 7|this run is over"):
            ask(again, run, 4 if run == "b" else 1, seen)
    assert charged(again._ledger) == pytest.approx([4.0, 4.0, 7.0])
    assert math.hypot(4.0, 4.0, 7.0) > 7.0
    assert any("whatever was released since" in line for line in format_status(policy))
    policy.write_text(policy.read_text().replace("budget = 7.0", "budget = 20.0"))
    assert torch.isfinite(ask(guard_of(policy), "e", 1, seen)).all(), (
        "a person has decided, and it is a new ledger"
    )


def test_a_ledger_whose_mark_is_lost_begins_again_from_itself_at_the_whole_budget(
    silo: Path, tmp_path: Path
) -> None:
    (silo / (LEDGER + ".mark")).unlink()
    (tmp_path / "kept").mkdir()
    shutil.move(silo / LEDGER, tmp_path / "kept" / LEDGER)
    (line,) = restore_ledgers(silo / "silo-0.toml", tmp_path / "kept")
    assert "the whole budget of the policy is charged" in line
    with pytest.raises(RunError, match="the budget is 7"):
        ask(guard_of(silo / "silo-0.toml"), "c", 1)


def test_a_restore_is_refused_over_a_ledger_and_from_what_is_damaged(silo: Path, tmp_path: Path) -> None:
    policy, copy = silo / "silo-0.toml", tmp_path / "kept" / LEDGER
    with pytest.raises(InputError, match="is there; a backup knows less than a ledger"):
        list(restore_ledgers(policy, tmp_path / "kept"))
    back_up_ledgers(policy, tmp_path / "kept")
    (silo / LEDGER).unlink()
    content = copy.read_bytes()
    before = sorted(silo.iterdir())
    for damaged in (b"", content[:5000], content.replace(b"replace-one", b"replace-two"), bytes(9000)):
        copy.write_bytes(damaged)
        with pytest.raises(InputError) as refused:
            list(restore_ledgers(policy, tmp_path / "kept"))
        assert "\n" not in str(refused.value)
        assert sorted(silo.iterdir()) == before
    copy.unlink()
    with pytest.raises(InputError, match="cannot be restored: "):
        list(restore_ledgers(policy, tmp_path / "kept"))
