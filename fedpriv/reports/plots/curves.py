"""Loss and accuracy against the round, with bands over seeds."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedpriv.reports.plots.layout import layout_of
from fedpriv.reports.plots.style import entitle, explain, look_of, name_panels, panels
from fedpriv.reports.summary import Metric, cells_at, points, shared_metrics, summarize
from fedpriv.sweep.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = 5  # on a curve, about
_WIDE_RANGE = 10.0  # from there on whatever is no share is drawn on a logarithmic axis


def draw_curves(results: Results, history: Sequence[Mapping[str, Any]]) -> dict[str, "Figure"]:
    """A line a sweep point, a band of ± one standard deviation over seeds.

    One figure "curves" with all metrics; where a sweep needs several panels, one for each, such as "loss".
    """
    drawn = shared_metrics(results)
    rows, columns = layout_of(results.axes).shape
    if rows * columns == 1:
        figure, grid = panels(4.7 * len(drawn), 4.2, 1, len(drawn))
        for axes, metric in zip(grid[0], drawn, strict=True):
            _fill([[axes]], results, history, metric)
        _finish(figure, results)
        return {"curves": figure}
    figures = {}
    for metric in drawn:
        figure, grid = panels(1.9 + 2.9 * columns, 1.0 + 2.5 * rows, rows, columns, share=True)
        _fill(grid, results, history, metric)
        name_panels(grid, results, layout_of(results.axes))
        _finish(figure, results)
        figures[metric.key.removeprefix("test_")] = figure
    return figures


def _finish(figure: "Figure", results: Results) -> None:
    entitle(figure, results)
    explain(figure, results, layout_of(results.axes))


def _fill(
    grid: Sequence[Sequence["Axes"]], results: Results, history: Sequence[Mapping[str, Any]], metric: Metric
) -> None:
    layout = layout_of(results.axes)
    for row, along in enumerate(grid):
        for column, axes in enumerate(along):
            here = [point for point in points(results) if layout.panel_of(point) == (row, column)]
            _panel(axes, results, here, history, metric)
    _scale(grid[0][0], metric, history)


def _panel(
    axes: "Axes",
    results: Results,
    here: Sequence[Mapping[str, Any]],
    history: Sequence[Mapping[str, Any]],
    metric: Metric,
) -> None:
    """The lines of some sweep points; runs of unequal length share the axis as shares of their rounds."""
    layout = layout_of(results.axes)
    rounds = {cell["cell"]: cell["rounds"] for point in here for cell in cells_at(results, point)}
    equal = len(set(rounds.values())) <= 1
    for rank, point in enumerate(here):
        ids = {cell["cell"] for cell in cells_at(results, point)}
        lines = [
            (line["round"] * (1 if equal else 100 / rounds[line["cell"]]), line)
            for line in history
            if line["cell"] in ids
        ]
        if lines:
            _curve(axes, lines, metric, look_of(layout, point), rank)
    axes.set_xlabel("round" if equal else "share of the rounds (%)")
    axes.set_ylabel(metric.title)
    axes.set_xlim(left=0)


def _curve(
    axes: "Axes",
    lines: Sequence[tuple[float, Mapping[str, Any]]],
    metric: Metric,
    look: Mapping[str, Any],
    rank: int,
) -> None:
    """Mean and band of history lines, given with the place of each on the x axis; `rank` staggers the markers."""
    by_place: dict[float, list[Mapping[str, Any]]] = {}
    for place, line in lines:
        by_place.setdefault(place, []).append(line)
    places = sorted(by_place)
    summaries = [found for place in places if (found := summarize(by_place[place], metric))]
    step = max(1, len(places) // _MARKS)
    axes.plot(places, [each.mean for each in summaries], markevery=(rank % step, step), **look)
    if any(each.std for each in summaries):
        low = [each.mean - (each.std or 0.0) for each in summaries]
        high = [each.mean + (each.std or 0.0) for each in summaries]
        axes.fill_between(places, low, high, color=look["color"], alpha=0.13, linewidth=0)


def _scale(axes: "Axes", metric: Metric, history: Sequence[Mapping[str, Any]]) -> None:
    """One diverging run must not flatten all others; shared y axes follow the first panel's."""
    values = [line[metric.key] for line in history if metric.key in line]
    if metric.key != "test_accuracy" and values and max(values) > _WIDE_RANGE * min(values) > 0.0:
        axes.set_yscale("log")
