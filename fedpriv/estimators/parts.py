"""Which increments a round takes of every record, and the queries that later rounds need for theirs."""

from typing import NamedTuple

from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.replicates.columns import Scalar


class Part(NamedTuple):
    """clip(Σ_k coefficients[k] ∇f(points[k])), each record's, of norm at most `clip`."""

    points: tuple[Tensor, ...]
    coefficients: tuple[float, ...]
    clip: Scalar


class Parts(NamedTuple):
    """One part, or the gradient at the epoch's first query with two changes of it; see `split_sum`."""

    gradient: Part
    change: Part | None = None
    """Δ: since the epoch before; None in the first epoch."""
    residual: Part | None = None
    """r: since the epoch's first query; None in its first round."""


def parts_of(
    current: Round, query: Tensor, past: tuple[Tensor, ...], memory: int
) -> tuple[Parts, tuple[Tensor, ...]]:
    """The parts of round `current.t` at `query` (..., d), and the queries to remember; `past` are those until now.

    Latest first, at most `memory` - 1 of them; for an estimator that takes increments apart the first queries of
    this epoch and the one before.
    """
    if current.split is None:
        queries = (query, *past)
        part = Part(queries[: len(current.coefficients)], current.coefficients, current.clip)
        return Parts(part), queries[: memory - 1]
    epoch, place = divmod(current.t - 1, current.split.rounds_per_epoch)
    anchors = past if place else (query, *past)[:2]
    (weight,) = current.coefficients
    apart = (weight, -weight)
    return (
        Parts(
            Part(anchors[:1], (weight,), current.clip),
            Part(anchors, apart, current.split.difference_clip) if epoch else None,
            Part((query, anchors[0]), apart, current.split.residual_clip) if place else None,
        ),
        anchors,
    )
