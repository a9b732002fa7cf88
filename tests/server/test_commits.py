"""What a coordinator remembers of silos' ledgers, and tells them: one that was put back refuses its next query."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpriv.core.errors import RunError
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import (
    REPLY_CHECKPOINT,
    SERVER_CHECKPOINTS,
    Checkpoint,
    add_bytes,
    query_content,
    read_int_field,
    read_optional_bytes,
    read_tensor,
    release_content,
    roster_content,
    to_array_record,
    unpack_checkpoints,
)
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.server import grid as patient_grid
from fedpriv.server.app import deploy_cell
from fedpriv.server.strategy import CheckpointStore
from fedpriv.silo.guard import Guard
from tests.conftest import small_tree
from tests.server.test_evaluation import Heard
from tests.silo.evaluated import ASKED, guards_of, write_tested

SMALL = small_tree(evaluation=ASKED, federation__rounds=2)


def grid_of(folder: Path, cell: Cell, run: str) -> InProcessGrid:
    """Guards with ledgers, asked as `fedpriv.clients.app` asks them."""
    policies = [folder / f"silo-{number}.toml" for number in range(3)]
    for number, path in enumerate(policies):
        if not path.exists():
            write_tested(folder, number, {"budget": 9.0}, budget=30.0)
    guards, words = [guards_of(path) for path in policies], json.dumps(cell.canonical_data())
    app = ClientApp()

    def forwarded(message: Message, guard: Guard) -> Message:
        t, query = read_int_field(message.content, "config", "t"), read_tensor(message.content, "query")
        checkpoints = read_optional_bytes(message.content, SERVER_CHECKPOINTS)
        reply = release_content(guard.answer(run, words, t, query, checkpoints=checkpoints), None)
        return Message(add_bytes(reply, REPLY_CHECKPOINT, guard.checkpoint(run, words, t)), reply_to=message)

    @app.query("roster")
    def roster(message: Message, context: Context) -> Message:
        return Message(roster_content(int(context.node_config["partition-id"])), reply_to=message)

    @app.query("agreement")
    def agreement(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return forwarded(message, guards[int(context.node_config["partition-id"])].training)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        tests = guards[int(context.node_config["partition-id"])].tests
        assert tests is not None
        return forwarded(message, tests)

    return InProcessGrid(app, 3, make_run_config(cell, Path(), run))


@pytest.mark.slow
def test_guarantee_a_silo_rolled_back_between_two_runs_is_detected_in_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: the first run's budget once more, by the snapshot of a machine from before it."""
    monkeypatch.setattr(patient_grid, "_POLL_SECONDS", 0.001)
    cell, silos, store = resolve_cell(SMALL, "test"), tmp_path / "silos", tmp_path / ".commits"

    def deploy(run: str) -> None:
        deploy_cell(grid_of(silos, cell, run), cell, Heard(), tmp_path / run, store)

    silos.mkdir()
    grid_of(silos, cell, "one")  # ledgers are begun
    shutil.copytree(silos, tmp_path / "snapshot")
    deploy("one")
    checkpoints = [unpack_checkpoints((store / f"silo-{silo}").read_bytes()) for silo in range(3)]
    assert list(map(len, checkpoints)) == [2] * 3, "the ledger of training, and that of evaluations"
    assert [max(checkpoint.number for checkpoint in of_silo) for of_silo in checkpoints] == [4] * 3
    deploy("two")
    for path in (tmp_path / "snapshot").glob("*-1*"):
        shutil.copy(path, silos)
    with pytest.raises(RunError, match="silo 1 refuses: the coordinator has seen commit 8"):
        deploy("three")


def test_a_server_remembers_the_last_checkpoint_of_each_of_a_silos_last_ledgers(tmp_path: Path) -> None:
    """One message carries all of them, which are eight at most."""
    content, store = query_content(to_array_record(torch.zeros(2)), 1, ConfigRecord()), CheckpointStore(tmp_path)

    def remember(ledger: int, number: int) -> list[tuple[int, int]]:
        told = Checkpoint(f"{ledger:032x}", number, bytes(32)).wire_bytes
        store.record_checkpoint(1, add_bytes(content, REPLY_CHECKPOINT, told))
        sent = read_optional_bytes(CheckpointStore(tmp_path).add_checkpoints(1, content), SERVER_CHECKPOINTS)
        assert sent == read_optional_bytes(store.add_checkpoints(1, content), SERVER_CHECKPOINTS)
        assert store.add_checkpoints(0, content) is content
        return [(int(known.ledger_name, 16), known.number) for known in unpack_checkpoints(sent)]

    assert remember(1, 5) == [(1, 5)]
    assert remember(2, 9) == [(1, 5), (2, 9)]
    assert remember(1, 6) == [(2, 9), (1, 6)]
    for ledger in range(3, 9):
        remember(ledger, 1)
    assert remember(1, 7) == [(2, 9), *((ledger, 1) for ledger in range(3, 9)), (1, 7)]
    assert remember(99, 1) == [*((ledger, 1) for ledger in range(3, 9)), (1, 7), (99, 1)]


def test_malformed_checkpoints_of_a_silo_and_damaged_checkpoint_files_are_ignored(tmp_path: Path) -> None:
    content, commits = query_content(to_array_record(torch.zeros(2)), 1, ConfigRecord()), CheckpointStore(tmp_path)
    for told in (b"", b"x" * 55, b"x" * 57, b"x" * 10_000):
        commits.record_checkpoint(0, add_bytes(content, REPLY_CHECKPOINT, told))
    worded = add_bytes(content, REPLY_CHECKPOINT, b"")
    for record in worded.config_records.values():
        record[REPLY_CHECKPOINT] = "no bytes: a hostile silo ended the run with it"
    commits.record_checkpoint(0, worded)
    assert commits.add_checkpoints(0, content) is content
    commits.record_checkpoint(0, add_bytes(content, REPLY_CHECKPOINT, bytes(56)))
    sent = CheckpointStore(tmp_path).add_checkpoints(0, content)
    assert read_optional_bytes(sent, SERVER_CHECKPOINTS) == bytes(56)
    assert read_optional_bytes(content, SERVER_CHECKPOINTS) == b""
    for size in (57, 9 * 56):
        (tmp_path / "silo-0").write_bytes(bytes(size))
        assert CheckpointStore(tmp_path).add_checkpoints(0, content) is content
