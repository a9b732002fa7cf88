"""The page, the files and the terminal of statistics: texts are texts, and figures say what they are."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

import fedpriv
from fedpriv.addons.statistics.command import render_csv, render_statistics_page, table_rows
from fedpriv.addons.statistics.plan import read_plan
from fedpriv.addons.statistics.tables import Statistics, TableEstimate, TableResult
from fedpriv.cli.app import app
from tests.data.tables import rows, write_csv
from tests.study.test_statistics import tree_of

EVIL = '<script>alert("1")</script>'


@pytest.fixture
def results(tmp_path: Path) -> Any:
    path = write_csv(tmp_path / "t.csv", rows(600))
    tables = [
        {"name": EVIL, "of": ["sex", "outcome"]},
        {"name": "ages", "of": ["age"], "kind": "quantiles"},
        {"name": "mean", "of": ["age"], "kind": "means"},
    ]
    return fedpriv.statistics(tree_of(path, table=tables, title=EVIL), out=tmp_path / "run")


def test_the_statistics_page_escapes_names_and_loads_nothing_external(results: Any) -> None:
    page = (results.run.folder / "statistics.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page
    assert page.count("<svg") == 2
    assert "μ = 1" in page


def test_the_statistics_of_a_simulation_say_that_they_protect_nobody(results: Any, tmp_path: Path) -> None:
    """Guarantee: the page and the terminal promise a reader's ignorance of records for secret noise alone."""
    simulated = (results.run.folder / "statistics.html").read_text(encoding="utf-8")
    assert "nothing here is protected" in simulated
    assert "Whoever reads this" not in simulated
    stats = Statistics.from_plan(read_plan(tree_of(write_csv(tmp_path / "u.csv", rows(600)))))
    released = render_statistics_page(stats, (), {**results.data, "noise": "release"})
    assert "Whoever reads this learns of every record no more than μ = 1 allows" in released
    assert "simulation" not in released
    plan = tmp_path / "plan.toml"
    plan.write_text(tomli_w.dumps(json.loads(json.dumps(tree_of(tmp_path / "u.csv")))), encoding="utf-8")
    done = CliRunner().invoke(app, ["statistics", str(plan), "--out", str(tmp_path / "again")])
    assert "a simulation: anybody can recompute this noise and remove it" in done.stdout, done.output


def test_the_statistics_files_hold_the_results_that_python_returns(results: Any) -> None:
    data = json.loads((results.run.folder / "statistics.json").read_text(encoding="utf-8"))
    assert data == json.loads(json.dumps(results.data))
    assert data["mu"] == results.run.cells[0].privacy.mu
    with (results.run.folder / "statistics.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert {line["table"] for line in lines} == {EVIL, "ages", "mean"}
    assert len(results.table("mean")) == 4
    with pytest.raises(fedpriv.InputError, match="'other': the plan has"):
        results.table("other")


def test_a_statistics_dry_run_prints_standard_errors_and_mu_and_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "t.csv", rows(600))
    plan = '\n'.join(
        ['name = "p"', 'trust = "trusted"', "[data]", 'name = "t.csv"', "[data.table]", "public = true",
         'target = "outcome"', 'classes = ["well", "ill"]', "test_share = 0.0", "[data.table.columns]",
         'sex = { values = ["f", "m"] }', "[privacy]", 'relation = "zero-out"', "mu = 2.0", "[[table]]",
         'of = ["sex"]']
    )  # fmt: skip
    (tmp_path / "plan.toml").write_text(plan, encoding="utf-8")
    done = CliRunner().invoke(app, ["statistics", "plan.toml", "--dry-run", "--json", "--set", "privacy.mu=0.5"])
    said = json.loads(done.stdout)
    assert said["mu"] == pytest.approx(0.5)
    assert said["tables"][0]["standard_error"]["trusted"] == pytest.approx(2.0)
    text = CliRunner().invoke(app, ["statistics", "plan.toml", "--dry-run"]).stdout
    assert "nothing was asked" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.toml", "t.csv"]


def test_a_data_column_called_value_keeps_its_labels_in_the_statistics_table() -> None:
    """Counts by a column "value" lost the label of every row."""
    counts = (TableEstimate(("red", "f"), 3.0, 1.0, 1.0, 5.0),)
    table = TableResult("colours", ("value", "sex"), "counts", 1.0, counts)
    (row,) = table_rows(table)
    assert row == {
        "column value": "red", "sex": "f", "value": 3.0, "low": 1.0, "high": 5.0, "covers": "these records"
    }  # fmt: skip
    assert render_csv([table]).splitlines()[1] == "colours,red / f,3.0,1.0,5.0,these records"
