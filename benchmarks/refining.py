"""Choose between a scenario's settings and their neighbours, all with the same care; prints [[where]] rules.

python -m benchmarks.refining scenarios/tuning/NAME.toml

`fedpriv tune` leaves a scenario with the best point of a coarse grid.  Around it five settings are tried, on
the two seeds after those of the tuning file: itself, its step times and over √2, and clip and step turned
against each other by √2 (their product is what a clipped step moves).  Where another one wins, its neighbours
are tried, too, once.
"""

import json
import math
import statistics
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpriv.claims.outcome import RunObserver
from fedpriv.engines.vectorized.engine import run_vectorized
from fedpriv.plan.calibration import FittedNoise, fit_scenario_noise
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell

Setting = dict[str, Any]
Scores = dict[str, list[float]]
"""Accuracies by setting, as JSON."""

_FACTOR = math.sqrt(2.0)
_CLIP, _STEPS = "algorithm.clip", ("algorithm.step", "algorithm.beta")


def neighbours(setting: Mapping[str, Any]) -> list[Setting]:
    """The setting itself, and four around it."""
    key = next(key for key in _STEPS if key in setting)
    longer = _FACTOR if key == "algorithm.step" else 1.0 / _FACTOR  # steps are 1/β
    moves = ((1.0, 1.0), (1.0, longer), (1.0, 1.0 / longer), (1.0 / _FACTOR, longer), (_FACTOR, 1.0 / longer))
    return [
        {**setting, _CLIP: _short(setting[_CLIP] * clip), key: _short(setting[key] * step)} for clip, step in moves
    ]


def fresh_seeds(used: Sequence[int]) -> list[int]:
    """Two that the coarse grid was not compared on."""
    return [max(used) + 1, max(used) + 2]


def refined(tuning: Mapping[str, Any], scenario: Path, name: str) -> dict[str, Scores]:
    """What was tried at each point of the scenario that `name` has a rule for, by the rule's condition."""
    axis, fixed = str(tuning["axis"]), dict(tuning["fixed"])
    centres = dict[str, Setting]()
    for rule in tomllib.loads(scenario.read_text(encoding="utf-8"))["where"]:
        when = rule["when"]
        held = all(when.get(key, value) == value for key, value in fixed.items())
        if held and when.get(axis) == name and len(when) > 1:
            centres[json.dumps(when)] = rule["set"]
    found: dict[str, Scores] = {when: {} for when in centres}
    for _ in range(2):
        wanted = [
            (when, json.dumps(setting))
            for when, centre in centres.items()
            for setting in neighbours(centre)
            if json.dumps(setting) not in found[when]
        ]
        for when, setting, score in _scored(wanted, scenario, fixed, fresh_seeds(tuning["seeds"])):
            found[when].setdefault(setting, []).append(score)
        centres = {when: json.loads(_ranked(scores)[0][1]) for when, scores in found.items()}
    return found


def _scored(
    wanted: Iterable[tuple[str, str]], scenario: Path, fixed: Mapping[str, Any], seeds: list[int]
) -> Iterable[tuple[str, str, float]]:
    cells: list[Cell] = []
    labels: list[tuple[str, str]] = []
    fits = dict[str, FittedNoise]()
    for when, setting in wanted:
        keys = {**fixed, **json.loads(when), **json.loads(setting), "seeds": seeds}
        loaded, more = fit_scenario_noise(
            load_scenario(scenario, [f"{key}={json.dumps(value)}" for key, value in keys.items()]), fits
        )
        fits |= more
        cells += [point.cell for point in loaded.points]
        labels += [(when, setting)] * len(loaded.points)
    for outcome in run_vectorized(cells, RunObserver()):
        yield *labels[outcome.index], outcome.cell_outcome.metrics["test_accuracy"]


def _ranked(scores: Scores) -> list[tuple[float, str]]:
    return sorted(((statistics.fmean(values), setting) for setting, values in scores.items()), reverse=True)


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def run(path: Path, chosen: list[str]) -> None:
    tuning = tomllib.loads(path.read_text(encoding="utf-8"))
    scenario = (path.parent / tuning["scenario"]).resolve()
    for name in tuning["grid"]:
        if chosen and name not in chosen:
            continue
        for when, scores in refined(tuning, scenario, name).items():
            (best, setting), (second, _) = _ranked(scores)[:2]
            tried = f"{100 * best:.2f} % of {len(scores)} settings around; next best {100 * second:.2f} %"
            print(f"\n[[where]]  # {tried}")
            print(f"when = {_inline(json.loads(when))}\nset = {_inline(json.loads(setting))}", flush=True)


def _inline(table: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in table.items()) + " }"


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
