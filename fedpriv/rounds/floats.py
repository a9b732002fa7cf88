"""A round in floating point: in simulations, in runs without noise, and for means of releases.

    s_t = Σ_b weight_b · clip(Σ_k c_k ∇f(query_{t-k}; record b))
    q_t = decay · q_{t-1} + s_t

Here b are the records of round t with their weights, c_k the estimator's coefficients of the current and earlier
queries (the points at which gradients are computed), s_t (d,) the sum of clipped increments, and q_t (d,) the
running sum, whose noise is (B z)_t (noise/mechanism.py).  The map from increments to sums is linear, so that one
silo's records and all silos' records, with the silos' weights, take the same code.  A party is a silo, by its
number, or the server.

Increments may be clipped in parts (Tran & Cutkosky 2022, Algorithm 2, but with each part clipped separately and
epochs of N rounds).  With w_t the query of round t, v_q that of the first round of epoch q, g_t(x) a record's
gradient at x, α the estimator's coefficient, γ the mixing weight, and sums over the records of the round,

    G_t = clip(α g_t(v_q)),   Δ_t = clip(α g_t(v_q) - α g_t(v_{q-1})),   r_t = clip(α g_t(w_t) - α g_t(v_q))
    u_t = (1 - γ) (u_{t-N} + Δ_t) + γ G_t,   in the first epoch u_t = G_t
    q_t = decay q_{t-1} + u_t + r_t
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import RunError
from fedpriv.core.random import MAX_VALUES_PER_DRAW, SERVER, KeyedNormal, derive_key, integer_noise_key, seed_key
from fedpriv.loss.estimators import Round, SplitClipping
from fedpriv.loss.objective import Batch, BatchLayout, Increment, Objective, Records
from fedpriv.plan.evaluation import EvaluationPlan, held_out_records_by_silo, make_evaluation_plan
from fedpriv.plan.plan import Plan, PlannedRound
from fedpriv.plan.task import load_task, mask_absent_records
from fedpriv.rounds.round import IncrementPart, RoundBatch, RoundState, RoundSums, increment_parts
from fedpriv.scenario.schema import Cell

_CHUNK = 2**16
"""Number of coordinates of a mean that are computed at a time.

Stacked messages are a copy of all of them, and this limits its size.
"""
_MAX_ROUNDS_PER_DRAW = 16
_MAX_PREFETCHED_VALUES = 2**26  # prefetched noise of all silos that one process simulates


class FreshNoise(NamedTuple):
    """Fresh vectors of a round, and the factor of the noise that is made from them."""

    vectors: Tensor
    """Vectors (..., d), or (draws, ..., d) in a round for which the plan has several.

    Zeros may have a last axis of 1.
    """
    amplitude: Tensor | None = None
    """Factor (..., 1) of the row of B z, or None for 1.

    Replicates (runs that are computed side by side) can thus share vectors (1, d) of variance 1.
    """


NoiseSampler = Callable[[int, int], FreshNoise | None]
"""Function (party, t) -> the party's fresh vectors of round t, or None if it adds no noise."""


@dataclass(frozen=True)
class FloatSteps:
    """Steps of a round in floating point, whose release is y_t = q_t + (B z)_t."""

    plan: Plan
    """Plan of the run, with the mechanism B, the weights and the public numbers of each round."""
    sample_noise: NoiseSampler = field(default=lambda party, t: None, repr=False)
    """Source of a party's fresh vectors z."""
    objective: Objective | None = None
    """A silo's bounded view of the plan's objective, or None for the plan's own."""

    def initial_state(self, party: int) -> RoundState:
        zeros = torch.zeros((), dtype=torch.float64).expand(self.plan.objective.dimension)  # one value in memory
        return RoundState(accumulator=(zeros,), mechanism_state=self.plan.mechanism.start())

    def sum_increments(
        self, state: RoundState, planned_round: PlannedRound, query: Tensor, batch: RoundBatch
    ) -> RoundSums:
        """Return q_t = decay · q_{t-1} + s_t, the past vectors to remember and the clipped records' count.

        s_t is the weighted sum of the records' clipped increments, or u_t + r_t if they are clipped in parts.
        `RunningSum` describes the past vectors.

        Args:
            state: State after round t - 1.
            planned_round: Public numbers of round t.
            query: Point (..., d) at which gradients are computed.
            batch: Records of the round, with their weights.
        """
        plan, (total,) = self.plan, state.accumulator
        objective = plan.objective if self.objective is None else self.objective
        if plan.needs_batch_layout:
            objective = objective.for_batch(BatchLayout(planned_round.step.t, batch.silo_sizes, batch.row_indices))
        records = batch.records if batch.weights.shape[-1] else None
        previous = RunningSum(state.past_vectors, total)
        (past, total), clipped = update_running_sum(
            previous, planned_round.step, query, objective, records, batch.weights, plan.estimator.memory
        )
        return RoundSums(total, past, clipped)

    def empty_sums(self, state: RoundState, t: int) -> Tensor:
        return state.accumulator[0] * self.plan.rounds[t - 1].step.decay

    def add_noise(
        self, state: RoundState, t: int, sums: Tensor, party: int, query: Tensor | None
    ) -> tuple[Tensor, RoundState]:
        """Return y_t = q_t + (B z)_t, (..., d), and the next state.

        A party without noise gets y_t = q_t.

        Args:
            state: State after round t - 1.
            t: Number of the round.
            sums: q_t, (..., d), which may be overwritten.
            party: Silo number or `SERVER`.
            query: Not read.
        """
        next_sums, decay = sums, self.plan.rounds[t - 1].next_decay
        if isinstance(decay, float) and decay == 0.0:
            # One value in memory: the next round multiplies these sums by 0.
            next_sums = sums.new_zeros(()).expand_as(sums)
        if (fresh := self.sample_noise(party, t)) is None:
            return sums, RoundState(t, state.past_vectors, (next_sums,), state.mechanism_state)
        row, mechanism_state = self.plan.mechanism.noise(state.mechanism_state, t, fresh.vectors)
        # Sums that the next state does not hold are overwritten, which saves memory.
        noisy_out, amplitude = None if next_sums is sums else sums, fresh.amplitude
        noisy = (
            torch.add(sums, row, out=noisy_out)
            if amplitude is None
            else torch.addcmul(sums, amplitude, row, out=noisy_out)
        )
        return noisy, RoundState(t, state.past_vectors, (next_sums,), mechanism_state)

    def release(self, state: RoundState, t: int, noisy: Tensor, party: int) -> tuple[Tensor, RoundState]:
        return noisy, state

    def encode_masked(self, release: Tensor, t: int, party: int, mask: NDArray[np.uint64]) -> Tensor:
        """Return p_i · release on the plan's grid, plus the mask, modulo 2^64, as uint64 (d,).

        Raises:
            RunError: A value is not finite, or is too large to be added.
        """
        assert self.plan.grid is not None  # every plan with masks has a grid
        try:
            encoded = self.plan.grid.encode(self.plan.weights[party] * release.numpy())
        except RunError as error:
            raise RunError(f"silo {party}, round {t}: {error}") from None
        return torch.from_numpy(encoded + mask)

    def aggregate(self, messages: Sequence[Tensor], t: int) -> Tensor:
        """Return Σ_i p_i · release_i (d,), with the weight p_i of silo i.

        Messages are releases (d,).  If the plan has a grid, they are masked (`encode_masked`), with their weights,
        and the masks cancel in the sum.
        """
        if (grid := self.plan.grid) is not None:
            return torch.from_numpy(grid.decode_sum([message.numpy() for message in messages]))
        mean = torch.empty_like(messages[0])
        weights = torch.tensor(self.plan.weights, dtype=mean.dtype)
        for start in range(0, len(mean), _CHUNK):  # in pieces, so that long vectors are not stacked as a whole
            stop = start + _CHUNK
            parts = [message[start:stop] for message in messages] if len(mean) > _CHUNK else messages
            torch.mv(torch.stack(tuple(parts)).mT, weights, out=mean[start:stop])
        return mean


# The running sum


class RunningSum(NamedTuple):
    """State between rounds: past vectors and the sum q_t, each (..., d).

    Past vectors are the queries that the estimator still needs, latest first.  For increments in parts they are
    v_q, v_{q-1}, as far as these epochs have begun, and then u of the last N rounds, oldest first.  For local
    steps they are the sum of the silo's releases since the last restart (`rounds.round`).
    """

    past_vectors: tuple[Tensor, ...]
    total: Tensor


def initial_running_sum(like: Tensor) -> RunningSum:
    """Return the state before round 1: no past vectors, and q_0 = 0 like `like` in shape and dtype."""
    return RunningSum((), torch.zeros_like(like))


def update_running_sum(
    state: RunningSum,
    step: Round,
    query: Tensor,
    objective: Objective,
    records: Records | None,
    weights: Tensor,
    memory: int,
) -> tuple[RunningSum, Tensor]:
    """Add one round's increments to the running sum.

    Increments are added in the dtype of the sum, which may be wider than that of the queries.  If `step.split` is
    set, increments are clipped in parts (`update_split_running_sum`).

    Guarantee: if increments are not clipped in parts, and `objective` keeps the guarantee of
    `Objective.increment`, one record moves s_t by at most its weight times `step.clip` under zero-out, and by
    twice this bound under replace-one, whatever the queries are.  That change of s_t moves q_t by as much, up to
    the rounding of the sums.

    Args:
        state: State after the round before.
        step: Round t of the estimator.
        query: Query of round t, (..., d).
        objective: Objective that computes the clipped increments.
        records: Records of the round, or None in a round without any.
        weights: Weight of every record, (records,) or (..., records).
        memory: Number of queries, this round's included, that the estimator needs (not used for parts).

    Returns:
        The next state, and the number of clipped records (...), of the part that clips most if there are parts.
    """
    if weights.dtype != state.total.dtype:  # Tensor.to is slow, even if the dtype stays
        weights = weights.to(state.total.dtype)
    if step.split is not None:
        return update_split_running_sum(state, step, step.split, query, objective, records, weights)
    (part, _, _), past = increment_parts(step, query, state.past_vectors, memory)
    if records is None:
        return RunningSum(past, step.decay * state.total), query.new_zeros(query.shape[:-1], dtype=torch.int64)
    increment = objective.increment(part.query, Batch(records, weights), part.clip)
    total = increment.total  # a new tensor, so that it may be written into
    if step.decay:
        total.add_(state.total, alpha=step.decay)
    return RunningSum(past, total), increment.clipped_count


def update_split_running_sum(
    state: RunningSum,
    step: Round,
    split: SplitClipping,
    query: Tensor,
    objective: Objective,
    records: Records | None,
    weights: Tensor,
) -> tuple[RunningSum, Tensor]:
    """Add one round's increments, clipped in the parts G_t, Δ_t and r_t of the module, to the running sum.

    Guarantee: if `objective` keeps the guarantee of `Objective.increment`, one record moves G_t, Δ_t and r_t each
    by at most its weight times that part's clip under zero-out, and by twice this bound under replace-one,
    whatever the queries are.  r_t is 0 in the first round of an epoch.

    Args:
        state: State after the round before.  Its past vectors are the anchors v (first queries of the last epochs
            that began before round t, latest first, at most two), and then the sums u of the last rounds, at most
            N, oldest first.
        step: Round t of the estimator.
        split: Clips of the parts, N and γ.
        query: Query of round t, (..., d).
        objective: Objective that computes the clipped increments.
        records: Records of the round, or None in a round without any.
        weights: Weight of every record, (records,) or (..., records).

    Returns:
        The next state, and the number of clipped records of the part that clips most, (...).
    """
    # No anchor in round 1, one to the end of the first epoch and in the next one's first round, and then two.
    epoch, round_index = divmod(step.t - 1, split.rounds_per_epoch)
    anchor_count = min(2, epoch + (round_index > 0))
    past_anchors, past_sums = state.past_vectors[:anchor_count], state.past_vectors[anchor_count:]
    (gradient, change, residual), anchors = increment_parts(step, query, past_anchors, 1)

    def increment(part: IncrementPart) -> Increment:
        if records is None:
            return Increment(torch.zeros_like(state.total), query.new_zeros(query.shape[:-1], dtype=torch.int64))
        return objective.increment(part.query, Batch(records, weights), part.clip)

    # u_t: G_t in the first epoch, and later a mix with u_{t-N}, the oldest sum, and the change since that epoch.
    mixed_sum, clipped = increment(gradient)
    if change is not None:
        change_increment = increment(change)
        mixed_sum = (1.0 - split.mixing) * (past_sums[0] + change_increment.total) + split.mixing * mixed_sum
        clipped = torch.maximum(clipped, change_increment.clipped_count)
    round_sum = mixed_sum
    if residual is not None:
        residual_increment = increment(residual)
        round_sum, clipped = (
            mixed_sum + residual_increment.total,
            torch.maximum(clipped, residual_increment.clipped_count),
        )
    next_sums = (*past_sums, mixed_sum)[-split.rounds_per_epoch :]
    return RunningSum((*anchors, *next_sums), torch.add(round_sum, state.total, alpha=step.decay)), clipped


# Noise of a simulation


class SeededNoise:
    """Noise of a simulation: vectors of variance 1 from one source, times each party's std of the plan."""

    def __init__(self, plan: Plan, source: KeyedNormal, dtype: torch.dtype) -> None:
        self._plan, self._source = plan, source  # the source has its own dtype, and `dtype` is that of the result
        self._dtype: np.dtype[Any] = np.dtype(str(dtype).removeprefix("torch."))
        self._stds = {party: float(std) for party, std, _ in plan.noise.sources}
        self._prefetched: dict[int, PrefetchedNoise] = {}

    def __call__(self, party: int, t: int) -> FreshNoise | None:
        std = self._stds.get(party, 0.0)
        if not std:
            return None
        # One call casts and multiplies, in pieces that fit into the processor's cache.
        vectors, buffer = self._unit_vectors(party, t)
        return FreshNoise(torch.from_numpy(np.multiply(vectors, std, out=buffer, dtype=self._dtype)))

    def _unit_vectors(self, party: int, t: int) -> tuple[NDArray[np.floating], NDArray[np.floating] | None]:
        """Return noise of variance 1 for a party and round, and the same array again or None.

        The noise is (d,), or (draws, d) in a round for which the plan has a number of vectors.  The second value
        is None if the caller must not write into the array.
        """
        size, count = self._plan.objective.dimension, self._plan.rounds[t - 1].noise_vector_count
        if count is not None:
            return self._source.node_vectors(size, party, t, count), None
        block_size = rounds_per_draw(size, len(self._plan.batch_sizes))
        if block_size == 1:  # long vectors are drawn in pieces, straight into the dtype of the result
            buffer = np.empty(size, dtype=self._dtype)
            return self._source.weighted_sum(size, [party], [1.0], t, out=buffer), buffer
        if party not in self._prefetched:
            self._prefetched[party] = PrefetchedNoise(
                self._source, size, party, self._plan.schedule.rounds, block_size
            )
        return self._prefetched[party].vector(t), None


def rounds_per_draw(dimension: int, silo_count: int) -> int:
    """Largest number of rounds whose vectors a simulated party draws at once, 1 if it prefetches none."""
    # Longer vectors are drawn in pieces, and blocks of them save no time.
    max_rounds = 1 if dimension > MAX_VALUES_PER_DRAW else _MAX_ROUNDS_PER_DRAW
    return max(1, min(max_rounds, _MAX_PREFETCHED_VALUES // (dimension * silo_count)))


class PrefetchedNoise:
    """One party's vectors of variance 1, prefetched in blocks of rounds.

    Any round may be requested any number of times.  Round 1 is a block of one, so that a measurement of time that
    starts after round 1 includes the draw of every later block.
    """

    def __init__(self, source: KeyedNormal, dimension: int, party: int, rounds: int, block_size: int) -> None:
        self._source, self._dimension, self._party, self._rounds, self._block_size = (
            source,
            dimension,
            party,
            rounds,
            block_size,
        )
        self._first_round = 0
        self._block = np.empty((0, dimension), source.dtype)

    def vector(self, t: int) -> NDArray[np.floating]:
        """Return the vector of round t (from 1), (d,), which the caller must not write into.

        For a round outside of the block in memory a new block is drawn, which begins with this round and takes the
        place of the old one.
        """
        if not self._first_round <= t < self._first_round + len(self._block):
            # Round 1 and rounds after the run alone, and else a block that ends with the run at the latest.
            rounds = range(t, 2 if t == 1 else max(t, min(t + self._block_size - 1, self._rounds)) + 1)
            self._block = self._source.vectors(self._dimension, [self._party] * len(rounds), rounds)
            self._first_round = t
        vector: NDArray[np.floating] = self._block[t - self._first_round]
        return vector


def evaluation_noise(cell: Cell) -> KeyedNormal:
    """Return the noise source of a simulation's evaluations, another stream than that of training."""
    return KeyedNormal(seed_key(cell.seed, "evaluation"), cell.run.dtype)


def evaluation_integers_key(cell: Cell) -> bytes:
    """Return the key of noise for a simulation's evaluations whose releases are integers."""
    return derive_key(integer_noise_key(cell.seed), "evaluation")


@dataclass(frozen=True)
class SimulatedEvaluation:
    """Evaluations of all silos of a simulation in floating point."""

    evaluation_plan: EvaluationPlan
    """Metrics of the evaluations, and their noise."""
    test_records: list[Records]
    """Test records of each silo."""
    noise: KeyedNormal
    """Public noise source of the evaluations."""

    @staticmethod
    def from_cell(cell: Cell) -> "SimulatedEvaluation | None":
        """Return the evaluations of a cell, or None if its silos do not evaluate."""
        evaluation_plan = make_evaluation_plan(cell, load_task(cell).objective)
        return (
            None
            if evaluation_plan is None
            else SimulatedEvaluation(evaluation_plan, held_out_records_by_silo(cell), evaluation_noise(cell))
        )

    def metrics(self, number: int, model: Tensor) -> dict[str, float]:
        """Return the metrics of `model` (d,) in the evaluation of this number, counted from 1.

        Each silo's mean scores get the silo's noise, if the plan has any.  The metrics are those of each silo's
        noisy means if these are published, and otherwise of their weighted mean, with the server's noise.
        """
        means = torch.stack(
            [
                self._add_noise(self._mean_scores(model, records), silo, number)
                for silo, records in enumerate(self.test_records)
            ]
        )
        if self.evaluation_plan.publishes_each_silo:
            return self.evaluation_plan.metrics(means)
        weights = torch.tensor(self.evaluation_plan.plan.weights, dtype=means.dtype)
        return self.evaluation_plan.metrics(self._add_noise(weights @ means, SERVER, number).unsqueeze(0))

    def _mean_scores(self, model: Tensor, silo_records: Records) -> Tensor:
        """Return the mean score (outputs,) over all rows of a silo, with 0 for absent records.

        So the denominator is public, however many records are present.
        """
        records, is_present = mask_absent_records(silo_records)
        return (
            self.evaluation_plan.scores.contributions(model, records)
            .masked_fill(~is_present.unsqueeze(-1), 0.0)
            .mean(0)
        )

    def _add_noise(self, mean: Tensor, party: int, number: int) -> Tensor:
        std = float(self.evaluation_plan.plan.noise.std_of(party))
        return mean + std * torch.from_numpy(self.noise.vector(len(mean), party, number)).double() if std else mean
