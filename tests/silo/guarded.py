"""Policies, shards and guards of silos as tests need them."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from tests.conftest import small_tree

ZERO = torch.zeros(7850, dtype=torch.float64)
CLIP = math.sqrt(2 * 785) + 78.5
UNACCOUNTABLE: dict[str, tuple[dict[str, Any], str]] = {
    "curator": (
        {
            "algorithm": {"name": "phased-sgd", "trust": "curator", "step": 0.01, "radius": 2.0},
            "privacy": {"relation": "zero-out", "mu": 1.0},
        },
        "trust = 'curator' broadcasts what is not private",
    ),
    "constants of other data": (
        {"model": {"name": "least-squares"}, "data": {"name": "linear-regression"}},
        "the constants of model 'least-squares' are known for one data set, not for a silo's own records",
    ),
}
"""Scenarios that no policy allows: the overrides of `small_tree`, and the reason."""


def write_silo(folder: Path, number: int = 0, **allow: Any) -> Path:
    """A policy file with its shard of 20 random records; the path of the policy."""
    generator = np.random.default_rng(number)
    images = generator.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    allowed = {"relation": "replace-one", "clip": CLIP, "rounds": 10, "budget": 4.0, **allow}
    if allowed.get("trust") == "secure-aggregation":
        allowed.setdefault("silos", 3)
    return write_policy(folder, images, generator.integers(0, 10, 20), number, **allowed)


def write_policy(folder: Path, images: NDArray[Any], labels: NDArray[Any], number: int = 0, **allow: Any) -> Path:
    """A policy file with a shard of these records; what it allows is all given, None leaves a key out."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"shard-{number}.npz", images=images, labels=labels)
    path = folder / f"silo-{number}.toml"
    path.write_text(
        f'silo = {number}\nclasses = 10\nshard = "shard-{number}.npz"\nledger = "ledger-{number}.sqlite"\n'
        f'socket = "{number}.sock"\n[allow]\n'
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in allow.items() if value is not None)
    )
    for each in (path, folder / f"shard-{number}.npz"):
        each.chmod(0o600)  # whatever the umask: a guard refuses what others may read or write
    return path


def guard_of(policy_path: Path) -> Guard:
    """The policy's guard; its ledger is begun if there is none, as an administrator does once."""
    policy = read_policy(policy_path)
    if not policy.ledger.exists():
        begin_ledgers(policy)
    return open_guard(policy)


def start_daemon(policy_path: Path) -> "subprocess.Popen[str]":
    """A real guard process, at the point where it answers; its ledger is begun if there is none."""
    policy = read_policy(policy_path)
    if not policy.ledger.exists():
        begin_ledgers(policy)
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("fedpriv")), "silo", "run", str(policy_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("answering on"), (line, process.communicate()[1])
    return process


def cell_json(**overrides: Any) -> str:
    return json.dumps(resolve_cell(small_tree(**overrides), "test").canonical_data(), sort_keys=True)


CELL = cell_json()
