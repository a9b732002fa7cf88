"""The IDX format of the MNIST family: a magic number, the shape, then the bytes.

Source: "The IDX file format", LeCun, Cortes & Burges, the MNIST database.
"""

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError

_UNSIGNED_BYTE = 0x08


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Write an array of bytes, of any shape, as an IDX file."""
    if values.dtype != np.uint8:
        raise ValueError(f"{path}: IDX files are written from uint8, not {values.dtype}")
    header = struct.pack(f">HBB{values.ndim}I", 0, _UNSIGNED_BYTE, values.ndim, *values.shape)
    path.write_bytes(header + values.tobytes())


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file, not to be written to; InputError if it is missing, cut short or something else."""
    try:
        return parse_idx(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def parse_idx(content: bytes, path: str) -> NDArray[np.uint8]:
    """The array in the bytes of an IDX file; InputError, naming `path`, if they are something else."""
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise InputError(f"{path}: is not an IDX file of unsigned bytes")
    axes = content[3]
    start = 4 + 4 * axes
    if len(content) < start:
        raise InputError(f"{path}: its IDX header is cut short: {len(content)} of {start} bytes")
    shape = struct.unpack(f">{axes}I", content[4:start])
    present, needed = len(content) - start, math.prod(shape)
    if present != needed:
        dimensions = " x ".join(map(str, shape))
        raise InputError(f"{path}: {present} bytes of data, but its IDX header says {dimensions} = {needed}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
