"""DP-SGD with random allocation: in every epoch each unit takes part in one round, drawn in secret.

A unit is what neighbours differ in, such as a record.  Its increment is its clipped contribution to the sum of a
round.  In each of `epochs` epochs every unit draws one of `bins` rounds uniformly, independently of all other
units and epochs.  The increments of the units that drew a round, each of norm `clip` at most, are added, and the
sum is released with Gaussian noise of standard deviation `noise_multiplier` · `clip` per coordinate.

Three schemes are *not* random allocation, and must not be accounted for as such:

* batches of equal size of a shuffled order (all other units' rounds reveal a unit's round),
* one round of each epoch that is kept over all epochs,
* a round that is known to somebody who sees the releases.

Under zero-out the unit's increments are 0 in one neighbour, and under replace-one another unit takes its place.
The bound of known rounds is that of the same run if everybody knew which rounds a unit draws.  With correlated
noise rounds may overlap: the overlap of two rounds is the largest inner product of the vectors by which one unit
moves the releases if it takes part in one or the other.  For independent noise it is 0 for different rounds.

**Privacy loss of an epoch**, with T = `bins` and z = `noise_multiplier`.  With and without the unit, the releases
are dominated by

    P = (1/T) Σ N(e_i, z² I)   and   Q = N(0, z² I),   dP/dQ = (Y_1 + … + Y_T)/T,   Y_i = exp(Z_i/z - 1/(2z²)),

with Z_i independent standard normal under Q.  The hockey stick H_ε(P‖Q) is the largest P(A) - e^ε Q(A) of any
event A.  It is δ at ε for a unit that is removed, and H_ε(Q‖P) for one that is added.  Both are expectations of
convex functions of the ratio dP/dQ.  So **moving each Y to its two neighbours on a grid, with its mean kept, only
raises δ**: every grid gives an upper bound.  Proof: docs/proofs/allocation.md.

Sources: Feldman & Shenfeld 2025 ("Privacy amplification by random allocation"); Chua et al. 2024 (balls and bins).
The numerics are an own construction, after the convex order of ratios.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy.special import ndtr, ndtri

from fedpriv.accounting import fading
from fedpriv.accounting.chain import FadingOverlaps
from fedpriv.accounting.curves import (
    MIN_DELTA,
    Curve,
    Floats,
    as_floats,
    check_resolvable_delta,
    epsilon_at,
    gaussian_curve,
    highest_curve,
    lowest_curve,
    triangle_curve,
)
from fedpriv.accounting.fading import compose_with_gaussian
from fedpriv.accounting.gaussian import RELATION_FACTOR, Relation, check_positive, relation_named
from fedpriv.accounting.gaussian import epsilon_of as gaussian_epsilon_of
from fedpriv.accounting.guarantees import Sampled, least_noise
from fedpriv.accounting.losses import DELTA_MARGIN, PrivacyLossDistribution
from fedpriv.accounting.symmetric import MIN_MULTIPLIER, SymmetricPairEpoch
from fedpriv.core.errors import InputError

_MAX_LOG = 600.0  # logarithm of a grid's end, far enough below 709 for the products that follow


def grid_end(multiplier: float, bins: int, tail: float, narrow: bool = False) -> float:
    """Choose the end of a grid of Σ Y, so that little mass under P lies beyond.

    The bounds hold for every end.

    Args:
        multiplier: Noise multiplier z.
        bins: Number T of rounds.
        tail: Approximate mass beyond the end.
        narrow: Whether the end is for sums that hardly vary, because much noise makes every Y nearly 1.
    """
    # Quantile of the Y of the unit's own round under P, where ln Y is normal with mean 1/(2z²) and deviation 1/z.
    single_end = math.exp(min(_MAX_LOG, (0.5 / multiplier - float(ndtri(tail))) / multiplier))
    if narrow:  # the mean of Σ Y under Q, the own round, and ten standard deviations of Σ Y under Q
        return bins + single_end + 10.0 * math.sqrt(bins * math.expm1(min(_MAX_LOG, max(multiplier, 0.01) ** -2)))
    return max(single_end, 4.0 * bins) + 4.0 * bins


def grid_masses(multiplier: float, spacing: float, size: int) -> Floats:
    """Return the masses of Y under Q on 0, h, …, (size - 1)h, (size,), without the mass beyond the grid.

    Y is exp(Z/z - 1/(2z²)) with Z standard normal.  A value of Y between two points is split between them, with
    its mean kept.  So the mass at x > 0 is (p(x - h) - 2 p(x) + p(x + h)) / h with p(x) = E (x - Y)+, and the mass
    at 0 is p(h) / h.

    Guarantee: Y is moved to its two neighbours with its mean kept, so that the distribution on the unbounded grid
    is above Y in convex order.

    Args:
        multiplier: Noise multiplier z.
        spacing: Distance h of neighbouring points.
        size: Number of points.
    """
    points = spacing * np.arange(size + 1)
    with np.errstate(divide="ignore"):
        logs = multiplier * np.log(points)
    half = 0.5 / multiplier
    puts = points * ndtr(half + logs) - ndtr(-half + logs)  # E (x - Y)+
    calls = ndtr(half - logs) - points * ndtr(-half - logs)  # E (Y - x)+
    masses = np.empty(size)
    masses[0] = puts[1]
    # Second differences of puts and calls are equal.  Those of the smaller values lose fewer digits.
    masses[1:] = np.where(
        points[1:-1] <= 1.0,
        puts[:-2] - 2.0 * puts[1:-1] + puts[2:],
        calls[:-2] - 2.0 * calls[1:-1] + calls[2:],
    )
    return np.maximum(masses / spacing, 0.0)


def removal_loss_distribution(multiplier: float, bins: int, size: int, top: float) -> PrivacyLossDistribution:
    """Return the distribution of ln dP/dQ under P, for a unit that is removed.

    The mass of Σ Y under P is its mass under Q times Σ Y / T.  By symmetry this is the distribution of a sum in
    which the mass of one Y is multiplied by its value.

    Guarantee: the distribution gives an upper bound of H_ε(P‖Q), since mass beyond the grid counts as infinite
    loss.

    Args:
        multiplier: Noise multiplier z.
        bins: Number T of rounds.
        size: Number of points of the grid of Σ Y.
        top: End of this grid.
    """
    spacing = top / size
    masses = grid_masses(multiplier, spacing, size)
    sums = spacing * np.arange(size)
    sum_masses = _convolve(_self_convolve(masses, bins - 1), sums * masses) if bins > 1 else sums * masses
    return PrivacyLossDistribution(
        np.log(sums[1:] / bins), sum_masses[1:], max(0.0, 1.0 - float(np.sum(sum_masses))) + _rounding_mass(bins)
    )


def addition_loss_distribution(multiplier: float, bins: int, size: int, cap: float) -> PrivacyLossDistribution:
    """Return the distribution of ln dQ/dP under Q, for a unit that is added.

    Guarantee: the distribution gives an upper bound of H_ε(Q‖P), since mass beyond the grid has ratios of `cap` or
    more, and counts as at `cap`.  Mass at ratio 0 has infinite loss.

    Args:
        multiplier: Noise multiplier z.
        bins: Number T of rounds.
        size: Number of points of the grid of the ratio dP/dQ.
        cap: End of this grid.
    """
    sum_masses = _self_convolve(grid_masses(multiplier, cap * bins / size, size), bins)
    ratios = (cap / size) * np.arange(1, size + 1)
    masses = np.append(sum_masses[1:], max(0.0, 1.0 - float(np.sum(sum_masses))))
    return PrivacyLossDistribution(
        -np.log(ratios[::-1]), masses[::-1], float(sum_masses[0]) + _rounding_mass(bins)
    )


def _rounding_mass(bins: int) -> float:
    """Return the mass that rounding may hide in sums over `bins` rounds, beyond `DELTA_MARGIN`.

    Tests saw at most 3e-17 a round (tests/accounting/test_rounding.py), and 1e-16 a round is assumed.
    """
    return max(0.0, 1e-16 * bins - DELTA_MARGIN)


def _convolve(first: Floats, second: Floats) -> Floats:
    """Return the masses of a sum of two independent numbers on one grid, cut to its size.

    The transforms are long enough that no mass wraps around.
    """
    size = len(first)
    from scipy import fft  # slow to import

    length = fft.next_fast_len(2 * size, real=True)
    return as_floats(np.maximum(fft.irfft(fft.rfft(first, length) * fft.rfft(second, length), length)[:size], 0.0))


def _self_convolve(masses: Floats, times: int) -> Floats:
    """Return the masses of the sum of `times` ≥ 1 independent numbers on the grid, (size,).

    Each number has the distribution `masses`, (size,), on the points 0, h, …, (size - 1)h.  Mass of the sum beyond
    the grid is dropped, and the callers count it as what is missing from 1.
    """
    result: Floats | None = None
    while True:
        if times & 1:
            result = masses if result is None else _convolve(result, masses)
        times >>= 1
        if not times:
            assert result is not None
            return result
        masses = _convolve(masses, masses)


_MAX_BINS, _MAX_EPOCHS = 100_000, 10_000
_RATIO_CAPS = (8.0, 1.0, 0.125)  # ends of grids of the ratio for addition, small ones for large ε
_MAX_GRID_SIZE, _MIN_STEP = 2**17, 1e-12  # limits of the grid of one epoch's losses
_NOISE_MARGIN = 1.002  # factor by which a calibration raises the noise until `epsilon_of` is at most the target
_TAIL_SHARE = 1e-4  # mass beyond the grids of all epochs that are made for one δ, relative to this δ
_TAILS = (1e-5, 1e-7, 1e-9, 1e-11, 1e-13)  # masses beyond the grids that are made for all δ, for each epoch


@dataclass(frozen=True)
class _Resolution:
    """Resolution of the computation.  Every choice gives an upper bound."""

    size: int
    """Points of the grid of Σ Y for a run of a single epoch."""
    composed_size: int
    """Points of the grid of Σ Y if epochs are composed."""
    max_step: float
    """Largest step of the grid on which losses of epochs are composed, unless the grid gets too long."""
    steps_per_std: float
    """Smallest number of steps per standard deviation of a loss, unless the grid gets too long or fine."""
    replacement_size: int
    """Points of the grids of `SymmetricPairEpoch`, which doubles them for one or two ε of a single epoch."""
    knot_count: int
    """Number of intervals between the ε at which an epoch's curve under replace-one is computed."""
    chain_resolution: fading.ChainResolution


_FINE = _Resolution(2**15, 2**16, 1e-3, 30.0, 2**12, 128, fading.FINE)
_COARSE = _Resolution(2**12, 2**13, 4e-3, 10.0, 2**10, 24, fading.COARSE)


@dataclass(frozen=True)
class AllocatedGaussian(Sampled):
    """Guarantee of a run with random allocation.

    Guarantee: under zero-out neighbours differ by one unit whose increments are 0 in one of them.  Under
    replace-one they differ by a unit that is exchanged for another one, in the same secret rounds.  Increments may
    depend on all earlier releases.  Everybody may see every release, but not which unit draws which round.

    Raises:
        InputError: A field is out of its range.

    Example:
        >>> guarantee = AllocatedGaussian(noise_multiplier=2.0, bins=10)
        >>> round(guarantee.epsilon_of(1e-5), 3)
        0.622
    """

    bins: int
    """Number of rounds of one epoch among which a unit draws one."""
    epochs: int = 1
    """Number of epochs begun, where an epoch that stopped early counts as whole."""
    relation: Relation = "zero-out"
    """Neighbouring relation."""
    common_share: float = 0.0
    """Largest overlap of two different rounds of a unit, as a share of the largest of a round with itself.

    The overlap of rounds i and t is clip_i clip_t ⟨C_i, C_t⟩, for columns C_i and C_t of the noise strategy C: the
    inner product of the vectors by which the unit moves the releases if it takes part in round i or t.  The share
    is below 1, and 0 for independent noise.
    """
    overlaps: FadingOverlaps | None = None
    """Bound of the overlaps by chains (`find_overlaps`), which gives a second bound of δ, or None."""

    kind: ClassVar[str] = "allocated-gaussian"
    title: ClassVar[str] = "random allocation"

    def __post_init__(self) -> None:
        """Check the fields."""
        check_positive("noise_multiplier", self.noise_multiplier)
        relation_named(self.relation)
        if not 1 <= self.bins <= _MAX_BINS:
            raise InputError(f"bins = {self.bins}: a unit draws among 1 to {_MAX_BINS:,} rounds of an epoch")
        if not 1 <= self.epochs <= _MAX_EPOCHS:
            raise InputError(f"epochs = {self.epochs}: there are 1 to {_MAX_EPOCHS:,}")
        if not 0.0 <= self.common_share < 1.0:
            raise InputError(f"common = {self.common_share}: a share of 0 or more and below 1")
        # A bound of the overlaps has a chain for every epoch, with a variance for every round of it.
        if (
            self.overlaps
            and [len(chain.variances) for chain in self.overlaps.epoch_chains] != [self.bins] * self.epochs
        ):
            raise InputError(f"overlaps: other than {self.epochs} chains of {self.bins} rounds")

    @property
    def curve(self) -> Curve:
        """Upper bound of δ for every ε ≥ 0, on grids that suit many δ (`_TAILS`) rather than a single one."""
        return _cached_curve(self, _TAILS)

    def epsilon_of(self, delta: float) -> float:
        """Return an upper bound of the smallest ε for which (ε, `delta`)-DP holds, `delta` ≥ 1e-10."""
        return epsilon_at(_cached_curve(self, _grid_tails(check_resolvable_delta(delta), self.epochs)), delta)

    @property
    def times(self) -> int:
        """Number of rounds in which a unit takes part, one in each epoch."""
        return self.epochs

    @property
    def known_mu(self) -> float:
        return super().known_mu * math.sqrt(1.0 + (self.epochs - 1) * self.common_share) * (1.0 + 1e-15)

    @property
    def common_mu(self) -> float:
        """μ of the overlap that all rounds share, which secrecy does not hide."""
        factor = RELATION_FACTOR[self.relation] * self.epochs
        return factor * math.sqrt(self.common_share) / self.noise_multiplier * (1.0 + 1e-15)

    @property
    def independent_part(self) -> "AllocatedGaussian":
        """Random allocation with independent noise that remains beside the overlap of all rounds."""
        multiplier = self.noise_multiplier / math.sqrt(1.0 - self.common_share) * (1.0 - 1e-15)
        if not self.common_share:
            return self
        return dataclasses.replace(self, noise_multiplier=multiplier, common_share=0.0, overlaps=None)


def _grid_tails(delta: float, epochs: int) -> tuple[float, ...]:
    return (_TAIL_SHARE * delta / epochs,)


@lru_cache(maxsize=4)  # up to tens of megabytes each
def _cached_curve(mechanism: AllocatedGaussian, tails: tuple[float, ...]) -> Curve:
    return _curve(mechanism, _FINE, tails)


def _curve(mechanism: AllocatedGaussian, resolution: _Resolution, tails: tuple[float, ...]) -> Curve:
    """Return the smallest of several bounds of δ, at each ε.

    Under zero-out they are the bound of known rounds, and the larger one of removal and addition.  With more
    rounds than `resolution.size`, those of replace-one count as well.  Under replace-one they are

    * the bound of known rounds,
    * the chain of removal and addition through the run without the unit,
    * the bound from `mechanism.overlaps`, if there is one,
    * the bound of the symmetric pair of both units (`symmetric`), for two rounds or more and enough noise, where
      the overlap that all rounds share counts as one more Gaussian release.

    Args:
        mechanism: Mechanism of the run.
        resolution: Resolution of the computation.
        tails: Approximate masses under P that the grids of Σ Y for removal leave beyond their ends.  A mass
            gives one or two ends, of which those that are nearly alike count once (`_grid_ends`).
    """
    known_curve, (removal, addition) = (
        gaussian_curve(mechanism.known_mu),
        removal_and_addition_curves(mechanism, resolution, tails),
    )
    if mechanism.relation == "zero-out":
        # With so many rounds the grid of Σ Y is coarse next to Y.  Another unit may be one without increments.
        exchange_curves = (
            [_curve(dataclasses.replace(mechanism, relation="replace-one"), resolution, tails)]
            if mechanism.bins > resolution.size
            else []
        )
        return lowest_curve([known_curve, highest_curve([removal, addition]), *exchange_curves])
    loose_curve, independent = (
        lowest_curve([known_curve, triangle_curve(removal, addition)]),
        mechanism.independent_part,
    )
    if (overlaps := mechanism.overlaps) is not None:
        fading_curve = fading.replacement_curve(overlaps, mechanism.noise_multiplier, resolution.chain_resolution)
        loose_curve = (
            loose_curve
            if fading_curve is None
            else lowest_curve([known_curve, triangle_curve(removal, addition), fading_curve])
        )
    if independent.bins == 1 or independent.noise_multiplier < MIN_MULTIPLIER:
        return loose_curve
    pair = SymmetricPairEpoch(independent.noise_multiplier, independent.bins, resolution.replacement_size)
    if mechanism.epochs == 1 and mechanism.common_share == 0.0:
        return lowest_curve([loose_curve, pair.curve(resolution.knot_count, loose_curve)])
    # ε beyond which the δ of one epoch is too small to matter.
    max_epsilon = gaussian_epsilon_of(
        dataclasses.replace(independent, epochs=1, overlaps=None).known_mu, MIN_DELTA
    )
    distribution = pair.loss_distribution(resolution.knot_count, max_epsilon)
    if mechanism.epochs > 1:
        distribution = _compose_epochs(distribution, mechanism.epochs, resolution)
    return lowest_curve([loose_curve, compose_with_gaussian(distribution, mechanism.common_mu).deltas])


def removal_and_addition_curves(
    mechanism: AllocatedGaussian, resolution: _Resolution = _FINE, tails: Sequence[float] = _TAILS
) -> tuple[Curve, Curve]:
    """Return the curves of removal (P against Q) and of addition (Q against P) of a unit, over all epochs.

    The losses of one epoch are computed on one or more grids, each of which gives a bound, and are composed over
    the epochs.  The overlap that all rounds share counts as one more Gaussian release of known rounds.  Where the
    bound from `mechanism.overlaps` is smaller, it is taken.

    Guarantee: each curve bounds its direction under zero-out, whatever `mechanism.relation` is.

    Args:
        mechanism: Mechanism of the run.
        resolution: Resolution of the computation.
        tails: Approximate masses under P that the grids of Σ Y for removal leave beyond their ends.  A mass
            gives one or two ends, of which those that are nearly alike count once (`_grid_ends`).
    """
    independent = mechanism.independent_part
    common_mu = mechanism.common_mu / RELATION_FACTOR[mechanism.relation]  # under zero-out
    z, bins, epochs = independent.noise_multiplier, independent.bins, independent.epochs
    grid_size = resolution.size if epochs == 1 else resolution.composed_size
    # Ends of the grids of (Y_1 + … + Y_T)/T under addition.  Several epochs are composed for one end only.
    caps = (
        _RATIO_CAPS if epochs == 1 else (min(_RATIO_CAPS[0], grid_end(z, bins, _TAILS[-1], narrow=True) / bins),)
    )
    removal_losses = [removal_loss_distribution(z, bins, grid_size, end) for end in _grid_ends(independent, tails)]
    addition_losses = [addition_loss_distribution(z, bins, grid_size, cap) for cap in caps]
    if epochs > 1:
        removal_losses = [_compose_epochs(distribution, epochs, resolution) for distribution in removal_losses]
        addition_losses = [_compose_epochs(distribution, epochs, resolution) for distribution in addition_losses]
    curves = (
        lowest_curve([compose_with_gaussian(distribution, common_mu).deltas for distribution in removal_losses]),
        lowest_curve([compose_with_gaussian(distribution, common_mu).deltas for distribution in addition_losses]),
    )
    if (overlaps := mechanism.overlaps) is None:
        return curves
    fading_curves = fading.removal_and_addition_curves(
        overlaps, mechanism.noise_multiplier, resolution.chain_resolution
    )
    return (
        curves
        if fading_curves is None
        else (lowest_curve([curves[0], fading_curves[0]]), lowest_curve([curves[1], fading_curves[1]]))
    )


def _compose_epochs(
    distribution: PrivacyLossDistribution, epochs: int, resolution: _Resolution
) -> PrivacyLossDistribution:
    step = max(
        min(resolution.max_step, distribution.loss_std / resolution.steps_per_std),
        distribution.loss_range / _MAX_GRID_SIZE,
        _MIN_STEP,
    )
    return distribution.to_grid(step).self_compose(epochs)


def _grid_ends(mechanism: AllocatedGaussian, tails: Sequence[float]) -> list[float]:
    """Return ends of grids of Σ Y, ascending, each more than 10 % above the one before it.

    The candidates are those of `grid_end` for each of `tails`, for sums that vary much and for sums that hardly
    do.
    """
    z, bins = mechanism.noise_multiplier, mechanism.bins
    ends = list[float]()
    for end in sorted({grid_end(z, bins, tail, narrow) for tail in tails for narrow in (False, True)}):
        if not ends or end > 1.1 * ends[-1]:
            ends.append(end)
    return ends


@lru_cache(maxsize=256)
def calibrate(
    epsilon: float,
    delta: float,
    bins: int,
    epochs: int = 1,
    relation: Relation = "zero-out",
    common: float = 0.0,
    overlaps: FadingOverlaps | None = None,
) -> AllocatedGaussian:
    """Return the mechanism with about the smallest noise multiplier that is (`epsilon`, `delta`)-DP.

    The multiplier is 0.1 or more, even if less noise were enough.

    Guarantee: the mechanism is (`epsilon`, `delta`)-DP by its own `epsilon_of`.

    Args:
        epsilon: Target ε, above 0.
        delta: Target δ, from 1e-10 to below 1.
        bins: Number of rounds of one epoch among which a unit draws one.
        epochs: Number of epochs, 1 or more.
        relation: Neighbouring relation.
        common: Largest overlap of two different rounds of a unit, as a share in [0, 1) of the largest overlap of a
            round with itself (`AllocatedGaussian.common_share`).
        overlaps: Bound of the overlaps by chains (`find_overlaps`), or None.  `common` bounds
            all overlaps by one number, and `overlaps` follows how they fade.  Each gives a bound of δ, and the
            smaller one counts.

    Raises:
        InputError: The search finds no multiplier up to a million, or an argument is out of its range.

    Example:
        >>> round(calibrate(epsilon=1.0, delta=1e-5, bins=10).noise_multiplier, 2)
        1.48
    """

    def mechanism(multiplier: float) -> AllocatedGaussian:
        return AllocatedGaussian(multiplier, bins, epochs, relation, common, overlaps)

    tails = _grid_tails(delta, mechanism(1.0).epochs)
    coarse, fine = (lambda z: _curve(mechanism(z), _COARSE, tails)), (lambda z: _curve(mechanism(z), _FINE, tails))
    multiplier = least_noise(epsilon, delta, coarse, fine)
    # In this case bounds of δ at two ε are computed on two grids, so that the larger ε may have the larger bound.
    if relation == "replace-one" and epochs == 1:
        while mechanism(multiplier).epsilon_of(delta) > epsilon:
            multiplier *= _NOISE_MARGIN
    return mechanism(multiplier)
