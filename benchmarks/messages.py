"""Client messages a second: the real ServerApp, strategy and ClientApp in process and on Flower's Ray engine.

The same cell on both: 100 silos, d = 7,850, untrusted server, so that every message carries noise of its own.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from fedpriv.engines.table import engine_named
from fedpriv.federation import task_of_cell
from fedpriv.scenario import Cell, load_scenario

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"


class Clock:
    """Times the rounds alone: from the first progress report to the last, so that start-up does not count."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.rounds = 0

    def advanced(self, client_rounds: int) -> None:
        if not client_rounds:
            return
        now = time.perf_counter()
        if not self.first:
            self.first = now
        else:
            self.rounds += client_rounds
        self.last = now

    def evaluated(self, index: int, t: int, metrics: Mapping[str, float]) -> None: ...

    def messages_per_second(self, silos: int) -> float:
        return silos * self.rounds / (self.last - self.first)


def measure(engine: str, rounds: int) -> float:
    scenario = load_scenario(
        SCENARIOS / "mnist-untrusted.toml",
        [
            "federation.silos=100",
            "privacy.rho=4.0",
            "seeds=1",
            f"federation.samples={100 * rounds}",
            "run.evaluations=1",
        ],
    )
    cell: Cell = scenario.points[0].cell
    task_of_cell(cell)
    clock = Clock()
    for _ in engine_named(engine)([cell], clock):
        pass
    return clock.messages_per_second(cell.federation.silos)


def run() -> None:
    inprocess = measure("inprocess", 300)
    print(f"in process: {inprocess:,.0f} messages/s ({1e6 / inprocess:.0f} us each; target: 3,000 a second)")
    ray = measure("ray", 120)
    print(f"Flower's Ray engine: {ray:,.0f} messages/s ({ray / 100:.2f} rounds/s)")
    print(f"ratio: {inprocess / ray:.1f} (target: 20); load {os.getloadavg()[0]:.2f}")
