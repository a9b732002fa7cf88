"""How far one row of a run is ahead of another, seed by seed, with 95 % intervals: seeds share their noise.

    python -m benchmarks.differences RUN_DIR ROW ROW [METRIC]
    python -m benchmarks.differences RUN_DIR RUN_DIR [METRIC]

Rows are values of a swept key, such as "dp-ftrl, fitted" or [1.0, 0.5]; the second is subtracted from the first.
Of two runs every point of the first is compared with the second, which has one point.  METRIC is one of
results.json that is a share of records, test_accuracy if left out.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

_CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of Student's 95 % interval; of one value it is infinite."""
    if len(values) < 2:
        return float(np.mean(values)), float("inf")
    quantile = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, len(values) - 1))
    return float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / float(np.sqrt(len(values)))


def differences(
    cells: Sequence[Mapping[str, Any]], first: str, second: str, metric: str = "test_accuracy"
) -> dict[str, list[float]]:
    """By the rest of the sweep's point, as JSON: `metric` of `first` less that of `second` for every seed of both.

    ValueError for a row that the run has not.
    """
    found: dict[str, dict[tuple[str, Any], float]] = {first: {}, second: {}}
    for cell in cells:
        point = dict(cell["point"])
        for key in [key for key, value in point.items() if _text(value) in (first, second)]:
            row, seed = _text(point.pop(key)), cell["seed"]
            found[row][json.dumps(point, sort_keys=True), seed] = cell[metric]
    if missing := [row for row, values in found.items() if not values]:
        raise ValueError(f"{missing[0]!r}: no such row in this run")
    pairs: dict[str, list[float]] = {}
    for (point, seed), value in found[first].items():
        if (point, seed) in found[second]:
            pairs.setdefault(point, []).append(value - found[second][point, seed])
    return pairs


def _text(value: Any) -> str:
    """A swept value as it is given on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def between(
    cells: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], metric: str = "test_accuracy"
) -> dict[str, list[float]]:
    """By point: `metric` of the cells of a run less that of the cell of another run with the same seed.

    ValueError if the other run has several points.
    """
    known = {cell["seed"]: cell[metric] for cell in others}
    if len(known) < len(others):
        raise ValueError("the second run has several points; name one of one point")
    found: dict[str, list[float]] = {}
    for cell in cells:
        if cell["seed"] in known:
            point = json.dumps(cell["point"], sort_keys=True)
            found.setdefault(point, []).append(cell[metric] - known[cell["seed"]])
    return found


def main(folder: str, second: str, *others: str) -> None:
    cells = _cells(folder)
    if (Path(second) / "results.json").exists():
        (metric,) = others or ("test_accuracy",)
        title, found = f"{folder} less {second}", between(cells, _cells(second), metric)
    else:
        row, metric = (*others, "test_accuracy")[:2]
        title, found = f"{second} less {row}", differences(cells, second, row, metric)
    print(f"{title}, points of {metric.removeprefix('test_')}")
    for point, values in found.items():
        mean, half = interval([100 * value for value in values])
        where = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in json.loads(point).items())
        print(f"{where}: {mean:+.2f} ± {half:.2f} ({len(values)} seeds)")


def _cells(folder: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))["cells"]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
