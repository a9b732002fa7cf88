"""Random allocation along chains: its privacy where what rounds move alike fades from round to round.

A `Chain` above a unit's rounds of one epoch has E G_s G_t = Y_st, and S = (1/T) Σ w_t, w_t = e^(G_t - a_t/2), is
a dominating pair's ratio by `overlap` (S' with -G for the other unit of replace-one); `walk` gives E F(S) from
above.

**Two epochs** are one chain over their rounds, s of the first and t of the second, and

    S = (1/T²) Σ_st w_s w_t e^(-Y_st),   0 ≤ Y_st = f_s g_t ≤ c_s + d_t,   c_s = q f_s²/2,   d_t = g_t²/(2q),

since a chain's overlaps across a cut are such products, in proportion to the start's variance, which the lattice
may raise; any q > 0 will do, and q = |g| / |f| is taken. So

    S_c S_d ≤ S ≤ S_1 S_2,   S_1 = (1/T) Σ w_s,   S_c = (1/T) Σ w_s e^(-c_s),   S_2 and S_d alike.

A unit that is removed has F = (S - γ)+, which rises with S: S_1 S_2 takes its place. For one that is added F =
(1 - γS)+ falls: S_c S_d. Given the exponent of the last round of the first epoch both factors are independent.

Under replace-one F = (S - γS')+ rises with S and falls with S': (S_1 S_2 - γ S'_c S'_d)+ takes its place. Given
that exponent, (S_1, S'_c) is one arm's and (S_2, S'_d) the other's, and of an arm only H(γ) = E (S_1 - γ S'_c)+ of
all γ counts: E (S_1 S_2 - γ S'_c S'_d)+ = E [S_2 H(γ S'_d / S_2)], which rises with H, and the same the other way
round. Points of H joined by chords are the hockey stick of a law of ln (S_1 / S'_c) under the measure S_1 dP, and
the two arms' laws are added up.

**Several epochs** are taken in blocks of two. Overlaps of rounds in different blocks are replaced by the largest
one of their epochs, which is common to all (Kahane): a Gaussian release, and blocks that are independent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from fedpriv.accounting.chain import Chain, Overlaps
from fedpriv.accounting.curves import Curve, Floats, as_floats
from fedpriv.accounting.losses import LatticeLosses, Losses
from fedpriv.accounting.overlap import beside
from fedpriv.accounting.symmetric import lower_hull, mirrored
from fedpriv.accounting.walk import LEFT, Arm, Lattice, Sums, arms_of, laws

_LARGEST, _LARGEST_ERROR = 25.0, 0.05  # of a variance, and of a walk's relative error: beyond nothing is computed
_NEAR = 0.3  # of a standard deviation of w: where a grid of sums begins to widen
_REACH = 7.5  # standard deviations that a grid's top is made for: a choice
_TRIES, _HIGHER, _BEYOND = 6, 4.0, 1e-12  # a grid that leaves out more gets a higher top
_END, _FOURIER = 1e-15, 1e-13  # of the mass that is moved at either end of a lattice, and that transforms may hide
_MOST_KNOTS = 96
_LOW = 1e-6  # of the mass: losses that rare below count as the least that is not
_WIDENS = 8  # such losses are a step more apart every so many
# of the lattice on which blocks are composed
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
    step: float
    """Of the lattice of losses, over a standard deviation of one round's loss."""
    knots: float
    """Between two values of ε under replace-one, over the same."""


FINE, COARSE = Grain(0.2, 200, 0.02, 0.01, 0.15), Grain(0.4, 80, 0.05, 0.04, 0.4)


def directions(overlaps: Overlaps, multiplier: float, epochs: int, grain: Grain) -> tuple[Curve, Curve] | None:
    """The curves of a unit that is removed and of one that is added; None where they are not computed.

    Guarantee: each bounds its direction under zero-out.
    """
    found = [_several(law_of, 1.0, overlaps, multiplier, epochs, grain) for law_of in (removed, added)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def replacing(overlaps: Overlaps, multiplier: float, epochs: int, grain: Grain) -> Curve | None:
    """The curve of a unit that is another one; None where it is not computed."""
    if epochs == 1 and not overlaps.known:
        return replaced(Block(overlaps.epoch.at(multiplier), 1, grain))
    return _several(replaced_law, 2.0, overlaps, multiplier, epochs, grain)


def _several(
    law_of: Callable[["Block"], Losses | None],
    units: float,
    overlaps: Overlaps,
    multiplier: float,
    epochs: int,
    grain: Grain,
) -> Curve | None:
    """All blocks of two epochs, the last epoch where their number is odd, and what is known of these units."""
    pairs, single = divmod(epochs, 2)
    blocks = [Block(overlaps.pair.at(multiplier), 2, grain)] * (pairs > 0)
    blocks += [Block(overlaps.epoch.at(multiplier), 1, grain)] * single
    found = [law for law in map(law_of, blocks) if law is not None]
    if len(found) < len(blocks):
        return None
    first, times = found[0], max(1, pairs)
    step = max(min(_WIDEST, first.spread / _STEPS), first.extent * times / _MOST_PLACES, _LEAST_STEP)
    law = first if times == 1 else first.on_lattice(step).composed(times)
    for other in found[1:]:
        law = law.on_lattice(step).beside(other.on_lattice(step)).atoms
    return beside(law, units * math.sqrt(overlaps.known) / multiplier * (1.0 + 1e-12)).deltas


@dataclass(frozen=True)
class Block:
    """One or two epochs along a chain, at a noise multiplier."""

    chain: Chain
    epochs: int
    grain: Grain

    @property
    def lattice(self) -> Lattice | None:
        """The walk's lattice; None where it is too coarse or too large, or the noise too small for it."""
        if self.largest > _LARGEST:
            return None
        start = self.bins - 1 if self.epochs == 2 else None
        arms = arms_of(self.chain, start)
        found = Lattice(self.chain.variances[start or 0], arms, self.grain.spacing, self.grain.most)
        fits = max(found.errors) <= _LARGEST_ERROR and found.size <= 2 * self.grain.most
        return found if fits else None

    @property
    def bins(self) -> int:
        return len(self.chain.variances) // self.epochs

    @property
    def largest(self) -> float:
        return max(self.chain.variances)

    @property
    def spread(self) -> float:
        """About a standard deviation of w."""
        return math.sqrt(math.expm1(min(1.0, self.largest)))

    def sums(self, bottom: float, higher: float, more: float = 0.0) -> Sums:
        """A grid that begins at `bottom`; its top is `higher` times, and `more`, than for sums of w."""
        share = float(np.max(np.sum(self.chain.covariances, axis=1))) / (self.largest * self.bins)
        top = math.expm1(0.5 * self.largest + _REACH * math.sqrt(self.largest)) * min(1.0, share)
        spacing = self.grain.sums * min(1.0, 5.0 / math.sqrt(self.bins))
        return Sums(bottom, higher * (top + 5.0 * self.spread) + more, _NEAR * self.spread, spacing)

    def smaller(self, lattice: Lattice) -> list[Floats]:
        """e^-c_s and e^-d_t of the arms' rounds, of overlaps that have grown with the start's variance."""
        if self.epochs == 1:
            return [np.ones(self.bins)]
        raised = lattice.first / self.chain.variances[self.bins - 1]
        across = raised * self.chain.covariances[: self.bins, self.bins :]
        first, second = across[::-1, 0], across[-1] / across[-1, 0] if across[-1, 0] > 0.0 else across[-1]
        ratio = math.sqrt(float(second @ second) / max(1e-300, float(first @ first)))
        if ratio == 0.0:
            return [np.ones(self.bins)] * 2
        return [np.exp(-0.5 * (1.0 + 1e-12) * ratio * first**2), np.exp(-0.5 * (1.0 + 1e-12) * second**2 / ratio)]


@dataclass(frozen=True)
class _Given:
    """The law of an arm's sum given the start's exponent (rows)."""

    values: Floats
    """The sums, ascending."""
    masses: Floats
    above: Floats
    """The means that were above the grid."""

    @property
    def means(self) -> Floats:
        return as_floats(self.masses @ self.values)


def _given(block: Block, lattice: Lattice, arm: Arm, weights: Floats, higher: float) -> _Given:
    """The law of Σ weights · w~ / T along an arm."""
    halves, scales, share = 0.5 * lattice.variances(arm), lattice.scales(arm), 1.0 / block.bins

    def increments(t: int, at: Floats) -> Floats:
        return as_floats(share * weights[t] * (np.exp(at - halves[t]) / scales[t] - 1.0))

    whole = share * float(np.sum(weights))
    sums = block.sums(-whole, higher)
    masses, above = laws(lattice, arm, sums, increments)
    return _Given(as_floats(np.maximum(0.0, sums.points + whole)), masses, above)


def removed(block: Block) -> Losses | None:
    """The law of ln S under P, from above; None where it is not computed."""
    if (lattice := block.lattice) is None:
        return None
    shrink, ones = 1.0 - lattice.errors[0], np.ones(block.bins)
    higher = 1.0
    for _ in range(_TRIES):
        arms = [_given(block, lattice, arm, ones, higher) for arm in lattice.arms]
        wholes = [each.means + each.above for each in arms]
        beyond = float(lattice.prior @ (np.prod(wholes, axis=0) - np.prod([each.means for each in arms], axis=0)))
        if beyond <= _BEYOND:
            break
        higher *= _HIGHER
    infinite = (max(0.0, beyond) + LEFT) / shrink
    laws_of = [(_logs(each.values), each.masses * each.values) for each in arms]
    return _joined(lattice, laws_of, -math.log(shrink), 1.0 / shrink, infinite, block)


def added(block: Block) -> Losses | None:
    """The law of -ln S under Q, from above; None where it is not computed."""
    if (lattice := block.lattice) is None:
        return None
    arms = [
        _given(block, lattice, arm, each, 1.0)
        for arm, each in zip(lattice.arms, block.smaller(lattice), strict=True)
    ]
    laws_of = [(-_logs(each.values)[::-1], each.masses[:, ::-1]) for each in arms]
    left = max(0.0, 1.0 - float(np.sum(lattice.prior))) + LEFT
    return _joined(lattice, laws_of, math.log1p(lattice.errors[1]), 1.0, left, block)


def _logs(values: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return as_floats(np.log(values))


def _joined(
    lattice: Lattice,
    arms: Sequence[tuple[Floats, Floats]],
    shift: float,
    factor: float,
    infinite: float,
    block: Block,
) -> Losses:
    """The law of the arms' losses together, independent given the start; plus `shift`, times `factor`."""
    step = block.grain.step * block.spread
    atoms = _added_up([_on_lattice(losses, masses, lattice.prior, step) for losses, masses in arms], lattice, step)
    infinite = min(1.0, infinite + factor * (atoms.infinite + _hidden(atoms)))
    return Losses(as_floats(atoms.losses + shift), as_floats(factor * atoms.masses), infinite)


def _added_up(arms: Sequence["_OnLattice"], lattice: Lattice, step: float) -> Losses:
    """The law of the sum of the arms' losses, which are independent given the start."""
    finite = np.prod([np.sum(arm.masses, axis=1) for arm in arms], axis=0)
    whole = np.prod([np.sum(arm.masses, axis=1) + arm.infinite for arm in arms], axis=0)
    if len(arms) == 1:
        law = lattice.prior @ arms[0].masses
    else:
        from scipy import fft  # a twentieth of the start of a command that needs none

        size = sum(arm.masses.shape[1] for arm in arms)
        length = fft.next_fast_len(size, real=True)
        product = np.prod([fft.rfft(arm.masses, length, axis=1) for arm in arms], axis=0)
        law = np.maximum(0.0, fft.irfft(lattice.prior @ product, length)[: size - 1])
    infinite = min(1.0, max(0.0, float(lattice.prior @ (whole - finite))))
    return LatticeLosses(step, sum(arm.low for arm in arms), as_floats(law), infinite).atoms


def _hidden(law: Losses) -> float:
    """The mass that the rounding of transforms may hide; a law has a mass of E e^Y, which is more than 1."""
    return _FOURIER * max(1.0, float(np.sum(law.masses)))


class _OnLattice(NamedTuple):
    """Laws of an arm's loss on the multiples of a step, one for each of the start's exponents (rows)."""

    low: int
    masses: Floats
    infinite: Floats


def _on_lattice(losses: Floats, masses: Floats, prior: Floats, step: float) -> _OnLattice:
    """Laws (rows) on the multiples of `step`, put there as by `Losses.on_lattice`."""
    together = prior @ masses
    first = min(len(losses) - 1, int(np.searchsorted(np.cumsum(together), _END)))
    last = max(first + 1, len(losses) - int(np.searchsorted(np.cumsum(together[::-1]), _END)))
    while last > first + 1 and not math.isfinite(losses[last - 1]):
        last -= 1
    while first < last - 1 and not math.isfinite(losses[first]):
        first += 1
    kept, lost = masses[:, first:last].copy(), np.sum(masses[:, last:], axis=1)
    kept[:, 0] += np.sum(masses[:, :first], axis=1)
    places = np.floor(losses[first:last] / step)
    rest = np.clip(losses[first:last] - places * step, 0.0, step)
    share = np.expm1(-rest) / math.expm1(-step)
    index = (places - places[0]).astype(np.int64)
    spread = np.zeros((last - first, int(index[-1]) + 2))
    spread[np.arange(last - first), index] = 1.0 - share
    spread[np.arange(last - first), index + 1] = share
    return _OnLattice(int(places[0]), as_floats(kept @ spread), as_floats(lost))


def replaced(block: Block) -> Curve | None:
    """An upper bound of H_ε of an epoch under replace-one, ε ≥ 0; None where it is not computed.

    It is computed at values of ε a step apart, and between two of them it is the chord in e^ε.
    """
    if (lattice := block.lattice) is None:
        return None
    step, gains = block.grain.knots * block.spread, _gains(block, lattice, 0)

    @cache
    def at(place: int) -> float:
        return _beyond(lattice, gains(math.exp(place * step)))

    def curve(epsilons: Floats) -> Floats:
        places = np.minimum(np.asarray(epsilons, np.float64) / step, _MOST_KNOTS)
        low = np.minimum(np.floor(places), _MOST_KNOTS - 1)
        known = {place: at(int(place)) for place in np.unique(np.concatenate([low.ravel(), low.ravel() + 1]))}
        first = np.vectorize(known.__getitem__, otypes=[np.float64])(low)
        second = np.vectorize(known.__getitem__, otypes=[np.float64])(low + 1)
        share = np.expm1((places - low) * step) / math.expm1(step)
        return as_floats(first + (second - first) * np.clip(share, 0.0, 1.0))

    return curve


def replaced_law(block: Block) -> Losses | None:
    """The law of the loss of one or two epochs under replace-one, from above; None where it is not computed.

    Its hockey stick is the bound at values of ε ≥ 0 a step apart, and the pair is its own mirror image.
    """
    if (lattice := block.lattice) is None:
        return None
    step = block.grain.knots * block.spread
    if block.epochs == 1:
        gains = _gains(block, lattice, 0)
        bounds = [_beyond(lattice, gains(1.0))]
        while len(bounds) <= _MOST_KNOTS and bounds[-1] > 2.0 * _BEYOND:
            bounds.append(min(bounds[-1], _beyond(lattice, gains(math.exp(len(bounds) * step)))))
        found = as_floats(bounds)
    else:
        arms = [_connected(_gains(block, lattice, number), lattice.prior, step) for number in (0, 1)]
        law = _added_up(arms, lattice, step)
        more = _hidden(law) + LEFT / (1.0 - lattice.errors[0])
        found = np.minimum(1.0, law.deltas(step * np.arange(max(1, round(law.losses[-1] / step)) + 1)) + more)
    return mirrored(*lower_hull(as_floats(step * np.arange(len(found))), as_floats(found)))


def _gains(block: Block, lattice: Lattice, number: int) -> Callable[[float], Floats]:
    """E (S - γS')+ of an arm, given the start's exponent and by γ, from above but for what leaves the lattice.

    Of two arms the first one has the factors of both for what `walk` rounds.
    """
    arm, weights = lattice.arms[number], block.smaller(lattice)[number]
    halves, scales, share = 0.5 * lattice.variances(arm), lattice.scales(arm), 1.0 / block.bins
    up, down = (1.0, 1.0) if number else (1.0 / (1.0 - lattice.errors[0]), 1.0 / (1.0 + lattice.errors[1]))

    def at(gamma: float) -> Floats:
        def increments(t: int, at: Floats) -> Floats:
            less = gamma * down * weights[t]
            both = up * np.exp(at - halves[t]) - less * np.exp(-at - halves[t])
            return as_floats(share * (both / scales[t] - (up - less)))

        reach = min(1.0, 10.0 * block.spread)
        sums = block.sums(-4.0 * (1.0 + gamma) * reach, 1.0, gamma * reach)
        masses, above = laws(lattice, arm, sums, increments)
        rest = up - gamma * down * share * float(np.sum(weights))
        return as_floats((masses @ np.maximum(0.0, sums.points + rest) + above) * (1.0 + 1e-9))

    return at


def _beyond(lattice: Lattice, gains: Floats) -> float:
    """The mean over the start's exponents, and what may have left the lattice."""
    return min(1.0, float(lattice.prior @ gains) + _BEYOND + LEFT / (1.0 - lattice.errors[0]))


def _connected(gains: Callable[[float], Floats], prior: Floats, step: float) -> _OnLattice:
    """The laws whose hockey sticks are the chords between `gains` at e^ε, of ε a step apart, below 0 ever more."""
    total, places, bounds = gains(0.0), [0], [gains(1.0)]
    while places[-1] < _MOST_KNOTS and float(prior @ bounds[-1]) > _BEYOND:
        places.append(places[-1] + 1)
        bounds.append(gains(math.exp(places[-1] * step)))
    while places[0] > -_MOST_KNOTS and float(prior @ (total - bounds[0])) > _LOW:
        places.insert(0, places[0] - 1 + places[0] // _WIDENS)
        bounds.insert(0, gains(math.exp(places[0] * step)))
    gammas, falling = np.exp(step * np.array(places)), np.minimum.accumulate(bounds)
    slopes = np.diff(falling, axis=0) / np.diff(gammas)[:, None]
    found = np.zeros((len(prior), places[-1] - places[0] + 1))
    masses = np.diff(slopes, axis=0, prepend=0.0, append=0.0) * gammas[:, None]
    masses[0] += total - falling[0]
    found[:, np.array(places) - places[0]] = np.maximum(0.0, masses).T
    return _OnLattice(places[0], found, as_floats(falling[-1]))
