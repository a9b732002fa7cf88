"""Ledgers of the last release: today's code reads, charges and goes on with what fedpriv 0.3.1 wrote.

`data/ledger-0.3.1` was written by fedpriv 0.3.1 (commit a6cd429b): a table with its policy and key, a ledger with
30 runs that are over (eleven algorithms, four kinds of sampling, two trust settings), a run under way,
its mark and its backup, the scenario of that run, the checkpoints that a server was sent last, the lines of its
`silo status`, and its reply in round 3 of the run under way, which it gave from a copy.

A release that changes LEDGER_VERSION gets such a folder of the release before it, and a conversion, as 0.3.0 has.
"""

import shutil
from pathlib import Path

import pytest
import torch

from fedpriv.core.errors import FedprivError, InputError
from fedpriv.silo.backup import back_up_ledgers, restore_ledgers
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import end_run, format_status
from tests.silo.charged import charged
from tests.silo.guarded import guard_of, refused
from tests.silo.unkeyed import copied, stolen

DATA = Path(__file__).parent / "data" / "ledger-0.3.1"
POLICY, QUERY, RUNS = "policy.toml", torch.zeros(14, dtype=torch.float64), 31


@pytest.fixture
def last(tmp_path: Path) -> Path:
    return copied(tmp_path / "silo", DATA)


def ask(guard: Guard, folder: Path, t: int, run: str = "under way", checkpoints: bytes = b"") -> torch.Tensor:
    return guard.answer(run, (folder / "scenario.json").read_text(), t, QUERY, checkpoints=checkpoints)


def test_guarantee_a_ledger_of_fedpriv_0_3_1_has_the_same_runs_at_the_same_price(last: Path) -> None:
    """Gains: a budget again, were a charge of before read as less, or one run of many not at all."""
    told = (last / "status.txt").read_text().splitlines()
    assert format_status(last / POLICY)[1:] == told
    guard = guard_of(last / POLICY)
    charges = guard._ledger.charges()
    assert len(charges) == RUNS
    assert guard._reprice(charges) == charges, "by today's accounting no run of before cost more"
    assert format_status(last / POLICY)[1:] == told


def test_a_run_begun_by_fedpriv_0_3_1_continues_with_the_same_bytes(last: Path) -> None:
    """A silo that is upgraded while a run goes on answers as if it had not been."""
    guard, checkpoints = guard_of(last / POLICY), (last / "commits").read_bytes()
    again = ask(guard, last, 2)
    assert ask(guard, last, 3, checkpoints=checkpoints).numpy().tobytes() == (last / "reply-3").read_bytes()
    assert torch.equal(ask(guard, last, 2), again)
    guard._ledger.close()
    guard = guard_of(last / POLICY)
    for t in range(4, 9):
        ask(guard, last, t)
    assert torch.isfinite(ask(guard, last, 1, run="new")).all()
    assert len(charged(guard)) == RUNS + 1


def test_a_ledger_of_fedpriv_0_3_1_refuses_finished_runs_changed_queries_and_an_exceeded_budget(
    last: Path,
) -> None:
    guard, cell = guard_of(last / POLICY), (last / "scenario.json").read_text()
    over = guard._ledger.find_run("dp-sgd, trusted")
    assert over is not None
    refused(guard, "this run is over", over.cell, 2, QUERY, "dp-sgd, trusted")
    refused(guard, "round 2 was answered already, for another query", cell, 2, QUERY + 1.0, "under way")
    policy = (last / POLICY).read_text()
    (last / POLICY).write_text(policy.replace("budget = 60.0", "budget = 9.4"))
    with pytest.raises(FedprivError, match=r"with all others 9\.47.*the budget is 9\.4") as refusal:
        ask(guard_of(last / POLICY), last, 1, run="new")
    assert "\n" not in str(refusal.value)


def test_a_rolled_back_ledger_of_fedpriv_0_3_1_is_refused(last: Path) -> None:
    """Gains: a budget again, from a snapshot that is put back after an upgrade, alone or with its mark."""
    snapshot = shutil.copytree(last, last.with_name("snapshot"))
    guard = guard_of(last / POLICY)
    ask(guard, last, 3)
    checkpoint = guard.checkpoint("under way", (last / "scenario.json").read_text(), 3)
    guard._ledger.close()
    for path in stolen(last):
        path.unlink()
    shutil.copy2(snapshot / "ledger.sqlite", last)
    mark = shutil.copy2(snapshot / "ledger.sqlite.mark", last)
    with pytest.raises(FedprivError, match="which is not in it"):
        ask(guard_of(last / POLICY), last, 3, checkpoints=checkpoint)
    Path(mark).unlink()
    with pytest.raises(InputError, match="no such mark of the ledger"):
        guard_of(last / POLICY)


@pytest.mark.parametrize("key", ["", "another"])
def test_a_ledger_of_fedpriv_0_3_1_is_refused_with_other_records_or_another_record_key(
    last: Path, key: str
) -> None:
    path = last / "own.csv.key"
    if key:
        path.write_bytes(bytes(32))
    else:
        path.unlink()
    with pytest.raises(InputError, match="no key of the records" if not key else "is not the key that") as refusal:
        guard_of(last / POLICY)
    assert "\n" not in str(refusal.value)
    shutil.copy2(DATA / "own.csv.key", path)
    path.chmod(0o600)
    rows = (last / "own.csv").read_text().splitlines()
    (last / "own.csv").write_text("\n".join([rows[0], *reversed(rows[1:])]) + "\n")
    with pytest.raises(InputError, match="these are not the records, in the order"):
        guard_of(last / POLICY)


def test_a_backup_of_fedpriv_0_3_1_is_restored_with_all_its_charges(last: Path) -> None:
    for path in stolen(last):
        path.unlink()
    (line,) = restore_ledgers(last / POLICY, last / "backup")
    assert "the whole budget of the policy is charged" in line, (
        "nobody knows what was released since, without the mark"
    )
    guard = guard_of(last / POLICY)
    assert charged(guard)[:RUNS] == charged(copied(last.with_name("again"), DATA) / POLICY)
    refused(guard, "the budget is 60", (last / "scenario.json").read_text(), 1, QUERY, "new")


def test_current_commands_end_runs_and_back_up_a_ledger_of_fedpriv_0_3_1(last: Path) -> None:
    before = charged(last / POLICY)
    end_run(last / POLICY, "under way")
    refused(
        guard_of(last / POLICY), "this run is over", (last / "scenario.json").read_text(), 3, QUERY, "under way"
    )
    back_up_ledgers(last / POLICY, last / "new")
    (last / "ledger.sqlite").unlink()
    (line,) = restore_ledgers(last / POLICY, last / "new")
    assert "nothing was released since" in line
    assert charged(guard_of(last / POLICY)) == before
