"""Where the time of a message, of a round at M = 1, and of a round with integers goes: sampling profiles.

A timer interrupts the main thread every millisecond, and the part whose code was innermost there gets the sample.
A call of torch counts for the part that made it.  Python answers the timer when such a call is over, so a call is
never interrupted, and one that lasts longer than the interval gets one sample for all of it.

python -m benchmarks.breakdown                # all of them
python -m benchmarks.breakdown message        # one
"""

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from benchmarks.clock import timed
from benchmarks.growth_point import cell_of
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell

_ROOT = Path(__file__).resolve().parents[1]
_INTERVAL = 1e-3

_PARTS: Mapping[str, str] = {
    "flwr/": "Flower's ClientApp and messages",
    "fedpriv/loss/scores.py": "evaluations",
    "fedpriv/loss/linear.py": "scores, softmax, residuals",
    "fedpriv/loss/clipping.py": "norms, bounds and factors of the clip",
    "fedpriv/loss/": "product of residuals and features, running sum",
    "fedpriv/core/random.py": "noise: draws",
    "fedpriv/noise/integers/increments.py": "integers of increments",
    "fedpriv/noise/integers/": "noise: discrete Gaussians",
    "fedpriv/noise/": "noise: scaled, added",
    "fedpriv/rounds/round.py": "noise: scaled, added",
    "fedpriv/silo/": "silo: reads of a round, checks, state",
    "fedpriv/protocol/": "release and query as messages",
    "fedpriv/papers/": "server: step, projection, average",
    "server/": "server: mean, next query, journal",
    "clients/": "Flower's ClientApp and messages",
    "fedpriv/engines/": "engine: loop, records of a round",
}
"""Files, or folders, by the part of a round that they compute; the first that fits counts."""


def part_of(frame: FrameType | None) -> str:
    """The part whose code is innermost in a stack: of an evaluation it is the evaluation."""
    found = "the rest"
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name in ("_evaluate", "measured"):
            return "evaluations"
        if found == "the rest":
            found = next((part for place, part in _PARTS.items() if f"/{place}" in file), found)
        frame = frame.f_back
    return found


@contextmanager
def sampled() -> Iterator[Counter[str]]:
    """Samples of the main thread by part, while the block runs."""
    seen = Counter[str]()

    def look(_number: int, frame: FrameType | None) -> None:
        seen[part_of(frame)] += 1

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _INTERVAL, _INTERVAL)
    try:
        yield seen
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _told(title: str, count: int, engine: str, cell: Cell) -> None:
    """Run a cell for a table of microseconds per message or round, of which there are `count`."""
    load_task(cell)  # loading the data is no part of a round
    started = time.perf_counter()
    with sampled() as seen:
        timed(engine, cell)
    each = 1e6 * (time.perf_counter() - started) / count
    total = sum(seen.values())
    print(f"\n{title}: {each:,.0f} µs, {total:,} samples\n\n| part | % | µs |\n|---|---|---|")
    for part, samples in seen.most_common():
        print(f"| {part} | {100 * samples / total:.0f} | {each * samples / total:,.0f} |")


def _mnist(*changes: str) -> Cell:
    given = ["privacy.rho=4.0", "seeds=1", *changes]
    return load_scenario(_ROOT / "scenarios" / "mnist-untrusted.toml", given).points[0].cell


def message() -> None:
    cell = _mnist("federation.silos=100", "federation.samples=20000", "run.evaluations=1")
    _told("A message in process (100 silos, d = 7,850)", 20_000, "inprocess", cell)


def one_silo() -> None:
    cell = _mnist("federation.silos=1", 'algorithm.trust="trusted"')
    _told("A round of the vectorized engine (M = 1, trusted)", cell.federation.total_rounds, "vectorized", cell)


def integers() -> None:
    for hidden, rounds in ((0, 600), (1_258, 40)):
        cell = cell_of(1, hidden, rounds, "integers")
        dimension = load_task(cell).objective.dimension
        timed("inprocess", cell_of(1, hidden, 3, "integers"))  # compiles, where there is something to compile
        _told(f"A round with integers in process (d = {dimension:,})", rounds, "inprocess", cell)


_ALL: Mapping[str, Callable[[], None]] = {"message": message, "one-silo": one_silo, "integers": integers}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or _ALL:
        _ALL[name]()
