"""Gaussian draws: fedpriv's keyed source beside the generators at hand, one thread, float32."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from fedpriv.core.random import simulation_noise

DIMENSION = 7850


def nanoseconds(draw: Callable[[], Any], values: int, repeat: int) -> float:
    """Nanoseconds per value: the best of five runs of `repeat` calls."""
    draw()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(repeat):
            draw()
        best = min(best, (time.perf_counter() - started) / repeat)
    return 1e9 * best / values


def run() -> None:
    torch.set_num_threads(1)
    source, buffer = simulation_noise(0, np.float32), np.empty(DIMENSION, np.float32)
    tensor = torch.empty(DIMENSION)
    draws: dict[str, tuple[Callable[[], Any], int]] = {
        "fedpriv, AES-256-CTR, one vector": (lambda: source.vector(DIMENSION, 3, 5), 1),
        "fedpriv, AES-256-CTR, 100 vectors": (lambda: source.vectors(DIMENSION, [0] * 100, range(100)), 100),
        "torch normal_ (32-bit seed)": (tensor.normal_, 1),
    }
    for kind in (np.random.SFC64, np.random.PCG64DXSM, np.random.Philox):
        generator = np.random.Generator(kind(1))
        draws[f"numpy {kind.__name__}"] = (partial(generator.standard_normal, out=buffer, dtype=np.float32), 1)
    for name, (draw, vectors) in draws.items():
        print(f"{name}: {nanoseconds(draw, vectors * DIMENSION, max(1, 500 // vectors)):.2f} ns/value")
