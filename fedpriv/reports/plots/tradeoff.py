"""Accuracy against privacy: what a guarantee costs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedpriv.reports.plots.layout import layout_of
from fedpriv.reports.plots.style import HOLLOW, entitle, explain, look_of, name_panels, panels
from fedpriv.reports.results import Results
from fedpriv.reports.summary import METRICS, product, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACCURACY = next(metric for metric in METRICS if metric.key == "test_accuracy")
_APART = 0.014  # between neighbouring lines, as a share of the axis; less where there are many
_APART_IN_ALL = 0.1
_TICKS = 8  # so many values of μ have a tick each
_PRIVACY_KEYS = ("privacy.mu", "privacy.rho", "privacy.zcdp", "privacy.epsilon")
_TRUST = "algorithm.trust"


def mus(results: Results) -> dict[str, float]:
    """The μ of all cells by the text that is shown: rounding in an accountant makes no second value."""
    return {f"{cell['mu']:.3g}": cell["mu"] for cell in results.cells if cell["mu"] is not None}


def draw_tradeoff(results: Results) -> "Figure":
    """Accuracy against μ: a line for each number of silos, trust (its line style) and other swept value."""
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
    published = False
    for (row, column), here in lines.items():
        for rank, point in enumerate(here):
            cells = [cell for cell in results.cells if cell["mu"] is not None and _is_at(cell, point)]
            shift = _shift(results, rank, len(here))
            published |= _line(grid[row][column], results, cells, shift, look_of(layout, point))
    for axes in (axes for along in grid for axes in along):
        _label(axes, results, "μ" if wide else "μ of Gaussian DP (smaller is more private)")
    if wide:
        name_panels(grid, results, layout)
    circle = Line2D([], [], color="0.25", linestyle="none", label="published", **HOLLOW, marker="o")
    entitle(figure, results, *_trust(results))
    explain(figure, results, layout, [circle] if published else [])
    return figure


def _is_at(cell: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
    return all(cell["point"][key] == value for key, value in point.items())


def _shift(results: Results, rank: int, lines: int) -> float:
    """Lines at the same μ stand side by side, so that no error bar hides another."""
    values = mus(results).values()
    step = min(_APART, _APART_IN_ALL / lines)
    return float((max(values) / min(values)) ** (step * (rank - (lines - 1) / 2)))


def _line(
    axes: "Axes", results: Results, cells: Sequence[Mapping[str, Any]], shift: float, look: Mapping[str, Any]
) -> bool:
    """Draw one line; whether there was a published value to draw beside it."""
    by_mu: dict[float, list[Mapping[str, Any]]] = {}
    for cell in cells:
        by_mu.setdefault(cell["mu"], []).append(cell)
    if not by_mu:
        return False
    summaries = {mu * shift: summary for mu in sorted(by_mu) if (summary := summarize(by_mu[mu], _ACCURACY))}
    spreads = [summary.std or 0.0 for summary in summaries.values()]
    means = [summary.mean for summary in summaries.values()]
    marker = {**look, "marker": look["marker"] or "o"}
    axes.errorbar(list(summaries), means, yerr=spreads if any(spreads) else None, capsize=3, **marker)
    known = {
        mu * shift: value
        for mu, (cell, *_) in by_mu.items()
        if results.published and (value := results.published.value(_ACCURACY.key, cell["point"])) is not None
    }
    around = {"color": marker["color"], "marker": marker["marker"], "linestyle": "none"}
    axes.plot(list(known), list(known.values()), **around, **HOLLOW)
    return bool(known)


def _label(axes: "Axes", results: Results, title: str) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    values = mus(results)
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
    return [f"{trusts.pop()} server"] if len(trusts) == 1 and _TRUST not in results.axes else []
