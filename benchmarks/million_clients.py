"""A million clients of 8 records with 100 features each, cohorts of 1,000: memory and rounds per second.

Logistic regression, five local steps of every client drawn, Poisson cohorts of a trusted server.  The data are
3.2 GB of float32, made here; memory is the process's peak, and its peak less the data.
"""

import subprocess
import sys
import time
from typing import Any

import numpy as np

import fedpriv
from benchmarks.clock import rounds_per_second
from benchmarks.memory import peak
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario
from fedpriv.scenario.schema import Cell

_DATA = "benchmark-million"
_RECORDS, _FEATURES, _COHORT, _ROUNDS = 8, 100, 1000, 100
_GB = 1e9
_BLOCK = 2**16


def _cell(clients: int) -> Cell:
    tree: dict[str, Any] = {
        "name": "million",
        "data": {"name": _DATA},
        "model": {"name": "logistic-regression", "feature_norm": 10.0},
        "federation": {"clients": clients, "cohort": _COHORT, "rounds": _ROUNDS, "sampling": "poisson"},
        "algorithm": {
            "name": "dp-fedavg", "trust": "trusted", "local_steps": 5, "local_step": 0.05, "clip": 0.3,
        },
        "privacy": {"unit": "client", "records": _RECORDS, "relation": "zero-out", "epsilon": 2.0, "delta": 1e-8},
        "run": {"evaluations": 1},
    }  # fmt: skip
    return parse_scenario(tree, "benchmarks/million_clients.py").points[0].cell


def _records(count: int, seed: int) -> tuple[Any, Any]:
    """Two classes of overlapping Gaussian clouds, made block by block."""
    draw, direction = np.random.default_rng(seed), np.random.default_rng(0).standard_normal(_FEATURES)
    features = np.empty((count, _FEATURES), np.float32)
    labels = draw.integers(0, 2, count, dtype=np.int64)
    shift = (0.2 * direction).astype(np.float32)
    for start in range(0, count, _BLOCK):
        block = features[start : start + _BLOCK]
        draw.standard_normal(out=block, dtype=np.float32)
        block += (labels[start : start + _BLOCK] * 2 - 1)[:, None] * shift
    return features, labels


def measure(clients: int) -> None:
    """Print one line of the table; in a process of its own, whose peak it is."""
    fedpriv.add_data(_DATA, lambda: (_records(clients * _RECORDS, 1), _records(1000, 2)), classes=2)
    before, cell = peak() / _GB, _cell(clients)
    started = time.perf_counter()
    load_task(cell)
    loading = time.perf_counter() - started
    rate = rounds_per_second("vectorized", cell)
    data = clients * _RECORDS * (_FEATURES * 4 + 8) / _GB
    most = peak() / _GB
    memory = f"{data:.2f} | {before:.2f} | {most:.2f} | {most - data:.2f}"
    print(f"| {clients:,} | {memory} | {loading:.0f} | {rate:.3g} |")


def run() -> None:
    print("| clients | data (GB) | imports | peak | peak less data | loading (s) | rounds per second |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for clients in (10_000, 100_000, 1_000_000):
        command = [sys.executable, "-m", "benchmarks.million_clients", str(clients)]
        print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)
    print("\ntarget: under 4 GB beside the data")


if __name__ == "__main__":
    measure(int(sys.argv[1]))
