"""DP-SGD with random allocation: in every epoch each unit takes part in one round, drawn uniformly, kept secret.

In each of `epochs` epochs every unit draws one of `bins` rounds, independently of all others and anew every epoch.
The sum of the clipped increments of those that drew a round, each of norm C at most, is released with Gaussian
noise of standard deviation `noise_multiplier` · C per coordinate, and divided by a public number.

Three things are *not* this, and must not be accounted for as this: equal-size batches of a shuffled order (from
all other units' places a unit's place is known), one bin kept over all epochs, and a round that is known to
somebody who sees the releases.

With public classes of rounds ("groups") a unit draws among those of its class: `bins` is their number.  Correlated
noise whose strategy C has b bands is covered where there are b classes or more, with clip max_t clip_t ‖C_t‖.

**The law of an epoch's loss**, with T = `bins` and z = `noise_multiplier`.  With and without the unit, what is
released is dominated by

    P = (1/T) Σ N(e_i, z² I)   and   Q = N(0, z² I),   dP/dQ = (Y_1 + … + Y_T)/T,   Y_i = exp(Z_i/z - 1/(2z²)),

with Z_i independent standard normal under Q.  For a run whose increments depend on earlier releases the ratio is
Σ y_i / T, where y_i, given the past, has mean 1 and lies below Y in convex order; so do the sums, and H_ε(P‖Q),
H_ε(Q‖P) are expectations of convex functions of the ratio.  For the same reason **moving each Y to its two
neighbours on a grid, its mean kept, only raises δ**: what is computed here is an upper bound on every grid, and
the smallest over several grids is one, too.  A known round would give the Gaussian mechanism, hence another
bound.

Under replace-one both increments are in one pair (`symmetric`); the chain of both directions through the run
without the unit is a bound, too, and nearly always a looser one.

Sources: Feldman & Shenfeld 2025 ("Privacy amplification by random allocation"); Chua et al. 2024 (balls and bins);
the numerics are an own construction, after the convex order of ratios.
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

_MAX_LOG = 600.0  # of a grid's end: e^600 is still a float when it is squared with what it is multiplied by


def grid_end(multiplier: float, bins: int, tail: float, narrow: bool = False) -> float:
    """Where a grid for Σ Y may end: about `tail` of it lies beyond under P.  A choice, no bound rests on it.

    `narrow`: for sums that hardly vary, where much noise makes every Y nearly 1.
    """
    of_one = math.exp(min(_MAX_LOG, (0.5 / multiplier - float(ndtri(tail))) / multiplier))
    if narrow:
        return bins + of_one + 10.0 * math.sqrt(bins * math.expm1(min(_MAX_LOG, multiplier**-2)))
    return max(of_one, 4.0 * bins) + 4.0 * bins


def grid_masses(multiplier: float, spacing: float, size: int) -> Floats:
    """The law of Y on 0, h, …, (size - 1)h with h = `spacing`; what lies beyond the grid is missing.

    Guarantee: Y moved to its two neighbours with its mean kept, so that the law on the whole grid is above Y in
    convex order.
    """
    points = spacing * np.arange(size + 1)
    with np.errstate(divide="ignore"):
        logs = multiplier * np.log(points)
    half = 0.5 / multiplier
    puts = points * ndtr(half + logs) - ndtr(-half + logs)  # E (x - Y)+
    calls = ndtr(half - logs) - points * ndtr(-half - logs)  # E (Y - x)+
    masses = np.empty(size)
    masses[0] = puts[1]
    masses[1:] = np.where(
        points[1:-1] <= 1.0,
        puts[:-2] - 2.0 * puts[1:-1] + puts[2:],
        calls[:-2] - 2.0 * calls[1:-1] + calls[2:],
    )
    return np.maximum(masses / spacing, 0.0)


def removal_loss_distribution(multiplier: float, bins: int, size: int, top: float) -> PrivacyLossDistribution:
    """The law of ln dP/dQ under P, with the ratio's sum Σ Y on a grid of `size` points up to `top`.

    Guarantee: an upper bound of H_ε(P‖Q); mass beyond the grid counts as infinite.
    """
    spacing = top / size
    masses = grid_masses(multiplier, spacing, size)
    sums = spacing * np.arange(size)
    law = _convolve(_self_convolve(masses, bins - 1), sums * masses) if bins > 1 else sums * masses
    return PrivacyLossDistribution(
        np.log(sums[1:] / bins), law[1:], max(0.0, 1.0 - float(np.sum(law))) + _rounding_mass(bins)
    )


def addition_loss_distribution(multiplier: float, bins: int, size: int, cap: float) -> PrivacyLossDistribution:
    """The law of ln dQ/dP under Q, with the ratio on a grid of `size` points up to `cap`.

    Guarantee: an upper bound of H_ε(Q‖P); mass beyond the grid has ratios above `cap`, and counts as at `cap`.
    """
    law = _self_convolve(grid_masses(multiplier, cap * bins / size, size), bins)
    ratios = (cap / size) * np.arange(1, size + 1)
    masses = np.append(law[1:], max(0.0, 1.0 - float(np.sum(law))))
    return PrivacyLossDistribution(-np.log(ratios[::-1]), masses[::-1], float(law[0]) + _rounding_mass(bins))


def _rounding_mass(bins: int) -> float:
    """Mass that the rounding of so many rounds' transforms may hide beyond what every δ is raised by (`losses`).

    At most 3e-17 a round was seen (tests/accounting/test_rounding.py); it is 1e-16 here, and counts as infinite.
    """
    return max(0.0, 1e-16 * bins - DELTA_MARGIN)


def _convolve(first: Floats, second: Floats) -> Floats:
    """The law of a sum of two independent numbers on one grid, cut to its size.  Nothing wraps around."""
    size = len(first)
    from scipy import fft  # a twentieth of the start of a command that needs none

    length = fft.next_fast_len(2 * size, real=True)
    return as_floats(np.maximum(fft.irfft(fft.rfft(first, length) * fft.rfft(second, length), length)[:size], 0.0))


def _self_convolve(masses: Floats, times: int) -> Floats:
    """The law of the sum of `times` ≥ 1 independent numbers, cut to the grid: by repeated squaring."""
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
_RATIO_CAPS = (
    8.0,
    1.0,
    0.125,
)  # of the ratio when a unit is added: small ones resolve the ratios that large ε ask for
_MAX_GRID_SIZE, _MIN_STEP = 2**17, 1e-12  # of the lattice of one epoch's losses
_NOISE_MARGIN = 1.002  # noise where the bound at the target is luckier than those beside it
_TAIL_SHARE = 1e-4  # what a grid made for one δ may leave out, in parts of this δ
_TAILS = (1e-5, 1e-7, 1e-9, 1e-11, 1e-13)  # what grids made for all δ leave out, an epoch


@dataclass(frozen=True)
class _Resolution:
    """Fineness of the computation; every choice gives an upper bound."""

    size: int
    """Points of the grid of Σ Y."""
    composed_size: int
    """The same where epochs are composed."""
    max_step: float
    """The widest of the lattice on which losses of epochs are composed."""
    steps_per_std: float
    """So many of them, or more, are one standard deviation of an epoch's loss."""
    replacement_size: int
    """Points of the grid of a round under replace-one."""
    knot_count: int
    """Values of ε at which the curve of an epoch is computed there."""
    chain_resolution: fading.ChainResolution


_FINE = _Resolution(2**15, 2**16, 1e-3, 30.0, 2**12, 128, fading.FINE)
_COARSE = _Resolution(2**12, 2**13, 4e-3, 10.0, 2**10, 24, fading.COARSE)


@dataclass(frozen=True)
class AllocatedGaussian(Sampled):
    """Guarantee of a run with random allocation.

    Guarantee: under zero-out neighbours differ by one unit whose increments are 0 in one of them; under
    replace-one by a unit that is another one, in the same secret rounds.  Increments may depend on all earlier
    releases. Everybody may see every release; who draws which round stays secret from them.
    """

    bins: int
    """The rounds of one epoch among which a unit draws one."""
    epochs: int = 1
    """Epochs begun; one that stopped early counts as whole."""
    relation: Relation = "zero-out"
    common_share: float = 0.0
    """Share of a round's squared distance by which two rounds of a unit overlap at most (fading.py); below 1."""
    overlaps: FadingOverlaps | None = None
    """How these overlaps fade, where that is known: a second bound."""

    kind: ClassVar[str] = "allocated-gaussian"
    title: ClassVar[str] = "random allocation"

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier)
        relation_named(self.relation)
        if not 1 <= self.bins <= _MAX_BINS:
            raise InputError(f"bins = {self.bins}: a unit draws among 1 to {_MAX_BINS:,} rounds of an epoch")
        if not 1 <= self.epochs <= _MAX_EPOCHS:
            raise InputError(f"epochs = {self.epochs}: there are 1 to {_MAX_EPOCHS:,}")
        if not 0.0 <= self.common_share < 1.0:
            raise InputError(f"common = {self.common_share}: a share of 0 or more and below 1")
        if (
            self.overlaps
            and [len(each.variances) for each in self.overlaps.epoch_chains] != [self.bins] * self.epochs
        ):
            raise InputError(f"overlaps: other than {self.epochs} chains of {self.bins} rounds")

    @property
    def curve(self) -> Curve:
        """An upper bound of δ for every ε ≥ 0; a little loose far from δ = 1e-5 … 1e-13."""
        return _cached_curve(self, _TAILS)

    def epsilon_of(self, delta: float) -> float:
        """An upper bound of the smallest ε for which (ε, `delta`)-DP holds; `delta` is 1e-10 or more."""
        return epsilon_at(_cached_curve(self, _grid_tails(check_resolvable_delta(delta), self.epochs)), delta)

    @property
    def times(self) -> int:
        """In how many rounds a unit takes part: one an epoch."""
        return self.epochs

    @property
    def known_mu(self) -> float:
        return super().known_mu * math.sqrt(1.0 + (self.epochs - 1) * self.common_share) * (1.0 + 1e-15)

    @property
    def common_mu(self) -> float:
        """μ of what its rounds move alike, which no secret hides: k √a of fading.py."""
        factor = RELATION_FACTOR[self.relation] * self.epochs
        return factor * math.sqrt(self.common_share) / self.noise_multiplier * (1.0 + 1e-15)

    @property
    def independent_part(self) -> "AllocatedGaussian":
        """The allocation of what is left, with independent noise."""
        multiplier = self.noise_multiplier / math.sqrt(1.0 - self.common_share) * (1.0 - 1e-15)
        if not self.common_share:
            return self
        return dataclasses.replace(self, noise_multiplier=multiplier, common_share=0.0, overlaps=None)


def _grid_tails(delta: float, epochs: int) -> tuple[float, ...]:
    return (_TAIL_SHARE * delta / epochs,)


@lru_cache(maxsize=4)  # up to tens of megabytes each
def _cached_curve(mechanism: AllocatedGaussian, tails: tuple[float, ...]) -> Curve:
    return _curve(mechanism, _FINE, tails)


def _curve(mechanism: AllocatedGaussian, fineness: _Resolution, tails: tuple[float, ...]) -> Curve:
    """The smallest of all bounds for the relation: the grids', and that of a known round."""
    known, (remove, add) = (
        gaussian_curve(mechanism.known_mu),
        removal_and_addition_curves(mechanism, fineness, tails),
    )
    if mechanism.relation == "zero-out":
        return lowest_curve([known, highest_curve([remove, add])])
    loose, secret = lowest_curve([known, triangle_curve(remove, add)]), mechanism.independent_part
    if (overlaps := mechanism.overlaps) is not None:
        faded = fading.replacement_curve(overlaps, mechanism.noise_multiplier, fineness.chain_resolution)
        loose = loose if faded is None else lowest_curve([known, triangle_curve(remove, add), faded])
    if secret.bins == 1 or secret.noise_multiplier < MIN_MULTIPLIER:
        return loose
    pair = SymmetricPairEpoch(secret.noise_multiplier, secret.bins, fineness.replacement_size)
    if mechanism.epochs == 1 and mechanism.common_share == 0.0:
        return lowest_curve([loose, pair.curve(fineness.knot_count, loose)])
    of_one = gaussian_epsilon_of(dataclasses.replace(secret, epochs=1).known_mu, MIN_DELTA)
    law = pair.loss_distribution(fineness.knot_count, of_one)
    if mechanism.epochs > 1:
        law = _compose_epochs(law, mechanism.epochs, fineness)
    return lowest_curve([loose, compose_with_gaussian(law, mechanism.common_mu).deltas])


def removal_and_addition_curves(
    mechanism: AllocatedGaussian, fineness: _Resolution = _FINE, tails: Sequence[float] = _TAILS
) -> tuple[Curve, Curve]:
    """The curves of a unit that is removed (P against Q) and of one that is added (Q against P), all epochs.

    Guarantee: each bounds its direction under zero-out, whatever `mechanism.relation` says.
    """
    secret = mechanism.independent_part
    known = mechanism.common_mu / RELATION_FACTOR[mechanism.relation]  # of one unit more or less
    z, bins, epochs = secret.noise_multiplier, secret.bins, secret.epochs
    size = fineness.size if epochs == 1 else fineness.composed_size
    caps = (
        _RATIO_CAPS if epochs == 1 else (min(_RATIO_CAPS[0], grid_end(z, bins, _TAILS[-1], narrow=True) / bins),)
    )
    removed = [removal_loss_distribution(z, bins, size, end) for end in _grid_ends(secret, tails)]
    added = [addition_loss_distribution(z, bins, size, cap) for cap in caps]
    if epochs > 1:
        removed = [_compose_epochs(law, epochs, fineness) for law in removed]
        added = [_compose_epochs(law, epochs, fineness) for law in added]
    found = (
        _lowest_delta_curve([compose_with_gaussian(law, known) for law in removed]),
        _lowest_delta_curve([compose_with_gaussian(law, known) for law in added]),
    )
    if (overlaps := mechanism.overlaps) is None:
        return found
    faded = fading.removal_and_addition_curves(overlaps, mechanism.noise_multiplier, fineness.chain_resolution)
    return found if faded is None else (lowest_curve([found[0], faded[0]]), lowest_curve([found[1], faded[1]]))


def _compose_epochs(law: PrivacyLossDistribution, epochs: int, fineness: _Resolution) -> PrivacyLossDistribution:
    step = max(
        min(fineness.max_step, law.loss_std / fineness.steps_per_std), law.loss_range / _MAX_GRID_SIZE, _MIN_STEP
    )
    return law.to_grid(step).self_compose(epochs)


def _grid_ends(mechanism: AllocatedGaussian, tails: Sequence[float]) -> list[float]:
    """Different ends of the grid, none within 10 % of another."""
    z, bins = mechanism.noise_multiplier, mechanism.bins
    tried = sorted({grid_end(z, bins, tail, narrow) for tail in tails for narrow in (False, True)})
    ends = list[float]()
    for end in tried:
        if not ends or end > 1.1 * ends[-1]:
            ends.append(end)
    return ends


def _lowest_delta_curve(laws: Sequence[PrivacyLossDistribution]) -> Curve:
    return lowest_curve([law.deltas for law in laws])


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
    """The mechanism with about the smallest noise multiplier that is (`epsilon`, `delta`)-DP.

    Guarantee: the one returned is (`epsilon`, `delta`)-DP by its own `epsilon_of`.  InputError where no multiplier
    up to a million is, and for a δ below 1e-10.
    """

    def mechanism(multiplier: float) -> AllocatedGaussian:
        return AllocatedGaussian(multiplier, bins, epochs, relation, common, overlaps)

    tails = _grid_tails(delta, epochs)
    coarse, fine = (lambda z: _curve(mechanism(z), _COARSE, tails)), (lambda z: _curve(mechanism(z), _FINE, tails))
    multiplier = least_noise(epsilon, delta, coarse, fine)
    if relation == "replace-one" and epochs == 1:  # a grid of its own for each ε: its bounds may rise with ε
        while mechanism(multiplier).epsilon_of(delta) > epsilon:
            multiplier *= _NOISE_MARGIN
    return mechanism(multiplier)
