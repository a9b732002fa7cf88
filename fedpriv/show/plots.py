"""The pen for files: a run's charts as PNG and SVG by matplotlib, the same bytes for the same results."""

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.core.errors import InputError
from fedpriv.core.files import write_bytes
from fedpriv.noise.trust import find_trust
from fedpriv.show.charts import Chart, Panel, Series, make_charts
from fedpriv.show.looks import DASHES, Look, format_tick
from fedpriv.show.statement import load_audit
from fedpriv.show.summary import describe_state, format_point
from fedpriv.study.results import Results, read_claims, read_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MARKERS_PER_LINE = 6  # so many markers on a line, about
_CHARACTERS_PER_INCH = 11  # characters of a title in an inch
_FILE_SUFFIXES = (".png", ".svg", ".pdf")
_RC_PARAMS: dict[Any, Any] = {
    "font.size": 10,
    "figure.titlesize": 10.5,
    "axes.titlesize": 10,
    "legend.fontsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.handlelength": 3.4,
    "text.parse_math": False,  # labels are a user's, and a dollar is a dollar
}


def plot_run(folder: Path) -> list[Path]:
    """Draw what a run's finished cells allow into folder/plots; returns the files written.

    | figure | when |
    |---|---|
    | curves, or one for each metric | always |
    | privacy | μ, or ε where a cell has no μ, varies |
    | clipped | several settings clip something, and not everything |
    | noise | there is a guarantee |
    | tradeoff | there is a μ, and its curve can be told from the axes |

    InputError if the folder holds no run, or one without a finished cell.
    """
    results = read_claims(folder)
    if not results.cells:
        raise InputError(f"{folder}: no finished cell to draw yet; wait for one, or go on with --resume")
    return [
        path
        for name, charts in _charts_by_file(folder, results).items()
        for path in draw_charts(charts, folder / "plots", name, plot_title(results))
    ]


def render_svgs(folder: Path, results: Results) -> dict[str, str]:
    """The same figures as SVG texts by name, without an XML prologue; ids of different figures differ."""
    with _plot_settings():
        texts = {
            name: _render_bytes(make_figure(charts, plot_title(results)), "svg", name).decode()
            for name, charts in _charts_by_file(folder, results).items()
        }
    return {name: text[text.index("<svg") :] for name, text in texts.items()}


def draw_charts(charts: Sequence[Chart], folder: Path, name: str, title: str = "") -> list[Path]:
    """Draw charts into one figure and write it as folder/`name`.png and .svg; returns both paths."""
    with _plot_settings():
        figure = make_figure(charts, title)
        paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            write_bytes(path, _render_bytes(figure, path.suffix[1:], name))
    return paths


def check_plot_path(path: Path) -> None:
    """InputError for a file whose kind is not known, or that is in no folder."""
    if path.suffix not in _FILE_SUFFIXES:
        raise InputError(f"--plot {path}: a figure is a file that ends with {', '.join(_FILE_SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: the figure cannot be written there: {path.parent} is no folder")


def save_chart(chart: Chart, path: Path) -> None:
    """Draw a chart into a file; InputError if it cannot be written or its kind is not known."""
    check_plot_path(path)
    with _plot_settings():
        try:
            path.write_bytes(_render_bytes(make_figure([chart]), path.suffix[1:], chart.key))
        except OSError as error:
            raise InputError(f"--plot {path}: the figure cannot be written there: {error}") from None


def plot_title(results: Results) -> str:
    """What was run, how often, and what a reader has to know before any figure."""
    fixed = format_point(results, {key: values[0] for key, values in results.axes.items() if len(values) == 1})
    trusts = {cell["trust"] for cell in results.cells}
    trust = find_trust(trusts.pop()).title if len(trusts) == 1 and "algorithm.trust" not in results.axes else ""
    spread = f"mean ± standard deviation over {len(results.seeds)} seeds" if len(results.seeds) > 1 else "one seed"
    lines = [results.title or results.name, fixed, trust], [spread, describe_state(results)]
    return "\n".join(", ".join(filter(None, parts)) for parts in lines)


def _charts_by_file(folder: Path, results: Results) -> dict[str, list[Chart]]:
    """Charts by the name of their file: curves of one panel, and the two of noise, share one."""
    found: dict[str, list[Chart]] = {}
    for chart in make_charts(results, list(read_history(folder)), load_audit(folder)):
        curves = "curves" if len(chart.panels) == 1 else chart.key.removeprefix("test_")
        name = {"noise-in-mean": "noise"}.get(
            chart.key, curves if chart.caption.endswith("round by round") else chart.key
        )
        found.setdefault(name, []).append(chart)
    return found


def make_figure(charts: Sequence[Chart], title: str = "") -> "Figure":
    """The panels of some charts in one figure, under a title and beside one legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = [(chart, panel) for chart in charts for panel in chart.panels]
    columns = 2 if len(places) in (2, 4) else min(len(places), 3)
    rows = math.ceil(len(places) / columns)
    tall = max(1.4 + 0.3 * len(chart.rows) if chart.rows and len(places) == 1 else 3.6 for chart in charts)
    figure = Figure(
        figsize=(2.4 + (5.0 if columns == 1 else 4.2) * columns, 0.7 + tall * rows), layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = [axes for along in figure.subplots(rows, columns, squeeze=False) for axes in along]
    for axes, (chart, panel) in zip(grid, places, strict=False):
        _fill_axes(axes, chart, panel)
        if len(charts) > 1 or panel.name:
            axes.set_title("\n".join(textwrap.wrap(panel.name or chart.caption, 42)))
    for axes in grid[len(places) :]:
        axes.remove()
    line = int(_CHARACTERS_PER_INCH * figure.get_size_inches()[0])
    said = [*title.splitlines(), *(charts[0].caption.splitlines() if len(charts) == 1 else [])]
    figure.suptitle("\n".join(part for each in said for part in textwrap.wrap(each, line)))
    notes = dict.fromkeys(chart.note for chart in charts if chart.note)
    figure.supxlabel("\n".join(part for note in notes for part in textwrap.wrap(note, line)), fontsize=8.5)
    _add_legend(figure, charts)
    return figure


def _fill_axes(axes: "Axes", chart: Chart, panel: Panel) -> None:
    for rank, series in enumerate(panel.series):
        _draw_series(axes, chart, series, rank)
    across, up = chart.x_scale(panel, 0.0, 1.0), chart.y_scale(0.0, 1.0)
    for scale, change, log in ((across, axes.set_xscale, chart.log_x), (up, axes.set_yscale, chart.log_y)):
        change("log" if log and scale.logarithmic else "linear")
    axes.set(xlim=(across.low, across.high), ylim=(up.low, up.high), xlabel=chart.x_label, ylabel=chart.y_label)
    ticks = _spaced_ticks(chart.ticks or across.ticks(6), across.position)
    axes.set_xticks(ticks, map(format_tick, ticks))
    if chart.rows:
        axes.set_yticks(range(len(chart.rows)), ["\n".join(textwrap.wrap(row, 40)) for row in chart.rows])
    else:
        axes.set_yticks(up.ticks(6), map(format_tick, up.ticks(6)))
    axes.minorticks_off()


def _spaced_ticks(ticks: Sequence[float], place: Any) -> list[float]:
    """The ticks whose labels do not overlap."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or place(tick) - place(kept[-1]) > 0.025 * (1 + len(format_tick(tick))):
            kept.append(tick)
    return kept


def _draw_series(axes: "Axes", chart: Chart, series: Series, rank: int) -> None:
    look, marks = _line_style(series), series.marks
    xs, ys, spreads = ([getattr(mark, name) for mark in marks] for name in ("x", "y", "spread"))
    step = max(1, math.ceil(len(xs) / _MARKERS_PER_LINE)) if series.line else 1
    hollow = {"markerfacecolor": "none", "markersize": 10, "markeredgewidth": 1.4}
    axes.plot(xs, ys, markevery=(rank % step, step), label=series.name, clip_on=False, **look)
    if any(spreads) and series.line and len(xs) > 1:
        low, high = ([y + side * d for y, d in zip(ys, spreads, strict=True)] for side in (-1, 1))
        axes.fill_between(xs, low, high, color=series.look.light, alpha=0.13, linewidth=0)
    elif any(spreads):
        xerr, yerr = (spreads, None) if chart.rows else (None, spreads)
        axes.errorbar(xs, ys, yerr, xerr, linestyle="none", color=series.look.light, capsize=2)
    if series.published:
        places = zip(*((mark.x, mark.y) for mark in series.published), strict=True)
        axes.plot(*map(list, places), **{**look, **hollow, "linestyle": "none"})


def _line_style(series: Series) -> dict[str, Any]:
    """A series' look as keywords of a line."""
    dash = DASHES[series.look.dash]
    found: dict[str, Any] = {
        "color": series.look.light,
        "linewidth": 1.6,
        "linestyle": "none" if not series.line else (0, [each / 2 for each in dash]) if dash else "-",
        "marker": _MARKERS[series.look.marker] if series.dots else None,
        "markersize": 5,
    }
    return found | ({"markerfacecolor": "none", "markersize": 9} if series.hollow else {})


def _add_legend(figure: "Figure", charts: Sequence[Chart]) -> None:
    """A legend to the right of what differs, and of hollow marks."""
    from matplotlib.lines import Line2D

    handles: dict[str, dict[str, Any]] = {}
    for series in (series for chart in charts for series in chart.legend):
        handles.setdefault(series.name, _line_style(series))
    if any(chart.has_published for chart in charts):
        handles["published"] = _line_style(Series("", Look("#404040", "#404040"), [], line=False, hollow=True))
    if not handles:
        return
    lines = [Line2D([], [], **look) for look in handles.values()]
    # Names are set afterwards: a legend would leave out those that begin with "_".
    below = len(charts) == 1 and bool(charts[0].rows)  # the names of rows are to the left already
    place = {"loc": "outside lower center", "ncols": 3} if below else {"loc": "outside right center"}
    legend = figure.legend(lines, [" "] * len(lines), **place)
    for text, name in zip(legend.get_texts(), handles, strict=True):
        text.set_text("\n".join(textwrap.wrap(name, 34)))


def _render_bytes(figure: "Figure", kind: str, name: str) -> bytes:
    """The figure as a file's bytes: without a date, and with ids made from its name."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


@contextmanager
def _plot_settings() -> Iterator[None]:
    """A user's matplotlibrc must not change a figure, and drawing must not change the user's settings."""
    from matplotlib import rc_context, rcdefaults, rcParams

    with rc_context():
        rcdefaults()
        rcParams.update(_RC_PARAMS)
        yield
