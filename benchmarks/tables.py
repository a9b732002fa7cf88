"""All 18 cells of the paper's two tables, one seed, noise per silo, beside the floor (benchmarks/floor.py).

The main thread's processor time is what a loaded machine does not stretch; noise is drawn in a second thread.
"""

import time
from pathlib import Path

from benchmarks import floor
from fedpriv.claims.outcome import RunObserver
from fedpriv.engines.vectorized.engine import run_vectorized
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
_POINTS = 2  # a recursive gradient looks at two


def run() -> None:
    total = 0.0
    print(
        "| table | M | run (s) | main thread (s) | draws (s) | products (s) | evaluations (s) "
        "| main / floor | main / floor with evaluations | main, µs per round |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for table in ("mnist-untrusted", "mnist-trusted"):
        for silos in (1, 10, 100):
            scenario = load_scenario(SCENARIOS / f"{table}.toml", [f"federation.silos={silos}", "seeds=1"])
            cells = [point.cell for point in scenario.points]
            load_task(cells[0])  # loading the data is not the engine's time
            started, of_main = time.perf_counter(), time.thread_time()
            for _ in run_vectorized(cells, RunObserver()):
                pass
            seconds, of_main = time.perf_counter() - started, time.thread_time() - of_main
            total += seconds
            draws, products = floor.draws(cells[0]), floor.products(cells, _POINTS)
            least, scores = draws + products, floor.evaluations(cells)
            rounds = cells[0].federation.total_rounds
            print(
                f"| {table.removeprefix('mnist-')} | {silos} | {seconds:.2f} | {of_main:.2f} | {draws:.2f} "
                f"| {products:.2f} | {scores:.2f} | {of_main / least:.2f} | {of_main / (least + scores):.2f} "
                f"| {1e6 * of_main / rounds:,.0f} |"
            )
    print(f"\nall 18 cells, one seed, noise per silo: {total:.1f} s (target: under 60 s on 2 cores)")
