"""Run all benchmarks, or those named."""

import os
import platform
import sys

import torch

from benchmarks import (
    clients,
    exact_noise,
    existing_app,
    growth,
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

BENCHMARKS = {
    "startup": startup.run,
    "noise": noise.run,
    "exact_noise": exact_noise.run,
    "tables": tables.run,
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
}


def main() -> None:
    chosen = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"benchmarks: unknown {', '.join(unknown)}; known are {', '.join(BENCHMARKS)}")
    machine, load = platform.processor() or platform.machine(), os.getloadavg()[0]
    print(f"{machine}, {os.cpu_count()} cores, load {load:.2f}, torch {torch.__version__}")
    for name in chosen:
        print(f"\n## {name}\n")
        BENCHMARKS[name]()


main()
