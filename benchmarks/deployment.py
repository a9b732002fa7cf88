"""Seconds per round of real deployments on this machine, for one that does nothing else.

    python -m benchmarks.deployment [3 | 20 | 600 ...]      all three if none is named; 600 takes minutes

3 and 20 are `scenarios/deployment.toml` with so many silos; 600 is DP-μ²-FL with T = 600, three silos and 20
images of each per round.  Rounds are timed from the first progress to the last; `whole` is from the silos' start
to the result.  Processor seconds are of all processes that were started.  Root has to set FEDPRIV_ALLOW_ROOT=1.
"""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.clock import Clock
from fedpriv.engines.table import engine_named
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell

_SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
_CASES: dict[str, tuple[str, list[str]]] = {
    "3": ("deployment", []),
    "20": ("deployment", ["federation.silos=20"]),
    "600": (
        "mnist-untrusted",
        ["federation.silos=3", "federation.rounds=600", "federation.samples=36000", "privacy.rho=4.0", "seeds=1"],
    ),
}
_TARGETS = {"3": "1", "20": "8", "600": "900 s in all"}
"""Seconds per round on two cores."""


def cell_of(case: str) -> Cell:
    name, overrides = _CASES[case]
    (point,) = load_scenario(_SCENARIOS / f"{name}.toml", overrides).points
    return point.cell


def run(cases: tuple[str, ...] = tuple(_CASES)) -> None:
    print("| silos | rounds | s per round | target | whole (s) | processor s per round | load before | after |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for case in cases:
        cell, clock, load = cell_of(case), Clock(), os.getloadavg()[0]
        task_of_cell(cell)  # loading the data is not the engine's time
        before, started = _processor(), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            for _ in engine_named("deployment", Path(folder))([cell], clock):
                pass
        whole, rounds = time.perf_counter() - started, cell.schedule.rounds
        print(
            f"| {cell.federation.silos} | {rounds} | {1.0 / clock.rounds_per_second:.2f} | {_TARGETS[case]} "
            f"| {whole:.0f} | {(_processor() - before) / rounds:.2f} | {load:.1f} | {os.getloadavg()[0]:.1f} |",
            flush=True,
        )


def _processor() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


if __name__ == "__main__":
    asked = tuple(sys.argv[1:]) or tuple(_CASES)
    if unknown := set(asked) - set(_CASES):
        sys.exit(f"benchmarks.deployment: unknown {', '.join(sorted(unknown))}; known are {', '.join(_CASES)}")
    run(asked)
