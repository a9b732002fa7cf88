"""A silo's state as plain numbers and bytes, and the two places where it is kept.

A simulation keeps it in Flower's Context, a deployment in the silo's ledger (clients/ledger.py).
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from clients.silo import Silo, SiloState
from fedpriv.running_sum import RunningSum
from fedpriv.wire import bytes_in, number_in


class PackedState(NamedTuple):
    """A `SiloState`: the last round answered, how many past queries there are, and all vectors in a row."""

    answered: int
    past: int
    vectors: bytes


def pack(state: SiloState) -> PackedState:
    vectors = torch.stack([state.sum.total, *state.sum.past, *state.hidden]).numpy().tobytes()
    return PackedState(state.answered, len(state.sum.past), vectors)


def unpack(packed: PackedState, silo: Silo) -> SiloState:
    rows = np.frombuffer(packed.vectors, silo.noise.dtype).reshape(-1, silo.objective.dimension)
    total, *rest = torch.from_numpy(rows.copy())
    past, hidden = tuple(rest[: packed.past]), tuple(rest[packed.past :])
    return SiloState(packed.answered, RunningSum(past, total), hidden)


class SiloStore(Protocol):
    """Where a silo's state survives from round to round."""

    def load(self, silo: Silo) -> SiloState:
        """The state kept, or the silo's start if there is none."""
        ...

    def save(self, state: SiloState) -> None: ...


class ContextStore:
    """Flower's Context: for simulations, where nothing has to survive the process."""

    _RECORD = "fedpriv-silo"

    def __init__(self, records: RecordDict) -> None:
        self._records = records

    def load(self, silo: Silo) -> SiloState:
        records, name = self._records, self._RECORD
        if name not in records:
            return silo.start()
        answered, past = number_in(records, name, "answered"), number_in(records, name, "past")
        return unpack(PackedState(answered, past, bytes_in(records, name, "vectors")), silo)

    def save(self, state: SiloState) -> None:
        """Called last, so that a client that failed half-way has changed nothing."""
        self._records[self._RECORD] = ConfigRecord(pack(state)._asdict())
