"""The smallest noise that meets an (ε, δ), where a good bound takes long and a coarse one is quick."""

import math
from collections.abc import Callable

from fedpriv.accounting.bisection import smallest_safe_near
from fedpriv.errors import InputError

LEAST_NOISE, MOST_NOISE = 0.1, 1e6
"""Noise multipliers that are tried."""

_CLOSE = 2e-3  # relative, in δ: there a calibration stops; about 2e-4 of the noise
_NARROW = 1e-4  # relative, in noise: or there
_SEARCH = 1e-3  # relative accuracy of the coarse search, in noise
_STEP = 0.2  # the longest step of ln z
_PATIENCE = 4  # secants between two halvings
_STEEPEST, _FLATTEST = -1e3, -1.0  # d ln δ / d ln z that are believed


def smallest_noise(coarse: Callable[[float], float], fine: Callable[[float], float], delta: float) -> float:
    """A noise multiplier z with `fine`(z) ≤ `delta`, close to the smallest there is.

    `coarse` and `fine` give upper bounds of δ at the target's ε for a noise multiplier; both fall with it.  The
    coarse one is searched; secants in (ln z, ln δ) then lead to the point where the fine one meets δ.

    Guarantee: `fine` was computed at the z returned and is at most `delta`, whatever the search did.  InputError
    where no multiplier up to a million reaches it.
    """

    def enough(multiplier: float) -> bool:
        _check_in_reach(multiplier, delta)
        return multiplier >= LEAST_NOISE and coarse(multiplier) <= delta

    here = smallest_safe_near(enough, 1.0, 1.5, _SEARCH)
    slope = _slope(here * (1.0 - 10.0 * _SEARCH), coarse(here * (1.0 - 10.0 * _SEARCH)), here, coarse(here))
    too_little, enough_noise = LEAST_NOISE, math.inf
    before: tuple[float, float] | None = None
    steps = 0
    while enough_noise > too_little * (1.0 + _NARROW):
        steps += 1
        value = fine(here)
        if value <= delta:
            enough_noise = min(enough_noise, here)
            if value >= delta * (1.0 - _CLOSE) or here <= LEAST_NOISE:
                return here
        else:
            _check_in_reach(here, delta)
            too_little = max(too_little, here)
        if before is not None and before[0] != here:
            left, right = sorted([before, (here, value)])
            slope = _slope(*left, *right)
        before = (here, value)
        aim = math.log(delta * (1.0 - 0.5 * _CLOSE) / max(value, 1e-300)) / slope
        here *= math.exp(min(_STEP, max(-_STEP, aim)))
        stalled = steps % _PATIENCE == 0 and math.isfinite(enough_noise)
        if stalled or not too_little < here < enough_noise:
            here = max(LEAST_NOISE, math.sqrt(too_little * min(enough_noise, 1.5 * too_little)))
    return enough_noise


def _slope(left: float, at_left: float, right: float, at_right: float) -> float:
    """d ln δ / d ln z between two points, as far as it can be believed."""
    if not 0.0 < at_right < at_left:
        return _FLATTEST
    return min(_FLATTEST, max(_STEEPEST, math.log(at_right / at_left) / math.log(right / left)))


def _check_in_reach(multiplier: float, delta: float) -> None:
    if multiplier > MOST_NOISE:
        raise InputError(f"delta = {delta}: no noise multiplier up to {MOST_NOISE:g} reaches the target")
