"""A silo's state as bytes, and the two places where they are kept.

A simulation keeps them in Flower's Context, a deployment in the silo's ledger (fedpriv/silo/ledger.py).
"""

import struct
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedpriv.protocol.messages import bytes_in, values_in
from fedpriv.silo.silo import Silo, SiloState

_RECORD, _KEY = "fedpriv-silo", "state"
_HEADER = struct.Struct(
    "<QIIIQ"
)  # the last round answered, past vectors, sums, the mechanism's, bytes of the chain
_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float64: np.dtype("<f8"),
    torch.int64: np.dtype("<i8"),
}
_ALIGNED = 8


def pack(state: SiloState) -> bytes:
    """The header, the chain, every vector's type, then the vectors: the past, the sums, the mechanism's.

    Each vector keeps its own type: past queries are the run's, sums integers where releases are exact and float64
    else, noise float64.
    """
    vectors, numbered = (*state.past, *state.sums, *state.hidden), list(_TYPES)
    counts = len(state.past), len(state.sums), len(state.hidden)
    header = _HEADER.pack(state.answered, *counts, len(state.chain))
    types = bytes(numbered.index(vector.dtype) for vector in vectors)
    parts = [
        memoryview(header + state.chain + types),
        *(np.ascontiguousarray(v.numpy()).data.cast("B") for v in vectors),
    ]
    return b"".join(piece for part in parts for piece in (part, bytes(_aligned(len(part)) - len(part))))


def unpack(packed: bytes, silo: Silo) -> SiloState:
    """The state over the packed bytes, without copies: nobody writes into a state's vectors."""
    answered, past, sums, hidden, chained = _HEADER.unpack_from(packed)
    start, size = _HEADER.size + chained, silo.objective.dimension
    types = packed[start : start + past + sums + hidden]
    offset = _aligned(start + len(types))
    vectors: list[Tensor] = []
    numbered = list(_TYPES.values())
    for code in types:
        values = np.frombuffer(packed, numbered[code], size, offset)
        vectors.append(torch.from_numpy(values))
        offset += _aligned(values.nbytes)
    ends = past, past + sums
    chain = packed[_HEADER.size : start]
    before, between, after = vectors[: ends[0]], vectors[ends[0] : ends[1]], vectors[ends[1] :]
    return SiloState(answered, tuple(before), tuple(between), tuple(after), chain)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class _LiveState(ConfigRecord):
    """A record that packs its state only when it leaves the process, as it does after every round under Ray."""

    def __init__(self, state: SiloState) -> None:
        super().__init__()
        self.__dict__["live"] = state

    def __reduce__(self) -> tuple[type[ConfigRecord], tuple[dict[str, bytes]]]:
        return ConfigRecord, ({_KEY: pack(self.__dict__["live"])},)


class ContextStore:
    """Flower's Context: for simulations, where nothing has to survive the process."""

    def __init__(self, records: RecordDict, name: str = _RECORD) -> None:
        """`name` tells the states of several runs of one silo apart."""
        self._records, self._name = records, name

    def load(self, silo: Silo) -> SiloState:
        kept = values_in(self._records).get(self._name)
        if kept is None:
            return silo.start()
        if isinstance(kept, _LiveState):
            state: SiloState = kept.__dict__["live"]
            return state
        return unpack(bytes_in(self._records, self._name, _KEY), silo)

    def save(self, state: SiloState) -> None:
        """Called last, so that a client that failed half-way has changed nothing."""
        kept = values_in(self._records).get(self._name)
        if isinstance(kept, _LiveState):
            kept.__dict__["live"] = state
        else:
            self._records[self._name] = _LiveState(state)
