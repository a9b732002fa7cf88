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
from fedpriv.core.random import LONGEST_AT_ONCE, SERVER, KeyedNormal, derive_key, integers_key, seed_key
from fedpriv.loss.estimators import Round, Split
from fedpriv.loss.objective import Batch, Increment, Objective, Records, Slots
from fedpriv.plan.evaluation import EvaluationPlan, evaluation_plan_of, held_out_shares
from fedpriv.plan.plan import Plan, PlannedRound
from fedpriv.plan.task import counting, task_of_cell
from fedpriv.rounds.round import Part, Read, State, Summed, parts_of
from fedpriv.scenario.schema import Cell

_PIECE = 2**16
"""Values of a mean that are computed at a time: all messages side by side are a copy of every one."""
_ROUNDS_AHEAD = 16
_VALUES_AHEAD = 2**26  # of noise that all silos together hold ahead, when one process simulates them


class Fresh(NamedTuple):
    """Fresh vectors of a round, (..., d) or (..., draws, d); `amplitude` (..., 1) is a factor of B's row.

    Replicates can share unit noise, (1, d), since mechanisms are linear.
    """

    vectors: Tensor
    amplitude: Tensor | None = None


Draw = Callable[[int, int], Fresh | None]
"""(party, t) -> its fresh vectors of round t, or None if it adds no noise."""


@dataclass(frozen=True)
class FloatSteps:
    """Steps of a round in floating point: y_t = q_t + (B z)_t is what leaves.

    In the vectorized engine the plan's parts have leading axes, and so have all vectors.
    """

    plan: Plan
    draw: Draw = field(default=lambda party, t: None, repr=False)
    objective: Objective | None = None
    """A silo's bounded view of the plan's objective, or None for the plan's own."""

    def start(self, party: int) -> State:
        nothing = torch.zeros((), dtype=torch.float64).expand(self.plan.objective.dimension)  # takes no memory
        return State(sums=(nothing,), hidden=self.plan.mechanism.start())

    def sums(self, state: State, planned: PlannedRound, query: Tensor, read: Read) -> Summed:
        """Return q_t, and the number of clipped records (...); see `absorb`."""
        plan, (total,) = self.plan, state.sums
        objective = plan.objective if self.objective is None else self.objective
        if plan.takes_slots:
            objective = objective.at(Slots(planned.step.t, read.silos, read.rows))
        records = read.records if read.weights.shape[-1] else None
        before = RunningSum(state.past, total)
        (past, total), clipped = absorb(
            before, planned.step, query, objective, records, read.weights, plan.estimator.memory
        )
        return Summed(total, past, clipped)

    def nothing(self, state: State, t: int) -> Tensor:
        return state.sums[0] * self.plan.rounds[t - 1].step.decay

    def noisy(self, state: State, t: int, sums: Tensor, party: int, query: Tensor | None) -> tuple[Tensor, State]:
        kept, decay = sums, self.plan.rounds[t - 1].next_decay
        if isinstance(decay, float) and decay == 0.0:
            kept = sums.new_zeros(()).expand_as(sums)  # takes no memory: nobody needs these sums again
        if (fresh := self.draw(party, t)) is None:
            return sums, State(t, state.past, (kept,), state.hidden)
        row, hidden = self.plan.mechanism.noise(state.hidden, t, fresh.vectors)
        out, size = None if kept is sums else sums, fresh.amplitude
        noisy = torch.add(sums, row, out=out) if size is None else torch.addcmul(sums, size, row, out=out)
        return noisy, State(t, state.past, (kept,), hidden)

    def leaving(self, state: State, t: int, noisy: Tensor, party: int) -> tuple[Tensor, State]:
        return noisy, state

    def words(self, release: Tensor, t: int, party: int, mask: NDArray[np.uint64]) -> Tensor:
        """Return p_i · release on the plan's grid, uint64 (d,)."""
        assert self.plan.grid is not None  # as wherever silos are to mask
        try:
            words = self.plan.grid.encode(self.plan.weights[party] * release.numpy())
        except RunError as error:
            raise RunError(f"silo {party}, round {t}: {error}") from None
        return torch.from_numpy(words + mask)

    def added(self, messages: Sequence[Tensor], t: int) -> Tensor:
        """Return Σ_i p_i · release_i (d,)."""
        if (grid := self.plan.grid) is not None:
            return torch.from_numpy(grid.decode_sum([message.numpy() for message in messages]))
        mean = torch.empty_like(messages[0])
        weights = torch.tensor(self.plan.weights, dtype=mean.dtype)
        for start in range(0, len(mean), _PIECE):
            stop = start + _PIECE
            parts = [message[start:stop] for message in messages] if len(mean) > _PIECE else messages
            torch.mv(torch.stack(tuple(parts)).mT, weights, out=mean[start:stop])
        return mean


# The running sum


class RunningSum(NamedTuple):
    """State between rounds: the past vectors still needed, and the sum q_t; all (..., d).

    The past is queries, latest first; for parts it is v_q, v_{q-1}, and then u of the last N rounds in order.
    """

    past: tuple[Tensor, ...]
    total: Tensor


def empty_sum(like: Tensor) -> RunningSum:
    """Return the state before round 1: no query seen, q_0 = 0 with the shape and the type of `like`.

    A sum that is really released is float64, whatever type the queries have.
    """
    return RunningSum((), torch.zeros_like(like))


def absorb(
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
        return absorb_split(state, step, step.split, query, objective, records, weights)
    (part, _, _), past = parts_of(step, query, state.past, memory)
    if records is None:
        return RunningSum(past, step.decay * state.total), query.new_zeros(query.shape[:-1], dtype=torch.int64)
    increment = objective.increment(part.query, Batch(records, weights), part.clip)
    total = increment.total  # made for this round alone
    if step.decay:
        total.add_(state.total, alpha=step.decay)
    return RunningSum(past, total), increment.clipped


def absorb_split(
    state: RunningSum,
    step: Round,
    split: Split,
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
    anchors_before, ring = state.past[:started], state.past[started:]
    (gradient, change, residual), anchors = parts_of(step, query, anchors_before, 1)

    def increment(part: Part) -> Increment:
        if records is None:
            return Increment(torch.zeros_like(state.total), query.new_zeros(query.shape[:-1], dtype=torch.int64))
        return objective.increment(part.query, Batch(records, weights), part.clip)

    own, clipped = increment(gradient)
    if change is not None:
        changed = increment(change)
        own = (1.0 - split.mixing) * (ring[0] + changed.total) + split.mixing * own
        clipped = torch.maximum(clipped, changed.clipped)
    added = own
    if residual is not None:
        since = increment(residual)
        added, clipped = own + since.total, torch.maximum(clipped, since.clipped)
    kept = (*ring, own)[-split.rounds_per_epoch :]
    return RunningSum((*anchors, *kept), torch.add(added, state.total, alpha=step.decay)), clipped


# Noise of a simulation


class Seeded:
    """The noise that a simulation draws: each party's, as the plan scales it, from one source."""

    def __init__(self, plan: Plan, source: KeyedNormal, dtype: torch.dtype) -> None:
        self._plan, self._source = plan, source  # scaled and correlated in `dtype`
        self._dtype: np.dtype[Any] = np.dtype(str(dtype).removeprefix("torch."))
        self._stds = {party: float(std) for party, std, _ in plan.noise.sources}
        self._ahead: dict[int, DrawAhead] = {}

    def __call__(self, party: int, t: int) -> Fresh | None:
        std = self._stds.get(party, 0.0)
        if not std:
            return None
        # Widened and multiplied in one call, piece by piece in the cache.
        vectors, own = self._vectors(party, t)
        return Fresh(torch.from_numpy(np.multiply(vectors, std, out=own, dtype=self._dtype)))

    def _vectors(self, party: int, t: int) -> tuple[NDArray[np.floating], NDArray[np.floating] | None]:
        """Of variance 1, (d,), or (draws, d), and the same again if the caller may write into them."""
        size, count = self._plan.objective.dimension, self._plan.rounds[t - 1].vectors
        if count is not None:
            return self._source.nodes(size, party, t, count), None
        ahead = rounds_ahead(size, len(self._plan.batch_sizes))
        if ahead == 1:  # piece by piece: no vector of the source's own type beside this one
            own = np.empty(size, dtype=self._dtype)
            return self._source.weighted_sum(size, [party], [1.0], t, out=own), own
        if party not in self._ahead:
            self._ahead[party] = DrawAhead(self._source, size, party, self._plan.schedule.rounds, ahead)
        return self._ahead[party].vector(t), None


def rounds_ahead(size: int, silos: int) -> int:
    """The rounds whose vectors a simulated silo draws at a time; 1 where it keeps none."""
    most = 1 if size > LONGEST_AT_ONCE else _ROUNDS_AHEAD  # long ones are drawn in pieces, with no gain
    return max(1, min(most, _VALUES_AHEAD // (size * silos)))


class DrawAhead:
    """One party's vectors for rounds in order, drawn `ahead` at a time: a batch costs half of single draws.

    A cache: any round may be asked for, any number of times.  Round 1 is alone, for clocks that start after it.
    """

    def __init__(self, source: KeyedNormal, size: int, party: int, rounds: int, ahead: int) -> None:
        self._source, self._size, self._party, self._rounds, self._ahead = source, size, party, rounds, ahead
        self._first = 0
        self._drawn = np.empty((0, size), source.dtype)

    def vector(self, t: int) -> NDArray[np.floating]:
        """The vector of round t, shape (size,): do not write into it."""
        if not self._first <= t < self._first + len(self._drawn):
            rounds = range(t, 2 if t == 1 else max(t, min(t + self._ahead - 1, self._rounds)) + 1)
            self._drawn = self._source.vectors(self._size, [self._party] * len(rounds), rounds)
            self._first = t
        vector: NDArray[np.floating] = self._drawn[t - self._first]
        return vector


def evaluation_noise(cell: Cell) -> KeyedNormal:
    """A simulation's: a stream of its own from the scenario's seed, and no secret."""
    return KeyedNormal(seed_key(cell.seed, "evaluation"), cell.run.dtype)


def evaluation_integers_key(cell: Cell) -> bytes:
    """As `evaluation_noise`, for evaluations whose releases are integers."""
    return derive_key(integers_key(cell.seed), "evaluation")


@dataclass(frozen=True)
class SimulatedEvaluation:
    """The evaluations of all silos of a simulation; in floating point `metrics` computes them at once."""

    asked: EvaluationPlan
    shares: list[Records]
    noise: KeyedNormal

    @staticmethod
    def of(cell: Cell) -> "SimulatedEvaluation | None":
        """None where silos do not evaluate."""
        asked = evaluation_plan_of(cell, task_of_cell(cell).objective)
        return None if asked is None else SimulatedEvaluation(asked, held_out_shares(cell), evaluation_noise(cell))

    def metrics(self, place: int, model: Tensor) -> dict[str, float]:
        """Of evaluation number `place`, from 1, of `model` (d,)."""
        means = torch.stack(
            [self._noisy(self._mean(model, own), silo, place) for silo, own in enumerate(self.shares)]
        )
        if self.asked.apart:
            return self.asked.metrics(means)
        weights = torch.tensor(self.asked.plan.weights, dtype=means.dtype)
        return self.asked.metrics(self._noisy(weights @ means, SERVER, place).unsqueeze(0))

    def _mean(self, model: Tensor, own: Records) -> Tensor:
        """Over all places, whether they count or not: a public denominator."""
        records, there = counting(own)
        return self.asked.scores.contributions(model, records).masked_fill(~there.unsqueeze(-1), 0.0).mean(0)

    def _noisy(self, mean: Tensor, owner: int, place: int) -> Tensor:
        std = float(self.asked.plan.noise.std_of(owner))
        return mean + std * torch.from_numpy(self.noise.vector(len(mean), owner, place)).double() if std else mean
