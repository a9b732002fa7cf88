"""The Goldstein measure along a scenario's runs, and how it falls with the rounds.

    python -m benchmarks.goldstein [SCENARIO] [KEY=VALUE …]

A scenario with output = "last" publishes at every evaluation the latest window; the mean of the metric `goldstein`
over a run's evaluations is then what the theorems bound, the expectation over a random window.  An exponent is the
slope of a least-squares line through the logarithms of the means over seeds, with its standard error.  ± of a
measure is half of its 95 % interval over the seeds, by Student's t.  The theorems' exponent stands beside runs
without privacy of a loss that has a Lipschitz constant everywhere, which is what they ask for.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.stats import linregress
from scipy.stats import t as student

from fedpriv.claims.outcome import RunObserver
from fedpriv.engines.vectorized.engine import run_vectorized
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell

_PROMISED = {"goldstein-single-pass": "-1/3 (n = 2T)", "goldstein-erm": "-1/3"}
_NO_NOISE = 1000.0
"""A μ at which the noise is not seen."""


class _History(RunObserver):
    """Keeps the measure of every evaluation."""

    def __init__(self) -> None:
        self.measures = defaultdict[int, list[float]](list)

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self.measures[place].append(metrics["goldstein"])


def promised(cell: Cell) -> str:
    """The theorem's exponent in T, where its setting holds; else nothing."""
    lipschitz = load_task(cell).objective.lipschitz
    private = cell.privacy.target_mu is not None and cell.privacy.target_mu < _NO_NOISE
    return "" if private or math.isinf(lipschitz) else _PROMISED[cell.algorithm.name]


def run(path: Path = Path("scenarios/nonsmooth-goldstein.toml"), overrides: tuple[str, ...] = ()) -> None:
    """Run the scenario and print its table."""
    scenario, heard = load_scenario(path, overrides), _History()
    cells = [point.cell for point in scenario.points]
    found = defaultdict[tuple[str, str, float], dict[int, list[tuple[float, ...]]]](lambda: defaultdict(list))
    theory: dict[tuple[str, str, float], str] = {}
    for outcome in run_vectorized(cells, heard):
        cell, finished, measures = cells[outcome.index], outcome.cell_outcome, heard.measures[outcome.index]
        row = float(np.mean(measures)), measures[-1], finished.test_loss, finished.fraction_clipped or 0.0
        method = str(scenario.points[outcome.index].swept_values.get("label.method", cell.model.name))
        setting = method, cell.algorithm.name, cell.privacy.target_mu or float("inf")
        found[setting][cell.schedule.rounds].append(row)
        theory.setdefault(setting, promised(cell))
    count = len(scenario.seeds)
    print(f"Means of {count} seeds ± half of a 95 % interval.\n")
    print(
        "| model or method | algorithm | mu | T | Goldstein measure | of the last window | test loss | clipped |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (model, name, mu), by_rounds in found.items():
        for rounds, rows in by_rounds.items():
            measure, last, loss, clipped = np.mean(rows, axis=0)
            half = np.zeros(4)
            if count > 1:
                half = student.ppf(0.975, count - 1) * np.std(rows, axis=0, ddof=1) / count**0.5
            shown = f"{measure:.4f} ± {half[0]:.4f} | {last:.4f} | {loss:.4f} ± {half[2]:.4f} | {clipped:.2%}"
            print(f"| {model} | {name} | {mu:g} | {rounds} | {shown} |")
    print("\n| model | algorithm | mu | exponent in T | the theorem's, without privacy |\n|---|---|---|---|---|")
    for (model, name, mu), by_rounds in found.items():
        if len(by_rounds) > 2:
            means = [np.mean([row[0] for row in rows]) for rows in by_rounds.values()]
            fit = linregress(np.log(list(by_rounds)), np.log(means))
            slope = f"{fit.slope:.2f} ± {fit.stderr:.2f}"
            print(f"| {model} | {name} | {mu:g} | {slope} | {theory[model, name, mu]} |")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    files = [Path(argument) for argument in arguments if "=" not in argument]
    run(*files[:1], overrides=tuple(argument for argument in arguments if "=" in argument))
