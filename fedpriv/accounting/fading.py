"""Random allocation along chains: its privacy where what rounds move alike fades from round to round.

A `Chain` above a unit's rounds of one epoch has E G_s G_t = Y_st, and S = (1/T) Σ w_t, w_t = e^(G_t - a_t/2), is
a dominating pair's ratio by `overlap` (S' with -G for the other unit of replace-one); `walk` gives E F(S) from
above, with F = (S - γ)+ where a unit is removed, (1 - γS)+ where one is added, and (S - γS')+ under replace-one.
Chains of several epochs are independent (`chain`, "Epochs apart"): the run's ratio is their product, and their
laws are composed. What all rounds share is a Gaussian release beside them.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from fedpriv.accounting.chain import Chain, Overlaps
from fedpriv.accounting.curves import Curve, Floats, as_floats
from fedpriv.accounting.losses import Losses
from fedpriv.accounting.overlap import beside
from fedpriv.accounting.symmetric import lower_hull, mirrored
from fedpriv.accounting.walk import LEFT, Lattice, Sums, law_of

_LARGEST, _LARGEST_ERROR = 25.0, 0.05  # of a variance, and of a walk's relative error: beyond nothing is computed
_NEAR = 0.3  # of a standard deviation of w: where a grid of sums begins to widen
_REACH = 7.5  # standard deviations that a grid's top is made for: a choice
_TRIES, _HIGHER, _BEYOND = 6, 4.0, 1e-12  # a grid that leaves out more gets a higher top
_MOST_KNOTS = 96
# of the lattice on which epochs are composed
_WIDEST, _STEPS, _MOST_PLACES, _LEAST_STEP = 2e-3, 30.0, 2**16, 1e-12


@dataclass(frozen=True)
class Grain:
    """Fineness of the computation; every choice gives an upper bound."""

    spacing: float
    """Of a walk's lattice, over the smallest standard deviation of a step."""
    most: int
    """Points of it."""
    sums: float
    """Of the grid of sums, relative; of few rounds."""
    knots: float
    """Between two values of ε under replace-one, over a standard deviation of one round's loss."""


FINE, COARSE = Grain(0.2, 200, 0.02, 0.15), Grain(0.4, 80, 0.05, 0.4)


@lru_cache(maxsize=4)  # a price asks twice, for grids with different tails
def directions(overlaps: Overlaps, multiplier: float, grain: Grain) -> tuple[Curve, Curve] | None:
    """The curves of a unit that is removed and of one that is added; None where they are not computed.

    Guarantee: each bounds its direction under zero-out.
    """
    found = [_composed(direction, 1.0, overlaps, multiplier, grain) for direction in (removed, added)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


@lru_cache(maxsize=4)
def replacing(overlaps: Overlaps, multiplier: float, grain: Grain) -> Curve | None:
    """The curve of a unit that is another one; None where it is not computed."""
    if len(overlaps.epochs) == 1 and not overlaps.known:
        return replaced(Epoch(overlaps.epochs[0].at(multiplier), grain))
    return _composed(replaced_law, 2.0, overlaps, multiplier, grain)


def _composed(
    direction: Callable[["Epoch"], Losses | None],
    units: float,
    overlaps: Overlaps,
    multiplier: float,
    grain: Grain,
) -> Curve | None:
    """All epochs together, and what is known of these units."""
    times = Counter(overlaps.epochs)
    laws = [direction(Epoch(chain.at(multiplier), grain)) for chain in times]
    found = [(law, count) for law, count in zip(laws, times.values(), strict=True) if law is not None]
    if len(found) < len(laws):
        return None
    together, count = found[0]
    if len(overlaps.epochs) > 1:
        extent = sum(law.extent * count for law, count in found)
        step = max(min(_WIDEST, *(law.spread / _STEPS for law, _ in found)), extent / _MOST_PLACES, _LEAST_STEP)
        together = together.on_lattice(step).composed(count)
        for law, count in found[1:]:
            other = law.on_lattice(step).composed(count)
            together = together.on_lattice(step).beside(other.on_lattice(step)).atoms
    return beside(together, units * math.sqrt(overlaps.known) / multiplier * (1.0 + 1e-12)).deltas


@dataclass(frozen=True)
class Epoch:
    """The rounds of one epoch along a chain, at a noise multiplier."""

    chain: Chain
    grain: Grain

    @property
    def lattice(self) -> Lattice | None:
        """The walk's lattice; None where it is too coarse or too large, or the noise too small for it."""
        if self.largest > _LARGEST:
            return None
        found = Lattice(self.chain, self.grain.spacing, self.grain.most)
        return found if found.error <= _LARGEST_ERROR and found.size <= 2 * self.grain.most else None

    @property
    def bins(self) -> int:
        return len(self.chain.variances)

    @property
    def largest(self) -> float:
        return max(self.chain.variances)

    @property
    def spread(self) -> float:
        """About a standard deviation of w."""
        return math.sqrt(math.expm1(min(1.0, self.largest)))

    def sums(self, bottom: float, higher: float, more: float = 0.0, *, least: bool = False) -> Sums:
        """A grid that begins at `bottom`; its top is `higher` times, and `more`, than for sums of w."""
        share = float(np.max(np.sum(self.chain.covariances, axis=1))) / (self.largest * self.bins)
        top = math.expm1(0.5 * self.largest + _REACH * math.sqrt(self.largest)) * min(1.0, share)
        spacing = self.grain.sums * min(1.0, 5.0 / math.sqrt(self.bins))
        top = higher * (top + 5.0 * self.spread) + more
        return Sums(bottom, top, _NEAR * self.spread, spacing, least=least)


def _ratios(epoch: Epoch, lattice: Lattice, grids: Sequence[Sums]) -> tuple[Floats, Floats, float]:
    """Values of S~, ascending, their masses, and the mean that was above the grids."""
    halves, scales = 0.5 * lattice.variances, lattice.scales

    def increments(t: int, at: Floats) -> Floats:
        return as_floats((np.exp(at - halves[t]) / scales[t] - 1.0) / epoch.bins)

    masses, above = law_of(lattice, grids, increments)
    return as_floats(np.maximum(0.0, grids[-1].points + 1.0)), masses, above


def removed(epoch: Epoch) -> Losses | None:
    """The law of ln S under P, from above; None where it is not computed."""
    if (lattice := epoch.lattice) is None:
        return None
    shrink, higher = 1.0 - lattice.error, 1.0
    for _ in range(_TRIES):
        values, masses, above = _ratios(epoch, lattice, [epoch.sums(-1.0, higher)] * (epoch.bins + 1))
        if above <= _BEYOND:
            break
        higher *= _HIGHER
    some = values > 0.0
    infinite = min(1.0, (above + LEFT) / shrink)
    return Losses(as_floats(np.log(values[some] / shrink)), as_floats((values * masses)[some] / shrink), infinite)


def added(epoch: Epoch) -> Losses | None:
    """The law of -ln S under Q, from above; None where it is not computed."""
    if (lattice := epoch.lattice) is None:
        return None
    grids = [epoch.sums(-max(1, k) / epoch.bins, 1.0, least=True) for k in range(epoch.bins + 1)]
    values, masses, _ = _ratios(epoch, lattice, grids)
    some = values > 0.0
    left = max(0.0, 1.0 - float(np.sum(lattice.prior))) + LEFT + float(np.sum(masses[~some]))
    losses = math.log1p(lattice.error) - np.log(values[some])
    return Losses(as_floats(losses[::-1]), as_floats(masses[some][::-1]), min(1.0, left))


def replaced(epoch: Epoch) -> Curve | None:
    """An upper bound of H_ε under replace-one, ε ≥ 0; None where it is not computed.

    It is computed at values of ε a step apart, and between two of them it is the chord in e^ε.
    """
    if (lattice := epoch.lattice) is None:
        return None
    step, sticks = epoch.grain.knots * epoch.spread, _sticks(epoch, lattice)

    @cache
    def at(place: int) -> float:
        return min(1.0, sticks(math.exp(place * step)))

    def curve(epsilons: Floats) -> Floats:
        places = np.minimum(np.asarray(epsilons, np.float64) / step, _MOST_KNOTS)
        low = np.minimum(np.floor(places), _MOST_KNOTS - 1)
        known = {place: at(int(place)) for place in np.unique(np.concatenate([low.ravel(), low.ravel() + 1]))}
        first = np.vectorize(known.__getitem__, otypes=[np.float64])(low)
        second = np.vectorize(known.__getitem__, otypes=[np.float64])(low + 1)
        share = np.expm1((places - low) * step) / math.expm1(step)
        return as_floats(first + (second - first) * np.clip(share, 0.0, 1.0))

    return curve


def replaced_law(epoch: Epoch) -> Losses | None:
    """The law of the loss under replace-one, from above; None where it is not computed.

    Its hockey stick is the bound at values of ε ≥ 0 a step apart, and the pair is its own mirror image.
    """
    if (lattice := epoch.lattice) is None:
        return None
    step, sticks = epoch.grain.knots * epoch.spread, _sticks(epoch, lattice)
    bounds = [min(1.0, sticks(1.0))]
    while len(bounds) <= _MOST_KNOTS and bounds[-1] > 2.0 * _BEYOND:
        bounds.append(min(bounds[-1], sticks(math.exp(len(bounds) * step))))
    return mirrored(*lower_hull(as_floats(step * np.arange(len(bounds))), as_floats(bounds)))


def _sticks(epoch: Epoch, lattice: Lattice) -> Callable[[float], float]:
    """E (S - γS')+ by γ, from above."""
    halves, scales = 0.5 * lattice.variances, lattice.scales
    up, down = 1.0 / (1.0 - lattice.error), 1.0 / (1.0 + lattice.error)
    reach = min(1.0, 10.0 * epoch.spread)

    def at(gamma: float) -> float:
        less = gamma * down

        def increments(t: int, at: Floats) -> Floats:
            both = up * np.exp(at - halves[t]) - less * np.exp(-at - halves[t])
            return as_floats((both / scales[t] - (up - less)) / epoch.bins)

        sums = epoch.sums(-4.0 * (1.0 + gamma) * reach, 1.0, gamma * reach)
        masses, above = law_of(lattice, [sums] * (epoch.bins + 1), increments)
        mean = (float(masses @ np.maximum(0.0, sums.points + (up - less))) + above) * (1.0 + 1e-9)
        return mean + _BEYOND + LEFT * up

    return at
