"""A silo's state as bytes, as the silo's ledger keeps them (fedpriv/silo/ledger.py)."""

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpriv.rounds.round import State
from fedpriv.silo.silo import Silo

_HEADER = struct.Struct(
    "<QIIIQ"
)  # the last round answered, past vectors, sums, the mechanism's, bytes of the chain
_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float64: np.dtype("<f8"),
    torch.int64: np.dtype("<i8"),
}
_ALIGNED = 8


def pack(state: State) -> bytes:
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


def unpack(packed: bytes, silo: Silo) -> State:
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
    return State(answered, tuple(before), tuple(between), tuple(after), chain)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
