"""The norm of the training loss's gradient at every published model of a run: what non-convex theorems bound.

python -m benchmarks.gradient_norms RUN_DIR
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell

_ROWS = 2_000
_NO_CLIP = 1e30


def gradient_norm(cell: Cell, model: torch.Tensor) -> float:
    """‖∇F‖ of the mean loss over all training records at `model`, shape (d,)."""
    task = task_of_cell(cell)
    features, labels = task.train
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
    rows = gradient_norms(Path(sys.argv[1]))
    keys = list(rows[0][0])
    print("| " + " | ".join((*keys, "test accuracy", "‖∇F‖")) + " |")
    print("|" + "---|" * (len(keys) + 2))
    for point, accuracy, norm in rows:
        print("| " + " | ".join((*map(str, point.values()), f"{100 * accuracy:.1f}", f"{norm:.3f}")) + " |")


if __name__ == "__main__":
    main()
