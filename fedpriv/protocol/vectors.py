"""Vectors as Flower's records, without torch: a silo's proxy has to start fast.

A vector is .npy bytes, byte for byte those of Flower's own `Array(ndarray)`; making an `Array` here costs 6 µs
instead of 37, and reading one 2 instead of 57 (d = 7,850).

Flower sends a message as a tree of objects, with a request for each of them on each of its ways, and an array
record is three.  A vector that is not long is a value of the config record instead, which is one.

A SuperLink names an object by the SHA-256 of its bytes, and gives it to every SuperNode that asks for the name: a
silo that guesses what another one sends could see whether it is there.  So what silos send is `sealed`.

A sender may announce any length: memory grows with what has come.
"""

import hashlib
import io
import math
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedpriv.protocol.messages import CONFIG, array_over, holding
from fedpriv.protocol.messages import values_in as inside

_STYPE = "numpy.ndarray"
_SEAL, _SEAL_BYTES = "seal", 32
_LONG = 2**22  # bytes; what is longer goes in pieces, as Flower sends arrays
_VECTOR = re.compile(
    rb"\x93NUMPY\x01\0..\{'descr': '([<>|]?[iuf][1248])', 'fortran_order': False, 'shape': \(([0-9]{1,15}),\), \}",
    re.DOTALL,
)
"""The header of a vector of numbers, at the beginning of its bytes."""


class _Layout(NamedTuple):
    """Layout that a header describes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    header: bytes
    name: str
    """Of the type; NumPy takes 5 µs to make one."""

    @property
    def length(self) -> int:
        """Bytes of header and values."""
        return len(self.header) + math.prod(self.shape) * self.dtype.itemsize

    def values_in(self, content: bytes) -> NDArray[Any]:
        return np.frombuffer(content, self.dtype, offset=len(self.header)).reshape(self.shape)


def array_of(values: NDArray[Any]) -> Array:
    """A Flower Array."""
    values = np.ascontiguousarray(values)
    layout = _layout_of(values.dtype.str, values.shape)
    data = b"".join((layout.header, values.data))  # one copy
    return array_over(layout.name, values.shape, _STYPE, data)


def values_of(given: bytes | Array) -> NDArray[Any]:
    """The values over the bytes of a vector or a Flower Array, without a copy; ValueError if it is malformed."""
    if isinstance(given, bytes):
        return _values_in_bytes(given)
    try:
        layout = _layout_of(given.dtype, tuple(given.shape))
        if given.stype == _STYPE and len(given.data) == layout.length and given.data.startswith(layout.header):
            return layout.values_in(given.data)
        return given.numpy()  # another .npy version or memory order; NumPy itself refuses what is malformed
    except Exception as error:  # of NumPy, zipfile, tokenize, …: what a stranger sends decides
        raise ValueError(f"an array that cannot be read: {error}") from None


def sealed(name: str, values: NDArray[Any]) -> RecordDict:
    """A message's content: one vector whose bytes cannot be guessed, under a pad that goes with them: `opened_in`.

    Guarantee: the objects of the message look random to whoever does not have all of it, whatever the vector is.
    The server has, and reads it: this hides nothing from it.
    """
    seal = secrets.token_bytes(_SEAL_BYTES)
    return with_vector(name, array_of(_padded(np.ascontiguousarray(values), seal)), {_SEAL: seal})


def opened_in(content: RecordDict, name: str) -> NDArray[Any]:
    """The one vector of this name, sealed or as simulations send it; ValueError if there is none."""
    config, values = inside(content).get(CONFIG), values_in(content, name)
    seal = inside(config).get(_SEAL) if isinstance(config, ConfigRecord) else None
    if seal is None:
        return values
    if not isinstance(seal, bytes) or len(seal) != _SEAL_BYTES:
        raise ValueError(f"the {name} is sealed with something else than {_SEAL_BYTES} bytes")
    return _padded(values, seal)


def _padded(values: NDArray[Any], seal: bytes) -> NDArray[Any]:
    """The same type and shape, every byte with one of SHAKE-256 of the seal: twice is not at all."""
    pad = np.frombuffer(hashlib.shake_256(seal).digest(values.nbytes), np.uint8)
    padded: NDArray[Any] = (values.reshape(-1).view(np.uint8) ^ pad).view(values.dtype).reshape(values.shape)
    return padded


def with_vector(name: str, array: Array, config: Mapping[str, Any]) -> RecordDict:
    """A message's content: one vector, and values beside it."""
    return holding(RecordDict, records_with(name, array, config))


def records_with(name: str, array: Array, config: Mapping[str, Any]) -> dict[str, Any]:
    """The records of `with_vector`."""
    if len(array.data) <= _LONG:
        return {CONFIG: holding(ConfigRecord, {**config, name: array.data})}
    return {name: holding(ArrayRecord, {"vector": array}), CONFIG: holding(ConfigRecord, {**config})}


def given_in(content: RecordDict, name: str) -> bytes | Array:
    """The one vector of this name, as it came; ValueError if there is none."""
    config = inside(content).get(CONFIG)
    if isinstance(config, ConfigRecord) and isinstance(given := inside(config).get(name), bytes):
        return given
    arrays = inside(content).get(name)
    if not isinstance(arrays, ArrayRecord) or len(inside(arrays)) != 1:
        raise ValueError(f"the message carries no {name!r} vector")
    (array,) = inside(arrays).values()
    return cast(Array, array)


def values_in(content: RecordDict, name: str) -> NDArray[Any]:
    """The one vector of this name, read-only, of plain numbers; ValueError if there is none."""
    return values_of(given_in(content, name))


def _values_in_bytes(content: bytes) -> NDArray[Any]:
    """ValueError for anything but what `array_of` makes of a vector: nothing else of a header is looked at."""
    found = _VECTOR.match(content)
    try:
        layout = None if found is None else _layout_of(found[1].decode(), (int(found[2]),))
    except TypeError:  # a type that NumPy does not have
        layout = None
    if layout is None or len(content) != layout.length or not content.startswith(layout.header):
        raise ValueError("a vector whose bytes are not what they announce")
    return layout.values_in(content)


@lru_cache(maxsize=256)
def _layout_of(dtype: str, shape: tuple[int, ...]) -> _Layout:
    kind, buffer = np.dtype(dtype), io.BytesIO()
    described = {"descr": npy.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(buffer, described)
    return _Layout(kind, shape, buffer.getvalue(), kind.name)
