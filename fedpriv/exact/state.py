"""A strategy's state as bytes: a header of three numbers, then the vectors, little-endian."""

import math
import struct

import numpy as np

from fedpriv.errors import RunError
from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.strategies.base import IntState

_HEADER = struct.Struct("<4sQQ")
_MARK = b"int1"
_LITTLE = np.dtype("<i8")


def pack(state: IntState) -> bytes:
    """Vectors of one shape (d,), any number of them."""
    size = state[0].size if state else 0
    return b"".join((_HEADER.pack(_MARK, len(state), size), *(v.astype(_LITTLE).tobytes() for v in state)))


def unpack(packed: bytes) -> IntState:
    """The state over the packed bytes, without copies: nobody writes into it.  RunError for other bytes."""
    if len(packed) < _HEADER.size:
        raise RunError("the strategy's state is cut off")
    mark, count, size = _HEADER.unpack_from(packed)
    if mark != _MARK or len(packed) != _HEADER.size + math.prod((count, size, _LITTLE.itemsize)):
        raise RunError("the strategy's state is cut off, or is something else")
    values: Ints = np.frombuffer(packed, _LITTLE, offset=_HEADER.size).astype(np.int64, copy=False)
    return tuple(values.reshape(count, size)) if count else ()
