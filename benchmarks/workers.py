"""A sweep on workers: one on one core, two, a cluster of two nodes, and one process with its noise thread.

Contenders take turns; seconds are from the first progress to the last result.  All have to leave the same results.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_TURNS = 3
_ONE_CORE = ("taskset", "--cpu-list", "0")
_CONTENDERS: dict[str, tuple[Sequence[str], str]] = {
    "one process, with its noise thread": ((), "0"),
    "one worker, on one core": (_ONE_CORE, "1"),
    "two workers": ((), "2"),
    "a cluster of two nodes": ((), "cluster"),
}
_SIZES = ((1, 6_000), (100, 300))


def run() -> None:
    for silos, rounds in _SIZES:
        print(f"\nM = {silos}, 4 groups of 3 cells, {rounds:,} rounds; median of {_TURNS} turns")
        print(f"load {os.getloadavg()[0]:.1f}\n")
        took: dict[str, list[dict[str, float]]] = {name: [] for name in _CONTENDERS}
        for _ in range(_TURNS):
            for name, (before, how) in _CONTENDERS.items():
                took[name].append(_measured(before, how, silos, rounds))
        results = {one["results"] for each in took.values() for one in each}
        print("| who | computing (s) | range | two workers are × faster, turn by turn | whole (s) |")
        print("|---|---|---|---|---|")
        for name, each in took.items():
            seconds = sorted(one["computing"] for one in each)
            ratios = [
                one["computing"] / two["computing"] for one, two in zip(each, took["two workers"], strict=True)
            ]
            print(
                f"| {name} | {statistics.median(seconds):.1f} | {seconds[0]:.1f} - {seconds[-1]:.1f} "
                f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
                f"| {statistics.median(one['whole'] for one in each):.1f} |"
            )
        print(f"\n{'the same results' if len(results) == 1 else 'RESULTS DIFFER'}; load {os.getloadavg()[0]:.1f}")


def _measured(before: Sequence[str], how: str, silos: int, rounds: int) -> dict[str, float]:
    """RuntimeError with the last line of what it printed if it fails."""
    command = [*before, sys.executable, "-m", "benchmarks.workers_point", how, str(silos), str(rounds)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{how}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told
