"""How much noise in each released row weighs in what a run publishes: its output, and its queries.

With gradients fixed and no projection active, both are affine in the released rows (`published.response_of`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.mechanisms.workload import Floats

_MANY_ROUNDS = 6000


@dataclass(frozen=True)
class Response:
    """Weights of the released rows 1 … T in some queries, (Q, T), and in the output, (T,), if that counts."""

    queries: Floats
    output: Floats | None = None

    @property
    def rounds(self) -> int:
        return int(self.queries.shape[1])


def most_queries(rounds: int) -> int:
    """How many queries a fit looks at: 64, beyond 6,000 rounds 16."""
    return 64 if rounds <= _MANY_ROUNDS else 16


def rows_response(rounds: int, queries: int | None = None) -> Response:
    """The released rows themselves: for theorems that ask for their mean noise (normalized SGD)."""
    points = spaced(rounds, most_queries(rounds) if queries is None else queries)
    return Response(np.equal.outer(points, np.arange(rounds)).astype(np.float64))


def spaced(rounds: int, count: int) -> NDArray[np.int64]:
    """At most `count` of 0 … rounds - 1, the first and the last among them."""
    return np.unique(np.round(np.linspace(0, rounds - 1, min(count, rounds))).astype(np.int64))
