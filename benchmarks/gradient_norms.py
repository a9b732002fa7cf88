"""The norm of the training loss's gradient at the published models of a run: what non-convex theorems bound.

python -m benchmarks.gradient_norms RUN_DIR

A row is the mean over the seeds of a point of the sweep; ± is half of its 95 % interval, by Student's t.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student

from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell

_ROWS = 2_000
_NO_CLIP = 1e30


def gradient_norm(cell: Cell, model: torch.Tensor) -> float:
    """‖∇F‖ of the mean loss over the records that the silos hold, at `model`, shape (d,)."""
    task = load_task(cell)
    held = torch.cat(partition_records(cell))
    features, labels = (column[held] for column in task.train)
    total = torch.zeros_like(model)
    for start in range(0, len(labels), _ROWS):
        part = Records(features[start : start + _ROWS], labels[start : start + _ROWS])
        weights = torch.full((len(part.labels),), 1.0 / len(labels), dtype=model.dtype)
        total += task.objective.increment(Query((model,)), Batch(part, weights), _NO_CLIP).total
    return float(torch.linalg.vector_norm(total))


def gradient_norms(folder: Path) -> list[tuple[dict[str, Any], float, float]]:
    """Sweep point, test accuracy and gradient norm of every finished cell of a run folder."""
    found = []
    for entry in json.loads((folder / "results.json").read_text(encoding="utf-8"))["cells"]:
        cell = resolve_cell(entry["scenario"], str(folder))
        model = torch.from_numpy(np.load(folder / entry["model"], allow_pickle=False))
        found.append((entry["point"], entry["test_accuracy"], gradient_norm(cell, model)))
    return found


def main() -> None:
    by_point: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    rows = gradient_norms(Path(sys.argv[1]))
    for point, accuracy, norm in rows:
        by_point.setdefault(tuple(map(str, point.values())), []).append((100.0 * accuracy, norm))
    keys = list(rows[0][0])
    print("| " + " | ".join((*keys, "seeds", "test accuracy", "‖∇F‖")) + " |")
    print("|" + "---|" * (len(keys) + 3))
    for values, found in by_point.items():
        accuracies, norms = zip(*found, strict=True)
        print(
            f"| {' | '.join(values)} | {len(found)} | {_interval(accuracies, '.1f')} | {_interval(norms, '.4f')} |"
        )


def _interval(values: tuple[float, ...], digits: str) -> str:
    count = len(values)
    if count < 2:
        return f"{values[0]:{digits}}"
    half = float(student.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return f"{np.mean(values):{digits}} ± {half:{digits}}"


if __name__ == "__main__":
    main()
