"""Whole rounds in process with integers, as guards compute, beside floats: processor seconds and memory.

One silo with its own noise, DP-SGD with one record per round, one thread.  The two take turns, each a process of
its own, and each turn is the difference of a run of 2 T rounds and one of T: a silo in floating point draws noise
for several rounds ahead, and T rounds have all draws of T rounds and no start.  Memory is the peak beyond the
loaded data, of the longer run, in vectors of d float32 values as well.

python -m benchmarks.exact_rounds                            # all sizes
python -m benchmarks.exact_rounds integers 12579 6           # one turn: arithmetic, width of the layer, T
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from benchmarks.clock import timed
from benchmarks.growth_point import cell_of
from benchmarks.memory import forget_peak, peak
from fedpriv.noise.integers.fixed_point import attempt_values, compile_function
from fedpriv.plan.task import load_task

_ROOT = Path(__file__).resolve().parents[1]
_SIZES = ((0, 240), (1_258, 6), (12_579, 4))
"""Width of a perceptron's layer, 0 for softmax regression; T, a multiple of the rounds drawn ahead."""
_TURNS = 3


def turn(arithmetic: str, hidden: int, rounds: int) -> dict[str, float]:
    """d, nanoseconds of the processor per value and round, and bytes at the peak."""
    torch.set_num_threads(1)
    first, short, long = (cell_of(1, hidden, count, arithmetic) for count in (3, rounds, 2 * rounds))
    timed("inprocess", first)  # compiles, where there is something to compile
    dimension = load_task(long).objective.dimension
    before = timed("inprocess", short).processor_per_round * (rounds - 1)
    forget_peak()
    resident = psutil.Process().memory_info().rss
    after = timed("inprocess", long).processor_per_round * (2 * rounds - 1)
    return {
        "dimension": dimension,
        "nanoseconds": 1e9 * (after - before) / (rounds * dimension),
        "bytes": max(peak() - resident, 0),
    }


def _measured(arithmetic: str, hidden: int, rounds: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.exact_rounds", arithmetic, str(hidden), str(rounds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run() -> None:
    how = "compiled loops" if compile_function(attempt_values) else "numba is not installed"
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {how}")
    print("| d | float, ns per value | integers | x, turn by turn | float, MB (vectors) | integers |")
    print("|---|---|---|---|---|---|")
    for hidden, rounds in _SIZES:
        turns = [[_measured(name, hidden, rounds) for name in ("float", "integers")] for _ in range(_TURNS)]
        size = turns[0][0]["dimension"]
        times = [[each[place]["nanoseconds"] for each in turns] for place in (0, 1)]
        ratios = sorted(whole / real for real, whole in zip(*times, strict=True))
        told = [
            f"{each['bytes'] / 1e6:,.0f} ({each['bytes'] / (4 * size):.1f})"
            for each in min(turns, key=lambda pair: pair[0]["bytes"])
        ]
        print(
            f"| {size:,.0f} | {min(times[0]):.1f} | {min(times[1]):.1f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f}) | {' | '.join(told)} |",
            flush=True,
        )
    print("\ntarget: 1.3 x, seconds and memory")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(turn(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        run()
