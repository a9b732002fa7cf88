"""How time and memory grow: with the number of silos M at d = 7,850, and with d at M = 10.

Each point is a process of its own (benchmarks/growth_point.py).  Writes runs/growth.svg and .png, and prints the
slopes of log-log lines: 1 is linear.  M x d values are drawn as noise in every round, so that the time for one
step of one client should not depend on M, and grow linearly with d.  On a machine that others use the seconds of
the processor say more than those of the clock.

python -m benchmarks.growth docs/benchmarks.md    # draws the points of a table that was printed before
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedpriv.show.charts import Chart, Mark, Panel, Series
from fedpriv.show.looks import nth_look
from fedpriv.show.plots import draw_charts

_ROOT = Path(__file__).resolve().parents[1]
_OUT = _ROOT / "runs"
_SILOS = {"vectorized": (10, 100, 1_000, 10_000, 100_000), "inprocess": (10, 100, 1_000)}
_SOFTMAX = 7_850  # parameters where M grows
_HIDDEN = (1, 1_258, 12_579)  # widths w of a perceptron 784 - w - 10 with d = 795 w + 10
_STEPS = {"vectorized": 12_000, "inprocess": 2_000}
_VALUES = 2 * 10**8  # the most noise, in values, that a point with growing d draws


@dataclass(frozen=True)
class Point:
    """One measurement."""

    silos: int
    dimension: int
    seconds: float
    """For one step of one client."""
    processor: float
    """Seconds of it, for the same."""
    memory: int
    """Bytes at the peak, beyond the loaded data."""
    load: float


def measure(engine: str, silos: int, hidden: int, client_steps: int) -> Point:
    """RuntimeError with the process's last line if it fails."""
    arguments = [engine, *map(str, (silos, hidden, client_steps))]
    command = [sys.executable, "-m", "benchmarks.growth_point", *arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return Point(silos, told["dimension"], told["seconds"], told["processor"], told["bytes"], os.getloadavg()[0])


def sweeps(engine: str) -> tuple[list[Point], list[Point]]:
    """The points with growing M, and those with growing d."""
    steps = _STEPS[engine]
    by_silos = [_shown(engine, measure(engine, silos, 0, steps)) for silos in _SILOS[engine]]
    by_dimension = [
        _shown(engine, measure(engine, 10, hidden, min(3_000, _VALUES // (795 * hidden)))) for hidden in _HIDDEN
    ]
    return by_silos, by_dimension


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def run() -> None:
    print("| engine | M | d | µs per client step | processor µs | ns per value | peak memory (MB) |")
    print("|---|---|---|---|---|---|---|")
    grown = {engine: sweeps(engine) for engine in _STEPS}
    loads = [point.load for of in grown.values() for points in of for point in points]
    print(f"\nload {min(loads):.1f} to {max(loads):.1f}\n")
    print(
        "| engine | time per round ~ M^ | memory ~ M^ | time per client step ~ d^ | memory ~ d^ "
        "| from d = 10⁶ to 10⁷ |"
    )
    print("|---|---|---|---|---|---|")
    for engine, (by_silos, by_dimension) in grown.items():
        silos, dimensions = [p.silos for p in by_silos], [p.dimension for p in by_dimension]
        slopes = (
            slope(silos, [p.processor * p.silos for p in by_silos]),
            slope(silos, [p.memory for p in by_silos]),
            slope(dimensions, [p.processor for p in by_dimension]),
            slope(dimensions, [p.memory for p in by_dimension]),
        )
        before, last = by_dimension[-2:]
        step = f"{last.processor / before.processor:.1f} x time, {last.memory / before.memory:.1f} x memory"
        print(f"| {engine} | {' | '.join(f'{one:.2f}' for one in slopes)} | {step} |")
    print("\ntarget: 1 for time, at most 1 for memory; at most 10 x from d = 10^6 to 10^7 (once 17 and 31 x time)")
    _draw(grown)


def redraw(table: Path) -> None:
    """Draw the points of a file that has the printed table among its lines."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.read_text("utf-8").splitlines()]
    grown: dict[str, tuple[list[Point], list[Point]]] = {engine: ([], []) for engine in _STEPS}
    for engine, *figures in (row for row in rows if row and row[0] in _STEPS and len(row) in (7, 8)):
        silos, dimension, clock, processor, _, memory, *_ = (float(text.replace(",", "")) for text in figures)
        point = Point(int(silos), int(dimension), clock / 1e6, processor / 1e6, int(memory * 1e6), 0.0)
        grown[engine][0 if dimension == _SOFTMAX else 1].append(point)
    _draw(grown)


def _draw(grown: Mapping[str, tuple[list[Point], list[Point]]]) -> None:
    for path in draw_charts(_charts(grown), _OUT, "growth"):
        print(f"\n{path.relative_to(_ROOT)}", end="")
    print()


def _shown(engine: str, point: Point) -> Point:
    print(
        f"| {engine} | {point.silos:,} | {point.dimension:,} | {1e6 * point.seconds:,.1f} "
        f"| {1e6 * point.processor:,.1f} | {1e9 * point.processor / point.dimension:.2f} "
        f"| {point.memory / 1e6:,.0f} |",
        flush=True,
    )
    return point


def _charts(grown: Mapping[str, tuple[list[Point], list[Point]]]) -> list[Chart]:
    """Time and, below it, memory: on the left against M, on the right against d."""
    sizes = (("silos M", "d = 7,850", lambda p: p.silos), ("parameters d", "M = 10", lambda p: p.dimension))
    costs = (
        ("µs for one step of one client", lambda p: 1e6 * p.seconds),
        ("peak memory beyond the data (MB)", lambda p: p.memory / 1e6),
    )
    charts = []
    for (y, cost), (number, (x, fixed, size)) in itertools.product(costs, enumerate(sizes)):
        series = [
            Series(engine, nth_look(place), [Mark(size(point), cost(point)) for point in points[number]])
            for place, (engine, points) in enumerate(grown.items())
        ]
        charts.append(Chart("growth", fixed, x, y, [Panel("", series)], log_x=True, log_y=True))
    return charts


if __name__ == "__main__":
    redraw(Path(sys.argv[1]))
