"""Workloads, matrices of mechanisms, participation patterns one by one, and how far a record moves C s."""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedpriv.noise.mechanism import Mechanism, MechanismState
from fedpriv.noise.series import Workload
from fedpriv.participation.orders import FixedOrder, MinSeparation

Matrix = NDArray[np.float64]


def workload_of(
    rounds: int,
    decay: float = 1.0,
    rounds_per_epoch: int | None = None,
    period: int | None = None,
    clips: ArrayLike = 1.0,
) -> Workload:
    """A fixed order, one pass unless `rounds_per_epoch` is given."""
    order = FixedOrder(rounds, rounds_per_epoch or rounds)
    return Workload(order, decay, np.full(rounds, clips, np.float64), period)


def separated(
    rounds: int, most: int, gap: int, decay: float = 1.0, period: int | None = None, clips: ArrayLike = 1.0
) -> Workload:
    """Records that take part at most `most` times, `gap` rounds apart."""
    return Workload(MinSeparation(rounds, most, gap), decay, np.full(rounds, clips, np.float64), period)


def stream(mechanism: Mechanism, fresh: Iterable[Tensor]) -> Iterator[tuple[Tensor, MechanismState]]:
    """Noise of each round, and the state after it."""
    state = mechanism.start()
    for t, vectors in enumerate(fresh, start=1):
        row, state = mechanism.noise(state, t, vectors)
        yield row, state


def streamed_matrix(mechanism: Mechanism, rounds: int) -> Matrix:
    """B: column i is the noise of unit vector i, row t the noise of round t."""
    return torch.stack([row for row, _ in stream(mechanism, torch.eye(rounds, dtype=torch.float64))]).numpy()


def workload_matrix(rounds: int, decay: float, period: int | None = None) -> Matrix:
    """Row t adds the decayed increments since the last restart, by the recursion that defines the sums."""
    rows = np.zeros((rounds, rounds))
    for t in range(rounds):
        restarts = t == 0 or (period is not None and t % period == 0)
        rows[t] = np.eye(rounds)[t] + (0.0 if restarts else decay * rows[t - 1])
    return rows


def patterns(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Every set of rounds (from 0) in which one record may take part."""
    schedule, rounds = workload.schedule, workload.rounds
    if isinstance(schedule, FixedOrder):
        yield from (
            tuple(range(p, rounds, schedule.rounds_per_epoch))
            for p in range(min(schedule.rounds_per_epoch, rounds))
        )
        return
    assert isinstance(schedule, MinSeparation)
    for count in range(1, schedule.max_participations + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if all(b - a >= schedule.min_separation for a, b in itertools.pairwise(chosen)):
                yield chosen


def farthest(c: Matrix, workload: Workload) -> float:
    """The farthest that one record with scalar increments ±clip can move C s: over all patterns and signs."""
    found = 0.0
    for chosen in patterns(workload):
        for signs in itertools.product((1.0, -1.0), repeat=len(chosen) - 1):
            moved = c[:, chosen] @ (workload.clips[list(chosen)] * np.array([1.0, *signs]))
            found = max(found, float(np.linalg.norm(moved)))
    return found


@st.composite
def clip_norms(draw: st.DrawFn, rounds: int) -> Matrix:
    if draw(st.booleans()):
        return np.full(rounds, draw(st.floats(0.1, 10.0)))
    return np.array(draw(st.lists(st.floats(0.1, 10.0), min_size=rounds, max_size=rounds)))
