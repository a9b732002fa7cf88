"""Running sums of increments that are clipped in parts: the gradient, and how it changed.

Tran & Cutkosky 2022, Algorithm 2, with each part clipped for itself and epochs of N rounds.  With v_q the query of
the first round of epoch q and p the place in it,

    G_t = clip(α g_t(v_q)),   Δ_t = clip(α g_t(v_q) - α g_t(v_{q-1})),   r_t = clip(α g_t(w_t) - α g_t(v_q))
    u_t = (1 - γ) (u_{t-N} + Δ_t) + γ G_t,   in the first epoch u_t = G_t
    q_t = decay q_{t-1} + u_t + r_t

Where no clip bites this is plain momentum.  Parts need no bound on the loss's smoothness.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.estimators.parts import parts_of
from fedpriv.estimators.round import Round, Split
from fedpriv.objectives import Objective, Records


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
    records: Records,
    weights: Tensor,
) -> tuple[RunningSum, Tensor]:
    """The state after this round's records, and the most records that any part clipped (...).

    Guarantee: under zero-out one record moves G_t, Δ_t and r_t each by at most its weight times that part's clip,
    under replace-one by twice that, whatever the queries are; r_t is 0 in the first round of an epoch.
    """
    epoch, place = divmod(current.t - 1, split.rounds_per_epoch)
    started = min(2, epoch + (place > 0))
    remembered, ring = state.past[:started], state.past[started:]
    (gradient, change, residual), anchors = parts_of(current, query, remembered, 1)
    part = objective.increment(gradient.points, gradient.coefficients, records, weights, gradient.clip)
    own, clipped = part.total, part.clipped
    if change is not None:
        changed = objective.increment(change.points, change.coefficients, records, weights, change.clip)
        own = (1.0 - split.mixing) * (ring[0] + changed.total) + split.mixing * own
        clipped = torch.maximum(clipped, changed.clipped)
    added = own
    if residual is not None:
        since = objective.increment(residual.points, residual.coefficients, records, weights, residual.clip)
        added, clipped = own + since.total, torch.maximum(clipped, since.clipped)
    kept = (*ring, own)[-split.rounds_per_epoch :]
    return RunningSum((*anchors, *kept), torch.add(added, state.total, alpha=current.decay)), clipped
