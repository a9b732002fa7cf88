"""A silo's state as bytes, and the two places where they are kept.

A simulation keeps them in Flower's Context, a deployment in the silo's ledger (clients/ledger.py).
"""

import struct
from typing import Protocol

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from clients.silo import Silo, SiloState
from fedpriv.records import bytes_in
from fedpriv.running_sum import RunningSum

_RECORD, _KEY = "fedpriv-silo", "state"
_HEADER = struct.Struct("<QQ")  # the last round answered, and how many past queries there are


def pack(state: SiloState) -> bytes:
    """The header, then the sum, the past queries and the mechanism's vectors, each as its bytes."""
    vectors = (state.sum.total, *state.sum.past, *state.hidden)
    return b"".join((_HEADER.pack(state.answered, len(state.sum.past)), *(v.numpy().data for v in vectors)))


def unpack(packed: bytes, silo: Silo) -> SiloState:
    """The state over the packed bytes, without copies: nobody writes into a state's vectors."""
    answered, past = _HEADER.unpack_from(packed)
    values = torch.from_numpy(np.frombuffer(packed, silo.noise.dtype, offset=_HEADER.size))
    total, *rest = values.view(-1, silo.objective.dimension).unbind()
    return SiloState(answered, RunningSum(tuple(rest[:past]), total), tuple(rest[past:]))


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
