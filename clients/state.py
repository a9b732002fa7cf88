"""A silo's state as bytes, and the two places where they are kept.

A simulation keeps them in Flower's Context, a deployment in the silo's ledger (clients/ledger.py).
"""

import struct
from typing import Protocol

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedpriv.clients.silo import Silo, SiloState
from fedpriv.estimators.running_sum import RunningSum
from fedpriv.protocol.messages import bytes_in

_RECORD, _KEY = "fedpriv-silo", "state"
_HEADER = struct.Struct("<QIIQ")  # the last round answered, past vectors, the mechanism's, bytes of the chain
_TYPES = (torch.float32, torch.float64)
_ALIGNED = 8


def pack(state: SiloState) -> bytes:
    """The header, the chain, every vector's type, then the vectors: the sum, the past, the mechanism's.

    Each vector keeps its own type: past queries are the run's, sums and noise float64.
    """
    vectors = (state.sum.total, *state.sum.past, *state.hidden)
    header = _HEADER.pack(state.answered, len(state.sum.past), len(state.hidden), len(state.chain))
    types = bytes(_TYPES.index(vector.dtype) for vector in vectors)
    return b"".join(map(_padded, (header + state.chain + types, *(v.numpy().tobytes() for v in vectors))))


def unpack(packed: bytes, silo: Silo) -> SiloState:
    """The state over the packed bytes, without copies: nobody writes into a state's vectors."""
    answered, past, hidden, chained = _HEADER.unpack_from(packed)
    start, size = _HEADER.size + chained, silo.objective.dimension
    types = packed[start : start + 1 + past + hidden]
    offset = _aligned(start + len(types))
    vectors: list[Tensor] = []
    for code in types:
        values = np.frombuffer(packed, _numpy(_TYPES[code]), size, offset)
        vectors.append(torch.from_numpy(values))
        offset += _aligned(values.nbytes)
    total, *rest = vectors
    chain = packed[_HEADER.size : start]
    return SiloState(answered, RunningSum(tuple(rest[:past]), total), tuple(rest[past:]), chain)


def _numpy(dtype: torch.dtype) -> type[np.floating]:
    return np.float32 if dtype == torch.float32 else np.float64


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _padded(part: bytes) -> bytes:
    return part.ljust(_aligned(len(part)), b"\0")


class SiloStore(Protocol):
    """Where a silo's state survives from round to round."""

    def load(self, silo: Silo) -> SiloState:
        """The state kept, or the silo's start if there is none."""
        ...

    def save(self, state: SiloState) -> None: ...


class _LiveState(ConfigRecord):
    """A record that packs its state only when it leaves the process, as it does after every round under Ray."""

    def __init__(self, state: SiloState) -> None:
        super().__init__()
        self.__dict__["live"] = state

    def __reduce__(self) -> tuple[type[ConfigRecord], tuple[dict[str, bytes]]]:
        return ConfigRecord, ({_KEY: pack(self.__dict__["live"])},)


class ContextStore:
    """Flower's Context: for simulations, where nothing has to survive the process."""

    def __init__(self, records: RecordDict) -> None:
        self._records = records

    def load(self, silo: Silo) -> SiloState:
        kept = self._records.get(_RECORD)
        if kept is None:
            return silo.start()
        if isinstance(kept, _LiveState):
            state: SiloState = kept.__dict__["live"]
            return state
        return unpack(bytes_in(self._records, _RECORD, _KEY), silo)

    def save(self, state: SiloState) -> None:
        """Called last, so that a client that failed half-way has changed nothing."""
        self._records[_RECORD] = _LiveState(state)
