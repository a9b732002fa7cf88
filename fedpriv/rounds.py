"""What everyone knows about a round before the first one: its coefficients, its clip and who takes part."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Union

if TYPE_CHECKING:  # accounting reads rounds without a model, and must start fast
    from torch import Tensor

Scalar = Union[float, "Tensor"]
"""A number, or one number a replicate as a tensor of shape (replicates, 1): the same formulas serve both."""

SHARED = {"shared": True}
"""Metadata of a dataclass field whose value runs that are computed together must have in common."""

PER_REPLICATE = {"per replicate": True}
"""Metadata of a dataclass field that holds a tuple with an entry for each run computed together."""


class Round(NamedTuple):
    """The public record of round t, read alike by silo, server and accountant.

    A silo sums its records' increments, `coefficients[k]` times the gradient at the k-th last query (0 is this
    round's), each clipped to norm `clip`, and keeps the running sum q_t = keep * q_{t-1} + mean increment.
    What is released estimates `scale` times the gradient at the query, so an optimizer that wants the gradient
    divides by `scale`.
    """

    t: int
    coefficients: tuple[float, ...]
    keep: float
    clip: Scalar
    scale: float


@dataclass(frozen=True)
class Schedule:
    """Fixed order: every silo reads its batches 0 … places-1 in order, `rounds` / `places` times over.

    With places == rounds each record takes part in exactly one round (single pass).

    Guarantee: the record in place p takes part in rounds p+1, p+1+places, … and in no other.
    """

    rounds: int
    places: int

    def place(self, t: int) -> int:
        """Which batch of the silo's order, counted from 0, round t (from 1) uses."""
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        return (t - 1) % self.places

    @property
    def single_pass(self) -> bool:
        return self.places >= self.rounds
