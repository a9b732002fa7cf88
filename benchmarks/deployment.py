"""Seconds per round of real deployments on this machine, for one that does nothing else.

    python -m benchmarks.deployment [3 | 10 | 20 | 600 ...]      all if none is named; 600 takes minutes

3, 10 and 20 are `scenarios/deployment.toml` with so many silos; 600 is DP-μ²-FL with T = 600, three silos and 20
images of each per round.  Rounds are timed from the first progress to the last; `whole` is from the silos' start
to the result.  Processor seconds are of all processes that were started.  Root has to set FEDPRIV_ALLOW_ROOT=1.

A second table has the most memory (PSS, of each guard and of each SuperNode with its supervisor the mean) that was
seen while the run went on, and the largest ledger.  A third has the processor seconds of a round by who uses them,
from the fifth round on, so that start and first plans are not in it.
"""

import math
import os
import resource
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from benchmarks.clock import Clock
from fedpriv.engines.table import make_engine
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.silo.policy import read_policy

_SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
_CASES: dict[str, tuple[str, list[str]]] = {
    "3": ("deployment", []),
    "10": ("deployment", ["federation.silos=10"]),
    "20": ("deployment", ["federation.silos=20"]),
    "600": (
        "mnist-untrusted",
        ["federation.silos=3", "federation.rounds=600", "federation.samples=36000", "privacy.rho=4.0", "seeds=1"],
    ),
}
_TARGETS = {"3": "0.6", "10": "", "20": "2.5", "600": "900 s in all"}
"""Seconds per round on two cores."""


class Looks:
    """What is seen of the processes and ledgers of a run, every two seconds: the most of each."""

    def __init__(self, silos: int) -> None:
        self.silos, self.most, self.ledger = silos, dict[str, float](), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(2.0):
            now = dict[str, float]()
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError):
                    role = _role_of(process)
                    now[role] = now.get(role, 0.0) + process.memory_full_info().pss / 1e6
                    if role == "guard":
                        self._see_ledger(Path(process.cmdline()[-1]))
            for role, size in now.items():
                each = size / self.silos if role in ("guard", "SuperNode") else size
                self.most[role] = max(self.most.get(role, 0.0), each)

    def _see_ledger(self, policy: Path) -> None:
        ledger = read_policy(policy).ledger
        self.ledger = max(self.ledger, ledger.stat().st_size)


class Uses(Clock):
    """A clock that also notes, at the fifth round and at each later report, who has used the processors."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0
        self._from: tuple[int, dict[str, float]] | None = None
        self._until = (0, dict[str, float]())

    def advanced(self, rounds: int) -> None:
        super().advanced(rounds)
        self.rounds += rounds
        if rounds and self.rounds >= _WARM:
            self._until = (self.rounds, _uses())
            self._from = self._from or self._until

    def per_round(self) -> dict[str, float]:
        """Processor seconds by role; of the server nothing that it did after its last report."""
        if self._from is None or self._until[0] == self._from[0]:
            return {}
        (first, before), (last, after) = self._from, self._until
        return {role: (used - before.get(role, 0.0)) / (last - first) for role, used in after.items()}


_WARM = 5
"""Rounds after which everybody has made their plans."""


def _uses() -> dict[str, float]:
    """Processor seconds until now of the processes of this one, by role."""
    used = dict[str, float]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            role, times = _role_of(process), process.cpu_times()
            used[role] = used.get(role, 0.0) + sum(
                (times.user, times.system, times.children_user, times.children_system)
            )
    return used


def _role_of(process: psutil.Process) -> str:
    """The role of the service that it belongs to: its own command, or that of the process that started it."""
    for each in (process, *process.parents()):
        words = " ".join(each.cmdline())
        if "flwr-serverapp" in words:
            return "server"
        for part in ("silo run", "fedpriv supernode", "fedpriv superlink"):
            if part in words:
                return {"silo run": "guard", "fedpriv supernode": "SuperNode"}.get(part, "SuperLink")
    return "other"


def cell_of(case: str) -> Cell:
    name, overrides = _CASES[case]
    (point,) = load_scenario(_SCENARIOS / f"{name}.toml", overrides).points
    return point.cell


def run(cases: tuple[str, ...] = tuple(_CASES)) -> None:
    print("| silos | rounds | s per round | target | whole (s) | processor s per round | load before | after |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    seen = list[tuple[int, Looks, Uses]]()
    for case in cases:
        cell, clock, load = cell_of(case), Uses(), os.getloadavg()[0]
        load_task(cell)  # loading the data is not the engine's time
        before, started = _processor(), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, Looks(cell.federation.silos) as looks:
            for _ in make_engine("deployment", Path(folder))([cell], clock):
                pass
        whole, rounds = time.perf_counter() - started, cell.schedule.rounds
        print(
            f"| {cell.federation.silos} | {rounds} | {1.0 / clock.rounds_per_second:.2f} | {_TARGETS[case]} "
            f"| {whole:.0f} | {(_processor() - before) / rounds:.2f} | {load:.1f} | {os.getloadavg()[0]:.1f} |",
            flush=True,
        )
        seen.append((rounds, looks, clock))
    print("\n| silos | rounds | MB a guard | MB a SuperNode | MB SuperLink | MB server | MB a ledger |")
    print("|---|---|---|---|---|---|---|")
    for rounds, looks, _ in seen:
        most = " | ".join(
            f"{looks.most.get(role, math.nan):.0f}" for role in ("guard", "SuperNode", "SuperLink", "server")
        )
        print(f"| {looks.silos} | {rounds} | {most} | {looks.ledger / 1e6:.2f} |", flush=True)
    roles = ("guard", "SuperLink", "SuperNode", "server")
    print(f"\n| silos | rounds | all | {' | '.join(roles)} |\n|{'---|' * (3 + len(roles))}")
    for rounds, looks, uses in seen:
        by_role = uses.per_round()
        each = " | ".join(f"{by_role.get(role, math.nan):.3f}" for role in roles)
        print(f"| {looks.silos} | {rounds} | {sum(by_role.values()):.3f} | {each} |", flush=True)


def _processor() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


if __name__ == "__main__":
    asked = tuple(sys.argv[1:]) or tuple(_CASES)
    if unknown := set(asked) - set(_CASES):
        sys.exit(f"benchmarks.deployment: unknown {', '.join(sorted(unknown))}; known are {', '.join(_CASES)}")
    run(asked)
