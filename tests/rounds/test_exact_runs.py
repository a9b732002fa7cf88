"""A deployment and a simulation with `run.arithmetic = "integers"` agree bit for bit, whoever adds the noise.

Guards and a deployed server of this process, with the simulation's keys in place of the system's, are restarted in
the middle of the run; every mechanism that has state takes part.
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.claims.ledger import make_release_streams
from fedpriv.clients.simulated import make_client_app
from fedpriv.core.random import integer_noise_key
from fedpriv.data.named import load
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import deployed_strategy
from fedpriv.server.journal import EntrySizes
from fedpriv.server.strategy import ReleaseStrategy
from fedpriv.silo.fingerprint import begin_ledger
from fedpriv.silo.guard import Guard
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import Policy, RunLimits
from fedpriv.silo.shard import Shard
from tests.attacks.guards import KEPT_STATE, scenario
from tests.engines.test_engines import run
from tests.parts import in_turn
from tests.server.deployed import KilledError, MortalJournal

TRUSTS = ("untrusted", "secure-aggregation", "trusted")


SECRET = {
    f"{sampling}, drawn in secret": {
        "algorithm": {"name": "dp-sgd", "clip": 1.0, "step": 0.1},
        "federation": {"silos": 3, "rounds": 8, "batch": 4, "sampling": sampling},
        "privacy": {"relation": relation, "epsilon": 2.0},
    }
    for sampling, relation in (("allocation", "replace-one"), ("poisson", "zero-out"))
}
SECRET["balanced, drawn in secret"] = {
    "algorithm": {"name": "dp-sgd", "clip": 1.0, "step": 0.1},
    "federation": {"silos": 3, "rounds": 8, "epochs": 2, "batch": 4, "sampling": "balanced"},
    "privacy": {"relation": "replace-one", "epsilon": 2.0},
}
SECRET |= {
    f"banded noise and groups of rounds, {sampling}": {
        "algorithm": {"name": "dp-ftrl", "mechanism": "banded", "bands": 2, "clip": 1.0, "step": 0.1},
        "federation": {"silos": 3, "rounds": 8, "batch": 4, "sampling": sampling, "groups": 2},
        "privacy": {"relation": relation, "epsilon": 2.0},
    }
    for sampling, relation in (("allocation", "replace-one"), ("poisson", "zero-out"))
}
RUNS: dict[str, dict[str, Any]] = {**KEPT_STATE, **SECRET}


class GuardedSilo:
    """A silo with a guard and a ledger on disk; `restart` is a process that ended and another one that began."""

    def __init__(self, folder: Path, number: int, cell: Cell, shard: Shard) -> None:
        self._cell, self._shard = json.dumps(cell.canonical_data()), shard
        allow = {
            "relation": cell.privacy.relation, "clip": 2.0**20, "rounds": 100, "budget": 100.0, "silos": 3,
            "slack": 1e-5, "trust": cell.algorithm.trust,
        }  # fmt: skip
        self._policy = Policy(
            silo=number, shard=folder / "none", classes=10, ledger=folder / f"{number}.sqlite",
            socket=folder / "none", allow=RunLimits.model_validate(allow),
        )  # fmt: skip
        begin_ledger(self._policy, shard)
        self._opened()

    def _opened(self) -> None:
        self.ledger = SiloLedger(self._policy.ledger)
        self._guard = Guard(self._policy, self.ledger, self._shard)

    def restart(self) -> None:
        self.ledger.close()
        self._opened()

    def public_key(self, run: str) -> bytes:
        return self._guard.public_key(run, self._cell)

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        return self._guard.answer(run, self._cell, t, query, keys)


@pytest.fixture(autouse=True)
def the_keys_of_the_simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("fedpriv.silo.guard.system_key", lambda: integer_noise_key(1))
    monkeypatch.setattr("fedpriv.server.journal.system_key", lambda: integer_noise_key(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cell_of(name: str, trust: str, **overrides: Any) -> Cell:
    overrides = {"run__arithmetic": "integers", "run__dtype": "float32", **overrides}
    text = scenario(trust, **RUNS[name], **overrides)
    return resolve_cell(json.loads(text), "test")


def guards_of(folder: Path, cell: Cell) -> list[GuardedSilo]:
    folder.mkdir(exist_ok=True)
    data = load(cell.data.name)
    return [
        GuardedSilo(folder, number, cell, Shard(data.train_images[order], data.train_labels[order]))
        for number, order in enumerate(share.numpy() for share in partition_records(cell))
    ]


def deployed(folder: Path, cell: Cell, *, dies_in: int) -> ReleaseStrategy:
    """A run over guards; server and guards end in round `dies_in`, after or before its entry, and go on."""
    plan, silos = make_plan(cell, load_task(cell).objective, for_release=True), guards_of(folder / "silos", cell)
    initial = plan.objective.initial()

    def served(dies_in: int) -> ReleaseStrategy:
        grid = InProcessGrid(make_client_app(silos, "run"), len(silos), make_run_config(cell, Path()))
        with MortalJournal(folder / "journal", EntrySizes.from_plan(plan)) as journal, torch.inference_mode():
            journal.dies_in, journal.after_writing = abs(dies_in), dies_in < 0
            strategy = deployed_strategy(plan, initial, journal)
            with suppress(KilledError):
                strategy.run(grid)
        return strategy

    served(dies_in)
    for silo in silos:
        silo.restart()
    return served(0)


@pytest.mark.every(56)
@pytest.mark.sample(2)
@pytest.mark.parametrize(("of", "dies_in"), in_turn(itertools.product(RUNS, TRUSTS), [3, -4]))
def test_an_integer_deployment_gives_the_same_model_as_its_simulation_bit_for_bit(
    tmp_path: Path, of: tuple[str, str], dies_in: int
) -> None:
    """Guarantee of `run.arithmetic`: every bit of the model, for every mechanism that guards accept."""
    name, trust = of
    cell = cell_of(name, trust)
    (outcome,), _ = run("inprocess", cell)
    strategy = deployed(tmp_path, cell, dies_in=dies_in)
    assert strategy.rounds_done == cell.schedule.rounds
    assert np.linalg.norm(outcome.cell_outcome.model) > 1e-3
    assert outcome.cell_outcome.model.tobytes() == strategy.model.numpy().tobytes()
    assert outcome.cell_outcome.releases == make_release_streams(strategy.plan, strategy.rounds_done)


MEASURED: dict[str, Any] = {"run__metrics": ["balanced_accuracy"], "run__goldstein_radius": 0.1}
LOCAL_STEPS: dict[str, Any] = {
    "algorithm": {"name": "dp-fedavg", "clip": 1.0, "local_steps": 3, "local_step": 0.1},
    "privacy": {"relation": "zero-out", "mu": 2.0, "unit": "client", "records": 2},
    "federation__rounds": 4,
    "run__evaluations": 1,
    "run__arithmetic": "integers",
    "run__dtype": "float32",
}


@pytest.mark.slow
def test_extra_metrics_leave_an_integer_run_unchanged_bit_for_bit(tmp_path: Path) -> None:
    """In a simulation, and of guards, which measure nothing."""
    plain, cell = cell_of("tree", "untrusted"), cell_of("tree", "untrusted", **MEASURED)
    expected, found = (run("inprocess", each)[0][0].cell_outcome for each in (plain, cell))
    assert found.releases == expected.releases
    assert found.model.tobytes() == expected.model.tobytes()
    assert deployed(tmp_path, cell, dies_in=3).model.numpy().tobytes() == expected.model.tobytes()


def test_extra_metrics_leave_an_integer_run_of_local_steps_unchanged_bit_for_bit() -> None:
    """Clients of linear scores take the same way with it as without, which a guard without it takes too."""
    plain, cell = (
        resolve_cell(json.loads(scenario(**{**LOCAL_STEPS, **more})), "test") for more in ({}, MEASURED)
    )
    expected, found = (run("inprocess", each)[0][0].cell_outcome for each in (plain, cell))
    assert np.linalg.norm(expected.model) > 1e-3
    assert found.model.tobytes() == expected.model.tobytes()
