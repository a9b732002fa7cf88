"""How long a round of a mechanism's noise takes on this machine."""

import time

import torch

from fedpriv.mechanisms import Mechanism, Workload

_TIMED = 16
_MOST_VECTORS = 128


def seconds_per_round(mechanism: Mechanism, workload: Workload, dimension: int) -> float | None:
    """Seconds for a round in one thread once the state is full, fresh vector drawn before; float32.

    None for a state of more than 128 vectors, and for a run of one round.
    """
    vectors, rounds = mechanism.memory_vectors(workload), workload.rounds
    if vectors > _MOST_VECTORS or rounds < 2:
        return None
    first = max(1, min(vectors, rounds - _TIMED))
    last = min(first + _TIMED, rounds)
    fresh, state, threads = torch.randn(dimension), mechanism.start(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for t in range(1, first + 1):
            _, state = mechanism.noise(state, t, fresh)
        started = time.perf_counter()
        for t in range(first + 1, last + 1):
            _, state = mechanism.noise(state, t, fresh)
        return (time.perf_counter() - started) / (last - first)
    finally:
        torch.set_num_threads(threads)
