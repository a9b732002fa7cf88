"""Somebody with a trusted server's disk: during the run, after it, or with an older copy of it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import Message

from fedpriv.clients.app import app as client_app
from fedpriv.engines.inprocess_grid import InProcessGrid
from fedpriv.errors import RunError
from fedpriv.files import OWN, write_bytes
from fedpriv.mechanisms import BinaryTree, IndependentGaussian, Mechanism
from fedpriv.protocol.arrays import Counts, release_content, vector_in
from fedpriv.protocol.run_config import run_config_of
from fedpriv.randomness import SERVER
from fedpriv.scenario import Cell
from fedpriv.server.journal import ServerJournal
from fedpriv.server.noise import Released
from tests.server.deployed import plan_with, released_in, serve, silos_of

MakeCell = Callable[..., Cell]
VECTOR = torch.arange(7850, dtype=torch.float32)


class OtherRecord(InProcessGrid):
    """Silo 0 has one record less in round 2, as after a deletion: its sum differs by `moved` in one coordinate."""

    moved = 0.0

    def _call(self, message: Message) -> Message:
        reply = super()._call(message)
        if "release" in reply.content and message.content["config"]["t"] == 2:
            vector = vector_in(reply.content, "release").clone()
            vector[0] += self.moved if message.metadata.dst_node_id == 1000 else 0.0
            return Message(release_content(vector, Counts(1, 0)), reply_to=message)
        return reply


@pytest.mark.parametrize("mechanism", [IndependentGaussian(), BinaryTree()])
@pytest.mark.parametrize("moved", [1.0, 1e-9])
def test_a_journal_put_back_never_adds_its_noise_to_other_sums(
    small_cell: MakeCell, tmp_path: Path, mechanism: Mechanism, moved: float
) -> None:
    """With the same noise on both, the difference of two broadcasts would be the record that was deleted."""
    cell = small_cell(algorithm__trust="trusted", run__dtype="float32")  # sums are float64 all the same
    plan = plan_with(cell, mechanism)
    grid = OtherRecord(client_app, 3, run_config_of(cell, Path()))
    serve(plan, tmp_path / "j", grid, rounds=1)
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    serve(plan, tmp_path / "j", grid, rounds=2)
    again = OtherRecord(client_app, 3, run_config_of(cell, Path()))
    again.moved = moved
    serve(plan, tmp_path / "first round", again, rounds=1)
    serve(plan, tmp_path / "copy", again, rounds=2)
    (one, first), (other, second) = released_in(tmp_path / "j", plan), released_in(tmp_path / "copy", plan)
    assert torch.equal(one, other)
    std = float(plan.noise.std_of(SERVER))
    assert float((first - second).std()) / std == pytest.approx(2.0**0.5, abs=0.06)  # fresh noise in both


def test_nothing_but_what_was_broadcast_is_left_after_the_run(small_cell: MakeCell, tmp_path: Path) -> None:
    """A digest of the exact sums would tell which of two records was there."""
    cell = small_cell(algorithm__trust="trusted")
    plan = plan_with(cell)
    serve(plan, tmp_path / "j", silos_of(cell), rounds=2)
    with ServerJournal(tmp_path / "j", 7850, torch.float64) as journal:
        key, known = journal.key(8), journal.released(1)
        journal.wipe_key()
    assert known is not None
    write_bytes(tmp_path / "k" / "noise.key", bytes(range(32)), OWN)
    serve(plan, tmp_path / "k", silos_of(cell), rounds=1)  # the same sums under another key
    with ServerJournal(tmp_path / "k", 7850, torch.float64) as journal:
        other = journal.released(1)
    assert other is not None
    assert other.link != known.link  # so that a link tells nothing without the key
    assert {path.name for path in (tmp_path / "j").iterdir()} == {"released.bin"}
    assert key not in (tmp_path / "j" / "released.bin").read_bytes()


@pytest.mark.parametrize("place", [0, 7850 * 4 - 1, 7850 * 4 + 5, 7850 * 4 + 40])
def test_a_bit_that_flipped_is_noticed_and_never_used(tmp_path: Path, place: int) -> None:
    """A changed q~_t asks silos for other queries, and an infinite one ends the run with nothing said."""
    with ServerJournal(tmp_path, 7850, torch.float32) as journal:
        for t in (1, 2, 3):
            journal.record(t, Released(t * VECTOR, bytes([t]) * 32), {}, None)
    path = tmp_path / "released.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 3 + place] ^= 64
    path.write_bytes(content)
    with ServerJournal(tmp_path, 7850, torch.float32) as journal:
        for t in (1, 3):
            known = journal.released(t)
            assert known is not None
            assert torch.equal(known.vector, t * VECTOR)
            assert known.link == bytes([t]) * 32
        with pytest.raises(RunError, match=r"released\.bin, round 2: the entry is damaged"):
            journal.released(2)


def test_entries_do_not_stand_for_one_another(tmp_path: Path) -> None:
    """Two rounds swapped would be replayed as if they had been released so."""
    with ServerJournal(tmp_path, 7850, torch.float32) as journal:
        for t in (1, 2):
            journal.record(t, Released(t * VECTOR), {}, None)
    content = (tmp_path / "released.bin").read_bytes()
    half = len(content) // 2
    (tmp_path / "released.bin").write_bytes(content[half:] + content[:half])
    with (
        ServerJournal(tmp_path, 7850, torch.float32) as journal,
        pytest.raises(RunError, match=r"round 1: the entry is damaged"),
    ):
        journal.released(1)


@pytest.mark.parametrize(
    ("key", "reason"),
    [(b"short", r"noise\.key: 5 bytes"), (bytes(33)[:-1] + b"x" * 2, "34 bytes"), (bytes(32), "wiped"), (b"", "")],
)
def test_a_noise_key_of_another_length_is_never_used(tmp_path: Path, key: bytes, reason: str) -> None:
    """A key that was cut short, or zeros, could be guessed, and with it the noise."""
    write_bytes(tmp_path / "noise.key", key, OWN)
    with (
        ServerJournal(tmp_path, 7850, torch.float32) as journal,
        pytest.raises(RunError, match=f"{reason}.*32 secret ones"),
    ):
        journal.key(8)


@pytest.mark.parametrize("name", ["noise.key", "released.bin"])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, name: str) -> None:
    """Any user of the machine could remove the noise."""
    folder = tmp_path / "j"
    folder.mkdir(mode=0o755)
    (folder / name).write_bytes(bytes(range(32)))
    (folder / name).chmod(0o640)
    with pytest.raises(RunError, match=f"{name}: others can read it"):
        ServerJournal(folder, 7850, torch.float32)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_every_file_of_the_journal_is_the_servers_own(tmp_path: Path) -> None:
    """The silos' last releases and who was missing are nobody else's business."""
    with ServerJournal(tmp_path / "j", 7850, torch.float32) as journal:
        journal.key(2)
        journal.record(1, Released(VECTOR), {0: [1]}, VECTOR.reshape(1, -1))
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "j").iterdir()}
    assert found == dict.fromkeys(("noise.key", "released.bin", "last.npy", "missed.json"), 0o600)


@pytest.mark.parametrize("name", ["last.npy", "missed.json"])
def test_other_damaged_files_of_the_journal_are_named(tmp_path: Path, name: str) -> None:
    """A traceback tells an operator nothing, and a wrong stand-in moves the model."""
    with ServerJournal(tmp_path, 7850, torch.float32) as journal:
        journal.record(1, Released(VECTOR), {0: [1]}, VECTOR.reshape(1, -1))
        (tmp_path / name).write_bytes(b"[garbage")
        with pytest.raises(RunError, match=f"{name}: damaged"):
            (journal.last if name == "last.npy" else journal.missed)()
