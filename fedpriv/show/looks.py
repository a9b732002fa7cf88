"""Looks of a chart: axes and ticks, colours, dashes and markers of series, and panels for many series.

Lines differ in dashes or marker, too, and not in colour alone, so that they can be told apart on a grey print and
by a colour-blind reader.  Hues are close to those of Okabe & Ito.  An axis of a sweep is a swept key of the
scenario with its values, such as algorithm.name.  A sweep point has one value for each axis.

A chart shows some axes as kinds of lines, others as levels, and the rest as panels.  As far as looks suffice,
kinds differ in hue and dashes, and levels in shade and marker.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedpriv.show.summary import axis_points, format_point
from fedpriv.study.results import Results

MAX_SERIES = 28
"""Largest number of series in a panel of a metric's chart, and of rows in the chart of clipping."""
_MAX_LINES = 12  # lines of a panel, above which a chart is split into panels
_TRUST_KEY, _ALGORITHM_KEY = "algorithm.trust", "algorithm.name"
_ROUNDS_KEY = "federation.rounds"  # runs of unequal length get panels first

# Darkest and lightest shade of each hue: on the white page, then on the dark page.
_HUES = (
    (("#00395e", "#2f93d3"), ("#2f7fb8", "#8fd0f8")),
    (("#7a2c00", "#e5650a"), ("#c4551a", "#ffae78")),
    (("#004a37", "#00976e"), ("#168563", "#6fe3ba")),
    (("#5c1f45", "#c765a0"), ("#ad5c90", "#f2aed8")),
    (("#5a3a00", "#b17a00"), ("#9c6d0c", "#ffd166")),
    (("#1a1a1a", "#7d7d7d"), ("#7d858f", "#eeeeee")),
)
DASHES = ((), (7, 4), (2, 3), (9, 3, 2, 3), (9, 3, 2, 3, 2, 3))
"""Lengths of strokes and gaps, empty for a solid line."""
_LOOK_COUNTS = (len(_HUES), len(DASHES), 7)
"""Numbers of hues, dashes and markers, pairwise coprime."""


@dataclass(frozen=True)
class Look:
    """Colours on light and dark pages, with dashes and a marker."""

    light: str
    """Colour on a light page, as #rrggbb."""
    dark: str
    """Colour on a dark page, as #rrggbb."""
    dash: int = 0
    """Index of the dashes in `DASHES`."""
    marker: int = 0
    """Index of the marker, 0 to 6, in the tables of markers of `page.py` and `plots.py`."""


def shade(hue: int, share: float = 0.5) -> Look:
    """Return a shade of a hue (0 to 5), from the darkest at `share` 0 to the lightest at 1."""
    light, dark = (_mix_colours(*ends, share) for ends in _HUES[hue])
    return Look(light, dark)


def _mix_colours(low: str, high: str, share: float) -> str:
    pairs = zip(bytes.fromhex(low[1:]), bytes.fromhex(high[1:]), strict=True)
    return "#" + bytes(round(low_byte + share * (high_byte - low_byte)) for low_byte, high_byte in pairs).hex()


def nth_look(index: int) -> Look:
    """Return the n-th look of series without an order, n from 0.

    Of hue, dashes and marker, two of the first 30 looks share one at most.
    """
    hue, dash, marker = (index % count for count in _LOOK_COUNTS)
    return replace(shade(hue), dash=dash, marker=marker)


def level_look(level: int, levels: int) -> Look:
    """Return the look of one of at most six levels of a single kind, a shade of blue."""
    return replace(shade(0, level / max(levels - 1, 1)), dash=level % len(DASHES), marker=level)


@dataclass(frozen=True)
class Layout:
    """Swept keys by the way in which a chart shows them."""

    kinds: tuple[str, ...]
    """Keys whose combinations of values are the kinds."""
    levels: tuple[str, ...]
    """Keys whose combinations of values are the levels."""
    panels: tuple[str, ...]
    """Keys, at most two, whose combinations of values get a panel each."""
    axes: Mapping[str, list[Any]]
    """Values of each key of the sweep, also of keys with one value."""

    def choose_look(self, point: Mapping[str, Any]) -> Look:
        """Choose the look of a sweep point.

        Kinds have hue and dashes, and levels have shade and marker.  Kinds without levels have markers, too, and
        levels of a single kind have dashes, too.  With more than five kinds or six levels, the combinations have
        looks without an order (`nth_look`).

        Args:
            point: Value of each swept key.
        """
        (kind, kinds), (level, levels) = self._index_of(self.kinds, point), self._index_of(self.levels, point)
        if kinds > len(DASHES) or levels > len(_HUES):
            return nth_look(kind * levels + level)
        if levels == 1:
            return nth_look(kind)
        if kinds == 1:
            return level_look(level, levels)
        return replace(shade(kind, level / (levels - 1)), dash=kind, marker=level)

    def _index_of(self, keys: Iterable[str], point: Mapping[str, Any]) -> tuple[int, int]:
        """Return the index of the point's values among all combinations of `keys`, and their number."""
        points = axis_points({key: self.axes[key] for key in keys})
        return points.index({key: point[key] for key in keys}), len(points)


def make_layout(axes: Mapping[str, list[Any]]) -> Layout:
    """Lay out the axes of a sweep in a chart.

    Kinds are trust settings and algorithms together, or algorithms alone if both have more than five combinations,
    the number of dashes.  A sweep of neither has as kinds the first axis with a value that is neither a number nor
    a boolean, or else, of several axes, the one with the fewest values.  The other axes are levels.
    While there are more than 12 lines, an axis of the levels becomes panels, twice at most: the number of rounds
    first, then the one with most values.

    Args:
        axes: Values of each key of the sweep, of which only keys with several values matter.
    """
    swept_axes = {key: values for key, values in axes.items() if len(values) > 1}
    kinds = [key for key in (_TRUST_KEY, _ALGORITHM_KEY) if key in swept_axes]
    if len(kinds) == 2 and _count_lines(swept_axes, kinds) > len(DASHES):
        kinds = [_ALGORITHM_KEY]
    if not kinds and swept_axes:
        text_keys = [
            key
            for key, values in swept_axes.items()
            if not all(isinstance(value, int | float) for value in values)
        ]
        kinds = text_keys[:1] or (
            [min(swept_axes, key=lambda key: len(swept_axes[key]))] if len(swept_axes) > 1 else []
        )
    remaining_keys = [key for key in swept_axes if key not in kinds]
    panels: list[str] = []
    while remaining_keys and len(panels) < 2 and _count_lines(swept_axes, [*kinds, *remaining_keys]) > _MAX_LINES:
        longest = max(reversed(remaining_keys), key=lambda key: len(swept_axes[key]))
        panels.append(_ROUNDS_KEY if _ROUNDS_KEY in remaining_keys else longest)
        remaining_keys.remove(panels[-1])
    return Layout(tuple(kinds), tuple(remaining_keys), tuple(panels), axes)


def _count_lines(swept: Mapping[str, list[Any]], keys: Sequence[str]) -> int:
    return math.prod(len(swept[key]) for key in keys)


def describe_keys(results: Results, point: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Format the values that a point has for some keys."""
    return format_point(results, {key: point[key] for key in point if key in tuple(keys)})


_TICK_STEPS = (1.0, 2.0, 5.0, 10.0)
_MIN_LOG_RATIO = 10.0


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    """Position of `low` in the drawing, a larger number than `end` on a vertical axis of an SVG."""
    end: float
    """Position of `high` in the drawing."""
    logarithmic: bool

    def position(self, value: float) -> float:
        """Return the position of a value, and that of the nearer end for values beyond the axis."""
        share = (self._transform(value) - self._transform(self.low)) / (
            self._transform(self.high) - self._transform(self.low)
        )
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, max_count: int) -> list[float]:
        """Return numbers on the axis, at most about `max_count`.

        They are round, except for the ends of a logarithmic axis with fewer than two round numbers.
        """
        return (
            _logarithmic_ticks(self.low, self.high, max_count)
            if self.logarithmic
            else _linear_ticks(self.low, self.high, max_count)
        )

    def _transform(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.logarithmic else value


def make_scale(values: Sequence[float], start: float, end: float, *, logarithmic: bool) -> Scale:
    """Make the axis of the finite ones of some values, with a margin at each end.

    A logarithmic axis shows the values above 0.  Without any value to show, the axis is linear around 0 to 1.
    Absolute values above 1e150 count as 1e150, and on a logarithmic axis values below 1e-150 as 1e-150.

    Args:
        values: Values to show, which may include infinities and NaN.
        start: Position of the lower end in the drawing.
        end: Position of the upper end in the drawing.
        logarithmic: Whether a logarithmic axis is asked for.
    """
    # Limits keep differences and ratios of two ends in the range of floating point.
    finite = [
        min(max(value, 1e-150 if logarithmic else -1e150), 1e150)
        for value in values
        if math.isfinite(value) and (value > 0.0 or not logarithmic)
    ]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if logarithmic and low > 0.0:
        margin = max((high / low) ** 0.05, 1.05)
        return Scale(low / margin, high * margin, start, end, logarithmic=True)
    margin = 0.05 * (high - low) or max(abs(high), 1.0) * 0.1
    return Scale(low - margin, high + margin, start, end, logarithmic=False)


def is_wide(values: Sequence[float]) -> bool:
    """Whether all finite values are positive, and the largest is more than 10 times the smallest.

    On a linear axis a diverging run would flatten all others.
    """
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and max(finite) > _MIN_LOG_RATIO * min(finite) > 0.0


def _linear_ticks(low: float, high: float, max_count: int) -> list[float]:
    min_step = (high - low) / max_count
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(power * multiple for multiple in _TICK_STEPS if power * multiple >= min_step)
    first_multiple = math.ceil(low / step)
    return [step * multiple for multiple in range(first_multiple, math.floor(high / step) + 1)]


def _logarithmic_ticks(low: float, high: float, max_count: int) -> list[float]:
    """Return powers of ten from `low` to `high`, with multiples as far as `max_count` allows.

    The multiples are 1, 2 and 5, or 1 and 3, or 1 alone.  If even the powers alone are too many, they are thinned.
    An axis with fewer than two of these numbers gets its ends as ticks.
    """
    for multiples in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [
            multiple * 10.0**power
            for power in powers
            for multiple in multiples
            if low <= multiple * 10.0**power <= high
        ]
        if len(ticks) <= max_count:
            return ticks if len(ticks) > 1 else [low, high]
    return ticks[:: math.ceil(len(ticks) / max_count)]


def format_tick(value: float) -> str:
    """Format a tick's label in plain characters, such as "0.25", "20000" and "1.5e5"."""
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.5e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.0f}" if abs(value) >= 9999.5 else f"{value:.4g}"
