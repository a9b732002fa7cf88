"""How much of what records contribute is cut by clipping.

What noise each mechanism would need for a run's guarantee: from accounting alone, nothing is drawn.

Mechanisms side by side: what their noise comes to, over what no mechanism falls below.

Accuracy against privacy: what a guarantee costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.core.figures import upper_figure
from fedpriv.noise.registry import CHOSEN
from fedpriv.noise.trust import trust_named
from fedpriv.rounds.ledger import from_data
from fedpriv.rounds.setting import Cost, Setting, Table
from fedpriv.show.plot_style import (
    HOLLOW,
    SETTINGS,
    Layout,
    colour,
    entitle,
    explain,
    layout_of,
    look_of,
    name_panels,
    panels,
)
from fedpriv.show.summary import METRICS, Metric, cells_at, point_text, points, product, summarize
from fedpriv.study.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure
if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


_HORIZONS = 12


@dataclass(frozen=True)
class Question:
    """What is compared: a setting with clip norm and batch 1, a μ, and the mechanism that was used."""

    setting: Setting
    mu: float
    used: str


def draw_noise(cells: Sequence[Mapping[str, Any]], state: str = "") -> "Figure | None":
    """Noise against the number of rounds, and in one release beside the mean over silos, for each mechanism.

    For the first cell with a guarantee and a mechanism that is compared; None if there is none.
    Units: clip norm divided by batch size.  `state` is what a reader has to know of the run before any figure.
    """
    question = question_of(cells)
    if question is None:
        return None
    setting = question.setting
    figure, ((left, right),) = panels(9.4, 4.4, 1, 2)
    names = list(setting.compare(question.mu))
    _against_rounds(left, question, names)
    _in_the_mean(right, question, names)
    sums = "running sums" if setting.decay == 1.0 else f"sums with decay {setting.decay:.3g}"
    passes = f", {setting.epochs} epochs" if setting.epochs > 1 else ""
    claim = f"{upper_figure(question.mu, 3)}-GDP, {setting.relation} neighbours{passes}"
    units = "standard deviation of a coordinate; 1 is the clip norm divided by the batch size"
    figure.suptitle("\n".join(filter(None, [f"Noise that makes {setting.rounds} {sums} {claim}", units, state])))
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", title="mechanism")
    return figure


def question_of(cells: Sequence[Mapping[str, Any]]) -> Question | None:
    """What is compared: the first cell with a guarantee and a mechanism that a scenario can name."""
    return next(filter(None, (_question(cell) for cell in cells if cell["mu"] is not None)), None)


def costs_by_rounds(question: Question) -> dict[str, list[tuple[int, float]]]:
    """For each mechanism: the root mean square over the rounds of the noise in a release, by number of rounds."""
    setting = question.setting
    passes = np.unique(np.geomspace(1, setting.rounds // setting.epochs, _HORIZONS).astype(int))
    horizons = [int(places) * setting.epochs for places in passes]
    costs = [replace(setting, rounds=rounds).compare(question.mu) for rounds in horizons]
    return {
        name: [(rounds, cost[name].error) for rounds, cost in zip(horizons, costs, strict=True) if name in cost]
        for name in setting.compare(question.mu)
    }


def _question(cell: Mapping[str, Any]) -> Question | None:
    stream = from_data(cell["releases"][0])
    if not isinstance(stream.mechanism, CHOSEN) or stream.decay == 0.0:  # nothing is summed: all add the same
        return None
    once = stream.period is not None or stream.schedule.single_pass
    rounds = stream.period or stream.schedule.rounds
    if not once and rounds % stream.schedule.rounds_per_epoch:
        return None  # the last pass is cut, and the figure is of whole ones
    setting = Setting(
        rounds=rounds,
        decay=stream.decay,
        silos=cell["silos"],
        trust=cell["trust"],
        relation=stream.relation,
        epochs=1 if once else rounds // stream.schedule.rounds_per_epoch,
    )
    return Question(setting, cell["mu"], stream.mechanism.label)


def _against_rounds(axes: "Axes", question: Question, names: Sequence[str]) -> None:
    """Root mean square over the rounds of the noise in what one owner of noise releases."""
    found = costs_by_rounds(question)
    for place, name in enumerate(names):
        label = f"{name}, this run" if name == question.used else name
        axes.plot(*zip(*found[name], strict=True), **colour(place), label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_minor_formatter("")  # between powers of ten they run into each other in short runs
    axes.set_xlabel("rounds")
    axes.set_ylabel("noise in one release")


def _in_the_mean(axes: "Axes", question: Question, names: Sequence[str]) -> None:
    """The same at the run's number of rounds: a silo's release, and the mean over silos with either trust."""
    views: dict[str, tuple[dict[str, Cost], str]] = {
        "a silo's release": (_costs(question, "untrusted"), "error"),
        f"mean of {question.setting.silos}, untrusted": (_costs(question, "untrusted"), "error_in_mean"),
        f"mean of {question.setting.silos}, trusted": (_costs(question, "trusted"), "error_in_mean"),
    }
    for place, name in enumerate(names):
        values = [getattr(costs[name], kind) for costs, kind in views.values()]
        heights = np.arange(len(views)) + 0.5 * (place + 0.5) / len(names) - 0.25
        axes.plot(values, heights, **{**colour(place), "linestyle": "none", "markersize": 7})
    axes.set_yticks(range(len(views)), list(views))
    axes.set_ylim(len(views) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel(f"noise, {question.setting.rounds} rounds")


def _costs(question: Question, trust: str) -> dict[str, Cost]:
    return replace(question.setting, trust=trust).compare(question.mu)


_KINDS = (".png", ".svg", ".pdf")


def save_comparison(table: Table, path: Path, title: str) -> None:
    """Draw a table into a file; InputError if it cannot be written or its kind is not known."""
    if path.suffix not in _KINDS:
        raise InputError(f"--plot {path}: a figure is a file that ends with {', '.join(_KINDS)}")
    import matplotlib as mpl

    with mpl.rc_context(SETTINGS):
        try:
            draw_comparison(table, title).savefig(path, dpi=150)
        except OSError as error:
            raise InputError(f"--plot {path}: the figure cannot be written there: {error}") from None


def draw_comparison(table: Table, title: str) -> "Figure":
    """A line a mechanism, the smallest ratio on top: in the output, if there is one, and in the queries."""
    output = table.least.output is not None
    lines = sorted(table.lines, key=lambda line: line.ratio.output or line.ratio.queries, reverse=True)
    figure, ((axes,),) = panels(8.0, 1.6 + 0.28 * len(lines))
    places = range(len(lines))
    dots = {"linestyle": "none"}
    if output:
        ratios = [line.ratio.output or 0.0 for line in lines]
        axes.plot(ratios, places, **colour(0) | dots, label="in the output")
    queries = "in queries, root mean square" if output else "in running sums, root mean square"
    axes.plot([line.ratio.queries for line in lines], places, **colour(1) | dots, label=queries)
    axes.axvline(1.0, color="0.4", linewidth=1.0)
    names = [f"{line.name}{' (auto)' if line.chosen else ''}, {line.cost.memory} vectors" for line in lines]
    axes.set_yticks(places, names)
    axes.set_xscale("log")
    axes.set_xlabel("noise over the least that any mechanism leaves")
    figure.legend(loc="outside lower center", ncols=2)
    figure.suptitle(f"{title}: noise at the same guarantee")
    return figure


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
