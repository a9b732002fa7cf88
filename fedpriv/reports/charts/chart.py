"""A chart as SVG: readable without a script, in light and dark, on a screen and on paper."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from fedpriv.reports.charts.scales import Scale, scale_of

WIDTH, HEIGHT = 560, 350
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 16, 14, 52
COLOURS = 7
"""So many colours repeat, with other dashes."""


@dataclass(frozen=True)
class Mark:
    """A point: its place, what the pointer shows, and how far a band reaches to both sides."""

    x: float
    y: float
    tip: str
    spread: float = 0.0


@dataclass(frozen=True)
class Series:
    """One line, or points alone; `hollow` points are what others published."""

    name: str
    marks: Sequence[Mark]
    line: bool = True
    hollow: bool = False
    colour: int | None = None
    """Of another series, where the two belong together; its own otherwise."""


@dataclass(frozen=True)
class Chart:
    """A figure of the page."""

    key: str
    caption: str
    x: str
    y: str
    series: Sequence[Series]
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[float] = ()
    """On the x axis; round numbers if left out."""

    def look(self, place: int) -> str:
        """The classes of a series, which the style sheet gives a colour and dashes."""
        own = self.series[place].colour
        number = place if own is None else own
        return f"c{number % COLOURS} d{number // COLOURS % 3}"


def drawn(chart: Chart) -> Markup:
    """The chart's SVG.

    Guarantee: every text is escaped; nothing is loaded from elsewhere.
    """
    marks = [mark for series in chart.series for mark in series.marks if math.isfinite(mark.y)]
    across = scale_of([mark.x for mark in marks], _LEFT, WIDTH - _RIGHT, logarithmic=chart.log_x)
    reach = [mark.y + side * mark.spread for mark in marks for side in (-1.0, 1.0)]
    if chart.log_y:
        reach = [value for value in reach if value > 0.0]
    up = scale_of(reach, HEIGHT - _BOTTOM, _TOP, logarithmic=chart.log_y)
    parts = [*_axes(chart, across, up)]
    for place, series in enumerate(chart.series):
        parts.append(_series(chart, place, series, across, up))
    frame = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.caption)}" class="chart">'
    return Markup("".join([frame, *parts, "</svg>"]))


def _axes(chart: Chart, across: Scale, up: Scale) -> list[str]:
    bottom, parts = HEIGHT - _BOTTOM, []
    for value in up.ticks(6):
        y = up.place(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        place = f'x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f'<text class="tick" {place}>{_number(value)}</text>')
    last = -math.inf
    for value in chart.ticks or across.ticks(6):
        x = across.place(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {bottom}v5"/>')
        if x - last >= 34.0:
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{_number(value)}</text>'
            )
            last = x
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x)}</text>'
    )
    height = (_TOP + bottom) / 2
    parts.append(
        f'<text class="label" transform="translate(14 {height}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y)}</text>"
    )
    return parts


def _series(chart: Chart, place: int, series: Series, across: Scale, up: Scale) -> str:
    marks = [mark for mark in series.marks if math.isfinite(mark.y)]
    at = [(across.place(mark.x), up.place(mark.y)) for mark in marks]
    parts = [f'<g class="series {chart.look(place)}" data-series="{place}">']
    if series.line and any(mark.spread for mark in marks):
        above = [f"{x:.1f} {up.place(mark.y + mark.spread):.1f}" for (x, _), mark in zip(at, marks, strict=True)]
        below = [f"{x:.1f} {up.place(mark.y - mark.spread):.1f}" for (x, _), mark in zip(at, marks, strict=True)]
        parts.append(f'<path class="band" d="M{"L".join([*above, *reversed(below)])}Z"/>')
    if series.line and len(at) > 1:
        parts.append(f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in at)}"/>')
    size = 6 if series.hollow else 3.2
    for (x, y), mark in zip(at, marks, strict=True):
        kind = "hollow" if series.hollow else "mark"
        tip = escape(f"{series.name}: {mark.tip}")
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}" data-tip="{tip}"/>')
    return "".join([*parts, "</g>"])


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"
