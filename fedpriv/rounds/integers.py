"""A round in integers, as a silo with a guard takes it and a server that adds the noise.

Sums of increments are integers, and what is released is a function of y_t = (C s)_t + z_t with z_t a discrete
Gaussian.  B y = A s + B z, since A = B C: the mechanism that makes correlated noise from z makes the noisy running
sum from y.  It never sees s.
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
    """Steps of a round whose releases are functions of y_t = (C s)_t + z_t.

    Vectors of a round are int64, (d,), or (vectors, d) stacked.  The noise is keyed by (key, party, round, chain,
    (C s)_t), where chain_t = H(chain_{t-1}, query): a round that is put back and asked something else has other
    noise, and the same round the same.
    """

    plan: Plan
    key: bytes = field(repr=False)

    def initial_state(self, party: int) -> RoundState:
        """Return C's state at a party that adds noise, and B's where running sums leave."""
        trust = self.plan.trust
        sums = self._strategy.initial_state() if trust.adds_noise(party) else ()
        return RoundState(
            0,
            (),
            as_tensors(sums),
            self.plan.mechanism.start() if trust.publishes_sums(party) else (),
            INITIAL_QUERY_CHAIN,
        )

    def sum_increments(
        self, state: RoundState, planned: PlannedRound, query: Tensor, read: RoundBatch
    ) -> RoundSums:
        """Add the integers of one silo's records.

        Guarantee: one record moves the part of each vector by at most K under zero-out and 2 K under replace-one,
        whatever the query is; nothing but the sums depends on the records.
        """
        ((silo, count),), step, plan = read.silo_sizes, planned.step, self.plan
        if not count and not plan.schedule.secret:  # a secret round that drew nobody is like any other
            read = read._replace(records=None)
        parts, past = increment_parts(step, query, state.past_vectors, plan.estimator.memory)
        objective = (
            plan.objective.for_batch(BatchLayout(step.t, read.silo_sizes, read.row_indices))
            if plan.needs_batch_layout
            else plan.objective
        )
        asked: list[IncrementPart | None] = [parts.gradient]
        if step.split is not None and step.split.rounds_per_epoch > 1:
            asked.insert(0, parts.residual)
        if parts.change is not None:
            asked.append(parts.change)
        numbers, counts = self._integer_round(step.t), (read.weights != 0.0).numpy()
        # Where it is secret who takes part, each round takes the time of so many records at least.
        least = plan.record_capacity(silo) if isinstance(plan.schedule, SecretOrder) else 0
        sums = [
            np.zeros(objective.dimension, np.int64)
            if part is None
            else sum_integer_increments(
                *(objective, part.query, float(part.clip), read.records, norm, numbers.factor, least),
                is_counted=counts,
                row_indices=read.row_indices,
            )
            for part, norm in zip(asked, numbers.norms, strict=True)
        ]
        return RoundSums(
            torch.from_numpy(sums[0] if planned.noise_vector_count is None else np.stack(sums)), past, None
        )

    def empty_sums(self, state: RoundState, t: int) -> Tensor:
        return torch.zeros(self._integer_round(t).shape, dtype=torch.int64)

    def add_noise(
        self, state: RoundState, t: int, sums: Tensor, party: int, query: Tensor | None
    ) -> tuple[Tensor, RoundState]:
        """Return y_t and C's next state, which is as secret as the records, or s_t itself without noise here."""
        before = state.query_chain
        chain = (
            extend_missed_query_chain(before)
            if query is None
            else extend_query_chain(before, query.contiguous().numpy().data)
        )
        after = RoundState(t, state.past_vectors, state.accumulator, state.mechanism_state, chain)
        if not self._adds_noise(party):
            return sums, after
        noise_of = partial(round_noise, self.key, party, t, chain)
        held = tuple(vector.numpy() for vector in state.accumulator)
        noisy, held = add_discrete_noise(self._strategy, self._sigmas(t, party), held, t, sums.numpy(), noise_of)
        return torch.from_numpy(noisy), after._replace(accumulator=as_tensors(held))

    def release(self, state: RoundState, t: int, noisy: Tensor, party: int) -> tuple[Tensor, RoundState]:
        """Return (B y)_t over the public number of records of a batch, float64 (d,), or y_t as it is."""
        if not self._releases_sums(party):
            return noisy, state
        sizes, numbers = self.plan.batch_sizes, self._integer_round(t)
        factor = numbers.unit / (sum(sizes) if party == SERVER else sizes[party])
        values = noisy.numpy().reshape(numbers.shape)
        vector, hidden = release_running_sum(
            self.plan.mechanism, numbers.noise_scales, state.mechanism_state, t, values, factor
        )
        return vector, state._replace(mechanism_state=hidden)

    def encode_masked(self, release: Tensor, t: int, party: int, mask: NDArray[np.uint64]) -> Tensor:
        """Return y_t modulo 2^w, uint8."""
        masked = pack_masked(release.numpy().reshape(-1), mask, self.plan.required_exact_plan.inputs.word_bits)
        return torch.frombuffer(bytearray(masked), dtype=torch.uint8)

    def aggregate(self, messages: Sequence[Tensor], t: int) -> Tensor:
        """Add masked messages, or exact sums at a server that is trusted with them."""
        numbers = self._integer_round(t)
        if self.plan.masked:
            words = [message.numpy().tobytes() for message in messages]
            return torch.from_numpy(
                unpack_sum(words, self.plan.required_exact_plan.inputs.word_bits, numbers.shape)
            )
        sums = [message.numpy().reshape(numbers.shape) for message in messages]
        most = self.plan.schedule.max_batches(t)
        bounds = [[size * most * norm for size in self.plan.batch_sizes] for norm in numbers.norms]
        try:
            if len(numbers.shape) == 1:
                return torch.from_numpy(add_exact_sums(sums, bounds[0]))
            parts = [
                add_exact_sums([of_silo[place] for of_silo in sums], bound) for place, bound in enumerate(bounds)
            ]
        except RunError as error:
            raise RunError(f"round {t}, {error}") from None
        return torch.from_numpy(np.stack(parts))

    def _integer_round(self, t: int) -> IntegerRound:
        numbers = self.plan.rounds[t - 1].integer_round
        assert numbers is not None  # as in every plan of integers
        return numbers

    def _sigmas(self, t: int, party: int) -> tuple[float, ...]:
        """Return the noise of every vector of round t, in units."""
        numbers = self._integer_round(t)
        if numbers.sigmas is not None:
            return numbers.sigmas
        return tuple(map(self.plan.required_exact_plan.party_claim(party).sigma_of, numbers.noise_scales))

    def _adds_noise(self, party: int) -> bool:
        return self.plan.sends_round_sums == (party == SERVER)

    def _releases_sums(self, party: int) -> bool:
        """Whether the noisy running sums leave this party, and not the integers that they are made of."""
        return self.plan.integers_at_server == (party == SERVER)

    @property
    def _strategy(self) -> IntegerStrategy:
        exact = self.plan.exact_plan
        assert exact is not None  # as in every plan of integers
        return exact.inputs.factorization.strategy


def as_tensors(vectors: tuple[Ints, ...]) -> tuple[Tensor, ...]:
    """View the same memory as torch's."""
    return tuple(map(torch.from_numpy, vectors))


def add_discrete_noise(
    strategy: IntegerStrategy,
    sigmas: Sequence[float],
    state: IntState,
    t: int,
    sums: Ints,
    noise_of: Callable[[Ints], KeyedDiscreteGaussian],
) -> tuple[Ints, IntState]:
    """Return y_t, shaped like `sums` ((d,) or (vectors, d)), and the strategy's next state.

    The state is as secret as the records.  `sigmas` are the round's (`IntegerRound`).  `noise_of` gives the
    round's source of noise for (C s)_t (`round_noise`), and node k of its stream is the noise of the k-th vector.

    Guarantee: the y of all rounds together keep the claim whose `sigmas` these are, whatever the sums were
    computed from.
    """
    exact, state = strategy.step(state, t, sums)
    source, length = noise_of(exact), exact.shape[-1]
    vectors = [source.vector(length, sigma, node) for node, sigma in enumerate(sigmas)]
    noisy = vectors[0] if exact.ndim == 1 else np.stack(vectors)
    noisy += exact  # which may be a part of the state
    return noisy, state


def release_running_sum(
    mechanism: Mechanism, scales: Sequence[float], state: MechanismState, t: int, noisy: Ints, factor: float
) -> tuple[Tensor, MechanismState]:
    """Return `factor` · (B y)_t, float64 (d,), and B's next state.

    The mechanism multiplies its fresh vectors by their scales, so y is divided by them.  `factor` is the unit over
    the public denominator.

    Guarantee: a function of y and public values.
    """
    fresh = noisy / (scales[0] if noisy.ndim == 1 else np.array(scales)[:, None])
    row, state = mechanism.noise(state, t, torch.from_numpy(fresh))
    return torch.mul(row, factor, out=None if state else row), state  # a row that no state has is ours


def add_exact_sums(sums: Sequence[Ints], bounds: Sequence[int]) -> Ints:
    """Add the silos' exact sums at a server that is trusted with them.  RunError for one out of its bounds.

    `bounds[i]` is B_i K_t: no honest silo's sum is beyond it in any coordinate, and 64 bits hold what they add up
    to.
    """
    total = np.zeros_like(sums[0])
    for silo, (values, bound) in enumerate(zip(sums, bounds, strict=True)):
        if values.shape != total.shape or values.dtype != np.int64:
            raise RunError(f"silo {silo}: sums of shape {values.shape} and type {values.dtype} came")
        if not (-bound <= int(values.min(initial=0)) and int(values.max(initial=0)) <= bound):
            raise RunError(f"silo {silo}: a sum is beyond what its records can add up to")
        total += values
    return total
