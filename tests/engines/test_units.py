"""Persons and clients of several records, from the scenario to the claim: engines agree, a unit is bounded."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.claims.ledger import stream_from_data, stream_to_data
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError
from fedpriv.data.partition import counted_mask, group_by_person, group_consecutive, index_persons
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.plan.evaluation import train_indices_of_silos
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.study.stored import privacy_data
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv
from tests.engines.builders import claim_of, plan_cell, run, run_cell, run_on_both, small_cell


def persons_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """Two hospitals, 20 patients with 1 to 6 visits each, all of them every round or in a secret one."""
    draw, records = np.random.default_rng(5), rows(240)
    owners = [[f"n{number}" for number in range(12)], [f"s{number}" for number in range(10)]]
    for record in records:
        record["patient"] = str(draw.choice(owners[record["hospital"] == "south"]))
        record["part"] = "train" if draw.random() < 0.6 else "test"
    tree = table_tree(write_csv(folder / "visits.csv", records), person="patient")
    tree["federation"] = {"silos": 2, "rounds": 8, "epochs": 4, "batches": [5, 4]}
    tree["privacy"] = {"unit": "user", "records": 4, "relation": "replace-one", "mu": 2.0}
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        tree[section] = {**tree[section], key: value}
    return tree


def person_cell(folder: Path, **changes: Any) -> Cell:
    return resolve_cell(persons_tree(folder, **changes), "test")


@pytest.mark.parametrize("sampling", ["fixed", "poisson", "allocation"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_engines_agree_on_persons(tmp_path: Path, trust: str, sampling: str) -> None:
    cell = person_cell(tmp_path, algorithm__trust=trust, federation__sampling=sampling)
    vectorized = run_cell("vectorized", cell)
    inprocess = run_cell("inprocess", cell)
    near = 1e-3 if trust == "secure-aggregation" else 1e-9
    model = vectorized.model
    assert np.linalg.norm(model) > 1e-3
    np.testing.assert_allclose(model, inprocess.model, rtol=near, atol=near * np.linalg.norm(model))
    assert vectorized.fraction_clipped == inprocess.fraction_clipped
    releases = [stream_from_data(json.loads(json.dumps(stream_to_data(stream)))) for stream in vectorized.releases]
    assert tuple(releases) == vectorized.releases
    claim = claim_of(releases)
    assert claim.unit == cell.privacy.protected_unit
    said = privacy_data(cell, releases)
    assert said["unit"] == "all records of one person in one silo, at most 4 a round"
    assert said["several_records"] is None


@pytest.mark.parametrize("sampling", ["fixed", "allocation"])
def test_results_say_what_several_records_of_a_person_cost(sampling: str) -> None:
    """Guarantee of `group_bounds`: k mu in public orders; where rounds are secret there is none, but an ε."""
    cell = small_cell(
        federation={"silos": 2, "rounds": 8, "batch": 2, "sampling": sampling},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "mu": 0.3},
    )
    outcome = run_cell("vectorized", cell)
    said = privacy_data(cell, outcome.releases)
    several = json.loads(json.dumps(said["several_records"]))
    assert list(several) == ["2", "8"]
    if sampling == "fixed":
        assert [bound["mu"] for bound in several.values()] == pytest.approx([0.6, 2.4])
        assert [bound["epsilon"] for bound in several.values()] == pytest.approx(
            [epsilon_of(0.6, 1e-5), epsilon_of(2.4, 1e-5)], abs=1e-6
        )
    else:
        assert [bound["mu"] for bound in several.values()] == [None, None]
        assert several["2"]["epsilon"] > 2 * said["epsilon"]
        assert several["8"]["epsilon"] is None or several["8"]["epsilon"] > 8 * said["epsilon"]


def test_without_noise_it_is_the_mean_of_clipped_means(tmp_path: Path) -> None:
    """One round, written out person by person: the first four records of each, over the public number of them."""
    cell = person_cell(tmp_path, privacy__mode="none", privacy__mu=None, algorithm__trust="trusted")
    task = load_task(cell)
    plain = load_task(resolve_cell({**persons_tree(tmp_path), "privacy": {"relation": "zero-out", "mu": 1.0}}, ""))
    assert task.unit_indices is not None
    names = np.asarray(task.persons)
    silo = SimulatedFederation.from_cell(cell).silo(1)
    query, one = (
        torch.randn(silo.plan.objective.dimension, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
    )
    release, _ = silo.answer(silo.initial_state(), 1, query)
    total = torch.zeros_like(query)
    for unit in partition_records(cell)[1][:4].tolist():
        person = names[index_persons(names)[0][unit]]
        own = np.flatnonzero((names == person) & counted_mask(plain.train.labels.numpy()))[:4]
        assert own.tolist() == [row for row in task.unit_indices[unit].tolist() if row >= 0]
        gradients = [
            task.objective.increment(
                Query([query]), Batch(Records(plain.train.features[[row]], plain.train.labels[[row]]), one), 1e9
            ).total
            for row in own
        ]
        mean = torch.stack(gradients).mean(0)
        total += mean * min(1.0, 1.0 / float(mean.norm()))
    torch.testing.assert_close(release.vector, total / 4, rtol=1e-9, atol=1e-12)


def test_a_person_moves_a_release_by_their_clip_however_many_records_they_have(tmp_path: Path) -> None:
    """Guarantee of the user unit: 2 C / B for one person exchanged for another, with four records far away."""
    cell = person_cell(tmp_path, privacy__mode="none", privacy__mu=None, algorithm__trust="trusted")
    silo = SimulatedFederation.from_cell(cell).silo(0)
    query = torch.randn(silo.plan.objective.dimension, dtype=torch.float64)
    release, _ = silo.answer(silo.initial_state(), 1, query)
    features, labels = silo.records.features.clone(), silo.records.labels.clone()
    features[2], labels[2] = 1e6 * torch.randn(features[2].shape, dtype=torch.float64), 1
    other, _ = dataclasses.replace(silo, records=Records(features, labels)).answer(silo.initial_state(), 1, query)
    assert 0.0 < float((release.vector - other.vector).norm()) <= 2.0 / 5 * (1 + 1e-9)


@pytest.mark.slow
def test_clients_are_rows_of_a_pool() -> None:
    """Clients of six records each, ten of which are expected in a round, drawn in secret by the server's silo."""
    changes = {
        "federation": {"silos": 1, "rounds": 12, "epochs": 3, "batch": 10, "sampling": "poisson"},
        "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
        "privacy": {"unit": "client", "records": 6, "relation": "zero-out", "epsilon": 2.0},
    }
    cell = small_cell(**changes)
    vectorized, inprocess = run_on_both(cell)
    claim = claim_of(vectorized.releases)
    assert claim.unit.description == "everything one client holds, at most 6 records a round"
    assert len(partition_records(cell)[0]) == 40
    assert vectorized.gradient_evaluations == 6 * 12 * 10


def test_persons_are_grouped_by_their_own_records_alone() -> None:
    owners = ["b", "a", "b", "c", "b", "a"]
    assert group_by_person(owners, 2).tolist() == [[1, 5], [0, 2], [3, -1]]
    assert group_by_person(owners, 4).tolist() == [[1, 5, -1, -1], [0, 2, 4, -1], [3, -1, -1, -1]]
    assert group_by_person([*owners[1:], "c", "0"], 2).tolist() == [[6, -1], [0, 4], [1, 3], [2, 5]]
    counts = np.array([True, True, False, False, True, False])
    assert group_by_person(owners, 2, counts).tolist() == [[1, -1], [0, 4], [-1, -1]]  # "c" keeps a place
    assert group_by_person([7, 7, 3], 1).tolist() == [[2], [0]]
    assert group_consecutive(7, 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_records_of_a_silo_are_those_of_its_persons(tmp_path: Path) -> None:
    cell = person_cell(tmp_path)
    names = np.asarray(load_task(cell).persons)
    of_silos = [set(names[records].tolist()) for records in train_indices_of_silos(cell)]
    assert [len(each) for each in of_silos] == [10, 8]
    assert all(name.startswith("n") for name in of_silos[0])
    assert not of_silos[0] & of_silos[1]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"privacy": {"unit": "user", "relation": "zero-out", "mu": 1.0}},
            'needed for unit = "user": how many records of one person count at most, e.g. privacy.records = 4',
        ),
        (
            {"privacy": {"unit": "client", "relation": "zero-out", "mu": 1.0}},
            'needed for unit = "client": how many records one client holds at most, e.g. privacy.records = 4',
        ),
        (
            {"privacy": {"records": 4, "relation": "zero-out", "mu": 1.0}},
            'privacy: records = 4 is for unit = "user" or "client"; set that, or leave it out',
        ),
        (
            {"privacy": {"unit": "user", "records": 4, "relation": "zero-out", "mu": 1.0}},
            "the data do not say whose a record is",
        ),
        (
            {"privacy": {"unit": "client", "records": 4, "shared": 2, "relation": "zero-out", "mu": 1.0}},
            "only persons have records in several silos",
        ),
        (
            {
                "privacy": {"unit": "client", "records": 4, "relation": "zero-out", "mu": 1.0},
                "data": {"name": "synthetic", "partition": "shards", "shards": 2},
            },
            'partition = "shards" with privacy.unit = "client"',
        ),
    ],
)
def test_units_that_the_data_do_not_have_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        resolve_cell({**small_tree(), **changes}, "test")


def test_persons_in_several_silos_are_refused_with_secret_rounds(tmp_path: Path) -> None:
    assert person_cell(tmp_path, privacy__shared=2).privacy.protected_unit.max_silos == 2
    with pytest.raises(InputError, match="accounted for in public orders only"):
        person_cell(tmp_path, privacy__shared=2, federation__sampling="poisson")
    with pytest.raises(InputError, match="there are 2 silos"):
        person_cell(tmp_path, privacy__shared=3)


@pytest.mark.parametrize("name", ["fedavg", "goldstein-erm"])
def test_what_takes_rows_for_records_is_refused(tmp_path: Path, name: str) -> None:
    settings = {
        "fedavg": {"step": 0.1, "local_batch": 2, "local_epochs": 1},
        "goldstein-erm": {
            "smoothing": 0.1, "radius": 0.02, "period": 3, "anchor_clip": 20.0, "clip": 5.0, "step": 0.0005,
            "window": 2, "output": "last",
        },
    }[name]  # fmt: skip
    tree = persons_tree(tmp_path)
    tree["algorithm"] = {"name": name, "trust": "trusted", **settings}
    if name == "goldstein-erm":
        tree["federation"] = {"silos": 2, "rounds": 6, "epochs": 6, "batches": [10, 8]}
    else:
        tree["privacy"] = {"unit": "user", "records": 4, "relation": "zero-out", "mode": "none"}
    cell = resolve_cell(tree, "test")
    with pytest.raises(InputError, match=r'privacy\.unit = "user"'):
        plan_cell(cell)


@pytest.mark.parametrize("model", ["softmax-regression", "logistic-regression", "mlp"])
def test_hospitals_train_alike_on_both_engines(tmp_path: Path, model: str) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["model"] = {"name": model, **({} if model == "mlp" else {"feature_norm": 2.0})}
    tree["run"] |= {"per_silo": True, "metrics": ["auc", "calibration_error"]}
    cell = resolve_cell(tree, "test")
    (fast,), heard = run("vectorized", cell)
    slow = run_cell("inprocess", cell)
    np.testing.assert_allclose(fast.cell_outcome.model, slow.model, rtol=1e-9, atol=1e-12)
    assert set(fast.cell_outcome.metrics) == set(slow.metrics) > {"test_auc", "test_auc_at_north"}
    for name, value in fast.cell_outcome.metrics.items():
        assert slow.metrics[name] == pytest.approx(value), name
    assert len(heard.evaluations) == 2


def test_a_real_target_trains_and_is_told_in_its_own_unit(tmp_path: Path) -> None:
    records = rows(200)
    for number, record in enumerate(records):
        record["cost"] = str(3 * int(record["age"]) + 5 * (number % 7 - 3))
    tree = table_tree(
        write_csv(tmp_path / "t.csv", records), target="cost", range=[0, 300], columns={"age": {"range": [0, 100]}}
    )
    del tree["data"]["table"]["classes"]
    tree["model"] = {"name": "linear-regression", "feature_norm": 1.0}
    tree["federation"] = {"silos": 2, "rounds": 60, "epochs": 60, "batches": [80, 50]}
    tree["privacy"] = {"relation": "zero-out", "mode": "none"}
    tree["run"] |= {"metrics": ["r2", "mae"]}
    outcome = run_cell("vectorized", resolve_cell(tree, "test"))
    metrics = outcome.metrics
    assert metrics["test_r2"] > 0.95
    assert 0.5 < metrics["test_mae"] < 15.0  # of a cost between 60 and 270; 150 times less in scaled units
