"""Measure the price of a mechanism of one's own from what it streams; its class is never believed.

B is what `noise` makes of one unit vector a round, and C = B^-1 A: no certificate may be below what the columns of
that C cost.  This is a check of the class, since code can do anything to other vectors.
"""

from functools import lru_cache
from typing import Any, cast

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.core.figures import lower_figure, upper_figure
from fedpriv.noise.mechanism import Columns, Mechanism
from fedpriv.noise.sensitivity import of_columns
from fedpriv.noise.workload import Floats, Workload

MOST_ROUNDS = 2000
"""T² numbers are measured."""
_ROUNDING = 1e-6
"""Relative: more than a certificate in floats and a solved triangle differ by."""


def check_noise(mechanism: Mechanism, workload: Workload) -> None:
    """InputError for a mechanism that does not do what it says of itself in a workload, as far as can be measured.

    Guarantee: what passes has a certificate that is not below the sensitivity of C = B^-1 A, for the B that its
    `noise` applies to unit vectors, and is asked in public orders, for any queries.
    """
    name = f"mechanism {mechanism.name!r}"
    if getattr(workload.schedule, "secret", False):
        raise InputError(f"{name}: secret participation is accounted for with fedpriv's own mechanisms only")
    if mechanism.movement is not None or mechanism.assumption is not None:
        raise InputError(f"{name}: a mechanism of one's own promises its privacy for any queries and any loss")
    if workload.rounds > MOST_ROUNDS:
        raise InputError(
            f"{name}: what a mechanism of one's own costs is measured, for at most {MOST_ROUNDS} rounds; here are "
            f"{workload.rounds}"
        )
    rows, most = _rows_of_b(cast(Any, mechanism), workload.rounds)
    fresh = np.diag(rows)
    if np.any(np.triu(rows, 1)) or not np.all(fresh > 0.0):
        raise InputError(f"{name}: row t of B z adds a multiple above 0 of z_t, and no later vector")
    if mechanism.fresh_std > float(np.min(fresh)) * (1.0 + _ROUNDING):
        adds = lower_figure(float(np.min(fresh)))
        raise InputError(f"{name}: fresh_std = {upper_figure(mechanism.fresh_std)}, and a round adds {adds}")
    if most > (said := mechanism.memory_vectors(workload)):
        raise InputError(f"{name}: memory_vectors = {said}, and a state holds {most}")
    c: Floats = np.linalg.solve(rows, _sums(workload)).astype(np.float64)
    products = Columns(np.sum(c**2, axis=0), lambda held: np.abs(c[:, held].T @ c[:, held]))
    moved = of_columns(products, workload).value
    charged = min(mechanism.certified(workload).value, mechanism.counted(workload).value)
    if not charged >= moved * (1.0 - _ROUNDING):
        raise InputError(
            f"{name}: its certificate says that a record moves C s by {charged:.6g} at most, and what it streams "
            f"is moved by {moved:.6g}"
        )


def _sums(workload: Workload) -> Floats:
    """A, (T, T)."""
    rounds = np.arange(workload.rounds)
    lag = np.subtract.outer(rounds, rounds)
    same = np.equal.outer(rounds // workload.block, rounds // workload.block)
    return np.where((lag >= 0) & same, float(workload.decay) ** np.maximum(lag, 0), 0.0)


@lru_cache(maxsize=4)
def _rows_of_b(mechanism: Mechanism, rounds: int) -> tuple[Floats, int]:
    """B, (T, T), of unit vectors that `noise` gets; and the most vectors that a state holds."""
    import torch

    state, rows, most = mechanism.start(), np.zeros((rounds, rounds)), 0
    for t, fresh in enumerate(torch.eye(rounds, dtype=torch.float64), start=1):
        if mechanism.draws(t) is not None:
            raise InputError(f"mechanism {mechanism.name!r}: a mechanism of one's own takes one vector a round")
        row, state = mechanism.noise(state, t, fresh)
        rows[t - 1], most = row.numpy(), max(most, len(state))
    return rows, most
