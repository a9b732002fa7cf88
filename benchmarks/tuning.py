"""Choose settings for the algorithms of a scenario, all with the same care; prints them as [[where]] rules.

A tuning file (scenarios/tuning/*.toml) names the scenario, the seeds and the keys that hold while tuning, and a
grid for each algorithm; every point of the scenario's other axes gets the setting of the best mean accuracy.
Where the scenario sweeps something else than `algorithm.name`, such as `label.method`, `axis` is that key; where
another metric than the accuracy of all test records is looked at, `metric` is its name.
"""

import itertools
import json
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import Silent
from fedpriv.engines.vectorized.engine import run_vectorized
from fedpriv.running.fitted import Fitted, fitted_scenario
from fedpriv.scenario import Cell, load_scenario


def run(path: Path, chosen: Sequence[str] = ()) -> None:
    """Tune the algorithms `chosen`, or every one, of the tuning file at `path`."""
    tuning = tomllib.loads(path.read_text(encoding="utf-8"))
    tuning["grid"] = {name: grid for name, grid in tuning["grid"].items() if name in chosen or not chosen}
    scenario = (path.parent / tuning["scenario"]).resolve()
    sizes = {name: len(_settings(grid)) for name, grid in tuning["grid"].items()}
    print(
        f"# settings tried for each point: {sizes}; seeds {tuning['seeds']}; held while tuning: {tuning['fixed']}"
    )
    for name, grid in tuning["grid"].items():
        for point, (setting, score, runner_up) in tune(scenario, tuning, name, grid).items():
            conditions = {_axis(tuning): name, **dict(point)}
            print(f"\n[[where]]  # {100 * score:.1f} % while tuning; next best {100 * runner_up:.1f} %")
            print(f"when = {_inline(conditions)}\nset = {_inline(setting)}")
            sys.stdout.flush()


def tune(
    scenario: Path, tuning: Mapping[str, Any], name: str, grid: Mapping[str, Sequence[Any]]
) -> dict[tuple[tuple[str, Any], ...], tuple[dict[str, Any], float, float]]:
    """For each point of the scenario's other axes: the best setting, its mean accuracy, and the second best's."""
    axis = _axis(tuning)
    fixed = {**tuning["fixed"], axis: name, "seeds": tuning["seeds"]}
    cells: list[Cell] = []
    labels: list[tuple[tuple[tuple[str, Any], ...], int]] = []
    settings = _settings(grid)
    fits = dict[str, Fitted]()
    for number, setting in enumerate(settings):
        overrides = [f"{key}={json.dumps(value)}" for key, value in {**fixed, **setting}.items()]
        loaded, more = fitted_scenario(load_scenario(scenario, overrides), fits)
        fits |= more
        for point in loaded.points:
            place = tuple((key, value) for key, value in point.swept.items() if key != axis)
            cells.append(point.cell)
            labels.append((place, number))
    metric = tuning.get("metric", "test_accuracy")
    scores: dict[tuple[tuple[str, Any], ...], dict[int, list[float]]] = {}
    for outcome in run_vectorized(cells, Silent()):
        place, number = labels[outcome.index]
        scores.setdefault(place, {}).setdefault(number, []).append(outcome.finished.metrics[metric])
    best = {}
    for place, of_setting in scores.items():
        ranked = sorted(
            ((statistics.fmean(values), -number) for number, values in of_setting.items()), reverse=True
        )
        best[place] = (settings[-ranked[0][1]], ranked[0][0], ranked[min(1, len(ranked) - 1)][0])
    return best


def _axis(tuning: Mapping[str, Any]) -> str:
    return str(tuning.get("axis", "algorithm.name"))


def _settings(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _inline(table: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in table.items()) + " }"


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
