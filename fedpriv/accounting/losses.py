"""Privacy loss distributions: of one release, of a composition, and the δ that they give.

For distributions P and Q of the releases, the privacy loss is ln dP/dQ, drawn from P.  Its distribution gives the
hockey stick, the smallest δ at ε for this order of P and Q,

    H_ε(P‖Q) = E (1 - e^(ε - loss))+

which rises with the loss.  So a distribution with larger losses, or with mass moved to a loss of infinity, gives
an upper bound.  The losses of a composition, adaptive or not, are sums (Sommer, Meiser & Mohammadi 2019; Zhu, Dong
& Wang 2022).

Losses of equal releases are added by Fourier transforms in float64, whose rounding is covered by margins that are
added to δ and to the mass of infinite loss (tests/accounting/test_rounding.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from fedpriv.accounting.curves import MAX_EPSILON, Floats
from fedpriv.accounting.gaussian import smallest_safe_near
from fedpriv.core.errors import InputError

DELTA_MARGIN, _RELATIVE_MARGIN = 1e-12, 1e-9
"""Absolute and relative margins that are added to every δ."""
_END_MASS = 1e-16  # mass that a grid leaves out at either end
_MAX_GRID_SIZE = 2**22
_CUT_MASS = 1e-15  # mass that a composition may cut off, at both ends together
_ROUNDING_MASS = 1e-15  # mass that the rounding of a composition may hide, for each release


@dataclass(frozen=True, eq=False)
class PrivacyLossDistribution:
    """Distribution of the privacy loss in one direction.

    An upper bound may have more mass than 1.

    Attributes:
        losses: Finite losses, ascending, (n,).
        masses: Their probabilities under P, (n,).
        infinity_mass: Probability of an infinite loss under P.
    """

    losses: Floats
    masses: Floats
    infinity_mass: float

    def deltas(self, epsilons: ArrayLike) -> Floats:
        """Return an upper bound of H_ε(P‖Q) for every ε, any real numbers in any shape.

        Guarantee: the result is at least the smaller of 1 and the δ of the atoms as they are stored, in exact
        arithmetic.  A sum of n masses in blocks rounds by at most (2√n + 3) 2^-53 of itself, and the second sum is
        below the first.  `DELTA_MARGIN` covers both for 5 million masses, and the sum is enlarged for more.

        Example:
            >>> coin = PrivacyLossDistribution(np.array([0.0]), np.array([0.9]), infinity_mass=0.1)
            >>> coin.deltas([0.0, 1.0]).round(6).tolist()
            [0.1, 0.1]
        """
        # δ falls with ε, so that a smaller ε is safe.
        clipped_epsilons = np.minimum(np.asarray(epsilons, np.float64), MAX_EPSILON)
        indices = np.searchsorted(self.losses, clipped_epsilons, side="right")
        p_tails, q_tails = self._tails
        bounds = (
            self.infinity_mass
            + p_tails[indices]
            * (1.0 + max(0.0, (4.0 * math.sqrt(len(self.losses)) + 20.0) * 2.0**-53 - DELTA_MARGIN))
            - np.exp(clipped_epsilons) * q_tails[indices]
        )
        return np.clip(bounds * (1.0 + _RELATIVE_MARGIN) + DELTA_MARGIN, 0.0, 1.0)

    @cached_property
    def _tails(self) -> tuple[Floats, Floats]:
        """Sums of p and of p e^-loss over the losses from index i on, each (n + 1,), with 0 at the end.

        Losses below -700 have the weight e^700, so that their δ is not below its true value.
        """
        return _tail_sums(self.masses), _tail_sums(self.masses * np.exp(-np.maximum(self.losses, -MAX_EPSILON)))

    @property
    def loss_std(self) -> float:
        """Standard deviation of the finite losses, which a grid has to resolve, or 0 if they have no mass."""
        total = float(np.sum(self.masses))
        if total <= 0.0:
            return 0.0
        mean = float(self.losses @ self.masses) / total
        return math.sqrt(float((self.losses - mean) ** 2 @ self.masses) / total)

    @property
    def loss_range(self) -> float:
        """Distance from the smallest to the largest loss, without the last 1e-16 of mass at either end.

        The distance is 0 if no loss remains.
        """
        first, last = self._grid_bounds
        return float(self.losses[last - 1] - self.losses[first]) if first < last else 0.0

    @cached_property
    def _grid_bounds(self) -> tuple[int, int]:
        """Range of indices of the losses that a grid keeps, as (first, last + 1)."""
        end = len(self.masses) - int(np.searchsorted(np.cumsum(self.masses[::-1]), _END_MASS))
        return int(np.searchsorted(np.cumsum(self.masses), _END_MASS)), end

    def to_grid(self, step: float) -> "GridLossDistribution":
        """Move the distribution to multiples of `step`, so that no δ falls.

        The mass of a loss l is split between the multiples next to it, so that its mass under P and that under Q,
        e^-l times as large, are kept ("connect the dots", Doroshenko et al. 2022).  Before that, a mass of less
        than 1e-16 is moved at either end: at the lower end up to the smallest loss that remains, and at the upper
        end to infinity.

        Guarantee: no δ falls, for one release or in a composition.

        Args:
            step: Distance of neighbouring losses of the result, above 0.

        Raises:
            InputError: The losses that remain span more than 2^22 steps.
        """
        first, last = self._grid_bounds
        if first >= last:  # hardly any mass is finite, so that all of it counts as infinite
            return GridLossDistribution(step, 0, np.zeros(1), 1.0)
        masses_in_range = self.masses[first:last].copy()
        masses_in_range[0] += float(np.sum(self.masses[:first]))
        losses = self.losses[first:last]
        if losses[-1] - losses[0] > _MAX_GRID_SIZE * step:
            raise InputError(
                f"losses from {losses[0]:.3g} to {losses[-1]:.3g} do not fit a lattice of step {step:.3g}: the "
                "noise is too small or too large for this accountant"
            )
        positions = np.floor(losses / step)
        # Mass of each loss that goes to the multiple above it.  The rest goes to the one below.
        upper_masses = masses_in_range * (
            np.expm1(-np.clip(losses - positions * step, 0.0, step)) / math.expm1(-step)
        )
        first_index = int(positions[0])
        indices = positions.astype(np.int64) - first_index
        size = int(indices[-1]) + 2
        masses = np.bincount(indices, masses_in_range - upper_masses, size) + np.bincount(
            indices + 1, upper_masses, size
        )
        return GridLossDistribution(
            step, first_index, np.maximum(masses, 0.0), self.infinity_mass + float(np.sum(self.masses[last:]))
        )


@dataclass(frozen=True, eq=False)
class GridLossDistribution:
    """Distribution of the privacy loss on a grid of multiples of `step`, from `first_index` · `step` on."""

    step: float
    """Distance of neighbouring losses."""
    first_index: int
    """Smallest loss, in steps."""
    masses: Floats
    """Probability of each loss under P, (n,)."""
    infinity_mass: float
    """Probability of an infinite loss under P."""

    def self_compose(self, times: int) -> PrivacyLossDistribution:
        """Return the loss distribution of `times` releases together, which have this distribution each.

        The releases may be adaptive.

        Guarantee: the result has the sums of k = `times` independent losses.  Mass that is cut off, and mass that
        rounding may hide, counts as infinite.

        Raises:
            InputError: `times` is below 1.
        """
        if times < 1:
            raise InputError(f"times = {times}: a release happens 1 time or more")
        if times == 1:
            return self.distribution
        cut_count, composed_masses = _self_convolve(self.masses, times)
        finite_mass = float(np.sum(self.masses))
        infinity_mass = 1.0 if self.infinity_mass >= 1.0 else -math.expm1(times * math.log1p(-self.infinity_mass))
        # Exponents are cut at 100, so that nothing overflows.
        composed_finite_mass = math.exp(min(100.0, times * math.log(finite_mass))) if finite_mass > 0.0 else 0.0
        # The larger of two masses is safe.  (finite + infinite)^k - finite^k is no smaller than the first one,
        # 1 - (1 - infinite)^k, if masses add up to 1 or more.
        if finite_mass > 0.0:
            infinity_mass = max(
                infinity_mass,
                composed_finite_mass
                * math.expm1(min(100.0, times * math.log1p(self.infinity_mass / finite_mass))),
            )
        infinity_mass = min(
            1.0, infinity_mass + _CUT_MASS + times * _ROUNDING_MASS * max(1.0, composed_finite_mass)
        )
        return GridLossDistribution(
            self.step, times * self.first_index + cut_count, np.maximum(composed_masses, 0.0), infinity_mass
        ).distribution

    def compose(self, other: "GridLossDistribution") -> "GridLossDistribution":
        """Return the loss distribution of both releases together, on the same grid.

        The convolution is computed without Fourier transforms, so that no masses cancel.

        Guarantee: the result has the sums of two independent losses, one of each distribution.

        Raises:
            ValueError: The grids have different steps.
        """
        if other.step != self.step:
            raise ValueError(f"the grids have different steps, {self.step} and {other.step}")
        # A sum is infinite if the first loss is, or if the second alone is.  Masses of an upper bound may add up
        # to more than 1, so that the larger of two numbers is taken.
        finite_mass = max(1.0 - self.infinity_mass, float(np.sum(self.masses)))
        infinity_mass = self.infinity_mass * max(1.0, other.infinity_mass + float(np.sum(other.masses)))
        infinity_mass += finite_mass * other.infinity_mass
        masses = np.convolve(self.masses, other.masses)
        return GridLossDistribution(
            self.step, self.first_index + other.first_index, masses, min(1.0, infinity_mass)
        )

    @property
    def distribution(self) -> PrivacyLossDistribution:
        """Same distribution, with its losses written out."""
        indices = self.first_index + np.arange(len(self.masses), dtype=np.float64)
        return PrivacyLossDistribution(indices * self.step, self.masses, self.infinity_mass)


def _tail_sums(values: Floats) -> Floats:
    """Return the sum of the values from each on, and 0 at the end, (n + 1,), summed in √n blocks."""
    size = math.isqrt(len(values)) + 1
    blocks = np.cumsum(np.pad(values[::-1], (0, -len(values) % size)).reshape(-1, size), axis=1)
    blocks[1:] += np.cumsum(blocks[:-1, -1])[:, None]
    return np.append(blocks.reshape(-1)[: len(values)][::-1], 0.0)


MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 0.1, 1e6
"""Smallest noise multiplier of a calibration, and about the largest at which it searches."""

_DELTA_TOLERANCE = 2e-3  # a calibration ends at this relative distance from δ
# It ends at this relative width of the noise's interval, too.  The second is that of the coarse search.
_NOISE_TOLERANCE, _SEARCH_TOLERANCE = 1e-4, 1e-3
# Largest step of a secant, in ln z.  One step in four halves the interval, as secants may stall.
_MAX_LOG_STEP, _SECANTS_PER_HALVING = 0.2, 4
_MIN_SLOPE, _MAX_SLOPE = -1e3, -1.0  # range to which d ln δ / d ln z is clipped


def min_noise_multiplier(coarse: Callable[[float], float], fine: Callable[[float], float], delta: float) -> float:
    """Return about the smallest noise multiplier z of 0.1 or more with `fine`(z) ≤ `delta`.

    The search has two stages.  The first bisects the coarse bound.  In the second, secants in (ln z, ln δ), and
    halvings of the interval, lead to the point where the fine bound meets δ.

    Guarantee: `fine` was computed at the returned z and is at most `delta`, whatever the search did.

    Args:
        coarse: Function z -> upper bound of δ at the target's ε, falling with z, quick to compute.
        fine: Function z -> a better upper bound, falling with z.
        delta: Target δ.

    Raises:
        InputError: `coarse` is above `delta` at 1.5^34, about 970,740, the largest multiplier of the first stage,
            or `fine` is at one above `MAX_NOISE_MULTIPLIER`.
    """

    def is_sufficient(multiplier: float) -> bool:
        _check_multiplier_range(multiplier, delta)
        return multiplier >= MIN_NOISE_MULTIPLIER and coarse(multiplier) <= delta

    # First stage, and the slope d ln δ / d ln z there.
    multiplier = smallest_safe_near(is_sufficient, 1.0, 1.5, _SEARCH_TOLERANCE)
    slope = _slope(
        multiplier * (1.0 - 10.0 * _SEARCH_TOLERANCE),
        coarse(multiplier * (1.0 - 10.0 * _SEARCH_TOLERANCE)),
        multiplier,
        coarse(multiplier),
    )
    # Second stage: from the largest insufficient multiplier, or 0.1, to the smallest sufficient one, or ∞.
    insufficient, sufficient = MIN_NOISE_MULTIPLIER, math.inf
    previous: tuple[float, float] | None = None
    steps = 0
    while sufficient > insufficient * (1.0 + _NOISE_TOLERANCE):
        steps += 1
        bound = fine(multiplier)
        if bound <= delta:
            sufficient = min(sufficient, multiplier)
            if bound >= delta * (1.0 - _DELTA_TOLERANCE) or multiplier <= MIN_NOISE_MULTIPLIER:
                return multiplier
        else:
            _check_multiplier_range(multiplier, delta)
            insufficient = max(insufficient, multiplier)
        if previous is not None and previous[0] != multiplier:
            lower_point, upper_point = sorted([previous, (multiplier, bound)])
            slope = _slope(*lower_point, *upper_point)
        previous = (multiplier, bound)
        log_step = math.log(delta * (1.0 - 0.5 * _DELTA_TOLERANCE) / max(bound, 1e-300)) / slope
        multiplier *= math.exp(min(_MAX_LOG_STEP, max(-_MAX_LOG_STEP, log_step)))
        is_halving_step = steps % _SECANTS_PER_HALVING == 0 and math.isfinite(sufficient)
        if is_halving_step or not insufficient < multiplier < sufficient:
            multiplier = max(
                MIN_NOISE_MULTIPLIER,
                math.sqrt(insufficient * (sufficient if math.isfinite(sufficient) else 1.5 * insufficient)),
            )
    return sufficient


def _slope(lower: float, lower_delta: float, upper: float, upper_delta: float) -> float:
    """Return d ln δ / d ln z between two points (z, δ), clipped to -1000 … -1.

    The result is -1 if δ does not fall from one point to the other, or if it falls to 0.
    """
    if not 0.0 < upper_delta < lower_delta:
        return _MAX_SLOPE
    return min(_MAX_SLOPE, max(_MIN_SLOPE, math.log(upper_delta / lower_delta) / math.log(upper / lower)))


def _check_multiplier_range(multiplier: float, delta: float) -> None:
    if multiplier > MAX_NOISE_MULTIPLIER:
        raise InputError(f"delta = {delta}: no noise multiplier up to {MAX_NOISE_MULTIPLIER:g} reaches the target")


_CHERNOFF_ORDERS = np.concatenate([np.arange(-20, 0), np.arange(1, 21)])
"""Orders, times the number of masses, at which the tails of a sum are bounded."""


def _self_convolve(masses: Floats, times: int) -> tuple[int, Floats]:
    """Convolve masses on a grid with themselves, and cut off tails of `_CUT_MASS` at most together.

    The tails are cut where Chernoff bounds at `_CHERNOFF_ORDERS` allow it.  The Fourier transform wraps around, so
    that a part of the cut mass may be added to the masses that are left.

    Source: dp-accounting 0.6.0, `dp_accounting.pld.common.self_convolve`.

    Args:
        masses: Masses on consecutive points.
        times: Number of independent summands.

    Returns:
        Number of points that are cut off at the low end, and the masses that are left, with errors of rounding.
    """
    from scipy import fft  # slow to import

    low, high = 0, (len(masses) - 1) * times
    for order in _CHERNOFF_ORDERS / len(masses):
        # Exponents are from -20 to 20, and nothing overflows.
        moment = float(masses @ np.exp(np.arange(len(masses)) * order))
        log_moment = math.log(moment) if moment > 0.0 else -math.inf
        bound = (times * log_moment + math.log(2.0 / _CUT_MASS)) / order
        if math.isfinite(bound) and order > 0.0:
            high = min(high, math.ceil(bound))
        elif math.isfinite(bound):
            low = max(low, math.floor(bound))
    # The transform gives points modulo `size`, and the roll brings point `low` to the front.
    size = fft.next_fast_len(max(high - low + 1, len(masses)))
    return low, np.roll(np.real(fft.ifft(fft.fft(masses, size) ** times)), -low)[: high - low + 1]
