"""Tables and sentences on a terminal: as wide as it is, never cut inside a number."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 160  # of piped output, which has no width


@dataclass(frozen=True)
class Column:
    """A column: its name, whether it holds figures, and whether its text may be wrapped."""

    name: str
    right: bool = False
    wrap: bool = False


@cache
def _console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=max(_WIDE, found.width), soft_wrap=False)


def print_plain(line: str, *, bold: bool = False) -> None:
    """A sentence, wrapped between words on a terminal."""
    _console().print(Text(line, style="bold" if bold else ""), soft_wrap=not _console().is_terminal)


def print_rich(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as the terminal: turned on its side, a block a row, where its figures do not fit."""
    console = _console()
    widths = [max(map(len, [column.name, *cells])) for column, cells in _with_cells(columns, rows)]
    least = sum(12 if column.wrap else width for column, width in zip(columns, widths, strict=True))
    if least + 2 * len(columns) > console.width:
        print_blocks(caption, columns, rows)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=None, show_edge=False)
    for column in columns:
        table.add_column(
            Text(column.name),
            justify="right" if column.right else "left",
            no_wrap=not column.wrap,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    if caption:
        print_plain(caption, bold=True)
    console.print(table)
    console.print()


def print_blocks(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """A line a figure, a block a row: what fits any width."""
    console = _console()
    if caption:
        print_plain(caption, bold=True)
    width = max(len(column.name) for column in columns)
    for row in rows:
        for column, text in zip(columns, row, strict=True):
            if text:
                apart = "\n    " if width + len(text) + 4 > console.width else "  "
                console.print(Text(f"  {column.name:{width}}{apart}{text}"))
        console.print()


def _with_cells(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[tuple[Column, list[str]]]:
    return [(column, [row[place] for row in rows]) for place, column in enumerate(columns)]
