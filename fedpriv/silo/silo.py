"""One silo's side of the protocol, without Flower: it turns a query into a release.

    q_t = decay · q_{t-1} + mean over its batch of clipped increments
    release = q_t + row t of the mechanism's noise, with the silo's own standard deviation

The noise is there only where the trust setting says that silos add it.  Where the server is to learn sums over
silos only, the release leaves as p_i · release on the plan's lattice, under the silo's mask.

Sums, noise and the mechanism's state are float64.  A `Silo` is a simulation's: its noise is the seed's, in the
run's own type, and what leaves is converted.  What a silo really releases is fedpriv/silo/silo.py's.

What a silo adds to its sum, checked where it enters: float64, and no longer than its records' clips.

A silo whose releases are exact: integers from its records to the noise, and nothing of the noise used twice.

    s_t      `IntegerStep.sums`: increments truncated to the lattice, added exactly
    y_t      (C s)_t + z_t, keyed by (key, silo, round, chain, (C s)_t); chain_t = H(chain_{t-1}, query)
    leaves   untrusted: unit / B_i · (B y)_t       masked: y_t modulo 2^w plus masks       trusted: s_t itself

A silo that is put back to an earlier state (a restored disk) and asked something else draws other noise, in that
round and in all that follow; asked the same, it gives the same bytes.  Masks are bound to the chain likewise, so
that no two messages share one: silos that are asked the same agree on them, and a server that asks silos different
things gets a sum of masks.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.errors import RunError
from fedpriv.core.random import KeyedCoins, KeyedNormal
from fedpriv.core.replicates import Scalar
from fedpriv.loss.alone import aligned
from fedpriv.loss.estimators import Round
from fedpriv.loss.objective import Batch, Increment, Objective, Query, Records, Slots, View
from fedpriv.loss.running_sums import RunningSum, point_of, remembered
from fedpriv.noise.integers.fixed_point import Ints, packed
from fedpriv.noise.integers.gaussian import START, linked, linked_missed
from fedpriv.noise.mechanism import MechanismState
from fedpriv.protocol.arrays import Counts, is_finite
from fedpriv.rounds.plan import Plan
from fedpriv.rounds.round import DrawAhead, IntegerStep, Read, RoundStep, fresh_vectors, record_weight
from fedpriv.rounds.task import counting
from fedpriv.silo.masks import Masker

_ROUNDING = 1.0 + 1e-6
"""Of a sum over a batch in the run's own arithmetic."""


@dataclass(frozen=True)
class Bounded(View):
    """Increments of `base` in float64, held to what their records can add up to.

    Guarantee: a total is finite and at most (1 + 1e-6) Σ |weight| · clip long, whatever `base` computes.  A longer
    one is shortened to that length, which moves no two totals apart; one that is not finite counts as zero.
    Neither is refused: a refusal would tell something about the records.
    """

    def at(self, slots: Slots) -> Self:
        base = self.base.at(slots)
        return self if base is self.base else dataclasses.replace(self, base=base)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        found = self.base.increment(query, batch, clip)
        total = found.total if found.total.dtype == torch.float64 else found.total.double()
        most, length = _most(batch.weights, clip), float(torch.linalg.vector_norm(total))
        if not length <= most:
            total = total * (most / length) if length < torch.inf else torch.zeros_like(total)
        return Increment(total, found.clipped)


def _most(weights: Tensor, clip: Scalar) -> float:
    """What increments of records of these weights can add up to."""
    return float(weights.double().abs().sum()) * float(clip) * _ROUNDING


@contextmanager
def without_denormals() -> Iterator[None]:
    """Denormal numbers are 0: they take many times as long, and a query can make them of some records only."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


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
    """A digest of all queries until now, where the noise depends on them; see fedpriv/silo/silo.py."""

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


@dataclass(frozen=True)
class ReleasingSilo(Silo):
    """`Silo` with a key of its own for noise and masks, for one run; `plan.exact` says on which lattice.

    Guarantee: what leaves is a function of y_t (untrusted, masked), or is s_t (a trusted server, which adds the
    noise): every record enters as integers of bounded norm, whatever it is asked.  The noise is a function of the
    key, of all queries until now and of the integers it is added to, never drawn ahead.  No evaluation of records
    ends in an exception.  In a simulation the key is the seed's, and protects nobody.
    """

    scenario: bytes = b""
    """A digest of the scenario: silos with different ones do not agree on masks."""

    @staticmethod
    def of(number: int, plan: Plan, records: Records, key: bytes, scenario: bytes, *, gaps: bool = False) -> Silo:
        """The silo of a plan: a plain one where there is no noise, of which nothing is claimed."""
        noise = KeyedNormal(key, np.float64)
        if plan.exact is None:
            if plan.noise.sources:
                raise ValueError("noise that is really released needs a plan made for it: plan_of(released=True)")
            return Silo(number, plan, plan.objective, records, noise, gaps, key)
        return ReleasingSilo(number, plan, plan.objective, records, noise, gaps, key, scenario)

    def start(self) -> SiloState:
        """Whoever adds no noise has no strategy, and who is masked no B: those are the server's."""
        sums = () if self.plan.trust.noise_at_server else self._integers.strategy.start()
        hidden = self.plan.mechanism.start() if self.plan.trust.private_messages else ()
        return SiloState(0, (), _tensors(sums), hidden, START)

    def answer(self, state: SiloState, t: int, query: Tensor) -> tuple[Release, SiloState]:
        """As for `Silo`; the release is s_t, y_t or (B y)_t in real units, whatever the trust setting wants."""
        self.check(state, t, query)
        state, current = self._after_gap(state, t)
        read, point = self._read(t), point_of(current, query, state.past)
        sums, past = self._integers.sums(state.past, current, point, read, self.number)
        chain = linked(state.chain, query.contiguous().numpy().tobytes())
        vector, after = self._released(state, t, sums, chain)
        past = remembered(current, state.past, past, vector)
        return Release(vector, Counts(read.weights.shape[0], None)), after._replace(past=past)

    def message(self, release: Tensor, t: int, keys: bytes, chain: bytes = b"") -> Tensor:
        if not self.plan.masked:
            return release.reshape(-1).to(self.plan.message_dtype)
        silos, noisy = len(self.plan.weights), release.numpy().reshape(-1)
        mask = self.masker.mask(keys, silos, t, len(noisy), chain)
        words = packed(noisy, mask, self._integers.exact.run.word)
        return torch.frombuffer(bytearray(words), dtype=torch.uint8)

    def _read(self, t: int) -> Read:
        """As for `Silo`; a secret round into which nobody was drawn is like any other."""
        read = super()._read(t)
        if read.records is None and self.plan.schedule.secret:
            return read._replace(records=Records(*(column[:0] for column in self.records)))
        return read

    @cached_property
    def masker(self) -> Masker:
        return Masker(self.noise.secret(self.number), self.number, self.scenario)

    @cached_property
    def _integers(self) -> IntegerStep:
        assert self.plan.exact is not None  # as `of` says
        return IntegerStep(self.plan, self.plan.exact)

    def _missed(self, state: SiloState, t: int) -> SiloState:
        _, after = self._released(state, t, self._integers.nothing(t), linked_missed(state.chain))
        return after

    def _released(self, state: SiloState, t: int, sums: Ints, chain: bytes) -> tuple[Tensor, SiloState]:
        """What round t releases of these sums, and the state after it, past queries apart."""
        step, trust = self._integers, self.plan.trust
        if trust.noise_at_server:
            return torch.from_numpy(sums), SiloState(t, state.past, (), (), chain)
        strategy = tuple(vector.numpy() for vector in state.sums)
        noisy, strategy = step.noisy(strategy, t, sums, self.key, self.number, chain)
        vector, hidden = torch.from_numpy(noisy), state.hidden
        if trust.private_messages:
            vector, hidden = step.leaving(hidden, t, noisy, self.plan.batch_sizes[self.number])
        return vector, SiloState(t, state.past, _tensors(strategy), hidden, chain)


def _tensors(vectors: tuple[Ints, ...]) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, vectors))
