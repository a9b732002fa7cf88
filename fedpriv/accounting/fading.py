"""Random allocation under noise that fades: privacy from the overlaps of a unit's rounds.

A unit is what neighbours differ in, such as a record.  In every epoch it takes part in one of T rounds, drawn in
secret, with a contribution of norm clip_t at most to round t.  The releases are C s plus independent noise of
standard deviation σ, for the sums s of the rounds and a lower triangular matrix C with columns C_t.

In noise with buffers, columns of C fade over all later rounds, so that they overlap however far apart a unit's
rounds lie.  The overlap of rounds s and t is X_st = clip_s clip_t ⟨C_s, C_t⟩ ≥ 0 in units of σ².  There are two
bounds.

**From the largest overlap.**  Let v be the largest X_tt, and a the largest X_st of two different rounds that one
unit may take part in.  A run of k epochs is dominated by

    k releases of random allocation with independent noise, of variance 1/(v - a), **and** one Gaussian release
    of k √a standard deviations (2k √a under replace-one), for which the unit's participation is known.

**From chains.**  A `CovarianceChain` above the overlaps of one epoch is a Gaussian vector G_t with variances a_t.
Its ratio S = (1/T) Σ w_t with w_t = e^(G_t - a_t/2) is the ratio dP/dQ of a pair P, Q that dominates the epoch.
S' is the same ratio with -G, for the other unit under replace-one.  `chain.sum_distribution` gives E F(S) from
above, with F = (S - γ)+ for a unit that is removed, (1 - γS)+ for one that is added, and (S - γS')+ under
replace-one.  The G_t walk on a grid, whose rounding changes S in the mean by a relative error of η at most.
Chains of several epochs are independent, so that their privacy loss distributions are composed.

Both bounds hold for increments that depend on earlier releases.  Proof, by Kahane's inequality (1985):
docs/proofs/fading.md.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fedpriv.accounting.chain import (
    LOST_MEAN,
    CovarianceChain,
    ExponentGrid,
    FadingOverlaps,
    SumGrid,
    sum_distribution,
)
from fedpriv.accounting.curves import Curve, Floats, as_floats, gaussian_curve
from fedpriv.accounting.losses import GridLossDistribution, PrivacyLossDistribution
from fedpriv.accounting.poisson import connect_dots
from fedpriv.accounting.symmetric import lower_hull, symmetric_loss_distribution

_GAUSSIAN_REACH = 8.5  # standard deviations of a Gaussian's loss: beyond lies less than 1e-16
_GAUSSIAN_STEPS = 40.0  # steps of the grid per standard deviation of either loss, unless it gets too long
_GAUSSIAN_GRID_SIZE = 2**13  # largest number of steps across either distribution


def compose_with_gaussian(distribution: PrivacyLossDistribution, mu: float) -> PrivacyLossDistribution:
    """Compose a privacy loss distribution with that of one Gaussian release of `mu`, adaptive or not.

    Guarantee: the result bounds H_ε from above for every ε of either sign, if `distribution` does so.

    Args:
        distribution: Privacy loss distribution of one direction.
        mu: μ ≥ 0 of the Gaussian release.

    Returns:
        Privacy loss distribution of both together, or `distribution` itself if μ is 0.
    """
    if mu == 0.0:
        return distribution
    extent = max(distribution.loss_range, 2.0 * _GAUSSIAN_REACH * mu)
    step = max(
        min(value for value in (distribution.loss_std, mu) if value > 0.0) / _GAUSSIAN_STEPS,
        extent / _GAUSSIAN_GRID_SIZE,
    )
    return distribution.to_grid(step).compose(_gaussian_loss_distribution(mu, step)).distribution


def _gaussian_loss_distribution(mu: float, step: float) -> GridLossDistribution:
    low, high = (math.floor((0.5 * mu + side * _GAUSSIAN_REACH) * mu / step) for side in (-1.0, 1.0))
    return connect_dots(step, low, _hockey_stick(mu, as_floats(step * np.arange(low, high + 2))))


def _hockey_stick(mu: float, epsilons: Floats) -> Floats:
    """Return the hockey stick of μ-GDP at ε of either sign, with δ(|ε|) rounded up.

    Below 0 it is 1 - e^ε + e^ε δ(-ε), by symmetry.
    """
    deltas = gaussian_curve(mu)(np.abs(epsilons))
    return as_floats(
        np.where(epsilons >= 0.0, deltas, -np.expm1(epsilons) + np.exp(np.minimum(0.0, epsilons)) * deltas)
    )


_MAX_VARIANCE, _MAX_ERROR = 25.0, 0.05  # largest exponent variance and walk error for which there is a bound
_LINEAR_STDS = 0.3  # standard deviations of w up to which points of a grid of sums are equally spaced
_GRID_STDS = 7.5  # standard deviations of an exponent below a grid's top; bounds hold for every top
_MAX_TRIALS, _TOP_FACTOR, _MAX_MISSING_MASS = 6, 4.0, 1e-12  # a grid that misses more mass gets a higher top
_MAX_KNOTS = 96
_REPLACEMENT_COARSENING = 2.0  # S - γS' is smooth: half the time, and ε larger by 0.03 % at most where tried
# Grid on which the losses of epochs are composed.
_MAX_STEP, _STEPS_PER_STD, _MAX_GRID_SIZE, _MIN_STEP = 2e-3, 30.0, 2**16, 1e-12


@dataclass(frozen=True)
class ChainResolution:
    """Resolution of the computation along chains.  Every choice gives an upper bound."""

    spacing: float
    """Step of the grid of exponents over the smallest standard deviation of a walk's step."""
    max_points: int
    """Number of points of the grid of exponents above which its step is raised."""
    sum_spacing: float
    """Step of the grid of sums, with the factors of `ChainEpoch.sum_grid`."""
    knot_spacing: float
    """Step in ε under replace-one, over `ChainEpoch.ratio_std`."""


FINE, COARSE = ChainResolution(0.2, 200, 0.02, 0.15), ChainResolution(0.4, 80, 0.05, 0.4)


@lru_cache(maxsize=4)
def removal_and_addition_curves(
    overlaps: FadingOverlaps, multiplier: float, resolution: ChainResolution
) -> tuple[Curve, Curve] | None:
    """Return the curves of a unit that is removed and of one that is added, or None.

    The result is None if an epoch has no grid of exponents.

    Guarantee: each curve bounds its direction under zero-out.

    Args:
        overlaps: Chains above the unit's rounds, and the shared variance.
        multiplier: Noise multiplier σ / clip.
        resolution: Resolution of the computation.
    """
    curves = [
        _compose_epochs(direction, 1.0, overlaps, multiplier, resolution)
        for direction in (epoch_removal_losses, epoch_addition_losses)
    ]
    return None if curves[0] is None or curves[1] is None else (curves[0], curves[1])


@lru_cache(maxsize=4)
def replacement_curve(overlaps: FadingOverlaps, multiplier: float, resolution: ChainResolution) -> Curve | None:
    """Return the curve of a unit that is exchanged for another one, or None.

    Arguments, and the reason for None, are those of `removal_and_addition_curves`.
    """
    return _compose_epochs(epoch_replacement_losses, 2.0, overlaps, multiplier, resolution)


def _compose_epochs(
    direction: Callable[["ChainEpoch"], PrivacyLossDistribution | None],
    units: float,
    overlaps: FadingOverlaps,
    multiplier: float,
    resolution: ChainResolution,
) -> Curve | None:
    """Return the curve of δ of all epochs, or None if the losses of an epoch are unknown.

    The losses of several epochs add up on a common grid, where those of equal chains are computed once.  The
    variance that all rounds share counts as one more Gaussian release.

    Args:
        direction: Function from an epoch to its privacy loss distribution, or to None.
        units: Factor of the relation, 1 under zero-out and 2 under replace-one.
        overlaps: Chains above the unit's rounds, and the shared variance.
        multiplier: σ / clip.
        resolution: Resolution of the computation.
    """
    epoch_counts = Counter(overlaps.epoch_chains)
    epoch_distributions = [
        direction(ChainEpoch(chain.with_noise_multiplier(multiplier), resolution)) for chain in epoch_counts
    ]
    distributions = [
        (distribution, count)
        for distribution, count in zip(epoch_distributions, epoch_counts.values(), strict=True)
        if distribution is not None
    ]
    if len(distributions) < len(epoch_distributions):
        return None
    total, count = distributions[0]
    if len(overlaps.epoch_chains) > 1:
        extent = sum(distribution.loss_range * count for distribution, count in distributions)
        # The step resolves the losses of an epoch, unless the grid of all epochs would get too long.
        step = max(
            min(_MAX_STEP, *(distribution.loss_std / _STEPS_PER_STD for distribution, _ in distributions)),
            extent / _MAX_GRID_SIZE,
            _MIN_STEP,
        )
        total = total.to_grid(step).self_compose(count)
        for distribution, count in distributions[1:]:
            next_distribution = distribution.to_grid(step).self_compose(count)
            total = total.to_grid(step).compose(next_distribution.to_grid(step)).distribution
    return compose_with_gaussian(
        total, units * math.sqrt(overlaps.shared_variance) / multiplier * (1.0 + 1e-12)
    ).deltas


@dataclass(frozen=True)
class ChainEpoch:
    """Rounds of one epoch along a chain, and the resolution of their grids."""

    chain: CovarianceChain
    """Covariances of the exponents, with the noise multiplier in them."""
    resolution: ChainResolution
    """Resolution of the grids."""

    @property
    def exponent_grid(self) -> ExponentGrid | None:
        """Grid of the exponents, or None if it would be too coarse or too large, or the noise is too small."""
        if self.max_variance > _MAX_VARIANCE:
            return None
        grid = ExponentGrid(self.chain, self.resolution.spacing, self.resolution.max_points)
        return grid if grid.relative_error <= _MAX_ERROR and grid.size <= 2 * self.resolution.max_points else None

    @property
    def bins(self) -> int:
        return len(self.chain.variances)

    @property
    def max_variance(self) -> float:
        return max(self.chain.variances)

    @property
    def ratio_std(self) -> float:
        """Largest standard deviation of a w_t, with exponent variances above 1 counted as 1."""
        return math.sqrt(math.expm1(min(1.0, self.max_variance)))

    @cached_property
    def largest_sum(self) -> float:
        """Value of S - 1 that few walks reach, for the top of a grid of sums.

        Bounds hold for every top.
        """
        overlap_share = float(np.max(np.sum(self.chain.covariances, axis=1))) / (self.max_variance * self.bins)
        return (
            math.expm1(0.5 * self.max_variance + _GRID_STDS * math.sqrt(self.max_variance))
            * min(1.0, overlap_share)
            + 5.0 * self.ratio_std
        )

    def sum_grid(
        self, bottom: float, top_factor: float = 1.0, *, coarsening: float = 1.0, fine_at_bottom: bool = False
    ) -> SumGrid:
        """Return a grid of sums.

        Args:
            bottom: Smallest point.
            top_factor: Top over `largest_sum`.
            coarsening: Factor on the resolution's distances of points.
            fine_at_bottom: Whether no sum is below `bottom`, so that points may be dense there.
        """
        return SumGrid(
            bottom,
            top_factor * self.largest_sum,
            _LINEAR_STDS * self.ratio_std,
            coarsening * self.resolution.sum_spacing * min(1.0, 5.0 / math.sqrt(self.bins)),
            fine_at_bottom=fine_at_bottom,
        )


def _likelihood_ratios(
    epoch: ChainEpoch, exponent_grid: ExponentGrid, sum_grids: Sequence[SumGrid]
) -> tuple[Floats, Floats, float]:
    """Return values of S on the grid, ascending, their masses under Q, and the mean above the grids.

    Rounding of the exponents raises the mean of each w_t, which is divided by its scale so that the mean stays 1.

    Args:
        epoch: Epoch of T rounds.
        exponent_grid: Grid of its exponents.
        sum_grids: Grids of the part of S - 1 from the last 0, 1, …, T rounds.
    """
    half_variances, scales = 0.5 * exponent_grid.variances, exponent_grid.scales

    def increments(t: int, exponents: Floats) -> Floats:
        return as_floats((np.exp(exponents - half_variances[t]) / scales[t] - 1.0) / epoch.bins)

    masses, mean_above = sum_distribution(exponent_grid, sum_grids, increments)
    return as_floats(np.maximum(0.0, sum_grids[-1].points + 1.0)), masses, mean_above


def epoch_removal_losses(epoch: ChainEpoch) -> PrivacyLossDistribution | None:
    """Return a bound of the distribution of ln S under P, or None without a grid (`exponent_grid`).

    S is the ratio dP/dQ, so that the mass under P at a value s is s times its mass under Q.  Values are divided by
    1 - η, for the relative error η of the walk.  Mean that is lost above the grid of sums counts as infinite loss,
    and if it is much, the grid is made higher.
    """
    if (exponent_grid := epoch.exponent_grid) is None:
        return None
    lower_factor, top_factor = 1.0 - exponent_grid.relative_error, 1.0
    for _ in range(_MAX_TRIALS):
        values, masses, mean_above = _likelihood_ratios(
            epoch, exponent_grid, [epoch.sum_grid(-1.0, top_factor)] * (epoch.bins + 1)
        )
        if mean_above <= _MAX_MISSING_MASS:
            break
        top_factor *= _TOP_FACTOR
    is_positive = values > 0.0
    infinite_mass = min(1.0, (mean_above + LOST_MEAN) / lower_factor)
    return PrivacyLossDistribution(
        as_floats(np.log(values[is_positive] / lower_factor)),
        as_floats((values * masses)[is_positive] / lower_factor),
        infinite_mass,
    )


def epoch_addition_losses(epoch: ChainEpoch) -> PrivacyLossDistribution | None:
    """Return a bound of the distribution of -ln S under Q, or None without a grid (`exponent_grid`).

    Values of S are divided by 1 + η, for the relative error η of the walk.  Mass at S = 0, and mass of walks that
    leave the grid of exponents, count as infinite loss.

    The grid of the sum over k ≥ 1 rounds begins at the infimum of this sum, so that no sum is moved up to the
    bottom, which would lower E (1 - γS)+.  Points are dense at the bottom, where S is near 0 and -ln S large.
    """
    if (exponent_grid := epoch.exponent_grid) is None:
        return None
    # A round adds w_t/T - 1/T, so that k rounds add -k/T at least.  A bottom has to be below 0, hence max(1, k).
    grids = [epoch.sum_grid(-max(1, k) / epoch.bins, fine_at_bottom=True) for k in range(epoch.bins + 1)]
    values, masses, _ = _likelihood_ratios(epoch, exponent_grid, grids)
    is_positive = values > 0.0
    infinite_mass = (
        max(0.0, 1.0 - float(np.sum(exponent_grid.prior))) + LOST_MEAN + float(np.sum(masses[~is_positive]))
    )
    losses = math.log1p(exponent_grid.relative_error) - np.log(values[is_positive])
    return PrivacyLossDistribution(
        as_floats(losses[::-1]), as_floats(masses[is_positive][::-1]), min(1.0, infinite_mass)
    )


def epoch_replacement_losses(epoch: ChainEpoch) -> PrivacyLossDistribution | None:
    """Return a bound of the loss distribution under replace-one, or None without a grid (`exponent_grid`).

    E (S - e^ε S')+ is bounded at values of ε ≥ 0 a step apart, and the loss distribution is made from the lower
    hull of these bounds.  By symmetry of the pair they decide the masses of negative losses, too.
    """
    if (exponent_grid := epoch.exponent_grid) is None:
        return None
    step, hockey_stick = (
        epoch.resolution.knot_spacing * epoch.ratio_std,
        _replacement_hockey_stick(epoch, exponent_grid),
    )
    bounds = [min(1.0, hockey_stick(1.0))]
    # At larger ε the bound would be little more than its margins for rounding.
    while len(bounds) <= _MAX_KNOTS and bounds[-1] > 2.0 * _MAX_MISSING_MASS:
        bounds.append(min(bounds[-1], hockey_stick(math.exp(len(bounds) * step))))
    return symmetric_loss_distribution(*lower_hull(as_floats(step * np.arange(len(bounds))), as_floats(bounds)))


def _replacement_hockey_stick(epoch: ChainEpoch, exponent_grid: ExponentGrid) -> Callable[[float], float]:
    """Return the function γ -> upper bound of E (S - γS')+, for γ = e^ε ≥ 1.

    S - γS' is a sum over the rounds, whose terms e^(G_t - a_t/2)/T - γ e^(-G_t - a_t/2)/T depend on one exponent
    each.  The grid of sums is fine near 0, which is the threshold at the end.

    Args:
        epoch: Rounds of the epoch.
        exponent_grid: Grid on which the exponents G_t of the chain walk.
    """
    half_variances, scales = 0.5 * exponent_grid.variances, exponent_grid.scales
    upper_factor, lower_factor = (
        1.0 / (1.0 - exponent_grid.relative_error),
        1.0 / (1.0 + exponent_grid.relative_error),
    )

    def expected_excess(gamma: float) -> float:
        # S is rounded up and S' down, by the relative error of the grid of exponents.
        gamma_factor = gamma * lower_factor

        def increments(t: int, exponents: Floats) -> Floats:
            signed_ratio = upper_factor * np.exp(exponents - half_variances[t]) - gamma_factor * np.exp(
                -exponents - half_variances[t]
            )
            return as_floats(signed_ratio / (scales[t] * epoch.bins))

        # Sums below the grid are moved up to its bottom, which raises the bound.
        sum_grid = epoch.sum_grid(-min(epoch.largest_sum, 4.0 * (1.0 + gamma)), coarsening=_REPLACEMENT_COARSENING)
        masses, mean_above = sum_distribution(exponent_grid, [sum_grid] * (epoch.bins + 1), increments)
        # 1e-9 and `_MAX_MISSING_MASS` are margins for rounding.  `LOST_MEAN` is for walks that leave the grid.
        return (
            (float(masses @ np.maximum(0.0, sum_grid.points)) + mean_above) * (1.0 + 1e-9)
            + _MAX_MISSING_MASS
            + LOST_MEAN * upper_factor
        )

    return expected_excess
