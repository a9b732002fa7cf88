"""Run all benchmarks of speed, or those named; deployments come last, since they want an idle machine.

`existing_app` trains some twenty models to compare their accuracy, for half an hour and more: it runs if named.

A part that cannot run here says so in one line, and the others are run; the exit code is then 1.
"""

import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from subprocess import CalledProcessError

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

_IF_NAMED = {"existing_app"}


def main() -> None:
    chosen = sys.argv[1:] or [name for name in BENCHMARKS if name not in _IF_NAMED]
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"benchmarks: unknown {', '.join(unknown)}; known are {', '.join(BENCHMARKS)}")
    machine, load = platform.processor() or platform.machine(), os.getloadavg()[0]
    print(f"{machine}, {os.cpu_count()} cores, load {load:.2f}, torch {torch.__version__}")
    failed = [name for name in chosen if not _ran(name)]
    if failed:
        sys.exit(f"benchmarks: not run to their end: {', '.join(failed)}")


def _ran(name: str) -> bool:
    """Whether the benchmark came to its end."""
    print(f"\n## {name}\n", flush=True)
    started = time.perf_counter()
    try:
        BENCHMARKS[name]()
    except (FedprivError, RuntimeError, OSError, CalledProcessError) as error:
        print(f"{name} cannot run here: {(str(error).strip().splitlines() or [type(error).__name__])[0]}")
        return False
    print(f"\n{time.perf_counter() - started:.0f} s; load {os.getloadavg()[0]:.1f}", flush=True)
    return True


main()
