"""Persons and clients of several records, from the scenario to the claim: engines agree, a unit is bounded."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.data.partition import counted_mask, group_by_person, group_consecutive, index_persons
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.plan.evaluation import train_indices_of_silos
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.study.stored import privacy_data
from tests.data.tables import rows, table_tree, write_csv
from tests.engines.builders import (
    QUIET,
    claim_of,
    plan_cell,
    refusal,
    run_cell,
    run_on_both,
    run_together,
    small_cell,
    store_and_load,
)
from tests.engines.test_fedavg import FEDAVG
from tests.engines.test_goldstein import ERM
from tests.rough import rough_accounting

rough = pytest.fixture(autouse=True, scope="module")(rough_accounting)


@functools.cache
def _visits() -> list[dict[str, str]]:
    draw, records = np.random.default_rng(5), rows(240)
    owners = [[f"n{number}" for number in range(12)], [f"s{number}" for number in range(10)]]
    for record in records:
        record["patient"] = str(draw.choice(owners[record["hospital"] == "south"]))
        record["part"] = "train" if draw.random() < 0.6 else "test"
    return records


def persons_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """Two hospitals, 20 patients with 1 to 6 visits each, all of them every round or in a secret one."""
    tree = table_tree(write_csv(folder / "visits.csv", _visits()), person="patient")
    tree["federation"] = {"silos": 2, "rounds": 8, "epochs": 4, "batches": [5, 4]}
    tree["privacy"] = {"unit": "user", "records": 4, "relation": "replace-one", "mu": 2.0}
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        tree[section] = {**tree[section], key: value} if key else value
    return tree


def person_cell(folder: Path, **changes: Any) -> Cell:
    return resolve_cell(persons_tree(folder, **changes), "test")


EXACT = {"privacy__mode": "none", "privacy__mu": None, "algorithm__trust": "trusted"}
SGD = {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1}


@pytest.mark.parametrize("sampling", ["fixed", "poisson", "allocation"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_both_engines_agree_on_runs_that_protect_persons(tmp_path: Path, trust: str, sampling: str) -> None:
    cell = person_cell(tmp_path, algorithm__trust=trust, federation__sampling=sampling)
    rounding = 1e-3 if trust == "secure-aggregation" else 1e-9
    outcome, _ = run_on_both(cell, rtol=rounding, share=rounding)
    assert np.linalg.norm(outcome.model) > 1e-3
    releases = store_and_load(outcome.releases)
    assert releases == outcome.releases
    assert claim_of(releases).unit == cell.privacy.protected_unit
    statement = privacy_data(cell, releases)
    assert statement["unit"] == "all records of one person in one silo, at most 4 a round"
    assert statement["several_records"] is None


@pytest.mark.parametrize("sampling", ["fixed", "allocation"])
def test_results_report_the_group_privacy_of_several_records(sampling: str) -> None:
    """Guarantee of `group_bounds`: k mu in public orders; where rounds are secret there is none, but an ε."""
    cell = small_cell(
        federation={"silos": 2, "rounds": 8, "batch": 2, "sampling": sampling},
        algorithm={**SGD, "trust": "untrusted"},
        privacy={"relation": "zero-out", "mu": 0.3},
    )
    statement = privacy_data(cell, run_cell("vectorized", cell).releases)
    several = json.loads(json.dumps(statement["several_records"]))
    assert list(several) == ["2", "8"]
    mus, epsilons = ([bound[key] for bound in several.values()] for key in ("mu", "epsilon"))
    if sampling == "fixed":
        assert mus == pytest.approx([0.6, 2.4])
        assert epsilons == pytest.approx([epsilon_of(mu, 1e-5) for mu in (0.6, 2.4)], abs=1e-6)
    else:
        assert mus == [None, None]
        assert epsilons[0] > 2 * statement["epsilon"]
        assert epsilons[1] is None or epsilons[1] > 8 * statement["epsilon"]


def test_a_person_level_release_without_noise_is_the_mean_of_clipped_person_means(tmp_path: Path) -> None:
    """One round, written out person by person: the first four records of each, over the public number of them."""
    cell = person_cell(tmp_path, **EXACT)
    task = load_task(cell)
    plain = load_task(person_cell(tmp_path, privacy={"relation": "zero-out", "mu": 1.0})).train
    assert task.unit_indices is not None
    names = np.asarray(task.persons)
    silo = SimulatedFederation.from_cell(cell).silo(1)
    query = torch.randn(silo.plan.objective.dimension, dtype=torch.float64)
    weight = torch.ones(1, dtype=torch.float64)
    release, _ = silo.answer(silo.initial_state(), 1, query)
    total = torch.zeros_like(query)
    for unit in partition_records(cell)[1][:4].tolist():
        person = names[index_persons(names)[0][unit]]
        own = np.flatnonzero((names == person) & counted_mask(plain.labels.numpy()))[:4]
        assert own.tolist() == [row for row in task.unit_indices[unit].tolist() if row >= 0]
        batches = [Batch(Records(plain.features[[row]], plain.labels[[row]]), weight) for row in own]
        gradients = [task.objective.increment(Query([query]), batch, 1e9).total for batch in batches]
        mean = torch.stack(gradients).mean(0)
        total += mean * min(1.0, 1.0 / float(mean.norm()))
    torch.testing.assert_close(release.vector, total / 4, rtol=1e-9, atol=1e-12)


def test_replacing_a_person_moves_a_release_by_at_most_two_clips_over_the_batch_size(tmp_path: Path) -> None:
    """Guarantee of the user unit: 2 C / B for one person exchanged for another, with four records far away."""
    silo = SimulatedFederation.from_cell(person_cell(tmp_path, **EXACT)).silo(0)
    query = torch.randn(silo.plan.objective.dimension, dtype=torch.float64)
    release, _ = silo.answer(silo.initial_state(), 1, query)
    features, labels = silo.records.features.clone(), silo.records.labels.clone()
    features[2], labels[2] = 1e6 * torch.randn(features[2].shape, dtype=torch.float64), 1
    other, _ = dataclasses.replace(silo, records=Records(features, labels)).answer(silo.initial_state(), 1, query)
    assert 0.0 < float((release.vector - other.vector).norm()) <= 2.0 / 5 * (1 + 1e-9)


@pytest.mark.slow
def test_both_engines_agree_on_poisson_subsampled_clients() -> None:
    """Clients of six records each, ten of which are expected in a round, drawn in secret by the server's silo."""
    cell = small_cell(
        federation={"silos": 1, "rounds": 12, "epochs": 3, "batch": 10, "sampling": "poisson"},
        algorithm=SGD,
        privacy={"unit": "client", "records": 6, "relation": "zero-out", "epsilon": 2.0},
    )
    outcome, _ = run_on_both(cell)
    unit = claim_of(outcome.releases).unit
    assert unit.description == "everything one client holds, at most 6 records a round"
    assert len(partition_records(cell)[0]) == 40
    assert outcome.gradient_evaluations == 6 * 12 * 10


def test_records_are_grouped_by_person_up_to_the_given_number() -> None:
    owners = ["b", "a", "b", "c", "b", "a"]
    assert group_by_person(owners, 2).tolist() == [[1, 5], [0, 2], [3, -1]]
    assert group_by_person(owners, 4).tolist() == [[1, 5, -1, -1], [0, 2, 4, -1], [3, -1, -1, -1]]
    assert group_by_person([*owners[1:], "c", "0"], 2).tolist() == [[6, -1], [0, 4], [1, 3], [2, 5]]
    counts = np.array([True, True, False, False, True, False])
    assert group_by_person(owners, 2, counts).tolist() == [[1, -1], [0, 4], [-1, -1]]  # "c" keeps a place
    assert group_by_person([7, 7, 3], 1).tolist() == [[2], [0]]
    assert group_consecutive(7, 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_each_silo_trains_on_the_records_of_its_own_persons(tmp_path: Path) -> None:
    cell = person_cell(tmp_path)
    names = np.asarray(load_task(cell).persons)
    names_by_silo = [set(names[records].tolist()) for records in train_indices_of_silos(cell)]
    assert [len(silo) for silo in names_by_silo] == [10, 8]
    assert all(name.startswith("n") for name in names_by_silo[0])
    assert not names_by_silo[0] & names_by_silo[1]


CLIENT = {"privacy__unit": "client", "privacy__records": 4}
SHARDS = {"data__partition": "shards", "data__shards": 2}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"privacy__unit": "user"},
            'unit = "user": how many records of one person count at most, e.g. privacy.records',
        ),
        (
            {"privacy__unit": "client"},
            'unit = "client": how many records one client holds at most, e.g. privacy.records',
        ),
        (
            {"privacy__records": 4},
            'privacy: records = 4 is for unit = "user" or "client"; set that, or leave it out',
        ),
        ({"privacy__unit": "user", "privacy__records": 4}, "the data do not say whose a record is"),
        ({**CLIENT, "privacy__shared": 2}, "only persons have records in several silos"),
        ({**CLIENT, **SHARDS}, 'partition = "shards" with privacy.unit = "client"'),
    ],
)
def test_units_of_protection_that_the_data_do_not_support_are_refused(changes: dict[str, Any], line: str) -> None:
    with refusal(line):
        small_cell(**changes)


ALL_ROUNDS = {"silos": 2, "rounds": 6, "epochs": 6, "batches": [10, 8]}
WITHOUT_NOISE = {"unit": "user", "records": 4, "relation": "zero-out", "mode": "none"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"privacy__shared": 2, "federation__sampling": "poisson"}, "accounted for in public orders only"),
        ({"privacy__shared": 3}, "there are 2 silos"),
        ({"algorithm": FEDAVG, "privacy": WITHOUT_NOISE}, r'privacy\.unit = "user"'),
        ({"algorithm": {**ERM, "trust": "trusted"}, "federation": ALL_ROUNDS}, r'privacy\.unit = "user"'),
    ],
    ids=["secret rounds", "more silos than there are", "rows of local steps", "rows of all records"],
)
def test_settings_incompatible_with_protecting_persons_are_refused(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    with refusal(line):
        plan_cell(person_cell(tmp_path, **changes))


def test_cells_with_other_units_of_protection_do_not_run_together(tmp_path: Path) -> None:
    """Was: a sweep over units trained all cells on the units of the first, such as clients in place of persons."""
    data, federation = persons_tree(tmp_path)["data"], {"silos": 2, "rounds": 2, "batches": [3, 2]}
    cells = [
        person_cell(tmp_path, data={**data, "partition": "iid"}, federation=federation, privacy__unit=unit)
        for unit in ("client", "user")
    ]
    run_together(cells, "vectorized", atol=0.0)


def test_the_unit_of_protection_can_cover_persons_in_several_silos(tmp_path: Path) -> None:
    assert person_cell(tmp_path, privacy__shared=2).privacy.protected_unit.max_silos == 2


@pytest.mark.parametrize("model", ["softmax-regression", "logistic-regression", "mlp"])
def test_both_engines_train_alike_on_hospital_tables(tmp_path: Path, model: str) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["model"] = {"name": model, **({} if model == "mlp" else {"feature_norm": 2.0})}
    tree["run"] |= {"per_silo": True, "metrics": ["auc", "calibration_error"]}
    cell = resolve_cell(tree, "test")
    outcome, recorder = run_on_both(cell, is_split_by_cells=True)
    assert set(outcome.metrics) > {"test_auc", "test_auc_at_north"}
    assert len(recorder.evaluations) == 2


def test_regression_metrics_of_a_real_valued_target_are_in_original_units(tmp_path: Path) -> None:
    records = rows(200)
    for number, record in enumerate(records):
        record["cost"] = str(3 * int(record["age"]) + 5 * (number % 7 - 3))
    columns = {"age": {"range": [0, 100]}}
    tree = table_tree(write_csv(tmp_path / "t.csv", records), target="cost", range=[0, 300], columns=columns)
    del tree["data"]["table"]["classes"]
    tree["model"] = {"name": "linear-regression", "feature_norm": 1.0}
    tree["federation"] = {"silos": 2, "rounds": 60, "epochs": 60, "batches": [80, 50]}
    tree["privacy"] = QUIET
    tree["run"] |= {"metrics": ["r2", "mae"]}
    metrics = run_cell("vectorized", resolve_cell(tree, "test")).metrics
    assert metrics["test_r2"] > 0.95
    assert 0.5 < metrics["test_mae"] < 15.0  # of a cost between 60 and 270; 150 times less in scaled units
