"""Discrete Gaussian noise of exact releases: nanoseconds per value, processor and wall, with the machine's load.

python -m benchmarks.exact_noise
"""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fedpriv.noise.integers.gaussian import START, KeyedIntegers, round_noise
from fedpriv.noise.integers.increments import integer_residuals, integers, outer_sum

SIGMAS = (16.0, 2.0**16, 2.0**30 * 1.5, 2.0**40)
SIZES = (7850, 10**6)


def best_nanoseconds(work: Callable[[], Any], values: int) -> tuple[float, float]:
    """Processor and wall time per value: the best of enough runs to see two million values, ten at least."""
    work()
    processor = wall = float("inf")
    for _ in range(max(10, 2_000_000 // values)):
        started, used = time.perf_counter(), time.process_time()
        work()
        processor = min(processor, time.process_time() - used)
        wall = min(wall, time.perf_counter() - started)
    return 1e9 * processor / values, 1e9 * wall / values


def report(name: str, work: Callable[[], Any], values: int) -> None:
    processor, wall = best_nanoseconds(work, values)
    print(f"{name}: {processor:.1f} ns per value (wall {wall:.1f})")


def run() -> None:
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for size in SIZES:
        for sigma in SIGMAS:
            source = KeyedIntegers(bytes(32), 3, 5)
            report(f"d = {size}, sigma = {sigma:.4g}", lambda s=source, d=size, g=sigma: s.vector(d, g), size)
        sums = np.zeros(size, np.int64)
        fresh = lambda s=sums: round_noise(bytes(32), 3, 5, START, s).vector(len(s), SIGMAS[-1])  # noqa: E731
        report(f"d = {size}, a fresh subkey of the sums each time", fresh, size)
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(100, 7850)).astype(np.float32)
    report("increments to integers, 100 records", lambda: integers(rows, 2**36, 2.0**36).sum(axis=0), rows.size)
    residuals, features = generator.normal(size=(100, 10)), generator.integers(0, 256, (100, 785))
    rank_one = lambda: outer_sum(integer_residuals(residuals, features, 2**36, 2.0**28), features, 2**36)  # noqa: E731
    report("the same by rank one", rank_one, rows.size)


if __name__ == "__main__":
    run()
