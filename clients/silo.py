"""One silo's side of the protocol, without Flower: it turns a query into a release.

    q_t = decay · q_{t-1} + mean over its batch of clipped increments
    release = q_t + row t of the mechanism's noise, with the silo's own standard deviation

The noise is there only where the trust setting says that silos add it.  Where the server is to learn sums over
silos only, the release leaves as p_i · release on the plan's lattice, under the silo's mask.

Sums, noise and the mechanism's state are float64.  A `Silo` is a simulation's: its noise is the seed's, in the
run's own type, and what leaves is converted.  What a silo really releases is clients/releasing.py's.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.clients.increments import Bounded
from fedpriv.errors import RunError
from fedpriv.estimators.local_steps import point_of, remembered
from fedpriv.estimators.round import Round
from fedpriv.estimators.running_sum import RunningSum
from fedpriv.mechanisms import MechanismState
from fedpriv.objectives import Objective, Records
from fedpriv.objectives.alone import aligned
from fedpriv.protocol.arrays import Counts, is_finite
from fedpriv.randomness import KeyedCoins, KeyedNormal
from fedpriv.running.draw_ahead import DrawAhead
from fedpriv.running.plan import Plan
from fedpriv.running.round_step import Read, RoundStep, fresh_vectors, record_weight
from fedpriv.running.unit_rows import counting
from fedpriv.secure_aggregation.masks import Masker

_ROUNDS_AHEAD = 16
_VALUES_AHEAD = 2**26  # of noise that all silos together hold ahead, when one process simulates them


class SiloState(NamedTuple):
    """What a silo keeps between rounds; all vectors (d,)."""

    answered: int
    """The last round that was answered."""
    past: tuple[Tensor, ...]
    """What the estimator remembers."""
    sums: tuple[Tensor, ...]
    """The running sum; for exact releases the strategy's integers."""
    hidden: MechanismState
    chain: bytes = b""
    """A digest of all queries until now, where the noise depends on them; see clients/releasing.py."""

    @property
    def sum(self) -> RunningSum:
        """The running sum of a simulation."""
        (total,) = self.sums
        return RunningSum(self.past, total)


class Release(NamedTuple):
    """A silo's release of one round: the vector (d,) in float64, and what simulations tell with it."""

    vector: Tensor
    counts: Counts


@dataclass(frozen=True)
class Silo:
    """A silo's records, in the order it reads them, its plan and its source of noise."""

    number: int
    plan: Plan
    objective: Objective
    records: Records
    noise: KeyedNormal
    gaps: bool = False
    """Whether rounds may be missing between two that are asked for."""
    order: Tensor | None = field(default=None, repr=False, kw_only=True)
    """Which unit is read at each place, (units,), where that is the silo's secret; None: as they are."""
    key: bytes = field(default=b"", repr=False)
    """32 bytes that nobody else has, for one run, where something is really released."""

    def start(self) -> SiloState:
        nothing = torch.zeros(self.objective.dimension, dtype=torch.float64)
        return SiloState(0, (), (nothing,), self.plan.mechanism.start())

    def answer(self, state: SiloState, t: int, query: Tensor) -> tuple[Release, SiloState]:
        """The release of round t and the next state.

        RunError if rounds do not come in order or the query is not a finite vector of the model's length: an
        answer to anything else would not be the running sum that the noise was calibrated for.

        Guarantee: under an untrusted server the sequence of releases over the whole run keeps what
        `plan.stream_of` claims for each record of this silo; under a trusted server releases are exact, and only
        the server may see them.  Which records a round draws by Poisson sampling never leaves this object, and
        nothing but the release depends on it, the counts of a simulation apart.
        A round that is missing counts as one whose increment is zero, and its noise is drawn and not sent: what
        is released is a part of the stream that was accounted for.
        """
        self.check(state, t, query)
        state, current = self._after_gap(state, t)
        past = tuple(map(aligned, state.past))
        read, point = self._read(t), point_of(current, aligned(query), past)
        (past, total), clipped = self._step.summed(RunningSum(past, state.sum.total), current, point, read)
        vector, hidden = self._step.noisy(total, state.hidden, t, self._noise(t))
        past = remembered(current, state.past, past, vector)
        return Release(vector, Counts(read.weights.shape[0], int(clipped))), SiloState(t, past, (total,), hidden)

    def message(self, release: Tensor, t: int, keys: bytes, chain: bytes = b"") -> Tensor:
        """What leaves the silo in round t, of `plan.message_dtype`: the release, or its masked words.

        `keys` are the public keys of all silos that the query came with, `chain` the state's after this round.

        Guarantee: masked words are uniform for everybody but the silos themselves, and the sum of all silos'
        words is the sum of their releases; see `Masker` for what this rests on.
        """
        lattice = self.plan.lattice
        if lattice is None:
            return release.to(self.plan.message_dtype)
        try:
            words = lattice.encode(self.plan.weights[self.number] * release.numpy())
        except RunError as error:
            raise RunError(f"silo {self.number}, round {t}: {error}") from None
        words += self.masker.mask(keys, len(self.plan.weights), t, len(words), chain)
        return torch.from_numpy(words)

    @cached_property
    def masker(self) -> Masker:
        """Its part in the masks of this run."""
        return Masker(self.noise.secret(self.number), self.number)

    def _after_gap(self, state: SiloState, t: int) -> tuple[SiloState, Round]:
        """The state when round t begins, and round t with the weight of the query that was answered last."""
        current = self.plan.rounds[t - 1]
        if t == state.answered + 1:
            return state, current
        past = self.plan.rounds[state.answered].coefficients[1:]
        for missed in range(state.answered + 1, t):
            state = self._missed(state, missed)
        return state, current._replace(coefficients=(current.coefficients[0], *past))

    def _missed(self, state: SiloState, t: int) -> SiloState:
        """The state after a round that nobody asked for."""
        total = state.sum.total * self.plan.rounds[t - 1].decay
        _, hidden = self._step.noisy(total, state.hidden, t, self._noise(t))
        return SiloState(t, state.past, (total,), hidden)

    def check(self, state: SiloState, t: int, query: Tensor) -> None:
        """RunError, in words that depend on public values alone, for a round or a query that is not answered."""
        in_order = t == state.answered + 1 or (self.gaps and t > state.answered)
        if not in_order or t > self.plan.schedule.rounds:
            raise RunError(
                f"silo {self.number} was asked for round {t} after round {state.answered} "
                f"of {self.plan.schedule.rounds}: rounds come in order, each once"
            )
        if query.shape != (self.plan.query_length,) or query.dtype != self.records.features.dtype:
            raise RunError(
                f"silo {self.number}, round {t}: the query has shape {tuple(query.shape)} and type {query.dtype}, "
                f"expected ({self.plan.query_length},) and {self.records.features.dtype}"
            )
        if not self._is_finite(query):
            raise RunError(f"silo {self.number}, round {t}: the query has values that are not finite")
        self._step.check_moved(state.past, t, query, f"silo {self.number}, round {t}")

    def _is_finite(self, query: Tensor) -> bool:
        return is_finite(query)

    @cached_property
    def _step(self) -> RoundStep:
        return RoundStep(self.plan.estimator, self.plan.mechanism, Bounded(self.objective))

    def _noise(self, t: int) -> Tensor | None:
        """Round t's fresh vectors with this silo's standard deviation, None if it adds no noise."""
        std = float(self.plan.noise.std_of(self.number))
        return self._fresh(t).mul_(std) if std else None

    def _fresh(self, t: int) -> Tensor:
        """Round t's fresh vectors, of variance 1 and float64, the caller's own; see `fresh_vectors`."""
        if self.plan.mechanism.draws(t) is None:
            return torch.from_numpy(self._noise_ahead.vector(t)).to(torch.float64, copy=True)
        drawn = fresh_vectors(self.noise, self.plan.mechanism, self.objective.dimension, self.number, t)
        return drawn.to(torch.float64)

    def _read(self, t: int) -> Read:
        """The records of round t with their weights in the silo's mean."""
        schedule, size = self.plan.schedule, self.plan.batch_sizes[self.number]
        rows = schedule.rows(t, size, self.number, lambda: self._coins)
        places = rows if self.order is None else self.order[rows]
        records = Records(*(aligned(column[places]) for column in self.records))
        count = len(records.labels)
        weight = record_weight(1.0, size, schedule.expected_batches(t))
        weights = torch.full((count,), weight, dtype=torch.float64)
        if self.plan.unit.records == 1:  # of several, `PerUnit` leaves out those that are not there
            records, there = counting(records)
            weights.masked_fill_(~there, 0.0)
        return Read(records if count else None, weights, ((self.number, count),))

    @cached_property
    def _coins(self) -> KeyedCoins:
        return self.noise.coins()

    @cached_property
    def _noise_ahead(self) -> DrawAhead:
        size = self.objective.dimension
        ahead = max(1, min(_ROUNDS_AHEAD, _VALUES_AHEAD // (size * len(self.plan.batch_sizes))))
        return DrawAhead(self.noise, size, self.number, self.plan.schedule.rounds, ahead)
