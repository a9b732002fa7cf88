"""The lattice of a run: multiples of a unit u, a power of 2, on which clips are whole: public before round 1.

The banded square root with coefficients that are multiples of 2^-31, in C, B and the sensitivity alike.

From a mechanism to its exact form: C on integers, and B and the sensitivity of the same coefficients.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, singledispatch

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.noise import series
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian, ScheduledGaussian
from fedpriv.noise.differences import AlignedDifferences
from fedpriv.noise.integers.buffered import IntegerBuffered, buffered, phi_of, series_of
from fedpriv.noise.integers.fixed_point import ONE, coefficient, rounded
from fedpriv.noise.integers.strategies import (
    IntegerAligned,
    IntegerBanded,
    IntegerLeaf,
    IntegerPrefix,
    IntegerScheduled,
    IntegerStrategy,
    IntegerTree,
)
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.toeplitz import BandedInverseSquareRoot, BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.noise.workload import Floats, Workload
from fedpriv.participation.orders import Separated

MOST_KAPPA = 36
"""The largest clip is 2^36 to 2^37 units, unless sums, noise or words need it to be less."""
_LEAST_CLIP, _MOST_CLIP = 2.0**-40, 2.0**40


@dataclass(frozen=True)
class Lattice:
    """Multiples of 2^`exponent`."""

    exponent: int

    @property
    def unit(self) -> float:
        """u."""
        return math.ldexp(1.0, self.exponent)

    def norm(self, clip: float) -> int:
        """K = ⌊clip / u⌋, exactly."""
        return math.floor(math.ldexp(clip, -self.exponent))

    def factor(self, batches: int = 1) -> float:
        """Units per unit of an increment, in a round that reads so many batches and whose sum is divided by them.

        The clip that K belongs to has the same divisor in it.
        """
        return math.ldexp(1.0 / batches, -self.exponent)


def lattice_for(clips: Sequence[float], kappa: int) -> Lattice:
    """u = 2^(⌊log2 of the largest clip⌋ - `kappa`); InputError for clips outside of 2^-40 … 2^40."""
    low, high = min(clips), max(clips)
    if not _LEAST_CLIP <= low <= high <= _MOST_CLIP:
        raise InputError(f"clips from {low:g} to {high:g}: integers need them to lie between 2^-40 and 2^40")
    return Lattice(math.frexp(high)[1] - 1 - kappa)


@dataclass(frozen=True)
class RoundedBanded(BandedSquareRoot):
    """`BandedSquareRoot` whose C has the coefficients `multiples` / 2^31.

    Guarantee: rounding keeps them falling and ≥ 0, so the worst record is charged as exactly as without it.
    """

    @cached_property
    def multiples(self) -> tuple[int, ...]:
        """c_0, c_1, …, counted in 2^-31."""
        return tuple(coefficient(value) for value in series.square_root(self.decay, self.bands).tolist())

    def _strategy(self, rounds: int) -> Floats:
        return np.array(self.multiples[:rounds]) / ONE

    def _noise_series(self, rounds: int) -> Floats:
        return series.inverse(np.convolve(self._strategy(rounds), [1.0, -self.decay]), rounds)


_MOST_DIGITS = 10
_NO_ROOT = 2.0**-20  # φ_m = 0 comes out of rounded residues a little beside it


@dataclass(frozen=True)
class Factored:
    """A factorization A = B C with C on integers.

    `workload` has the clips in real units, and the decay that `strategy` has; `mechanism` supplies B and the
    sensitivity, for the coefficients that `strategy` has.
    """

    strategy: IntegerStrategy
    mechanism: Mechanism
    workload: Workload
    spread: Fraction = Fraction(1)
    """What the sensitivity is multiplied by where the strategy's coefficients are the mechanism's only nearly."""

    def part_clips(self, t: int) -> tuple[float, ...]:
        """The norm bound of one record in each vector of round t, in real units."""
        return (float(self.workload.clips[t - 1]),)

    def stretch(self, t: int) -> float:
        """What increments of round t are multiplied by before they become integers; their clips as well."""
        return 1.0

    def certified(self, lattice: Lattice) -> float:
        """The sensitivity of C for integers of norm K_t under zero-out, in units."""
        return self._in_units(self.mechanism, lattice)

    @property
    def participations(self) -> int:
        """In how many rounds a record takes part at most."""
        return participations_of(self.workload)

    def _in_units(self, mechanism: Mechanism, lattice: Lattice) -> float:
        norms = np.array([float(lattice.norm(clip)) for clip in self.workload.clips.tolist()])
        return mechanism.sensitivity(dataclasses.replace(self.workload, clips=norms))


@dataclass(frozen=True)
class FactoredDifferences(Factored):
    """Of increments whose parts are clipped apart: r, G and Δ, in the order of the fresh vectors."""

    trees: AlignedDifferences = dataclasses.field(kw_only=True)

    def part_clips(self, t: int) -> tuple[float, ...]:
        residual = (self.trees.residual,) if self.trees.rounds_per_epoch > 1 else ()
        changed = (self.trees.difference,) if t > self.trees.rounds_per_epoch else ()
        return (*residual, float(self.workload.clips[t - 1]), *changed)

    def certified(self, lattice: Lattice) -> float:
        difference, residual = (float(lattice.norm(clip)) for clip in (self.trees.difference, self.trees.residual))
        return self._in_units(dataclasses.replace(self.trees, difference=difference, residual=residual), lattice)


@dataclass(frozen=True)
class FactoredScaled(Factored):
    """Noise that shrinks where columns of C are short: increments D_t s_t of norm D_t S_t, and B divides by D_t.

    Guarantee: C is charged for the longer increments, as if they were the records'.
    """

    scaled: BufferedToeplitz = dataclasses.field(kw_only=True)

    def stretch(self, t: int) -> float:
        return self.scaled.column_scale[t - 1]

    def part_clips(self, t: int) -> tuple[float, ...]:
        return (float(self.workload.clips[t - 1]) * self.stretch(t),)

    def certified(self, lattice: Lattice) -> float:
        rounds = range(1, self.workload.rounds + 1)
        norms = np.array([float(lattice.norm(clip)) for t in rounds for clip in self.part_clips(t)])
        plain = dataclasses.replace(self.scaled, column_scale=())
        return plain.sensitivity(dataclasses.replace(self.workload, clips=norms))


def participations_of(workload: Workload) -> int:
    """In how many rounds of the workload a record takes part at most."""
    schedule = workload.schedule
    if schedule.single_pass:
        return 1
    return schedule.most if isinstance(schedule, Separated) else -(-schedule.rounds // schedule.rounds_per_epoch)


@singledispatch
def factored(mechanism: Mechanism, workload: Workload) -> Factored:
    """The exact form of a mechanism for a workload in real units; decays become multiples of 2^-31.

    InputError for a mechanism whose claim is one about real-valued gradients: one that rests on how far queries
    move, on contraction, or on windows of sums, which rounding takes apart; and for one whose C has no exact form.
    """
    raise InputError(f"{type(mechanism).__name__}: its noise cannot be added to integers; use another mechanism")


@factored.register
def _(mechanism: IndependentGaussian, workload: Workload) -> Factored:
    workload = dataclasses.replace(workload, decay=rounded(workload.decay))
    return Factored(IntegerPrefix(coefficient(workload.decay), workload.period), mechanism, workload)


@factored.register
def _(mechanism: ScheduledGaussian, workload: Workload) -> Factored:
    decay = rounded(mechanism.decay)
    strategy = IntegerScheduled(coefficient(decay), workload.period, mechanism.sizes)
    workload = dataclasses.replace(workload, decay=decay)
    return Factored(strategy, dataclasses.replace(mechanism, decay=decay), workload)


@factored.register
def _(mechanism: BinaryTree, workload: Workload) -> Factored:
    decay = rounded(mechanism.decay)
    strategy = IntegerTree(coefficient(decay), mechanism.period)
    workload = dataclasses.replace(workload, decay=decay)
    return Factored(
        strategy, dataclasses.replace(mechanism, decay=decay), workload, _level_spread(decay, workload)
    )


@factored.register
def _(mechanism: LeafGaussian, workload: Workload) -> Factored:
    return Factored(IntegerLeaf(mechanism.first, mechanism.period), mechanism, workload)


@factored.register
def _(mechanism: BandedSquareRoot, workload: Workload) -> Factored:
    exact = RoundedBanded(mechanism.decay, min(mechanism.bands, workload.rounds))
    return Factored(IntegerBanded(exact.multiples[1:]), exact, workload)


@factored.register
def _(mechanism: BufferedToeplitz, workload: Workload) -> Factored:
    """C of the rounded poles and residues; φ follows from them, so that B is the inverse of that C."""
    strategy = buffered(mechanism.theta, mechanism.phi, period=mechanism.period)
    strategy = dataclasses.replace(
        strategy, digits=min(_MOST_DIGITS, strategy.carried(workload.block).bit_length())
    )
    theta = tuple(root / ONE for root in strategy.theta)
    phi = tuple(max(0.0, root) if root > -_NO_ROOT else root for root in phi_of(strategy).tolist())
    decay = rounded(mechanism.decay)
    exact = dataclasses.replace(mechanism, decay=decay, theta=theta, phi=phi)
    workload = dataclasses.replace(workload, decay=decay)
    if not exact.column_scale:
        return Factored(strategy, exact, workload, _series_spread(strategy, exact, workload))
    spread = _series_spread(strategy, exact, workload)
    return FactoredScaled(strategy, exact, workload, spread, scaled=exact)


@factored.register
def _(mechanism: BandedInverseSquareRoot, workload: Workload) -> Factored:
    raise InputError(
        'mechanism = "bisr": only the inverse of its C has a few bands, so that C on integers would feed its own '
        'rounded outputs back, and how far neighbours round apart is not bounded here; use "blt" or "banded"'
    )


@factored.register
def _(mechanism: AlignedDifferences, workload: Workload) -> Factored:
    if mechanism.movement is not None:
        raise InputError(
            "AlignedDifferences: bounds that rest on how far queries move are no bounds of integers; use "
            "algorithm.difference_clip and algorithm.residual_clip"
        )
    decay = rounded(mechanism.decay)
    trees = dataclasses.replace(mechanism, decay=decay)
    workload = dataclasses.replace(workload, decay=decay)
    strategy = IntegerAligned(coefficient(decay), trees.rounds_per_epoch, *trees.stds)
    return FactoredDifferences(strategy, trees, workload, _level_spread(decay, workload), trees=trees)


def _series_spread(strategy: IntegerBuffered, mechanism: BufferedToeplitz, workload: Workload) -> Fraction:
    """1 + participations · ‖c - c'‖, for the series c of the integers and c' of the roots, rounded up.

    A column of C moves by that much at most, and the sensitivity is at least the record's largest norm.
    """
    apart = series_of(strategy, workload.block) - mechanism.strategy(workload.block)
    rounding = 2.0**-44 * math.sqrt(workload.block)  # of either series, whose terms are at most 1
    return 1 + Fraction(participations_of(workload) * (float(np.linalg.norm(apart)) + rounding))


def _level_spread(decay: float, workload: Workload) -> Fraction:
    """1 + 2^-28 √T · participations, rounded up, where a tree's decays are rounded level by level.

    With L = ⌊log2 T⌋ levels every entry of C is off by at most L 2^-32, in at most L + 1 nodes a participation,
    and the sensitivity is at least the record's largest norm: L √(L+1) 2^-32 · participations would do.
    """
    if decay in (0.0, 1.0):
        return Fraction(1)
    return 1 + Fraction((math.isqrt(workload.rounds) + 1) * participations_of(workload), 2**28)
