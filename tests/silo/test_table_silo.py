"""A hospital's own CSV behind its guard: float records, real targets, read as its policy says only."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError, RunError
from fedpriv.data.partition import counted_mask
from fedpriv.data.schema import TableSchema
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.demo import format_policy, prepare_silos
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from tests.data.tables import SCHEMA, rows, table_tree, write_csv

ALLOW = {"relation": "zero-out", "clip": 4.0, "rounds": 8, "budget": 4.0}


def policy_of(folder: Path, schema: dict[str, Any], silo: int = 0, **changes: Any) -> Path:
    """A hospital's policy over its own rows."""
    own = [record for record in rows() if record["hospital"] == SCHEMA["sites"][silo]]
    for record in own:
        record["cost"] = record["age"]
    write_csv(folder / "own.csv", own).chmod(0o600)
    keys = {"silo": silo, "shard": "own.csv", "ledger": "l.sqlite", "socket": "s.sock", **changes}
    path = folder / "policy.toml"
    path.write_text(format_policy(keys, ALLOW, TableSchema.model_validate(schema)))
    return path


def guard_at(path: Path) -> Guard:
    policy = read_policy(path)
    begin_ledgers(policy)
    return open_guard(policy)


def asked(guard: Guard, cell: Cell) -> torch.Tensor:
    query = load_task(cell).objective.initial()
    return guard.answer("run", json.dumps(cell.canonical_data(), sort_keys=True), 1, query)


def test_prepared_hospitals_hold_the_simulations_records_as_rows_of_their_own(tmp_path: Path) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["federation"]["batches"] = [18, 12]  # of places: a third are test rows
    del tree["seed"]
    scenario = parse_scenario(tree, "test")
    for silo, folder in enumerate(prepare_silos(scenario, tmp_path / "silos", run_count=1)):
        policy = read_policy(folder / "policy.toml")
        shard = policy.load_shard()
        simulated = SimulatedFederation.from_cell(scenario.points[0].cell).silo(silo)
        row, cell = scenario.points[0].cell.model.row, scenario.points[0].cell
        seen = row.features(shard.images, torch.float64, cell.model.settings)
        torch.testing.assert_close(seen, simulated.records.features, rtol=0.0, atol=0.0)
        assert shard.labels.tolist() == simulated.records.labels.tolist()
        assert shard.test is not None
        assert len(shard.test.labels) == len(shard.labels) == [36, 24][silo]
        assert counted_mask(shard.labels).sum() == [24, 16][silo]
        assert (counted_mask(shard.labels) ^ counted_mask(shard.test.labels)).all()


def test_a_hospitals_guard_answers_a_run_on_its_csv(tmp_path: Path) -> None:
    guard = guard_at(policy_of(tmp_path, SCHEMA))
    release = asked(guard, resolve_cell(table_tree(write_csv(tmp_path / "t.csv", rows())), "test"))
    assert release.shape == (14,)
    assert torch.isfinite(release).all()


def test_a_real_target_is_answered_by_a_model_of_real_targets_alone(tmp_path: Path) -> None:
    """Labels of a regression are floats: a classifier would fail on them after its question is on file."""
    schema = {**SCHEMA, "target": "cost", "range": [0, 100]}
    del schema["classes"]
    columns = {name: column for name, column in SCHEMA["columns"].items() if name != "age"}
    schema["columns"] = columns
    records = rows()
    for record in records:
        record["cost"] = record["age"]
    tree = table_tree(write_csv(tmp_path / "t.csv", records))
    tree["data"]["table"] = schema
    tree["model"] = {"name": "linear-regression", "feature_norm": 2.0}
    guard = guard_at(policy_of(tmp_path, schema))
    assert torch.isfinite(asked(guard, resolve_cell(tree, "test"))).all()
    tree["model"]["name"] = "softmax-regression"
    with pytest.raises(RunError, match=r"model 'softmax-regression' is not for labels that are real numbers"):
        guard.answer("other", json.dumps(resolve_cell(tree, "test").canonical_data()), 1, torch.zeros(5))


@pytest.mark.parametrize(
    "change",
    [
        {"target": "sex", "classes": ["f", "m"], "columns": {"age": {"range": [0, 100]}}},
        {"columns": {**SCHEMA["columns"], "age": {"range": [30, 31]}}},
        {"missing": "drop"},
    ],
    ids=["another target", "another range", "other gaps"],
)
def test_a_scenario_that_reads_the_table_otherwise_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """What is predicted, and from what, is the hospital's to say."""
    guard = guard_at(policy_of(tmp_path, SCHEMA))
    cell = resolve_cell(table_tree(write_csv(tmp_path / "t.csv", rows()), **change), "test")
    with pytest.raises(RunError, match="describes the columns of the table otherwise than this policy"):
        guard.answer("run", json.dumps(cell.canonical_data()), 1, torch.zeros(14))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"shard": "own.npz"}, r"a \.csv or \.parquet file needs \[table\], and no other has it"),
        ({"classes": 2}, r"with \[table\] leave it out"),
        ({"silo": 1}, r"column 'hospital': 'north' is another site than silo 1, 'south'"),
        ({"silo": 2}, r"silo = 2, and table\.sites names 2 sites"),
    ],
)
def test_policies_that_contradict_their_table_are_refused(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    path = policy_of(tmp_path, SCHEMA)
    text = path.read_text()
    for key, value in changes.items():
        old = {"shard": 'shard = "own.csv"', "classes": "silo = 0", "silo": "silo = 0"}[key]
        new = f"{key} = {json.dumps(value)}"
        text = text.replace(old, f"{old}\n{new}" if key == "classes" else new)
    path.write_text(text)
    with pytest.raises(InputError, match=line):
        guard_at(path)
    assert not (tmp_path / "l.sqlite").exists()


def test_a_policy_whose_description_is_not_public_is_refused(tmp_path: Path) -> None:
    path = policy_of(tmp_path, SCHEMA)
    path.write_text(path.read_text().replace("public = true", "public = false"))
    with pytest.raises(InputError, match=r"table\.public = false: ranges and vocabularies"):
        read_policy(path)


def test_float_features_of_a_regression_lie_in_an_npz_file_too(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    np.savez(tmp_path / "own.npz", features=draw.standard_normal((30, 4)), labels=draw.standard_normal(30))
    (tmp_path / "own.npz").chmod(0o600)
    keys = {"silo": 0, "classes": 0, "shard": "own.npz", "ledger": "l.sqlite", "socket": "s.sock"}
    (tmp_path / "policy.toml").write_text(format_policy(keys, ALLOW))
    tree = table_tree(tmp_path / "t.csv")
    tree["data"] = {"name": "own.npz"}
    tree["model"] = {"name": "ridge-regression", "feature_norm": 2.0, "penalty": 0.1}
    tree["federation"]["batches"] = [7, 7]
    guard = guard_at(tmp_path / "policy.toml")
    release = guard.answer(
        "run", json.dumps(resolve_cell(tree, "test").canonical_data()), 1, torch.zeros(5).double()
    )
    assert torch.isfinite(release).all()


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ({"features": np.ones((3, 2))}, "expected `labels`, and either `images` or `features`; found features"),
        ({"features": np.ones((3, 2)), "images": np.ones((3, 2)), "labels": np.ones(3)}, "either `images` or"),
        ({"features": np.full((3, 2), np.inf), "labels": np.ones(3)}, "a value is not finite"),
        ({"features": np.ones((3, 2), np.complex64), "labels": np.ones(3)}, "records are bytes .* or floats"),
    ],
)
def test_shards_that_cannot_be_used_are_one_line(tmp_path: Path, arrays: dict[str, Any], line: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    (tmp_path / "own.npz").chmod(0o600)
    keys = {"silo": 0, "classes": 0, "shard": "own.npz", "ledger": "l.sqlite", "socket": "s.sock"}
    (tmp_path / "policy.toml").write_text(format_policy(keys, ALLOW))
    with pytest.raises(InputError, match=line):
        read_policy(tmp_path / "policy.toml").load_shard()
