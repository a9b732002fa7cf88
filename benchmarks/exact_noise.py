"""Discrete Gaussian noise of exact releases: nanoseconds per value, processor and wall, with the machine's load.

python -m benchmarks.exact_noise
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.noise.integers.gaussian import INITIAL_QUERY_CHAIN, KeyedDiscreteGaussian, round_noise
from fedpriv.noise.integers.increments import add_truncated, integer_residuals, sum_outer_products

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


def report(name: str, works: Sequence[Callable[[], Any]], values: Sequence[int]) -> None:
    each = [f"{best_nanoseconds(*of)[0]:.1f}" for of in zip(works, values, strict=True)]
    print(f"| {name} | {' | '.join(each)} |", flush=True)


def run() -> None:
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("Processor nanoseconds per value, the best of ten runs or more.\n")
    print(f"| σ, in units of the lattice | {' | '.join(f'd = {size:,}' for size in SIZES)} |")
    print("|---|---|---|")
    for sigma in SIGMAS:
        source = KeyedDiscreteGaussian(bytes(32), 3, 5)
        report(f"{sigma:.4g}", [partial(source.vector, size, sigma) for size in SIZES], SIZES)
    fresh = [partial(_of_the_sums, np.zeros(size, np.int64)) for size in SIZES]
    report(f"{SIGMAS[-1]:.4g}, with the key of a round from the sums", fresh, SIZES)
    print("\n| to make integers of increments | ns |\n|---|---|")
    generator = np.random.default_rng(0)
    rows, total = generator.normal(size=(100, 7850)), np.zeros(7850, np.int64)
    report("100 records", [lambda: [add_truncated(total, row, 2**36, 2.0**36, True) for row in rows]], [rows.size])
    residuals, features = generator.normal(size=(100, 10)), generator.integers(0, 256, (100, 785))
    rank_one = lambda: sum_outer_products(integer_residuals(residuals, features, 2**36, 2.0**28), features, 2**36)  # noqa: E731
    report("the same by rank one", [rank_one], [rows.size])


def _of_the_sums(sums: NDArray[np.int64]) -> Any:
    return round_noise(bytes(32), 3, 5, INITIAL_QUERY_CHAIN, sums).vector(len(sums), SIGMAS[-1])


if __name__ == "__main__":
    run()
