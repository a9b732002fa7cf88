"""The pen of the report's page: a chart as SVG, readable without a script, in light, in dark and on paper."""

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

from fedpriv.show.charts import Chart, Mark, Panel, Series
from fedpriv.show.looks import DASHES, Look, Scale, tick_text

WIDTH, HEIGHT = 560, 350
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 16, 14, 52
_CHARACTER = 8.5  # the width of one, at most: labels of ticks keep so far apart
_MARKED = 6  # so many markers on a line, about

# Markers of a circle's area around the origin.
_SHAPES = (
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0Z",
    "M-.9 -.9H.9V.9H-.9Z",
    "M0 -1.2L1.15 .8H-1.15Z",
    "M0 -1.3L1.3 0L0 1.3L-1.3 0Z",
    "M0 1.2L1.15 -.8H-1.15Z",
    "M-.4 -1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4Z",
    "M-1.2 -.7L-.7 -1.2L0 -.5L.7 -1.2L1.2 -.7L.5 0L1.2 .7L.7 1.2L0 .5L-.7 1.2L-1.2 .7L-.5 0Z",
)


def svg(chart: Chart) -> Markup:
    """The SVGs of a chart's panels, one behind the other.

    Guarantee: every text is escaped; nothing is loaded from elsewhere.
    """
    return Markup("").join(_panel(chart, panel) for panel in chart.panels)


def legend_key(series: Series) -> Markup:
    """A series' line and marker for the legend."""
    parts = [_line([(1.0, 6.0), (33.0, 6.0)], series.look)] if series.line else []
    if series.dots:
        parts.append(_marker(17.0, 6.0, series.look, hollow=series.hollow))
    frame = f'<svg class="key series" viewBox="0 0 34 12" {_own(series.look)} aria-hidden="true">'
    return Markup("".join([frame, *parts, "</svg>"]))


def _own(look: Look) -> str:
    """The colours of a look as an attribute; the style sheet takes the one for light or dark."""
    return f'style="--light:{look.light};--dark:{look.dark}"'


def wide_first(charts: Sequence[Chart]) -> list[tuple[Chart, bool]]:
    """Charts in the order of the page, and whether each takes a whole row of two: no chart stands alone in one."""
    wide = [chart for chart in charts if len(chart.panels) > 1]
    half = [chart for chart in charts if len(chart.panels) == 1]
    if len(half) % 2:
        widest = max(half, key=lambda chart: len(chart.series))
        wide.append(widest)
        half.remove(widest)
    return [(chart, True) for chart in wide] + [(chart, False) for chart in half]


def _panel(chart: Chart, panel: Panel) -> Markup:
    left = _LEFT
    if chart.rows:
        left = min(240, 24 + round(max(map(len, chart.rows)) * _CHARACTER))
    high = 20 + 8 * len(panel.series)
    height = max(190, _TOP + _BOTTOM + high * len(chart.rows)) if chart.rows else HEIGHT
    top = _TOP + 20 if panel.name else _TOP
    across = chart.across(panel, left, WIDTH - _RIGHT)
    up = chart.up(height - _BOTTOM, top)
    parts = _axes(chart, across, up)
    if panel.name:
        parts.append(_text("panel", left, 20, escape(panel.name), "start"))
    names = [series.name for series in chart.legend]
    for rank, series in enumerate(panel.series):
        place = names.index(series.name) if names else rank
        parts.append(_series(chart, place, rank, series, across, up))
    label = escape(", ".join(filter(None, [chart.caption, panel.name])))
    frame = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" class="chart">'
    return Markup("".join([frame, *parts, "</svg>"]))


def _axes(chart: Chart, across: Scale, up: Scale) -> list[str]:
    bottom, parts, last = up.start, [], -math.inf
    for value in range(len(chart.rows)) if chart.rows else up.ticks(6):
        y = up.place(value)
        parts.append(f'<path class="grid" d="M{across.start} {y:.1f}H{across.end}"/>')
        label = escape(_short(chart.rows[int(value)])) if chart.rows else tick_text(value)
        parts.append(_text("tick", across.start - 7, y + 4, label, "end"))
    for value in chart.ticks or across.ticks(6):
        x, label = across.place(value), tick_text(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {bottom:g}v5"/>')
        if x - last >= 34.0 + max(0.0, _CHARACTER * (len(label) - 3)):
            parts.append(_text("tick", x, bottom + 19, label, "middle"))
            last = x
    parts.append(f'<path class="axis" d="M{across.start} {bottom:g}H{across.end}"/>')
    parts.append(_text("label", (across.start + across.end) / 2, bottom + _BOTTOM - 10, escape(chart.x), "middle"))
    turn = f'transform="translate(14 {(up.end + bottom) / 2:g}) rotate(-90)"'
    parts.append(f'<text class="label" {turn} text-anchor="middle">{escape(chart.y)}</text>' if chart.y else "")
    return parts


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _short(name: str) -> str:
    return name if len(name) <= 26 else f"{name[:25]}…"


def _series(chart: Chart, place: int, rank: int, series: Series, across: Scale, up: Scale) -> str:
    marks = [mark for mark in series.marks if math.isfinite(mark.y)]
    at = [(across.place(mark.x), up.place(mark.y)) for mark in marks]
    parts = [f'<g class="series" {_own(series.look)} data-series="{place}">']
    if series.line and len(at) > 1:
        if any(mark.spread for mark in marks):
            above = [f"{across.place(m.x):.1f} {up.place(m.y + m.spread):.1f}" for m in marks]
            below = [f"{across.place(m.x):.1f} {up.place(m.y - m.spread):.1f}" for m in reversed(marks)]
            parts.append(f'<path class="band" d="M{"L".join([*above, *below])}Z"/>')
        parts.append(_line(at, series.look))
    else:
        parts += [_bar(mark, across, up, along_x=bool(chart.rows)) for mark in marks if mark.spread]
    if series.dots:
        step = max(1, math.ceil(len(at) / _MARKED)) if series.line else 1
        chosen = [each for number, each in enumerate(at) if number % step == rank % step]
        parts += [_marker(x, y, series.look, hollow=series.hollow) for x, y in chosen]
    parts += [_marker(across.place(m.x), up.place(m.y), series.look, hollow=True) for m in series.published]
    for mark in (*marks, *series.published):
        tip = escape(f"{series.name}: {mark.tip}" if mark.tip else series.name)
        x, y = across.place(mark.x), up.place(mark.y)
        parts.append(f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="3" data-tip="{tip}"/>')
    return "".join([*parts, "</g>"])


def _line(at: Sequence[tuple[float, float]], look: Look) -> str:
    dash = f' stroke-dasharray="{" ".join(map(str, DASHES[look.dash]))}"' if DASHES[look.dash] else ""
    return f'<path class="line"{dash} d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in at)}"/>'


def _bar(mark: Mark, across: Scale, up: Scale, *, along_x: bool) -> str:
    if along_x:
        ends = (across.place(mark.x + side * mark.spread) for side in (-1.0, 1.0))
        low, high = (f"{x:.1f} {up.place(mark.y):.1f}" for x in ends)
    else:
        ends = (up.place(mark.y + side * mark.spread) for side in (-1.0, 1.0))
        low, high = (f"{across.place(mark.x):.1f} {y:.1f}" for y in ends)
    return f'<path class="bar" d="M{low}L{high}"/>'


def _marker(x: float, y: float, look: Look, *, hollow: bool) -> str:
    kind, size = ("hollow", 7.0) if hollow else ("mark", 4.0)
    shape = f'd="{_SHAPES[look.marker]}" transform="translate({x:.1f} {y:.1f}) scale({size:g})"'
    return f'<path class="{kind}" {shape}/>'
