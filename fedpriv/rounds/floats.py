"""A round in floating point, as a simulation takes it, and a run without noise, of which nothing is claimed.

    s_t = Σ_b weight_b · clip(Σ_k c_k ∇f(query_{t-k}; record b))
    q_t = decay · q_{t-1} + s_t

The map from increments to sums is linear, so the weighted mean over silos of their sums is the sum of the weighted
mean increments: one silo's records, or all silos' records with weights p_i / B_i, go through here alike.

Increments may be clipped in parts (Tran & Cutkosky 2022, Algorithm 2, with each part clipped for itself and epochs
of N rounds).  With v_q the query of the first round of epoch q,

    G_t = clip(α g_t(v_q)),   Δ_t = clip(α g_t(v_q) - α g_t(v_{q-1})),   r_t = clip(α g_t(w_t) - α g_t(v_q))
    u_t = (1 - γ) (u_{t-N} + Δ_t) + γ G_t,   in the first epoch u_t = G_t
    q_t = decay q_{t-1} + u_t + r_t

Where no clip bites this is plain momentum.  Parts need no bound on the loss's smoothness.

Evaluations by the silos of a simulation.
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
from fedpriv.plan.evaluation import EvaluationPlan, make_evaluation_plan, test_records_of_silos
from fedpriv.plan.plan import Plan, PlannedRound
from fedpriv.plan.task import load_task, mask_absent_records
from fedpriv.rounds.round import IncrementPart, RoundBatch, RoundState, RoundSums, increment_parts
from fedpriv.scenario.schema import Cell

_CHUNK = 2**16
"""Values of a mean that are computed at a time: all messages side by side are a copy of every one."""
_MAX_ROUNDS_PER_DRAW = 16
_MAX_PREFETCHED_VALUES = 2**26  # of noise that all silos together hold ahead, when one process simulates them


class FreshNoise(NamedTuple):
    """Fresh vectors of a round, (..., d) or (..., draws, d); `amplitude` (..., 1) is a factor of B's row.

    Replicates can share unit noise, (1, d), since mechanisms are linear.
    """

    vectors: Tensor
    amplitude: Tensor | None = None


NoiseSampler = Callable[[int, int], FreshNoise | None]
"""(party, t) -> its fresh vectors of round t, or None if it adds no noise."""


@dataclass(frozen=True)
class FloatSteps:
    """Steps of a round in floating point: y_t = q_t + (B z)_t is what leaves.

    In the vectorized engine the plan's parts have leading axes, and so have all vectors.
    """

    plan: Plan
    sample_noise: NoiseSampler = field(default=lambda party, t: None, repr=False)
    objective: Objective | None = None
    """A silo's bounded view of the plan's objective, or None for the plan's own."""

    def initial_state(self, party: int) -> RoundState:
        nothing = torch.zeros((), dtype=torch.float64).expand(self.plan.objective.dimension)  # takes no memory
        return RoundState(accumulator=(nothing,), mechanism_state=self.plan.mechanism.start())

    def sum_increments(
        self, state: RoundState, planned: PlannedRound, query: Tensor, read: RoundBatch
    ) -> RoundSums:
        """Return q_t, and the number of clipped records (...); see `absorb`."""
        plan, (total,) = self.plan, state.accumulator
        objective = plan.objective if self.objective is None else self.objective
        if plan.needs_batch_layout:
            objective = objective.for_batch(BatchLayout(planned.step.t, read.silo_sizes, read.row_indices))
        records = read.records if read.weights.shape[-1] else None
        before = RunningSum(state.past_vectors, total)
        (past, total), clipped = update_running_sum(
            before, planned.step, query, objective, records, read.weights, plan.estimator.memory
        )
        return RoundSums(total, past, clipped)

    def empty_sums(self, state: RoundState, t: int) -> Tensor:
        return state.accumulator[0] * self.plan.rounds[t - 1].step.decay

    def add_noise(
        self, state: RoundState, t: int, sums: Tensor, party: int, query: Tensor | None
    ) -> tuple[Tensor, RoundState]:
        kept, decay = sums, self.plan.rounds[t - 1].next_decay
        if isinstance(decay, float) and decay == 0.0:
            kept = sums.new_zeros(()).expand_as(sums)  # takes no memory: nobody needs these sums again
        if (fresh := self.sample_noise(party, t)) is None:
            return sums, RoundState(t, state.past_vectors, (kept,), state.mechanism_state)
        row, hidden = self.plan.mechanism.noise(state.mechanism_state, t, fresh.vectors)
        out, size = None if kept is sums else sums, fresh.amplitude
        noisy = torch.add(sums, row, out=out) if size is None else torch.addcmul(sums, size, row, out=out)
        return noisy, RoundState(t, state.past_vectors, (kept,), hidden)

    def release(self, state: RoundState, t: int, noisy: Tensor, party: int) -> tuple[Tensor, RoundState]:
        return noisy, state

    def encode_masked(self, release: Tensor, t: int, party: int, mask: NDArray[np.uint64]) -> Tensor:
        """Return p_i · release on the plan's grid, uint64 (d,)."""
        assert self.plan.grid is not None  # as wherever silos are to mask
        try:
            words = self.plan.grid.encode(self.plan.weights[party] * release.numpy())
        except RunError as error:
            raise RunError(f"silo {party}, round {t}: {error}") from None
        return torch.from_numpy(words + mask)

    def aggregate(self, messages: Sequence[Tensor], t: int) -> Tensor:
        """Return Σ_i p_i · release_i (d,)."""
        if (grid := self.plan.grid) is not None:
            return torch.from_numpy(grid.decode_sum([message.numpy() for message in messages]))
        mean = torch.empty_like(messages[0])
        weights = torch.tensor(self.plan.weights, dtype=mean.dtype)
        for start in range(0, len(mean), _CHUNK):
            stop = start + _CHUNK
            parts = [message[start:stop] for message in messages] if len(mean) > _CHUNK else messages
            torch.mv(torch.stack(tuple(parts)).mT, weights, out=mean[start:stop])
        return mean


# The running sum


class RunningSum(NamedTuple):
    """State between rounds: the past vectors still needed, and the sum q_t; all (..., d).

    The past is queries, latest first; for parts it is v_q, v_{q-1}, and then u of the last N rounds in order.
    """

    past_vectors: tuple[Tensor, ...]
    total: Tensor


def initial_running_sum(like: Tensor) -> RunningSum:
    """Return the state before round 1: no query seen, q_0 = 0 with the shape and the type of `like`.

    A sum that is really released is float64, whatever type the queries have.
    """
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
    """Return the state after this round's records (None in a round without any), and how many were clipped (...).

    `memory` is how many queries, this round's included, the estimator looks at.  The sum keeps its type, which may
    be wider than the queries': gradients are taken in the queries' type and summed in the sum's.

    Guarantee: under zero-out one record moves s_t by at most its weight times `step.clip`, under
    replace-one by twice that, whatever the queries are.  In float64 it moves q_t by that too, up to 1e-9 of it; a
    float32 sum is rounded to more than that, and serves simulations only.
    """
    if weights.dtype != state.total.dtype:  # torch takes a while to see that there is nothing to do
        weights = weights.to(state.total.dtype)
    if step.split is not None:
        return update_split_running_sum(state, step, step.split, query, objective, records, weights)
    (part, _, _), past = increment_parts(step, query, state.past_vectors, memory)
    if records is None:
        return RunningSum(past, step.decay * state.total), query.new_zeros(query.shape[:-1], dtype=torch.int64)
    increment = objective.increment(part.query, Batch(records, weights), part.clip)
    total = increment.total  # made for this round alone
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
    """Return the state after this round's records, and the most records that any part clipped (...).

    Without records all three parts are 0, and the queries are remembered as in any round.

    Guarantee: under zero-out one record moves G_t, Δ_t and r_t each by at most its weight times that part's clip,
    under replace-one by twice that, whatever the queries are; r_t is 0 in the first round of an epoch.
    """
    epoch, place = divmod(step.t - 1, split.rounds_per_epoch)
    started = min(2, epoch + (place > 0))
    anchors_before, ring = state.past_vectors[:started], state.past_vectors[started:]
    (gradient, change, residual), anchors = increment_parts(step, query, anchors_before, 1)

    def increment(part: IncrementPart) -> Increment:
        if records is None:
            return Increment(torch.zeros_like(state.total), query.new_zeros(query.shape[:-1], dtype=torch.int64))
        return objective.increment(part.query, Batch(records, weights), part.clip)

    own, clipped = increment(gradient)
    if change is not None:
        changed = increment(change)
        own = (1.0 - split.mixing) * (ring[0] + changed.total) + split.mixing * own
        clipped = torch.maximum(clipped, changed.clipped_count)
    added = own
    if residual is not None:
        since = increment(residual)
        added, clipped = own + since.total, torch.maximum(clipped, since.clipped_count)
    kept = (*ring, own)[-split.rounds_per_epoch :]
    return RunningSum((*anchors, *kept), torch.add(added, state.total, alpha=step.decay)), clipped


# Noise of a simulation


class SeededNoise:
    """The noise that a simulation draws: each party's, as the plan scales it, from one source."""

    def __init__(self, plan: Plan, source: KeyedNormal, dtype: torch.dtype) -> None:
        self._plan, self._source = plan, source  # scaled and correlated in `dtype`
        self._dtype: np.dtype[Any] = np.dtype(str(dtype).removeprefix("torch."))
        self._stds = {party: float(std) for party, std, _ in plan.noise.sources}
        self._prefetched: dict[int, PrefetchedNoise] = {}

    def __call__(self, party: int, t: int) -> FreshNoise | None:
        std = self._stds.get(party, 0.0)
        if not std:
            return None
        # Widened and multiplied in one call, piece by piece in the cache.
        vectors, own = self._unit_vectors(party, t)
        return FreshNoise(torch.from_numpy(np.multiply(vectors, std, out=own, dtype=self._dtype)))

    def _unit_vectors(self, party: int, t: int) -> tuple[NDArray[np.floating], NDArray[np.floating] | None]:
        """Of variance 1, (d,), or (draws, d), and the same again if the caller may write into them."""
        size, count = self._plan.objective.dimension, self._plan.rounds[t - 1].noise_vector_count
        if count is not None:
            return self._source.node_vectors(size, party, t, count), None
        ahead = rounds_per_draw(size, len(self._plan.batch_sizes))
        if ahead == 1:  # piece by piece: no vector of the source's own type beside this one
            own = np.empty(size, dtype=self._dtype)
            return self._source.weighted_sum(size, [party], [1.0], t, out=own), own
        if party not in self._prefetched:
            self._prefetched[party] = PrefetchedNoise(self._source, size, party, self._plan.schedule.rounds, ahead)
        return self._prefetched[party].vector(t), None


def rounds_per_draw(dimension: int, silo_count: int) -> int:
    """The rounds whose vectors a simulated silo draws at a time; 1 where it keeps none."""
    most = (
        1 if dimension > MAX_VALUES_PER_DRAW else _MAX_ROUNDS_PER_DRAW
    )  # long ones are drawn in pieces, with no gain
    return max(1, min(most, _MAX_PREFETCHED_VALUES // (dimension * silo_count)))


class PrefetchedNoise:
    """One party's vectors for rounds in order, drawn `ahead` at a time: a batch costs half of single draws.

    A cache: any round may be asked for, any number of times.  Round 1 is alone, for clocks that start after it.
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
        """The vector of round t, shape (size,): do not write into it."""
        if not self._first_round <= t < self._first_round + len(self._block):
            rounds = range(t, 2 if t == 1 else max(t, min(t + self._block_size - 1, self._rounds)) + 1)
            self._block = self._source.vectors(self._dimension, [self._party] * len(rounds), rounds)
            self._first_round = t
        vector: NDArray[np.floating] = self._block[t - self._first_round]
        return vector


def evaluation_noise(cell: Cell) -> KeyedNormal:
    """A simulation's: a stream of its own from the scenario's seed, and no secret."""
    return KeyedNormal(seed_key(cell.seed, "evaluation"), cell.run.dtype)


def evaluation_integers_key(cell: Cell) -> bytes:
    """As `evaluation_noise`, for evaluations whose releases are integers."""
    return derive_key(integer_noise_key(cell.seed), "evaluation")


@dataclass(frozen=True)
class SimulatedEvaluation:
    """The evaluations of all silos of a simulation; in floating point `metrics` computes them at once."""

    evaluation_plan: EvaluationPlan
    test_records: list[Records]
    noise: KeyedNormal

    @staticmethod
    def from_cell(cell: Cell) -> "SimulatedEvaluation | None":
        """None where silos do not evaluate."""
        asked = make_evaluation_plan(cell, load_task(cell).objective)
        return (
            None
            if asked is None
            else SimulatedEvaluation(asked, test_records_of_silos(cell), evaluation_noise(cell))
        )

    def metrics(self, place: int, model: Tensor) -> dict[str, float]:
        """Of evaluation number `place`, from 1, of `model` (d,)."""
        means = torch.stack(
            [
                self._add_noise(self._mean_scores(model, own), silo, place)
                for silo, own in enumerate(self.test_records)
            ]
        )
        if self.evaluation_plan.publishes_each_silo:
            return self.evaluation_plan.metrics(means)
        weights = torch.tensor(self.evaluation_plan.plan.weights, dtype=means.dtype)
        return self.evaluation_plan.metrics(self._add_noise(weights @ means, SERVER, place).unsqueeze(0))

    def _mean_scores(self, model: Tensor, own: Records) -> Tensor:
        """Over all places, whether they count or not: a public denominator."""
        records, there = mask_absent_records(own)
        return (
            self.evaluation_plan.scores.contributions(model, records)
            .masked_fill(~there.unsqueeze(-1), 0.0)
            .mean(0)
        )

    def _add_noise(self, mean: Tensor, owner: int, place: int) -> Tensor:
        std = float(self.evaluation_plan.plan.noise.std_of(owner))
        return mean + std * torch.from_numpy(self.noise.vector(len(mean), owner, place)).double() if std else mean
