"""A demonstration's silos: the simulation's shards, a folder for each, and policies no wider than needed."""

import json
import shutil
import tomllib
from pathlib import Path

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
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import load_shard
from tests.conftest import small_tree
from tests.engines.test_units import persons_tree
from tests.silo.guarded import UNACCOUNTABLE


def scenario(**overrides: object) -> Scenario:
    tree = small_tree(**overrides)
    tree.pop("seed")
    return parse_scenario(tree, "test")


def test_shards_are_the_simulations_and_share_no_record(tmp_path: Path) -> None:
    small = scenario()
    folders = prepare_silos(small, tmp_path, run_count=1)
    assert [folder.relative_to(tmp_path).as_posix() for folder in folders] == [
        f"silo-{silo}/guard" for silo in range(3)
    ]
    seen: set[bytes] = set()
    for silo, folder in enumerate(folders):
        shard = load_shard(folder / "shard.npz", 10)
        records = SimulatedFederation.from_cell(small.points[0].cell).silo(silo).records
        assert np.array_equal(shard.labels, records.labels.numpy())
        images = {image.tobytes() for image in shard.images}
        assert len(images) == 8
        assert not images & seen
        seen |= images


def test_a_policy_allows_the_runs_it_was_made_for_and_no_more(tmp_path: Path) -> None:
    small = scenario()
    policy = read_policy(prepare_silos(small, tmp_path, run_count=2)[1] / "policy.toml")
    assert (policy.silo, policy.classes, policy.allow.rounds) == (1, 10, 8)
    cell = small.points[0].cell
    begin_ledgers(policy)
    guard = open_guard(policy)
    query = load_task(cell).objective.initial()
    cell_json = json.dumps(cell.canonical_data(), sort_keys=True)
    for run in ("first", "second"):
        assert torch.isfinite(guard.answer(run, cell_json, 1, query)).all()
    with pytest.raises(RunError, match="the budget is"):
        guard.answer("third", cell_json, 1, query)


def test_every_character_of_a_name_survives_a_policy_file() -> None:
    keys = {"statistics": ["größe", "😀", 'a "quoted" \\ name'], "slack": 1e-8, "trust": "trusted"}
    assert tomllib.loads(format_toml(keys)) == keys


def test_records_that_a_ledger_may_belong_to_are_not_replaced(tmp_path: Path) -> None:
    prepare_silos(scenario(), tmp_path, run_count=1)
    with pytest.raises(InputError, match=r"silo-0/guard/shard\.npz exists"):
        prepare_silos(scenario(), tmp_path, run_count=1)


def test_a_ledger_that_is_put_back_with_its_folder_is_refused(tmp_path: Path) -> None:
    """Its mark is in another folder, of which a compose file makes another volume."""
    policy = read_policy(prepare_silos(scenario(), tmp_path, run_count=2)[0] / "policy.toml")
    begin_ledgers(policy)
    kept = shutil.copytree(policy.ledger.parent, tmp_path / "kept")
    cell = scenario().points[0].cell
    query = load_task(cell).objective.initial()
    open_guard(policy).answer("run", json.dumps(cell.canonical_data(), sort_keys=True), 1, query)
    shutil.rmtree(policy.ledger.parent)
    shutil.copytree(kept, policy.ledger.parent)
    with pytest.raises(InputError, match="its mark has seen"):
        open_guard(policy)


def test_two_federations_in_one_scenario_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="narrow them with --set"):
        prepare_silos(scenario(sweep={"federation.silos": [2, 3]}), tmp_path, run_count=1)


def test_a_trusted_servers_silos_say_that_they_trust_it(tmp_path: Path) -> None:
    folders = prepare_silos(scenario(algorithm__trust="trusted"), tmp_path, run_count=1)
    assert {read_policy(folder / "policy.toml").allow.trust for folder in folders} == {"trusted"}


def test_no_policy_is_made_for_sums_without_noise(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing without noise"):
        prepare_silos(scenario(privacy={"mode": "none", "relation": "replace-one"}), tmp_path, run_count=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("overrides", "reason"), UNACCOUNTABLE.values(), ids=UNACCOUNTABLE)
def test_no_policy_is_made_for_releases_that_every_guard_refuses(
    tmp_path: Path, overrides: dict[str, object], reason: str
) -> None:
    with pytest.raises(InputError) as refused:
        prepare_silos(scenario(**overrides), tmp_path, run_count=1)
    assert str(refused.value) == f"a deployment's silos refuse this scenario: {reason}"
    assert not list(tmp_path.iterdir())


def test_a_policy_for_persons_says_so_and_its_guard_answers(tmp_path: Path) -> None:
    tree = persons_tree(tmp_path)
    tree.pop("seed", None)
    scenario = parse_scenario(tree, "test")
    cell = scenario.points[0].cell
    for silo, folder in enumerate(prepare_silos(scenario, tmp_path / "silos", run_count=1)):
        policy = read_policy(folder / "policy.toml")
        assert policy.allow.unit == "user"
        begin_ledgers(policy)
        simulated = SimulatedFederation.from_cell(cell).silo(silo)
        query = simulated.plan.objective.initial()
        release = open_guard(policy).answer("run", json.dumps(cell.canonical_data()), 1, query)
        assert release.shape == query.shape
