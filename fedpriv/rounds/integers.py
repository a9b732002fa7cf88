"""A round in integers: at silos with guards, in simulations, and at servers that add up integers.

Sums of increments s_t (d,) are integers, in units of a public lattice.  What is published is a function of y_t =
(C s)_t + z_t, with z_t discrete Gaussian noise, or of the sum of the silos' y_t.  A maps the sums s_1 … s_T to the
running sums q_t = decay · q_{t-1} + s_t, and a mechanism factors it as A = B C (noise/mechanism.py), so that B y =
A s + B z.  So the noisy running sums are computed from y, not from s.

An increment is a record's clipped contribution to s_t, and K the largest norm of its integers.  A query is the
point at which a round's gradients are computed, and the query chain is a digest of all queries so far.  A party is
a silo, by its number, or `SERVER`.  A guard is the process at a silo that has the records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import RunError
from fedpriv.core.random import SERVER
from fedpriv.loss.objective import BatchLayout
from fedpriv.noise.integers.fixed_point import Ints, pack_masked, unpack_sum
from fedpriv.noise.integers.gaussian import (
    INITIAL_QUERY_CHAIN,
    KeyedDiscreteGaussian,
    extend_missed_query_chain,
    extend_query_chain,
    round_noise,
)
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.noise.integers.plan import IntegerRound
from fedpriv.noise.integers.strategies import IntegerStrategy, IntState
from fedpriv.noise.mechanism import Mechanism, MechanismState
from fedpriv.participation.secret import SecretOrder
from fedpriv.plan.plan import Plan, PlannedRound
from fedpriv.rounds.round import IncrementPart, RoundBatch, RoundState, RoundSums, increment_parts


@dataclass(frozen=True)
class IntegerSteps:
    """Steps of a round in integers, with y_t = (C s)_t + z_t at parties that add noise.

    Sums of a round are int64, (d,), or (vectors, d) stacked, and released running sums are float64, (d,).  The
    noise is keyed by (key, party, round, query chain, (C s)_t).  So a round that is repeated after a rollback with
    another query or other sums has other noise.
    """

    plan: Plan
    """Plan of the run, with the strategy C, the mechanism B and the units of each round."""
    key: bytes = field(repr=False)
    """Key of the noise, secret in a deployment and derived from the seed in a simulation."""

    def initial_state(self, party: int) -> RoundState:
        """Return the state before round 1.

        A party that adds noise has the state of C, and one that releases running sums the state of B.
        """
        trust = self.plan.trust
        accumulator = self._strategy.initial_state() if trust.adds_noise(party) else ()
        return RoundState(
            0,
            (),
            as_tensors(accumulator),
            self.plan.mechanism.start() if trust.publishes_sums(party) else (),
            INITIAL_QUERY_CHAIN,
        )

    def sum_increments(
        self, state: RoundState, planned_round: PlannedRound, query: Tensor, batch: RoundBatch
    ) -> RoundSums:
        """Sum the integer increments of one silo's records, separately for each noise vector of the round.

        Increments that are clipped as a whole have one sum.  Increments that are clipped in parts
        (`IncrementParts`) have one sum for each part, in the order residual, gradient, change, as far as the round
        has a vector for the part.

        Guarantee: under the conditions of `sum_integer_increments` one record moves the part of each vector by at
        most K, its entry of `IntegerRound.norms`, under zero-out and by at most 2 K under replace-one, whatever
        the query is.  Only the sums depend on the records.

        Args:
            state: State after the round before.
            planned_round: Public numbers of the round.
            query: Point at which increments are computed, (d,).
            batch: Records of the silo that the round reads.

        Returns:
            The sums, int64 (d,) or stacked (vectors, d), the queries to remember, and None for the number of
            clipped records.
        """
        ((silo, count),), step, plan = batch.silo_sizes, planned_round.step, self.plan
        if not count and not plan.schedule.secret:  # an empty secret round looks like any other
            batch = batch._replace(records=None)
        round_parts, past = increment_parts(step, query, state.past_vectors, plan.estimator.memory)
        objective = (
            plan.objective.for_batch(BatchLayout(step.t, batch.silo_sizes, batch.row_indices))
            if plan.needs_batch_layout
            else plan.objective
        )
        parts_in_order: list[IncrementPart | None] = [round_parts.gradient]
        # A residual has a vector in every round if epochs have several, of zeros at the start of an epoch.  A
        # change has a vector from epoch 2 on.
        if step.split is not None and step.split.rounds_per_epoch > 1:
            parts_in_order.insert(0, round_parts.residual)
        if round_parts.change is not None:
            parts_in_order.append(round_parts.change)
        integer_round, is_counted = self._integer_round(step.t), (batch.weights != 0.0).numpy()
        # With secret participation a round is filled up with dummy records (`sum_integer_increments`).
        min_calls = plan.record_capacity(silo) if isinstance(plan.schedule, SecretOrder) else 0
        sums = [
            np.zeros(objective.dimension, np.int64)
            if part is None
            else sum_integer_increments(
                *(objective, part.query, float(part.clip), batch.records, norm, integer_round.factor, min_calls),
                is_counted=is_counted,
                row_indices=batch.row_indices,
            )
            for part, norm in zip(parts_in_order, integer_round.norms, strict=True)
        ]
        return RoundSums(
            torch.from_numpy(sums[0] if planned_round.noise_vector_count is None else np.stack(sums)), past, None
        )

    def empty_sums(self, state: RoundState, t: int) -> Tensor:
        return torch.zeros(self._integer_round(t).shape, dtype=torch.int64)

    def add_noise(
        self, state: RoundState, t: int, sums: Tensor, party: int, query: Tensor | None
    ) -> tuple[Tensor, RoundState]:
        """Return y_t = (C s)_t + z_t, or s_t unchanged if this party adds no noise, and the next state.

        The query chain, on which z_t depends, is extended by the query, or by the fact that the round was missed.
        A state that has the state of C is as secret as the records.

        Args:
            state: State after round t - 1.
            t: Number of the round.
            sums: s_t, int64 (d,) or (vectors, d).
            party: Silo number or `SERVER`.
            query: Query of the round, or None if it was missed.
        """
        previous_chain = state.query_chain
        chain = (
            extend_missed_query_chain(previous_chain)
            if query is None
            else extend_query_chain(previous_chain, query.contiguous().numpy().data)
        )
        next_state = RoundState(t, state.past_vectors, state.accumulator, state.mechanism_state, chain)
        if not self._adds_noise(party):
            return sums, next_state
        noise_source = partial(round_noise, self.key, party, t, chain)
        accumulator = tuple(vector.numpy() for vector in state.accumulator)
        noisy, accumulator = add_discrete_noise(
            self._strategy, self._sigmas(t, party), accumulator, t, sums.numpy(), noise_source
        )
        return torch.from_numpy(noisy), next_state._replace(accumulator=as_tensors(accumulator))

    def release(self, state: RoundState, t: int, noisy: Tensor, party: int) -> tuple[Tensor, RoundState]:
        """Return the party's release, float64 (d,) or `noisy` unchanged, and the next state.

        A party that releases running sums returns unit / batch size · (B y)_t, with the unit of the lattice and
        the public batch size of the silo, or the sum of all of them for the server.

        Args:
            state: State, of which only B's state after round t - 1 is read.
            t: Number of the round.
            noisy: y_t, or s_t of a party that adds no noise, int64, of the round's shape or flat.
            party: Silo number or `SERVER`.
        """
        if not self._releases_sums(party):
            return noisy, state
        batch_sizes, integer_round = self.plan.batch_sizes, self._integer_round(t)
        factor = integer_round.unit / (sum(batch_sizes) if party == SERVER else batch_sizes[party])
        values = noisy.numpy().reshape(integer_round.shape)
        vector, mechanism_state = release_running_sum(
            self.plan.mechanism, integer_round.noise_scales, state.mechanism_state, t, values, factor
        )
        return vector, state._replace(mechanism_state=mechanism_state)

    def encode_masked(self, release: Tensor, t: int, party: int, mask: NDArray[np.uint64]) -> Tensor:
        """Return y_t plus the mask modulo 2^w, as w / 8 bytes a value, uint8."""
        masked = pack_masked(release.numpy().reshape(-1), mask, self.plan.required_exact_plan.inputs.word_bits)
        return torch.frombuffer(bytearray(masked), dtype=torch.uint8)

    def aggregate(self, messages: Sequence[Tensor], t: int) -> Tensor:
        """Add masked messages, or exact sums at a server that is trusted with them.

        The result of round t is int64, (d,) or (vectors, d).  Masks cancel in the sum over all silos.

        Raises:
            RunError: A masked message has another length, or an exact sum another type or a value out of its
                bound.
            ValueError: An exact sum has another length.
        """
        integer_round = self._integer_round(t)
        if self.plan.masked:
            encoded_messages = [message.numpy().tobytes() for message in messages]
            return torch.from_numpy(
                unpack_sum(encoded_messages, self.plan.required_exact_plan.inputs.word_bits, integer_round.shape)
            )
        sums = [message.numpy().reshape(integer_round.shape) for message in messages]
        max_batches = self.plan.schedule.max_batches(t)
        bounds = [[size * max_batches * norm for size in self.plan.batch_sizes] for norm in integer_round.norms]
        try:
            if len(integer_round.shape) == 1:
                return torch.from_numpy(add_exact_sums(sums, bounds[0]))
            parts = [
                add_exact_sums([silo_sums[index] for silo_sums in sums], bound)
                for index, bound in enumerate(bounds)
            ]
        except RunError as error:
            raise RunError(f"round {t}, {error}") from None
        return torch.from_numpy(np.stack(parts))

    def _integer_round(self, t: int) -> IntegerRound:
        numbers = self.plan.rounds[t - 1].integer_round
        assert numbers is not None  # as in every plan of integers
        return numbers

    def _sigmas(self, t: int, party: int) -> tuple[float, ...]:
        """Return the standard deviation of the noise of every vector of round t, in units of the lattice."""
        numbers = self._integer_round(t)
        if numbers.sigmas is not None:
            return numbers.sigmas
        return tuple(map(self.plan.required_exact_plan.party_claim(party).sigma_of, numbers.noise_scales))

    def _adds_noise(self, party: int) -> bool:
        return self.plan.sends_round_sums == (party == SERVER)

    def _releases_sums(self, party: int) -> bool:
        """Whether this party releases noisy running sums, and not the integers that they are computed from."""
        return self.plan.integers_at_server == (party == SERVER)

    @property
    def _strategy(self) -> IntegerStrategy:
        exact = self.plan.exact_plan
        assert exact is not None  # as in every plan of integers
        return exact.inputs.factorization.strategy


def as_tensors(vectors: tuple[Ints, ...]) -> tuple[Tensor, ...]:
    """Return tensors that share the memory of these arrays."""
    return tuple(map(torch.from_numpy, vectors))


def add_discrete_noise(
    strategy: IntegerStrategy,
    sigmas: Sequence[float],
    state: IntState,
    t: int,
    sums: Ints,
    noise_of: Callable[[Ints], KeyedDiscreteGaussian],
) -> tuple[Ints, IntState]:
    """Return y_t = (C s)_t + z_t and the next state of C, which is as secret as the records.

    Guarantee: the y_t of all rounds together satisfy the claim that was computed for these `sigmas`, as long as
    one record's integers in the sums have no larger norms than those of the claim (`IntegerRound.norms`), whatever
    else the sums are.

    Args:
        strategy: C on integers.
        sigmas: Standard deviation of the noise of every vector, in units.
        state: State of C after round t - 1.
        t: Number of the round.
        sums: s_t, (d,) or (vectors, d).
        noise_of: Function (C s)_t -> the round's noise source, which draws the noise of the k-th vector by the
            number k, from 0.

    Returns:
        y_t, shaped like `sums`, and the state of C after round t.
    """
    strategy_output, state = strategy.step(state, t, sums)
    noise, length = noise_of(strategy_output), strategy_output.shape[-1]
    vectors = [noise.vector(length, sigma, node) for node, sigma in enumerate(sigmas)]
    noisy = vectors[0] if strategy_output.ndim == 1 else np.stack(vectors)
    noisy += strategy_output  # not the other way round: the state may share memory with C s
    return noisy, state


def release_running_sum(
    mechanism: Mechanism, scales: Sequence[float], state: MechanismState, t: int, noisy: Ints, factor: float
) -> tuple[Tensor, MechanismState]:
    """Return `factor` · (B y)_t, float64 (d,), and B's next state.

    The mechanism multiplies its fresh vectors by their scales, so that y is divided by them first.

    Guarantee: the result is a function of y and public values.

    Args:
        mechanism: B.
        scales: Noise scale of every vector, in multiples of σ.
        state: State of B after round t - 1.
        t: Number of the round.
        noisy: y_t, (d,) or (vectors, d).
        factor: Unit of the lattice over the public denominator.
    """
    divisor = scales[0] if noisy.ndim == 1 else np.array(scales)[:, None]
    # A division by 1 changes no bit, and takes longer.
    fresh = noisy.astype(np.float64) if tuple(scales) == (1.0,) else noisy / divisor
    row, state = mechanism.noise(state, t, torch.from_numpy(fresh))
    # A mechanism without a state keeps no reference to the row, which may then be overwritten.
    return torch.mul(row, factor, out=None if state else row), state


def add_exact_sums(sums: Sequence[Ints], bounds: Sequence[int]) -> Ints:
    """Add the silos' exact sums at a server that is trusted with them.

    Args:
        sums: int64 (d,) of each silo.
        bounds: Largest absolute value of a coordinate of each honest silo's sum: the most records that the silo
            can read in the round, times the norm K of a record's integers.  Their sum has to be below 2^63.

    Returns:
        The sum, int64 (d,).

    Raises:
        RunError: A sum has another shape than that of silo 0, is not int64, or is out of its bound.
    """
    total = np.zeros_like(sums[0])
    for silo, (values, bound) in enumerate(zip(sums, bounds, strict=True)):
        if values.shape != total.shape or values.dtype != np.int64:
            raise RunError(
                f"silo {silo}: its sums have shape {values.shape} and type {values.dtype}, expected {total.shape} "
                "and int64"
            )
        if not (-bound <= int(values.min(initial=0)) and int(values.max(initial=0)) <= bound):
            raise RunError(f"silo {silo}: a sum is beyond what its records can add up to")
        total += values
    return total
