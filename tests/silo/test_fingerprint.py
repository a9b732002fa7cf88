"""The key of a silo's records and their fingerprint: made, compared, lost, exchanged; ledgers of fedpriv 0.3.0."""

import json
import math
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.silo.admission import Charge
from fedpriv.silo.backup import back_up_ledgers, restore_ledgers
from fedpriv.silo.chain import MarkContent, RollbackMark
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.guards import begin_ledgers, end_run, format_status, open_guards
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import load_or_create_key, read_key
from tests.silo.charged import charged
from tests.silo.evaluated import guards_of, write_tested
from tests.silo.guarded import CELL, ZERO, cell_json, change_shard, guard_of, refused, write_silo
from tests.silo.unkeyed import begin_unkeyed, copied, stolen

POLICY, QUERY = "policy.toml", torch.zeros(14, dtype=torch.float64)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return copied(tmp_path / "silo")


def ask(guard: Guard, folder: Path, t: int, seen: bytes = b"", run: str = "under way") -> torch.Tensor:
    return guard.answer(run, (folder / "scenario.json").read_text(), t, QUERY, checkpoints=seen)


def refuse(guard: Guard, reason: str, folder: Path, t: int, seen: bytes = b"", run: str = "under way") -> None:
    refused(guard, reason, (folder / "scenario.json").read_text(), t, QUERY, run, checkpoints=seen)


def checkpoint(guard: Guard, folder: Path, t: int) -> bytes:
    return guard.checkpoint("under way", (folder / "scenario.json").read_text(), t)


def read_rows(ledger: Path, *statements: str) -> list[Any]:
    with closing(sqlite3.connect(ledger)) as database:
        return [row[0] for statement in statements for row in database.execute(statement)]


def secrets_of(ledger: Path) -> list[bytes]:
    """All that depends on the digest in a ledger of 0.3.0, and the seals that it follows from."""
    heads = "SELECT head FROM answers WHERE head IS NOT NULL"
    return read_rows(ledger, "SELECT shard FROM about", "SELECT head FROM about", heads, "SELECT seal FROM runs")


def in_files(values: list[bytes], files: list[Path]) -> list[Path]:
    contents = {path: path.read_bytes() for path in files}
    return [path for path, raw in contents.items() if any(v in raw or v.hex().encode() in raw for v in values)]


@pytest.mark.parametrize("underway", [True, False])
def test_guarantee_converting_a_ledger_of_fedpriv_0_3_0_erases_every_digest_of_the_records(
    old: Path, underway: bool
) -> None:
    if not underway:
        end_run(old / POLICY, "under way")
    before = secrets_of(old / "ledger.sqlite")
    assert len(before[0]) == 32
    assert in_files(before, stolen(old))
    rows = format_status(old / POLICY)
    guard = guard_of(old / POLICY)
    assert in_files(before, stolen(old)) == []
    assert len(guard._ledger.fingerprint) == 64
    assert format_status(old / POLICY) == rows
    assert (old / "own.csv.key").stat().st_mode & 0o777 == 0o600
    if underway:
        assert read_rows(old / "backup" / "ledger.sqlite", "PRAGMA user_version") == [102]
        assert torch.isfinite(ask(guard, old, 3)).all(), "the run goes on"
    guard._ledger.close()
    again = guard_of(old / POLICY)
    assert len(charged(again)) == 2
    assert torch.isfinite(ask(again, old, 1, run="new")).all()
    assert in_files(before, stolen(old)) == []


def test_a_round_answered_before_the_conversion_gets_the_same_bytes_afterwards(old: Path) -> None:
    statement = "SELECT reply FROM answers WHERE run_id = 'under way' AND t = 2"
    (reply,) = read_rows(old / "ledger.sqlite", statement)
    assert ask(guard_of(old / POLICY), old, 2).numpy().tobytes() == reply


def test_old_checkpoints_are_accepted_after_a_conversion_and_a_later_rollback_is_refused(old: Path) -> None:
    """A coordinator goes on with a converted ledger, and notices one that was put back to before."""
    snapshot = shutil.copytree(old, old.with_name("snapshot"))
    guard = guard_of(old / POLICY)
    commits = (old / "commits").read_bytes()[-8 * 56 :]
    assert torch.isfinite(ask(guard, old, 3, commits)).all()
    two, three = checkpoint(guard, old, 2), checkpoint(guard, old, 3)
    guard._ledger.close()
    shutil.rmtree(old)
    shutil.copytree(snapshot, old)
    shutil.copy(snapshot / "own.csv", old / "own.csv")
    guard = guard_of(old / POLICY)
    assert two[:16] == checkpoint(guard, old, 2)[:16], "converted again it has the same name"
    refuse(guard, "which is not in it", old, 3, three)


def test_a_ledger_rolled_back_before_its_conversion_is_refused(old: Path) -> None:
    """Gains: a budget again, from ledger and mark of a snapshot, put back in the moment of an upgrade."""
    snapshot, policy = shutil.copytree(old, old.with_name("snapshot")), read_policy(old / POLICY)
    ledger = SiloLedger(policy.ledger, policy.mark_path)
    with ledger.lock():
        with ledger.transaction():
            ledger.record_query("under way", 3, bytes(32))
        with ledger.transaction():
            ledger.record_reply("under way", 3, b"reply", b"state")
    seen = ledger.checkpoint("under way", 3).wire_bytes
    ledger.close()
    for path in stolen(old):
        path.unlink()
    for path in stolen(snapshot):
        shutil.copy2(path, old)
    refuse(guard_of(old / POLICY), "which is not in it", old, 3, seen)


def with_run(old: Path, slack: float, **augment: int) -> Guard:
    """A ledger of 0.3.0 with one more run, which is over, after its conversion."""
    policy, cell = read_policy(old / POLICY), json.loads((old / "scenario.json").read_text())
    cell["model"]["augment"] = augment or None
    ledger = SiloLedger(policy.ledger, policy.mark_path)
    with ledger.lock(), ledger.transaction():
        ledger.open_run("copies", Charge(json.dumps(cell, sort_keys=True), 0.1, slack), bytes(range(32)))
        ledger.end_run("copies")
    ledger.close()
    return guard_of(old / POLICY)


def test_guarantee_a_run_with_a_false_claim_of_fedpriv_0_3_0_is_recharged_as_infinite(old: Path) -> None:
    """Gains: runs beside one that 0.3.0 charged for a promise that its copies in a secret order did not keep."""
    guard = with_run(old, 1e-6, copies=2, shift=1)
    assert guard._ledger.charges("over")[-1].mu == math.inf
    refuse(guard, "with all others inf", old, 1, run="new")
    guard._ledger.close()
    assert len(guard_of(old / POLICY)._ledger.charges()) == 3


@pytest.mark.parametrize(("slack", "augment"), [(0.0, {"copies": 2, "shift": 1}), (1e-6, {})])
def test_a_run_with_a_valid_claim_of_fedpriv_0_3_0_costs_what_was_charged(
    old: Path, slack: float, augment: dict[str, int]
) -> None:
    """Copies in a public order, and a secret order without copies."""
    assert with_run(old, slack, **augment)._ledger.charges("over")[-1].mu == 0.1


def test_a_conversion_with_other_records_is_refused_and_changes_no_file(old: Path) -> None:
    rows = (old / "own.csv").read_text().splitlines()
    (old / "own.csv").write_text("\n".join([rows[0], *reversed(rows[1:])]) + "\n")
    before = {path: path.read_bytes() for path in stolen(old)}
    with pytest.raises(InputError, match="these are not the records, in the order"):
        guard_of(old / POLICY)
    assert {path: path.read_bytes() for path in before} == before
    assert not (old / "own.csv.key").exists()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", [1, 2])
def test_an_interrupted_ledger_conversion_is_completed_at_the_next_start(
    old: Path, which: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: silence for good from a power cut, beside one of the two writings of the mark."""
    honest, before, writings = RollbackMark.write, secrets_of(old / "ledger.sqlite"), count(1)

    def cut(mark: RollbackMark, reading: MarkContent) -> None:
        is_cut = next(writings) == which
        if not is_cut or when == "after":
            honest(mark, reading)
        if is_cut:
            raise OSError("no power")

    with monkeypatch.context() as patch:
        patch.setattr(RollbackMark, "write", cut)
        with pytest.raises(RunError, match="no power"):
            guard_of(old / POLICY)
    guard = guard_of(old / POLICY)
    assert torch.isfinite(ask(guard, old, 3)).all()
    assert in_files(before, stolen(old)) == []


def test_a_backup_of_0_3_0_is_restored_and_converted(old: Path) -> None:
    before = secrets_of(old / "backup" / "ledger.sqlite")
    (old / "ledger.sqlite").unlink()
    (line,) = restore_ledgers(old / POLICY, old / "backup")
    assert "nothing was released since" in line
    guard = guard_of(old / POLICY)
    assert len(charged(guard)) == 2
    refuse(guard, "this run is over", old, 3)
    assert torch.isfinite(ask(guard, old, 1, run="new")).all()
    assert in_files(before, stolen(old)) == []


def test_an_unconverted_ledger_of_0_3_0_can_be_listed_and_ended_but_not_backed_up(old: Path) -> None:
    """A backup of it would have the digest."""
    assert any("'under way'" in line for line in format_status(old / POLICY))
    with pytest.raises(InputError, match=r"has a digest of the records.*status POLICY --check") as refused:
        back_up_ledgers(old / POLICY, old / "new")
    assert "\n" not in str(refused.value)
    assert not (old / "new").exists()
    end_run(old / POLICY, "under way")
    done = CliRunner().invoke(app, ["silo", "status", str(old / POLICY), "--check"])
    assert done.exit_code == 0, done.exception
    back_up_ledgers(old / POLICY, old / "new")


def test_a_conversion_erases_the_digest_in_the_ledger_of_test_records(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    policy = read_policy(path)
    tests, shard = policy.test_policy, policy.load_shard()
    assert tests is not None
    assert shard.test is not None
    for place, records in ((policy, shard), (tests, shard.test)):
        begin_unkeyed(place.ledger, place.mark_path, records)
    open_guards(policy)
    for place, records in ((policy, shard), (tests, shard.test)):
        assert records.content_digest not in place.ledger.read_bytes()
        SiloLedger(place.ledger, place.mark_path).close()


def test_adding_evaluation_to_a_policy_later_reuses_the_key_of_the_records(tmp_path: Path) -> None:
    """Gains: a training guard that refuses for good, were another key made for the second ledger."""
    path = write_tested(tmp_path)
    text = path.read_text()
    path.write_text(text.partition("[evaluation]")[0])
    begin_ledgers(read_policy(path))
    key = (tmp_path / "shard-0.npz.key").read_bytes()
    path.write_text(text)
    (tmp_path / "shard-0.npz.key").rename(tmp_path / "away")
    with pytest.raises(InputError, match="there is no key of the records"):
        begin_ledgers(read_policy(path))
    (tmp_path / "away").rename(tmp_path / "shard-0.npz.key")
    begin_ledgers(read_policy(path))
    assert guards_of(path).tests is not None
    assert (tmp_path / "shard-0.npz.key").read_bytes() == key


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """What takes a key away, and makes something else in its place."""

    def replace(key: Path) -> None:
        key.unlink()
        make(key)

    return replace


def no_key(key: Path) -> None:
    key.unlink()


def another(key: Path) -> None:
    key.write_bytes(bytes(range(32)))


USELESS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_key": (no_key, "there is no key of the records, .*silo restore"),
    "empty": (lambda key: key.write_bytes(b""), "is no key of the records, which has 32 bytes, .*silo restore"),
    "longer": (lambda key: key.write_bytes(key.read_bytes() + b"\n"), "is no key of the records"),
    "shorter": (lambda key: key.write_bytes(key.read_bytes()[:31]), "is no key of the records"),
    "a_folder": (replaced(lambda key: key.mkdir(0o700)), "cannot be read as the key of the records|is no key"),
    "a_pipe": (replaced(lambda key: os.mkfifo(key, 0o600)), "is no key of the records"),
    "a_link_to_nothing": (replaced(lambda key: key.symlink_to("nothing")), "there is no key of the records"),
    "readable": (lambda key: key.chmod(0o644), "others can read this key of the records; chmod 600"),
    "writable": (lambda key: key.chmod(0o620), "mode 0620, not only its owner may write it"),
    "another": (another, "is not the key that .* was begun with, .*silo restore"),
}


@pytest.mark.parametrize(("damage", "reason"), USELESS.values(), ids=USELESS)
def test_guarantee_a_missing_damaged_or_foreign_record_key_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    """Gains: other records under a ledger, which nobody could tell from those that were charged for."""
    path, key = write_silo(tmp_path), tmp_path / "shard-0.npz.key"
    guard_of(path)._ledger.close()
    damage(key)
    before = sorted(tmp_path.iterdir())
    for _ in range(2):
        with pytest.raises(InputError, match=reason) as refusal:
            open_guard(read_policy(path))
        assert "\n" not in str(refusal.value)
        assert str(key) in str(refusal.value)
    with pytest.raises(InputError):
        begin_ledgers(read_policy(path))
    assert sorted(tmp_path.iterdir()) == before


def reverse_labels(folder: Path) -> None:
    change_shard(folder, labels=np.load(folder / "shard-0.npz")["labels"][::-1])


@pytest.mark.parametrize("damage", [no_key, another])
@pytest.mark.parametrize("change", [False, True])
def test_guarantee_restoring_a_ledger_without_its_record_key_charges_the_whole_budget(
    tmp_path: Path, damage: Callable[[Path], None], change: bool
) -> None:
    """Gains: other records under an old ledger, or the old ones at the price of new ones."""
    path, ledger = write_silo(tmp_path / "silo"), tmp_path / "silo" / "ledger-0.sqlite"
    guard = guard_of(path)
    guard.answer("run", CELL, 1, ZERO)
    guard._ledger.close()
    back_up_ledgers(path, tmp_path / "kept")
    damage(tmp_path / "silo" / "shard-0.npz.key")
    ledger.unlink()
    if change:
        reverse_labels(tmp_path / "silo")
    (line,) = restore_ledgers(path, tmp_path / "kept")
    assert "key" in line
    assert "the whole budget of the policy is charged" in line
    again = guard_of(path)
    assert charged(again) == pytest.approx([4.0, 4.0])
    refused(again, "the budget is 4", run="another")
    refused(again, "this run is over", t=2)


def test_a_backup_restores_with_the_same_records_and_key_and_other_records_are_refused(
    tmp_path: Path,
) -> None:
    path, ledger = write_silo(tmp_path / "silo"), tmp_path / "silo" / "ledger-0.sqlite"
    guard_of(path)._ledger.close()
    back_up_ledgers(path, tmp_path / "kept")
    ledger.unlink()
    (line,) = restore_ledgers(path, tmp_path / "kept")
    assert "nothing was released since" in line
    guard_of(path)._ledger.close()
    reverse_labels(tmp_path / "silo")
    for _ in range(2):
        with pytest.raises(InputError, match="these are not the records, in the order"):
            guard_of(path)
        ledger.unlink()
        list(restore_ledgers(path, tmp_path / "kept"))


def test_restoring_the_backup_of_another_silo_charges_the_whole_budget(tmp_path: Path) -> None:
    """Gains: a ledger in which nothing was spent."""
    paths = [write_silo(tmp_path / str(number), number) for number in (0, 1)]
    guard_of(paths[0]).answer("run", CELL, 1, ZERO)
    guard_of(paths[1])._ledger.close()
    back_up_ledgers(paths[1], tmp_path / "kept")
    (tmp_path / "kept" / "ledger-1.sqlite").rename(tmp_path / "kept" / "ledger-0.sqlite")
    (tmp_path / "0" / "ledger-0.sqlite").unlink()
    (line,) = restore_ledgers(paths[0], tmp_path / "kept")
    assert "the whole budget of the policy is charged" in line
    refused(guard_of(paths[0]), "the budget is 4", run="another")


def test_two_policies_of_one_shard_share_one_record_key_and_fingerprint(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    other = tmp_path / "other.toml"
    other.write_text(path.read_text().replace("ledger-0", "ledger-other"))
    other.chmod(0o600)
    first, second = guard_of(path), guard_of(other)
    assert first._ledger.fingerprint == second._ledger.fingerprint
    assert len(list(tmp_path.glob("*.key"))) == 1


def test_concurrent_first_starts_agree_on_one_record_key(tmp_path: Path) -> None:
    gate = threading.Barrier(8)

    def make(_: int) -> bytes:
        gate.wait()
        return load_or_create_key(tmp_path / "shard.npz.key")

    with ThreadPoolExecutor(8) as starts:
        assert set(starts.map(make, range(8))) == {read_key(tmp_path / "shard.npz.key")}
    assert [path.name for path in tmp_path.iterdir()] == ["shard.npz.key"]


def test_two_guards_converting_one_ledger_concurrently_both_answer(old: Path) -> None:
    ledgers, policy = [SiloLedger(old / "ledger.sqlite") for _ in range(2)], read_policy(old / POLICY)
    first, second = (Guard(policy, ledger, policy.load_shard()) for ledger in ledgers)
    assert torch.equal(ask(first, old, 3), ask(second, old, 3))
    assert torch.isfinite(ask(second, old, 4)).all()
    assert torch.isfinite(ask(first, old, 5)).all()


def test_rows_that_changed_under_a_guard_are_not_converted(old: Path) -> None:
    """Gains: a run at half of its price, under a seal that the conversion itself would make."""
    ledger, policy = SiloLedger(old / "ledger.sqlite"), read_policy(old / POLICY)
    with closing(sqlite3.connect(old / "ledger.sqlite")) as database, database:
        database.execute("UPDATE runs SET mu = mu / 2")
    with pytest.raises(InputError, match="its file is not what was written"):
        Guard(policy, ledger, policy.load_shard())
    assert not ledger.is_keyed()


def test_a_guard_that_waits_while_another_converts_the_ledger_goes_on_with_it(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, policy = SiloLedger(old / "ledger.sqlite"), read_policy(old / POLICY)
    lock = ledger.lock

    @contextmanager
    def late_lock() -> Iterator[None]:
        Guard(policy, SiloLedger(old / "ledger.sqlite"), policy.load_shard())
        with lock():
            yield

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "lock", late_lock)
        waiting = Guard(policy, ledger, policy.load_shard())
    assert torch.isfinite(ask(waiting, old, 3)).all()


def test_a_process_holding_the_ledger_open_across_its_conversion_can_end_a_run(old: Path) -> None:
    before = SiloLedger(old / "ledger.sqlite")
    guard = guard_of(old / POLICY)
    with before.lock(), before.transaction():
        before.end_run("under way")
    assert torch.isfinite(ask(guard, old, 1, run="new")).all()
    assert torch.isfinite(ask(guard_of(old / POLICY), old, 2, run="new")).all()


def test_a_failure_to_create_the_record_key_names_a_command_that_creates_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose records are mounted read-only."""

    path = write_silo(tmp_path)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(30, "Read-only file system")))
    remedy = r"Read-only file system.*umask 077; head -c 32 /dev/urandom > "
    with pytest.raises(InputError, match=remedy) as refusal:
        begin_ledgers(read_policy(path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["shard-0.npz", "silo-0.toml"]
    assert os.system(str(refusal.value).partition("owner: ")[2]) == 0
    begin_ledgers(read_policy(path))
    assert stat.S_IMODE((tmp_path / "shard-0.npz.key").stat().st_mode) == 0o600


def test_backups_and_ledgers_do_not_contain_the_record_key(tmp_path: Path) -> None:
    path = write_silo(tmp_path / "silo")
    guard_of(path)._ledger.close()
    back_up_ledgers(path, tmp_path / "kept")
    key = (tmp_path / "silo" / "shard-0.npz.key").read_bytes()
    copies = list((tmp_path / "kept").iterdir())
    assert [file.name for file in copies] == ["ledger-0.sqlite"]
    assert not [file for file in (*copies, *path.parent.glob("ledger-0*")) if key in file.read_bytes()]


def test_privacy_spent_elsewhere_is_charged_and_attributed_in_the_ledger(tmp_path: Path) -> None:
    """Was: a ledger began with its whole budget, whatever other programs had released of the records."""
    path = write_silo(tmp_path, budget=5.0)
    options = ["--spent", "3.5", "--said-by", "J. Doe, from the report of 2025"]
    done = CliRunner().invoke(app, ["silo", "init", str(path), *options])
    assert done.exit_code == 0, done.output
    status = format_status(path)
    assert "budget mu = 5, spent 3.5 by 1 run" in status[1]
    assert status[2].startswith("'said by J. Doe, from the report of 2025': mu = 3.5, 0 rounds answered, over")
    assert "other programs" in status[2]
    guard = open_guard(read_policy(path))
    refused(guard, r"with all others 5\.31.*; the budget is 5", CELL)
    cheap = cell_json(privacy={"relation": "replace-one", "mu": 3.5})
    guard.answer("run", cheap, 1, ZERO)
    guard._ledger.close()
    (tmp_path / "backup").mkdir()
    back_up_ledgers(path, tmp_path / "backup")
    assert "'said by J. Doe, from the report of 2025': mu = 3.5" in "".join(format_status(path))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--spent", "1"], "give --said-by"),
        (["--spent-slack", "1e-6"], "give --spent, too"),
        (["--said-by", "me"], "give --spent, too"),
        (["--spent", "1", "--said-by", " "], "give --said-by"),
        (["--spent", "1", "--said-by", "J. M\udcfcller"], "in one line of text"),
        (["--spent", "nan", "--said-by", "me"], "expected a mu above 0"),
        (["--spent", "0", "--said-by", "me"], "expected a mu above 0"),
        (["--spent", "1", "--spent-slack", "1", "--said-by", "me"], "expected a mu above 0"),
    ],
)
def test_an_invalid_or_unattributed_amount_of_privacy_spent_elsewhere_is_refused(
    tmp_path: Path, options: list[str], line: str
) -> None:
    path = write_silo(tmp_path)
    error = CliRunner().invoke(app, ["silo", "init", str(path), *options]).exception
    assert isinstance(error, InputError)
    assert line in str(error)
    assert not (tmp_path / "ledger-0.sqlite").exists()


def test_guarantee_unbounded_prior_spending_exhausts_the_budget_and_cannot_be_amended_later(
    tmp_path: Path,
) -> None:
    path = write_silo(tmp_path)
    begin_ledgers(read_policy(path), (math.inf, 0.0, "nobody knows"))
    with pytest.raises(InputError, match="has been begun, and nothing is entered in it"):
        begin_ledgers(read_policy(path), (1e-9, 0.0, "me"))
    (tmp_path / "ledger-0.sqlite").rename(tmp_path / "elsewhere")  # its mark stays
    with pytest.raises(InputError, match="has been begun, and nothing is entered in it"):
        begin_ledgers(read_policy(path), (1e-9, 0.0, "me"))
    (tmp_path / "elsewhere").rename(tmp_path / "ledger-0.sqlite")
    assert "spent inf by 1 run, left for one more 0" in format_status(path)[1]
    refused(open_guard(read_policy(path)), "with all others inf", CELL)


@pytest.mark.parametrize("step", ["mark", "rename"])
def test_guarantee_a_ledger_whose_beginning_failed_is_begun_again_and_no_lost_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    policy, rename = read_policy(write_silo(tmp_path)), Path.replace
    policy.ledger.unlink(missing_ok=True)

    def replace(path: Path, target: Path) -> Path:
        if path.name.endswith(".begun") if step == "rename" else Path(target).name.endswith(".mark"):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(InputError, match=r"cannot be made a ledger: .*No space left"):
        begin_ledgers(policy)
    assert not policy.ledger.exists()
    monkeypatch.undo()
    draft = policy.ledger.with_name(policy.ledger.name + ".begun")
    left = draft.read_bytes()
    assert begin_ledgers(policy) == [policy]
    draft.write_bytes(left)  # a draft of another beginning makes no lost ledger one that was never begun
    policy.ledger.unlink()
    with pytest.raises(InputError, match="a ledger is begun once"):
        begin_ledgers(policy)


def test_guarantee_a_ledger_whose_beginning_failed_twice_is_begun_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First behind the mark, before its draft becomes the ledger; then behind a new draft, before its mark."""
    policy, rename = read_policy(write_silo(tmp_path)), Path.replace
    for suffixes in ((".begun", ".sqlite"), ("", ".mark")):

        def replace(path: Path, target: Path, suffixes: tuple[str, str] = suffixes) -> Path:
            if path.name.endswith(suffixes[0]) and Path(target).name.endswith(suffixes[1]):
                raise OSError(28, "No space left on device")
            return rename(path, target)

        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises(InputError, match="cannot be made a ledger"):
            begin_ledgers(policy)
        monkeypatch.undo()
    assert begin_ledgers(policy) == [policy]


def test_of_several_threads_one_begins_a_ledger(tmp_path: Path) -> None:
    policy = read_policy(write_silo(tmp_path))

    def begin(_: int) -> str:
        try:
            return f"begun {len(begin_ledgers(policy))}"
        except InputError as error:
            return "refused" if "a ledger is begun once" in str(error) else str(error)

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(begin, range(4))) == ["begun 1", "refused", "refused", "refused"]
    guard_of(tmp_path / "silo-0.toml")._ledger.close()
