"""A hospital's own CSV behind its guard: float records, real targets, read as its policy says only."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError
from fedpriv.data.partition import counted_mask
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.silo.demo import prepare_silos
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import read_key
from tests.data.tables import SCHEMA, rows, table_tree, write_csv
from tests.silo.guarded import refused, write_table_policy

ALLOW = {"relation": "zero-out", "clip": 4.0, "rounds": 8, "budget": 4.0}


def with_costs(records: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**record, "cost": record["age"]} for record in records]


def policy_of(folder: Path, schema: dict[str, Any] = SCHEMA) -> Path:
    """A hospital's policy over its own rows."""
    own = [record for record in with_costs(rows()) if record["hospital"] == "north"]
    return write_table_policy(folder, write_csv(folder / "own.csv", own), ALLOW, schema)


def policy_over(folder: Path, **arrays: Any) -> Path:
    """A policy over an .npz file of these arrays."""
    np.savez(folder / "own.npz", **arrays)
    return write_table_policy(folder, folder / "own.npz", ALLOW, classes=0)


def table_cell(folder: Path, records: list[dict[str, str]] | None = None, **table: Any) -> dict[str, Any]:
    return table_tree(write_csv(folder / "t.csv", rows() if records is None else records), **table)


def guard_at(path: Path) -> Guard:
    policy = read_policy(path)
    begin_ledgers(policy)
    return open_guard(policy)


def text_of(tree: dict[str, Any]) -> str:
    return json.dumps(resolve_cell(tree, "test").canonical_data(), sort_keys=True)


def answer_to(guard: Guard, tree: dict[str, Any]) -> torch.Tensor:
    query = load_task(resolve_cell(tree, "test")).objective.initial()
    return guard.answer("run", text_of(tree), 1, query)


def test_prepared_hospital_tables_contain_the_records_of_the_simulation(tmp_path: Path) -> None:
    tree = table_cell(tmp_path)
    tree["federation"]["batches"] = [18, 12]  # of places: a third are test rows
    del tree["seed"]
    scenario = parse_scenario(tree, "test")
    for silo, folder in enumerate(prepare_silos(scenario, tmp_path / "silos", run_count=1)):
        shard, cell = read_policy(folder / "policy.toml").load_shard(), scenario.points[0].cell
        simulated = SimulatedFederation.from_cell(cell).silo(silo)
        features = cell.model.row.features(shard.images, torch.float64, cell.model.settings)
        torch.testing.assert_close(features, simulated.records.features, rtol=0.0, atol=0.0)
        assert shard.labels.tolist() == simulated.records.labels.tolist()
        assert len(read_key(folder / "shard.csv.key")) == 32
        assert shard.test is not None
        assert len(shard.test.labels) == len(shard.labels) == [36, 24][silo]
        assert counted_mask(shard.labels).sum() == [24, 16][silo]
        assert (counted_mask(shard.labels) ^ counted_mask(shard.test.labels)).all()


def test_silos_that_are_no_sites_hold_the_rows_of_their_batches_alone(tmp_path: Path) -> None:
    """No further row of the test part belongs to one of them."""
    tree = table_cell(tmp_path)
    del tree["federation"]["batches"]
    columns = {key: value for key, value in tree["data"]["table"].items() if key not in ("site", "sites")}
    tree["data"] |= {"table": columns, "partition": "iid"}
    patients: list[str] = []
    for folder in prepare_silos(parse_scenario(tree, "test"), tmp_path / "silos", run_count=1):
        with (folder / "shard.csv").open() as file:
            patients += [record["patient"] for record in csv.DictReader(file)]
    assert len(patients) == len(set(patients)) == 4


def test_a_hospitals_guard_answers_a_run_on_its_csv(tmp_path: Path) -> None:
    release = answer_to(guard_at(policy_of(tmp_path)), table_cell(tmp_path))
    assert release.shape == (14,)
    assert torch.isfinite(release).all()


def test_a_real_valued_target_is_accepted_by_regression_models_only(tmp_path: Path) -> None:
    """Labels of a regression are floats: a classifier would fail on them after its question is on file."""
    schema = {**SCHEMA, "target": "cost", "range": [0, 100]}
    del schema["classes"]
    schema["columns"] = {name: column for name, column in SCHEMA["columns"].items() if name != "age"}
    tree = table_cell(tmp_path, with_costs(rows()))
    tree["data"]["table"] = schema
    tree["model"] = {"name": "linear-regression", "feature_norm": 2.0}
    guard = guard_at(policy_of(tmp_path, schema))
    assert torch.isfinite(answer_to(guard, tree)).all()
    tree["model"]["name"] = "softmax-regression"
    reason = "model 'softmax-regression' is not for labels that are real numbers"
    refused(guard, reason, text_of(tree), query=torch.zeros(5), run="other")


@pytest.mark.parametrize(
    "change",
    [
        {"target": "sex", "classes": ["f", "m"], "columns": {"age": {"range": [0, 100]}}},
        {"columns": {**SCHEMA["columns"], "age": {"range": [30, 31]}}},
        {"missing": "drop"},
    ],
    ids=["another target", "another range", "other gaps"],
)
def test_a_scenario_whose_table_schema_differs_from_the_policy_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """What is predicted, and from what, is the hospital's to say."""
    reason = "describes the columns of the table otherwise than this policy"
    refused(guard_at(policy_of(tmp_path)), reason, text_of(table_cell(tmp_path, **change)), query=torch.zeros(14))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('"own.csv"', '"own.npz"', r"a table, such as \.csv, needs \[table\], and no other file has it"),
        ("silo = 0", "silo = 0\nclasses = 2", r"with \[table\] leave it out"),
        ("silo = 0", "silo = 1", r"column 'hospital': 'north' is another site than silo 1, 'south'"),
        ("silo = 0", "silo = 2", r"silo = 2, and table\.sites names 2 sites"),
        ("public = true", "public = false", r"table\.public = false: ranges and vocabularies"),
    ],
)
def test_a_policy_that_contradicts_its_table_or_does_not_declare_a_public_schema_is_refused(
    tmp_path: Path, old: str, new: str, line: str
) -> None:
    path = policy_of(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=line):
        guard_at(path)
    assert not (tmp_path / "l.sqlite").exists()


def test_a_table_whose_records_all_go_to_the_tests_is_refused(tmp_path: Path) -> None:
    own = [{**record, "fold": "test"} for record in rows() if record["hospital"] == "north"]
    schema = {**SCHEMA, "split": "fold"}
    path = write_table_policy(tmp_path, write_csv(tmp_path / "own.csv", own), ALLOW, schema)
    with pytest.raises(InputError, match=r"own\.csv: has no training records; look at table\.split"):
        read_policy(path).load_shard()


def test_a_guard_answers_a_regression_on_float_features_of_an_npz_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    guard = guard_at(
        policy_over(tmp_path, features=draw.standard_normal((30, 4)), labels=draw.standard_normal(30))
    )
    tree = table_tree(tmp_path / "t.csv")
    tree["data"] = {"name": "own.npz"}
    tree["model"] = {"name": "ridge-regression", "feature_norm": 2.0, "penalty": 0.1}
    tree["federation"]["batches"] = [7, 7]
    assert torch.isfinite(guard.answer("run", text_of(tree), 1, torch.zeros(5).double())).all()


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ({"features": np.ones((3, 2))}, "expected `labels`, and either `images` or `features`; found features"),
        ({"features": np.ones((3, 2)), "images": np.ones((3, 2)), "labels": np.ones(3)}, "either `images` or"),
        ({"features": np.full((3, 2), np.inf), "labels": np.ones(3)}, "a value is not finite"),
        ({"features": np.ones((3, 2), np.complex64), "labels": np.ones(3)}, "records are bytes .* or floats"),
        *[
            ({"features": np.ones((3, 2)), "labels": np.ones(3), "counts": counts}, "`counts` needs true or false")
            for counts in (np.ones(2, np.bool_), np.ones(3))
        ],
    ],
)
def test_malformed_npz_shards_are_refused_with_a_reason(tmp_path: Path, arrays: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        read_policy(policy_over(tmp_path, **arrays)).load_shard()
