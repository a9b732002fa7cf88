"""How much of what records contribute is cut by clipping."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedpriv.reports.plots.layout import Layout, layout_of
from fedpriv.reports.plots.style import colour, entitle, explain, panels
from fedpriv.reports.summary import Metric, cells_at, point_text, points, summarize
from fedpriv.sweep.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST_RANGE = 1.0  # percent: nothing clipped must not look like something
_CLIPPED = Metric("fraction_clipped", "increments that were clipped (%)", 100.0, 2, 2)


def draw_clipping(results: Results) -> "Figure":
    """The fraction clipped, mean ± one standard deviation over seeds: colours as in the curves, rows for the rest.

    Clipping biases the increments, noise is proportional to the clip: a figure to choose the clip by.
    """
    layout = _told_by_colour(results)
    rows = [point_text(results, style) for style in layout.styles]
    figure, ((axes,),) = panels(7.4, 1.9 + 0.34 * len(rows))
    for point in points(results):
        told = [cell for cell in cells_at(results, point) if cell["fraction_clipped"] is not None]
        if summary := summarize(told, _CLIPPED):
            look = colour(layout.colour_of(point) or 0)
            place = layout.style_of(point) + _aside(layout, point)
            axes.errorbar(
                summary.mean,
                place,
                xerr=summary.std,
                capsize=2,
                clip_on=False,
                **{**look, "linestyle": "none", "markersize": 6},
            )
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0.0, max(_LEAST_RANGE, axes.get_xlim()[1]))
    axes.set_xlabel(_CLIPPED.title)
    entitle(figure, results)
    explain(figure, results, Layout(layout.colours, [{}], None, None, layout.axes))
    return figure


def _told_by_colour(results: Results) -> Layout:
    """Colours as everywhere; all other axes together name the rows."""
    layout = layout_of(results.axes)
    others = [key for key, values in results.axes.items() if len(values) > 1 and key != layout.colours]
    rows: list[dict[str, Any]] = []
    for point in points(results):
        if (row := {key: point[key] for key in others}) not in rows:
            rows.append(row)
    return Layout(layout.colours, rows, None, None, results.axes)


def _aside(layout: Layout, point: Mapping[str, Any]) -> float:
    """Marks of one row stand a little apart, so that none hides another."""
    if layout.colours is None:
        return 0.0
    count = len(layout.axes[layout.colours])
    return 0.5 * ((layout.colour_of(point) or 0) + 0.5) / count - 0.25
