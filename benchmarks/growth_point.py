"""Run by benchmarks/growth.py, one process per point, so that a peak of memory is one point's alone.

    python -m benchmarks.growth_point ENGINE SILOS HIDDEN CLIENT_STEPS

Prints {"dimension", "seconds", "processor", "bytes", "said"}: d, seconds of the clock and of the processor for one
step of one client with local noise, the peak of the memory that the run takes beyond the loaded data, and what
`fedpriv run --dry-run` says of it.
"""

import json
import sys
from typing import Any

import psutil

from benchmarks.clock import timed
from benchmarks.memory import forget_peak, peak
from fedpriv.engines.table import estimate_memory
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario
from fedpriv.scenario.schema import Cell

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 6000


def cell(silos: int, hidden: int, client_steps: int) -> Cell:
    """`cell_from_run_config` so many rounds that silos take `client_steps` steps together, within limits."""
    return cell_of(silos, hidden, min(_MOST_ROUNDS, max(_LEAST_ROUNDS, client_steps // silos)))


def cell_of(silos: int, hidden: int, rounds: int, arithmetic: str = "float") -> Cell:
    """DP-SGD with one record per round; softmax regression where `hidden` is 0, else a layer of that width."""
    tree: dict[str, Any] = {
        "name": "growth",
        "data": {"name": "mnist" if silos * rounds > 6000 else "synthetic"},
        "model": {"name": "mlp", "hidden": hidden} if hidden else {},
        "federation": {"silos": silos, "rounds": rounds},
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        "privacy": {"relation": "zero-out", "mu": 4.0},
        "run": {"evaluations": 1, "arithmetic": arithmetic},
    }
    return parse_scenario(tree, "benchmarks/growth_point.py").points[0].cell


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
