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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from fedpriv.accounting import fading
from fedpriv.accounting.chain import FadingOverlaps
from fedpriv.accounting.curves import (
    MIN_DELTA,
    Curve,
    Floats,
    as_floats,
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
from fedpriv.core.errors import InputError, refuse

_MAX_LOG = 60.0  # logarithm of a grid's end and of the inverse of its core, which decide only how tight bounds are
_END_STDS = 8.3  # standard deviations of ln Y up to which a grid reaches
# Mass of Σ Y that may lie in a core of finest points around 0, and its least relative variance for a grid, since
# floats have to tell points apart.
_MIN_MASS, _MIN_VARIANCE = 1e-16, 1e-20
# Relative variance of Σ Y below which points are dense around its mean.  The first row then reaches so many
# standard deviations to either side, and rows have so many times as many points, since few rows have mass.
_NARROW_VARIANCE, _CORE_STDS, _NARROW_REFINEMENT = 0.01, 4.0, 4
# Above the first number of rounds the first sums are computed in extended precision.  The masses bound what
# rounding hides for each round (tests/accounting/test_rounding.py), for float64 and for extended precision.
_MANY_BINS, _EXTENDED_DOUBLINGS = 2_000, 6
_ROUNDING_MASS, _EXTENDED_ROUNDING_MASS = 5e-15, 5e-16


Sums = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class RatioGrid:
    """Grid of a sum of m of the Y, in rows whose spacing doubles from one row to the next.

    Row j has the points m · `center` + 2^j · `spacing` · i for -n ≤ i < n.  The distance of points is about 1/n to
    2/n of the distance from m · `center`, beyond the first row.
    """

    center: float
    """Number around which points are densest for m = 1: 0, or 1 for sums that hardly vary."""
    spacing: float
    """Distance of the points of the first row."""
    half_size: int
    """Even number n of points of a row on either side."""
    row_count: int
    """Number of rows."""

    @property
    def offsets(self) -> Floats:
        """Points without the centre, (rows, 2n)."""
        indices = np.arange(-self.half_size, self.half_size, dtype=np.float64)
        return as_floats(self.spacing * np.exp2(np.arange(self.row_count))[:, None] * indices)

    def masses_of_one(self, multiplier: float) -> Floats:
        """Return the masses of Y, (rows, 2n), each on the finest row that has its point.

        Args:
            multiplier: Noise multiplier z.
        """
        indices = np.arange(-self.half_size, self.half_size)
        # The inner half of a row's points lies on the row before it.
        is_finest = np.tile((2 * indices >= self.half_size) | (2 * indices < -self.half_size), (self.row_count, 1))
        is_finest[0] = True
        points = self.center + self.offsets[is_finest]
        order = np.argsort(points)
        masses, rows = np.zeros_like(points), np.zeros(is_finest.shape)
        masses[order[:-1]] = grid_masses(multiplier, points[order])
        rows[is_finest] = masses
        return rows


def ratio_grid(multiplier: float, bins: int, half_size: int) -> RatioGrid:
    """Choose a grid that follows the distribution of the sum of all Y.  The bounds hold for every grid.

    Args:
        multiplier: Noise multiplier z.
        bins: Number T of rounds.
        half_size: Even number of points of a row on either side.  Sums that hardly vary get four times as many.
    """
    # Unless `_MAX_LOG` caps them, Y is above `end` with probability below 1e-16 under P, if the unit takes part in
    # its round, and every Y is below `core` with probability 1e-16 at most under Q.
    end = math.exp(min(_MAX_LOG, (0.5 / multiplier + _END_STDS) / multiplier))
    core = math.exp(
        min(0.0, max(-_MAX_LOG, (float(ndtri(_MIN_MASS ** (1.0 / bins))) - 0.5 / multiplier) / multiplier))
    )
    variance = max(_MIN_VARIANCE, math.expm1(min(_MAX_LOG, max(multiplier, 0.01) ** -2)) / bins)
    is_narrow = variance < _NARROW_VARIANCE
    if is_narrow:
        core, half_size = _CORE_STDS * math.sqrt(variance) * bins, _NARROW_REFINEMENT * half_size
    row_count = math.ceil(math.log2((2.0 * end + 2.0 * bins) / core)) + 1
    return RatioGrid(float(is_narrow), core / half_size, half_size, row_count)


def grid_masses(multiplier: float, points: Floats) -> Floats:
    """Return the masses of Y under Q on all points but the last, (n - 1,), without the mass beyond them.

    Y is exp(Z/z - 1/(2z²)) with Z standard normal.  A value of Y between two points is split between them, with
    its mean kept.  So the mass at a point is the rise there of the slope of p(x) = E (x - Y)+, taken from point to
    point.

    Guarantee: Y is moved to its two neighbours with its mean kept, so that the distribution with all of the mass
    is above Y in convex order.

    Args:
        multiplier: Noise multiplier z.
        points: Points, ascending, (n,), with the first at 0 or below and the last above 1.
    """
    values = np.maximum(points, 0.0)
    with np.errstate(divide="ignore"):
        logs = multiplier * np.log(values)
    half = 0.5 / multiplier
    puts = values * ndtr(half + logs) - ndtr(-half + logs)  # E (x - Y)+
    calls = ndtr(half - logs) - values * ndtr(-half - logs)  # E (Y - x)+
    lower_slopes, upper_slopes = np.diff(puts) / np.diff(points), -np.diff(calls) / np.diff(points)
    # Slopes of puts and calls add up to 1.  Those of the smaller values lose fewer digits.
    masses = np.append(
        lower_slopes[:1], np.where(points[1:-1] <= 1.0, np.diff(lower_slopes), -np.diff(upper_slopes))
    )
    # Where one takes the other's place their rounding leaves a gap.
    masses[np.searchsorted(points, 1.0)] += 1.0 - upper_slopes[-1] - np.sum(masses)
    return as_floats(np.maximum(masses, 0.0))


@dataclass(frozen=True, eq=False)
class RatioDistribution:
    """Distribution of dP/dQ under Q for one epoch, above the true one in convex order."""

    bins: int
    """Number T of rounds."""
    ratios: Floats
    """Ratios on the grid, ascending, (n,)."""
    masses: Floats
    """Probabilities of the ratios under Q, (n,)."""
    end: float
    """Lower bound of all ratios that the grid leaves out."""

    @property
    def removal_losses(self) -> PrivacyLossDistribution:
        """Distribution of ln dP/dQ under P, for a unit that is removed.

        The mass under P is the mass under Q times the ratio.

        Guarantee: the distribution gives an upper bound of H_ε(P‖Q), since mass beyond the grid counts as infinite
        loss.
        """
        is_positive = self.ratios > 0.0
        ratios = self.ratios[is_positive]
        masses = ratios * self.masses[is_positive]
        return PrivacyLossDistribution(
            np.log(ratios), masses, max(0.0, 1.0 - float(np.sum(masses))) + _rounding_mass(self.bins)
        )

    @property
    def addition_losses(self) -> PrivacyLossDistribution:
        """Distribution of ln dQ/dP under Q, for a unit that is added.

        Guarantee: the distribution gives an upper bound of H_ε(Q‖P), since mass beyond the grid has ratios of
        `end` or more, and counts as at `end`.  Mass at ratio 0 has infinite loss.
        """
        is_positive = self.ratios > 0.0
        ratios = np.append(self.ratios[is_positive], self.end)
        masses = np.append(self.masses[is_positive], max(0.0, 1.0 - float(np.sum(self.masses))))
        order = np.argsort(-ratios, kind="stable")
        return PrivacyLossDistribution(
            -np.log(ratios[order]),
            masses[order],
            float(np.sum(self.masses[~is_positive])) + _rounding_mass(self.bins),
        )


def ratio_distribution(multiplier: float, bins: int, grid: RatioGrid) -> RatioDistribution:
    """Return the distribution of dP/dQ = (Y_1 + … + Y_T)/T on a grid.

    Args:
        multiplier: Noise multiplier z.
        bins: Number T of rounds.
        grid: Grid of the sums.
    """
    masses = _self_convolve(grid.masses_of_one(multiplier), bins).ravel()
    (indices,) = np.nonzero(masses)
    sums = (bins * grid.center + grid.offsets).ravel()
    indices = indices[np.argsort(sums[indices], kind="stable")]
    # A partial sum that is left out is at least the length of the last row, and later numbers are not negative.
    end = grid.offsets[-1, -1] / bins
    return RatioDistribution(bins, as_floats(np.maximum(sums[indices], 0.0) / bins), masses[indices], end)


def _rounding_mass(bins: int, epochs: int = 1) -> float:
    """Return the mass that rounding may hide in one epoch of `bins` rounds, beyond its margin.

    The margin of one epoch is 1 / `epochs` of `DELTA_MARGIN`, which a composition adds once.
    """
    is_extended = bins > _MANY_BINS and np.finfo(np.longdouble).eps < 1e-18
    return max(0.0, (_EXTENDED_ROUNDING_MASS if is_extended else _ROUNDING_MASS) * bins - DELTA_MARGIN / epochs)


def _halve(masses: Sums) -> Sums:
    """Move masses on consecutive points, (…, 2m), to every second point, (…, m + 1), with their mean kept."""
    halves = np.zeros_like(masses, shape=(*masses.shape[:-1], masses.shape[-1] // 2 + 1))
    halves[..., :-1] = masses[..., 0::2] + 0.5 * masses[..., 1::2]
    halves[..., 1:] += 0.5 * masses[..., 1::2]
    return halves


def _finer_masses(masses: Sums) -> Sums:
    """Return for every row the masses of all finer rows, moved to its points, (rows, 2n)."""
    # Every second point of a row is a point of the middle half of the next row.
    finer, size = np.zeros_like(masses), masses.shape[1]
    for row in range(1, len(masses)):
        finer[row, size // 4 : 3 * size // 4 + 1] = _halve(finer[row - 1] + masses[row - 1])
    return finer


def _convolve(first: Sums, second: Sums) -> Sums:
    """Return the masses of a sum of two independent numbers on the rows of a grid, (rows, 2n).

    Two numbers are added on the coarser one of their rows.  Sums beyond its ends are moved to the next row, and
    those beyond the ends of the last row are dropped.  The transforms are long enough that no mass wraps around.
    """
    from scipy import fft  # slow to import

    size = first.shape[1]
    length = fft.next_fast_len(2 * size, real=True)
    # Of each distribution the masses of its rows, and those of all finer rows.
    first_row, first_finer = (fft.rfft(masses, length) for masses in (first, _finer_masses(first)))
    second_row, second_finer = (
        (first_row, first_finer)
        if second is first
        else (fft.rfft(masses, length) for masses in (second, _finer_masses(second)))
    )
    products = first_row * (second_row + second_finer) + first_finer * second_row
    sums = np.maximum(fft.irfft(products, length)[:, : 2 * size], 0.0)
    result: Sums = sums[:, size // 2 : 3 * size // 2].copy()
    sums[:, size // 2 : 3 * size // 2] = 0.0
    result[1:] += _halve(sums)[:-1, :-1]
    return result


def _self_convolve(masses: Floats, times: int) -> Floats:
    """Return the masses of the sum of `times` ≥ 1 independent numbers on the rows of a grid, (rows, 2n).

    Args:
        masses: Masses of each number, (rows, 2n).
        times: Number of numbers that are added.
    """
    result: Floats | None = None
    power: Sums = masses.astype(np.longdouble) if times > _MANY_BINS else masses
    for doubling in range(times.bit_length()):
        if doubling:
            power = _convolve(power, power)
        if doubling == _EXTENDED_DOUBLINGS:
            power = as_floats(power)
        if times >> doubling & 1:
            result = as_floats(power if result is None else _convolve(result, as_floats(power)))
    assert result is not None
    return result


_MAX_BINS, _MAX_EPOCHS = 100_000, 10_000
_MAX_GRID_SIZE, _MIN_STEP = 2**17, 1e-12  # limits of the grid of one epoch's losses
_NOISE_MARGIN = 1.002  # factor by which a calibration raises the noise until `epsilon_of` is at most the target


@dataclass(frozen=True)
class _Resolution:
    """Resolution of the computation.  Every choice gives an upper bound."""

    half_size: int
    """Points of a row of the grid of Σ Y on either side of its centre (`ratio_grid`)."""
    max_step: float
    """Largest step of the grid on which losses of epochs are composed, unless the grid gets too long."""
    steps_per_std: float
    """Smallest number of steps per standard deviation of a loss, unless the grid gets too long or fine."""
    replacement_size: int
    """Points of the grids of `SymmetricPairEpoch`, which doubles them for one or two ε of a single epoch."""
    knot_count: int
    """Number of intervals between the ε at which an epoch's curve under replace-one is computed."""
    chain_resolution: fading.ChainResolution


_FINE = _Resolution(2**12, 1e-3, 30.0, 2**12, 128, fading.FINE)
_COARSE = _Resolution(2**10, 4e-3, 10.0, 2**10, 24, fading.COARSE)


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
        check_positive("noise_multiplier", self.noise_multiplier)
        relation_named(self.relation)
        refuse(
            {
                f"noise_multiplier = {self.noise_multiplier}: at most 1e100": self.noise_multiplier > 1e100,
                f"bins = {self.bins}: a unit draws among 1 to {_MAX_BINS:,} rounds of an epoch": (
                    not 1 <= self.bins <= _MAX_BINS
                ),
                f"epochs = {self.epochs}: there are 1 to {_MAX_EPOCHS:,}": not 1 <= self.epochs <= _MAX_EPOCHS,
                f"common = {self.common_share}: a share of 0 or more and below 1": (
                    not 0.0 <= self.common_share < 1.0
                ),
            }
        )
        # A bound of the overlaps has a chain for every epoch, with a variance for every round of it.
        if (
            self.overlaps
            and [len(chain.variances) for chain in self.overlaps.epoch_chains] != [self.bins] * self.epochs
        ):
            raise InputError(f"overlaps: other than {self.epochs} chains of {self.bins} rounds")

    @property
    def curve(self) -> Curve:
        """Upper bound of δ for every ε ≥ 0."""
        return _cached_curve(self)

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


@lru_cache(maxsize=4)  # up to tens of megabytes each
def _cached_curve(mechanism: AllocatedGaussian) -> Curve:
    return _curve(mechanism, _FINE)


def _curve(mechanism: AllocatedGaussian, resolution: _Resolution) -> Curve:
    """Return the smallest of several bounds of δ, at each ε.

    Under zero-out they are the bound of known rounds, and the larger one of removal and addition.  Under
    replace-one they are

    * the bound of known rounds,
    * the chain of removal and addition through the run without the unit,
    * the bound from `mechanism.overlaps`, if there is one,
    * the bound of the symmetric pair of both units (`symmetric`), for two rounds or more and enough noise, where
      the overlap that all rounds share counts as one more Gaussian release.
    """
    known_curve, (removal, addition) = (
        gaussian_curve(mechanism.known_mu),
        removal_and_addition_curves(mechanism, resolution),
    )
    if mechanism.relation == "zero-out":
        return lowest_curve([known_curve, highest_curve([removal, addition])])
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
    mechanism: AllocatedGaussian, resolution: _Resolution = _FINE
) -> tuple[Curve, Curve]:
    """Return the curves of removal (P against Q) and of addition (Q against P) of a unit, over all epochs.

    The losses of one epoch are composed over the epochs.  The overlap that all rounds share counts as one more
    Gaussian release of known rounds.  Where the bound from `mechanism.overlaps` is smaller, it is taken.

    Guarantee: each curve bounds its direction under zero-out, whatever `mechanism.relation` is.
    """
    independent = mechanism.independent_part
    common_mu = mechanism.common_mu / RELATION_FACTOR[mechanism.relation]  # under zero-out
    z, bins = independent.noise_multiplier, independent.bins
    ratios = ratio_distribution(z, bins, ratio_grid(z, bins, resolution.half_size))
    losses = [ratios.removal_losses, ratios.addition_losses]
    if independent.epochs > 1:
        # The margin of δ counts once for all epochs together, so that more mass of each epoch counts as infinite.
        hidden_mass = _rounding_mass(bins, independent.epochs) - _rounding_mass(bins)
        losses = [
            _compose_epochs(
                dataclasses.replace(distribution, infinity_mass=distribution.infinity_mass + hidden_mass),
                independent.epochs,
                resolution,
            )
            for distribution in losses
        ]
    removal_curve, addition_curve = (
        compose_with_gaussian(distribution, common_mu).deltas for distribution in losses
    )
    curves = (removal_curve, addition_curve)
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

    Guarantee: the mechanism is (`epsilon`, `delta`)-DP.  Its curve was computed at `epsilon` or at a smaller ε,
    and is at most `delta` there.

    Args:
        epsilon: Target ε, above 0.
        delta: Target δ, from 1e-10 to below 1.
        bins: Number of rounds of one epoch among which a unit draws one.
        epochs: Number of epochs, 1 or more.
        relation: Neighbouring relation.
        common: Largest overlap of two different rounds of a unit, as a share in [0, 1) of the largest overlap of a
            round with itself (`AllocatedGaussian.common_share`).
        overlaps: Bound of the overlaps by chains (`find_overlaps`), or None.  Each of `common` and `overlaps`
            gives a bound of δ, and the smaller one counts.

    Raises:
        InputError: The search finds no multiplier up to a million, or an argument is out of its range.

    Example:
        >>> round(calibrate(epsilon=1.0, delta=1e-5, bins=10).noise_multiplier, 2)
        1.48
    """

    def mechanism(multiplier: float) -> AllocatedGaussian:
        return AllocatedGaussian(multiplier, bins, epochs, relation, common, overlaps)

    coarse, fine = (lambda z: _curve(mechanism(z), _COARSE)), (lambda z: _curve(mechanism(z), _FINE))
    multiplier = least_noise(epsilon, delta, coarse, fine)
    # Here bounds of δ at two ε are computed on two grids, so that the larger ε may have the larger bound.
    if relation == "replace-one" and epochs == 1:
        while mechanism(multiplier).epsilon_of(delta) > epsilon:
            multiplier *= _NOISE_MARGIN
    return mechanism(multiplier)
