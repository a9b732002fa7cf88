"""Run by tests/engines/test_memory.py, one process a scenario, so that a peak of memory is its own."""

from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.memory import forget_peak, peak
from fedpriv.engines.table import estimate_memory
from fedpriv.scenario.load import parse_scenario
from fedpriv.study.sweep import RunOptions, run_sweep


def run_and_measure(engine: str, tree: dict[str, Any], out: Path) -> dict[str, Any]:
    """Bytes that a run of the scenario is said to add, with their parts, and those that it added at most."""
    torch.set_num_threads(1)
    scenario = parse_scenario(tree, "tests/engines/peak.py")
    need = estimate_memory([point.cell for point in scenario.points], engine)
    assert need is not None
    forget_peak()
    before = psutil.Process().memory_info().rss
    run_sweep(scenario, RunOptions(engine=engine, out=out))
    return {"said": sum(need.parts.values()), "bytes": max(1, peak() - before), "parts": need.parts}
