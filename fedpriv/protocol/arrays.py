"""Tensors and releases as Flower's records; what every message holds is in fedpriv/protocol/messages.py."""

import math
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.protocol import vectors
from fedpriv.protocol.messages import array_over, holding, number_in, values_in


def array_of(vector: Tensor | NDArray[Any]) -> Array:
    """A Flower Array from a tensor or ndarray."""
    return vectors.array_of(vector.numpy() if isinstance(vector, Tensor) else vector)


def tensor_of(array: Array) -> Tensor:
    """A tensor over the bytes of a Flower Array, without a copy; ValueError if the array is malformed.

    The bytes are immutable, so the tensor may not be written into.
    """
    return _tensor(vectors.values_of(array))


def one_array(vector: Tensor) -> ArrayRecord:
    """An array record that holds one vector."""
    record = ArrayRecord()  # filling it afterwards skips a copy of every array
    record["vector"] = array_of(vector)
    return record


def query_content(query: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
    """Make the content of a query: an array record of one vector, and values beside it."""
    return vectors.with_vector("query", next(iter(query.values())), {**config, "t": t})


class Counts(NamedTuple):
    """A silo's counts of one round's records: how many took part, and how many of those were clipped."""

    drawn: int
    clipped: int | None
    """None where nothing was counted: integers are not asked what became of their increments."""

    def with_those(self, others: "Counts") -> "Counts":
        clipped = None if self.clipped is None or others.clipped is None else self.clipped + others.clipped
        return Counts(self.drawn + others.drawn, clipped)

    @property
    def fraction_clipped(self) -> float | None:
        """The share of records, None where nothing was counted."""
        return None if self.clipped is None else self.clipped / max(1, self.drawn)


def release_content(release: Tensor, counts: Counts | None) -> RecordDict:
    """Counts of records are a release that no accountant knows: simulations send them, silos do not."""
    records: dict[str, Any] = vectors.records_with("release", array_of(release), {})
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


def vector_in(content: RecordDict, name: str) -> Tensor:
    """The one vector of this name, sealed or not; ValueError if there is none."""
    return _tensor(vectors.opened_in(content, name))


def shared_vector_in(content: RecordDict, name: str) -> Tensor:
    """`vector_in` for what many silos of one process are sent: the same tensor wherever the bytes are the same."""
    given = vectors.given_in(content, name)
    if isinstance(given, bytes):
        return _shared_tensor(given, None)
    return _shared_tensor(given.data, (given.dtype, tuple(given.shape), given.stype))


@lru_cache(maxsize=2)
def _shared_tensor(data: bytes, described: tuple[str, tuple[int, ...], str] | None) -> Tensor:
    """Python keeps the hash of immutable bytes, and compares two names of the same bytes without reading them."""
    return _tensor(vectors.values_of(data if described is None else array_over(*described, data)))


def _tensor(values: NDArray[Any]) -> Tensor:
    try:
        return torch.from_numpy(values)
    except TypeError as error:
        raise ValueError(f"an array that cannot be read: {error}") from None


def is_finite(vector: Tensor) -> bool:
    """Whether every value is finite: a sum lets NaN and infinity through (and overflows for absurd values)."""
    return math.isfinite(vector.sum())


with warnings.catch_warnings():
    # torch has no read-only tensors and says so once a process, the first time it is given immutable bytes.
    warnings.simplefilter("ignore", UserWarning)
    torch.from_numpy(np.frombuffer(bytes(8), np.float32))
