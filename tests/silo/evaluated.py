"""Guards with test records, as tests of evaluations need them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import Guards, begin_ledgers, open_guards
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import read_policy
from tests.silo.guarded import cell_json, change_shard, write_silo

TESTS = 30
MODEL = torch.linspace(-1.0, 1.0, 7850, dtype=torch.float64)
ASKED: dict[str, Any] = {"records": 30, "mu": 1.0}
"""Four evaluations of 30 records: what all of them cost."""
SCENARIO = cell_json(evaluation=ASKED)


def write_tested(folder: Path, number: int = 0, evaluation: dict[str, Any] | None = None, **allow: Any) -> Path:
    """As `write_silo`, with 30 test records and an [evaluation] of this budget and these bounds."""
    path, generator = write_silo(folder, number, **allow), np.random.default_rng(100 + number)
    images = generator.integers(0, 256, (TESTS, 28, 28), dtype=np.uint8)
    change_shard(folder, number, test_images=images, test_labels=generator.integers(0, 10, TESTS))
    bounds = {"budget": 1.0, **(evaluation or {})}.items()
    path.write_text(
        path.read_text() + "[evaluation]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in bounds)
    )
    return path


def guards_of(path: Path) -> Guards:
    """Return the policy's guards; its ledgers are begun if there are none."""
    policy = read_policy(path)
    if not policy.ledger.exists():
        begin_ledgers(policy)
    return open_guards(policy)


def evaluator(path: Path) -> Guard:
    """Return the guard of the test records."""
    guard = guards_of(path).tests
    assert guard is not None
    return guard


def ledger_of(path: Path) -> SiloLedger:
    """Return the ledger of the test records."""
    policy = read_policy(path).test_policy
    assert policy is not None
    return SiloLedger(policy.ledger, policy.mark_path)
