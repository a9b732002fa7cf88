"""A demonstration's silos: the simulation's shards, a folder for each, and policies no wider than needed."""

import dataclasses
import json
import math
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError, RunError
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import Scenario, parse_scenario
from fedpriv.silo.demo import format_toml, prepare_silos
from fedpriv.silo.guard import open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.shard import load_shard, read_key
from tests.conftest import small_tree
from tests.engines.test_units import persons_tree
from tests.silo.guarded import UNACCOUNTABLE


def scenario(tree: dict[str, Any] | None = None, **overrides: Any) -> Scenario:
    tree = small_tree(**overrides) if tree is None else tree
    tree.pop("seed", None)
    return parse_scenario(tree, "test")


def first_question(scenario: Scenario) -> tuple[str, int, torch.Tensor]:
    cell = scenario.points[0].cell
    return json.dumps(cell.canonical_data(), sort_keys=True), 1, load_task(cell).objective.initial()


def begun(folder: Path) -> Policy:
    """The policy of a folder, whose ledger is begun."""
    policy = read_policy(folder / "policy.toml")
    begin_ledgers(policy)
    return policy


def test_prepared_shards_are_disjoint_and_equal_those_of_the_simulation(tmp_path: Path) -> None:
    small = scenario()
    folders = prepare_silos(small, tmp_path, run_count=1)
    assert folders == [tmp_path / f"silo-{silo}" / "guard" for silo in range(3)]
    seen: set[bytes] = set()
    for silo, folder in enumerate(folders):
        shard = load_shard(folder / "shard.npz", 10)
        assert len(read_key(folder / "shard.npz.key")) == 32, "the key of its fingerprint lies beside it"
        records = SimulatedFederation.from_cell(small.points[0].cell).silo(silo).records
        assert np.array_equal(shard.labels, records.labels.numpy())
        images = {image.tobytes() for image in shard.images}
        assert len(images) == 8
        assert not images & seen
        seen |= images


def test_a_prepared_policy_allows_the_planned_number_of_runs_and_no_more(tmp_path: Path) -> None:
    small = scenario()
    policy = begun(prepare_silos(small, tmp_path, run_count=2)[1])
    assert (policy.silo, policy.classes, policy.allow.rounds) == (1, 10, 8)
    guard = open_guard(policy)
    for run in ("first", "second"):
        assert torch.isfinite(guard.answer(run, *first_question(small))).all()
    with pytest.raises(RunError, match="the budget is"):
        guard.answer("third", *first_question(small))


def test_a_policy_for_a_sweep_is_as_wide_as_its_widest_run_and_has_the_budget_of_all(tmp_path: Path) -> None:
    """Budgets compose in squares: runs of mu = 3, 4, 3, 4 twice cost 10, and 8 runs' evaluations at mu = 1 √8."""
    sweep = {"algorithm.diameter": [0.1, 0.2], "privacy.rho": [3.0, 4.0]}
    swept = scenario(sweep=sweep, evaluation={"records": 30, "mu": 1.0})
    policy = read_policy(prepare_silos(swept, tmp_path, run_count=2)[0] / "policy.toml")
    assert policy.allow.budget == pytest.approx(10.0, rel=1e-12)
    assert policy.allow.clip == pytest.approx(math.sqrt(2 * 785) + 2 * 78.5, rel=1e-6)
    assert (policy.allow.rounds, policy.allow.dimension, policy.allow.slack) == (8, 7850, 0.0)
    assert policy.evaluation is not None
    assert policy.evaluation.budget == pytest.approx(math.sqrt(8.0), rel=1e-12)
    assert policy.evaluation.evaluations == 4


def test_prepared_silos_have_the_records_of_the_run_that_reads_most(tmp_path: Path) -> None:
    goldstein = {
        "name": "goldstein-single-pass", "trust": "untrusted", "period": 4, "radius": 0.1, "smoothing": 0.1,
        "window": 2, "step": 0.1, "clip": 1.0, "anchor_clip": 1.0, "directions": 1,
    }  # fmt: skip
    anchors = scenario(
        algorithm=goldstein,
        privacy={"relation": "replace-one", "mu": 1.0},
        sweep={"algorithm.anchor_batches": [1, 2]},
    )
    guard = open_guard(begun(prepare_silos(anchors, tmp_path, run_count=1)[0]))
    for point in anchors.points:
        text = json.dumps(point.cell.canonical_data(), sort_keys=True)
        query = load_task(point.cell).objective.initial()
        assert guard.answer(f"{point.cell.schedule.batches_per_silo} batches", text, 1, query).shape == query.shape


def test_preparing_silos_is_refused_for_records_and_persons_in_one_scenario(tmp_path: Path) -> None:
    persons = scenario(persons_tree(tmp_path))
    privacy = {"unit": "record", "relation": "replace-one", "mu": 2.0}
    records = scenario(persons_tree(tmp_path) | {"privacy": privacy})
    both = dataclasses.replace(persons, points=[*records.points, *persons.points])
    with pytest.raises(InputError, match="relation, unit or test records; a deployment has one federation"):
        prepare_silos(both, tmp_path / "silos", run_count=1)


def test_unicode_and_quotes_survive_writing_a_policy_file() -> None:
    keys = {"statistics": ["größe", "😀", 'a "quoted" \\ name'], "slack": 1e-8, "trust": "trusted"}
    assert tomllib.loads(format_toml(keys)) == keys


def test_preparing_silos_does_not_overwrite_an_existing_shard(tmp_path: Path) -> None:
    prepare_silos(scenario(), tmp_path, run_count=1)
    with pytest.raises(InputError, match=r"silo-0/guard/shard\.npz exists"):
        prepare_silos(scenario(), tmp_path, run_count=1)


def test_rolling_back_the_folder_of_a_prepared_ledger_is_detected_by_its_rollback_mark(tmp_path: Path) -> None:
    """Its mark is in another folder, of which a compose file makes another volume."""
    policy = begun(prepare_silos(scenario(), tmp_path, run_count=2)[0])
    snapshot = shutil.copytree(policy.ledger.parent, tmp_path / "snapshot")
    open_guard(policy).answer("run", *first_question(scenario()))
    shutil.rmtree(policy.ledger.parent)
    shutil.copytree(snapshot, policy.ledger.parent)
    with pytest.raises(InputError, match="its mark has seen"):
        open_guard(policy)


def test_prepared_policies_of_a_trusted_server_scenario_trust_the_server(tmp_path: Path) -> None:
    folders = prepare_silos(scenario(algorithm__trust="trusted"), tmp_path, run_count=1)
    assert {read_policy(folder / "policy.toml").allow.trust for folder in folders} == {"trusted"}


REFUSED = {
    **{
        name: (tree, f"a deployment's silos refuse this scenario: {why}$")
        for name, (tree, why) in UNACCOUNTABLE.items()
    },
    "sums without noise": ({"privacy": {"mode": "none", "relation": "replace-one"}}, "nothing without noise"),
    "two federations": ({"sweep": {"federation.silos": [2, 3]}}, "narrow them with --set"),
}


@pytest.mark.parametrize(("overrides", "reason"), REFUSED.values(), ids=REFUSED)
def test_preparing_silos_is_refused_for_scenarios_that_every_guard_refuses(
    tmp_path: Path, overrides: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        prepare_silos(scenario(**overrides), tmp_path, run_count=1)
    assert not list(tmp_path.iterdir())


def test_a_prepared_policy_for_persons_has_unit_user_and_its_guard_answers(tmp_path: Path) -> None:
    persons = scenario(persons_tree(tmp_path))
    for folder in prepare_silos(persons, tmp_path / "silos", run_count=1):
        policy = begun(folder)
        assert policy.allow.unit == "user"
        text, t, query = first_question(persons)
        assert open_guard(policy).answer("run", text, t, query).shape == query.shape
