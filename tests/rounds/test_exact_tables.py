"""A deployment over a table equals the simulation of it bit for bit: a column `split`, evaluations, persons.

Each hospital's guard holds the file that `prepare_silos` cut for it, with the simulation's keys in place of the
system's; of shards as such see `test_exact_runs`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.addons.statistics.plan import read_plan
from fedpriv.addons.statistics.tables import Statistics
from fedpriv.clients import simulated
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.random import integer_noise_key
from fedpriv.data.partition import secret_permutation
from fedpriv.rounds.floats import evaluation_integers_key
from fedpriv.scenario.load import parse_scenario
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
from tests.study.test_statistics import tree_of as counted_tree

TRUSTS = ("untrusted", "secure-aggregation", "trusted")


def deployed(folder: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Cell, Heard]:
    """The run's cell, and what a server over the guards of its table says."""
    scenario, heard = parse_scenario(tree, "test"), Heard()
    cell = scenario.points[0].cell
    policies = [each / "policy.toml" for each in prepare_silos(scenario, folder / "silos", run_count=1)]
    training, tests = integer_noise_key(cell.noise_seed), evaluation_integers_key(cell)
    opened, begun = Guard._open_new_run, ServerJournal.load_noise_key

    def new_run(guard: Guard, *asked: Any) -> Any:
        key = tests if "Evaluation" in type(guard._admission).__name__ else training
        monkeypatch.setattr("fedpriv.silo.guard.system_key", lambda: key)
        return opened(guard, *asked)

    def key_of(journal: ServerJournal) -> bytes:
        key = tests if journal._folder.name == "evaluation" else training
        monkeypatch.setattr("fedpriv.server.journal.system_key", lambda: key)
        return begun(journal)

    monkeypatch.setattr(Guard, "_open_new_run", new_run)
    monkeypatch.setattr(ServerJournal, "load_noise_key", key_of)
    monkeypatch.setattr(patient_grid, "_POLL_SECONDS", 0.001)
    with torch.inference_mode():
        deploy_cell(grid_over(policies, cell), cell, heard, folder / "journal")
    return cell, heard


def integers(tree: dict[str, Any], trust: str) -> dict[str, Any]:
    """The same in integers; `parse_scenario` takes seeds from [run]."""
    del tree["seed"]
    tree["algorithm"] |= {"trust": trust}
    tree["run"] |= {"arithmetic": "integers"}
    return tree


def same(cell: Cell, heard: Heard) -> None:
    """AssertionError unless the simulation has the model, the releases and every evaluation of what was heard."""
    simulated._cached_silo.cache_clear()
    (outcome,), recorder = run("inprocess", cell)
    assert heard.result is not None
    assert float(torch.from_numpy(outcome.cell_outcome.model).norm()) > 1e-3
    assert outcome.cell_outcome.model.tobytes() == heard.result.model.tobytes()
    assert outcome.cell_outcome.releases == heard.result.releases
    assert outcome.cell_outcome.evaluations == heard.result.evaluations
    if cell.evaluation is not None:
        assert len(heard.metrics) == 2
        assert [each[2:] for each in recorder.evaluations] == [tuple(each.values()) for each in heard.metrics]


@pytest.mark.every(2)
@pytest.mark.parametrize("trust", TRUSTS)
def test_a_deployment_on_a_table_with_a_test_split_matches_its_simulation_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    """Guarantee of `run.arithmetic`: every bit of model and metrics; rows of the other part are zeros in both."""
    tree = integers(table_tree(write_csv(tmp_path / "t.csv", rows())), trust)
    tree["evaluation"] = {"records": [36, 24], "mu": 1.0}
    same(*deployed(tmp_path, tree, monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize(("trust", "sampling"), in_turn(TRUSTS, ["fixed", "poisson", "allocation"]))
def test_a_deployment_that_protects_persons_differs_from_its_simulation_only_by_the_secret_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: str, sampling: str
) -> None:
    """Guarantee of `secret_permutation`: it is the one thing in which guards of persons differ from the
    simulation.

    The simulation reads persons in a public order; here it is given that of the guards, of the same key.
    """
    tree = integers(persons_tree(tmp_path, federation__sampling=sampling), trust)
    tree["federation"]["batches"] = [6, 5]  # all persons of both hospitals in two rounds
    of_names = SimulatedFederation.silo

    def in_secret(federation: SimulatedFederation, number: int) -> Silo:
        silo, held = of_names(federation, number), federation.silo_rows[number]
        return replace(silo, unit_order=held.argsort()[torch.from_numpy(secret_permutation(silo.key, len(held)))])

    cell, heard = deployed(tmp_path, tree, monkeypatch)
    with pytest.raises(AssertionError):
        same(cell, heard)
    monkeypatch.setattr(SimulatedFederation, "silo", in_secret)
    same(cell, heard)


def statistics_tree(folder: Path) -> dict[str, Any]:
    path = write_csv(folder / "t.csv", rows(120))
    tree = Statistics.from_plan(read_plan(counted_tree(path))).cell.canonical_data()
    return {key: value for key, value in tree.items() if key != "label"}


def newton_tree(folder: Path) -> dict[str, Any]:
    tree = table_tree(write_csv(folder / "t.csv", rows()))
    tree["model"] = {"name": "logistic-regression", "feature_norm": 2.0}
    tree["federation"] = {"silos": 2, "rounds": 3, "epochs": 3, "batches": [36, 24]}
    newton = {"name": "noisy-newton", "clip": 1.0, "curvature_clip": 0.5, "penalty": 0.1}
    return {**tree, "algorithm": newton, "privacy": {"relation": "replace-one", "mu": 1.0}}


@pytest.mark.every(2)
@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("tree_of", [statistics_tree, newton_tree])
def test_deployed_statistics_and_noisy_newton_runs_match_their_simulations_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: str, tree_of: Callable[[Path], dict[str, Any]]
) -> None:
    """Guarantee of `run.arithmetic`: statistics and Newton's steps have the same bits in process and deployed."""
    same(*deployed(tmp_path, integers(tree_of(tmp_path), trust), monkeypatch))


@pytest.mark.long
def test_statistics_under_ray_match_the_in_process_engine_bit_for_bit(tmp_path: Path) -> None:
    """In integers, masked; and in floating point, where the vectorized engine differs by rounding alone."""
    cell = parse_scenario(integers(statistics_tree(tmp_path), "secure-aggregation"), "test").points[0].cell
    floats = cell.model_copy(update={"run": cell.run.model_copy(update={"arithmetic": "float"})})
    outcomes, _ = run("ray", cell, floats)
    for ray, inprocess in zip(outcomes, run("inprocess", cell, floats)[0], strict=True):
        assert ray.cell_outcome.model.tobytes() == inprocess.cell_outcome.model.tobytes()
        assert ray.cell_outcome.releases == inprocess.cell_outcome.releases
    (vectorized,), _ = run("vectorized", floats)
    torch.testing.assert_close(*(torch.from_numpy(each.cell_outcome.model) for each in (vectorized, outcomes[1])))
