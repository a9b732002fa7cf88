"""AUC, sensitivity and specificity that silos released, beside scikit-learn's of the same model on pooled records.

python -m benchmarks.auc_beside RUN_DIR    # of a scenario with [evaluation.curves]; needs fedpriv[learners]
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.addons.statistics.curves import ONE_GROUP, make_groupings
from fedpriv.loss.scores import to_logits
from fedpriv.plan.evaluation import held_out_records_by_silo
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.study.results import read_results

Score = Callable[[NDArray[np.int64], NDArray[np.float64]], float]
FIGURES = ("auc", "sensitivity", "specificity")


class Row(NamedTuple):
    """A group: its size, the records of class 1, and figures by name, exact and (value, low, high) as released."""

    of: str
    records: int
    ones: int
    exact: dict[str, float]
    released: dict[str, tuple[float, float, float]]


def rows_of(folder: Path, auc: Score) -> list[Row]:
    """Of a run's first cell; groups of which nothing was released are left out."""
    record = read_results(folder).cells[0]
    cell = resolve_cell(record["scenario"], str(folder))
    assert cell.evaluation is not None
    curves = cell.evaluation.curves
    assert curves is not None
    task, schema = load_task(cell), cell.data.table_schema
    shares = held_out_records_by_silo(cell)
    features, labels = (torch.cat([each[place] for each in shares]) for place in (0, 1))
    there = labels >= 0
    features, label = features[there], labels[there].numpy().astype(np.int64)
    model = torch.from_numpy(np.load(folder / record["model"], allow_pickle=False)).to(features.dtype)
    logits = to_logits(task.objective.outputs(model, task.test._replace(features=features))).double()
    score = (logits[:, 1] - logits[:, 0]).numpy()
    groups = {"": np.ones(len(label), np.bool_)}
    for each in make_groupings(curves, schema, cell.model.settings, is_scaled=cell.data.scale is not None):
        codes = each.codes(features).numpy()
        groups |= {
            f"_of_{each.name}={name}": codes == code for code, name in enumerate(each.labels) if each != ONE_GROUP
        }
    above, found = score >= np.log(curves.threshold / (1.0 - curves.threshold)), list[Row]()
    for name, own in groups.items():
        if f"test_auc{name}" not in record:
            continue
        ones, zeros = own & (label == 1), own & (label == 0)
        exact = {
            "auc": auc(label[own], score[own]),
            "sensitivity": float(above[ones].mean()),
            "specificity": float((~above)[zeros].mean()),
        }
        released = {each: _interval(record, f"test_{each}{name}") for each in FIGURES}
        found.append(Row(name.removeprefix("_of_") or "all", int(own.sum()), int(ones.sum()), exact, released))
    return found


def _interval(record: Any, name: str) -> tuple[float, float, float]:
    return record[name], record[f"{name}_low"], record[f"{name}_high"]


def main() -> None:
    from sklearn.metrics import roc_auc_score

    columns = [f"{each}{of}" for each in FIGURES for of in (", scikit-learn", "")]
    print("| of | records, class 1 | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * (len(columns) + 1))
    for row in rows_of(Path(sys.argv[1]), roc_auc_score):
        cells = [
            text
            for each in FIGURES
            for text in (f"{row.exact[each]:.3f}", "{:.3f} ({:.3f} – {:.3f})".format(*row.released[each]))
        ]
        print(f"| {row.of} | {row.records}, {row.ones} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
