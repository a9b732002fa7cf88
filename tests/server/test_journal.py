"""The server's journal: what a killed server goes on from."""

import errno
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.core.errors import InputError, RunError
from fedpriv.core.files import PRIVATE_MODE, write_bytes
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.server.journal import EntrySizes, ServerJournal
from fedpriv.server.strategy import JournalEntry
from tests.conftest import small_tree
from tests.server.deployed import plan_with, silos_of
from tests.server.deployed import serve as serve_plan

MakeCell = Callable[..., Cell]


def journal_in(folder: Path, rounds: int = 8) -> ServerJournal:
    return ServerJournal(folder, EntrySizes(torch.float64, (7850,) * rounds))


def serve(cell: Cell, folder: Path, silos: InProcessGrid, rounds: int) -> torch.Tensor:
    """The model of a server that dies after `rounds` rounds."""
    return serve_plan(plan_with(cell), folder, silos, rounds).model


ADAM = {"name": "dp-adamw", "step_schedule": "cosine", "warm_up": 0.3, "fading_average": 0.5}


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
@pytest.mark.parametrize("row", [{"name": "dp-ftrl", "mechanism": "tree"}, ADAM], ids=["tree", "adam"])
def test_a_server_killed_twice_continues_from_its_journal_to_the_same_model(
    small_cell: MakeCell, tmp_path: Path, row: dict[str, Any], trust: str
) -> None:
    """Silos refuse a round that they have answered, and a tree's noise hangs together over all rounds."""
    algorithm = {**row, "clip": 1.0, "step": 0.1, "trust": trust}
    cell = small_cell(algorithm=algorithm, privacy={"relation": "zero-out", "mu": 2.0}, run__arithmetic="integers")
    whole = serve(cell, tmp_path / "whole", silos_of(cell), 8)
    write_bytes(tmp_path / "cut" / "noise.key", (tmp_path / "whole" / "noise.key").read_bytes(), PRIVATE_MODE)
    silos = silos_of(cell)
    for rounds in (3, 4, 8):
        serve(cell, tmp_path / "cut", silos, rounds)
    assert torch.equal(serve(cell, tmp_path / "cut", silos, 8), whole)


def test_a_run_that_resumes_after_its_last_round_reports_no_clipped_records(
    small_cell: MakeCell, tmp_path: Path
) -> None:
    """No silo was asked: 0 clipped of 0 records became a share of 0 %."""
    cell = small_cell(privacy={"relation": "zero-out", "mu": 2.0}, run__arithmetic="integers")
    plan, silos = plan_with(cell), silos_of(cell)
    serve_plan(plan, tmp_path, silos, 8)
    resumed = serve_plan(plan, tmp_path, silos, 8)
    assert (resumed.rounds_done, resumed.counts) == (8, None)


def test_a_truncated_journal_entry_is_ignored_and_rounds_are_recorded_in_order(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    first = torch.randn(7850, dtype=torch.float64)
    journal.record(1, JournalEntry(first), {}, None)
    with pytest.raises(RunError, match="round 3 follows round 1"):
        journal.record(3, JournalEntry(first), {}, None)
    journal.close()
    with (tmp_path / "released.bin").open("ab") as file:
        file.write(b"half of a vector")
    again = journal_in(tmp_path)
    again.record(2, JournalEntry(2 * first), {0: [2]}, first.reshape(1, -1))
    again.close()
    once_more = journal_in(tmp_path)
    one, two = once_more.read_entry(1), once_more.read_entry(2)
    assert one is not None
    assert two is not None
    for vector, factor in zip(
        (one.noisy_values, two.noisy_values, once_more.last_releases()), (1, 2, 1), strict=True
    ):
        assert vector is not None
        assert torch.equal(vector.flatten(), factor * first)
    assert (once_more.read_entry(3), once_more.missed_rounds()) == (None, {0: [2]})


def test_the_files_of_a_journal_have_the_form_that_a_later_release_reads(tmp_path: Path) -> None:
    """An entry: values, the 32 bytes of the query chain, and 16 of SHA-256 over round and entry."""
    chain, bodies = bytes(range(32)), list[bytes]()
    with ServerJournal(tmp_path, EntrySizes(torch.float64, (2, 1), has_secret_state=True)) as journal:
        for t, values in ((1, [1.0, 2.0]), (2, [3.0])):
            entry = JournalEntry(torch.tensor(values, dtype=torch.float64), chain)
            journal.record(t, entry, {}, None, b"sums")
            body = struct.pack(f"{len(values)}d", *values) + chain
            bodies.append(body + hashlib.sha256(t.to_bytes(8, "big") + body).digest()[:16])
    assert (tmp_path / "released.bin").read_bytes() == b"".join(bodies)
    sums = hashlib.sha256(b"\0\0\0\0\0\0\0\2" + b"sums").digest()[:16] + b"sums"
    assert (tmp_path / "sums-2.bin").read_bytes() == sums


def test_sums_that_the_disk_has_damaged_are_not_gone_on_from(tmp_path: Path) -> None:
    """A trusted server's sums without noise: a flipped bit would go into every later release."""
    sizes = EntrySizes(torch.float64, (2, 2), has_secret_state=True)
    with ServerJournal(tmp_path, sizes) as journal:
        assert journal.load_secret_state() == b""
        journal.record(1, JournalEntry(torch.zeros(2, dtype=torch.float64)), {}, None, b"sums")
        assert journal.load_secret_state() == b"sums"
        path = tmp_path / "sums-1.bin"
        path.write_bytes(content := path.read_bytes()[:-1] + b"z")
        with pytest.raises(RunError, match=r"sums-1\.bin: damaged, so the run cannot go on: start a new run"):
            journal.load_secret_state()
        path.write_bytes(bytes(16) + content[16:])
        with pytest.raises(RunError, match=r"sums-1\.bin: damaged"):
            journal.load_secret_state()


def test_what_a_round_is_gone_on_from_is_on_the_disk_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key before its first round, sums before their entry, and the entry before its round is over."""
    events: list[object] = []
    write, sync = os.pwrite, os.fsync

    def written(file: int, body: bytes, place: int) -> int:
        events.append("write")
        return write(file, body, place)

    def synced(file: int) -> None:
        sync(file)
        if file == journal._file:
            events.append("sync")

    def names(folder: Path) -> None:
        events.append({path.name for path in folder.iterdir()} - {"released.bin"})

    with ServerJournal(tmp_path, EntrySizes(torch.float64, (2,) * 3, has_secret_state=True)) as journal:
        monkeypatch.setattr("fedpriv.server.journal.sync_folder", names)
        monkeypatch.setattr(os, "pwrite", written)
        monkeypatch.setattr(os, "fsync", synced)
        journal.load_noise_key()
        for t in (1, 2):
            journal.record(t, JournalEntry(torch.zeros(2, dtype=torch.float64)), {}, None, b"sums")
        journal.wipe_key()
    key = {"noise.key"}
    first, second = key | {"sums-1.bin"}, key | {"sums-1.bin", "sums-2.bin"}
    assert events == [key, first, "write", "sync", second, "write", "sync", set()]


def test_key_and_sums_are_zeros_on_the_disk_before_they_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a run of one round, too: zeros that stay in memory leave the old blocks to a thief of the disk."""
    synced: list[tuple[str, bytes]] = []
    with ServerJournal(tmp_path, EntrySizes(torch.float64, (2,), has_secret_state=True)) as journal:
        journal.load_noise_key()
        journal.record(1, JournalEntry(torch.zeros(2, dtype=torch.float64)), {}, None, b"sums")
        names = {path.stat().st_ino: path.name for path in tmp_path.iterdir()}

        def sync(file: int) -> None:
            if (name := names.get(os.fstat(file).st_ino)) is not None:
                synced.append((name, os.pread(file, 100, 0)))

        monkeypatch.setattr(os, "fsync", sync)
        journal.wipe_key()
    assert sorted(synced) == [("noise.key", bytes(32)), ("sums-1.bin", bytes(20))]
    assert [path.name for path in tmp_path.iterdir()] == ["released.bin"]


def test_the_noise_key_is_accessible_to_its_owner_only_and_wiped_after_the_run(tmp_path: Path) -> None:
    journal = journal_in(tmp_path / "j")
    key = journal.load_noise_key()
    assert (len(key), journal.load_noise_key()) == (32, key)
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "j").iterdir()} == {0o600}
    journal.record(1, JournalEntry(torch.zeros(7850, dtype=torch.float64)), {}, None)
    journal.wipe_key()
    with pytest.raises(RunError, match=r"noise\.key: lost, so that the noise of 1 rounds cannot go on"):
        journal.load_noise_key()
    journal.close()
    assert journal_in(tmp_path / "j", rounds=1).load_noise_key() == bytes(32)


def test_a_server_waits_until_the_previous_one_releases_the_journal(tmp_path: Path) -> None:
    """A run failed for ever when its executor died, and the next one's server came before the last had ended."""
    first = journal_in(tmp_path)
    threading.Timer(0.3, first.close).start()
    assert journal_in(tmp_path).read_entry(1) is None


def test_a_second_server_on_the_same_journal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = journal_in(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(RunError, match="another server is working on this run"):
        journal_in(tmp_path)
    assert first.read_entry(1) is None


def test_continuing_without_silos_is_refused_with_secure_aggregation() -> None:
    tree = small_tree(deployment={"missing": "continue"}, algorithm__trust="secure-aggregation")
    with pytest.raises(InputError, match="masks cancel in the sum of all silos only"):
        resolve_cell(tree, "test")


@pytest.mark.parametrize("short", [False, True], ids=["refused", "cut short"])
def test_a_full_journal_disk_is_reported_in_one_line_with_folder_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    journal = journal_in(tmp_path)
    vector = torch.randn(7850, dtype=torch.float64)
    write = os.pwrite

    def full(file: int, body: bytes, place: int) -> int:
        if not short:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, body[:100], place)

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        with pytest.raises(RunError, match=rf"journal in {tmp_path} .*nothing is released: .*; make room there"):
            journal.record(1, JournalEntry(vector), {}, None)
    journal.record(1, JournalEntry(vector), {}, None)
    again = journal.read_entry(1)
    assert again is not None
    assert torch.equal(again.noisy_values, vector)


def test_entries_that_one_write_cannot_take_are_refused_before_the_run(tmp_path: Path) -> None:
    """Was: "the disk took only a part of the entry", when silos had answered the round."""
    sizes = EntrySizes(torch.float64, (2, 2**28))
    with pytest.raises(RunError, match=r"round 2: its release takes 2147\d+ bytes, .* a smaller model"):
        ServerJournal(tmp_path / "journal", sizes)
    assert not (tmp_path / "journal").exists()
