"""Tensors and releases as Flower's records; what every message holds is in fedpriv/protocol/messages.py."""

import warnings
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.protocol.messages import (
    array_of,
    array_over,
    given_in,
    holding,
    number_in,
    opened_in,
    records_with,
    values_in,
    values_of,
    with_vector,
)
from fedpriv.rounds.outcome import Counts


def tensor_of(array: Array) -> Tensor:
    """A tensor over the bytes of a Flower Array, without a copy; ValueError if the array is malformed.

    The bytes are immutable, so the tensor may not be written into.
    """
    return _tensor(values_of(array))


def one_array(vector: Tensor) -> ArrayRecord:
    """An array record that holds one vector."""
    record = ArrayRecord()  # filling it afterwards skips a copy of every array
    record["vector"] = array_of(vector.numpy())
    return record


def query_content(query: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
    """Make the content of a query: an array record of one vector, and values beside it."""
    return with_vector("query", next(iter(query.values())), {**config, "t": t})


def release_content(release: Tensor, counts: Counts | None) -> RecordDict:
    """Counts of records are a release that no accountant knows: simulations send them, silos do not."""
    records: dict[str, Any] = records_with("release", array_of(release.numpy()), {})
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
    return _tensor(opened_in(content, name))


def shared_vector_in(content: RecordDict, name: str) -> Tensor:
    """`vector_in` for what many silos of one process are sent: the same tensor wherever the bytes are the same.

    It lies where torch puts its own, so that no silo has to copy it there.
    """
    given = given_in(content, name)
    if isinstance(given, bytes):
        return _shared_tensor(given, None)
    return _shared_tensor(given.data, (given.dtype, tuple(given.shape), given.stype))


@lru_cache(maxsize=1)  # a second one would keep the vector of a round that is over
def _shared_tensor(data: bytes, described: tuple[str, tuple[int, ...], str] | None) -> Tensor:
    """Python keeps the hash of immutable bytes, and compares two names of the same bytes without reading them."""
    return _tensor(values_of(data if described is None else array_over(*described, data))).clone()


def _tensor(values: NDArray[Any]) -> Tensor:
    try:
        return torch.from_numpy(values)
    except TypeError as error:
        raise ValueError(f"an array that cannot be read: {error}") from None


with warnings.catch_warnings():
    # torch has no read-only tensors and says so once a process, the first time it is given immutable bytes.
    warnings.simplefilter("ignore", UserWarning)
    torch.from_numpy(np.frombuffer(bytes(8), np.float32))
