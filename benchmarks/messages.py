"""Client messages a second: the real ServerApp, strategy and ClientApp in process and on Flower's Ray engine.

The same cell on both: 100 silos, d = 7,850, untrusted server, so that every message carries noise of its own.
"""

import os
from pathlib import Path

from benchmarks.clock import rounds_per_second
from fedpriv.scenario.load import load_scenario

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
_SILOS = 100


def measure(engine: str, rounds: int) -> float:
    overrides = [
        f"federation.silos={_SILOS}",
        "privacy.rho=4.0",
        "seeds=1",
        f"federation.samples={_SILOS * rounds}",
        "run.evaluations=1",
    ]
    scenario = load_scenario(SCENARIOS / "mnist-untrusted.toml", overrides)
    return _SILOS * rounds_per_second(engine, scenario.points[0].cell)


def run() -> None:
    inprocess = measure("inprocess", 100)
    print(f"in process: {inprocess:,.0f} messages/s ({1e6 / inprocess:.0f} us each; target: 8,000 a second)")
    ray = measure("ray", 5)
    print(f"Flower's Ray engine: {ray:,.0f} messages/s ({ray / _SILOS:.2f} rounds/s)")
    print(f"ratio: {inprocess / ray:.1f} (target: 25); load {os.getloadavg()[0]:.2f}")
