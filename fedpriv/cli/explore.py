"""Commands `fedpriv list`, `show`, `compare` and `coefficients`.

Tables and sentences are at most as wide as the terminal, and no number is cut.  `coefficients` prints plain tables
of weights, with intervals that include the noise, for the models that have them.

A cell is one run of a scenario, with an entry in results.json.  A claim is the guarantee that the entry states,
and the ledger is the entry's list of releases, from which claims are computed again.  A stream is the releases of
one party (a silo, several silos alike, or the server) over the rounds, with the standard deviation of its noise.
"""

import json
import math
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedpriv.cli.options import print_table
from fedpriv.core.errors import InputError, sanitize_line, suggestion
from fedpriv.core.extensions import load_add_on_parts, load_extensions

if TYPE_CHECKING:
    from fedpriv.data.schema import TableSchema
    from fedpriv.loss.ridge import Coefficient

_PIPED_WIDTH = 160  # least width of piped output, which has none of its own


@dataclass(frozen=True)
class Column:
    """Column of a table."""

    name: str
    """Heading of the column."""
    is_numeric: bool = False
    """Whether the column holds numbers, which are aligned on the right."""
    can_wrap: bool = False
    """Whether the column's text may wrap to several lines."""


@cache
def _make_console() -> Console:
    console = Console(highlight=False)
    return (
        console
        if console.is_terminal
        else Console(highlight=False, width=max(_PIPED_WIDTH, console.width), soft_wrap=False)
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

    The table fits if every column that may not wrap can have its full width, and each other 12 characters.

    Args:
        caption: Caption above the table, or "" for none.
        columns: Columns of the table.
        rows: Text of each row in each column.
    """
    console, rows = _make_console(), [list(map(_printable_line, row)) for row in rows]
    widths = [
        max(len(text) for text in (heading.name, *(row[n] for row in rows))) for n, heading in enumerate(columns)
    ]
    min_width = sum(12 if column.can_wrap else width for column, width in zip(columns, widths, strict=True))
    if min_width + 2 * len(columns) > console.width:  # two spaces beside each column
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
    """Print a block of lines for each row, each with a column's name and its value in the row.

    A value that does not fit beside its name goes to the next line, and an empty value is left out with its name.

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
                # The name has two spaces before it, and two behind it.
                separator = "\n    " if width + len(text) + 4 > console.width else "  "
                console.print(Text(f"  {_printable_line(column.name):{width}}{separator}{_printable_line(text)}"))
        console.print()


NamedLines = list[tuple[str, str]]
"""Pairs of a name that scenarios can use and a description."""


def list_kinds(kind_name: str | None) -> None:
    """Print the scenarios, algorithms, mechanisms, data sets and models, or those of one kind.

    Raises:
        InputError: The kind is unknown, or an extension cannot be imported.
    """
    if kind_name is not None and kind_name not in KINDS:
        raise InputError(
            f"fedpriv list {kind_name}: known kinds are {', '.join(KINDS)}{suggestion(kind_name, KINDS)}"
        )
    if kind_name != "scenarios":
        load_extensions()
    for kind in KINDS if kind_name is None else [kind_name]:
        print_rich(kind, [Column("name"), Column("what it is", can_wrap=True)], KINDS[kind]())


def show_run(folder: Path) -> None:
    """Print a run's tables, warnings, measurement, guarantees and folder.

    Raises:
        InputError: The folder has no results.
        RunError: A claim differs from the releases, after everything was printed.
    """
    from fedpriv.show.summary import describe_measurement, list_warnings, privacy_lines
    from fedpriv.show.table import make_tables
    from fedpriv.study.results import check_claims, read_claims

    results = read_claims(folder)
    print_plain(results.title or results.name, bold=True)
    for table in make_tables(results):
        columns = [Column(name, is_numeric=index >= table.label_count) for index, name in enumerate(table.heads)]
        print_rich(table.caption, columns, table.body)
    warnings = [line.replace("**", "") for line in list_warnings(results)]
    for line in (*warnings, describe_measurement(results), *privacy_lines(results), f"results: {folder}"):
        print_plain(line)
    check_claims(folder, results)


def compare_runs(first: Path, second: Path) -> None:
    """Print the differences of two runs' settings, and of their metrics seed by seed.

    Raises:
        InputError: A folder has no results, or the runs have no finished sweep point and seed in common.
    """
    from fedpriv.show.verdict import compare_folders

    comparison = compare_folders(first, second)
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
        kind: (getdoc(kind) or "").splitlines()[0] for kind in (*MECHANISMS.values(), *USER_MECHANISMS.values())
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
            f"{'regression' if row.regression else 'classes'}; "
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


def print_coefficients(folder: Path, *, as_json: bool) -> None:
    """Print the coefficients of each finished cell with their 95 % intervals.

    The output is a table for each cell, in which a star marks an interval without 0, or one line of JSON.

    Raises:
        InputError: The folder has no results, or a cell has no coefficients that `compute_coefficients` can read.
        RunError: A claim differs from the releases, after the coefficients were printed.
    """
    from fedpriv.show.summary import format_value
    from fedpriv.study.results import check_claims, read_claims

    results = read_claims(folder)
    coefficients_by_cell = [(cell, compute_coefficients(cell, folder)) for cell in results.cells]
    if as_json:
        entries = [
            {
                "point": cell["point"],
                "seed": cell["seed"],
                "coefficients": {name: weight._asdict() for name, weight in coefficients},
            }
            for cell, coefficients in coefficients_by_cell
        ]
        sys.stdout.write(json.dumps(entries) + "\n")
    else:
        for cell, coefficients in coefficients_by_cell:
            point = "".join(f"{key} = {format_value(value)}, " for key, value in cell["point"].items())
            lines = [
                [
                    name,
                    f"{weight.value:.3f}",
                    f"{weight.low:.3f} – {weight.high:.3f}{'' if weight.low <= 0.0 <= weight.high else '  *'}",
                ]
                for name, weight in coefficients
            ]
            print_table([[f"{point}seed {cell['seed']}", "weight", "95 %"], *lines])
            sys.stdout.write("\n")
        sys.stdout.write(
            "Weights are for features as the model reads them: numbers of a table are scaled to -1 … 1, and then "
            "by any [data.scale]. Intervals include sampling and noise, and are for the population's weights "
            "under the same penalty. A star marks an interval without 0.\n"
        )
    check_claims(folder, results)


def compute_coefficients(record: Mapping[str, Any], folder: Path) -> list[tuple[str, "Coefficient"]]:
    """Compute the coefficients of a cell of results.json, by feature, with the constant last.

    A coefficient is a weight of the regression that the model holds, with a 95 % interval for sampling and noise.
    The noise is that of the ledger's releases in the rounds, not of the plan.  Its variance in the mean over
    silos is Σ_stream std² · Σ_silo share², where a silo's share is its share of all records, and a stream
    without silos, such as the server's, counts with share 1.

    Args:
        record: Record of the cell.
        folder: Folder of the run, which has the model's file.

    Raises:
        InputError: The cell has neither the model of ridge statistics nor the algorithm noisy-newton.
    """
    import numpy as np
    import torch

    from fedpriv.claims.ledger import ROUNDS, stream_from_data
    from fedpriv.loss.objective import View
    from fedpriv.loss.ridge import RIDGE_STATISTICS, MeanStatistics, RidgeStatistics
    from fedpriv.papers.newton import NOISY_NEWTON, GradientAndHessian
    from fedpriv.plan.task import load_public_task, make_schema_task
    from fedpriv.scenario.load import resolve_cell

    cell = resolve_cell(record["scenario"], str(folder))
    if cell.model.name != RIDGE_STATISTICS and cell.algorithm.name != NOISY_NEWTON.name:
        raise InputError(
            f"{folder}: model.name = {cell.model.name!r}: coefficients have intervals where the model is "
            f"{RIDGE_STATISTICS!r}, or the algorithm {NOISY_NEWTON.name!r}"
        )
    # Objective that knows how to compute coefficients.  A view is an objective made from another one, its base.
    schema, sizes = cell.data.table_schema, cell.batch_sizes
    objective = (load_public_task(cell) if schema is None else make_schema_task(cell, schema)).objective
    while isinstance(objective, View) and not isinstance(objective, GradientAndHessian):
        objective = objective.base
    assert isinstance(objective, RidgeStatistics | GradientAndHessian)
    # Noise of the mean over silos, from the ledger.
    shares, streams = [size / sum(sizes) for size in sizes], list(map(stream_from_data, record["releases"]))
    variance = sum(
        sum(share**2 for share in [shares[silo] for silo in stream.silos] or [1.0]) * stream.std**2
        for stream in streams
        if stream.step == ROUNDS  # the model has no noise of a first step, which scales the features
    )
    model = torch.from_numpy(np.load(folder / record["model"], allow_pickle=False)).double()
    # Share of the rows read that count; others are for testing, and are read as zeros.
    counted_share = 1.0 if schema is None else schema.counted_share(for_testing=False)
    published = MeanStatistics(
        math.sqrt(variance), round(sum(sizes) * counted_share), counted_share, record["rounds"]
    )
    coefficients = objective.coefficients(model, published)
    return list(zip(_feature_names(schema, len(coefficients)), coefficients, strict=True))


def _feature_names(schema: "TableSchema | None", count: int) -> list[str]:
    if schema is None or schema.width + 1 != count:
        return [*(f"feature {index}" for index in range(count - 1)), "constant"]
    return [
        *(
            feature
            for name, column in schema.sorted_columns
            for feature in ([name] if column.values is None else [f"{name} = {value}" for value in column.values])
        ),
        "constant",
    ]
