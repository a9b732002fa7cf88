"""A sweep on workers: one on one core, two, a cluster of two nodes, and one process with its noise thread.

Contenders take turns; seconds are from the first progress to the last result.  All have to leave the same results.
The cluster is two nodes, each a few processes of this machine; it has one turn, which shows that it works.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_TURNS = 1
_SILOS, _ROUNDS = 100, 80
_ONE_CORE = ("taskset", "--cpu-list", "0")
_CONTENDERS: dict[str, tuple[Sequence[str], str]] = {
    "one process, with its noise thread": ((), "0"),
    "one worker, on one core": (_ONE_CORE, "1"),
    "two workers": ((), "2"),
}
_CLUSTER = "a cluster of two nodes"
_TARGETS = {"one process, with its noise thread": "1.2", "one worker, on one core": "1.7"}


def run() -> None:
    print(f"M = {_SILOS}, 4 groups of 3 cells, {_ROUNDS} rounds; turns: {_TURNS}; {_load()}", flush=True)
    print()
    took: dict[str, list[dict[str, float]]] = {name: [] for name in _CONTENDERS}
    for turn in range(_TURNS):
        for name, (before, how) in _CONTENDERS.items():
            took[name].append(_measured(before, how))
            print(f"turn {turn + 1}, {name}: {took[name][-1]['whole']:.0f} s", file=sys.stderr)
    took[_CLUSTER] = [_measured((), "cluster")]
    _print_table(took)
    alike = len({one["results"] for each in took.values() for one in each}) == 1
    print(f"\n{'the same results' if alike else 'RESULTS DIFFER'}; {_load()}")


def _print_table(took: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    print("| who | computing (s) | range | two workers are × faster, turn by turn | target | whole (s) |")
    print("|---|---|---|---|---|---|")
    for name, each in took.items():
        seconds = sorted(one["computing"] for one in each)
        ratios = [one["computing"] / two["computing"] for one, two in zip(each, took["two workers"], strict=False)]
        faster = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        print(
            f"| {name} | {statistics.median(seconds):.1f} | {seconds[0]:.1f} - {seconds[-1]:.1f} "
            f"| {faster} | {_TARGETS.get(name, '')} | {statistics.median(one['whole'] for one in each):.1f} |"
        )


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def _measured(before: Sequence[str], how: str) -> dict[str, float]:
    """RuntimeError with the last line of what it printed if it fails."""
    command = [*before, sys.executable, "-m", "benchmarks.workers_point", how, str(_SILOS), str(_ROUNDS)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{how}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told
