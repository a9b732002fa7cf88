"""Accuracy against privacy: what a guarantee costs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedpriv.figures import upper_figure
from fedpriv.privacy.trust import trust_named
from fedpriv.reports.plots.layout import layout_of
from fedpriv.reports.plots.style import HOLLOW, entitle, explain, look_of, name_panels, panels
from fedpriv.reports.summary import METRICS, product, summarize
from fedpriv.sweep.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACCURACY = next(metric for metric in METRICS if metric.key == "test_accuracy")
_APART = 0.014  # between neighbouring lines, as a share of the axis; less where there are many
_APART_IN_ALL = 0.1
_TICKS = 8  # so many levels have a tick each
_PRIVACY_KEYS = ("privacy.mu", "privacy.rho", "privacy.zcdp", "privacy.epsilon")
_TRUST = "algorithm.trust"
_SYMBOLS = {"mu": "μ", "epsilon": "ε"}
_NAMES = {"mu": "μ of Gaussian DP", "epsilon": "ε at the scenario's δ"}


def levels(results: Results) -> dict[str, float]:
    """The privacy of all cells by the text that is shown: rounding in an accountant makes no second value."""
    return {
        upper_figure(level, 3): level
        for cell in results.cells
        if (level := cell[privacy_scale(results)]) is not None
    }


def privacy_scale(results: Results) -> str:
    """What privacy is drawn in: μ, or ε if a cell with a guarantee has no μ, as with sampling."""
    return "epsilon" if any(c["mu"] is None and c["epsilon"] is not None for c in results.cells) else "mu"


def draw_tradeoff(results: Results) -> "Figure":
    """Accuracy against μ or ε: a line for each number of silos, trust (its line style) and other swept value."""
    from matplotlib.lines import Line2D

    told = {key: list(values) for key, values in results.axes.items() if key not in _PRIVACY_KEYS}
    layout = layout_of(told, styled=_TRUST)
    rows, columns = layout.shape
    wide = rows * columns > 1
    size = (1.9 + 2.9 * columns, 1.0 + 2.6 * rows) if wide else (7.4, 4.6)
    figure, grid = panels(*size, rows, columns, share=True)
    lines: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for point in product(told):
        lines.setdefault(layout.panel_of(point), []).append(point)
    published, scale = False, privacy_scale(results)
    for (row, column), here in lines.items():
        for rank, point in enumerate(here):
            cells = [cell for cell in results.cells if cell[scale] is not None and _is_at(cell, point)]
            shift = _shift(results, rank, len(here))
            published |= _line(grid[row][column], results, cells, shift, look_of(layout, point))
    for axes in (axes for along in grid for axes in along):
        _label(axes, results, _SYMBOLS[scale] if wide else f"{_NAMES[scale]} (smaller is more private)")
    if wide:
        name_panels(grid, results, layout)
    circle = Line2D([], [], color="0.25", linestyle="none", label="published", **HOLLOW, marker="o")
    entitle(figure, results, *_trust(results))
    explain(figure, results, layout, [circle] if published else [])
    return figure


def _is_at(cell: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
    return all(cell["point"][key] == value for key, value in point.items())


def _shift(results: Results, rank: int, lines: int) -> float:
    """Lines at the same level stand side by side, so that no error bar hides another."""
    values = levels(results).values()
    step = min(_APART, _APART_IN_ALL / lines)
    return float((max(values) / min(values)) ** (step * (rank - (lines - 1) / 2)))


def _line(
    axes: "Axes", results: Results, cells: Sequence[Mapping[str, Any]], shift: float, look: Mapping[str, Any]
) -> bool:
    """Draw one line; whether there was a published value to draw beside it."""
    by_level: dict[float, list[Mapping[str, Any]]] = {}
    for cell in cells:
        by_level.setdefault(cell[privacy_scale(results)], []).append(cell)
    if not by_level:
        return False
    found = ((level * shift, summarize(by_level[level], _ACCURACY)) for level in sorted(by_level))
    summaries = {place: summary for place, summary in found if summary}
    spreads = [summary.std or 0.0 for summary in summaries.values()]
    means = [summary.mean for summary in summaries.values()]
    marker = {**look, "marker": look["marker"] or "o"}
    axes.errorbar(list(summaries), means, yerr=spreads if any(spreads) else None, capsize=3, **marker)
    known = {
        level * shift: value
        for level, (cell, *_) in by_level.items()
        if results.published and (value := results.published.value(_ACCURACY.key, cell["point"])) is not None
    }
    around = {"color": marker["color"], "marker": marker["marker"], "linestyle": "none"}
    axes.plot(list(known), list(known.values()), **around, **HOLLOW)
    return bool(known)


def _label(axes: "Axes", results: Results, title: str) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    values = levels(results)
    axes.set_xscale("log")
    if len(values) <= _TICKS:
        axes.set_xticks(list(values.values()), list(values))
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.minorticks_off()
    axes.set_xlabel(title)
    axes.set_ylabel(_ACCURACY.title)


def _trust(results: Results) -> list[str]:
    """The trust of all cells, where it is one and the sweep does not say it."""
    trusts = {cell["trust"] for cell in results.cells}
    return [trust_named(trusts.pop()).title] if len(trusts) == 1 and _TRUST not in results.axes else []
