"""A deployment over a table equals the simulation of it bit for bit: a column `split`, evaluations, persons.

Each hospital's guard holds the file that `prepare_silos` cut for it, with the simulation's keys in place of the
system's; of shards as such see `test_exact_runs`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.clients import simulated
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.random import integers_key
from fedpriv.data.partition import secret_order
from fedpriv.rounds.beside import evaluation_integers_key
from fedpriv.scenario.load import scenario_of
from fedpriv.scenario.schema import Cell
from fedpriv.server import grid as patient_grid
from fedpriv.server.app import deploy_cell
from fedpriv.server.journal import ServerJournal
from fedpriv.silo.demo import prepare_silos
from fedpriv.silo.guard import Guard
from fedpriv.silo.silo import Silo
from tests.data.tables import rows, table_tree, write_csv
from tests.engines.test_engines import run
from tests.engines.test_units import persons_tree
from tests.parts import in_turn
from tests.server.test_evaluation import Heard, grid_over

TRUSTS = ("untrusted", "secure-aggregation", "trusted")


def deployed(folder: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Cell, Heard]:
    """The run's cell, and what a server over the guards of its table says."""
    scenario, heard = scenario_of(tree, "test"), Heard()
    cell = scenario.points[0].cell
    policies = [each / "policy.toml" for each in prepare_silos(scenario, folder / "silos", runs=1)]
    training, tests = integers_key(cell.seed), evaluation_integers_key(cell)
    opened, begun = Guard._new_run, ServerJournal.key

    def new_run(guard: Guard, *asked: Any) -> Any:
        key = tests if "Evaluation" in type(guard._admission).__name__ else training
        monkeypatch.setattr("fedpriv.silo.guard.system_key", lambda: key)
        return opened(guard, *asked)

    def key_of(journal: ServerJournal) -> bytes:
        key = tests if journal._folder.name == "evaluation" else training
        monkeypatch.setattr("fedpriv.server.journal.system_key", lambda: key)
        return begun(journal)

    monkeypatch.setattr(Guard, "_new_run", new_run)
    monkeypatch.setattr(ServerJournal, "key", key_of)
    monkeypatch.setattr(patient_grid, "_POLL_SECONDS", 0.001)
    with torch.inference_mode():
        deploy_cell(grid_over(policies, cell), cell, heard, folder / "journal")
    return cell, heard


def integers(tree: dict[str, Any], trust: str) -> dict[str, Any]:
    """The same in integers; `scenario_of` takes seeds from [run]."""
    del tree["seed"]
    tree["algorithm"] |= {"trust": trust}
    tree["run"] |= {"arithmetic": "integers"}
    return tree


def same(cell: Cell, heard: Heard) -> None:
    """AssertionError unless the simulation has the model, the releases and every evaluation of what was heard."""
    simulated._cached_silo.cache_clear()
    (outcome,), recorder = run("inprocess", cell)
    assert heard.result is not None
    assert float(torch.from_numpy(outcome.finished.model).norm()) > 1e-3
    assert outcome.finished.model.tobytes() == heard.result.model.tobytes()
    assert outcome.finished.releases == heard.result.releases
    assert outcome.finished.evaluations == heard.result.evaluations
    if cell.evaluation is not None:
        assert len(heard.metrics) == 2
        assert [each[2:] for each in recorder.evaluations] == [tuple(each.values()) for each in heard.metrics]


@pytest.mark.parametrize("trust", TRUSTS)
def test_a_table_that_says_what_is_for_testing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    """Guarantee of `run.arithmetic`: every bit of model and metrics; rows of the other part are zeros in both."""
    tree = integers(table_tree(write_csv(tmp_path / "t.csv", rows())), trust)
    tree["evaluation"] = {"records": [36, 24], "mu": 1.0}
    same(*deployed(tmp_path, tree, monkeypatch))


@pytest.mark.parametrize(("trust", "sampling"), in_turn(TRUSTS, ["fixed", "poisson", "allocation"]))
def test_persons_in_a_secret_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: str, sampling: str
) -> None:
    """Guarantee of `secret_order`: it is the one thing in which guards of persons differ from the simulation.

    The simulation reads persons in a public order; here it is given that of the guards, of the same key.
    """
    tree = integers(persons_tree(tmp_path, federation__sampling=sampling), trust)
    tree["federation"]["batches"] = [6, 5]  # all persons of both hospitals in two rounds
    of_names = SimulatedFederation.silo

    def in_secret(federation: SimulatedFederation, number: int) -> Silo:
        silo, held = of_names(federation, number), federation.order[number]
        return replace(silo, order=held.argsort()[torch.from_numpy(secret_order(silo.key, len(held)))])

    cell, heard = deployed(tmp_path, tree, monkeypatch)
    with pytest.raises(AssertionError):
        same(cell, heard)
    monkeypatch.setattr(SimulatedFederation, "silo", in_secret)
    same(cell, heard)
