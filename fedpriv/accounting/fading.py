"""Random allocation along chains: its privacy where what rounds move alike fades from round to round.

A `Chain` above a unit's rounds of one epoch has E G_s G_t = Y_st, and S = (1/T) Σ w_t, w_t = e^(G_t - a_t/2), is
a dominating pair's ratio, as shown below (S' with -G for the other unit of replace-one); `chain.law_of` gives
E F(S) from above, with F = (S - γ)+ where a unit is removed, (1 - γS)+ where one is added, and (S - γS')+ under
replace-one.
Chains of several epochs are independent (`chain`, "Epochs apart"): the run's ratio is their product, and their
laws are composed. What all rounds share is a Gaussian release beside them.

Random allocation under noise that fades: what two rounds move alike is known, the rest stays secret.

Noise that fades (`noise/buffered.py`: λ-CGD and buffers) adds up over all later rounds: columns of C overlap
however far apart a unit's rounds lie. Let X_st = clip_s clip_t ⟨C_s, C_t⟩ ≥ 0 in units of σ², v the largest
X_tt, and a the largest X_st of two different rounds s, t that one unit may take part in. A run of k epochs is
dominated by

    k releases of random allocation with independent noise, of variance 1/(v - a), **and** one Gaussian release
    that everybody knows the unit is in, of k √a standard deviations (2k √a under replace-one).

For C = I this is random allocation, and where a unit has one round only it is exact. Sound, and not tight.

**Kahane's inequality** (1985). Let X, Y be centred Gaussian vectors, c_i real, F convex, and c_i c_j (E Y_i Y_j
- E X_i X_j) ≥ 0 for all i, j. Then E F(Σ c_i e^(X_i - E X_i²/2)) ≤ E F(Σ c_i e^(Y_i - E Y_i²/2)): along Z =
√(1-θ) X + √θ Y, independent, the derivative by θ is ½ Σ_ij (E Y_i Y_j - E X_i X_j) c_i c_j E[w_i w_j F''(Σ c
w)], w_i = e^(Z_i - E Z_i²/2) > 0. (A convex F with a corner is a limit of smooth ones.)

**That the pair dominates.** π is what a unit may draw, a round of every epoch, with probability p_π. Let N be
the law of y = C s + σ z without the unit, σ = 1. Its increments u_t, ‖u_t‖ ≤ clip_t, are functions of what was
released before round t; in row r the unit moves y by m_r^π = Σ_{t ∈ π} C_rt u_t, and its law over N is S = Σ_π
p_π w_π,

    w_π = exp Σ_r (⟨m_r^π, z_r⟩ - ‖m_r^π‖²/2).

Hockey sticks are E F(S) with F = (S - γ)+ or (1 - γS)+, and under replace-one E (S - γ S')+, S' of the other
unit's increments u'. Given the past of row r the m_r^π are fixed vectors with ⟨m_r^π, m_r^ρ⟩ ≤ c_r^π c_r^ρ,
c_r^π = Σ_{t ∈ π} C_rt clip_t, and ⟨m_r^π, m'_r^ρ⟩ ≥ -c_r^π c_r^ρ. From the last row to the first: let all later
rows have been replaced by the worst, increments of one direction e, and of -e for the other unit; what is left
is E over independent later Gaussians of a convex function, so that Kahane's inequality, for this row's exponents
plus the later ones, replaces this row too. So the worst increments are clips of one direction, opposite ones for
two units, and exponents have

    E G_π G_ρ = Σ_{s ∈ π} Σ_{t ∈ ρ} X_st ≤ k² a + (v - a) |π ∩ ρ|,

since rounds of different epochs are different ones. Kahane's inequality once more puts the right side in its
place, with the sign turned between two units: G_π = k √a ξ + √(v - a) Σ_{t ∈ π} ξ_t, and -G_π for the other
unit. Then S is e^(k√a ξ - k²a/2) times the product over epochs of the means of e^(√(v-a) ξ_t - (v-a)/2): the law
over N of the Gaussian release and of k epochs of random allocation together. ∎ Nothing was asked of γ ≥ 0, so
pairs compose.

Sets of k rounds drawn at once (`Balanced`) are allocation given a partition, as in `participation/secret.py`.
With Poisson sampling |π| varies and with it what is common, so that no such product dominates: it stays refused.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

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
_GAUSSIAN_STEPS = 40.0  # of the lattice are one standard deviation of either loss, or more
_GAUSSIAN_GRID_SIZE = 2**13  # of either law on it


def compose_with_gaussian(law: PrivacyLossDistribution, mu: float) -> PrivacyLossDistribution:
    """The law of the loss of `law`'s release and of a Gaussian one of `mu` together, adaptive or not.

    Guarantee: an upper bound of H_ε wherever `law` is one, for every ε of either sign.
    """
    if mu == 0.0:
        return law
    extent = max(law.loss_range, 2.0 * _GAUSSIAN_REACH * mu)
    step = max(
        min(value for value in (law.loss_std, mu) if value > 0.0) / _GAUSSIAN_STEPS, extent / _GAUSSIAN_GRID_SIZE
    )
    return law.to_grid(step).compose(_gaussian_loss_distribution(mu, step)).distribution


def _gaussian_loss_distribution(mu: float, step: float) -> GridLossDistribution:
    low, high = (math.floor((0.5 * mu + side * _GAUSSIAN_REACH) * mu / step) for side in (-1.0, 1.0))
    return connect_dots(step, low, _hockey_stick(mu, as_floats(step * np.arange(low, high + 2))))


def _hockey_stick(mu: float, epsilons: Floats) -> Floats:
    """Hockey stick of μ-GDP at ε of either sign, rounded up.

    Below 0 it is 1 - e^ε + e^ε δ(-ε), by symmetry.
    """
    deltas = gaussian_curve(mu)(np.abs(epsilons))
    return as_floats(
        np.where(epsilons >= 0.0, deltas, -np.expm1(epsilons) + np.exp(np.minimum(0.0, epsilons)) * deltas)
    )


_MAX_VARIANCE, _MAX_ERROR = 25.0, 0.05  # of a variance, and of a walk's relative error: beyond nothing is computed
_LINEAR_STDS = 0.3  # of a standard deviation of w: where a grid of sums begins to widen
_GRID_STDS = 7.5  # standard deviations that a grid's top is made for: a choice
_MAX_TRIALS, _TOP_FACTOR, _MAX_MISSING_MASS = 6, 4.0, 1e-12  # a grid that leaves out more gets a higher top
_MAX_KNOTS = 96
# of the lattice on which epochs are composed
_MAX_STEP, _STEPS_PER_STD, _MAX_GRID_SIZE, _MIN_STEP = 2e-3, 30.0, 2**16, 1e-12


@dataclass(frozen=True)
class ChainResolution:
    """Fineness of the computation; every choice gives an upper bound."""

    spacing: float
    """Of a walk's lattice, over the smallest standard deviation of a step."""
    max_points: int
    """Points of it."""
    sum_spacing: float
    """Of the grid of sums, relative; of few rounds."""
    knot_spacing: float
    """Between two values of ε under replace-one, over a standard deviation of one round's loss."""


FINE, COARSE = ChainResolution(0.2, 200, 0.02, 0.15), ChainResolution(0.4, 80, 0.05, 0.4)


@lru_cache(maxsize=4)  # a price asks twice, for grids with different tails
def removal_and_addition_curves(
    overlaps: FadingOverlaps, multiplier: float, grain: ChainResolution
) -> tuple[Curve, Curve] | None:
    """The curves of a unit that is removed and of one that is added; None where they are not computed.

    Guarantee: each bounds its direction under zero-out.
    """
    found = [
        _compose_epochs(direction, 1.0, overlaps, multiplier, grain)
        for direction in (epoch_removal_losses, epoch_addition_losses)
    ]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


@lru_cache(maxsize=4)
def replacement_curve(overlaps: FadingOverlaps, multiplier: float, grain: ChainResolution) -> Curve | None:
    """The curve of a unit that is another one; None where it is not computed."""
    if len(overlaps.epoch_chains) == 1 and not overlaps.shared_variance:
        return epoch_replacement_curve(
            ChainEpoch(overlaps.epoch_chains[0].with_noise_multiplier(multiplier), grain)
        )
    return _compose_epochs(epoch_replacement_losses, 2.0, overlaps, multiplier, grain)


def _compose_epochs(
    direction: Callable[["ChainEpoch"], PrivacyLossDistribution | None],
    units: float,
    overlaps: FadingOverlaps,
    multiplier: float,
    grain: ChainResolution,
) -> Curve | None:
    """All epochs together, and what is known of these units."""
    times = Counter(overlaps.epoch_chains)
    laws = [direction(ChainEpoch(chain.with_noise_multiplier(multiplier), grain)) for chain in times]
    found = [(law, count) for law, count in zip(laws, times.values(), strict=True) if law is not None]
    if len(found) < len(laws):
        return None
    together, count = found[0]
    if len(overlaps.epoch_chains) > 1:
        extent = sum(law.loss_range * count for law, count in found)
        step = max(
            min(_MAX_STEP, *(law.loss_std / _STEPS_PER_STD for law, _ in found)),
            extent / _MAX_GRID_SIZE,
            _MIN_STEP,
        )
        together = together.to_grid(step).self_compose(count)
        for law, count in found[1:]:
            other = law.to_grid(step).self_compose(count)
            together = together.to_grid(step).compose(other.to_grid(step)).distribution
    return compose_with_gaussian(
        together, units * math.sqrt(overlaps.shared_variance) / multiplier * (1.0 + 1e-12)
    ).deltas


@dataclass(frozen=True)
class ChainEpoch:
    """The rounds of one epoch along a chain, at a noise multiplier."""

    chain: CovarianceChain
    resolution: ChainResolution

    @property
    def exponent_grid(self) -> ExponentGrid | None:
        """The walk's lattice; None where it is too coarse or too large, or the noise too small for it."""
        if self.max_variance > _MAX_VARIANCE:
            return None
        found = ExponentGrid(self.chain, self.resolution.spacing, self.resolution.max_points)
        return (
            found if found.relative_error <= _MAX_ERROR and found.size <= 2 * self.resolution.max_points else None
        )

    @property
    def bins(self) -> int:
        return len(self.chain.variances)

    @property
    def max_variance(self) -> float:
        return max(self.chain.variances)

    @property
    def ratio_std(self) -> float:
        """About a standard deviation of w."""
        return math.sqrt(math.expm1(min(1.0, self.max_variance)))

    def sum_grid(
        self, bottom: float, higher: float, more: float = 0.0, *, fine_at_bottom: bool = False
    ) -> SumGrid:
        """A grid that begins at `bottom`; its top is `higher` times, and `more`, than for sums of w."""
        share = float(np.max(np.sum(self.chain.covariances, axis=1))) / (self.max_variance * self.bins)
        top = math.expm1(0.5 * self.max_variance + _GRID_STDS * math.sqrt(self.max_variance)) * min(1.0, share)
        spacing = self.resolution.sum_spacing * min(1.0, 5.0 / math.sqrt(self.bins))
        top = higher * (top + 5.0 * self.ratio_std) + more
        return SumGrid(bottom, top, _LINEAR_STDS * self.ratio_std, spacing, fine_at_bottom=fine_at_bottom)


def _likelihood_ratios(
    epoch: ChainEpoch, lattice: ExponentGrid, grids: Sequence[SumGrid]
) -> tuple[Floats, Floats, float]:
    """Values of S~, ascending, their masses, and the mean that was above the grids."""
    halves, scales = 0.5 * lattice.variances, lattice.scales

    def increments(t: int, at: Floats) -> Floats:
        return as_floats((np.exp(at - halves[t]) / scales[t] - 1.0) / epoch.bins)

    masses, above = sum_distribution(lattice, grids, increments)
    return as_floats(np.maximum(0.0, grids[-1].points + 1.0)), masses, above


def epoch_removal_losses(epoch: ChainEpoch) -> PrivacyLossDistribution | None:
    """The law of ln S under P, from above; None where it is not computed."""
    if (lattice := epoch.exponent_grid) is None:
        return None
    shrink, higher = 1.0 - lattice.relative_error, 1.0
    for _ in range(_MAX_TRIALS):
        values, masses, above = _likelihood_ratios(
            epoch, lattice, [epoch.sum_grid(-1.0, higher)] * (epoch.bins + 1)
        )
        if above <= _MAX_MISSING_MASS:
            break
        higher *= _TOP_FACTOR
    some = values > 0.0
    infinite = min(1.0, (above + LOST_MEAN) / shrink)
    return PrivacyLossDistribution(
        as_floats(np.log(values[some] / shrink)), as_floats((values * masses)[some] / shrink), infinite
    )


def epoch_addition_losses(epoch: ChainEpoch) -> PrivacyLossDistribution | None:
    """The law of -ln S under Q, from above; None where it is not computed."""
    if (lattice := epoch.exponent_grid) is None:
        return None
    grids = [epoch.sum_grid(-max(1, k) / epoch.bins, 1.0, fine_at_bottom=True) for k in range(epoch.bins + 1)]
    values, masses, _ = _likelihood_ratios(epoch, lattice, grids)
    some = values > 0.0
    left = max(0.0, 1.0 - float(np.sum(lattice.prior))) + LOST_MEAN + float(np.sum(masses[~some]))
    losses = math.log1p(lattice.relative_error) - np.log(values[some])
    return PrivacyLossDistribution(as_floats(losses[::-1]), as_floats(masses[some][::-1]), min(1.0, left))


def epoch_replacement_curve(epoch: ChainEpoch) -> Curve | None:
    """An upper bound of H_ε under replace-one, ε ≥ 0; None where it is not computed.

    It is computed at values of ε a step apart, and between two of them it is the chord in e^ε.
    """
    if (lattice := epoch.exponent_grid) is None:
        return None
    step, sticks = epoch.resolution.knot_spacing * epoch.ratio_std, _replacement_hockey_stick(epoch, lattice)

    @cache
    def at(place: int) -> float:
        return min(1.0, sticks(math.exp(place * step)))

    def curve(epsilons: Floats) -> Floats:
        places = np.minimum(np.asarray(epsilons, np.float64) / step, _MAX_KNOTS)
        low = np.minimum(np.floor(places), _MAX_KNOTS - 1)
        known = {place: at(int(place)) for place in np.unique(np.concatenate([low.ravel(), low.ravel() + 1]))}
        first = np.vectorize(known.__getitem__, otypes=[np.float64])(low)
        second = np.vectorize(known.__getitem__, otypes=[np.float64])(low + 1)
        share = np.expm1((places - low) * step) / math.expm1(step)
        return as_floats(first + (second - first) * np.clip(share, 0.0, 1.0))

    return curve


def epoch_replacement_losses(epoch: ChainEpoch) -> PrivacyLossDistribution | None:
    """The law of the loss under replace-one, from above; None where it is not computed.

    Its hockey stick is the bound at values of ε ≥ 0 a step apart, and the pair is its own mirror image.
    """
    if (lattice := epoch.exponent_grid) is None:
        return None
    step, sticks = epoch.resolution.knot_spacing * epoch.ratio_std, _replacement_hockey_stick(epoch, lattice)
    bounds = [min(1.0, sticks(1.0))]
    while len(bounds) <= _MAX_KNOTS and bounds[-1] > 2.0 * _MAX_MISSING_MASS:
        bounds.append(min(bounds[-1], sticks(math.exp(len(bounds) * step))))
    return symmetric_loss_distribution(*lower_hull(as_floats(step * np.arange(len(bounds))), as_floats(bounds)))


def _replacement_hockey_stick(epoch: ChainEpoch, lattice: ExponentGrid) -> Callable[[float], float]:
    """E (S - γS')+ by γ, from above."""
    halves, scales = 0.5 * lattice.variances, lattice.scales
    up, down = 1.0 / (1.0 - lattice.relative_error), 1.0 / (1.0 + lattice.relative_error)
    reach = min(1.0, 10.0 * epoch.ratio_std)

    def at(gamma: float) -> float:
        less = gamma * down

        def increments(t: int, at: Floats) -> Floats:
            both = up * np.exp(at - halves[t]) - less * np.exp(-at - halves[t])
            return as_floats((both / scales[t] - (up - less)) / epoch.bins)

        sums = epoch.sum_grid(-4.0 * (1.0 + gamma) * reach, 1.0, gamma * reach)
        masses, above = sum_distribution(lattice, [sums] * (epoch.bins + 1), increments)
        mean = (float(masses @ np.maximum(0.0, sums.points + (up - less))) + above) * (1.0 + 1e-9)
        return mean + _MAX_MISSING_MASS + LOST_MEAN * up

    return at
