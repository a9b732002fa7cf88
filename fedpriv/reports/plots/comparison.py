"""Mechanisms side by side: what their noise comes to, over what no mechanism falls below."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedpriv.errors import InputError
from fedpriv.privacy.comparison import Table
from fedpriv.reports.plots.style import SETTINGS, colour, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
