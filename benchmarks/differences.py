"""How far one row of a run is ahead of another, seed by seed, with 95 % intervals: seeds share their noise.

python -m benchmarks.differences RUN_DIR ROW ROW [METRIC]

Rows are values of a swept key, such as "dp-ftrl, fitted" or [1.0, 0.5]; the second is subtracted from the first.
METRIC is one of results.json that is a share of records, test_accuracy if left out.
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


def main(folder: Path, first: str, second: str, metric: str = "test_accuracy") -> None:
    cells = json.loads((folder / "results.json").read_text(encoding="utf-8"))["cells"]
    print(f"{first} less {second}, points of {metric}")
    for point, values in differences(cells, first, second, metric).items():
        mean, half = interval([100 * value for value in values])
        where = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in json.loads(point).items())
        print(f"{where}: {mean:+.2f} ± {half:.2f} ({len(values)} seeds)")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
