"""Two commits, pairwise: is one slower than the other, on a machine that others use too?

    python -m benchmarks.compare BASE [HEAD] [--pairs N] [--points NAME ...]

Each pair is one measurement of each commit, one right after the other, in turns first; a ratio is of one pair, so
that what slows the machine for longer than a pair cancels.  Printed are the geometric mean of HEAD / BASE and a
95 % interval for it, Student's for the logarithms: below 1, HEAD is faster.  Fewer than three pairs have none.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.compare_point import POINTS

_ROOT = Path(__file__).resolve().parents[1]
_POINT = Path(__file__).with_name("compare_point.py")
_CONFIDENCE = 0.95


def interval(ratios: Sequence[float], confidence: float = _CONFIDENCE) -> tuple[float, float, float]:
    """(low, geometric mean, high) of positive ratios; (0, mean, inf) from fewer than three."""
    logs = np.log(np.asarray(ratios, np.float64))
    mean = float(logs.mean())
    if len(logs) < 3:
        return 0.0, float(np.exp(mean)), float("inf")
    half = float(stats.t.ppf(0.5 + confidence / 2, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
    return float(np.exp(mean - half)), float(np.exp(mean)), float(np.exp(mean + half))


def verdict(low: float, high: float) -> str:
    """What the interval allows to be said."""
    return "faster" if high < 1.0 else "slower" if low > 1.0 else "no difference shown"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("base", help="a commit")
    parser.add_argument("head", nargs="?", default="HEAD", help="another; HEAD by default")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--points", nargs="*", default=list(POINTS), choices=list(POINTS), metavar="NAME")
    asked = parser.parse_args(words)
    with _tree(asked.base) as base, _tree(asked.head) as head:
        print(f"{asked.head} / {asked.base}, {asked.pairs} pairs, load {os.getloadavg()[0]:.1f}\n")
        print("| point | s, base | clock: ratio | 95 % | | processor: ratio | 95 % | |")
        print("|---|---|---|---|---|---|---|---|")
        for point in asked.points:
            print(_row(point, _pairs(point, base, head, asked.pairs)), flush=True)
        print(f"\nload at the end {os.getloadavg()[0]:.1f}")


def _pairs(point: str, base: Path, head: Path, count: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """(base, head) for each pair; one measurement of each beforehand, which fills caches, is thrown away."""
    for tree in (base, head):
        _measured(point, tree)
    pairs = []
    for number in range(count):
        order = (base, head) if number % 2 == 0 else (head, base)
        took = {tree: _measured(point, tree) for tree in order}
        pairs.append((took[base], took[head]))
    return pairs


def _row(point: str, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> str:
    entries = [point, f"{np.median([base['wall'] for base, _ in pairs]):.3g}"]
    for clock in ("wall", "processor"):
        low, mean, high = interval([head[clock] / base[clock] for base, head in pairs])
        entries += [f"{mean:.3f}", f"{low:.3f} - {high:.3f}", verdict(low, high)]
    return f"| {' | '.join(entries)} |"


def _measured(point: str, tree: Path) -> dict[str, float]:
    """RuntimeError with the last line of what it printed if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, str(_POINT), point],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{point} with {tree.name}: {last}")
    took: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return took


@contextmanager
def _tree(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix=f"compare-{commit.replace('/', '-')}-") as name:
        archive = subprocess.run(["git", "-C", str(_ROOT), "archive", commit], check=False, capture_output=True)
        if archive.returncode:
            sys.exit(f"benchmarks.compare: {archive.stderr.decode().strip().splitlines()[-1]}")
        subprocess.run(["tar", "x", "-C", name], input=archive.stdout, check=True)
        yield Path(name)


if __name__ == "__main__":
    main(sys.argv[1:])
