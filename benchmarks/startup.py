"""What a person waits for: from a command to its answer, a new process each time.

Seconds of the clock and of the processor, so that a loaded machine shows: the second figure is what an idle one
would have waited for, or less where a command has threads.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TURNS = 3
_SCRIPT = str(Path(sys.executable).with_name("fedpriv"))
_QUICKSTART = (_SCRIPT, "run", "scenarios/quickstart.toml", "--out")
_COMMANDS = {
    "fedpriv --help": (_SCRIPT, "--help"),
    "fedpriv privacy convert --mu 1": (_SCRIPT, "privacy", "convert", "--mu", "1"),
    "import fedpriv": (sys.executable, "-c", "import fedpriv"),
    "import fedpriv.cli.run": (sys.executable, "-c", "import fedpriv.cli.run"),
}
_TARGETS = {"fedpriv --help": "0.4", "fedpriv privacy convert --mu 1": "0.4"}


class _Took(NamedTuple):
    wall: float
    processor: float


def run() -> None:
    """Commands take turns; then the quickstart once, from the command to its table, its data set being there."""
    times: dict[str, list[_Took]] = {name: [] for name in _COMMANDS}
    for _ in range(_TURNS):
        for name, command in _COMMANDS.items():
            times[name].append(_timed(command))
    print("| command | s | range | processor s | target |")
    print("|---|---|---|---|---|")
    for name, took in times.items():
        walls = sorted(each.wall for each in took)
        processor = statistics.median(each.processor for each in took)
        spread = f"{walls[0]:.2f} - {walls[-1]:.2f}"
        target = _TARGETS.get(name, "")
        print(f"| `{name}` | {statistics.median(walls):.2f} | {spread} | {processor:.2f} | {target} |")
    with tempfile.TemporaryDirectory(prefix="fedpriv-startup-") as folder:
        once = _timed((*_QUICKSTART, str(Path(folder) / "quickstart")))
    print(f"| first table of the quickstart, once | {once.wall:.1f} | | {once.processor:.1f} | 20 |")
    print(f"\nmedian and range of {_TURNS}; load at the end {os.getloadavg()[0]:.2f}")


def _timed(command: Sequence[str]) -> _Took:
    """CalledProcessError if it fails: nobody waits for an error."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return _Took(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
