"""Laws of the privacy loss: of one release, of several, and the δ that they give.

For distributions P and Q of what is released, the privacy loss is ln dP/dQ, drawn from P.  With its law,

    H_ε(P‖Q) = E (1 - e^(ε - loss))+

which rises with the loss: a law whose losses are larger, or which has moved mass to a loss of infinity, gives an
upper bound, and so do sums of such laws for compositions, adaptive or not (Sommer, Meiser & Mohammadi 2019; Zhu,
Dong & Wang 2022).

Rounding: the sums here are Fourier transforms in float64.  Against extended precision no δ was seen to lose more
than 1e-13 in one epoch of up to 600 rounds, nor the masses of k releases together more than k · 1e-15
(tests/accounting/test_rounding.py).  So `deltas` adds 1e-12 and a relative 1e-9, and a composition k · 1e-15.

`smallest_noise` finds the least noise that meets an (ε, δ), where a good bound takes long and a coarse one is
quick.
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
"""What every δ is raised by, absolutely and of itself."""
_END_MASS = 1e-16  # of the mass that a lattice leaves out on either side
_MAX_GRID_SIZE = 2**22
_CUT_MASS = 1e-15  # of the mass that a composition may cut off at both ends together
_ROUNDING_MASS = 1e-15  # of the mass that the rounding of a composition may hide


@dataclass(frozen=True, eq=False)
class PrivacyLossDistribution:
    """A law of the privacy loss in one direction.

    `losses` ascend, shape (n,); `masses` are their probabilities under P; `infinite` is the mass at infinity.  A
    law from above may have more mass than 1.
    """

    losses: Floats
    masses: Floats
    infinity_mass: float

    def deltas(self, epsilons: ArrayLike) -> Floats:
        """An upper bound of H_ε(P‖Q) for every ε (any real number, any shape).

        Guarantee: never below the δ of the atoms as they stand, in exact arithmetic.
        """
        given = np.minimum(np.asarray(epsilons, np.float64), MAX_EPSILON)  # δ falls: a smaller ε is safe
        first = np.searchsorted(self.losses, given, side="right")
        above, below = self._tails
        exact = self.infinity_mass + above[first] - np.exp(given) * below[first]
        return np.clip(exact * (1.0 + _RELATIVE_MARGIN) + DELTA_MARGIN, 0.0, 1.0)

    @cached_property
    def _tails(self) -> tuple[Floats, Floats]:
        """Σ p and Σ p e^-loss over the losses from each on; 0 at the end."""
        weighted = self.masses * np.exp(-np.maximum(self.losses, -MAX_EPSILON))
        return _tail_sums(self.masses), _tail_sums(weighted)

    @property
    def loss_std(self) -> float:
        """The standard deviation of the finite losses: what a lattice has to resolve."""
        total = float(np.sum(self.masses))
        if total <= 0.0:
            return 0.0
        mean = float(self.losses @ self.masses) / total
        return math.sqrt(float((self.losses - mean) ** 2 @ self.masses) / total)

    @property
    def loss_range(self) -> float:
        """From the smallest to the largest loss, without 1e-16 of the mass at either end."""
        first, last = self._grid_bounds
        return float(self.losses[last - 1] - self.losses[first]) if first < last else 0.0

    @cached_property
    def _grid_bounds(self) -> tuple[int, int]:
        """The losses that a lattice keeps, first and one behind the last."""
        behind = len(self.masses) - int(np.searchsorted(np.cumsum(self.masses[::-1]), _END_MASS))
        return int(np.searchsorted(np.cumsum(self.masses), _END_MASS)), behind

    def to_grid(self, step: float) -> "GridLossDistribution":
        """The same law on the multiples of `step`, pessimistically.

        Every atom goes to its two neighbours so that its mass under P and under Q are kept ("connect the dots",
        Doroshenko et al. 2022).  Of both ends a mass of 1e-16 at most is moved: up to the first loss kept, and to
        infinity.  Guarantee: no δ falls, for one release or in a composition.
        """
        first, last = self._grid_bounds
        if first >= last:
            return GridLossDistribution(step, 0, np.zeros(1), 1.0)
        kept = self.masses[first:last].copy()
        kept[0] += float(np.sum(self.masses[:first]))
        losses = self.losses[first:last]
        if losses[-1] - losses[0] > _MAX_GRID_SIZE * step:
            raise InputError(
                f"losses from {losses[0]:.3g} to {losses[-1]:.3g} do not fit a lattice of step {step:.3g}: the "
                "noise is too small or too large for this accountant"
            )
        places = np.floor(losses / step)
        upper = kept * (np.expm1(-np.clip(losses - places * step, 0.0, step)) / math.expm1(-step))
        low = int(places[0])
        index = places.astype(np.int64) - low
        size = int(index[-1]) + 2
        masses = np.bincount(index, kept - upper, size) + np.bincount(index + 1, upper, size)
        return GridLossDistribution(
            step, low, np.maximum(masses, 0.0), self.infinity_mass + float(np.sum(self.masses[last:]))
        )


@dataclass(frozen=True, eq=False)
class GridLossDistribution:
    """A law of the privacy loss on (`low` + i) · `step`, i = 0 …, that can be composed."""

    step: float
    first_index: int
    masses: Floats
    infinity_mass: float

    def self_compose(self, times: int) -> PrivacyLossDistribution:
        """The law of `times` releases together, each with this law, adaptive or not.

        Guarantee: losses add up; what is cut off, and what rounding may hide, counts as infinite.
        """
        if times < 1:
            raise InputError(f"times = {times}: a release happens 1 time or more")
        if times == 1:
            return self.distribution
        from dp_accounting.pld import common  # slow to import: only who composes pays for it

        cut, sums = common.self_convolve(self.masses, times, _CUT_MASS)
        finite = float(np.sum(self.masses))
        infinite = 1.0 if self.infinity_mass >= 1.0 else -math.expm1(times * math.log1p(-self.infinity_mass))
        whole = math.exp(min(100.0, times * math.log(finite))) if finite > 0.0 else 0.0
        if finite > 0.0:  # (finite + infinite)^k - finite^k, which is more where the law has more mass than 1
            infinite = max(
                infinite, whole * math.expm1(min(100.0, times * math.log1p(self.infinity_mass / finite)))
            )
        infinite = min(1.0, infinite + _CUT_MASS + times * _ROUNDING_MASS * max(1.0, whole))
        return GridLossDistribution(
            self.step, times * self.first_index + cut, np.maximum(sums, 0.0), infinite
        ).distribution

    def compose(self, other: "GridLossDistribution") -> "GridLossDistribution":
        """The law of both releases together, on the same lattice; no transforms, so that nothing cancels.

        Guarantee: losses add up.
        """
        if other.step != self.step:
            raise ValueError(f"laws on lattices of steps {self.step} and {other.step}")
        finite = max(1.0 - self.infinity_mass, float(np.sum(self.masses)))
        infinite = self.infinity_mass * max(1.0, other.infinity_mass + float(np.sum(other.masses)))
        infinite += finite * other.infinity_mass
        sums = np.convolve(self.masses, other.masses)
        return GridLossDistribution(self.step, self.first_index + other.first_index, sums, min(1.0, infinite))

    @property
    def distribution(self) -> PrivacyLossDistribution:
        places = self.first_index + np.arange(len(self.masses), dtype=np.float64)
        return PrivacyLossDistribution(places * self.step, self.masses, self.infinity_mass)


def _tail_sums(values: Floats) -> Floats:
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 0.1, 1e6
"""Noise multipliers that are tried."""

_DELTA_TOLERANCE = 2e-3  # relative, in δ: there a calibration stops; about 2e-4 of the noise
_NOISE_TOLERANCE = 1e-4  # relative, in noise: or there
_SEARCH_TOLERANCE = 1e-3  # relative accuracy of the coarse search, in noise
_MAX_LOG_STEP = 0.2  # the longest step of ln z
_SECANTS_PER_HALVING = 4  # secants between two halvings
_MIN_SLOPE, _MAX_SLOPE = -1e3, -1.0  # d ln δ / d ln z that are believed


def min_noise_multiplier(coarse: Callable[[float], float], fine: Callable[[float], float], delta: float) -> float:
    """A noise multiplier z with `fine`(z) ≤ `delta`, close to the smallest there is.

    `coarse` and `fine` give upper bounds of δ at the target's ε for a noise multiplier; both fall with it.  The
    coarse one is searched; secants in (ln z, ln δ) then lead to the point where the fine one meets δ.

    Guarantee: `fine` was computed at the z returned and is at most `delta`, whatever the search did.  InputError
    where no multiplier up to a million reaches it.
    """

    def enough(multiplier: float) -> bool:
        _check_multiplier_range(multiplier, delta)
        return multiplier >= MIN_NOISE_MULTIPLIER and coarse(multiplier) <= delta

    here = smallest_safe_near(enough, 1.0, 1.5, _SEARCH_TOLERANCE)
    slope = _slope(
        here * (1.0 - 10.0 * _SEARCH_TOLERANCE),
        coarse(here * (1.0 - 10.0 * _SEARCH_TOLERANCE)),
        here,
        coarse(here),
    )
    too_little, enough_noise = MIN_NOISE_MULTIPLIER, math.inf
    before: tuple[float, float] | None = None
    steps = 0
    while enough_noise > too_little * (1.0 + _NOISE_TOLERANCE):
        steps += 1
        value = fine(here)
        if value <= delta:
            enough_noise = min(enough_noise, here)
            if value >= delta * (1.0 - _DELTA_TOLERANCE) or here <= MIN_NOISE_MULTIPLIER:
                return here
        else:
            _check_multiplier_range(here, delta)
            too_little = max(too_little, here)
        if before is not None and before[0] != here:
            left, right = sorted([before, (here, value)])
            slope = _slope(*left, *right)
        before = (here, value)
        aim = math.log(delta * (1.0 - 0.5 * _DELTA_TOLERANCE) / max(value, 1e-300)) / slope
        here *= math.exp(min(_MAX_LOG_STEP, max(-_MAX_LOG_STEP, aim)))
        stalled = steps % _SECANTS_PER_HALVING == 0 and math.isfinite(enough_noise)
        if stalled or not too_little < here < enough_noise:
            here = max(MIN_NOISE_MULTIPLIER, math.sqrt(too_little * min(enough_noise, 1.5 * too_little)))
    return enough_noise


def _slope(left: float, at_left: float, right: float, at_right: float) -> float:
    """d ln δ / d ln z between two points, as far as it can be believed."""
    if not 0.0 < at_right < at_left:
        return _MAX_SLOPE
    return min(_MAX_SLOPE, max(_MIN_SLOPE, math.log(at_right / at_left) / math.log(right / left)))


def _check_multiplier_range(multiplier: float, delta: float) -> None:
    if multiplier > MAX_NOISE_MULTIPLIER:
        raise InputError(f"delta = {delta}: no noise multiplier up to {MAX_NOISE_MULTIPLIER:g} reaches the target")
