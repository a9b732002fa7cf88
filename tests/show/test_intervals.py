"""Tables of figures with intervals: whose they are, and that a figure nobody released is a dash."""

from pathlib import Path
from typing import Any

from fedpriv.scenario.load import parse_scenario
from fedpriv.show.page import render_page
from fedpriv.show.table import render_tables
from fedpriv.study.results import read_results
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.data.tables import rows, table_tree, write_csv


def run_of(folder: Path, **evaluation: Any) -> Path:
    tree = table_tree(write_csv(folder / "table.csv", rows(600)))
    tree["federation"] = {"silos": 2, "rounds": 8, "epochs": 8, "batches": [360, 240]}
    tree["privacy"] = {"relation": "replace-one", "mu": 1.0}
    tree["evaluation"] = {"records": [360, 240], "mu": 100.0, **evaluation}
    tree["run"] = {"evaluations": 1, "per_silo": True}
    del tree["seed"]
    return run_sweep(parse_scenario(tree, "test"), RunOptions(out=folder / "run"))


def test_the_interval_table_has_rows_for_all_records_each_group_and_each_silo(tmp_path: Path) -> None:
    folder = run_of(tmp_path, curves={"bins": 32, "by": ["sex"]})
    results = read_results(folder)
    text = render_tables(results, "markdown")
    table = text[text.index("test records of the silos, with intervals") :]
    for whose in ("all", "sex=f", "sex=m", "at north", "at south"):
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {whose} ")]
        assert line.count(" – ") >= 5
    assert "share of class 1 among test records" in table
    assert "sex=m" in render_page(folder, results)
    assert "test_auc_low" in results.cells[0]


def test_a_run_without_evaluation_curves_has_no_interval_table(tmp_path: Path) -> None:
    assert "with intervals" not in render_tables(read_results(run_of(tmp_path)), "markdown")
