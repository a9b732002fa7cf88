"""Buffered linear Toeplitz C: a few decaying buffers in place of all past increments.

    c(x) = Π(1 - φ_i x) / Π(1 - θ_i x) = 1 + Σ ω_i x / (1 - θ_i x),   θ_1 > φ_1 > θ_2 > … ≥ 0

θ and ω are multiples of 2^-31 by definition, and φ, which B needs, follows from them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.noise.integers.fixed_point import ONE, Ints, coefficient, scaled, scaled_bound
from fedpriv.noise.integers.strategies import Group, IntegerStrategy, IntState, Load, Reach, accumulated, restarts

_MOST_DIGITS = 24


@dataclass(frozen=True)
class IntegerBuffered(IntegerStrategy):
    """b_i ← ⌊θ_i b_i⌉ + 2^g s_t, after s_t + Σ ⌊ω_i b_i / 2^g⌉ was given; θ, ω count multiples of 2^-31.

    `digits` is g: binary digits of a unit that the buffers hold.  They make the buffers' roundings, which add up
    to 1 / (1 - θ_i), small beside the one of each product.
    """

    theta: tuple[int, ...]
    omega: tuple[int, ...]
    digits: int = 0
    period: int | None = None

    def __post_init__(self) -> None:
        if len(self.theta) != len(self.omega) or not 0 <= self.digits <= _MOST_DIGITS:
            raise InputError(
                f"{len(self.theta)} decays, {len(self.omega)} weights, {self.digits} digits: as many decays "
                f"as weights are needed, and 0 to {_MOST_DIGITS} digits"
            )
        if any(not 0 <= theta <= ONE for theta in self.theta) or min(self.omega, default=0) < 0:
            raise InputError("buffers decay by 0 to 1 a round and have weights of 0 or more")
        if sum(self.omega) > ONE:
            raise InputError("the buffers' weights add up to more than 1: C would not fall")

    def groups(self, rounds: int, participations: int) -> tuple[Group, ...]:
        block = rounds if self.period is None else min(self.period, rounds)
        return (Group(rounds, 1.0, len(self.theta) + self._carried(block) / 2**self.digits),)

    def carried(self, block: int) -> int:
        """How many roundings of a buffer one output can have in it after `block` rounds, rounded up."""
        return math.ceil(self._carried(block))

    def _carried(self, block: int) -> Fraction:
        return sum(
            (
                Fraction(omega, ONE) * accumulated(theta, block)
                for theta, omega in zip(self.theta, self.omega, strict=True)
            ),
            Fraction(0),
        )

    def reach(self, loads: Sequence[Load]) -> Reach:
        largest = inside = 0
        buffers = [0] * len(self.theta)
        for t, (load,) in enumerate(loads, start=1):
            if restarts(t, self.period):
                buffers = [0] * len(self.theta)
            read = sum(scaled_bound(b, omega, self.digits) for b, omega in zip(buffers, self.omega, strict=True))
            largest = max(largest, load + read)
            buffers = [
                scaled_bound(b, theta) + (load << self.digits)
                for b, theta in zip(buffers, self.theta, strict=True)
            ]
            inside = max(inside, largest, *buffers)
        return Reach(largest, inside)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """The state holds the buffers."""
        fresh = sums << self.digits
        if not state or restarts(t, self.period):
            return sums, (fresh,) * len(self.theta)
        total, buffers = sums.copy(), []
        for buffer, theta, omega in zip(state, self.theta, self.omega, strict=True):
            total += scaled(buffer, omega, self.digits)
            buffers.append((buffer if theta == ONE else scaled(buffer, theta)) + fresh)
        return total, tuple(buffers)


def buffered(
    theta: Sequence[float], phi: Sequence[float], digits: int = 0, period: int | None = None
) -> IntegerBuffered:
    """The strategy of the roots θ_1 > φ_1 > θ_2 > φ_2 > … ≥ 0, θ_1 ≤ 1; InputError if they do not interlace."""
    exact = [[Fraction(root) for root in roots] for roots in (theta, phi)]
    mixed = [root for pair in zip(*exact, strict=False) for root in pair]
    falling = all(before > after for before, after in itertools.pairwise(mixed))
    if len(theta) != len(phi) or not falling or (mixed and not (mixed[0] <= 1 and mixed[-1] >= 0)):
        raise InputError("roots of a buffered strategy interlace: 1 ≥ θ_1 > φ_1 > θ_2 > φ_2 > … ≥ 0")
    return IntegerBuffered(
        tuple(coefficient(root) for root in theta),
        tuple(_nearest(_residue(exact[0], exact[1], i)) for i in range(len(theta))),
        digits,
        period,
    )


def phi_of(strategy: IntegerBuffered) -> NDArray[np.float64]:
    """φ_1 > φ_2 > …: the roots of C's numerator that belong to the rounded θ and ω; shape (buffers,).

    They are the eigenvalues of diag(θ) - √ω √ωᵀ (the matrix determinant lemma), which is symmetric.
    """
    theta, omega = (np.array(values, np.float64) / ONE for values in (strategy.theta, strategy.omega))
    roots = np.linalg.eigvalsh(np.diag(theta) - np.sqrt(np.outer(omega, omega)))
    return np.asarray(roots[::-1], np.float64)


def series_of(strategy: IntegerBuffered, rounds: int) -> NDArray[np.float64]:
    """c_0, c_1, …: the first column of C, (rounds,)."""
    lags = np.arange(rounds - 1, dtype=np.float64)
    column = np.zeros(rounds - 1)
    for theta, omega in zip(strategy.theta, strategy.omega, strict=True):
        column += omega / ONE * (theta / ONE) ** lags
    return np.concatenate([[1.0], column])


def _residue(theta: list[Fraction], phi: list[Fraction], place: int) -> Fraction:
    """ω_i = Π_j (θ_i - φ_j) / Π_{j≠i} (θ_i - θ_j)."""
    own, result = theta[place], Fraction(1)
    for root in phi:
        result *= own - root
    for other, root in enumerate(theta):
        if other != place:
            result /= own - root
    return result


def _nearest(value: Fraction) -> int:
    return round(value * ONE)
