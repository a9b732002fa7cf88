"""A silo's state inside Flower's Context, where it survives from round to round on any engine."""

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from clients.silo import Silo, SiloState
from fedpriv.running_sum import RunningSum
from fedpriv.wire import bytes_in, number_in

_RECORD = "fedpriv-silo"


def load_state(store: RecordDict, silo: Silo) -> SiloState:
    """The state kept in a Context, or the silo's start if there is none."""
    if _RECORD not in store:
        return silo.start()
    answered, past = number_in(store, _RECORD, "answered"), number_in(store, _RECORD, "past")
    kept = np.frombuffer(bytes_in(store, _RECORD, "vectors"), silo.noise.dtype)
    total, *rest = torch.from_numpy(kept.reshape(-1, silo.objective.dimension).copy())
    return SiloState(answered, RunningSum(tuple(rest[:past]), total), tuple(rest[past:]))


def save_state(store: RecordDict, state: SiloState) -> None:
    """Keep the state; called last, so that a client that failed half-way has changed nothing."""
    vectors = torch.stack([state.sum.total, *state.sum.past, *state.hidden]).numpy().tobytes()
    store[_RECORD] = ConfigRecord({"answered": state.answered, "past": len(state.sum.past), "vectors": vectors})
