"""Axes: from numbers to places, and the numbers worth a tick."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 5.0, 10.0)
_WIDE_RANGE = 10.0


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    def place(self, value: float) -> float:
        """Where a value is drawn; values beyond the axis at its ends."""
        share = (self._number(value) - self._number(self.low)) / (self._number(self.high) - self._number(self.low))
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Round numbers on the axis, about `most` at most."""
        return _logarithmic(self.low, self.high, most) if self.logarithmic else _linear(self.low, self.high, most)

    def _number(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.logarithmic else value


def scale_of(values: Sequence[float], start: float, end: float, *, logarithmic: bool) -> Scale:
    """The axis that shows all values, with a little room; a logarithmic one shows those above 0."""
    finite = [value for value in values if math.isfinite(value) and (value > 0.0 or not logarithmic)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if logarithmic and low > 0.0:
        room = max((high / low) ** 0.05, 1.05)
        return Scale(low / room, high * room, start, end, logarithmic=True)
    room = 0.05 * (high - low) or max(abs(high), 1.0) * 0.1
    return Scale(low - room, high + room, start, end, logarithmic=False)


def wide(values: Sequence[float]) -> bool:
    """Whether values ask for a logarithmic axis: one diverging run must not flatten all others."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and max(finite) > _WIDE_RANGE * min(finite) > 0.0


def _linear(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in _STEPS if power * each >= rough)
    first = math.ceil(low / step)
    return [step * each for each in range(first, math.floor(high / step) + 1)]


def _logarithmic(low: float, high: float, most: int) -> list[float]:
    for steps in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [each * 10.0**power for power in powers for each in steps if low <= each * 10.0**power <= high]
        if len(found) <= most:
            return found if len(found) > 1 else [low, high]
    stride = math.ceil(len(found) / most)
    return found[::stride]


def tick_text(value: float) -> str:
    """A tick's label in plain characters."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
