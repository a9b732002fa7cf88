"""Somebody with a trusted server's disk: during the run, after it, or with an older copy of it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Message

from fedpriv.claims.outcome import RunObserver
from fedpriv.clients.app import app as client_app
from fedpriv.core.errors import RunError
from fedpriv.core.files import PRIVATE_MODE, write_bytes
from fedpriv.core.random import SERVER
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.noise.integers.gaussian import INITIAL_QUERY_CHAIN, extend_query_chain
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import TRAIN, RecordCounts, read_tensor, release_content
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import deploy_cell
from fedpriv.server.journal import EntrySizes, ServerJournal
from fedpriv.server.strategy import JournalEntry
from tests.server.deployed import plan_with, released_in, serve, silos_of

MakeCell = Callable[..., Cell]
VECTOR = torch.arange(7850, dtype=torch.float32)
ENTRIES = EntrySizes(torch.float32, (7850,) * 8)


def ftrl_cell(small_cell: MakeCell, mechanism: str) -> Cell:
    """A trusted server that adds the noise of a mechanism to integers."""
    algorithm = {"name": "dp-ftrl", "mechanism": mechanism, "clip": 1.0, "step": 0.1, "trust": "trusted"}
    run = {"dtype": "float32", "arithmetic": "integers"}
    return small_cell(algorithm=algorithm, privacy={"relation": "zero-out", "mu": 2.0}, run=run)


def write_entries(folder: Path, *rounds: int) -> bytearray:
    """The entries of a journal that has these rounds."""
    with ServerJournal(folder, ENTRIES) as journal:
        for t in rounds:
            journal.record(t, JournalEntry(t * VECTOR, bytes([t]) * 32), {}, None)
    return bytearray((folder / "released.bin").read_bytes())


class OtherRecord(InProcessGrid):
    """Silo 0 has one record less in round 2, as after a deletion: its sum differs by `moved` in one coordinate."""

    moved = 0

    def _call(self, message: Message) -> Message:
        reply = super()._call(message)
        if message.metadata.message_type == TRAIN and message.content["config"]["t"] == 2:
            vector = read_tensor(reply.content, "release").clone()
            vector[0] += self.moved if message.metadata.dst_node_id == 1000 else 0
            return Message(release_content(vector, RecordCounts(1, 0)), reply_to=message)
        return reply


@pytest.mark.parametrize("mechanism", ["independent", "tree"])
@pytest.mark.parametrize("moved", [2**30, 1])
def test_a_rolled_back_server_journal_adds_fresh_noise_to_changed_sums(
    small_cell: MakeCell, tmp_path: Path, mechanism: str, moved: int
) -> None:
    """With the same noise on both, the difference of two broadcasts would be the record that was deleted."""
    cell = ftrl_cell(small_cell, mechanism)
    plan = plan_with(cell)
    grid = OtherRecord(client_app, 3, make_run_config(cell, Path()))
    serve(plan, tmp_path / "j", grid, rounds=1)
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    serve(plan, tmp_path / "j", grid, rounds=2)
    again = OtherRecord(client_app, 3, make_run_config(cell, Path()))
    again.moved = moved
    serve(plan, tmp_path / "first round", again, rounds=1)
    serve(plan, tmp_path / "copy", again, rounds=2)
    (one, first), (other, second) = released_in(tmp_path / "j", plan), released_in(tmp_path / "copy", plan)
    assert torch.equal(one, other)
    std = float(plan.noise.std_of(SERVER))
    assert float((first - second).std()) / std == pytest.approx(2.0**0.5, abs=0.06)  # fresh noise in both


def test_only_broadcast_values_remain_in_the_server_journal_after_a_run(
    small_cell: MakeCell, tmp_path: Path
) -> None:
    """A digest of the exact sums would tell which of two records was there."""
    cell = small_cell(algorithm__trust="trusted", run__arithmetic="integers")
    plan = plan_with(cell)
    serve(plan, tmp_path / "j", silos_of(cell), rounds=2)
    (tmp_path / "hard link").hardlink_to(tmp_path / "j" / "sums-2.bin")
    assert any((tmp_path / "hard link").read_bytes())
    with ServerJournal(tmp_path / "j", EntrySizes.from_plan(plan)) as journal:
        key, known = journal.load_noise_key(), journal.read_entry(1)
        journal.wipe_key()
    assert known is not None
    query = plan.optimizer.query(plan.optimizer.start(plan.objective.initial()))
    asked = extend_query_chain(INITIAL_QUERY_CHAIN, query.numpy().tobytes())
    assert known.query_chain == asked  # a function of what was asked alone
    assert not any((tmp_path / "hard link").read_bytes())
    assert {path.name for path in (tmp_path / "j").iterdir()} == {"released.bin"}
    assert key not in (tmp_path / "j" / "released.bin").read_bytes()


class Linking(ServerJournal):
    """A journal of a thief who links every file of sums while it lies there, and so keeps its blocks."""

    stolen: ClassVar[dict[int, Path]] = {}
    seen: ClassVar[list[list[int]]] = []

    def record(self, t: int, *arguments: Any) -> None:
        super().record(t, *arguments)
        link = self._folder.with_name(f"stolen {t}")
        link.hardlink_to(self._folder / f"sums-{t}.bin")
        self.stolen[t] = link
        self.seen.append([n for n, path in self.stolen.items() if any(path.read_bytes())])


@pytest.mark.parametrize("mechanism", ["independent", "tree"])
def test_exact_sums_of_a_round_are_wiped_once_the_next_round_is_stored(
    small_cell: MakeCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    """Gains: the exact sums of two rounds, whose difference is what one round's records sent, without noise."""
    cell = ftrl_cell(small_cell, mechanism)
    monkeypatch.setattr("fedpriv.server.app.ServerJournal", Linking)
    monkeypatch.setattr(Linking, "stolen", {})
    monkeypatch.setattr(Linking, "seen", [])
    deploy_cell(silos_of(cell), cell, RunObserver(), tmp_path / "j")
    rounds = cell.schedule.rounds
    assert Linking.seen == [[t] for t in range(1, rounds + 1)]  # the last round's alone, whenever one looks
    assert not any(any(path.read_bytes()) for path in Linking.stolen.values())
    assert {path.name for path in (tmp_path / "j").iterdir()} == {"released.bin"}


def test_exact_sums_left_by_a_killed_server_are_wiped_later(tmp_path: Path) -> None:
    """Gains: those of a round whose entry was never written, or a draft of them, under names nobody looks for."""
    entries = EntrySizes(torch.float32, (7850,) * 8, has_secret_state=True)
    left = [tmp_path / "j" / name for name in ("sums-2.bin", ".sums-2.bin.4711", ".noise.key.4711")]
    with ServerJournal(tmp_path / "j", entries) as journal:
        journal.record(1, JournalEntry(VECTOR), {}, None, b"sums of round 1")
        for number, path in enumerate(left):
            write_bytes(path, b"sums of round 2", PRIVATE_MODE)
            (tmp_path / str(number)).hardlink_to(path)
        assert journal.load_secret_state() == b"sums of round 1"
        journal.record(2, JournalEntry(VECTOR), {}, None, b"other sums")
        assert journal.load_secret_state() == b"other sums"
        assert [any((tmp_path / str(number)).read_bytes()) for number in range(3)] == [False, False, True]
        journal.wipe_key()
    assert not any((tmp_path / "2").read_bytes())
    assert {path.name for path in (tmp_path / "j").iterdir()} == {"released.bin"}


@pytest.mark.parametrize("place", [0, 7850 * 4 - 1, 7850 * 4 + 5, 7850 * 4 + 40])
def test_a_flipped_bit_in_a_journal_entry_is_detected(tmp_path: Path, place: int) -> None:
    """A changed q~_t asks silos for other queries, and an infinite one ends the run with nothing said."""
    content = write_entries(tmp_path, 1, 2, 3)
    content[len(content) // 3 + place] ^= 64
    (tmp_path / "released.bin").write_bytes(content)
    with ServerJournal(tmp_path, ENTRIES) as journal:
        for t in (1, 3):
            entry = journal.read_entry(t)
            assert entry is not None
            assert torch.equal(entry.noisy_values, t * VECTOR)
            assert entry.query_chain == bytes([t]) * 32
        with pytest.raises(RunError, match=r"released\.bin, round 2: the entry is damaged"):
            journal.read_entry(2)


def test_swapped_journal_entries_of_two_rounds_are_detected(tmp_path: Path) -> None:
    """Two rounds swapped would be replayed as if they had been released so."""
    content = write_entries(tmp_path, 1, 2)
    half = len(content) // 2
    (tmp_path / "released.bin").write_bytes(content[half:] + content[:half])
    line = "round 1: the entry is damaged"
    with ServerJournal(tmp_path, ENTRIES) as journal, pytest.raises(RunError, match=line):
        journal.read_entry(1)


@pytest.mark.parametrize(
    ("key", "reason"),
    [(b"short", r"noise\.key: 5 bytes"), (bytes(33)[:-1] + b"x" * 2, "34 bytes"), (bytes(32), "wiped"), (b"", "")],
)
def test_a_noise_key_that_is_truncated_or_wiped_is_refused(tmp_path: Path, key: bytes, reason: str) -> None:
    """A key that was cut short, or zeros, could be guessed, and with it the noise."""
    write_bytes(tmp_path / "noise.key", key, PRIVATE_MODE)
    line = f"{reason}.*32 secret ones"
    with ServerJournal(tmp_path, ENTRIES) as journal, pytest.raises(RunError, match=line):
        journal.load_noise_key()


@pytest.mark.parametrize("name", ["noise.key", "released.bin"])
def test_a_journal_file_readable_by_others_is_refused(tmp_path: Path, name: str) -> None:
    """Any user of the machine could remove the noise."""
    folder = tmp_path / "j"
    folder.mkdir(mode=0o755)
    (folder / name).write_bytes(bytes(range(32)))
    (folder / name).chmod(0o640)
    with pytest.raises(RunError, match=f"{name}: others have permissions on it"):
        ServerJournal(folder, ENTRIES)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_every_journal_file_is_accessible_to_its_owner_only(tmp_path: Path) -> None:
    """The silos' last releases and who was missing are nobody else's business."""
    with ServerJournal(tmp_path / "j", ENTRIES) as journal:
        journal.load_noise_key()
        journal.record(1, JournalEntry(VECTOR), {0: [1]}, VECTOR.reshape(1, -1))
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "j").iterdir()}
    assert modes == dict.fromkeys(("noise.key", "released.bin", "last.npy", "missed.json"), 0o600)


@pytest.mark.parametrize("name", ["last.npy", "missed.json"])
def test_damaged_auxiliary_files_of_the_journal_are_named(tmp_path: Path, name: str) -> None:
    """A traceback tells an operator nothing, and a wrong stand-in moves the model."""
    with ServerJournal(tmp_path, ENTRIES) as journal:
        journal.record(1, JournalEntry(VECTOR), {0: [1]}, VECTOR.reshape(1, -1))
        (tmp_path / name).write_bytes(b"[garbage")
        with pytest.raises(RunError, match=f"{name}: damaged"):
            (journal.last_releases if name == "last.npy" else journal.missed_rounds)()
