"""Who takes part when, as tests of participation tabulate it."""

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.random import SamplingRandomness, simulation_noise
from fedpriv.participation.orders import Participation


def coins(seed: int = 0) -> SamplingRandomness:
    return simulation_noise(seed, np.float64).sampling_randomness()


def tabulate(order: Participation, batch: int, silo: int = 0, seed: int = 0) -> NDArray[np.bool_]:
    """Whether each record (row) takes part in each round (column)."""
    table = np.zeros((order.batches_per_silo * batch, order.rounds), np.bool_)
    for t in range(1, order.rounds + 1):
        table[order.select_rows(t, batch, silo, lambda: coins(seed)), t - 1] = True
    return table
