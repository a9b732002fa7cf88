"""Run all benchmarks of speed, or those named; deployments come last, since they want an idle machine.

`existing_app` trains some twenty models to compare their accuracy, for half an hour and more; `million_clients`
makes 3.2 GB of data; `crossing` is of accounting: these run if named.

A part that cannot run here says so in one line, and the others are run; the exit code is then 1.  Whatever is
printed is in runs/benchmarks.md too, with the tables as docs/benchmarks.md has them, and the seconds of every part
at its end.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from subprocess import CalledProcessError
from typing import TextIO

import torch

from benchmarks import (
    clients,
    deployment,
    exact_noise,
    exact_rounds,
    existing_app,
    growth,
    large_table,
    messages,
    million_clients,
    momentum_crossing,
    networks,
    noise,
    objectives,
    peers,
    startup,
    tables,
    workers,
)
from fedpriv.core.errors import FedprivError
from fedpriv.core.files import write_text

BENCHMARKS: dict[str, Callable[[], None]] = {
    "startup": startup.run,
    "noise": noise.run,
    "exact_noise": exact_noise.run,
    "exact_rounds": exact_rounds.run,
    "tables": tables.run,
    "large_table": large_table.run,
    "messages": messages.run,
    "objectives": objectives.run,
    "networks": networks.run,
    "crossing": momentum_crossing.run,
    "peers": peers.run,
    "clients": clients.run,
    "million_clients": million_clients.run,
    "existing_app": existing_app.run,
    "growth": growth.run,
    "workers": workers.run,
    "deployment": partial(deployment.run, ("3", "20")),
}

_IF_NAMED = {"existing_app", "million_clients", "crossing"}
_OUT = Path(__file__).resolve().parents[1] / "runs" / "benchmarks.md"
_MOST = 15 * 60  # seconds


class _Written(StringIO):
    """What is printed, on the terminal as well."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self._terminal = terminal

    def write(self, text: str) -> int:
        self._terminal.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._terminal.flush()


def main() -> None:
    chosen = sys.argv[1:] or [name for name in BENCHMARKS if name not in _IF_NAMED]
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"benchmarks: unknown {', '.join(unknown)}; known are {', '.join(BENCHMARKS)}")
    with redirect_stdout(_Written(sys.stdout)) as written:
        try:
            failed = _all(chosen)
        finally:
            write_text(_OUT, written.getvalue())
    print(f"\n{_OUT} has the same")
    if failed:
        sys.exit(f"benchmarks: not run to their end: {', '.join(failed)}")


def _all(names: Sequence[str]) -> list[str]:
    """Run the benchmarks, print the seconds that each took, and return those that did not come to their end."""
    machine, load = platform.processor() or platform.machine(), os.getloadavg()[0]
    print(f"{machine}, {os.cpu_count()} cores, load {load:.2f}, torch {torch.__version__}")
    failed, seconds = list[str](), dict[str, float]()
    for name in names:
        started = time.perf_counter()
        if not _ran(name):
            failed.append(name)
        seconds[name] = time.perf_counter() - started
    print("\n## Seconds\n\n| part | s |\n|---|---|")
    for name, took in seconds.items():
        print(f"| `{name}` | {took:.0f} |")
    print(f"| all | {sum(seconds.values()):.0f} (target: {_MOST}) |")
    return failed


def _ran(name: str) -> bool:
    """Whether the benchmark came to its end."""
    print(f"\n## {name}\n", flush=True)
    try:
        BENCHMARKS[name]()
    except (FedprivError, RuntimeError, OSError, CalledProcessError) as error:
        print(f"{name} cannot run here: {(str(error).strip().splitlines() or [type(error).__name__])[0]}")
        return False
    print(f"\nload at its end {os.getloadavg()[0]:.1f}", flush=True)
    return True


if __name__ == "__main__":
    main()
