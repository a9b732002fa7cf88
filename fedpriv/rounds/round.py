"""One round, from a query to a noisy running sum, for a silo and for all silos at once in the vectorized engine.

rows and weights   participation       which records, and what one of them weighs
s_t, q_t           `RoundStep.summed`  clipped increments, added to the running sum
z_t                `fresh_vectors`     what the owner of the noise draws for the round
q_t + (B z)_t      `RoundStep.noisy`   what the round releases, or what a server with its own noise makes of it

One round of an exact release, for a silo, for a server that adds up silos, and for a simulation of both.

s_t   `IntegerStep.sums`     every record's increments as integers of bounded norm, added exactly
y_t   `IntegerStep.noisy`    (C s)_t + z_t, z_t a discrete Gaussian: the only thing that knows records
r_t   `IntegerStep.leaving`  unit / denominator · (B y)_t, in float64: post-processing of y

One owner's noise, several rounds at a time.

Which silos of a simulation do not answer in which round, and what a server counts in their place.

In a deployment a silo is away when it is; a scenario says so beforehand, in public: `federation.away` names
rounds, `federation.drop_out` is the probability of every silo and round, by coins of the scenario's seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import RunError
from fedpriv.core.random import KeyedNormal, public_generator
from fedpriv.loss.estimators import Estimator, Round
from fedpriv.loss.objective import Objective, Records, Slots
from fedpriv.loss.running_sums import Part, RunningSum, absorb, parts_of
from fedpriv.noise.integers.fixed_point import Ints
from fedpriv.noise.integers.gaussian import round_noise
from fedpriv.noise.integers.increments import integer_sum
from fedpriv.noise.integers.plan import ExactPlan, added, leaving, private_sums
from fedpriv.noise.integers.strategies import IntegerStrategy, IntState
from fedpriv.noise.mechanism import Mechanism, MechanismState
from fedpriv.noise.sliding import check_movement
from fedpriv.participation.secret import SecretOrder
from fedpriv.rounds.plan import Plan
from fedpriv.scenario.schema import Cell


class Read(NamedTuple):
    """What a round reads, of one silo or of all of them."""

    records: Records | None
    """(..., records, ...); None in a round without any."""
    weights: Tensor
    """Of every record, (records,) or (..., records); 0 of a row that does not count."""
    rows: tuple[tuple[int, int], ...]
    """The silos in the order of their records, as in `Slots`."""


def record_weight(share: float, batch: int, batches: int) -> float:
    """What one record weighs in a round that reads `batches` batches of `batch` records, expected if sampled.

    `share` is 1 in the silo's own mean, and the silo's weight p_i in the mean over silos.

    Guarantee: the denominator is public, however many records take part.
    """
    return share / (batch * max(1, batches))


def fresh_vectors(source: KeyedNormal, mechanism: Mechanism, size: int, owner: int, t: int) -> Tensor:
    """What `mechanism` wants of round t, with variance 1 and the source's type: (size,), or (draws, size)."""
    count = mechanism.draws(t)
    drawn = source.vector(size, owner, t) if count is None else source.nodes(size, owner, t, count)
    return torch.from_numpy(drawn)


@dataclass(frozen=True)
class RoundStep:
    """The parts of a run that meet in every round."""

    estimator: Estimator
    mechanism: Mechanism
    objective: Objective

    def check_moved(self, past: tuple[Tensor, ...], t: int, query: Tensor, where: str) -> None:
        """RunError if the query (..., d) moved farther than the mechanism's sensitivity allows for."""
        if t > 1 and (bound := self.mechanism.movement) is not None:
            check_movement(bound, past[0], query, where)

    def summed(self, state: RunningSum, current: Round, query: Tensor, read: Read) -> tuple[RunningSum, Tensor]:
        """The running sum after this round's records, and how many were clipped (...); see `absorb`."""
        objective = self.objective.at(Slots(current.t, read.rows))
        return absorb(state, current, query, objective, read.records, read.weights, self.estimator.memory)

    def noisy(
        self,
        total: Tensor,
        hidden: MechanismState,
        t: int,
        fresh: Tensor | None,
        amplitude: Tensor | None = None,
    ) -> tuple[Tensor, MechanismState]:
        """`total` (..., d) with row t of the noise that `fresh` vectors make, None where nobody adds any here.

        With an `amplitude` (..., 1) that row is multiplied by it: replicates can share unit noise, (1, d), since
        mechanisms are linear.
        """
        if fresh is None:
            return total, hidden
        row, hidden = self.mechanism.noise(hidden, t, fresh)
        return total + row if amplitude is None else torch.addcmul(total, amplitude, row), hidden


@dataclass(frozen=True)
class IntegerStep:
    """The parts of an exact run that meet in every round; vectors of a round are (d,), or (draws, d) stacked."""

    plan: Plan
    exact: ExactPlan

    def shape(self, t: int) -> tuple[int, ...]:
        """Of a round's sums and of y_t."""
        count, size = self.strategy.draws(t), self.plan.objective.dimension
        return (size,) if count is None else (count, size)

    def sums(
        self, past: tuple[Tensor, ...], current: Round, query: Tensor, read: Read, silo: int
    ) -> tuple[Ints, tuple[Tensor, ...]]:
        """s_t of the records of one silo, and the queries to remember.

        Guarantee: one record moves the part of each vector by at most K under zero-out and 2 K under replace-one,
        whatever the query is; nothing but the sums depends on the records.
        """
        stretch = self.exact.run.factored.stretch(current.t)
        parts, past = parts_of(current, query, past, self.plan.estimator.memory)
        batches = max(1, self.plan.schedule.expected_batches(current.t))
        objective = self.plan.objective.at(Slots(current.t, read.rows))
        wanted: list[Part | None] = [parts.gradient]
        if current.split is not None and current.split.rounds_per_epoch > 1:
            wanted.insert(0, parts.residual)
        if parts.change is not None:
            wanted.append(parts.change)
        sums = [
            self._sum(objective, part, read, silo, norm, batches, stretch)
            for part, norm in zip(wanted, self.exact.norms(current.t), strict=True)
        ]
        return sums[0] if self.strategy.draws(current.t) is None else np.stack(sums), past

    def added(self, sums: Sequence[Ints], t: int) -> Ints:
        """Σ s_t over silos, at a server that is trusted with them; RunError for what records cannot add up to."""
        norms, most = self.exact.norms(t), self.plan.schedule.most_batches(t)
        bounds = [[size * most * norm for size in self.plan.batch_sizes] for norm in norms]
        try:
            if self.strategy.draws(t) is None:
                return added(sums, bounds[0])
            return np.stack([added([of[place] for of in sums], bound) for place, bound in enumerate(bounds)])
        except RunError as error:
            raise RunError(f"round {t}, {error}") from None

    def noisy(
        self, state: IntState, t: int, sums: Ints, key: bytes, owner: int, chain: bytes
    ) -> tuple[Ints, IntState]:
        """y_t and C's next state, which is as secret as the records.

        `chain` holds all queries up to this round's; `key` and it decide the noise, with (C s)_t itself.
        """
        draw = partial(round_noise, key, owner, t, chain)
        return private_sums(self.strategy, self.exact.claim, state, t, sums, draw)

    def leaving(self, hidden: MechanismState, t: int, noisy: Ints, records: int) -> tuple[Tensor, MechanismState]:
        """(B y)_t over the public number of `records` of a batch, float64 (d,), and B's next state."""
        factor = self.exact.lattice.unit / records
        return leaving(self.plan.mechanism, self.strategy.scales(t), hidden, t, noisy, factor)

    def nothing(self, t: int) -> Ints:
        """The sums of a round without records."""
        return np.zeros(self.shape(t), np.int64)

    @property
    def strategy(self) -> IntegerStrategy:
        return self.exact.run.factored.strategy

    def _least(self, silo: int) -> int:
        """Records that each round of a silo takes the time of at least, where it is secret who takes part."""
        return self.plan.most_held(silo) if isinstance(self.plan.schedule, SecretOrder) else 0

    def _sum(
        self,
        objective: Objective,
        part: Part | None,
        read: Read,
        silo: int,
        norm: int,
        batches: int,
        stretch: float,
    ) -> Ints:
        if part is None:
            return np.zeros(objective.dimension, np.int64)
        factor = self.exact.lattice.factor(batches) * stretch
        clip, least, counts = float(part.clip), self._least(silo), (read.weights != 0.0).numpy()
        return integer_sum(objective, part.query, clip, read.records, norm, factor, least, counts)


class DrawAhead:
    """One owner's vectors for rounds in order, drawn `ahead` at a time: a batch costs half of single draws.

    A cache and nothing more: any round may be asked for, any number of times.
    """

    def __init__(self, source: KeyedNormal, size: int, owner: int, rounds: int, ahead: int) -> None:
        self._source, self._size, self._owner, self._rounds = source, size, owner, rounds
        self._ahead = ahead
        self._first = 0
        self._drawn = np.empty((0, size), source.dtype)

    def vector(self, t: int) -> NDArray[np.floating]:
        """The vector of round t, shape (size,): do not write into it."""
        if self._ahead == 1:  # kept, it would be one long vector of every owner
            return self._source.vector(self._size, self._owner, t)
        if not self._first <= t < self._first + len(self._drawn):
            rounds = range(t, max(t, min(t + self._ahead - 1, self._rounds)) + 1)
            self._drawn = self._source.vectors(self._size, [self._owner] * len(rounds), rounds)
            self._first = t
        vector: NDArray[np.floating] = self._drawn[t - self._first]
        return vector


@dataclass(frozen=True)
class Absences:
    """Silo -> the rounds, in order, in which it is away; silos that never are have none."""

    rounds: Mapping[int, tuple[int, ...]]

    def __bool__(self) -> bool:
        return bool(self.rounds)

    def away(self, t: int) -> frozenset[int]:
        """The silos that do not answer in round t."""
        return frozenset(silo for silo, rounds in self.rounds.items() if t in rounds)


NOBODY = Absences({})


def absences_of(cell: Cell) -> Absences:
    """What the scenario says, a function of its seed; the same for every engine."""
    federation, rounds = cell.federation, cell.schedule.rounds
    away: dict[int, set[int]] = {int(silo): set(given) for silo, given in federation.away.items()}
    if federation.drop_out:
        coins = public_generator(cell.seed, "drop-outs").random((rounds, federation.silos))
        for t, silo in zip(*(coins < federation.drop_out).nonzero(), strict=True):
            away.setdefault(int(silo), set()).add(int(t) + 1)
    return Absences({silo: tuple(sorted(given)) for silo, given in sorted(away.items()) if given})


def stand_in(plan: Plan, last: Tensor, t: int) -> Tensor:
    """What a silo that is away in round t counts with, (d,) or as its message would be; `last` is what it counted
    with in the round before, zeros before round 1.

    Its increment is 0: sums go on from what they were, its weight p_i and its batch B_i stay.

    Guarantee: nothing but earlier releases enters, so that all that is released keeps what `plan.releases` claims,
    for silos whose answering depends on themselves and public things only: a silo's own noisy stream has a part
    left out, and a server with noise of its own adds as much to a sum in which a record moves less, or nothing.
    """
    if plan.of_one_round:
        return torch.zeros(plan.message_length(t), dtype=plan.message_dtype)
    return last * plan.estimator.round(t).decay
