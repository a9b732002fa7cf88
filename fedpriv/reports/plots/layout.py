"""Which swept axis of a figure is told by colour, by line style, and by panels: so that it stays readable."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedpriv.reports.summary import product

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
