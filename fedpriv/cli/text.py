"""Tables as plain text."""

from collections.abc import Sequence

import typer


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Left-aligned columns, two spaces apart; every line has a text for every column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
