"""Memory of a run in process of one silo with a long model, in vectors of d float32 values: its peak, and where.

DP-SGD with noise of the silo, three rounds, one record each, a perceptron 784 - w - 10 with d = 795 w + 10.  The
peak is of the whole process, its start included, less that of another process with w = 1: program, libraries and
data.  It is taken twice: as a run has it, where freed memory is kept for the next round (up to 128 MiB a piece),
and with a malloc that gives it back at once, so that memory is what is held.

    python -m benchmarks.long_vectors                  # w = 12,579: d is 10^7
    python -m benchmarks.long_vectors 125786           # d is 10^8; 4 GB
    python -m benchmarks.long_vectors 12579 --lines    # after which lines of fedpriv memory is another

`--lines` is of what is held; vectors that come and go within one line are not seen.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch

from benchmarks.growth_point import cell_of
from benchmarks.memory import peak
from fedpriv.claims.outcome import RunObserver
from fedpriv.engines.table import make_engine

_ROOT = Path(__file__).resolve().parents[1]
_ROUNDS = 3
_LEAST = 0.3  # of a vector: what is told as another memory
_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}


def dimension(hidden: int) -> int:
    """d of a perceptron of this width."""
    return 795 * hidden + 10


def vectors_at_peak(hidden: int, *, held: bool) -> float:
    """Of two processes: vectors of d float32 values by which the one with this width is larger at its peak.

    Those that are `held`, or with freed memory that is kept.
    """
    environment = _AT_ONCE if held else {}
    small, large = (_told(str(width), "--once", **environment)[0]["bytes"] for width in (1, hidden))
    return float(large - small) / (4 * dimension(hidden))


def _told(*words: str, **environment: str) -> list[Any]:
    """What a process of its own prints, lines of JSON; CalledProcessError if it fails."""
    command = [sys.executable, "-m", "benchmarks.long_vectors", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _run(hidden: int) -> None:
    torch.set_num_threads(1)
    for _ in make_engine("inprocess")([cell_of(1, hidden, _ROUNDS)], RunObserver()):
        pass


def _print_lines(hidden: int) -> None:
    """Run, and print [vectors, line] wherever the process's memory has changed since the last one."""
    _run(1)  # loads what there is to load
    before, seen = psutil.Process().memory_info().rss, [0.0]

    def in_line(frame: FrameType, event: str, _: Any) -> Any:
        vectors = (psutil.Process().memory_info().rss - before) / (4 * dimension(hidden))
        if abs(vectors - seen[0]) > _LEAST:
            seen[0] = vectors
            file = Path(frame.f_code.co_filename).relative_to(_ROOT)
            print(json.dumps([round(vectors, 1), f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"]))
        return in_line

    def called(frame: FrameType, event: str, _: Any) -> Any:
        ours = frame.f_code.co_filename.startswith(str(_ROOT)) and ".venv" not in frame.f_code.co_filename
        return in_line if ours else None

    sys.settrace(called)
    try:
        _run(hidden)
    finally:
        sys.settrace(None)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_vectors", description=__doc__)
    parser.add_argument("hidden", nargs="?", type=int, default=12_579)
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.once and asked.lines:
        _print_lines(asked.hidden)
    elif asked.once:
        _run(asked.hidden)
        print(json.dumps({"bytes": peak()}))
    elif asked.lines:
        for vectors, line in _told(str(asked.hidden), "--lines", "--once", **_AT_ONCE):
            print(f"{vectors:6.1f}  {line}")
    else:
        held, kept = (vectors_at_peak(asked.hidden, held=held) for held in (True, False))
        print(f"d = {dimension(asked.hidden):,}: {held:.2f} vectors held at the peak, {kept:.2f} with those kept")


if __name__ == "__main__":
    main(sys.argv[1:])
