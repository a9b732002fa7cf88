"""Silo in the protocol of a round, without Flower: it turns a query into a release and a message.

* An increment is a record's clipped contribution to a round, such as its gradient at the query.
* s_t is the sum of the increments of the silo's records in round t.  C is the matrix of a noise mechanism, and y_t
  is (C s)_t with the silo's noise.
* A release is the vector that a silo computes for a round, and a message is the form in which it is sent: with
  noise, with noise under a mask, or without noise to a server that adds it.
* The state is what a silo keeps from one round to the next.  Its query chain is a digest of all queries and missed
  rounds so far, or b"" in floating point.
* A batch is the records that a round reads.  A dummy record, which does not count, has weight 0, or is left out
  of its unit's increment if units have several records.
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
"""Factor for rounding errors of a sum over a batch in the run's arithmetic."""


@dataclass(frozen=True)
class BoundedObjective(RecordView):
    """Increments of `base`, with totals in float64 of at most the norm that clipping implies.

    A total is the sum of the increments of a batch, each clipped and times its record's weight.

    Guarantee: a total is finite and at most (1 + 1e-6) Σ |weight| · clip long, up to rounding in float64, whatever
    `base` computes.  A longer total is scaled to that length, which increases the distance of no two totals of
    records with the same weights.  A total that is not finite, or whose norm overflows, counts as zero, and is not
    refused, because a refusal would reveal something about the records.
    """

    def for_batch(self, slots: BatchLayout) -> Self:
        base = self.base.for_batch(slots)
        return self if base is self.base else dataclasses.replace(self, base=base)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Return the increment of `base` with a bounded total, (d,), float64.

        Args:
            query: Points at which gradients are computed, and their coefficients.
            batch: Records of the round and their weights.
            clip: Largest norm of one record's increment.
        """
        increment = self.base.increment(query, batch, clip)
        total = increment.total if increment.total.dtype == torch.float64 else increment.total.double()
        max_norm, length = _max_norm(batch.weights, clip), torch.linalg.vector_norm(total).item()
        if not length <= max_norm:  # `not` with `<=` includes a norm that is NaN.
            total = total * (max_norm / length) if length < torch.inf else torch.zeros_like(total)
        return Increment(total, increment.clipped_count)


def _max_norm(weights: Tensor, clip: Scalar) -> float:
    """Bound on the norm of a sum of increments with these weights, (1 + 1e-6) Σ |weight| · clip."""
    return weights.abs().sum(dtype=torch.float64).item() * float(clip) * _ROUND_UP


@contextmanager
def without_denormals() -> Iterator[None]:
    """Flush denormal numbers to 0 in the block, in this thread, on processors that can.

    Arithmetic with denormals is many times slower, and a query can produce them for some records only, so that the
    time of a reply would depend on the records.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class SiloRelease(NamedTuple):
    """Release of a silo in one round: its vector, and the record counts that simulations report."""

    vector: Tensor
    counts: RecordCounts


@dataclass(frozen=True)
class Silo:
    """Silo: its records, the order in which it reads them, its plan, and its source of noise and masks.

    Sampling randomness comes from the source of the noise.

    Guarantee: in integers the message is s_t if a trusted server adds the noise, and otherwise a function of
    y_1, …, y_t and of any mask.  Every record enters as integers of bounded norm, whatever the query is.  The
    noise is a function of the key, of all queries and missed rounds until now and of the integers to which it is
    added, and is never drawn in advance.  No evaluation of records raises an Exception because of a record.  In a
    simulation the key comes from the seed, and protects nobody.
    """

    number: int
    plan: Plan
    records: Records
    noise: KeyedNormal
    key: bytes = field(default=b"", repr=False)
    """Key of one run, 32 bytes, or empty in a simulation in floating point."""
    scenario_digest: bytes = b""
    """Digest of the scenario, on which masks depend."""
    may_miss_rounds: bool = False
    """Whether rounds may be missing between two queries."""
    unit_order: Tensor | None = field(default=None, repr=False, kw_only=True)
    """Unit at each position of the secret reading order, (units,), or None for the order of the records."""

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
        """Build the silo of a real run, with all noise from its key.

        Args:
            number: Number of the silo.
            plan: Plan of the run.
            records: Records, which are read in this order as long as `unit_order` is None.
            key: 32 bytes that only this silo has, for this run.
            scenario_digest: Digest of the scenario.
            may_miss_rounds: Whether rounds may be missing between two queries.

        Raises:
            ValueError: If the plan has noise in floating point.
        """
        plan.check_release_noise()
        return Silo(number, plan, records, KeyedNormal(key, np.float64), key, scenario_digest, may_miss_rounds)

    @staticmethod
    def for_simulation(
        number: int, plan: Plan, records: Records, noise: KeyedNormal, key: bytes, *, may_miss_rounds: bool = False
    ) -> "Silo":
        """Build the silo of a simulation.

        In floating point all randomness of the silo comes from `noise`, and in integers all of it from `key`.
        """
        if plan.exact_plan is None:
            return Silo(number, plan, records, noise, may_miss_rounds=may_miss_rounds)
        return Silo(number, plan, records, KeyedNormal(key, np.float64), key, may_miss_rounds=may_miss_rounds)

    def initial_state(self) -> RoundState:
        """Return the state before round 1."""
        return self.steps.initial_state(self.number)

    def answer(self, state: RoundState, t: int, query: Tensor) -> tuple[SiloRelease, RoundState]:
        """Return the release of round t and the next state.

        Rounds that were missed since the last answered one count as rounds whose sum of increments is zero.  Their
        noise, if this silo adds any, is drawn and not sent.

        Guarantee: under an untrusted server the sequence of releases over the whole run keeps the privacy claim
        of the silo's own releases (`make_silo_stream`) for each unit of this silo, such as a record.  Under a
        trusted server releases are exact, and only the server may see them.  The choice of the records that a
        round draws in secret is no part of the result, but vector, state, and counts, which only simulations
        report, depend on it.

        Args:
            state: State after the last answered round.
            t: Round, from 1.
            query: Query of the round, (d,).

        Raises:
            RunError: If `check_query` refuses the round or the query.
        """
        self.check_query(state, t, query)
        state, planned_round = self._skip_missed_rounds(state, t)
        # A stored state has other memory than the one that was computed, and its products could have other bits.
        state = RoundState(state.last_round, tuple(map(ensure_aligned, state.past_vectors)), *state[2:])
        batch = self._read_batch(planned_round)
        vector, clipped_count, next_state = run_silo_round(
            self.steps, state, planned_round, ensure_aligned(query), batch, self.number
        )
        counts = RecordCounts(batch.weights.shape[0], None if clipped_count is None else int(clipped_count.item()))
        return SiloRelease(vector, counts), next_state

    def make_message(self, release: Tensor, t: int, public_keys: bytes, query_chain: bytes = b"") -> Tensor:
        """Make the message of round t, of `plan.message_dtype`: the release, or its encoding under a mask.

        Guarantee: everybody but the silos themselves learns from all masked messages of a round only their sum,
        which is that of the encoded releases (`Masker` states the assumptions).

        Args:
            release: Release of the round.
            t: Round.
            public_keys: Public keys of all silos, which come with the query, or b"" without masks.
            query_chain: Query chain in the state after this round, on which the mask depends.

        Raises:
            RunError: If no mask can be derived from the public keys, or the release cannot be encoded.
        """
        if not self.plan.masked:
            return release.reshape(-1).to(self.plan.message_dtype)
        mask = self.masker.mask(public_keys, len(self.plan.weights), t, release.numel(), query_chain)
        return self.steps.encode_masked(release, t, self.number, mask)

    def check_query(self, state: RoundState, t: int, query: Tensor) -> None:
        """Refuse a round out of order, and a query that the run cannot have.

        Args:
            state: State after the last answered round.
            t: Round of the query.
            query: Query of the round, (d,).

        Raises:
            RunError: If the round is out of order or after the last one, or the query has another shape or type,
                is not finite (`is_finite`), or moved farther than the noise assumes.
        """
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
        """Steps in integers if the plan has them, or float64 sums with a simulation's noise, if any."""
        if self.plan.exact_plan is not None:
            return IntegerSteps(self.plan, self.key)
        return FloatSteps(
            self.plan, SeededNoise(self.plan, self.noise, torch.float64), BoundedObjective(self.plan.objective)
        )

    @cached_property
    def masker(self) -> Masker:
        """Masks of this silo in this run."""
        return Masker(self.noise.derive_secret(self.number), self.number, self.scenario_digest)

    def _skip_missed_rounds(self, state: RoundState, t: int) -> tuple[RoundState, PlannedRound]:
        """Return the state at the start of round t after missed rounds, and round t's plan for this state.

        Missed rounds count as rounds whose sum of increments is zero.
        """
        planned_round = self.plan.rounds[t - 1]
        if t == state.last_round + 1:
            return state, planned_round
        # The state has the past queries of the first missed round, and so round t takes that round's coefficients.
        past_coefficients = self.plan.rounds[state.last_round].step.coefficients[1:]
        for missed_round in range(state.last_round + 1, t):
            noisy_sums, state = self.steps.add_noise(
                state, missed_round, self.steps.empty_sums(state, missed_round), self.number, None
            )
            _, state = self.steps.release(state, missed_round, noisy_sums, self.number)
        step = planned_round.step._replace(coefficients=(planned_round.step.coefficients[0], *past_coefficients))
        return state, planned_round._replace(step=step)

    def _read_batch(self, planned_round: PlannedRound) -> RoundBatch:
        """Return the records of a round, (rows, …), with their weights in the silo's mean, (rows,), float64.

        A position is a number in the order in which the silo reads its units.  A round reads drawn positions,
        whose number may vary, or a range of them.  The row indices of the batch are positions.
        """
        plan, t, size = self.plan, planned_round.step.t, self.plan.batch_sizes[self.number]
        positions: slice | NDArray[np.int64]
        if planned_round.batch_range is None:
            positions = rows = as_row_indices(
                plan.schedule.select_rows(t, size, self.number, lambda: self._sampling_randomness)
            )
        else:  # Without `unit_order` a slice is read without a copy if its memory is aligned.
            positions = slice(planned_round.batch_range.start * size, planned_round.batch_range.stop * size)
            rows = np.arange(positions.start, positions.stop)
        indices = positions if self.unit_order is None else self.unit_order[positions]
        all_records, mask = self._records_and_mask
        records = Records(
            ensure_aligned(all_records.features[indices]), ensure_aligned(all_records.labels[indices])
        )
        weights = mask[indices] * record_weight(1.0, size, planned_round.batch_count)
        # The third argument says that all rows are this silo's.
        return RoundBatch(records, weights, ((self.number, len(rows)),), rows)

    @cached_property
    def _records_and_mask(self) -> tuple[Records, Tensor]:
        """Records with a valid label for each row, and the mask of the rows that count, float64 0 or 1.

        With several records a unit the labels stay, and the mask is 1: `PerUnit` masks the records inside a unit.
        """
        if self.plan.unit.max_records > 1:
            return self.records, torch.ones(len(self.records.labels), dtype=torch.float64)
        records, mask = mask_absent_records(self.records)
        return records, mask.double()

    @cached_property
    def _sampling_randomness(self) -> SamplingRandomness:
        return self.noise.sampling_randomness()


_HEADER = struct.Struct("<QIIIQ")
"""Header: last answered round, three numbers of vectors, and number of bytes of the query chain.

The numbers count past vectors, vectors of the accumulator, and vectors of the mechanism state.
"""
_NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float64: np.dtype("<f8"),
    torch.int64: np.dtype("<i8"),
}
_ALIGNMENT = 8


def pack_state(state: RoundState) -> bytes:
    """Pack a state as the ledger stores it.

    The layout is the header, the query chain and a byte for the type of every vector, together padded to 8 bytes,
    then past vectors, accumulator and mechanism state, each vector padded to 8 bytes.
    """
    vectors, dtypes = (*state.past_vectors, *state.accumulator, *state.mechanism_state), list(_NUMPY_TYPES)
    header = _HEADER.pack(
        state.last_round,
        len(state.past_vectors),
        len(state.accumulator),
        len(state.mechanism_state),
        len(state.query_chain),
    )
    type_codes = bytes(dtypes.index(vector.dtype) for vector in vectors)
    parts = [
        memoryview(header + state.query_chain + type_codes),
        *(np.ascontiguousarray(v.numpy()).data.cast("B") for v in vectors),
    ]
    return b"".join(piece for part in parts for piece in (part, bytes(_round_up_size(len(part)) - len(part))))


def unpack_state(packed: bytes, silo: Silo) -> RoundState:
    """Unpack a state of `pack_state` without copying its vectors, which must not be written into.

    Args:
        packed: Packed state, in which each vector is (d,).
        silo: Silo of the state.
    """
    last_round, past_count, accumulator_count, mechanism_count, chain_bytes = _HEADER.unpack_from(packed)
    start, size = _HEADER.size + chain_bytes, silo.plan.objective.dimension
    type_codes = packed[start : start + past_count + accumulator_count + mechanism_count]
    offset = _round_up_size(start + len(type_codes))
    vectors, dtypes = list[Tensor](), list(_NUMPY_TYPES.values())
    for code in type_codes:
        values = np.frombuffer(packed, dtypes[code], size, offset)
        vectors.append(torch.from_numpy(values))
        offset += _round_up_size(values.nbytes)
    past_vectors, accumulator, mechanism_state = (
        vectors[:past_count],
        vectors[past_count : past_count + accumulator_count],
        vectors[past_count + accumulator_count :],
    )
    return RoundState(
        last_round, tuple(past_vectors), tuple(accumulator), tuple(mechanism_state), packed[_HEADER.size : start]
    )


def _round_up_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
