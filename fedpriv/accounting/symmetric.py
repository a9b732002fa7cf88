"""Random allocation under replace-one: the hockey stick of its symmetric pair.

Neighbours differ by a unit, such as a record, that is exchanged for another one in the same secret rounds.  A unit
takes part in one round of an epoch, drawn uniformly in secret, and its increment is its clipped contribution to
that round.  With T = `bins` rounds and z = `noise_multiplier` an epoch is dominated by

    P = (1/T) Σ N(e_i, z² I)   and   Q = (1/T) Σ N(-e_i, z² I),

    H_ε(P‖Q) = (1/T) E (D_1 + … + D_T)+,   D_i = Y_i - e^ε / (Y_i e^(1/z²)),   Y_i = exp(Z_i/z - 1/(2z²)),

with Z_i independent standard normal, (D)+ = max(D, 0), and the hockey stick H_ε(P‖Q), the largest P(A) - e^ε Q(A)
of any event A, which is the smallest δ at ε.  A reflection exchanges P and Q, so that both orders are the same.
Pairs of epochs compose.  Proof, for increments that are any functions of the past: docs/proofs/symmetric.md.

**Numerics.**  D → (D)+ is convex and rises, so each D may be moved up, or to its two neighbours on a grid with its
mean kept: δ only rises.  By exchangeability H_ε = E D_1 1{D_1 + R > 0}, with R the sum of the other D_i.  Where
D_1 > 0 an upper bound of P(R > -D_1) is needed, and where D_1 < 0 a lower bound.  For T > 1 both have a margin for
the rounding of Fourier transforms (tests/accounting/test_symmetric.py).  H is convex in γ = e^ε, so that the lower
hull of bounds at some γ is a bound at every γ between them.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.special import ndtr, ndtri

from fedpriv.accounting.curves import MIN_DELTA, Curve, Floats, as_floats, epsilon_at
from fedpriv.accounting.losses import PrivacyLossDistribution

_MAX_LOG = 600.0  # logarithm of a grid's end
_ROUNDING_MASS, _ROUNDING_MASS_PER_BIN = 2e-12, 1e-14  # error of a probability from Fourier transforms
_RELATIVE_MARGIN = 1e-9  # of a bound, for rounding
# Tails and lengths of grids decide how tight the bounds are, not whether they hold.
_MIN_TAIL, _TAIL_SHARE = 1e-16, 3e-4  # mass beyond a grid: at least, and relative to δ
_LARGE_TAIL_SHARE, _SMALL_MULTIPLIER = 0.2, 0.5  # a second, larger share for multipliers that spread points far
_NEAR_LENGTHS = 2.0  # for limits of the grid on either side of 0: units of the largest likely D_1 plus T (`_grid`)
_SETTLED_FACTOR = 0.9  # a grid is refitted to its own bound as long as the bound falls by this factor
_END_FACTOR = 0.8  # ratio of two ends of the curve, in the search for the last resolved ε
_MAX_EPSILON = 60.0  # larger ε count as this one
_FEW_EPSILONS = 2  # for more values of ε than this, the curve is interpolated
_KNOT_EXPONENT = 1.5  # above 1, so that knots are closer to each other for small ε
MIN_MULTIPLIER = 0.1
"""Smallest noise multiplier for which `SymmetricPairEpoch` is computed."""


@dataclass(frozen=True)
class SymmetricPairEpoch:
    """One epoch of the pair, on grids of `size` points.  Every size of 2 or more gives an upper bound."""

    multiplier: float
    """Noise multiplier z, at least `MIN_MULTIPLIER`."""
    bins: int
    """Number T of rounds."""
    size: int
    """Number of points of the grid of D_i and of R."""

    def delta(self, epsilon: float, tail: float) -> float:
        """Return an upper bound of H_ε(P‖Q) for ε ≥ 0, by E D_1 1{D_1 + R > 0} on a grid of D_1 and of R.

        Args:
            epsilon: ε ≥ 0.
            tail: Mass that a grid may leave out, which decides how tight the bound is.
        """
        gamma = math.exp(min(epsilon, _MAX_EPSILON))  # δ falls: a smaller ε is safe
        zero_index, spacing = self._grid(gamma, tail)
        points = as_floats(spacing * (np.arange(self.size + 1) - zero_index))
        masses, last_mean = self._ratio_distribution(gamma, points)
        grid_points = points[:-1]
        upper_tails, lower_tails = self._tail_probabilities(masses, zero_index)
        weighted = grid_points * masses
        # D_1 above the grid counts in full, by the mean that is missing on the grid.
        bound = float(weighted @ np.where(grid_points > 0.0, upper_tails, lower_tails)) + last_mean
        return min(1.0, bound * (1.0 + _RELATIVE_MARGIN) + self._rounding_error)

    def curve(self, knots: int, loose_curve: Curve) -> Curve:
        """Return the curve of an upper bound of H_ε(P‖Q) for ε ≥ 0.

        For one or two values of ε the bound is computed at each of them, on grids of twice the size.  For more
        values it is that of a loss distribution which is fitted once.

        Args:
            knots: Number of intervals between the values of ε to which the loss distribution is fitted.
            loose_curve: Another upper bound, which takes less time.
        """
        finer = replace(self, size=2 * self.size)

        @cache
        def knot_distribution() -> PrivacyLossDistribution:
            return self.loss_distribution(knots, epsilon_at(loose_curve, MIN_DELTA))

        @cache
        def settled_bound(epsilon: float, loose_bound: float) -> float:
            previous_bound, bound = math.inf, loose_bound
            # A smaller bound leaves less mass out of the next grid, until the bounds settle.
            while bound < _SETTLED_FACTOR * previous_bound:
                previous_bound = bound
                for share in self._tail_shares:
                    bound = min(bound, finer.delta(epsilon, _grid_tail(bound, share)))
            return bound

        def curve(epsilons: Floats) -> Floats:
            if np.size(epsilons) > _FEW_EPSILONS:
                return knot_distribution().deltas(epsilons)
            pairs = zip(np.ravel(epsilons).tolist(), np.ravel(loose_curve(epsilons)).tolist(), strict=True)
            return as_floats([settled_bound(*pair) for pair in pairs]).reshape(np.shape(epsilons))

        return curve

    def loss_distribution(self, knots: int, max_epsilon: float) -> PrivacyLossDistribution:
        """Return the loss distribution of an epoch, with atoms at some ε ≥ 0 and their negatives.

        Guarantee: it gives an upper bound of H_ε(P‖Q) for every ε of either sign, and in compositions.

        Args:
            knots: Number of intervals between the ε ≥ 0 at which bounds are computed.  The corners of their lower
                hull are atoms.
            max_epsilon: ε at which δ is next to 0.
        """
        epsilons = self._max_resolved_epsilon(max_epsilon) * np.linspace(0.0, 1.0, knots + 1) ** _KNOT_EXPONENT
        bounds = [1.0]
        for epsilon in epsilons:
            tails = [_grid_tail(bounds[-1], share) for share in self._tail_shares]
            bounds.append(min(bounds[-1], *(self.delta(float(epsilon), tail) for tail in tails)))
        return symmetric_loss_distribution(*lower_hull(epsilons, as_floats(bounds[1:])))

    @property
    def _tail_shares(self) -> tuple[float, ...]:
        """Masses that grids leave out, relative to δ.

        Small noise has long tails, for which a grid that leaves out more mass may give the smaller bound.
        """
        return (_TAIL_SHARE, _LARGE_TAIL_SHARE) if self.multiplier < _SMALL_MULTIPLIER else (_TAIL_SHARE,)

    @property
    def _rounding_error(self) -> float:
        return _ROUNDING_MASS + _ROUNDING_MASS_PER_BIN * self.bins

    def _max_resolved_epsilon(self, max_epsilon: float) -> float:
        """Return about the smallest ε from 1e-9 on at which rounding hides δ, at most `max_epsilon` and 60."""
        end = min(max(max_epsilon, 1e-9), _MAX_EPSILON)
        while end > 1e-9 and self.delta(_END_FACTOR * end, _MIN_TAIL) <= 4.0 * self._rounding_error:
            end *= _END_FACTOR
        return end

    def _grid(self, gamma: float, tail: float) -> tuple[int, float]:
        """Return the number of points below 0, and the distance of neighbouring points.

        Every grid gives an upper bound, so that the factors here decide only how tight it is.  For large e^ε and
        T > 1, R is far below 0, and only the range of D_1 has to be resolved.

        Args:
            gamma: γ = e^ε.
            tail: Mass of D_1 under P beyond the grid, approximately.
        """
        z, bins = self.multiplier, self.bins
        # D_i is below Y_i, and Y_i above this end with probability `tail` if the unit takes part in round i.
        positive_end = math.exp(min(_MAX_LOG, (0.5 / z - float(ndtri(tail))) / z))
        near = _NEAR_LENGTHS * (positive_end + bins)
        variance, negative_covariance = math.expm1(z**-2), -math.expm1(-(z**-2))
        # Ten standard deviations of D_1 + … + D_T, whose mean is (1 - γ) T.
        spread = 10.0 * math.sqrt(bins * ((1.0 + gamma**2) * variance + 2.0 * gamma * negative_covariance))
        low = min(4.0 * gamma * bins + 2.0 * gamma, (gamma - 1.0) * bins + spread + 2.0 * gamma, 2.0 * near)
        high = positive_end + min(2.0 * gamma * bins, spread, near)
        spacing = (low + high) / (self.size - 1)
        return math.ceil(low / spacing), spacing

    def _ratio_distribution(self, gamma: float, points: Floats) -> tuple[Floats, float]:
        """Return the masses of D_1 on all points but the last, and the mean of the mass at the last point.

        D_1 = e^(-1/(2z²)) (e^(Z/z) - γ e^(-Z/z)), with Z standard normal, rises with Z.  D_1 between two points
        is split between them, with its mean kept.  So with equal spacing h and p(x) = E (x - D_1)+, the mass at
        the lowest point x is (p(x + h) - p(x)) / h, and at another point (p(x - h) - 2 p(x) + p(x + h)) / h.  The
        last point also has the mass above it.

        Guarantee: mass below the grid is moved up to its lowest point.  All other mass keeps its mean, with the
        mean that is returned.

        Args:
            gamma: γ = e^ε.
            points: Points of the grid, (size + 1,), ascending, with equal spacing.
        """
        z = self.multiplier
        scaled_points = points * math.exp(0.5 / z**2)
        root_sums = np.hypot(scaled_points, 2.0 * math.sqrt(gamma)) + np.abs(scaled_points)
        # Thresholds are the Z at which D equals each point x.  With s = x e^(1/(2z²)), u = e^(Z/z) is the root of
        # u - γ/u = s, which is (s + √(s² + 4γ))/2.  Calls are E (D - x)+, and puts E (x - D)+.
        thresholds = z * np.log(np.where(scaled_points >= 0.0, 0.5 * root_sums, 2.0 * gamma / root_sums))
        calls = ndtr(1.0 / z - thresholds) - gamma * ndtr(-1.0 / z - thresholds) - points * ndtr(-thresholds)
        puts = points * ndtr(thresholds) - ndtr(thresholds - 1.0 / z) + gamma * ndtr(thresholds + 1.0 / z)
        spacing = points[1] - points[0]
        masses = np.empty(len(points) - 1)
        # E D = E (D - x)+ - E (x - D)+ + x at every x, so that calls and puts give the same masses.  Puts are used
        # where D is seldom below x, and calls elsewhere, since small numbers lose less by rounding.
        masses[0] = puts[1] - puts[0] if thresholds[0] <= 0.0 else spacing + calls[1] - calls[0]
        masses[1:] = np.where(
            thresholds[1:-1] <= 0.0,
            puts[:-2] - 2.0 * puts[1:-1] + puts[2:],
            calls[:-2] - 2.0 * calls[1:-1] + calls[2:],
        )
        # Above the last point x_n, (D - x_n-1)+ - (D - x_n)+ is h.  Its mean over h is the mass at x_n and above.
        last_mean = points[-1] * (calls[-2] - calls[-1]) / spacing + calls[-1]
        return as_floats(np.maximum(masses / spacing, 0.0)), max(0.0, float(last_mean))

    def _tail_probabilities(self, masses: Floats, zero_index: int) -> tuple[Floats, Floats]:
        """Return an upper and a lower bound of P(R > -x) for every point x of the grid, each (size,).

        R is the sum of T - 1 independent numbers with the masses of D_1.  The upper bound counts R above the grid
        as infinite, and below it as at its lowest point.  The lower bound drops both.

        Args:
            masses: Masses of each D_i on the grid, (size,).
            zero_index: Number of points of the grid below 0.
        """
        if self.bins == 1:  # R is an empty sum
            above = np.where(np.arange(self.size) > zero_index, 1.0, 0.0)
            return above, above
        sum_masses = _self_convolve(np.stack([masses, masses]), self.bins - 1, zero_index)
        tail_sums = np.append(np.cumsum(sum_masses[:, ::-1], axis=1)[:, ::-1], np.zeros((2, 1)), axis=1)
        # The point -x has index 2 zero_index - index, and R has to be above it.
        indices = np.clip(2 * zero_index + 1 - np.arange(self.size), 0, self.size)
        missing_mass = max(0.0, 1.0 - float(tail_sums[0, 0]))
        upper_bounds = np.minimum(1.0, tail_sums[0, indices] + missing_mass + self._rounding_error)
        return as_floats(upper_bounds), as_floats(np.maximum(0.0, tail_sums[1, indices] - self._rounding_error))


def _grid_tail(delta: float, share: float) -> float:
    return max(_MIN_TAIL, share * delta)


def _self_convolve(masses: Floats, times: int, zero_index: int) -> Floats:
    """Return the masses of sums of `times` ≥ 1 independent numbers, (2, size), by repeated squaring.

    In the first row, mass of sums below the grid stays at its lowest point.  In the second row it is dropped.
    Mass above the grid is missing in both rows.

    Args:
        masses: Masses of one number, for each row, (2, size).
        times: Number of numbers that are added.
        zero_index: Index of the point 0 of the grid.
    """
    from scipy import fft  # slow to import

    size = masses.shape[1]
    length = fft.next_fast_len(2 * size, real=True)

    def sums(first: Floats, second: Floats) -> Floats:
        """Convolve two distributions on the grid by Fourier transform, (2, size) each."""
        first_transform = fft.rfft(first, length)
        second_transform = first_transform if second is first else fft.rfft(second, length)
        full_sums = fft.irfft(first_transform * second_transform, length)
        grid_sums = as_floats(full_sums[:, zero_index : zero_index + size])
        # Only the first row keeps the mass below the grid.
        grid_sums[0, 0] += float(np.sum(full_sums[0, :zero_index]))
        return grid_sums

    result: Floats | None = None
    while True:
        if times & 1:
            result = masses if result is None else sums(result, masses)
        times >>= 1
        if not times:
            assert result is not None
            return result
        masses = sums(masses, masses)


def lower_hull(epsilons: Floats, bounds: Floats) -> tuple[Floats, Floats]:
    """Return the points (ε, bound) of the lower convex hull over γ = e^ε, for a symmetric pair.

    The hockey stick is convex in γ, so that it is below the hull between these points, too.  At 1/γ it is 1 - 1/γ
    plus the 1/γ-th part of that at γ.  So the chord from 1/γ to γ bounds it at ε = 0.

    Args:
        epsilons: ε, ascending from 0, (n,).
        bounds: Upper bounds of the hockey stick at `epsilons`, (n,).

    Returns:
        ε and bounds of the hull's corners, (m,) each with m ≤ n.
    """
    gammas = np.exp(epsilons)
    bounds = np.append(np.min((gammas - 1.0 + 2.0 * bounds) / (gammas + 1.0)), bounds[1:])
    hull: list[int] = []
    for index in range(len(gammas)):
        while len(hull) > 1:
            first, last = hull[-2], hull[-1]
            to_last = (bounds[last] - bounds[first]) * (gammas[index] - gammas[first])
            if to_last < (bounds[index] - bounds[first]) * (gammas[last] - gammas[first]):
                break
            hull.pop()
        hull.append(index)
    return epsilons[hull], bounds[hull]


def symmetric_loss_distribution(epsilons: Floats, bounds: Floats) -> PrivacyLossDistribution:
    """Return the loss distribution of a symmetric pair whose hockey stick has the values `bounds`.

    With γ_i = e^(ε_i) and s_i the negative slope of `bounds` over γ from point i - 1 to point i (0 beyond the last
    one), the mass at ε_i > 0 is γ_i (s_i - s_(i+1)).  For a pair that a reflection exchanges, P(loss = -l) = e^-l
    P(loss = l), which gives the masses below 0.  The mass at 0 is 1 - `bounds`[0] - 2 s_1, and the last bound is
    the mass at infinity.  Negative masses are raised to 0.

    Guarantee: no δ of one release is below `bounds`, nor below their chords over γ.  No δ of a composition is
    below that of symmetric pairs whose hockey sticks are nowhere above these.

    Args:
        epsilons: ε ≥ 0, ascending from 0, (n,).
        bounds: Hockey stick at `epsilons`, convex in e^ε and falling, (n,).
    """
    gammas = np.exp(epsilons)
    slopes = -np.diff(bounds) / np.diff(gammas)
    first_slope = slopes[0] if len(slopes) else 0.0
    masses_above = np.maximum(gammas[1:] * (slopes - np.append(slopes[1:], 0.0)), 0.0)
    mass_at_zero = max(0.0, 1.0 - float(bounds[0]) - 2.0 * first_slope)
    masses = np.concatenate([(masses_above * np.exp(-epsilons[1:]))[::-1], [mass_at_zero], masses_above])
    return PrivacyLossDistribution(np.concatenate([-epsilons[:0:-1], epsilons]), masses, float(bounds[-1]))
