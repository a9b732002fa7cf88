"""All 18 cells of the paper's two tables, one seed, noise per silo, beside the floor (benchmarks/floor.py)."""

import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import floor
from fedpriv.engines.vectorized.engine import run_vectorized
from fedpriv.running.task import task_of_cell
from fedpriv.scenario import load_scenario

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
_POINTS = 2  # a recursive gradient looks at two


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
            draws, products = floor.draws(cells[0]), floor.products(cells, _POINTS)
            rounds = cells[0].federation.total_rounds
            print(
                f"| {table} | {silos} | {rounds} | {seconds:.2f} | {draws:.2f} | {products:.2f} "
                f"| {seconds / (draws + products):.2f} | {1e6 * seconds / rounds:.0f} |"
            )
    print(f"\nall 18 cells, one seed, noise per silo: {total:.1f} s (target: under 60 s on 2 cores)")
