"""The running sum of clipped increments: what a silo keeps, and what the vectorized engine keeps for all of them.

    s_t = Σ_b weight_b · clip(Σ_k c_k ∇f(query_{t-k}; record b))
    q_t = decay · q_{t-1} + s_t

The map from increments to sums is linear, so the weighted mean over silos of their sums is the sum of the
weighted mean increments: one silo's records, or all silos' records with weights p_i / B_i, go through here alike.
"""

import torch
from torch import Tensor

from fedpriv.estimators.parts import parts_of
from fedpriv.estimators.round import Round
from fedpriv.estimators.split_sum import RunningSum, absorb_split
from fedpriv.objectives import Objective, Records

__all__ = ["RunningSum", "absorb", "empty_sum"]


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
    if records is None:
        past = (query, *state.past)[: memory - 1]
        return RunningSum(past, current.decay * state.total), query.new_zeros(query.shape[:-1], dtype=torch.int64)
    if current.split is not None:
        return absorb_split(state, current, current.split, query, objective, records, weights)
    (part, *_), past = parts_of(current, query, state.past, memory)
    increment = objective.increment(part.points, part.coefficients, records, weights, part.clip)
    total = increment.total  # made for this round alone
    if current.decay:
        total.add_(state.total, alpha=current.decay)
    return RunningSum(past, total), increment.clipped
