"""Charts as PNG, SVG and PDF by matplotlib, without dates.

A chart has panels, a panel has series, and a series has marks: points (x, y).  Published marks are values that a
paper reports.  A chart may have named rows in place of numbers on its vertical axis.  A figure can have the panels
of several charts.
"""

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.core.errors import InputError, refuse
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
_MARKERS_PER_LINE = 6  # approximate
_CHARACTERS_PER_INCH = 11  # characters of a title in an inch, approximate
_FILE_SUFFIXES = (".png", ".svg", ".pdf")
_MIN_PANEL_WIDTH, _MIN_LEGEND_WIDTH = 2.0, 1.6  # inches
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
    "text.parse_math": False,  # labels come from a user, and a dollar sign starts no formula
}

_SMALL_RC_PARAMS: dict[Any, Any] = {
    **dict.fromkeys(("font.size", "figure.titlesize", "axes.titlesize", "legend.fontsize"), 7.5),
    "legend.handlelength": 2.2,
    "pdf.fonttype": 42,
}


def plot_run(
    folder: Path, kinds: Sequence[str] = ("png", "svg"), *, with_title: bool = True, width: float | None = None
) -> list[Path]:
    """Draw the figures of a run's finished cells into folder/plots, and return the paths.

    | figure | when |
    |---|---|
    | curves, and one for each metric whose chart has several panels | there are evaluations |
    | privacy | the privacy level (`privacy_key`) differs in its first three digits |
    | clipped | there are several settings, and fractions of clipped increments that are not all 0 or all 1 |
    | noise | a cell has a μ, and noise that can be compared (`make_noise_charts`) |
    | tradeoff | there is a μ whose curve can be told from the axes, or an audit |
    | key of an add-on's chart | the add-on has a chart of the run |

    Args:
        folder: Folder of the run.
        kinds: Formats, each of them png, svg or pdf.
        with_title: Whether figures have a title.  Without it they have one only for differing or missing
                cells.
        width: Width of every figure in inches, from 2 to 20, or None for a width that fits its panels.

    Raises:
        InputError: If the folder has no results that can be read, no finished cell or no history, or a damaged
            history or audit, or if a format or the width is not allowed.
    """
    refuse(
        {
            f"--format {kind}: a figure is one of png, svg and pdf": f".{kind}" not in _FILE_SUFFIXES
            for kind in kinds
        }
        | {
            f"--width {width:g}: expected inches, from 2 to 20, such as 3.25 for a column of a paper": (
                not 2.0 <= width <= 20.0
            )
            for width in (2.0 if width is None else width,)
        }
    )
    results = read_claims(folder)
    if not results.cells:
        raise InputError(f"{folder}: no finished cell to draw yet; wait for one, or go on with --resume")
    return [
        path
        for name, charts in _charts_by_file(folder, results).items()
        for path in draw_charts(
            charts,
            folder / "plots",
            name,
            plot_title(results) if with_title else describe_state(results) or None,
            kinds,
            width,
        )
    ]


def render_svgs(folder: Path, results: Results) -> dict[str, str]:
    """Render the figures of `plot_run` as SVG texts by name, without an XML prologue.

    References within a figure are to ids of its own, but for glyphs, so that one page can hold all figures.

    Raises:
        InputError: If the folder has no history, or a damaged history or audit.
    """
    with plot_settings():
        texts = {
            name: _render_bytes(make_figure(charts, plot_title(results)), "svg", name).decode()
            for name, charts in _charts_by_file(folder, results).items()
        }
    return {name: text[text.index("<svg") :] for name, text in texts.items()}


def draw_charts(
    charts: Sequence[Chart],
    folder: Path,
    name: str,
    title: str | None = "",
    kinds: Sequence[str] = ("png", "svg"),
    width: float | None = None,
) -> list[Path]:
    """Draw charts into one figure, write it as folder/`name`.png and so on, and return the paths.

    Args:
        charts: Charts, whose panels share the figure.
        folder: Folder of the files.
        name: Name of the files without a suffix, and seed of the ids in the SVG.
        title: Title above all panels, of one or several lines, or None for a figure without title and notes
            (`make_figure`).
        kinds: Formats, which are the suffixes of the files.
        width: Width in inches, or None for one that fits the panels.  Letters are smaller for a given width.
    """
    with plot_settings(small=width is not None):
        figure = make_figure(charts, title, width)
        paths = [folder / f"{name}.{kind}" for kind in kinds]
        for path in paths:
            write_bytes(path, _render_bytes(figure, path.suffix[1:], name))
    return paths


def check_plot_path(path: Path) -> None:
    """Check the suffix and the folder of a path for a figure.

    Raises:
        InputError: If the suffix is unknown, or the folder does not exist.
    """
    if path.suffix not in _FILE_SUFFIXES:
        raise InputError(f"--plot {path}: a figure is a file that ends with {', '.join(_FILE_SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: the figure cannot be written there: {path.parent} is no folder")


def save_chart(chart: Chart, path: Path) -> None:
    """Draw a chart into a file.

    Raises:
        InputError: If the file cannot be written, or its suffix is unknown.
    """
    with plot_settings():
        save_figure(make_figure([chart]), path, chart.key)


def save_figure(figure: "Figure", path: Path, name: str) -> None:
    """Write a figure into a file, within `plot_settings`.

    Args:
        figure: Figure of matplotlib.
        path: File to write, whose suffix is its format.
        name: Seed of the ids in an SVG.

    Raises:
        InputError: If the file cannot be written, or its suffix is unknown.
    """
    check_plot_path(path)
    try:
        path.write_bytes(_render_bytes(figure, path.suffix[1:], name))
    except OSError as error:
        raise InputError(f"--plot {path}: the figure cannot be written there: {error}") from None


def plot_title(results: Results) -> str:
    """Make the title: run, swept keys with one value, a common trust, seeds, differing or missing cells."""
    fixed = format_point(results, {key: values[0] for key, values in results.axes.items() if len(values) == 1})
    trusts = {cell["trust"] for cell in results.cells}
    trust = find_trust(trusts.pop()).title if len(trusts) == 1 and "algorithm.trust" not in results.axes else ""
    seed_note = (
        f"mean ± standard deviation over {len(results.seeds)} seeds" if len(results.seeds) > 1 else "one seed"
    )
    lines = [results.title or results.name, fixed, trust], [seed_note, describe_state(results)]
    return "\n".join(", ".join(filter(None, parts)) for parts in lines)


def _charts_by_file(folder: Path, results: Results) -> dict[str, list[Chart]]:
    """Group charts by the name of their file.

    Metrics by rounds share the file "curves" if they have one panel, and charts of noise the file "noise".
    """
    charts_by_name: dict[str, list[Chart]] = {}
    for chart in make_charts(results, list(read_history(folder)), load_audit(folder)):
        curves = "curves" if len(chart.panels) == 1 else chart.key.removeprefix("test_")
        name = {"noise-in-mean": "noise"}.get(
            chart.key, curves if chart.caption.endswith("round by round") else chart.key
        )
        charts_by_name.setdefault(name, []).append(chart)
    return charts_by_name


def make_figure(charts: Sequence[Chart], title: str | None = "", width: float | None = None) -> "Figure":
    """Draw the panels of charts into one figure, with a title, a legend, and the charts' notes.

    Args:
        charts: One chart or more, whose panels share the figure.
        title: Title above the panels, which a single chart's caption follows, or None for neither title nor notes.
        width: Width in inches, for a figure without notes and with the legend below, or None for one that fits the
            panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Two and four panels fill two columns, and other numbers up to three, as far as the width allows.
    chart_panels = [(chart, panel) for chart in charts for panel in chart.panels]
    columns = 2 if len(chart_panels) in (2, 4) else min(len(chart_panels), 3)
    columns = columns if width is None else min(columns, max(1, int(width / _MIN_PANEL_WIDTH)))
    rows = math.ceil(len(chart_panels) / columns)
    # Sizes are in inches.  A single panel with named rows has a height for each row.
    row_height = max(
        1.4 + 0.3 * len(chart.rows) if chart.rows and len(chart_panels) == 1 else 3.6 for chart in charts
    )
    figure = Figure(
        figsize=(2.4 + (5.0 if columns == 1 else 4.2) * columns, 0.7 + row_height * rows)
        if width is None
        else (width, 0.5 + rows * min(row_height, 0.8 * width / columns)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = [axes for axes_row in figure.subplots(rows, columns, squeeze=False) for axes in axes_row]
    # The grid may have more axes than there are panels.
    for axes, (chart, panel) in zip(grid, chart_panels, strict=False):
        _fill_axes(axes, chart, panel)
        if len(charts) > 1 or panel.name:
            axes.set_title("\n".join(textwrap.wrap(panel.name or chart.caption, 42)))
    for axes in grid[len(chart_panels) :]:
        axes.remove()
    line_length = int(_CHARACTERS_PER_INCH * figure.get_size_inches()[0])
    if title is not None:
        title_lines = [*title.splitlines(), *(charts[0].caption.splitlines() if len(charts) == 1 else [])]
        figure.suptitle("\n".join(wrapped for line in title_lines for wrapped in textwrap.wrap(line, line_length)))
        notes = dict.fromkeys(chart.note for chart in charts if chart.note and width is None)
        figure.supxlabel(
            "\n".join(wrapped for note in notes for wrapped in textwrap.wrap(note, line_length)), fontsize=8.5
        )
    _add_legend(figure, charts, is_below=width is not None or (len(charts) == 1 and bool(charts[0].rows)))
    return figure


def _fill_axes(axes: "Axes", chart: Chart, panel: Panel) -> None:
    """Draw a panel's series, and set scales, limits, labels and ticks of its axes."""
    for rank, series in enumerate(panel.series):
        _draw_series(axes, chart, series, rank)
    horizontal, vertical = chart.x_scale(panel, 0.0, 1.0), chart.y_scale(0.0, 1.0)
    for scale, set_scale, log in (
        (horizontal, axes.set_xscale, chart.log_x),
        (vertical, axes.set_yscale, chart.log_y),
    ):
        set_scale("log" if log and scale.logarithmic else "linear")
    axes.set(
        xlim=(horizontal.low, horizontal.high),
        ylim=(vertical.low, vertical.high),
        xlabel=chart.x_label,
        ylabel=chart.y_label,
    )
    ticks = _spaced_ticks(chart.ticks or horizontal.ticks(6), horizontal.position)
    axes.set_xticks(ticks, map(format_tick, ticks))
    if chart.rows:
        axes.set_yticks(range(len(chart.rows)), ["\n".join(textwrap.wrap(row, 40)) for row in chart.rows])
    else:
        axes.set_yticks(vertical.ticks(6), map(format_tick, vertical.ticks(6)))
    axes.minorticks_off()


def _spaced_ticks(ticks: Sequence[float], position: Any) -> list[float]:
    """Return the ticks whose labels do not overlap one before, with `position` from 0 to 1 along the axis."""
    spaced_ticks: list[float] = []
    for tick in ticks:
        if not spaced_ticks or position(tick) - position(spaced_ticks[-1]) > 0.025 * (1 + len(format_tick(tick))):
            spaced_ticks.append(tick)
    return spaced_ticks


def _draw_series(axes: "Axes", chart: Chart, series: Series, rank: int) -> None:
    """Draw a series' line, spread and published marks, with markers shifted by its rank in the panel.

    The spread is a band along a line of two marks or more, else a bar at each mark: along x in a chart with named
    rows, and along y in other charts.
    """
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
        columns = zip(*((mark.x, mark.y) for mark in series.published), strict=True)
        axes.plot(*map(list, columns), **{**look, **hollow, "linestyle": "none"})


def _line_style(series: Series) -> dict[str, Any]:
    """Return a series' look as keyword arguments of a matplotlib line."""
    dash = DASHES[series.look.dash]
    style: dict[str, Any] = {
        "color": series.look.light,
        "linewidth": 1.6,
        "linestyle": "none" if not series.line else (0, [length / 2 for length in dash]) if dash else "-",
        "marker": _MARKERS[series.look.marker] if series.dots else None,
        "markersize": 5,
    }
    return style | ({"markerfacecolor": "none", "markersize": 9} if series.hollow else {})


def _add_legend(figure: "Figure", charts: Sequence[Chart], *, is_below: bool) -> None:
    """Add a legend of the series, and of published values, on the right or below the panels."""
    from matplotlib.lines import Line2D

    handles: dict[str, dict[str, Any]] = {}
    for series in (series for chart in charts for series in chart.legend):
        handles.setdefault(series.name, _line_style(series))
    if any(chart.has_published for chart in charts):
        handles["published"] = _line_style(Series("", Look("#404040", "#404040"), [], line=False, hollow=True))
    if not handles:
        return
    lines = [Line2D([], [], **look) for look in handles.values()]
    # Names are set afterwards, because a legend leaves out labels that begin with "_".
    columns = min(3, max(1, int(figure.get_size_inches()[0] / _MIN_LEGEND_WIDTH)))
    position = {"loc": "outside lower center", "ncols": columns} if is_below else {"loc": "outside right center"}
    legend = figure.legend(lines, [" "] * len(lines), **position)
    for text, name in zip(legend.get_texts(), handles, strict=True):
        text.set_text("\n".join(textwrap.wrap(name, 34)))


def _render_bytes(figure: "Figure", kind: str, name: str) -> bytes:
    """Render the figure as bytes of a file, without a date.  The name is the seed of ids in an SVG."""
    from matplotlib import rc_context

    buffer, dates = io.BytesIO(), {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=dates.get(kind))
    return buffer.getvalue()


@contextmanager
def plot_settings(*, small: bool = False) -> Iterator[None]:
    """Set matplotlib's parameters for a block, independent of the user's matplotlibrc, and restore them.

    `small` is for figures of a given width, whose letters are smaller.
    """
    from matplotlib import rc_context, rcdefaults, rcParams

    with rc_context():
        rcdefaults()
        rcParams.update({**_RC_PARAMS, **(_SMALL_RC_PARAMS if small else {})})
        yield
