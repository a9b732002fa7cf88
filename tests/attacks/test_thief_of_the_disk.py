"""Somebody who can copy a silo's disk, or put an older copy back, and a server that asks again."""

import itertools
import math
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fedpriv.addons.services.deployment import write_silos
from fedpriv.core.errors import InputError, RunError
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.chain import MarkContent, RollbackMark
from fedpriv.silo.guards import begin_ledgers, end_run, format_status
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import read_policy
from fedpriv.silo.silo import Silo, unpack_state
from tests.attacks.guards import KEPT_STATE, cards, guard_for, random_records, scenario, zeros
from tests.conftest import small_tree
from tests.parts import in_parts
from tests.silo.charged import charged
from tests.silo.guarded import find_run, guard_of, refused
from tests.silo.test_masks import p_value

LEDGER = "ledger-0.sqlite"


def copied(folder: Path) -> Callable[[], None]:
    """A copy of all that is on the silo's disk; what puts it back."""
    kept = folder.with_name(folder.name + ".copy")
    shutil.copytree(folder, kept)

    def put_back() -> None:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)

    return put_back


@pytest.mark.parametrize("name", KEPT_STATE)
def test_a_changed_query_after_a_rollback_gets_fresh_noise_in_this_and_the_next_round(
    tmp_path: Path, name: str
) -> None:
    """Gains: the exact difference of two sums, at no price (finding 26); the disk is put back, mark included.

    What two answers differ by has the noise of both: its standard deviation is off by a quarter with probability
    below 1e-100.  The records' part of it is far below.
    """
    folder, cell = tmp_path / "silo", scenario(**KEPT_STATE[name])
    guard = guard_for(folder, *random_records(), budget=100.0)
    guard.answer("run", cell, 1, zeros())
    put_back = copied(folder)
    once = [guard.answer("run", cell, t, zeros()) for t in (2, 3)]
    put_back()
    again = guard_of(folder / "silo-0.toml")
    twice = [again.answer("run", cell, 2, zeros() + 1e-3), again.answer("run", cell, 3, zeros())]
    admitted = again._admission.admit(again._admission.canonicalize(cell))
    fresh = float(admitted.plan.noise.std_of(0)) * admitted.plan.mechanism.fresh_std
    for first, second in zip(once, twice, strict=True):
        assert float((first - second).std()) > 0.75 * math.sqrt(2.0) * fresh
    put_back()
    same = guard_of(folder / "silo-0.toml")
    assert torch.equal(same.answer("run", cell, 2, zeros()), once[0])  # asked the same, it says the same


def test_a_changed_query_after_a_rollback_gets_a_different_mask(tmp_path: Path) -> None:
    """Gains: the difference of two messages under one mask.  χ² of bytes at level 1e-6; 0 without the chain."""
    folder, cell = tmp_path / "silo", scenario("secure-aggregation")
    guard = guard_for(folder, *random_records(), trust="secure-aggregation", silos=3)
    keys = cards(guard.public_key("run", cell))
    put_back = copied(folder)
    once = [guard.answer("run", cell, t, zeros(), keys).numpy() for t in (1, 2)]
    put_back()
    again = guard_of(folder / "silo-0.toml")
    twice = [again.answer("run", cell, t, zeros() + (t == 1), keys).numpy() for t in (1, 2)]
    for first, second in zip(once, twice, strict=True):
        assert p_value(first - second) > 1e-6


@pytest.mark.parametrize("what", ["the ledger", "the mark"])
def test_a_rollback_of_either_ledger_or_mark_is_detected(tmp_path: Path, what: str) -> None:
    """Gains: a budget that is whole again, and runs that start anew (finding 26)."""
    folder = tmp_path / "silo"
    guard = guard_for(folder, *random_records())
    name = LEDGER if what == "the ledger" else LEDGER + ".mark"
    for t in (1, 2):
        shutil.copy(folder / name, tmp_path / "older")
        guard.answer("run", scenario(), t, zeros())
    shutil.copy(tmp_path / "older", folder / name)
    remedy = "put the newest ledger back" if what == "the ledger" else "put the newest mark back"
    with pytest.raises(InputError, match=f"an older copy that was put back.*{remedy}, or move"):
        guard_of(folder / "silo-0.toml")
    refused(guard, "older copy", scenario(), 3, error=InputError)


def test_a_crash_between_rollback_mark_and_ledger_commit_is_not_taken_for_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: silence for good from a power cut.  Each of the moments at which the disk can stop is tried."""
    path = tmp_path / "silo" / "silo-0.toml"
    guard_for(tmp_path / "silo", *random_records())
    honest = RollbackMark.write
    for stop in range(6):
        calls = [0]

        def cut(self: RollbackMark, reading: MarkContent, calls: list[int] = calls, stop: int = stop) -> None:
            calls[0] += 1
            if calls[0] == stop:
                raise OSError("power cut")
            honest(self, reading)

        with monkeypatch.context() as patched:
            patched.setattr(RollbackMark, "write", cut)
            with pytest.raises(RunError, match="nothing is released") if stop in range(1, 5) else nullcontext():
                guard_of(path).answer("run", scenario(), stop + 1, zeros())
        assert torch.isfinite(guard_of(path).answer("run", scenario(), stop + 1, zeros())).all()


@pytest.mark.parametrize("how", ["deleted", "emptied", "another silo's", "mark deleted", "begun again"])
def test_a_lost_or_replaced_ledger_is_refused_and_not_recreated(tmp_path: Path, how: str) -> None:
    """Gains: a fresh budget, by `rm ledger.sqlite` (finding 32)."""
    folder = tmp_path / "silo"
    guard_for(folder, *random_records()).answer("run", scenario(), 1, zeros())
    policy, ledger = read_policy(folder / "silo-0.toml"), folder / LEDGER
    if how == "deleted":
        ledger.unlink()
    elif how == "emptied":
        ledger.write_bytes(b"")
    elif how == "another silo's":
        guard_for(tmp_path / "other", *random_records())
        shutil.copy(tmp_path / "other" / LEDGER, ledger)
    elif how == "mark deleted":
        policy.mark_path.unlink()
    else:
        for _ in range(2):
            with pytest.raises(InputError, match="a ledger is begun once"):
                begin_ledgers(policy)
            ledger.unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"no ledger is there|is not the ledger that|no such mark"):
        SiloLedger(policy.ledger, policy.mark_path)


@pytest.mark.parametrize("how", ["swapped", "cut", "reordered", "one label"])
def test_a_changed_shard_is_refused_by_the_ledger(tmp_path: Path, how: str) -> None:
    """Gains: records in rounds that others were charged for, or one record in many rounds (finding 32)."""
    images, labels = random_records()
    guard_for(tmp_path, images, labels).answer("run", scenario(), 1, zeros())
    changed = {
        "swapped": random_records(seed=5),
        "cut": (images[1:], labels[1:]),
        "reordered": (images[::-1], labels[::-1]),
        "one label": (images, np.concatenate([labels[:-1], [(labels[-1] + 1) % 10]])),
    }[how]
    with pytest.raises(InputError, match="these are not the records, in the order"):
        guard_for(tmp_path, *changed)


def pieces(vector: torch.Tensor) -> list[bytes]:
    """Parts of a vector that would be found in a file that has it on pages of any size."""
    content = vector.numpy().tobytes()
    found = [content[start : start + 48] for start in range(480, len(content) - 48, 4800)]
    return [piece for piece in found if any(piece)]


WIPED = ["its last round", "an administrator", "a last round that fails"]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("name", "how"),
    in_parts(
        itertools.product(["tree", "fresh noise", "aligned differences, clipped in parts"], WIPED),
        [*((name, how) for name in ("tree", "fresh noise") for how in WIPED),
         ("aligned differences, clipped in parts", "a last round that fails")],
    ),
)  # fmt: skip
def test_keys_and_states_of_an_ended_run_are_erased_from_every_file(
    tmp_path: Path, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: the noise of every reply, from its key or from the exact sum that the state has (finding 33)."""
    cell = scenario(**KEPT_STATE[name])
    guard = guard_for(tmp_path, *random_records(), budget=100.0)
    guard.answer("run", cell, 1, zeros())
    key = find_run(guard).key
    assert key is not None
    secret: list[bytes] = [key]
    for t in range(2, 8):
        guard.answer("run", cell, t, zeros())
        packed = find_run(guard).state
        assert packed is not None
        state = unpack_state(packed, guard._loaded_silos["run"])
        for vector in (*state.accumulator, *state.mechanism_state):
            secret += pieces(vector)
    _, final = guard._loaded_silos["run"].answer(state, 8, zeros())
    raw = (tmp_path / LEDGER).read_bytes()
    assert key in raw
    assert sum(piece in raw for piece in secret) > 10  # they can be found while they are there
    secret += pieces(final.accumulator[-1])
    if how == "its last round":
        guard.answer("run", cell, 8, zeros())
    elif how == "an administrator":
        end_run(tmp_path / "silo-0.toml", "run")
    else:
        monkeypatch.setattr(Silo, "make_message", Mock(side_effect=ZeroDivisionError))
        refused(guard, "its guard failed", cell, 8)
    for path in tmp_path.iterdir():
        raw = path.read_bytes()
        assert not [piece for piece in secret if piece in raw], path
    refused(guard, "this run is over", cell, 8 if how != "its last round" else 9, zeros() + 1.0)


@pytest.mark.parametrize("how", ["its last round", "an administrator", "a guard that is killed before it wipes"])
def test_the_key_of_an_ended_run_is_erased_from_every_journal_block(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: the key and the exact sums, from blocks of SQLite's journals, which were unlinked with them in it.

    A link to every journal stands for a thief who reads the disk below the file system.
    """
    cell, carved, honest = scenario(), tmp_path / "carved", RollbackMark.write
    guard = guard_for(tmp_path / "silo", *random_records(), budget=100.0)
    ledger, journal = tmp_path / "silo" / LEDGER, tmp_path / "silo" / (LEDGER + "-journal")
    carved.mkdir()

    def linking(mark: RollbackMark, reading: MarkContent) -> None:
        if journal.exists():
            os.link(journal, carved / str(len(list(carved.iterdir()))))
        honest(mark, reading)

    monkeypatch.setattr(RollbackMark, "write", linking)
    guard.answer("run", cell, 1, zeros())
    key = find_run(guard).key
    assert key is not None
    for t in range(2, 8):
        guard.answer("run", cell, t, zeros())
    assert any(key in path.read_bytes() for path in carved.iterdir())  # while it lasts
    if how == "an administrator":
        end_run(tmp_path / "silo" / "silo-0.toml", "run")
    else:
        if how != "its last round":
            monkeypatch.setattr(SiloLedger, "_wipe", lambda _: None)
        guard.answer("run", cell, 8, zeros())
        monkeypatch.undo()
    guard._ledger.close()
    if how == "a guard that is killed before it wipes":
        SiloLedger(ledger).close()
    for path in (ledger, *carved.iterdir()):
        assert key not in path.read_bytes(), path


def test_the_journal_of_a_ledger_behind_a_symbolic_link_is_wiped(tmp_path: Path) -> None:
    """Gains: the key of a run that is over, from the journal, which SQLite keeps beside the file, not the link."""
    guard = guard_for(tmp_path / "silo", *random_records(), budget=100.0)
    guard._ledger.close()
    link, disk = tmp_path / "silo" / LEDGER, tmp_path / "disk"
    disk.mkdir(mode=0o700)
    link.rename(disk / LEDGER)
    link.symlink_to(disk / LEDGER)
    guard = guard_for(tmp_path / "silo", *random_records(), budget=100.0)
    guard.answer("run", scenario(), 1, zeros())
    key = find_run(guard).key
    assert key is not None
    guard._ledger.close()
    end_run(tmp_path / "silo" / "silo-0.toml", "run")
    assert [path for path in disk.iterdir() if key in path.read_bytes()] == []
    assert not any((disk / (LEDGER + "-journal")).read_bytes())


def test_a_mark_behind_a_symbolic_link_stays_on_its_disk(tmp_path: Path) -> None:
    """Gains: a mark on the ledger's disk, where the link was, so that one restore takes both back unnoticed."""
    link, disk = tmp_path / "silo" / (LEDGER + ".mark"), tmp_path / "disk"
    for folder in (link.parent, disk):
        folder.mkdir(mode=0o700)
    link.symlink_to(disk / "ledger.mark")
    guard = guard_for(tmp_path / "silo", *random_records(), budget=100.0)
    begun = (disk / "ledger.mark").read_bytes()
    guard.answer("run", scenario(), 1, zeros())
    assert link.is_symlink()
    assert (disk / "ledger.mark").read_bytes() != begun


def test_an_interrupted_commit_is_rolled_back_from_the_journal(tmp_path: Path) -> None:
    """Gains: a ledger of half a commit, were the journal wiped before SQLite has used it."""
    guard = guard_for(tmp_path, *random_records())
    first = guard.answer("run", scenario(), 1, zeros())
    guard._ledger.close()
    crash = (
        "import os, sqlite3, sys\n"
        "d = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "for p in ('synchronous = FULL', 'journal_mode = PERSIST', 'cache_size = 1', 'cache_spill = 1'):\n"
        "    d.execute('PRAGMA ' + p)\n"
        "d.execute('BEGIN IMMEDIATE')\n"
        'd.execute("UPDATE runs SET state = randomblob(500000), mu = 0")\n'
        'd.execute("DELETE FROM answers")\n'
        "os._exit(1)\n"
    )
    before = (tmp_path / LEDGER).read_bytes()
    subprocess.run([sys.executable, "-c", crash, str(tmp_path / LEDGER)], check=False)
    assert (tmp_path / LEDGER).read_bytes() != before  # some pages were written already
    again = guard_of(tmp_path / "silo-0.toml")
    assert torch.equal(again.answer("run", scenario(), 1, zeros()), first)
    assert charged(again) == [pytest.approx(4.0)]


def test_a_symbolic_link_planted_for_the_rollback_mark_does_not_overwrite_another_file(tmp_path: Path) -> None:
    """Gains: another file of the guard's user, overwritten through a link in a folder that others can write to."""
    guard = guard_for(tmp_path, *random_records())
    (tmp_path / "other").write_text("precious")
    (tmp_path / f".{LEDGER}.mark.{os.getpid()}").symlink_to(tmp_path / "other")
    guard.answer("run", scenario(), 1, zeros())
    assert (tmp_path / "other").read_text() == "precious"
    assert not (tmp_path / (LEDGER + ".mark")).is_symlink()


@pytest.fixture
def generous_umask() -> Iterator[None]:
    """Files are made that everybody may write."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous_umask")
def test_ledger_rollback_mark_and_lock_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    """Gains: keys, for another user of the machine."""
    guard_for(tmp_path, *random_records()).answer("run", scenario(), 1, zeros())
    for name in (LEDGER, LEDGER + ".mark", LEDGER + ".lock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name


@pytest.mark.usefixtures("generous_umask")
def test_the_folders_of_a_local_deployment_are_private_to_the_user(tmp_path: Path) -> None:
    """Gains: shards, ledgers and sockets of a run on one machine, for its other users (finding 52)."""
    policies = write_silos(resolve_cell(small_tree(), "test"), tmp_path / "kept", tmp_path / "home")
    for folder in (*(tmp_path / "kept").iterdir(), *(tmp_path / "home").iterdir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert len(policies) == 3
    for policy in policies:
        assert torch.isfinite(guard_of(policy).answer("run", scenario(), 1, zeros())).all()


def test_every_commit_of_the_ledger_is_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains: a second answer to a round, after a power cut that the ledger did not survive (finding 52)."""
    guard = guard_for(tmp_path, *random_records())
    pragma = {
        name: guard._ledger._database.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("synchronous", "secure_delete", "journal_mode")
    }
    assert pragma == {"synchronous": 2, "secure_delete": 1, "journal_mode": "persist"}
    synced: list[str] = []
    honest = os.fsync

    def seen(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        honest(file)

    monkeypatch.setattr(os, "fsync", seen)
    guard.answer("run", scenario(), 1, zeros())
    drafts = [Path(name).name for name in synced]
    # Two commits, each marked before and after.
    assert drafts == [f".{LEDGER}.mark.{os.getpid()}", tmp_path.name] * 4


def test_silo_status_shows_the_spent_budget_and_escapes_run_names(tmp_path: Path) -> None:
    """And what servers call their runs cannot write to the terminal."""
    guard = guard_for(tmp_path, *random_records(), budget=5.0)
    guard.answer("a\x1b[2J", scenario(privacy__rho=3.0), 1, zeros())
    lines = format_status(tmp_path / "silo-0.toml")  # while the guard has the ledger
    assert lines[1] == "budget mu = 5, spent 3 by 1 run, left for one more 4"
    assert lines[2].startswith(r"'a\x1b[2J': mu = 3, 1 round answered, under way, dp-mu2-fl (untrusted)")
    with pytest.raises(InputError, match="has no run 'b'"):
        end_run(tmp_path / "silo-0.toml", "b")
    end_run(tmp_path / "silo-0.toml", "a\x1b[2J")
    assert "1 round answered, over" in format_status(tmp_path / "silo-0.toml")[2]
