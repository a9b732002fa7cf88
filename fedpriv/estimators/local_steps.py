"""Steps that silos take by themselves between two averages: where a round takes its gradients then.

    w_{i,t} = x_s - step · Σ_{r = s}^{t-1} release_{i,r}     s: the round in which the silos started from x_s

Guarantee: a silo's own point is a function of the query and of what it has released, so that the noise that is
calibrated for any query serves it too.
"""

from torch import Tensor

from fedpriv.estimators.round import Round

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
