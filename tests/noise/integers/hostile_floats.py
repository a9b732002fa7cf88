"""Rows of floats that a server could make a gradient be."""

import functools
import math
import struct

import numpy as np
import torch

from fedpriv.noise.integers.increments import add_truncated

CLIPS = [1.0, 0.3, 2.0**-40, 2.0**40, 1e-5]
_PAYLOADS = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF0000000000001, 0xFFF8DEADBEEF0001)]


@functools.cache
def specials(width: int) -> list[float]:
    kind = np.float32 if width == 32 else np.float64
    info = np.finfo(kind)
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, *_PAYLOADS]
    largest = float(info.max)
    sizes = 1.6e-44, 1e-40, 1e-38, 1e-30, 2.0**-36, 88.0, 710.0, 1e30, 0.6 * largest, largest
    for value in (float(info.tiny), float(info.smallest_subnormal), *sizes):
        values += [value, -value]
    for clip in CLIPS:
        for near in (clip, clip / math.sqrt(3)):
            values += [
                float(np.nextafter(kind(near), kind(np.inf))),
                float(np.nextafter(kind(near), kind(-np.inf))),
                near,
            ]
    return [float(kind(value)) for value in values]


def random_floats(generator: np.random.Generator, width: int, shape: tuple[int, ...]) -> np.ndarray:
    """Ordinary values, any bits (payloads of NaN included), values of every size, and special ones."""
    kind, word = (np.float32, np.uint32) if width == 32 else (np.float64, np.uint64)
    ordinary, anything = generator.uniform(-4.0, 4.0, shape), generator.integers(0, 2**width, shape, dtype=word)
    mixed = np.ldexp(generator.uniform(-1.0, 1.0, shape), generator.integers(-120, 121, shape))
    ways = ordinary.astype(kind), anything.view(kind), mixed.astype(kind), generator.choice(specials(width), shape)
    with np.errstate(all="ignore"):
        return np.choose(generator.integers(0, 4, shape), ways).astype(kind)


def random_rows(generator: np.random.Generator, most_values: int = 9) -> np.ndarray:
    """(b, d) of float32 or float64: anything, one value repeated, or one among zeros."""
    shape = generator.integers(1, 5), generator.integers(1, most_values + 1)
    found = random_floats(generator, int(generator.choice([32, 64])), shape)
    for row in found:
        match generator.choice(["any", "repeated", "alone"]):
            case "repeated":
                row[:] = row[0]
            case "alone":
                row[1:] = 0.0
                generator.shuffle(row)
    return found


def truncated(given_rows: np.ndarray, norm: int, factor: float) -> np.ndarray:
    """Integers of each row, as `add_truncated` adds them to zeros."""
    total = np.zeros(given_rows.shape, np.int64)
    for integers, row in zip(total, given_rows, strict=True):
        add_truncated(integers, torch.from_numpy(row).double().clone().numpy(), norm, factor, True)
    return total
