"""Pictures of a run: curves with bands over seeds, and privacy against accuracy.  PNG and SVG."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.errors import InputError
from fedpriv.reports.results import Results, read_history, read_results
from fedpriv.reports.table import METRICS, Metric, cells_at, points, short, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette, which colour-blind readers can tell apart, in an order that also works in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "fedpriv",
}


def plot_run(folder: Path) -> list[Path]:
    """Draw what a run's results allow into folder/plots; the files written.  InputError without any cell."""
    from matplotlib import rc_context

    results = read_results(folder)
    if not results.cells:
        raise InputError(f"{folder}: no finished cell to draw yet")
    target = folder / "plots"
    target.mkdir(exist_ok=True)
    with rc_context(_STYLE):
        figures = {"curves": _curves(results, list(read_history(folder)))}
        if len({cell["mu"] for cell in results.cells} - {None}) > 1:
            figures["privacy"] = _privacy(results)
        return [path for name, figure in figures.items() for path in _save(figure, target / name)]


def _save(figure: "Figure", stem: Path) -> list[Path]:
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.savefig(png, dpi=150)
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def _curves(results: Results, history: Sequence[Mapping[str, Any]]) -> "Figure":
    """Loss and accuracy against the share of rounds done: a line a sweep point, a band of ± one std over seeds."""
    figure, panels = _panels(results.title or results.name)
    looks = _looks(results)
    for point in points(results):
        lines = [line for line in history if all(line.get(key) == value for key, value in point.items())]
        for axes, metric in zip(panels, METRICS, strict=True):
            _curve(axes, lines, metric, results, point, looks[_key(point)])
    for axes, metric in zip(panels, METRICS, strict=True):
        axes.set_xlabel("share of the rounds (%)")
        axes.set_ylabel(metric.title)
    if len(looks) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(3, len(looks)))
    return figure


def _curve(
    axes: "Axes",
    lines: Sequence[Mapping[str, Any]],
    metric: Metric,
    results: Results,
    point: Mapping[str, Any],
    look: Mapping[str, Any],
) -> None:
    cells = cells_at(results, point)
    if not cells or not lines:
        return
    by_round: dict[int, list[float]] = {}
    for line in lines:
        by_round.setdefault(line["round"], []).append(metric.factor * line[metric.key])
    rounds = sorted(by_round)
    shares = [100 * t / cells[0]["rounds"] for t in rounds]
    means = [statistics.fmean(by_round[t]) for t in rounds]
    axes.plot(shares, means, **look)
    spreads = [statistics.stdev(by_round[t]) if len(by_round[t]) > 1 else 0.0 for t in rounds]
    if any(spreads):
        low, high = ([mean + sign * std for mean, std in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axes.fill_between(shares, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _privacy(results: Results) -> "Figure":
    """Accuracy and loss against μ: a line for each number of silos and trust, published values hollow."""
    figure, panels = _panels(f"{results.title or results.name}: privacy against utility")
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for cell in results.cells:
        groups.setdefault((cell["trust"], cell["silos"]), []).append(cell)
    silos = sorted({number for _, number in groups})
    for (trust, number), cells in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        rank = silos.index(number)
        dashed = trust == "trusted"
        look: dict[str, Any] = {
            "color": _COLOURS[(rank + (3 if dashed and len(silos) == 1 else 0)) % len(_COLOURS)],
            "linestyle": _LINES[dashed],
            "marker": _MARKERS[rank % len(_MARKERS)],
            "label": f"{number} silo{'s' if number > 1 else ''}, {trust}",
        }
        for axes, metric in zip(panels, METRICS, strict=True):
            _privacy_line(axes, results, cells, metric, look)
    mus = sorted({cell["mu"] for cell in results.cells})
    for axes, metric in zip(panels, METRICS, strict=True):
        axes.set_xscale("log")
        axes.set_xticks(mus, [f"{mu:g}" for mu in mus])
        axes.minorticks_off()
        axes.set_xlabel("μ (Gaussian DP; smaller is more private)")
        axes.set_ylabel(metric.title)
    if results.published is not None:
        panels[0].plot([], [], "o", color="grey", markerfacecolor="none", markersize=9, label="published")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(groups) + 1)
    )
    return figure


def _privacy_line(
    axes: "Axes", results: Results, cells: Sequence[Mapping[str, Any]], metric: Metric, look: Mapping[str, Any]
) -> None:
    by_mu: dict[float, list[Mapping[str, Any]]] = {}
    for cell in cells:
        by_mu.setdefault(cell["mu"], []).append(cell)
    mus = sorted(by_mu)
    summaries = [summarize(by_mu[mu], metric) for mu in mus]
    known = [summary for summary in summaries if summary is not None]
    axes.errorbar(mus, [s.mean for s in known], yerr=[s.std or 0.0 for s in known], capsize=3, **look)
    if results.published is not None:
        for mu in mus:
            value = results.published.value(metric.key, by_mu[mu][0]["point"])
            if value is not None:
                axes.plot(mu, value, look["marker"], color=look["color"], markerfacecolor="none", markersize=10)


def _panels(title: str) -> tuple["Figure", list["Axes"]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure, list(figure.subplots(1, 2))


def _key(point: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(point.values())


def _looks(results: Results) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Colour by the last axis, line style by the others, so that a line can be read without colour."""
    looks: dict[tuple[Any, ...], dict[str, Any]] = {}
    others: list[tuple[Any, ...]] = []
    for point in points(results):
        key = _key(point)
        if key[:-1] not in others:
            others.append(key[:-1])
        last = list(results.axes.values())[-1].index(key[-1]) if key else 0
        looks[key] = {
            "color": _COLOURS[last % len(_COLOURS)],
            "linestyle": _LINES[others.index(key[:-1]) % len(_LINES)],
            "linewidth": 1.6,
            "label": ", ".join(f"{short(name)} {value}" for name, value in point.items()) or results.name,
        }
    return looks
