"""All 18 cells of the paper's two tables, one seed, noise drawn per silo, beside the floor.

The floor is what cannot be left out: drawing the Gaussian vectors (shared by cells that differ in ρ only, since
streams are keyed by the seed) and two matrix-vector products a record, each alone, on one core.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from fedpriv.engines.vectorized import run_vectorized
from fedpriv.federation import spread, task_of_cell
from fedpriv.plan import plan_of
from fedpriv.randomness import simulation_noise
from fedpriv.scenario import Cell, load_scenario

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
_SAMPLE_ROUNDS = 300


class Silent:
    def advanced(self, client_rounds: int) -> None: ...

    def evaluated(self, index: int, t: int, metrics: Mapping[str, float]) -> None: ...


def run() -> None:
    total = 0.0
    print("| table | silos | rounds | run (s) | draws (s) | products (s) | run / floor | us a round |")
    print("|---|---|---|---|---|---|---|---|")
    for table in ("mnist-untrusted", "mnist-trusted"):
        for silos in (1, 10, 100):
            scenario = load_scenario(SCENARIOS / f"{table}.toml", [f"federation.silos={silos}", "seeds=1"])
            cells = [point.cell for point in scenario.points]
            task_of_cell(cells[0])  # loading the data is not the engine's time
            started = time.perf_counter()
            for _ in run_vectorized(cells, Silent()):
                pass
            seconds = time.perf_counter() - started
            total += seconds
            draws, products = _draws(cells[0]), _products(cells)
            rounds = cells[0].federation.total_rounds
            print(
                f"| {table} | {silos} | {rounds} | {seconds:.2f} | {draws:.2f} | {products:.2f} "
                f"| {seconds / (draws + products):.2f} | {1e6 * seconds / rounds:.0f} |"
            )
    print(f"\nall 18 cells, one seed, noise per silo: {total:.1f} s (target: under 60 s on 2 cores)")


def _extrapolated(one_round: Callable[[int], None], rounds: int) -> float:
    sample = min(rounds, _SAMPLE_ROUNDS)
    one_round(1)
    started = time.perf_counter()
    for t in range(1, sample + 1):
        one_round(t)
    return (time.perf_counter() - started) * rounds / sample


def _draws(cell: Cell) -> float:
    """Seconds to draw every owner's vector of every round and add them up, and nothing else."""
    task = task_of_cell(cell)
    sources = plan_of(cell, task.objective).noise.sources
    owners, weights = [source.owner for source in sources], [1.0] * len(sources)
    noise, size, rounds = simulation_noise(0, np.float32), task.objective.dimension, cell.federation.total_rounds
    if len(owners) > 1:
        return _extrapolated(lambda t: _ignore(noise.weighted_sum(size, owners, weights, t)), rounds)
    batch = 64
    return _extrapolated(lambda _: _ignore(noise.vectors(size, owners * batch, range(batch))), rounds) / batch


def _products(cells: list[Cell]) -> float:
    """Seconds for the logits of every record at two points, for every replicate."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task, silos = task_of_cell(cells[0]), cells[0].federation.silos
    order = spread(cells[0])
    point = torch.randn(len(cells), 10, 785)

    def one_round(t: int) -> None:
        features = task.train.features[order[:, t - 1]].expand(len(cells), silos, 785)
        for _ in range(2):
            torch.bmm(features, point.mT)

    seconds = _extrapolated(one_round, cells[0].federation.total_rounds)
    torch.set_num_threads(threads)
    return seconds


def _ignore(_: object) -> None:
    """The result is not wanted, only the time."""
