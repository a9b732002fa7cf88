"""Measure the price of a mechanism of one's own from what it streams; its class is never believed.

In floats B is what `noise` makes of one unit vector a round, and C = B^-1 A: no certificate may be below what the
columns of that C cost.  This is a check of the class, since code can do anything to other vectors.

On integers C is what the strategy makes of one large integer a round.  The strategy is one of fedpriv's, of which
its own file proves that it streams C up to rounding for whatever numbers it has.  Noise is sized by the measured
columns: what leaves is a function of C s + z, and a wrong class can only make it useless.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.core.figures import lower_figure, upper_figure
from fedpriv.noise.buffered import IntegerBuffered
from fedpriv.noise.diagonal import IntegerLeaf, IntegerPrefix, IntegerScheduled
from fedpriv.noise.integers.fixed_point import LIMIT, rounded
from fedpriv.noise.integers.strategies import Factored, IntegerStrategy, Lattice, participations_of
from fedpriv.noise.mechanism import Columns, Mechanism
from fedpriv.noise.sensitivity import of_columns
from fedpriv.noise.toeplitz import IntegerBanded
from fedpriv.noise.tree import IntegerTree
from fedpriv.noise.workload import Floats, Workload

STRATEGIES = (IntegerPrefix, IntegerScheduled, IntegerLeaf, IntegerTree, IntegerBanded, IntegerBuffered)
MOST_ROUNDS = 2000
"""T² numbers are measured."""
_ROUNDING = 1e-6
"""Relative: more than a certificate in floats, a solved triangle and coefficients of 31 bits differ by."""
_MOST_BITS, _LEAST_BITS = 40, 20

_Made = TypeVar("_Made", bound=Callable[..., Any])


def _kept(make: _Made) -> _Made:
    """`make`, which is not asked twice for the last few arguments."""
    return cast(_Made, lru_cache(maxsize=4)(make))


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
    _check_length(name, workload)
    rows, most = _rows_of_b(mechanism, workload.rounds)
    fresh = np.diag(rows)
    if np.any(np.triu(rows, 1)) or not np.all(fresh > 0.0):
        raise InputError(f"{name}: row t of B z adds a multiple above 0 of z_t, and no later vector")
    if mechanism.fresh_std > float(np.min(fresh)) * (1.0 + _ROUNDING):
        adds = lower_figure(float(np.min(fresh)))
        raise InputError(f"{name}: fresh_std = {upper_figure(mechanism.fresh_std)}, and a round adds {adds}")
    if most > (said := mechanism.memory_vectors(workload)):
        raise InputError(f"{name}: memory_vectors = {said}, and a state holds {most}")
    c: Floats = np.linalg.solve(rows, _sums(workload)).astype(np.float64)
    moved = of_columns(_columns(c), workload).value
    _check_certificate(mechanism, workload, moved)


def measured_form(mechanism: Mechanism, workload: Workload) -> Factored:
    """The mechanism's integer half, with a sensitivity that is measured; InputError for one that does not fit.

    Guarantee: the strategy is one of fedpriv's, and what is charged is the sensitivity of its columns.
    """
    name, form = f"mechanism {mechanism.name!r}", mechanism.integer(workload)
    if not isinstance(form, Factored) or type(form.strategy) not in STRATEGIES:
        raise InputError(
            f"{name}: its integer half has a strategy of its own; accepted are fedpriv's, with other numbers: "
            f"{', '.join(kind.__name__ for kind in STRATEGIES)}"
        )
    if type(form.mechanism) is not type(mechanism):
        raise InputError(f"{name}: the mechanism of its integer half is a {type(form.mechanism).__name__}")
    _check_length(name, workload)
    decay = form.workload.decay
    if decay not in (workload.decay, rounded(workload.decay)):
        raise InputError(f"{name}: its integer half is for decay = {decay}, and here it is {workload.decay}")
    ours = dataclasses.replace(workload, decay=decay)
    if form.mechanism.integer(ours).strategy != form.strategy:
        raise InputError(f"{name}: its integer half, made once more of what it gave, is another one")
    measured = Measured(form.strategy, form.mechanism, ours)
    c, _ = _columns_of_c(form.strategy, ours.rounds)
    rows, _ = _rows_of_b(form.mechanism, ours.rounds)
    if not np.allclose(rows @ c, _sums(ours), rtol=0.0, atol=_ROUNDING * max(1.0, float(np.abs(rows).max()))):
        raise InputError(f"{name}: its noise and its integer half are no factorization of the running sums")
    _check_certificate(form.mechanism, ours, of_columns(_columns(c), ours).value)
    return measured


@dataclass(frozen=True)
class Measured(Factored):
    """A factorization whose sensitivity is that of the columns that its strategy streams."""

    def certified(self, lattice: Lattice) -> float:
        """Measured sensitivity, plus what one large integer in place of all integers can hide of a column."""
        norms = np.array([float(lattice.norm(clip)) for clip in self.workload.clips.tolist()])
        c, error = _columns_of_c(self.strategy, self.workload.rounds)
        found = of_columns(_columns(c), dataclasses.replace(self.workload, clips=norms)).value
        return found + participations_of(self.workload) * float(np.max(norms)) * error


def _check_length(name: str, workload: Workload) -> None:
    if workload.rounds > MOST_ROUNDS:
        raise InputError(
            f"{name}: what a mechanism of one's own costs is measured, for at most {MOST_ROUNDS} rounds; here are "
            f"{workload.rounds}"
        )


def _check_certificate(mechanism: Mechanism, workload: Workload, moved: float) -> None:
    said = min(mechanism.certified(workload).value, mechanism.counted(workload).value)
    if not said >= moved * (1.0 - _ROUNDING):
        raise InputError(
            f"mechanism {mechanism.name!r}: its certificate says that a record moves C s by {said:.6g} at most, "
            f"and what it streams is moved by {moved:.6g}"
        )


def _sums(workload: Workload) -> Floats:
    """A, (T, T)."""
    rounds = np.arange(workload.rounds)
    lag = np.subtract.outer(rounds, rounds)
    same = np.equal.outer(rounds // workload.block, rounds // workload.block)
    return np.where((lag >= 0) & same, float(workload.decay) ** np.maximum(lag, 0), 0.0)


def _columns(c: Floats) -> Columns:
    """Of a C whose columns are measured; products of columns count as above 0."""
    return Columns(np.sum(c**2, axis=0), lambda held: np.abs(c[:, held].T @ c[:, held]))


@_kept
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


@_kept
def _columns_of_c(strategy: IntegerStrategy, rounds: int) -> tuple[Floats, float]:
    """C over its noises' scales, (T, T); and by how much the norm of a column can differ from the true one."""
    bits = _MOST_BITS
    while strategy.reach([(1 << bits,)] * rounds).inside >= LIMIT:
        bits -= 1
    if bits < _LEAST_BITS:
        raise InputError(f"{type(strategy).__name__}: its sums grow too much for integers to measure them")
    state, c = strategy.start(), np.zeros((rounds, rounds))
    for t in range(1, rounds + 1):
        sums = np.zeros(rounds, np.int64)
        sums[t - 1] = 1 << bits
        output, state = strategy.step(state, t, sums)
        (scale,) = strategy.scales(t)
        c[t - 1] = output / (scale * 2.0**bits)
    apart = max(group.difference / Fraction(group.scale) for group in strategy.groups(rounds, 1))
    return c, math.nextafter(float(apart) * math.sqrt(rounds) / 2.0**bits, math.inf)
