"""Policies, shards and guards of silos as tests need them."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpriv.core.errors import RunError
from fedpriv.data.schema import TableSchema
from fedpriv.rounds.round import RoundState
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.demo import format_policy
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from fedpriv.silo.rows import RunRow
from fedpriv.silo.silo import Silo, SiloRelease
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
    for file in (path, folder / f"shard-{number}.npz"):
        file.chmod(0o600)  # whatever the umask: a guard refuses what others may read or write
    return path


def write_table_policy(
    folder: Path,
    shard: Path,
    allow: dict[str, Any],
    schema: Mapping[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """A policy file over a table or arrays of an owner's alone; `keys` as they stand above [allow]."""
    shard.chmod(0o600)
    files = {"silo": 0, "shard": shard.name, "ledger": "l.sqlite", "socket": "s.sock", **keys}
    table = None if schema is None else TableSchema.model_validate(schema)
    path = folder / "policy.toml"
    path.write_text(format_policy(files, allow, table, evaluation))
    path.chmod(0o600)
    return path


def change_shard(folder: Path, number: int = 0, **arrays: Any) -> Path:
    """Replace or add these arrays of a silo's shard, and return the path of the shard."""
    path = folder / f"shard-{number}.npz"
    with np.load(path) as shard:
        changed = {**dict(shard), **arrays}
    np.savez(path, **changed)
    return path


def guard_of(policy_path: Path) -> Guard:
    """The policy's guard; its ledger is begun if there is none, as an administrator does once."""
    policy = read_policy(policy_path)
    if not policy.ledger.exists():
        begin_ledgers(policy)
    return open_guard(policy)


def guard_at(folder: Path, number: int = 0, **allow: Any) -> Guard:
    """Return the guard of a silo of this folder, whose policy is written anew; its ledger stays."""
    return guard_of(write_silo(folder, number, **allow))


def find_run(guard: Guard, run: str = "run") -> RunRow:
    """Return what the guard's ledger has of a run that was opened."""
    opened = guard._ledger.find_run(run)
    assert opened is not None
    return opened


def refused(
    guard: Guard,
    reason: str,
    cell: str | None = None,
    t: int = 1,
    query: torch.Tensor = ZERO,
    run: str = "run",
    *,
    error: type[Exception] = RunError,
    **others: bytes,
) -> str:
    """Return the one line with which the guard refuses a round, for this reason."""
    with pytest.raises(error, match=reason) as refusal:
        guard.answer(run, CELL if cell is None else cell, t, query, **others)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def silo_with_key_of(guard: Guard, run: str = "run") -> Silo:
    """Return the silo that the guard answers a run from, in memory, with the key of the ledger."""
    opened = find_run(guard, run)
    assert opened.key is not None
    admitted = guard._admission.admit(opened.cell)
    records = guard._views.records(admitted.cell)
    return Silo.for_release(0, admitted.plan, records, opened.key, admitted.scenario_digest)


def replay(silo: Silo, queries: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, SiloRelease, RoundState]]:
    """Yield message, release and state of each round of a silo, from its first round on."""
    state = silo.initial_state()
    for t, query in enumerate(queries, start=1):
        release, state = silo.answer(state, t, query)
        yield silo.make_message(release.vector, t, b"", state.query_chain), release, state


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
