"""Run by tests/engines/test_memory.py, one process a scenario, so that a peak of memory is its own.

    python -m tests.engines.peak ENGINE TREE

Prints {"said", "bytes", "parts"}: what a run of the scenario TREE (JSON) is said to add, and what it
added at most.
"""

import json
import sys
from pathlib import Path

import psutil

from benchmarks.memory import forget_peak, peak
from fedpriv.engines.table import estimate_memory
from fedpriv.scenario.load import parse_scenario
from fedpriv.study.sweep import RunOptions, run_sweep


def main() -> None:
    engine, tree = sys.argv[1], json.loads(sys.argv[2])
    scenario = parse_scenario(tree, "tests/engines/peak.py")
    need = estimate_memory([point.cell for point in scenario.points], engine)
    assert need is not None
    forget_peak()
    before = psutil.Process().memory_info().rss
    run_sweep(scenario, RunOptions(engine=engine, out=Path("run")))
    print(json.dumps({"said": sum(need.parts.values()), "bytes": max(1, peak() - before), "parts": need.parts}))


if __name__ == "__main__":
    main()
