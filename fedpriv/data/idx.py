"""The IDX format of the MNIST family: a magic number, the shape, then the bytes.

Source: "The IDX file format", LeCun, Cortes & Burges, the MNIST database.
"""

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError

_UNSIGNED_BYTE = 0x08


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    """An array of bytes, of any shape with fewer than 256 axes, as an IDX file's content."""
    header = struct.pack(f">HBB{values.ndim}I", 0, _UNSIGNED_BYTE, values.ndim, *values.shape)
    return header + np.ascontiguousarray(values).tobytes()


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file; InputError if the file is not one or is cut short."""
    content = path.read_bytes()
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise InputError(f"{path}: not an IDX file of unsigned bytes")
    axes = content[3]
    start = 4 + 4 * axes
    if len(content) < start:
        raise InputError(f"{path}: the IDX header is cut short")
    shape = struct.unpack(f">{axes}I", content[4:start])
    values = np.frombuffer(content, np.uint8, offset=start)
    if values.size != int(np.prod(shape)):
        raise InputError(f"{path}: {values.size} bytes of data, but the header says {' x '.join(map(str, shape))}")
    return values.reshape(shape)
