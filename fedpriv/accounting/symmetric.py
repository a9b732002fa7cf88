"""Random allocation under replace-one: the hockey stick of its symmetric pair, from both increments at once.

Neighbours are a unit and another one in the same secret rounds. With T = `bins` and z = `noise_multiplier` an
epoch is dominated by

    P = (1/T) Σ N(e_i, z² I)   and   Q = (1/T) Σ N(-e_i, z² I),

    H_ε(P‖Q) = (1/T) E (D_1 + … + D_T)+,   D_i = Y_i - e^ε / (Y_i e^(1/z²)),   Y_i = exp(Z_i/z - 1/(2z²)),

with Z_i independent standard normal; a reflection exchanges P and Q, so both orders are the same.

**That the pair dominates.** Let x_i be what is released in round i, in the law N of a run without the unit; u
and v, of norm 1 at most, are what the two units would add there, any functions of the past; γ = e^ε is any
number ≥ 0. The hockey stick is E (Σ d_i)+ / T with d = (N_u - γ N_v)/N at x_i, of mean 1 - γ given the past. It
is enough that, given the past, d lies below D in convex order: then E f(s + d_T) ≤ E f(s + D_T) for a convex f,
the right side is convex in s, and rounds are exchanged from the last to the first. Means are equal, so what is
left to show is that for every real c

    F(u, v) = E (d - c)+ = ∫ (N_u - γ N_v - c N)+

is largest at opposite unit vectors. Let A be where the integrand is positive: there, divided by N, e^(⟨u, x⟩/z²
- ‖u‖²/2z²) > γ e^(⟨v, x⟩/z² - ‖v‖²/2z²) + c.

1. *Turning v away from u.* Let τ be a unit vector with ⟨τ, v⟩ = 0, ⟨τ, u⟩ ≤ 0. The derivative along τ is -(γ/z²)
   ∫_A ⟨x, τ⟩ N_v. The reflection ⟨x, τ⟩ → -⟨x, τ⟩ keeps N_v and ⟨v, x⟩, and where ⟨x, τ⟩ > 0 it raises ⟨u, x⟩,
   so that it leads from A into A: the integral is 0 or less. So F is largest where v points against u.
2. *Longer vectors.* With u = a e, v = -b e and a, b ≥ 0 the left side rises with ⟨e, x⟩ and the right side
   falls: A is a half-line x > t, and the derivatives are N_a(t) by a and γ N_-b(t) by b, 0 or more. (a = b = 0:
   no x is in A, or all are, or the integrand is 0.) ∎

Nothing was asked of γ but γ ≥ 0, so the pair dominates at every ε of either sign, and pairs of epochs compose.
For groups of rounds a block of rounds takes the place of one (`allocation`). Where round j of a block moves by at
most s_j, whatever was released before it in the block, as integers that are rounded do, its rounds are exchanged
for opposite vectors of norm s_j one after another: what the other rounds of the block multiply N_u and N_v by are
two more coefficients ≥ 0, and 1. and 2. hold for these. Opposite vectors of all its rounds are one pair of norm
√(Σ s_j²).

**The numerics.** D → (D)+ is convex and rises, so each D may be moved up, or to its two neighbours on a grid
with its mean kept: δ only rises. By exchangeability H_ε = E D_1 1{D_1 + R > 0}, R the sum of the others: where
D_1 > 0 an upper bound of P(R > -D_1) is needed, which counts R beyond the grid as infinite and below it as at
its lowest point; where D_1 < 0 a lower one, which drops both. H is convex in γ, so the lower hull of bounds at
some γ is a bound at all γ. Fourier transforms move a probability of R by less than 4e-15 T + 1e-12
(tests/accounting/test_symmetric.py, against 80-bit floats); each is taken to be wrong by more than that, to the
safe side.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.special import ndtr, ndtri

from fedpriv.accounting.curves import MIN_DELTA, Curve, Floats, as_floats, epsilon_at
from fedpriv.accounting.losses import PrivacyLossDistribution

_MAX_LOG = 600.0  # of a grid's end
_ROUNDING_MASS, _ROUNDING_MASS_PER_BIN = 2e-12, 1e-14  # of a probability: what Fourier transforms may hide
_MIN_TAIL, _TAIL_SHARE = 1e-16, 3e-4  # what lies beyond a grid, in parts of δ: a choice
_RELATIVE_MARGIN = 1e-9
_LARGE_TAIL_SHARE, _SMALL_MULTIPLIER = (
    0.2,
    0.5,
)  # a larger tail, where a small multiplier spreads points far: a choice
_NEAR_LENGTHS = 2.0  # lengths of the positive part of a grid, that R is given on either side: a choice
_SETTLED_FACTOR = 0.9  # of a bound: as long as a grid made for it gives less, one is made for that
_END_FACTOR = 0.8  # from one end of the curve that is tried to the next
_MAX_EPSILON = 60.0  # ε that is told from larger ones
_FEW_EPSILONS = 2  # values of ε
_KNOT_EXPONENT = 1.5  # power by which knots lie closer where ε is small
MIN_MULTIPLIER = 0.1
"""Below it `Symmetric` is not computed."""


@dataclass(frozen=True)
class SymmetricPairEpoch:
    """One epoch of the pair, on grids of `size` points; every size gives an upper bound."""

    multiplier: float
    """z, `LEAST_MULTIPLIER` or more."""
    bins: int
    """T."""
    size: int

    def delta(self, epsilon: float, tail: float) -> float:
        """An upper bound of H_ε(P‖Q), ε ≥ 0.  About `tail` of D_1 lies beyond the grid under P: a choice."""
        gamma = math.exp(min(epsilon, _MAX_EPSILON))  # δ falls: a smaller ε is safe
        below, spacing = self._grid(gamma, tail)
        points = as_floats(spacing * (np.arange(self.size + 1) - below))
        masses, beyond = self._ratio_distribution(gamma, points)
        at = points[:-1]
        most, least = self._tail_probabilities(masses, below)
        weighted = at * masses
        exact = float(weighted @ np.where(at > 0.0, most, least)) + beyond
        return min(1.0, exact * (1.0 + _RELATIVE_MARGIN) + self._rounding_error)

    def curve(self, knots: int, loose: Curve) -> Curve:
        """An upper bound at every ε; `loose` is one that takes less time.

        At a few ε it is computed, on a finer grid; at many it is that of the law on `knots`.
        """
        finer = replace(self, size=2 * self.size)
        shares = (_TAIL_SHARE, _LARGE_TAIL_SHARE) if self.multiplier < _SMALL_MULTIPLIER else (_TAIL_SHARE,)

        @cache
        def law() -> PrivacyLossDistribution:
            return self.loss_distribution(knots, epsilon_at(loose, MIN_DELTA))

        def curve(epsilons: Floats) -> Floats:
            if np.size(epsilons) > _FEW_EPSILONS:
                return law().deltas(epsilons)
            found = []
            for epsilon, about in zip(np.ravel(epsilons), np.ravel(loose(epsilons)), strict=True):
                before, bound = math.inf, float(about)
                while bound < _SETTLED_FACTOR * before:
                    before = bound
                    for share in shares:
                        bound = min(bound, finer.delta(float(epsilon), _grid_tail(bound, share)))
                found.append(bound)
            return as_floats(found).reshape(np.shape(epsilons))

        return curve

    def loss_distribution(self, knots: int, most: float) -> PrivacyLossDistribution:
        """The law of the loss of an epoch, in atoms at `knots` values of ε and 0 and their negatives.

        `most`: an ε at which δ is next to nothing.  Guarantee: an upper bound of H_ε(P‖Q) for every ε of either
        sign, and in compositions.
        """
        epsilons = self._max_resolved_epsilon(most) * np.linspace(0.0, 1.0, knots + 1) ** _KNOT_EXPONENT
        bounds = [1.0]
        for epsilon in epsilons:
            bounds.append(min(bounds[-1], self.delta(float(epsilon), _grid_tail(bounds[-1]))))
        return symmetric_loss_distribution(*lower_hull(epsilons, as_floats(bounds[1:])))

    @property
    def _rounding_error(self) -> float:
        return _ROUNDING_MASS + _ROUNDING_MASS_PER_BIN * self.bins

    def _max_resolved_epsilon(self, most: float) -> float:
        """About the smallest ε at which rounding hides δ."""
        end = min(most, _MAX_EPSILON)
        while end > 1e-9 and self.delta(_END_FACTOR * end, _MIN_TAIL) <= 4.0 * self._rounding_error:
            end *= _END_FACTOR
        return end

    def _grid(self, gamma: float, tail: float) -> tuple[int, float]:
        """Number of points below 0, and the distance between neighbouring points.

        Where e^ε is large R is far below 0, and only what D_1 reaches has to be resolved.
        """
        z, bins = self.multiplier, self.bins
        of_one = math.exp(min(_MAX_LOG, (0.5 / z - float(ndtri(tail))) / z))
        near = _NEAR_LENGTHS * (of_one + bins)
        wide, narrow = math.expm1(z**-2), -math.expm1(-(z**-2))
        spread = 10.0 * math.sqrt(bins * ((1.0 + gamma**2) * wide + 2.0 * gamma * narrow))
        low = min(4.0 * gamma * bins + 2.0 * gamma, (gamma - 1.0) * bins + spread + 2.0 * gamma, 2.0 * near)
        high = of_one + min(2.0 * gamma * bins, spread, near)
        spacing = (low + high) / (self.size - 1)
        return math.ceil(low / spacing), spacing

    def _ratio_distribution(self, gamma: float, points: Floats) -> tuple[Floats, float]:
        """The law of D on all points but the last, and the mean of what was not moved to them.

        Guarantee: what lies below the grid is moved up to it, all else keeps its mean.
        """
        z = self.multiplier
        lifted = points * math.exp(0.5 / z**2)
        both = np.hypot(lifted, 2.0 * math.sqrt(gamma)) + np.abs(lifted)
        at = z * np.log(np.where(lifted >= 0.0, 0.5 * both, 2.0 * gamma / both))  # the Z at which D is a point
        calls = ndtr(1.0 / z - at) - gamma * ndtr(-1.0 / z - at) - points * ndtr(-at)  # E (D - x)+
        puts = points * ndtr(at) - ndtr(at - 1.0 / z) + gamma * ndtr(at + 1.0 / z)  # E (x - D)+
        spacing = points[1] - points[0]
        masses = np.empty(len(points) - 1)
        masses[0] = puts[1] - puts[0]
        masses[1:] = np.where(
            at[1:-1] <= 0.0,
            puts[:-2] - 2.0 * puts[1:-1] + puts[2:],
            calls[:-2] - 2.0 * calls[1:-1] + calls[2:],
        )
        beyond = points[-1] * (calls[-2] - calls[-1]) / spacing + calls[-1]
        return as_floats(np.maximum(masses / spacing, 0.0)), max(0.0, float(beyond))

    def _tail_probabilities(self, masses: Floats, below: int) -> tuple[Floats, Floats]:
        """For every point x of the grid an upper and a lower bound of P(R > -x)."""
        if self.bins == 1:
            above = np.where(np.arange(self.size) > below, 1.0, 0.0)
            return above, above
        law = _self_convolve(np.stack([masses, masses]), self.bins - 1, below)
        from_each_on = np.append(np.cumsum(law[:, ::-1], axis=1)[:, ::-1], np.zeros((2, 1)), axis=1)
        places = np.clip(2 * below + 1 - np.arange(self.size), 0, self.size)
        infinite = max(0.0, 1.0 - float(from_each_on[0, 0]))
        most = np.minimum(1.0, from_each_on[0, places] + infinite + self._rounding_error)
        return as_floats(most), as_floats(np.maximum(0.0, from_each_on[1, places] - self._rounding_error))


def _grid_tail(delta: float, share: float = _TAIL_SHARE) -> float:
    return max(_MIN_TAIL, share * delta)


def _self_convolve(laws: Floats, times: int, below: int) -> Floats:
    """The laws of sums of `times` ≥ 1 independent numbers, shape (2, size), by repeated squaring.

    Of the first what falls below the grid stays at its lowest point, of the second it is dropped; what lies
    beyond is missing in both.
    """
    from scipy import fft  # a twentieth of the start of a command that needs none

    size = laws.shape[1]
    length = fft.next_fast_len(2 * size, real=True)

    def sums(first: Floats, second: Floats) -> Floats:
        transformed = fft.rfft(first, length)
        other = transformed if second is first else fft.rfft(second, length)
        whole = fft.irfft(transformed * other, length)
        found = as_floats(whole[:, below : below + size])
        found[0, 0] += float(np.sum(whole[0, :below]))
        return found

    result: Floats | None = None
    while True:
        if times & 1:
            result = laws if result is None else sums(result, laws)
        times >>= 1
        if not times:
            assert result is not None
            return result
        laws = sums(laws, laws)


def lower_hull(epsilons: Floats, bounds: Floats) -> tuple[Floats, Floats]:
    """Those points that the lower convex hull over γ = e^ε rests on; `epsilons` ascend from 0."""
    gammas = np.exp(epsilons)
    kept: list[int] = []
    for new in range(len(gammas)):
        while len(kept) > 1:
            first, last = kept[-2], kept[-1]
            to_last = (bounds[last] - bounds[first]) * (gammas[new] - gammas[first])
            if to_last < (bounds[new] - bounds[first]) * (gammas[last] - gammas[first]):
                break
            kept.pop()
        kept.append(new)
    return epsilons[kept], bounds[kept]


def symmetric_loss_distribution(epsilons: Floats, bounds: Floats) -> PrivacyLossDistribution:
    """The law of the loss whose hockey stick is `bounds` at e^ε ≥ 1, convex and falling, and its mirror below.

    Of a pair that a reflection exchanges, P(loss = -l) = e^-l P(loss = l).  Guarantee: no δ below `bounds`, nor
    below their chords, for one release or in a composition.
    """
    gammas = np.exp(epsilons)
    slopes = -np.diff(bounds) / np.diff(gammas)
    first = slopes[0] if len(slopes) else 0.0
    above = np.maximum(gammas[1:] * (slopes - np.append(slopes[1:], 0.0)), 0.0)
    equal = max(0.0, 1.0 - float(bounds[0]) - 2.0 * first)
    masses = np.concatenate([(above * np.exp(-epsilons[1:]))[::-1], [equal], above])
    return PrivacyLossDistribution(np.concatenate([-epsilons[:0:-1], epsilons]), masses, float(bounds[-1]))
