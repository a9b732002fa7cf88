"""A run that is no better than a constant prediction says so wherever its figures are shown."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import fedpriv
from fedpriv.cli.explore import show_run
from fedpriv.show.page import write_report
from fedpriv.show.summary import list_findings
from fedpriv.show.table import render_tables
from fedpriv.show.verdict import describe_run
from fedpriv.study.results import read_results
from tests.data.tables import rows, write_csv

COLUMNS = {"age": {"range": [0, 110]}, "pain": {"values": ["none", "some", "much", "*"]}}


def ran(folder: Path, target: str, step: float, epsilon: float) -> Path:
    write_csv(folder / "table.csv", rows(300))
    real = target == "age"
    columns = {name: column for name, column in COLUMNS.items() if name != target}
    aim: dict[str, Any] = {"range": [0, 110]} if real else {"classes": ["well", "ill"]}
    fedpriv.run(
        {
            "name": "small",
            "data": {"name": str(folder / "table.csv"),
                     "table": {"public": True, "target": target, "columns": columns, **aim}},
            "model": {"name": "linear-regression" if real else "softmax-regression", "feature_norm": 2.0},
            "federation": {"silos": 2, "rounds": 10, "epochs": 10, "batches": [100, 100]},
            "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": step},
            "privacy": {"relation": "zero-out", "epsilon": epsilon},
            "run": {"metrics": ["r2"] if real else ["balanced_accuracy"]},
        },
        out=folder / "run",
    )  # fmt: skip
    return folder / "run"


@pytest.mark.parametrize(
    ("target", "step", "epsilon", "words"),
    [
        ("age", 30.0, 0.1, "The model is no better than a constant prediction: R² is below 0."),
        ("outcome", 300.0, 0.1, "that of the best constant outputs, whatever the accuracy"),
        ("outcome", 1.0, 50.0, ""),
    ],
)
def test_a_model_no_better_than_a_constant_is_reported_in_terminal_table_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, step: float, epsilon: float, words: str
) -> None:
    run = ran(tmp_path, target, step, epsilon)
    results = read_results(run)
    cell = json.loads((run / "results.json").read_text())["cells"][0]
    bad = cell.get("test_r2", 1.0) < 0.0 or (target == "outcome" and cell["test_loss"] >= math.log(2))
    assert bad == bool(words)
    show_run(run)
    shown = [
        " ".join(capsys.readouterr().out.split()),
        render_tables(results, "markdown"),
        write_report(run).read_text(encoding="utf-8"),
        describe_run(results),
        " ".join(list_findings(results)),
    ]
    for text in shown:
        assert (words in text) if words else ("no better than a constant" not in text)
