"""Banded Toeplitz C: sums of the last increments, which are kept as they are, so that roundings never add up."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fedpriv.errors import InputError
from fedpriv.exact.fixed_point import ONE, Ints, scaled, scaled_bound
from fedpriv.exact.strategies.base import Group, IntegerStrategy, IntState, Load, Reach


@dataclass(frozen=True)
class IntegerBanded(IntegerStrategy):
    """s_t + Σ_j ⌊c_j s_{t-j}⌉; `coefficients` c_1, c_2, … count multiples of 2^-31, c_0 = 1 is left out.

    Each of the products is rounded for itself, so neighbours differ by 1 a band beside the diagonal.
    """

    coefficients: tuple[int, ...]

    def __post_init__(self) -> None:
        falling = all(
            after <= before for before, after in zip((ONE, *self.coefficients), self.coefficients, strict=False)
        )
        if not falling or any(c < 0 for c in self.coefficients):
            raise InputError("coefficients of a banded strategy start with 1, never rise and are 0 or more")

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        return (Group(rounds, 1.0, Fraction(min(len(self.coefficients), rounds))),)

    def reach(self, loads: Sequence[Load]) -> Reach:
        largest = 0
        past: list[int] = []
        for (load,) in loads:
            products = map(scaled_bound, past, self.coefficients)
            largest = max(largest, load + sum(products))
            past = [load, *past][: len(self.coefficients)]
        return Reach(largest, largest)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the last increments, latest first: one fewer than there are bands."""
        if not self.coefficients:
            return sums, ()
        total = sums.copy()
        for past, coefficient in zip(state, self.coefficients, strict=False):
            total += scaled(past, coefficient)
        return total, (sums, *state)[: len(self.coefficients)]
