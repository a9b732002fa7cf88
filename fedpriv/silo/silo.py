"""One silo's side of the protocol, without Flower: it turns a query into a release.

    s_t      its records' clipped increments, added                                        `RoundSteps.sums`
    y_t      with the silo's noise, where the trust setting says that silos add it         `RoundSteps.noisy`
    leaves   untrusted: the noisy running sum       masked: y_t under masks       trusted: the sums themselves

The arithmetic of a silo with a guard is of integers; a simulation's is float64, with the seed's noise, unless
its scenario says integers.

A silo that is put back to an earlier state (a restored disk) and asked something else draws other noise, in that
round and in all that follow; asked the same, it gives the same bytes.  Masks are bound to the chain of queries
likewise, so that no two messages share one: silos that are asked the same agree on them, and a server that asks
silos different things gets a sum of masks.
"""

import dataclasses
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import RunError
from fedpriv.core.random import KeyedNormal, SamplingRandomness
from fedpriv.core.replicates import Scalar
from fedpriv.loss.objective import Batch, BatchLayout, Increment, Query, Records, RecordView
from fedpriv.participation.orders import as_row_indices
from fedpriv.plan.plan import Plan, PlannedRound
from fedpriv.plan.task import mask_absent_records
from fedpriv.protocol.messages import RecordCounts
from fedpriv.rounds.floats import FloatSteps, SeededNoise
from fedpriv.rounds.integers import IntegerSteps
from fedpriv.rounds.round import (
    RoundBatch,
    RoundState,
    RoundSteps,
    check_query_distance,
    ensure_aligned,
    is_finite,
    record_weight,
    run_silo_round,
)
from fedpriv.silo.masks import Masker

_ROUND_UP = 1.0 + 1e-6
"""Of a sum over a batch in the run's own arithmetic."""


@dataclass(frozen=True)
class BoundedObjective(RecordView):
    """Increments of `base` in float64, held to what their records can add up to.

    Guarantee: a total is finite and at most (1 + 1e-6) Σ |weight| · clip long, whatever `base` computes.  A longer
    one is shortened to that length, which moves no two totals apart; one that is not finite counts as zero.
    Neither is refused: a refusal would tell something about the records.
    """

    def for_batch(self, slots: BatchLayout) -> Self:
        base = self.base.for_batch(slots)
        return self if base is self.base else dataclasses.replace(self, base=base)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        found = self.base.increment(query, batch, clip)
        total = found.total if found.total.dtype == torch.float64 else found.total.double()
        most, length = _max_norm(batch.weights, clip), torch.linalg.vector_norm(total).item()
        if not length <= most:
            total = total * (most / length) if length < torch.inf else torch.zeros_like(total)
        return Increment(total, found.clipped_count)


def _max_norm(weights: Tensor, clip: Scalar) -> float:
    """A bound on the norm of a sum of increments of records of these weights."""
    return weights.abs().sum(dtype=torch.float64).item() * float(clip) * _ROUND_UP


@contextmanager
def without_denormals() -> Iterator[None]:
    """Denormal numbers are 0: they take many times as long, and a query can make them of some records only."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class SiloRelease(NamedTuple):
    """A silo's release of one round: the vector (d,), and what simulations tell with it."""

    vector: Tensor
    counts: RecordCounts


@dataclass(frozen=True)
class Silo:
    """A silo's records, in the order it reads them, its plan, and its source of noise, coins and masks.

    With a `key` of its own something is really released.

    Guarantee: what leaves is a function of y_t (untrusted, masked), or is s_t (a trusted server, which adds the
    noise): every record enters as integers of bounded norm, whatever it is asked.  The noise is a function of the
    key, of all queries until now and of the integers it is added to, never drawn ahead.  No evaluation of records
    ends in an exception.  In a simulation the key is the seed's, and protects nobody.
    """

    number: int
    plan: Plan
    records: Records
    noise: KeyedNormal
    key: bytes = field(default=b"", repr=False)
    """32 bytes that nobody else has, for one run, where something is really released."""
    scenario_digest: bytes = b""
    """A digest of the scenario: silos with different ones do not agree on masks."""
    may_miss_rounds: bool = False
    """Whether rounds may be missing between two that are asked for."""
    unit_order: Tensor | None = field(default=None, repr=False, kw_only=True)
    """The unit read at each place, (units,), where that is the silo's secret; None: as they are."""

    @staticmethod
    def for_release(
        number: int,
        plan: Plan,
        records: Records,
        key: bytes,
        scenario_digest: bytes = b"",
        *,
        may_miss_rounds: bool = False,
    ) -> "Silo":
        """The silo of a plan, with noise of its key alone: of integers, or none, of which nothing is claimed."""
        plan.check_release_noise()
        return Silo(number, plan, records, KeyedNormal(key, np.float64), key, scenario_digest, may_miss_rounds)

    @staticmethod
    def for_simulation(
        number: int, plan: Plan, records: Records, noise: KeyedNormal, key: bytes, *, may_miss_rounds: bool = False
    ) -> "Silo":
        """The silo of a simulation: its floating-point noise is of `noise`, and all else of integers of `key`."""
        if plan.exact_plan is None:
            return Silo(number, plan, records, noise, may_miss_rounds=may_miss_rounds)
        return Silo(number, plan, records, KeyedNormal(key, np.float64), key, may_miss_rounds=may_miss_rounds)

    def initial_state(self) -> RoundState:
        """Before round 1."""
        return self.steps.initial_state(self.number)

    def answer(self, state: RoundState, t: int, query: Tensor) -> tuple[SiloRelease, RoundState]:
        """The release of round t and the next state.

        RunError if rounds do not come in order or the query is not a finite vector of the model's length: an
        answer to anything else would not be the running sum that the noise was calibrated for.

        Guarantee: under an untrusted server the sequence of releases over the whole run keeps what
        `stream_of` claims for each record of this silo; under a trusted server releases are exact, and only
        the server may see them.  Which records a round draws by Poisson sampling never leaves this object, and
        nothing but the release depends on it, the counts of a simulation apart.
        A round that is missing counts as one whose increment is zero, and its noise is drawn and not sent: what
        is released is a part of the stream that was accounted for.
        """
        self.check_query(state, t, query)
        state, planned = self._skip_missed_rounds(state, t)
        state = RoundState(state.last_round, tuple(map(ensure_aligned, state.past_vectors)), *state[2:])
        read = self._read_batch(planned)
        vector, clipped, after = run_silo_round(
            self.steps, state, planned, ensure_aligned(query), read, self.number
        )
        counts = RecordCounts(read.weights.shape[0], None if clipped is None else int(clipped.item()))
        return SiloRelease(vector, counts), after

    def make_message(self, release: Tensor, t: int, public_keys: bytes, query_chain: bytes = b"") -> Tensor:
        """The message of round t, of `plan.message_dtype`: the release, or its masked words.

        `keys` are the public keys of all silos that the query came with, `chain` the state's after this round.

        Guarantee: masked words are uniform for everybody but the silos themselves, and the sum of all silos'
        words is the sum of their releases; see `Masker` for what this rests on.
        """
        if not self.plan.masked:
            return release.reshape(-1).to(self.plan.message_dtype)
        mask = self.masker.mask(public_keys, len(self.plan.weights), t, release.numel(), query_chain)
        return self.steps.encode_masked(release, t, self.number, mask)

    def check_query(self, state: RoundState, t: int, query: Tensor) -> None:
        """RunError, in words that depend on public values alone, for a round or a query that is not answered."""
        in_order = t == state.last_round + 1 or (self.may_miss_rounds and t > state.last_round)
        if not in_order or t > self.plan.schedule.rounds:
            raise RunError(
                f"silo {self.number} was asked for round {t} after round {state.last_round} "
                f"of {self.plan.schedule.rounds}: rounds come in order, each once"
            )
        if query.shape != (self.plan.query_length,) or query.dtype != self.records.features.dtype:
            raise RunError(
                f"silo {self.number}, round {t}: the query has shape {tuple(query.shape)} and type {query.dtype}, "
                f"expected ({self.plan.query_length},) and {self.records.features.dtype}"
            )
        if not is_finite(query):
            raise RunError(f"silo {self.number}, round {t}: the query has values that are not finite")
        check_query_distance(self.plan.mechanism, state.past_vectors, t, query, f"silo {self.number}, round {t}")

    @cached_property
    def steps(self) -> RoundSteps:
        """Steps in integers if the plan has them, else float64 sums with a simulation's noise."""
        if self.plan.exact_plan is not None:
            return IntegerSteps(self.plan, self.key)
        return FloatSteps(
            self.plan, SeededNoise(self.plan, self.noise, torch.float64), BoundedObjective(self.plan.objective)
        )

    @cached_property
    def masker(self) -> Masker:
        """Its part in the masks of this run."""
        return Masker(self.noise.derive_secret(self.number), self.number, self.scenario_digest)

    def _skip_missed_rounds(self, state: RoundState, t: int) -> tuple[RoundState, PlannedRound]:
        """Return the state when round t begins, and round t with the weight of the last answered query."""
        planned = self.plan.rounds[t - 1]
        if t == state.last_round + 1:
            return state, planned
        past = self.plan.rounds[state.last_round].step.coefficients[1:]
        for missed in range(state.last_round + 1, t):
            noisy, state = self.steps.add_noise(
                state, missed, self.steps.empty_sums(state, missed), self.number, None
            )
            _, state = self.steps.release(state, missed, noisy, self.number)
        step = planned.step._replace(coefficients=(planned.step.coefficients[0], *past))
        return state, planned._replace(step=step)

    def _read_batch(self, planned: PlannedRound) -> RoundBatch:
        """Return the records of a round with their weights in the silo's mean."""
        plan, t, size = self.plan, planned.step.t, self.plan.batch_sizes[self.number]
        taken: slice | NDArray[np.int64]
        if planned.batch_range is None:
            taken = rows = as_row_indices(
                plan.schedule.select_rows(t, size, self.number, lambda: self._sampling_randomness)
            )
        else:  # as `PublicOrder.rows`; a slice reads without a copy
            taken = slice(planned.batch_range.start * size, planned.batch_range.stop * size)
            rows = np.arange(taken.start, taken.stop)
        places = taken if self.unit_order is None else self.unit_order[taken]
        held, there = self._records_and_mask
        records = Records(ensure_aligned(held.features[places]), ensure_aligned(held.labels[places]))
        weights = there[places] * record_weight(1.0, size, planned.batch_count)
        return RoundBatch(records, weights, ((self.number, len(rows)),), rows)

    @cached_property
    def _records_and_mask(self) -> tuple[Records, Tensor]:
        """The records, with labels for all places, and 1 for each place that counts, else 0, in float64.

        `PerUnit` knows of its own which records of a unit count.
        """
        if self.plan.unit.max_records > 1:
            return self.records, torch.ones(len(self.records.labels), dtype=torch.float64)
        records, there = mask_absent_records(self.records)
        return records, there.double()

    @cached_property
    def _sampling_randomness(self) -> SamplingRandomness:
        return self.noise.sampling_randomness()


_HEADER = struct.Struct("<QIIIQ")
"""The last round answered, past vectors, sums, the mechanism's, bytes of the chain."""
_NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float64: np.dtype("<f8"),
    torch.int64: np.dtype("<i8"),
}
_ALIGNMENT = 8


def pack_state(state: RoundState) -> bytes:
    """Pack a state as a ledger keeps it: header, chain, every vector's type, then past, sums and the mechanism's.

    Each vector keeps its own type: past queries are the run's, sums integers where releases are exact and float64
    else, noise float64.
    """
    vectors, numbered = (*state.past_vectors, *state.accumulator, *state.mechanism_state), list(_NUMPY_TYPES)
    counts = len(state.past_vectors), len(state.accumulator), len(state.mechanism_state)
    header = _HEADER.pack(state.last_round, *counts, len(state.query_chain))
    types = bytes(numbered.index(vector.dtype) for vector in vectors)
    parts = [
        memoryview(header + state.query_chain + types),
        *(np.ascontiguousarray(v.numpy()).data.cast("B") for v in vectors),
    ]
    return b"".join(piece for part in parts for piece in (part, bytes(_round_up_size(len(part)) - len(part))))


def unpack_state(packed: bytes, silo: Silo) -> RoundState:
    """The state over the packed bytes, without copies: nobody writes into a state's vectors."""
    answered, past, sums, hidden, chained = _HEADER.unpack_from(packed)
    start, size = _HEADER.size + chained, silo.plan.objective.dimension
    types = packed[start : start + past + sums + hidden]
    offset = _round_up_size(start + len(types))
    vectors, numbered = list[Tensor](), list(_NUMPY_TYPES.values())
    for code in types:
        values = np.frombuffer(packed, numbered[code], size, offset)
        vectors.append(torch.from_numpy(values))
        offset += _round_up_size(values.nbytes)
    before, between, after = vectors[:past], vectors[past : past + sums], vectors[past + sums :]
    return RoundState(answered, tuple(before), tuple(between), tuple(after), packed[_HEADER.size : start])


def _round_up_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
