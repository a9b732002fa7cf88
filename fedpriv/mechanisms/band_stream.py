"""Streaming C^-1 z where C, or its inverse, has a few diagonals, and summing it with decay."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedpriv.mechanisms.base import MechanismState

if TYPE_CHECKING:
    from torch import Tensor


def noise(
    state: MechanismState, fresh: "Tensor", decay: float, weights: Sequence[float], *, of_rows: bool
) -> tuple["Tensor", MechanismState]:
    """Row t of B z and the next state, which holds the last noise and `len(weights)` vectors, latest first.

    They are the last rows of C^-1 z (`of_rows`: C is banded) or the last fresh vectors (C^-1 is banded), and
    `weights` is what each adds to this round's row.
    """
    if not state:
        return fresh, (fresh, fresh)[: 1 + len(weights)]
    past = state[1:]
    row = fresh.clone()
    for weight, earlier in zip(weights, past, strict=False):
        row.add_(earlier, alpha=weight)
    noise = row.add(state[0], alpha=decay)
    return noise, (noise, *(row if of_rows else fresh, *past)[: len(weights)])


def memory_vectors(bands: int, rounds: int) -> int:
    """The most vectors of the state: the last noise, and one a round up to bands - 1."""
    return min(bands, rounds + 1)
