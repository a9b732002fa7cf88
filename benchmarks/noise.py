"""Gaussian draws: fedpriv's keyed source beside the generators at hand, one thread, float32."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedpriv.randomness import simulation_noise

DIMENSION = 7850


def nanoseconds(draw: Callable[[], Any], values: int, repeat: int) -> float:
    """Nanoseconds a value: the best of five runs of `repeat` calls."""
    draw()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(repeat):
            draw()
        best = min(best, (time.perf_counter() - started) / repeat)
    return 1e9 * best / values


def draw_cost() -> float:
    """Nanoseconds a value of fedpriv's keyed source in batches of 100 vectors."""
    source = simulation_noise(0, np.float32)
    return nanoseconds(lambda: source.vectors(DIMENSION, [0] * 100, range(100)), 100 * DIMENSION, 20)


def run() -> None:
    torch.set_num_threads(1)
    source, buffer = simulation_noise(0, np.float32), np.empty(DIMENSION, np.float32)
    tensor = torch.empty(DIMENSION)
    generators: dict[str, Callable[[], Any]] = {
        "torch normal_ (32-bit seed)": tensor.normal_,
        **{
            f"numpy {kind.__name__}": (lambda g: lambda: g.standard_normal(out=buffer, dtype=np.float32))(
                np.random.Generator(kind(1))
            )
            for kind in (np.random.SFC64, np.random.PCG64DXSM, np.random.Philox)
        },
    }
    print(
        f"fedpriv AES-256-CTR, one vector at a time: {nanoseconds(lambda: source.vector(DIMENSION, 3, 5), DIMENSION, 500):.2f} ns/value"
    )
    print(f"fedpriv AES-256-CTR, batches: {draw_cost():.2f} ns/value")
    for name, draw in generators.items():
        print(f"{name}: {nanoseconds(draw, DIMENSION, 500):.2f} ns/value")
