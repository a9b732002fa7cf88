"""The Goldstein measure of what a scenario's runs publish, and how it falls with the rounds.

    python -m benchmarks.goldstein [SCENARIO] [KEY=VALUE …]

The measure is of the mean loss over the test records at radius 2α, at which the theorems promise something.  An
exponent is the slope of a least-squares line through the logarithms, with its standard error.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from fedpriv.algorithms.kornowski_liu_talwar import GoldsteinSettings
from fedpriv.engines.vectorized import run_vectorized
from fedpriv.errors import InputError
from fedpriv.federation import task_of_cell
from fedpriv.metrics.goldstein import goldstein_of
from fedpriv.scenario import Cell, load_scenario

_POINTS, _SEED = 256, 0
_PROMISED = {"goldstein-single-pass": "-1/3 in n = 2T", "goldstein-erm": "-1/3 in T"}


class _Silent:
    def advanced(self, client_rounds: int) -> None: ...

    def evaluated(self, index: int, t: int, metrics: Mapping[str, float]) -> None: ...


def measure(cell: Cell, model: torch.Tensor) -> float:
    """The Goldstein measure at radius 2α of a model that `cell` published."""
    settings = cell.algorithm.settings
    if not isinstance(settings, GoldsteinSettings):
        raise InputError(f"{cell.name}: {cell.algorithm.name} has no smoothing radius to measure at")
    task = task_of_cell(cell)
    return goldstein_of(task.objective, model, task.test, 2.0 * settings.smoothing, _POINTS, _SEED)


def run(path: Path = Path("scenarios/nonsmooth-goldstein.toml"), overrides: tuple[str, ...] = ()) -> None:
    """Run the scenario and print its table."""
    scenario = load_scenario(path, overrides)
    cells = [point.cell for point in scenario.points]
    found = defaultdict[tuple[str, float], dict[int, list[tuple[float, float, float]]]](lambda: defaultdict(list))
    for outcome in run_vectorized(cells, _Silent()):
        cell, finished = cells[outcome.index], outcome.finished
        row = (
            measure(cell, torch.from_numpy(finished.model)),
            finished.test_loss,
            finished.fraction_clipped or 0.0,
        )
        key = cell.algorithm.name, cell.privacy.target or float("inf")
        found[key][cell.schedule.rounds].append(row)
    start = task_of_cell(cells[0]).objective.initial()
    print(f"At the start {measure(cells[0], start):.3f}; mean of {len(scenario.seeds)} seeds ± standard error.\n")
    print("| algorithm | mu | T | Goldstein measure | test loss | clipped |")
    print("|---|---|---|---|---|---|")
    for (name, mu), by_rounds in found.items():
        for rounds, rows in by_rounds.items():
            (value, loss, clipped), error = (
                np.mean(rows, axis=0),
                np.std([row[0] for row in rows]) / len(rows) ** 0.5,
            )
            print(f"| {name} | {mu:g} | {rounds} | {value:.4f} ± {error:.4f} | {loss:.4f} | {clipped:.3f} |")
    print("\n| algorithm | mu | exponent in T | the theorem's, without privacy |")
    print("|---|---|---|---|")
    for (name, mu), by_rounds in found.items():
        if len(by_rounds) > 2:
            points = [(np.log(rounds), np.log(row[0])) for rounds, rows in by_rounds.items() for row in rows]
            (slope, _), covariance = np.polyfit(*np.array(points).T, 1, cov=True)
            print(f"| {name} | {mu:g} | {slope:.2f} ± {covariance[0, 0] ** 0.5:.2f} | {_PROMISED[name]} |")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    files = [Path(argument) for argument in arguments if "=" not in argument]
    run(*files[:1], overrides=tuple(argument for argument in arguments if "=" in argument))
