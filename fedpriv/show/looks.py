"""How a chart looks: axes and their ticks; colour, dashes and markers of series, and panels where there are many.

Any two series of a panel differ in at least two of colour, dashes and marker, so that a grey print and a
colour-blind reader can tell them apart.  Hues are those of Okabe & Ito; what has an order takes shades of one hue.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedpriv.show.summary import axis_points, format_point
from fedpriv.study.results import Results

MAX_SERIES = 28
"""In one panel: looks would repeat from the 31st on."""
_MAX_LINES = 12  # from there on panels are better
_TRUST_KEY, _ALGORITHM_KEY = "algorithm.trust", "algorithm.name"
_ROUNDS_KEY = "federation.rounds"  # runs of unequal length are best not drawn over each other

# The darkest and the lightest shade of each hue: on white, and on the dark page's background.
_HUES = (
    (("#00395e", "#2f93d3"), ("#2f7fb8", "#8fd0f8")),
    (("#7a2c00", "#e5650a"), ("#c4551a", "#ffae78")),
    (("#004a37", "#00976e"), ("#168563", "#6fe3ba")),
    (("#5c1f45", "#c765a0"), ("#ad5c90", "#f2aed8")),
    (("#5a3a00", "#b17a00"), ("#9c6d0c", "#ffd166")),
    (("#1a1a1a", "#7d7d7d"), ("#7d858f", "#eeeeee")),
)
DASHES = ((), (7, 4), (2, 3), (9, 3, 2, 3), (9, 3, 2, 3, 2, 3))
"""Lengths of strokes and gaps."""
_LOOK_COUNTS = (len(_HUES), len(DASHES), 7)


@dataclass(frozen=True)
class Look:
    """A colour for light and for dark pages, and the numbers of dashes and marker."""

    light: str
    dark: str
    dash: int = 0
    marker: int = 0


def shade(hue: int, share: float = 0.5) -> Look:
    """A hue between its darkest (0) and its lightest shade (1)."""
    light, dark = (_mix_colours(*ends, share) for ends in _HUES[hue])
    return Look(light, dark)


def _mix_colours(low: str, high: str, share: float) -> str:
    pairs = zip(bytes.fromhex(low[1:]), bytes.fromhex(high[1:]), strict=True)
    return "#" + bytes(round(a + share * (b - a)) for a, b in pairs).hex()


def nth_look(place: int) -> Look:
    """The look of the n-th thing without an order: no two of the first 30 share more than one part."""
    hue, dash, marker = (place % count for count in _LOOK_COUNTS)
    return replace(shade(hue), dash=dash, marker=marker)


def level_look(level: int, levels: int) -> Look:
    """The look of one of at most six levels of a single kind: shades of blue."""
    return replace(shade(0, level / max(levels - 1, 1)), dash=level % len(DASHES), marker=level)


@dataclass(frozen=True)
class Layout:
    """How the series of a chart differ: kinds in hue and dashes, levels in shade and marker, others by panel."""

    kinds: tuple[str, ...]
    levels: tuple[str, ...]
    panels: tuple[str, ...]
    """At most two keys."""
    axes: Mapping[str, list[Any]]

    def choose_look(self, point: Mapping[str, Any]) -> Look:
        """The look of a sweep point."""
        (kind, kinds), (level, levels) = self._index_of(self.kinds, point), self._index_of(self.levels, point)
        if kinds > len(DASHES) or levels > len(_HUES):
            return nth_look(kind * levels + level)
        if levels == 1:
            return nth_look(kind)
        if kinds == 1:
            return level_look(level, levels)
        return replace(shade(kind, level / (levels - 1)), dash=kind, marker=level)

    def _index_of(self, keys: Iterable[str], point: Mapping[str, Any]) -> tuple[int, int]:
        """The number of the point's values among all that `keys` can have, and how many there are."""
        found = axis_points({key: self.axes[key] for key in keys})
        return found.index({key: point[key] for key in keys}), len(found)


def make_layout(axes: Mapping[str, list[Any]]) -> Layout:
    """The layout for the axes that a chart has to tell apart.

    Kinds are trust settings and algorithms; without them the axis whose values have no order, or the shortest one.
    Where that makes too many lines, first the lengths of runs and then the longest axes become panels.
    """
    swept = {key: values for key, values in axes.items() if len(values) > 1}
    kinds = [key for key in (_TRUST_KEY, _ALGORITHM_KEY) if key in swept]
    if len(kinds) == 2 and _count_lines(swept, kinds) > len(DASHES):
        kinds = [_ALGORITHM_KEY]
    if not kinds and swept:
        words = [
            key for key, values in swept.items() if not all(isinstance(value, int | float) for value in values)
        ]
        kinds = words[:1] or ([min(swept, key=lambda key: len(swept[key]))] if len(swept) > 1 else [])
    rest = [key for key in swept if key not in kinds]
    panels: list[str] = []
    while rest and len(panels) < 2 and _count_lines(swept, [*kinds, *rest]) > _MAX_LINES:
        longest = max(reversed(rest), key=lambda key: len(swept[key]))
        panels.append(_ROUNDS_KEY if _ROUNDS_KEY in rest else longest)
        rest.remove(panels[-1])
    return Layout(tuple(kinds), tuple(rest), tuple(panels), axes)


def _count_lines(swept: Mapping[str, list[Any]], keys: Sequence[str]) -> int:
    return math.prod(len(swept[key]) for key in keys)


def describe_keys(results: Results, point: Mapping[str, Any], keys: Iterable[str]) -> str:
    """What a point has for some keys, in words."""
    return format_point(results, {key: point[key] for key in point if key in tuple(keys)})


_TICK_STEPS = (1.0, 2.0, 5.0, 10.0)
_MIN_LOG_RATIO = 10.0


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    def position(self, value: float) -> float:
        """Where a value is drawn; values beyond the axis at its ends."""
        share = (self._transform(value) - self._transform(self.low)) / (
            self._transform(self.high) - self._transform(self.low)
        )
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Round numbers on the axis, about `most` at most."""
        return (
            _logarithmic_ticks(self.low, self.high, most)
            if self.logarithmic
            else _linear_ticks(self.low, self.high, most)
        )

    def _transform(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.logarithmic else value


def make_scale(values: Sequence[float], start: float, end: float, *, logarithmic: bool) -> Scale:
    """The axis that shows all values, with a little room; a logarithmic one shows those above 0."""
    finite = [value for value in values if math.isfinite(value) and (value > 0.0 or not logarithmic)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if logarithmic and low > 0.0:
        room = max((high / low) ** 0.05, 1.05)
        return Scale(low / room, high * room, start, end, logarithmic=True)
    room = 0.05 * (high - low) or max(abs(high), 1.0) * 0.1
    return Scale(low - room, high + room, start, end, logarithmic=False)


def is_wide(values: Sequence[float]) -> bool:
    """Whether values ask for a logarithmic axis: one diverging run must not flatten all others."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and max(finite) > _MIN_LOG_RATIO * min(finite) > 0.0


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in _TICK_STEPS if power * each >= rough)
    first = math.ceil(low / step)
    return [step * each for each in range(first, math.floor(high / step) + 1)]


def _logarithmic_ticks(low: float, high: float, most: int) -> list[float]:
    for steps in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [each * 10.0**power for power in powers for each in steps if low <= each * 10.0**power <= high]
        if len(found) <= most:
            return found if len(found) > 1 else [low, high]
    stride = math.ceil(len(found) / most)
    return found[::stride]


def format_tick(value: float) -> str:
    """A tick's label in plain characters."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
