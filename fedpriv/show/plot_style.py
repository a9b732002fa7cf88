"""What all figures share: colours, markers, sizes, titles, legends.

Which swept axis of a figure is told by colour, by line style, and by panels: so that it stays readable.
"""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedpriv.show.summary import point_text, product, short_names, state_of, value_text
from fedpriv.study.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_LINES = 12  # in one panel
_ALGORITHM = "algorithm.name"
_LENGTH = "federation.rounds"  # runs of unequal length are best not drawn over each other


@dataclass(frozen=True)
class Layout:
    """How the lines of a figure differ.

    Colour and marker tell one axis, line styles the combinations of others; where that would be too many lines,
    columns and then rows of panels take an axis each.
    """

    colours: str | None
    """None if nothing is swept."""
    styles: list[dict[str, Any]]
    columns: str | None
    rows: str | None
    axes: Mapping[str, list[Any]]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of panels."""
        return len(self._values(self.rows)), len(self._values(self.columns))

    def panel_point(self, row: int, column: int) -> dict[str, Any]:
        """What all lines of a panel have in common."""
        places = ((self.rows, row), (self.columns, column))
        return {key: self.axes[key][place] for key, place in places if key is not None}

    def panel_of(self, point: Mapping[str, Any]) -> tuple[int, int]:
        """Row and column of the panel that shows a sweep point."""
        return self._place(self.rows, point) or 0, self._place(self.columns, point) or 0

    def colour_of(self, point: Mapping[str, Any]) -> int | None:
        """The number of the point's colour; None if nothing is swept."""
        return self._place(self.colours, point)

    def style_of(self, point: Mapping[str, Any]) -> int:
        """The number of the point's line style."""
        return self.styles.index({key: point[key] for key in self.styles[0]})

    def _values(self, key: str | None) -> Sequence[Any]:
        return [None] if key is None else self.axes[key]

    def _place(self, key: str | None, point: Mapping[str, Any]) -> int | None:
        return None if key is None else self.axes[key].index(point[key])


def layout_of(axes: Mapping[str, list[Any]], styled: str | None = None) -> Layout:
    """The layout for the axes that a figure has to tell apart; `styled` is told by line style if it is one.

    Algorithms get the colours; without them the axis with the most values does, the last of them if several do.
    """
    swept = {key: values for key, values in axes.items() if len(values) > 1}
    if not swept:
        return Layout(None, [{}], None, None, axes)
    apart = [styled] if styled in swept and len(swept) > 1 else []
    colours = _ALGORITHM if _ALGORITHM in swept else _largest(swept, [key for key in swept if key not in apart])
    rest = [key for key in swept if key not in (colours, *apart)]
    panels: list[str] = []
    while rest and len(panels) < 2 and _lines(swept, [colours, *apart, *rest]) > _MOST_LINES:
        panels.append(_LENGTH if _LENGTH in rest else _largest(swept, rest))
        rest.remove(panels[-1])
    columns, rows = [*panels, None, None][:2]
    told = {key: swept[key] for key in swept if key in apart or key in rest}
    return Layout(colours, product(told), columns, rows, axes)


def _largest(swept: Mapping[str, list[Any]], keys: Sequence[str]) -> str:
    most = max(len(swept[key]) for key in keys)
    return [key for key in keys if len(swept[key]) == most][-1]


def _lines(swept: Mapping[str, list[Any]], keys: Sequence[str]) -> int:
    return math.prod(len(swept[key]) for key in keys)


# Okabe & Ito's palette, which colour-blind readers can tell apart.  As many markers as colours and one more, so
# that (colour, marker) does not repeat before the 56th value; the marker is what is left in a grey print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (7, 2, 1, 2, 1, 2)), (0, (1, 4)))
_RAISED = str.maketrans("0123456789-−", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁻")
_TITLE = 110  # characters in a line of ten inches

SETTINGS: dict[Any, Any] = {
    "font.size": 10,
    "figure.titlesize": 10.5,
    "axes.titlesize": 10,
    "legend.fontsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "figure.constrained_layout.wspace": 0.06,
    "text.parse_math": False,  # labels are a user's, and a dollar is a dollar
}
HOLLOW: dict[str, Any] = {"markerfacecolor": "none", "markersize": 10, "markeredgewidth": 1.4}
"""Published values, drawn around the measured ones."""


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, *, share: bool = False
) -> tuple["Figure", list[list["Axes"]]]:
    """An empty figure, sizes in inches; `share` gives all panels one y axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=share).tolist()


def entitle(figure: "Figure", results: Results, *more: str) -> None:
    """A title that says what was run, how often, and whether it is complete; `more` is said beside it."""
    fixed = {key: values[0] for key, values in results.axes.items() if len(values) == 1}
    title = ", ".join(filter(None, [results.title or results.name, point_text(results, fixed), *more]))
    spread = f"mean ± standard deviation over {len(results.seeds)} seeds" if len(results.seeds) > 1 else "one seed"
    under = ", ".join(filter(None, [spread, state_of(results)]))
    line = int(_TITLE * figure.get_size_inches()[0] / 10)
    figure.suptitle("\n".join([*textwrap.wrap(title, line), *textwrap.wrap(under, line)]))


def colour(place: int) -> dict[str, Any]:
    """Colour and marker of the n-th value, as keywords of a line."""
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def look_of(layout: Layout, point: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of the line of a sweep point; without anything swept, markers would say nothing."""
    place = layout.colour_of(point)
    if place is None:
        return {**colour(0), "marker": None}
    return {**colour(place), "linestyle": _LINES[layout.style_of(point) % len(_LINES)]}


def explain(figure: "Figure", results: Results, layout: Layout, extra: Sequence[Any] = ()) -> None:
    """A legend to the right: what the colours and markers are, then the line styles, then `extra` handles."""
    from matplotlib.lines import Line2D

    names = short_names(results.axes)
    headings: list[str] = []
    handles: list[Line2D] = []
    if layout.colours is not None:
        headings.append(names[layout.colours])
        handles.append(Line2D([], [], linestyle="none", label=headings[0]))
        values = results.axes[layout.colours]
        handles += [Line2D([], [], **colour(n), label=value_text(value)) for n, value in enumerate(values)]
    if len(layout.styles) > 1:
        headings.append(", ".join(names[key] for key in layout.styles[0]))
        handles.append(Line2D([], [], linestyle="none", label=headings[-1]))
        for n, style in enumerate(layout.styles):
            label = ", ".join(map(value_text, style.values()))
            handles.append(Line2D([], [], color="0.25", linestyle=_LINES[n % len(_LINES)], label=label))
    handles += extra
    if not handles:
        return
    for text in figure.legend(handles=handles, loc="outside right center").get_texts():
        if text.get_text() in headings:
            text.set_fontweight("bold")


def name_panels(grid: Sequence[Sequence["Axes"]], results: Results, layout: Layout) -> None:
    """What each panel has in common, above it; labels of the axes only at the left and below."""
    for row, along in enumerate(grid):
        for column, axes in enumerate(along):
            axes.set_title(point_text(results, layout.panel_point(row, column)))
            if row < len(grid) - 1:
                axes.set_xlabel("")
            if column > 0:
                axes.set_ylabel("")


def write_powers(figure: "Figure") -> None:
    """Write the numbers of logarithmic axes, which matplotlib marks up as formulas, in plain characters."""
    from matplotlib.ticker import LogFormatterMathtext, LogFormatterSciNotation

    class Plain(LogFormatterSciNotation):
        def __call__(self, x: float, pos: int | None = None) -> str:
            text = re.sub(
                r"\$|\\mathdefault|\\times",
                lambda found: "×" if "times" in found[0] else "",
                super().__call__(x, pos),
            )
            return re.sub(r"\^\{(.*?)\}", lambda found: found[1].translate(_RAISED), text).strip("{}")

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            for read, write in (
                (axis.get_major_formatter, axis.set_major_formatter),
                (axis.get_minor_formatter, axis.set_minor_formatter),
            ):
                if isinstance(found := read(), LogFormatterMathtext):
                    write(Plain(labelOnlyBase=found.labelOnlyBase))
