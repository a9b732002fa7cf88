"""Commands `fedpriv list`, `show` and `compare`.

A sweep point is a value of each swept key of a scenario, and a cell is a sweep point with a seed.  The claim of a
cell is the guarantee that its results state.
"""

import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedpriv.core.errors import InputError, sanitize_line, suggestion
from fedpriv.core.extensions import load_add_on_parts, load_extensions

_PIPED_WIDTH = 160  # least width of piped output, which has none of its own, unless COLUMNS is set


@dataclass(frozen=True)
class Column:
    """Column of a table."""

    name: str
    """Heading of the column."""
    is_numeric: bool = False
    """Whether the column holds numbers, which are aligned on the right."""
    can_wrap: bool = False
    """Whether the column's text may wrap to several lines."""


def _make_console() -> Console:
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    return Console(
        highlight=False,
        width=max(0 if "COLUMNS" in os.environ else _PIPED_WIDTH, console.width),
        soft_wrap=False,
    )


def _printable_line(text: str) -> str:
    """Sanitize a text, so that it neither breaks the line nor sends control codes to the terminal."""
    return sanitize_line(text, len(text))


def print_plain(line: str, *, bold: bool = False) -> None:
    """Print a sentence, wrapped between words on a terminal."""
    _make_console().print(
        Text(_printable_line(line), style="bold" if bold else ""), soft_wrap=not _make_console().is_terminal
    )


def print_rich(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table at most as wide as the terminal, or a block for each row if the table does not fit.

    The table fits if the terminal is wide enough for each column that may not wrap, 12 characters of each other
    column, and three spaces between columns.

    Args:
        caption: Caption above the table, or "" for none.
        columns: Columns of the table.
        rows: Text of each row in each column.
    """
    console, rows = _make_console(), [list(map(_printable_line, row)) for row in rows]
    widths = [
        max(Text(text).cell_len for text in (_printable_line(heading.name), *(row[n] for row in rows)))
        for n, heading in enumerate(columns)
    ]
    min_width = sum(12 if column.can_wrap else width for column, width in zip(columns, widths, strict=True))
    if min_width + 3 * (len(columns) - 1) > console.width:  # three spaces between columns, or rich drops digits
        print_blocks(caption, columns, rows)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=None, show_edge=False)
    for column in columns:
        table.add_column(
            Text(_printable_line(column.name)),
            justify="right" if column.is_numeric else "left",
            no_wrap=not column.can_wrap,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    if caption:
        print_plain(caption, bold=True)
    console.print(table)
    console.print()


def print_blocks(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a block of lines for each row, with a line for each column.

    A text that does not fit beside its column's name goes to the next line, and an empty text is left out.

    Args:
        caption: Caption above the blocks, or "" for none.
        columns: Columns of the table.
        rows: Text of each row in each column.
    """
    console = _make_console()
    if caption:
        print_plain(caption, bold=True)
    width = max(len(column.name) for column in columns)
    for row in rows:
        for column, text in zip(columns, row, strict=True):
            if text:
                separator = "\n    " if width + Text(text).cell_len + 4 > console.width else "  "
                console.print(Text(f"  {_printable_line(column.name):{width}}{separator}{_printable_line(text)}"))
        console.print()


NamedLines = list[tuple[str, str]]
"""Pairs of a name and its description."""


def list_kinds(kind_name: str | None, *, as_json: bool = False) -> None:
    """Print names and descriptions of scenarios, algorithms, mechanisms, data sets and models, by kind.

    Args:
        kind_name: Only kind to print, a key of `KINDS`, or None for all.
        as_json: Whether to print one JSON object instead: by kind, the description of each name.

    Raises:
        InputError: The kind is unknown, or an extension cannot be imported.
    """
    if kind_name is not None and kind_name not in KINDS:
        raise InputError(
            f"fedpriv list {kind_name}: known kinds are {', '.join(KINDS)}{suggestion(kind_name, KINDS)}"
        )
    if kind_name != "scenarios":  # extensions add names of every other kind
        load_extensions()
    kinds = list(KINDS) if kind_name is None else [kind_name]
    if as_json:
        sys.stdout.write(json.dumps({kind: dict(KINDS[kind]()) for kind in kinds}) + "\n")
        return
    for kind in kinds:
        print_rich(kind, [Column("name"), Column("what it is", can_wrap=True)], KINDS[kind]())


def show_run(folder: Path, *, as_json: bool = False) -> None:
    """Print a run's title, tables, warnings, measurement, guarantees and folder.

    Privacy figures of cells are computed anew from the stored releases.

    Args:
        folder: Folder of the run.
        as_json: Whether to print one JSON object instead, with facts and sentences on the run, and its cells.

    Raises:
        InputError: The folder has no results, or they cannot be read or accounted for.
        RunError: A stored claim differs from the releases, after everything was printed.
    """
    from fedpriv.show.summary import describe_measurement, list_findings, list_warnings, privacy_lines
    from fedpriv.show.table import make_tables
    from fedpriv.study.results import check_claims, read_claims

    results = read_claims(folder)
    if as_json:
        facts = {key: getattr(results, key) for key in ("name", "title", "engine", "complete", "axes", "seeds")}
        lines = {"warnings": list_warnings, "findings": list_findings, "privacy": privacy_lines}
        data = facts | {key: describe(results) for key, describe in lines.items()}
        sys.stdout.write(json.dumps({**data, "folder": str(folder), "cells": results.cells}) + "\n")
        check_claims(folder, results)
        return
    print_plain(results.title or results.name, bold=True)
    for table in make_tables(results):
        columns = [Column(name, is_numeric=index >= table.label_count) for index, name in enumerate(table.heads)]
        print_rich(table.caption, columns, table.body)
    warnings = [line.replace("**", "") for line in list_warnings(results)]
    for line in (*warnings, describe_measurement(results), *privacy_lines(results), f"results: {folder}"):
        print_plain(line)
    check_claims(folder, results)


def compare_runs(first: Path, second: Path, *, as_json: bool = False) -> None:
    """Print the settings in which two runs differ, and the mean differences of their metrics.

    A difference is that of two cells with the same seed, second run minus first.

    Args:
        first: Folder of the first run.
        second: Folder of the second run.
        as_json: Whether to print one JSON object instead, with "settings" (key, both values) and "rows" (texts).

    Raises:
        InputError: A folder has no results that can be read, or no metric can be compared, as without a finished
            sweep point and seed in common.
    """
    from fedpriv.show.verdict import compare_folders

    comparison = compare_folders(first, second)
    if as_json:
        rows = [dict(zip(comparison.header, row, strict=True)) for row in comparison.body]
        sys.stdout.write(json.dumps({"settings": comparison.settings, "rows": rows}) + "\n")
        return
    for key, first_value, second_value in comparison.settings:
        print_plain(f"{key}: {first_value} in {first}, {second_value} in {second}")
    columns = [
        Column(name, is_numeric=index >= comparison.label_count) for index, name in enumerate(comparison.header)
    ]
    print_rich(
        "Differences are second minus first; ± is their standard error over the seeds that both runs have.",
        columns,
        comparison.body,
    )


def _list_scenarios() -> NamedLines:
    from fedpriv.core.files import list_shipped_scenarios

    trees = {
        name: tomllib.loads(path.read_text(encoding="utf-8")) for name, path in list_shipped_scenarios().items()
    }
    return [(name, str(tree.get("title", ""))) for name, tree in trees.items()]


def _list_algorithms() -> NamedLines:
    from fedpriv.papers.table import ALGORITHMS

    return [(name, f"{row.title} ({row.source})") for name, row in ALGORITHMS.items()]


def _list_mechanisms() -> NamedLines:
    from fedpriv.noise.registry import MECHANISMS, SELECTABLE_MECHANISMS, USER_MECHANISMS

    descriptions = {
        kind: (getdoc(kind) or "").partition("\n")[0] for kind in (*MECHANISMS.values(), *USER_MECHANISMS.values())
    }
    return [
        (
            kind.name,
            description
            if kind in (*SELECTABLE_MECHANISMS, *USER_MECHANISMS.values())
            else f"{description} (of one algorithm)",
        )
        for kind, description in descriptions.items()
    ]


def _list_data() -> NamedLines:
    from fedpriv.data.fetch import COMPUTED_DATA_SETS, ORIGINS
    from fedpriv.data.named import list_user_data

    return [
        *((name, "fetched once, verified on every use") for name in ORIGINS),
        *((name, "computed, needs no file") for name in COMPUTED_DATA_SETS),
        *((name, "your own") for name in list_user_data()),
        ("FILE.csv, FILE.parquet, FILE.npz", "records of your own in a file"),
    ]


def _list_models() -> NamedLines:
    from fedpriv.loss.models import MODELS

    return [
        (
            name,
            f"{'survival' if row.survival else 'regression' if row.regression else 'classes'}; "
            f"keys: {', '.join(row.settings.model_fields) or 'none'}",
        )
        for name, row in (MODELS | load_add_on_parts("model")).items()
    ]


KINDS: dict[str, Callable[[], NamedLines]] = {
    "scenarios": _list_scenarios,
    "algorithms": _list_algorithms,
    "mechanisms": _list_mechanisms,
    "data": _list_data,
    "models": _list_models,
}
