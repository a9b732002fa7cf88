"""Pictures of a run as PNG and SVG: learning curves with bands over seeds, and accuracy against privacy."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.errors import InputError
from fedpriv.reports.results import Results, read_history, read_results
from fedpriv.reports.summary import (
    METRICS,
    Metric,
    cells_at,
    incomplete,
    point_text,
    points,
    short_names,
    summarize,
    value_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette, which colour-blind readers can tell apart.  As many markers as colours and one more, so
# that (colour, marker) does not repeat before the 56th value; the marker is what is left in a grey print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (7, 2, 1, 2, 1, 2)), (0, (1, 4)))
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "figure.titlesize": 10.5,
    "legend.fontsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "figure.constrained_layout.wspace": 0.06,
    "svg.hashsalt": "fedpriv",
}
_HOLLOW: dict[str, Any] = {"markerfacecolor": "none", "markersize": 10, "markeredgewidth": 1.4}
_ACCURACY = next(metric for metric in METRICS if metric.key == "test_accuracy")
_APART = 0.014  # between neighbouring lines, as a share of the axis
_MARKS = 5  # on a curve, about
_TICKS = 8  # so many values of μ have a tick each
_TITLE = 110  # characters in a line of ten inches
_PRIVACY_KEYS = ("privacy.mu", "privacy.rho", "privacy.zcdp", "privacy.epsilon")


@dataclass(frozen=True)
class _Looks:
    """How the lines of the curves differ: colour and marker by one axis, the line's style by all others."""

    colours: str | None
    """The axis with the most values, the last of them if they are several; None if nothing is swept."""
    values: list[Any]
    styles: list[dict[str, Any]]

    def of(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of a line."""
        if self.colours is None:
            return {**_colour(0), "marker": None}
        others = {key: point[key] for key in self.styles[0]}
        style = _LINES[self.styles.index(others) % len(_LINES)]
        return {**_colour(self.values.index(point[self.colours])), "linestyle": style}


def plot_run(folder: Path) -> list[Path]:
    """Draw what a run's finished cells allow into folder/plots.

    curves.png and .svg are always drawn, privacy.png and .svg if μ varies; returns the files written, the same
    bytes for the same results.  InputError if the folder holds no run, or one without a finished cell.
    """
    from matplotlib import rc_context, rcdefaults, rcParams

    results = read_results(folder)
    if not results.cells:
        raise InputError(f"{folder}: no finished cell to draw yet; wait for one, or go on with --resume")
    target = folder / "plots"
    target.mkdir(exist_ok=True)
    with rc_context():
        rcdefaults()  # a user's matplotlibrc must not change a figure
        rcParams.update(_STYLE)
        figures = {"curves": _curves(results, list(read_history(folder)))}
        if len(_mus(results)) > 1:
            figures["privacy"] = _privacy(results)
        return [path for name, figure in figures.items() for path in _save(figure, target / name)]


def _save(figure: "Figure", stem: Path) -> list[Path]:
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.savefig(png, dpi=150)
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def _curves(results: Results, history: Sequence[Mapping[str, Any]]) -> "Figure":
    """Loss and accuracy against the round: a line a sweep point, a band of ± one standard deviation over seeds."""
    figure, panels = _panels(results, 2, 9.4, 4.2)
    looks = _looks(results)
    totals = {cell["rounds"] for cell in results.cells}
    for axes, metric in zip(panels, METRICS, strict=True):
        for rank, point in enumerate(points(results)):
            ids = {cell["cell"]: cell["rounds"] for cell in cells_at(results, point)}
            lines = [
                (line["round"] * (1 if len(totals) == 1 else 100 / ids[line["cell"]]), line)
                for line in history
                if line["cell"] in ids
            ]
            if lines:
                _curve(axes, lines, metric, looks.of(point), rank)
        axes.set_xlabel("round" if len(totals) == 1 else "share of the rounds (%)")
        axes.set_ylabel(metric.title)
        axes.set_xlim(left=0)
    _explain(figure, results, looks)
    return figure


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


def _looks(results: Results) -> _Looks:
    swept = {key: values for key, values in results.axes.items() if len(values) > 1}
    if not swept:
        return _Looks(None, [], [{}])
    most = max(map(len, swept.values()))
    colours = [key for key, values in swept.items() if len(values) == most][-1]
    styles: list[dict[str, Any]] = []
    for point in points(results):
        others = {key: point[key] for key in swept if key != colours}
        if others not in styles:
            styles.append(others)
    return _Looks(colours, swept[colours], styles)


def _explain(figure: "Figure", results: Results, looks: _Looks) -> None:
    """A legend to the right: first what the colours and markers are, then what the line styles are."""
    from matplotlib.lines import Line2D

    if looks.colours is None:
        return

    names = short_names(results.axes)
    headings = [names[looks.colours]]
    handles = [Line2D([], [], linestyle="none", label=headings[0])]
    handles += [Line2D([], [], **_colour(n), label=value_text(value)) for n, value in enumerate(looks.values)]
    if len(looks.styles) > 1:
        headings.append(", ".join(names[key] for key in looks.styles[0]))
        handles.append(Line2D([], [], linestyle="none", label=headings[1]))
        for n, style in enumerate(looks.styles):
            label = ", ".join(map(value_text, style.values()))
            handles.append(Line2D([], [], color="0.25", linestyle=_LINES[n % len(_LINES)], label=label))
    for text in figure.legend(handles=handles, loc="outside right center").get_texts():
        if text.get_text() in headings:
            text.set_fontweight("bold")


def _privacy(results: Results) -> "Figure":
    """Accuracy against μ: a line for each number of silos, trust and other swept value."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    figure, (axes,) = _panels(results, 1, 6.4, 4.8)
    lines: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for cell in sorted(results.cells, key=lambda cell: int(cell["silos"])):
        if cell["mu"] is not None:
            lines.setdefault(_line_of(results, cell), []).append(cell)
    mus = _mus(results)
    trusts = list(dict.fromkeys(line[-1] for line in lines))
    settings = list(dict.fromkeys(line[:-1] for line in lines))
    hollow = False
    for place, (line, cells) in enumerate(lines.items()):
        colour = settings.index(line[:-1]) if len(settings) > 1 else trusts.index(line[-1])
        style = _LINES[trusts.index(line[-1]) % len(_LINES)]
        look = {**_colour(colour), "linestyle": style, "label": ", ".join(line)}
        # Lines at the same μ stand side by side, so that no error bar hides another.
        shift = (max(mus.values()) / min(mus.values())) ** (_APART * (place - (len(lines) - 1) / 2))
        hollow |= _privacy_line(axes, results, cells, shift, look)
    axes.set_xscale("log")
    if len(mus) <= _TICKS:
        axes.set_xticks(list(mus.values()), list(mus))
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.minorticks_off()
    axes.set_xlabel("μ of Gaussian differential privacy (smaller is more private)")
    axes.set_ylabel(_ACCURACY.title)
    handles = axes.get_legend_handles_labels()[0]
    published = Line2D([], [], color="0.25", linestyle="none", label="published", **_HOLLOW, marker="o")
    figure.legend(handles=[*handles, *([published] if hollow else [])], loc="outside lower center", ncols=2)
    return figure


def _mus(results: Results) -> dict[str, float]:
    """The μ of all cells by the text that is shown: rounding in an accountant makes no second value."""
    return {f"{cell['mu']:.3g}": cell["mu"] for cell in results.cells if cell["mu"] is not None}


def _line_of(results: Results, cell: Mapping[str, Any]) -> tuple[str, ...]:
    """What the cells of one line have in common, in words; the trust comes last."""
    here = ("federation.silos", "algorithm.trust", *_PRIVACY_KEYS)
    others = {key: value for key, value in cell["point"].items() if key not in here}
    silos = f"{cell['silos']} silo{'s' if cell['silos'] > 1 else ''}"
    return (silos, *([point_text(results, others)] if others else []), f"{cell['trust']} server")


def _privacy_line(
    axes: "Axes", results: Results, cells: Sequence[Mapping[str, Any]], shift: float, look: Mapping[str, Any]
) -> bool:
    """Draw one line; whether there was a published value to draw beside it."""
    by_mu: dict[float, list[Mapping[str, Any]]] = {}
    for cell in cells:
        by_mu.setdefault(cell["mu"], []).append(cell)
    summaries = {mu * shift: summary for mu in sorted(by_mu) if (summary := summarize(by_mu[mu], _ACCURACY))}
    spreads = [summary.std or 0.0 for summary in summaries.values()]
    axes.errorbar(
        list(summaries),
        [summary.mean for summary in summaries.values()],
        yerr=spreads if any(spreads) else None,
        capsize=3,
        **look,
    )
    known = {
        mu * shift: value
        for mu, (cell, *_) in by_mu.items()
        if results.published and (value := results.published.value(_ACCURACY.key, cell["point"])) is not None
    }
    axes.plot(list(known), list(known.values()), color=look["color"], marker=look["marker"], ls="none", **_HOLLOW)
    return bool(known)


def _panels(results: Results, count: int, width: float, height: float) -> tuple["Figure", list["Axes"]]:
    """An empty figure, sizes in inches, whose title says what was run, how often, and whether it is complete."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    fixed = {key: values[0] for key, values in results.axes.items() if len(values) == 1}
    title = ", ".join(filter(None, [results.title or results.name, point_text(results, fixed)]))
    spread = f"mean ± standard deviation over {len(results.seeds)} seeds" if len(results.seeds) > 1 else "one seed"
    under = ", ".join(filter(None, [spread, incomplete(results)]))
    figure.suptitle("\n".join([*textwrap.wrap(title, int(_TITLE * width / 10)), under]))
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _colour(place: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.6,
    }
