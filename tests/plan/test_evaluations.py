"""What results, ledger and report say of evaluations by silos: whose they are, what they cost, and of whom."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedpriv.accounting.gaussian import compose
from fedpriv.claims.entries import read_ledger
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError
from fedpriv.loss.views import PerUnit
from fedpriv.plan.evaluation import partition_test_records
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.show.page import render_page
from fedpriv.show.summary import privacy_lines
from fedpriv.study.results import read_results
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv
from tests.engines.test_units import persons_tree

SETTINGS: dict[str, dict[str, Any]] = {
    "untrusted": {"evaluation": {"records": [50, 60, 70], "mu": 0.5}},
    "trusted": {"evaluation": {"records": 50, "mu": 0.5}, "algorithm__trust": "trusted"},
    "exact": {"evaluation": {"records": 50}, "algorithm__trust": "trusted"},
}


def run_of(folder: Path, name: str) -> Path:
    tree = small_tree(**SETTINGS[name])
    del tree["seed"]
    return run_sweep(parse_scenario(tree, "test"), RunOptions(out=folder / name))


@pytest.mark.parametrize("name", SETTINGS)
def test_results_state_the_privacy_cost_of_evaluations_and_agree_with_the_ledger(
    tmp_path: Path, name: str
) -> None:
    folder = run_of(tmp_path, name)
    (cell,) = read_results(folder).cells
    told = cell["evaluation"]
    private = name != "exact"
    assert told["by"] == "silos"
    assert told["mu"] == (pytest.approx(0.5) if private else None)
    assert told["mu_with_training"] == (pytest.approx(compose([0.5, 4.0])) if private else None)
    assert told["noise_of"] == {"untrusted": "silos", "trusted": "server", "exact": "nobody"}[name]
    assert cell["mu"] == pytest.approx(4.0)  # the claim of training records is not touched
    (entry,) = read_ledger(folder)
    assert entry.agrees
    shown = CliRunner().invoke(app, ["privacy", "ledger", str(folder)], terminal_width=300)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("test records") == {"untrusted": 3, "trusted": 1, "exact": 1}[name]
    as_json = CliRunner().invoke(app, ["privacy", "ledger", str(folder), "--json"])
    assert len(json.loads(as_json.output)[0]["evaluations"]) == len(told["releases"])


def _less(told: dict[str, Any]) -> None:
    told["evaluation"]["mu"] = 0.1


def _none(told: dict[str, Any]) -> None:
    told["evaluation"] = None


def _quieter(told: dict[str, Any]) -> None:
    told["evaluation"]["releases"][0]["std"] /= 2


def _one_silo_less(told: dict[str, Any]) -> None:
    del told["evaluation"]["releases"][0]


def _rarer(told: dict[str, Any]) -> None:
    for stream in told["evaluation"]["releases"]:
        stream["participation"]["rounds"] = 1
        stream["clips"] = [[stream["clips"][0][0], 1]]
    told["evaluation"]["mu"] = 0.25


@pytest.mark.parametrize("change", [_less, _none, _quieter, _one_silo_less, _rarer])
def test_the_ledger_rejects_results_with_altered_evaluation_releases_or_claims(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = run_of(tmp_path, "untrusted")
    path = folder / "results.json"
    tree = json.loads(path.read_text())
    assert read_ledger(folder)[0].agrees
    changed = copy.deepcopy(tree)
    change(changed["cells"][0])
    path.write_text(json.dumps(changed))
    assert not read_ledger(folder)[0].agrees
    done = CliRunner().invoke(app, ["privacy", "ledger", str(folder)])
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "untrusted",
            "every silo added noise: all evaluations together are 0.5-GDP for each test record (ε = 1.994 at "
            "δ = 1e-05, replace-one)",
        ),
        ("trusted", "the server, which saw exact sums, added noise: all evaluations together are 0.5-GDP"),
        ("exact", "whoever passes it on releases exact figures of test records, for which nothing is guaranteed"),
    ],
)
def test_reports_state_who_added_evaluation_noise_and_the_privacy_of_test_records(
    tmp_path: Path, name: str, words: str
) -> None:
    folder = run_of(tmp_path, name)
    results = read_results(folder)
    assert any(words in line for line in privacy_lines(results))
    page = render_page(folder, results)
    assert words in page
    assert ("Test records are other records than those that trained" in page) == (name != "exact")


@pytest.mark.parametrize("run", [{"metrics": ["auc"]}, {"goldstein_radius": 0.1}, {}])
def test_training_is_grouped_by_person_whichever_extra_metrics_are_measured(
    tmp_path: Path, run: dict[str, Any]
) -> None:
    cell = resolve_cell({**persons_tree(tmp_path), "run": run}, "test")
    looked_at = make_plan(cell, load_task(cell).objective).objective
    assert isinstance(looked_at, PerUnit)
    assert looked_at.max_records == 4


@pytest.mark.parametrize(("split", "count"), [("part", "24 rows"), (None, "10 test records")])
def test_a_silo_with_too_few_test_records_is_named(tmp_path: Path, split: str | None, count: str) -> None:
    """Rows that cells put aside are read whole, and otherwise the test records of the site."""
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()), split=split)
    tree["evaluation"], tree["federation"]["batches"] = {"records": [1, 40], "mu": 2.0}, [4, 4]
    with pytest.raises(InputError, match=f"^evaluation.records: 'south' has {count}, and 40 are asked for"):
        partition_test_records(resolve_cell(tree, "test"))


@pytest.mark.parametrize("partition", ["site", "iid"])
def test_silos_evaluate_on_test_records_of_their_own_site_only_in_a_partition_by_site(
    tmp_path: Path, partition: str
) -> None:
    """Of 12 test records in the north and 10 in the south."""
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()), split=None)
    tree["data"]["partition"], tree["evaluation"] = partition, {"records": [8, 10], "mu": 2.0}
    tree["federation"]["batches"] = [4, 4]
    cell = resolve_cell(tree, "test")
    sites, shares = load_task(cell).test_sites, partition_test_records(cell)
    assert sites is not None
    assert [len(share) for share in shares] == [8, 10]
    assert len({row for share in shares for row in share.tolist()}) == 18
    are_own = [bool((sites[share.numpy()] == silo).all()) for silo, share in enumerate(shares)]
    assert are_own == [partition == "site"] * 2
