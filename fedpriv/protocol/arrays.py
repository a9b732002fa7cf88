"""Vectors and releases as Flower's records; what every message holds is in fedpriv/protocol/messages.py.

Arrays travel as .npy bytes, byte-identical to Flower's own `Array(ndarray)`; building them here from the public
constructor costs 6 µs instead of 37, and reading them 2 instead of 57 (d = 7,850).
"""

import io
import math
import warnings
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.protocol.messages import number_in
from fedpriv.protocol.unchecked import array_over, holding, values_in

_STYPE = "numpy.ndarray"


def array_of(vector: Tensor | NDArray[Any]) -> Array:
    """A Flower Array from a tensor or ndarray."""
    return Array(*_encoded(vector.numpy() if isinstance(vector, Tensor) else vector))


def tensor_of(array: Array) -> Tensor:
    """A tensor over the bytes of a Flower Array, without a copy; ValueError if the array is malformed.

    The bytes are immutable, so nobody may write into the tensor.  Who sent it may have announced anything: memory
    grows with what has come.
    """
    try:
        return torch.from_numpy(_ndarray_of(array))
    except (TypeError, EOFError, MemoryError) as error:
        raise ValueError(f"an array that cannot be read: {error}") from None


def one_array(vector: Tensor) -> ArrayRecord:
    """An array record that holds one vector."""
    record = ArrayRecord()  # filling it afterwards skips a copy of every array
    record["vector"] = array_of(vector)
    return record


def query_content(query: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
    return RecordDict({"query": query, "config": ConfigRecord({**config, "t": t})})


class Counts(NamedTuple):
    """What a silo has to say about one round's records: how many took part, and how many of those were clipped."""

    drawn: int
    clipped: int | None
    """None where nobody counted: integers are not asked what became of their increments."""

    def with_those(self, others: "Counts") -> "Counts":
        clipped = None if self.clipped is None or others.clipped is None else self.clipped + others.clipped
        return Counts(self.drawn + others.drawn, clipped)

    @property
    def fraction_clipped(self) -> float | None:
        """The share of records, None where nobody counted."""
        return None if self.clipped is None else self.clipped / max(1, self.drawn)


def release_content(release: Tensor, counts: Counts | None) -> RecordDict:
    """Counts of records are a release that nobody accounts for: simulations send them, silos do not."""
    array = array_over(*_encoded(release.numpy()))
    records: dict[str, ArrayRecord | MetricRecord] = {"release": holding(ArrayRecord, {"vector": array})}
    if counts is not None:
        told = {"drawn": counts.drawn}
        if counts.clipped is not None:
            told["clipped"] = counts.clipped
        records["metrics"] = holding(MetricRecord, told)
    return holding(RecordDict, records)


def counts_in(content: RecordDict) -> Counts | None:
    """The counts beside a release, None if there are none; ValueError if they are malformed."""
    metrics = values_in(content).get("metrics")
    if metrics is None:
        return None
    drawn = number_in(content, "metrics", "drawn")
    return Counts(drawn, number_in(content, "metrics", "clipped") if "clipped" in values_in(metrics) else None)


def vector_in(content: RecordDict, record: str) -> Tensor:
    """The one vector of an array record; ValueError if there is none."""
    return tensor_of(_array_in(content, record))


def shared_vector_in(content: RecordDict, record: str) -> Tensor:
    """`vector_in` for what many silos of one process are sent: the same tensor wherever the bytes are the same."""
    array = _array_in(content, record)
    return _shared_tensor(array.dtype, tuple(array.shape), array.stype, array.data)


def _array_in(content: RecordDict, record: str) -> Array:
    arrays = values_in(content).get(record)
    if not isinstance(arrays, ArrayRecord) or len(values_in(arrays)) != 1:
        raise ValueError(f"the message carries no {record!r} vector")
    (array,) = values_in(arrays).values()
    return cast(Array, array)


@lru_cache(maxsize=2)
def _shared_tensor(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Tensor:
    """Python keeps the hash of immutable bytes, and compares two names of the same bytes without reading them."""
    return tensor_of(array_over(dtype, shape, stype, data))


def is_finite(vector: Tensor) -> bool:
    """Whether every value is finite: a sum lets NaN and infinity through (and overflows for absurd values)."""
    return math.isfinite(vector.sum())


with warnings.catch_warnings():
    # torch has no read-only tensors and says so once a process, the first time it is given immutable bytes.
    warnings.simplefilter("ignore", UserWarning)
    torch.from_numpy(np.frombuffer(bytes(8), np.float32))


def _encoded(vector: NDArray[Any]) -> tuple[str, tuple[int, ...], str, bytes]:
    """What an Array is made of."""
    values = np.ascontiguousarray(vector)
    name, header, _ = _layout(values.dtype.str, values.shape)
    return name, values.shape, _STYPE, b"".join((header, values.data))  # one copy


@lru_cache(maxsize=256)
def _layout(dtype: str, shape: tuple[int, ...]) -> tuple[str, bytes, int]:
    """Of an array's .npy form: the name of its type, its header, and its length in bytes; no array is made."""
    kind, buffer = np.dtype(dtype), io.BytesIO()
    described = {"descr": npy.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(buffer, described)
    header = buffer.getvalue()
    return kind.name, header, len(header) + math.prod(shape) * kind.itemsize


def _ndarray_of(array: Array) -> NDArray[Any]:
    _, header, length = _layout(array.dtype, tuple(array.shape))
    if array.stype == _STYPE and len(array.data) == length and array.data.startswith(header):
        return np.frombuffer(array.data, array.dtype, offset=len(header)).reshape(array.shape)
    return array.numpy()  # another .npy version or memory order; NumPy itself refuses what is malformed
