"""Run by benchmarks/growth.py, one process per point, so that a peak of memory is one point's alone.

    python -m benchmarks.growth_point ENGINE SILOS HIDDEN CLIENT_STEPS

Prints {"dimension", "seconds", "processor", "bytes", "said"}: d, seconds of the clock and of the processor for one
step of one client with local noise, the peak of the memory that the run takes beyond the loaded data, and what
`fedpriv run --dry-run` says of it.
"""

import json
import sys
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

import fedpriv
from benchmarks.clock import timed
from benchmarks.memory import forget_peak, peak
from fedpriv.engines.table import estimate_memory
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario
from fedpriv.scenario.schema import Cell

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 6000
_SYNTHETIC, _MNIST = 6_000, 60_000
"""Training records of fedpriv's own data sets."""
_MANY = "benchmark-growth"
"""Name of random records where MNIST has too few."""


def cell(silos: int, hidden: int, client_steps: int) -> Cell:
    """`cell_from_run_config` so many rounds that silos take `client_steps` steps together, within limits."""
    return cell_of(silos, hidden, min(_MOST_ROUNDS, max(_LEAST_ROUNDS, client_steps // silos)))


def cell_of(silos: int, hidden: int, rounds: int, arithmetic: str = "float") -> Cell:
    """DP-SGD with one record per round; softmax regression where `hidden` is 0, else a layer of that width."""
    tree: dict[str, Any] = {
        "name": "growth",
        "data": {"name": _name_data(silos * rounds)},
        "model": {"name": "mlp", "hidden": hidden} if hidden else {},
        "federation": {"silos": silos, "rounds": rounds},
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        "privacy": {"relation": "zero-out", "mu": 4.0},
        "run": {"evaluations": 1, "arithmetic": arithmetic},
    }
    return parse_scenario(tree, "benchmarks/growth_point.py").points[0].cell


def _name_data(records: int) -> str:
    """Name the smallest data set with so many records, and add random ones like MNIST's if it has too few."""
    if records <= _MNIST:
        return "synthetic" if records <= _SYNTHETIC else "mnist"

    def draw(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        generator = np.random.default_rng(count)
        return generator.integers(0, 256, (count, 28, 28), np.uint8), generator.integers(0, 10, count)

    fedpriv.add_data(_MANY, lambda: (draw(records), draw(1_000)), classes=10)
    return _MANY


def main() -> None:
    engine, (silos, hidden, client_steps) = sys.argv[1], map(int, sys.argv[2:])
    one = cell(silos, hidden, client_steps)
    dimension = load_task(one).objective.dimension
    need = estimate_memory([one], engine)
    assert need is not None
    forget_peak()
    before = psutil.Process().memory_info().rss
    clock = timed(engine, one)
    taken = max(peak() - before, 1)
    seconds, processor = 1.0 / (clock.rounds_per_second * silos), clock.processor_per_round / silos
    told = {"dimension": dimension, "seconds": seconds, "processor": processor, "bytes": taken}
    told["said"] = sum(need.parts.values())
    print(json.dumps(told))


if __name__ == "__main__":
    main()
