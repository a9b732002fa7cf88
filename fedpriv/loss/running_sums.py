"""The running sum of clipped increments: what a silo keeps, and what the vectorized engine keeps for all of them.

    s_t = Σ_b weight_b · clip(Σ_k c_k ∇f(query_{t-k}; record b))
    q_t = decay · q_{t-1} + s_t

The map from increments to sums is linear, so the weighted mean over silos of their sums is the sum of the
weighted mean increments: one silo's records, or all silos' records with weights p_i / B_i, go through here alike.

Increments may be clipped in parts: the gradient, and how it changed (Tran & Cutkosky 2022, Algorithm 2, with each
part clipped for itself and epochs of N rounds).  With v_q the query of the first round of epoch q and p the place
in it,

    G_t = clip(α g_t(v_q)),   Δ_t = clip(α g_t(v_q) - α g_t(v_{q-1})),   r_t = clip(α g_t(w_t) - α g_t(v_q))
    u_t = (1 - γ) (u_{t-N} + Δ_t) + γ G_t,   in the first epoch u_t = G_t
    q_t = decay q_{t-1} + u_t + r_t

Where no clip bites this is plain momentum.  Parts need no bound on the loss's smoothness.

Silos may take steps by themselves between two averages, and take gradients at a point of their own:

    w_{i,t} = x_s - step · Σ_{r = s}^{t-1} release_{i,r}     s: the round in which the silos started from x_s

Guarantee: a silo's own point is a function of the query and of what it has released, so that the noise that is
calibrated for any query serves it too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import Round, Split
from fedpriv.loss.objective import Batch, Increment, Objective, Query, Records


class Part(NamedTuple):
    """A query whose answers are clipped to norm `clip`, each record's."""

    query: Query
    clip: Scalar


class Parts(NamedTuple):
    """One part, or the gradient at the epoch's first query with two changes of it; see above."""

    gradient: Part
    change: Part | None = None
    """Δ: since the epoch before; None in the first epoch."""
    residual: Part | None = None
    """r: since the epoch's first query; None in its first round."""


def _as_a_whole(
    current: Round, query: Tensor, past: tuple[Tensor, ...], memory: int
) -> tuple[Query, tuple[Tensor, ...]]:
    """What records are asked for in a round that is clipped as a whole, and the queries to remember."""
    queries = (query, *past)
    return Query(queries[: len(current.coefficients)], current.coefficients), queries[: memory - 1]


def parts_of(
    current: Round, query: Tensor, past: tuple[Tensor, ...], memory: int
) -> tuple[Parts, tuple[Tensor, ...]]:
    """The parts of round `current.t` at `query` (..., d), and the queries to remember; `past` are those until now.

    Latest first, at most `memory` - 1 of them; for an estimator that takes increments apart the first queries of
    this epoch and the one before.
    """
    if current.split is None:
        asked, queries = _as_a_whole(current, query, past, memory)
        return Parts(Part(asked, current.clip)), queries
    epoch, place = divmod(current.t - 1, current.split.rounds_per_epoch)
    anchors = past if place else (query, *past)[:2]
    (weight,) = current.coefficients
    apart = (weight, -weight)
    return (
        Parts(
            Part(Query(anchors[:1], (weight,)), current.clip),
            Part(Query(anchors, apart), current.split.difference_clip) if epoch else None,
            Part(Query((query, anchors[0]), apart), current.split.residual_clip) if place else None,
        ),
        anchors,
    )


class RunningSum(NamedTuple):
    """State between rounds: the past vectors still needed, and the sum q_t; all (..., d).

    The past is queries, latest first; for parts it is v_q, v_{q-1}, and then u of the last N rounds in order.
    """

    past: tuple[Tensor, ...]
    total: Tensor


def absorb_split(
    state: RunningSum,
    current: Round,
    split: Split,
    query: Tensor,
    objective: Objective,
    records: Records | None,
    weights: Tensor,
) -> tuple[RunningSum, Tensor]:
    """The state after this round's records, and the most records that any part clipped (...).

    Without records all three parts are 0, and the queries are remembered as in any round.

    Guarantee: under zero-out one record moves G_t, Δ_t and r_t each by at most its weight times that part's clip,
    under replace-one by twice that, whatever the queries are; r_t is 0 in the first round of an epoch.
    """
    epoch, place = divmod(current.t - 1, split.rounds_per_epoch)
    started = min(2, epoch + (place > 0))
    remembered, ring = state.past[:started], state.past[started:]
    (gradient, change, residual), anchors = parts_of(current, query, remembered, 1)

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
    return RunningSum((*anchors, *kept), torch.add(added, state.total, alpha=current.decay)), clipped


def empty_sum(like: Tensor) -> RunningSum:
    """Before round 1: no query seen, q_0 = 0 with the shape and the type of `like`.

    A sum that is really released is float64, whatever type the queries have.
    """
    return RunningSum((), torch.zeros_like(like))


def absorb(
    state: RunningSum,
    current: Round,
    query: Tensor,
    objective: Objective,
    records: Records | None,
    weights: Tensor,
    memory: int,
) -> tuple[RunningSum, Tensor]:
    """The state after this round's records (None in a round without any), and how many were clipped (...).

    `memory` is how many queries, this round's included, the estimator looks at.  The sum keeps its type, which may
    be wider than the queries': gradients are taken in the queries' type and summed in the sum's.

    Guarantee: under zero-out one record moves s_t by at most its weight times `current.clip`, under
    replace-one by twice that, whatever the queries are.  In float64 it moves q_t by that too, up to 1e-9 of it; a
    float32 sum is rounded to more than that, and serves simulations only.
    """
    if weights.dtype != state.total.dtype:  # torch takes a while to see that there is nothing to do
        weights = weights.to(state.total.dtype)
    if current.split is not None:
        return absorb_split(state, current, current.split, query, objective, records, weights)
    if records is None:
        past = (query, *state.past)[: memory - 1]
        return RunningSum(past, current.decay * state.total), query.new_zeros(query.shape[:-1], dtype=torch.int64)
    asked, past = _as_a_whole(current, query, state.past, memory)
    increment = objective.increment(asked, Batch(records, weights), current.clip)
    total = increment.total  # made for this round alone
    if current.decay:
        total.add_(state.total, alpha=current.decay)
    return RunningSum(past, total), increment.clipped


Past = tuple[Tensor, ...]
"""What a silo remembers: the sum of its releases since it started, (..., d), or nothing before round 1."""


def point_of(current: Round, query: Tensor, past: Past) -> Tensor:
    """Where a silo takes the gradients of round `current.t`, (..., d), of the query's type."""
    if current.local is None or current.local.first or not past:
        return query
    return (query - current.local.step * past[0]).to(query.dtype)


def remembered(current: Round, before: Past, after: Past, released: Tensor) -> Past:
    """What a silo remembers after it `released` (..., d): `after` is what it does for others' sake."""
    if current.local is None:
        return after
    return (released if current.local.first or not before else before[0] + released,)
