"""Rows of floats that a server could make a gradient be."""

import math
import struct

import numpy as np
import torch
from hypothesis import strategies as st

from fedpriv.noise.integers.increments import add_truncated

CLIPS = [1.0, 0.3, 2.0**-40, 2.0**40, 1e-5]
_PAYLOADS = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF0000000000001, 0xFFF8DEADBEEF0001)]


def specials(width: int) -> list[float]:
    kind = np.float32 if width == 32 else np.float64
    info = np.finfo(kind)
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, *_PAYLOADS]
    for value in (float(info.tiny), float(info.max), float(info.smallest_subnormal), 1.6e-44, 1e-38, 2.0**-36):
        values += [value, -value]
    for clip in CLIPS:
        for near in (clip, clip / math.sqrt(3)):
            values += [
                float(np.nextafter(kind(near), kind(np.inf))),
                float(np.nextafter(kind(near), kind(-np.inf))),
                near,
            ]
    return [float(kind(value)) for value in values]


def floats(width: int) -> st.SearchStrategy[float]:
    ordinary = st.floats(-4.0, 4.0, width=width)
    anything = st.floats(width=width, allow_nan=True, allow_infinity=True, allow_subnormal=True)
    mixed = st.builds(
        lambda m, e: float(np.ldexp(np.float32(m), e)), st.floats(-1.0, 1.0, width=32), st.integers(-120, 120)
    )
    return st.one_of(ordinary, anything, mixed, st.sampled_from(specials(width)))


@st.composite
def rows(draw: st.DrawFn, most_values: int = 9) -> np.ndarray:
    """(b, d) of float32 or float64: anything, one value repeated, or one among zeros."""
    width = draw(st.sampled_from([32, 64]))
    kind = np.float32 if width == 32 else np.float64
    size = draw(st.integers(1, most_values))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.sampled_from(["any", "repeated", "alone"]))
        if shape == "any":
            found.append(draw(st.lists(floats(width), min_size=size, max_size=size)))
        else:
            value = draw(floats(width))
            row = [value if shape == "repeated" else 0.0] * size
            row[draw(st.integers(0, size - 1))] = value
            found.append(row)
    with np.errstate(all="ignore"):
        return np.array(found, np.float64).astype(kind)


def truncated(given_rows: np.ndarray, norm: int, factor: float) -> np.ndarray:
    """Integers of each row, as `add_truncated` adds them to zeros."""
    total = np.zeros(given_rows.shape, np.int64)
    for integers, row in zip(total, given_rows, strict=True):
        add_truncated(integers, torch.from_numpy(row).double().clone().numpy(), norm, factor, True)
    return total
