"""Figures of rates: lines close to a power of their x, with fitted exponents, on logarithmic axes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedpriv.core.figures import format_with_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = {"solid": "-", "dashed": "--", "dotted": ":", "dash-dotted": "-.", "marks": "none"}


CONFIDENCE = 0.95


@dataclass(frozen=True)
class ExponentFit:
    """Exponent of a least-squares fit of y ~ x^exponent, with its 95 % interval by Student's t."""

    exponent: float
    half_width: float
    """Half of the width of the 95 % interval, infinite for two values."""
    value_count: int
    """Number of values that were fitted."""

    def text(self, digits: int) -> str:
        width = None if math.isinf(self.half_width) else self.half_width
        return format_with_spread(self.exponent, width, digits)


def fit_power(pairs: Sequence[tuple[float, float]]) -> ExponentFit | None:
    """Fit the exponent of y ~ x^exponent, or return None for fewer than two pairs.

    The fit is by least squares of ln y on ln x.

    Args:
        pairs: Pairs (x, y) of positive numbers, whose x are not all equal.
    """
    if len(pairs) < 2:
        return None
    from scipy import stats  # takes half a second

    line = stats.linregress(*np.log(np.array(pairs)).T)
    stderr = 0.0 if math.isnan(line.stderr) else float(line.stderr)  # NaN for equal y, which the fit meets
    half_width = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(pairs) - 2)) * stderr if len(pairs) > 2 else math.inf
    return ExponentFit(float(line.slope), half_width, len(pairs))


@dataclass(frozen=True)
class Line:
    """Values at increasing numbers, with the exponent that theory gives."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    theory: str = ""
    """Exponent of the theory as text, or "" without one."""
    fitted_from: float = 0.0
    """Smallest x whose value counts in the fit."""
    style: Literal["solid", "dashed", "dotted", "dash-dotted", "marks"] = "solid"
    color: int = 0
    """Number of the line's colour, 0 to 9."""

    @property
    def exponent(self) -> ExponentFit | None:
        """Least-squares exponent of y in x from `fitted_from` on, or None for fewer than two values."""
        pairs = [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if x >= self.fitted_from]
        return fit_power(pairs)

    def value_at(self, x: float) -> float | None:
        """Return the value at x, or None if the line has none there."""
        return dict(zip(self.xs, self.ys, strict=True)).get(x)


@dataclass(frozen=True)
class Triangle:
    """Right triangle on a drawing, whose slanted side has the exponent of the theory."""

    x: float
    """Left end."""
    y: float
    """Height of the slanted side at its left end."""
    exponent: float
    label: str
    width: float = 3.0
    """Factor between the left and the right end of the triangle."""


@dataclass(frozen=True)
class RateFigure:
    """Lines on one pair of logarithmic axes, with tables and notes.

    Attributes:
        title: Title of the drawing.
        x_label: Text of the x axis.
        y_label: Text of the y axis.
        lines: Lines of the figure.
        shown_xs: Numbers whose values the table shows.
        triangles: Exponents of the theory.
        level: Height of a horizontal line, such as a trivial bound, or None.
        tables: Further tables, each with its header first.
        notes: Sentences that limit what the figure shows.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    shown_xs: Sequence[float]
    triangles: Sequence[Triangle] = ()
    level: float | None = None
    tables: Sequence[Sequence[Sequence[str]]] = ()
    notes: Sequence[str] = field(default=())

    def table(self) -> list[list[str]]:
        """Return a header, and for each line its values at `shown_xs`, its exponent and that of theory."""
        header = ["", *(f"{x:g}" for x in self.shown_xs), "exponent", "theory"]
        return [header, *([*_format_values(line, self.shown_xs), line.theory] for line in self.lines)]

    def to_data(self) -> dict[str, Any]:
        """Return plain data of the figure for `--json`."""
        return {
            "title": self.title,
            "x": self.x_label,
            "y": self.y_label,
            "lines": [
                {
                    "name": line.name,
                    "xs": list(line.xs),
                    "ys": list(line.ys),
                    "exponent": fit.exponent if (fit := line.exponent) else None,
                    "half_width": fit.half_width if fit and math.isfinite(fit.half_width) else None,
                    "theory": line.theory,
                }
                for line in self.lines
            ],
            "tables": [list(map(list, table)) for table in self.tables],
            "notes": list(self.notes),
        }


def _format_values(line: Line, xs: Sequence[float]) -> list[str]:
    values = ["-" if (value := line.value_at(x)) is None else f"{value:.4g}" for x in xs]
    return [line.name, *values, "-" if (fit := line.exponent) is None else fit.text(3)]


def log_space(low: float, high: float, per_decade: int = 4) -> list[float]:
    """Return numbers from `low` to `high` with equal ratios, about `per_decade` for a factor of 10.

    Both ends are included, unless their ratio is so small that `low` is the only number.
    """
    count = round(math.log10(high / low) * per_decade) + 1
    return [float(x) for x in np.geomspace(low, high, count)]


def make_line(name: str, function: Callable[[float], float], xs: Sequence[float], **look: Any) -> Line:
    """Return the line of a function at these numbers."""
    return Line(name, xs, [function(x) for x in xs], **look)


def draw(figure: RateFigure, path: Path) -> None:
    """Draw the figure into a file.

    Args:
        figure: The figure.
        path: File to write, whose ending (.png, .svg or .pdf) is its format.

    Raises:
        InputError: The ending is another one, or the file cannot be written.
    """
    from fedpriv.show.looks import format_tick
    from fedpriv.show.plots import plot_settings, save_figure  # imported late: plans and torch come with it

    with plot_settings():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, NullFormatter

        drawing = Figure(figsize=(7.2, 5.4), layout="constrained")
        axes = drawing.add_subplot()
        _draw_lines(axes, figure)
        axes.set(xscale="log", yscale="log", xlabel=figure.x_label, ylabel=figure.y_label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
            axis.set_minor_formatter(NullFormatter())
        # A remark in brackets goes to a line of its own.
        drawing.suptitle(figure.title.replace(" (", "\n("))
        drawing.legend(loc="outside lower center", ncols=2, fontsize=8)
        save_figure(drawing, path, "rates")


def _draw_lines(axes: "Axes", figure: RateFigure) -> None:
    """Draw the lines, then the level and the triangles.

    A line's label for the legend has its fitted exponent, if there is one.  The slanted side of a triangle is a
    line y ~ x^exponent, with the exponent of the theory.
    """
    for line in figure.lines:
        fit = line.exponent
        label = line.name if fit is None else f"{line.name}: {fit.text(3)}"
        marker = "x" if line.style == "marks" else None
        axes.plot(
            line.xs, line.ys, linestyle=_DASHES[line.style], marker=marker, color=f"C{line.color}", label=label
        )
    if figure.level is not None:
        axes.axhline(figure.level, color="0.5", linewidth=0.8)
    for triangle in figure.triangles:
        right, top = triangle.x * triangle.width, triangle.y * triangle.width**triangle.exponent
        axes.plot([triangle.x, right, right, triangle.x], [triangle.y, triangle.y, top, triangle.y], "0.4", lw=0.8)
        axes.text(right * 1.06, math.sqrt(triangle.y * top), triangle.label, fontsize=8, va="center")
