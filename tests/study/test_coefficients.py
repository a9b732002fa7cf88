"""Coefficients of a run: named by feature, with the noise of its ledger."""

import json
from pathlib import Path

import pytest
import torch

from fedpriv.cli import explore
from fedpriv.core.errors import InputError, RunError
from fedpriv.loss.ridge import Coefficient, MeanStatistics, RidgeStatistics
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import make_schema_task
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.study.results import read_results
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.data.tables import rows, table_tree, write_csv
from tests.loss.test_ridge import tree_of


@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation", "trusted"])
def test_features_are_named_and_the_noise_is_that_of_the_mean(
    tmp_path: Path, trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of(tmp_path, algorithm={"trust": trust})
    del tree["seed"]
    folder = run_sweep(parse_scenario(tree, "test"), RunOptions(out=tmp_path / "run"))
    given, before = list[float](), RidgeStatistics.coefficients

    def noted(self: RidgeStatistics, point: torch.Tensor, published: MeanStatistics) -> list[Coefficient]:
        given.append(published.std)
        assert published.record_count == 200  # of 300 places, two thirds count
        assert published.counted_share == pytest.approx(2.0 / 3.0)
        return before(self, point, published)

    monkeypatch.setattr(RidgeStatistics, "coefficients", noted)
    (record,) = read_results(folder).cells
    found = explore.compute_coefficients(record, folder)
    assert [name for name, _ in found] == [
        "age", "pain = none", "pain = some", "pain = *", "sex = f", "sex = m", "constant",
    ]  # fmt: skip
    cell = resolve_cell(record["scenario"], "test")
    assert cell.data.table_schema is not None
    plan = make_plan(cell, make_schema_task(cell, cell.data.table_schema).objective)
    assert given[0] == pytest.approx(float(plan.noise.std_in_mean), rel=1e-6)


def test_coefficients_of_another_model_are_refused(tmp_path: Path) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows(300)))
    del tree["seed"]
    folder = run_sweep(parse_scenario(tree, "test"), RunOptions(out=tmp_path / "run"))
    with pytest.raises(InputError, match="'softmax-regression': coefficients have intervals where"):
        explore.compute_coefficients(read_results(folder).cells[0], folder)


@pytest.mark.parametrize("as_json", [False, True])
def test_coefficients_of_a_written_claim_are_shown_and_refused(tmp_path: Path, as_json: bool) -> None:
    """Exit code 0 with --json, where a claim was smaller than its releases."""
    tree = tree_of(tmp_path)
    del tree["seed"]
    folder = run_sweep(parse_scenario(tree, "test"), RunOptions(out=tmp_path / "run"))
    explore.print_coefficients(folder, as_json=as_json)
    written = json.loads((folder / "results.json").read_text())
    written["cells"][0]["mu"] = 0.001
    (folder / "results.json").write_text(json.dumps(written))
    with pytest.raises(RunError):
        explore.print_coefficients(folder, as_json=as_json)


def test_the_noise_of_a_first_step_is_not_that_of_the_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the noise of the scaling was added to that of the moments, and intervals were too wide."""
    tree = tree_of(tmp_path)
    tree["data"]["scale"] = {"share": 0.1}
    del tree["seed"]
    folder = run_sweep(parse_scenario(tree, "test"), RunOptions(out=tmp_path / "run"))
    stds, compute = list[float](), RidgeStatistics.coefficients

    def note_std(self: RidgeStatistics, point: torch.Tensor, published: MeanStatistics) -> list[Coefficient]:
        stds.append(published.std)
        return compute(self, point, published)

    monkeypatch.setattr(RidgeStatistics, "coefficients", note_std)
    (record,) = read_results(folder).cells
    explore.compute_coefficients(record, folder)
    cell = resolve_cell(record["scenario"], "test")
    assert cell.data.table_schema is not None
    plan = make_plan(cell, make_schema_task(cell, cell.data.table_schema).objective)
    assert len(record["releases"]) > 1
    assert stds == [pytest.approx(float(plan.noise.std_in_mean), rel=1e-6)]
