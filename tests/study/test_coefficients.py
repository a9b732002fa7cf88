"""Coefficients of a run: named by feature, with the noise of its ledger."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.addons.statistics import command as explore
from fedpriv.core.errors import InputError, RunError
from fedpriv.loss.ridge import Coefficient, MeanStatistics, RidgeStatistics
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import make_schema_task
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.study.results import read_results
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.data.tables import rows, table_tree, write_csv
from tests.loss.test_ridge import tree_of


def run_tree(tree: dict[str, Any], folder: Path) -> Path:
    return run_sweep(
        parse_scenario({key: value for key, value in tree.items() if key != "seed"}, "test"),
        RunOptions(out=folder / "run"),
    )


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[MeanStatistics]:
    """Statistics of which coefficients are computed."""
    calls, compute = list[MeanStatistics](), RidgeStatistics.coefficients

    def note(self: RidgeStatistics, point: torch.Tensor, statistics: MeanStatistics) -> list[Coefficient]:
        calls.append(statistics)
        return compute(self, point, statistics)

    monkeypatch.setattr(RidgeStatistics, "coefficients", note)
    return calls


def planned_std(record: Mapping[str, Any]) -> float:
    """The deviation of the mean's noise in the plan of a cell."""
    cell = resolve_cell(record["scenario"], "test")
    assert cell.data.table_schema is not None
    plan = make_plan(cell, make_schema_task(cell, cell.data.table_schema).objective)
    return float(plan.noise.std_in_mean)


@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation", "trusted"])
def test_coefficients_are_named_by_feature_and_use_the_planned_noise_of_the_mean(
    tmp_path: Path, trust: str, published: list[MeanStatistics]
) -> None:
    folder = run_tree(tree_of(tmp_path, algorithm={"trust": trust}), tmp_path)
    (record,) = read_results(folder).cells
    names = [name for name, _ in explore.compute_coefficients(record, folder)]
    assert names == ["age", "pain = none", "pain = some", "pain = *", "sex = f", "sex = m", "constant"]
    (statistics,) = published
    assert statistics.record_count == 200  # of 300 places, two thirds count
    assert statistics.counted_share == pytest.approx(2.0 / 3.0)
    assert statistics.std == pytest.approx(planned_std(record), rel=1e-6)


def test_coefficients_of_silos_with_budgets_of_their_own_use_the_weights_of_the_mean(
    tmp_path: Path, published: list[MeanStatistics]
) -> None:
    """Shares of records took the place of the weights (B μ)², by which means with unequal noise are weighed."""
    folder = run_tree(tree_of(tmp_path, privacy={"mu": [0.5, 2.0]}), tmp_path)
    (record,) = read_results(folder).cells
    explore.compute_coefficients(record, folder)
    (statistics,) = published
    assert statistics.std == pytest.approx(planned_std(record), rel=1e-6)
    weight = 90.0**2 / (90.0**2 + 240.0**2)
    assert statistics.record_count == round(2.0 / 3.0 / (weight**2 / 180.0 + (1.0 - weight) ** 2 / 120.0))


def test_coefficients_with_intervals_are_refused_for_softmax_regression(tmp_path: Path) -> None:
    folder = run_tree(table_tree(write_csv(tmp_path / "t.csv", rows(300))), tmp_path)
    with pytest.raises(InputError, match="'softmax-regression': coefficients have intervals where"):
        explore.compute_coefficients(read_results(folder).cells[0], folder)


NEWTON: dict[str, Any] = {
    "algorithm": {"name": "noisy-newton", "trust": "untrusted", "clip": 1, "curvature_clip": 0.5, "penalty": 0.1},
    "model": {"name": "logistic-regression", "feature_norm": 2.0},
    "federation": {"silos": 2, "rounds": 2, "batches": [50, 50]},
}


@pytest.mark.parametrize("changes", [{}, NEWTON])
def test_a_model_file_that_is_damaged_or_of_another_model_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Before: errors of numpy and torch ended the command."""
    folder = run_tree(tree_of(tmp_path) | changes, tmp_path)
    explore.print_coefficients(folder, as_json=True)
    (record,) = read_results(folder).cells
    path, model = folder / record["model"], np.load(folder / record["model"])
    for other in (model[:-1], np.zeros((2, 3)), np.float64(1.0), model.astype(str), np.zeros(0)):
        np.save(path, other)
        with pytest.raises(InputError, match=rf"{path.name}: holds no model of its cell \("):
            explore.print_coefficients(folder, as_json=True)
    for content in (b"", b"PK\x03\x04", b"\x93NUMPY", b"no array"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"{path.name}: holds no model of its cell \("):
            explore.print_coefficients(folder, as_json=True)


@pytest.mark.parametrize("as_json", [False, True])
def test_coefficients_of_a_run_with_an_edited_claim_end_in_an_error(tmp_path: Path, as_json: bool) -> None:
    """Exit code 0 with --json, where a claim was smaller than its releases."""
    folder = run_tree(tree_of(tmp_path), tmp_path)
    explore.print_coefficients(folder, as_json=as_json)
    written = json.loads((folder / "results.json").read_text())
    written["cells"][0]["mu"] = 0.001
    (folder / "results.json").write_text(json.dumps(written))
    with pytest.raises(RunError):
        explore.print_coefficients(folder, as_json=as_json)


def test_the_noise_of_feature_scaling_is_not_added_to_that_of_the_moments(
    tmp_path: Path, published: list[MeanStatistics]
) -> None:
    """Before: the noise of the scaling was added to that of the moments, and intervals were too wide."""
    tree = tree_of(tmp_path)
    tree["data"]["scale"] = {"share": 0.1}
    folder = run_tree(tree, tmp_path)
    (record,) = read_results(folder).cells
    explore.compute_coefficients(record, folder)
    assert len(record["releases"]) > 1
    assert [statistics.std for statistics in published] == [pytest.approx(planned_std(record), rel=1e-6)]
