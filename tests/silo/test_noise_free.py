"""`allow.noise_free`: refused by default, and what it does to a ledger is not forgotten."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import RunError
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.guard import Guard
from fedpriv.silo.ledger import SiloLedger, create_ledger
from fedpriv.silo.policy import Policy
from fedpriv.silo.shard import Shard
from tests.conftest import small_tree

NOISE_FREE = resolve_cell(small_tree(privacy={"mode": "none", "relation": "replace-one"}), "test")
NOISY = resolve_cell(small_tree(), "test")


def guard(folder: Path, *, noise_free: bool, trust: str = "untrusted") -> Guard:
    """Silo 0's guard, with a ledger that the next guard of this folder finds again."""
    allow = {"relation": "replace-one", "clip": 1e3, "rounds": 8, "budget": 4.0, "trust": trust}
    if noise_free:
        allow["noise_free"] = True
    policy = Policy.model_validate(
        {"silo": 0, "shard": "-", "classes": 10, "ledger": "-", "socket": "-", "allow": allow}
    )
    records = SimulatedFederation.of(NOISY).silo(0).records
    images = (records.features.numpy()[:, :784].reshape(-1, 28, 28) * 255.0).round().astype(np.uint8)
    shard = Shard(images, records.labels.numpy())
    if not (folder / "ledger.sqlite").exists():
        create_ledger(folder / "ledger.sqlite", folder / "ledger.sqlite.mark", shard.fingerprint)
    return Guard(policy, SiloLedger(folder / "ledger.sqlite"), shard)


def ask(of: Guard, run: str, cell: Cell) -> torch.Tensor:
    return of.answer(run, json.dumps(cell.canonical()), 1, task_of_cell(cell).objective.initial())


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_a_run_without_noise_is_refused_unless_the_policy_gives_up_protection(tmp_path: Path, trust: str) -> None:
    with pytest.raises(RunError, match="refuses: the scenario has"):
        ask(guard(tmp_path, noise_free=False, trust=trust), "run", NOISE_FREE)
    exact = ask(guard(tmp_path, noise_free=True, trust=trust), "run", NOISE_FREE)
    again = ask(guard(tmp_path, noise_free=True, trust=trust), "another", NOISE_FREE)
    assert torch.equal(exact, again)


def test_after_a_run_without_noise_nothing_private_is_left_to_promise(tmp_path: Path) -> None:
    ask(guard(tmp_path, noise_free=True), "bare", NOISE_FREE)
    assert SiloLedger(tmp_path / "ledger.sqlite").prices() == [math.inf]
    with pytest.raises(RunError, match="with all before inf; the budget is 4"):
        ask(guard(tmp_path, noise_free=False), "private", NOISY)


def test_a_run_that_a_narrowed_policy_finds_without_noise_is_not_left_at_its_price(tmp_path: Path) -> None:
    """Charged 4 where the server was trusted to add noise; by the narrowed policy its exact sums have no price."""
    summed = resolve_cell(small_tree(algorithm__trust="trusted"), "test")
    trusting = guard(tmp_path, noise_free=True, trust="trusted")
    query = task_of_cell(summed).objective.initial()
    trusting.answer("run", json.dumps(summed.canonical()), 1, query)
    assert SiloLedger(tmp_path / "ledger.sqlite").prices() == [pytest.approx(4.0)]
    with pytest.raises(RunError, match=r"by its policy this run costs .* and it was charged 4"):
        guard(tmp_path, noise_free=True).answer("run", json.dumps(summed.canonical()), 2, query)
