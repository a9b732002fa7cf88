"""`fedpriv list`, `show` and `compare`: tables and sentences as wide as the terminal, with no number cut.

`fedpriv coefficients`: a table of weights with intervals that contain the noise.
Coefficients are of models that were released with second moments.
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

_PIPED_WIDTH = 160  # of piped output, which has no width


@dataclass(frozen=True)
class Column:
    """A column: its name, whether it holds figures, and whether its text may be wrapped."""

    name: str
    is_numeric: bool = False
    can_wrap: bool = False


@cache
def _make_console() -> Console:
    found = Console(highlight=False)
    return (
        found
        if found.is_terminal
        else Console(highlight=False, width=max(_PIPED_WIDTH, found.width), soft_wrap=False)
    )


def _printable_line(text: str) -> str:
    """A stranger's words among it neither break the line nor reach the terminal as commands."""
    return sanitize_line(text, len(text))


def print_plain(line: str, *, bold: bool = False) -> None:
    """Print a sentence, wrapped between words on a terminal."""
    _make_console().print(
        Text(_printable_line(line), style="bold" if bold else ""), soft_wrap=not _make_console().is_terminal
    )


def print_rich(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as wide as the terminal, or a block for each row where its figures do not fit."""
    console, rows = _make_console(), [list(map(_printable_line, row)) for row in rows]
    widths = [max(len(text) for text in (each.name, *(row[n] for row in rows))) for n, each in enumerate(columns)]
    least = sum(12 if column.can_wrap else width for column, width in zip(columns, widths, strict=True))
    if least + 2 * len(columns) > console.width:
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
    """Print a line for each figure, a block for each row, which fits any width."""
    console = _make_console()
    if caption:
        print_plain(caption, bold=True)
    width = max(len(column.name) for column in columns)
    for row in rows:
        for column, text in zip(columns, row, strict=True):
            if text:
                apart = "\n    " if width + len(text) + 4 > console.width else "  "
                console.print(Text(f"  {_printable_line(column.name):{width}}{apart}{_printable_line(text)}"))
        console.print()


NamedLines = list[tuple[str, str]]


def list_kinds(what: str | None) -> None:
    """Print the scenarios, algorithms, mechanisms, data sets and models, or one kind of them."""
    if what is not None and what not in KINDS:
        raise InputError(f"fedpriv list {what}: known are {', '.join(KINDS)}{suggestion(what, KINDS)}")
    if what != "scenarios":
        load_extensions()
    for kind in KINDS if what is None else [what]:
        print_rich(kind, [Column("name"), Column("what it is", can_wrap=True)], KINDS[kind]())


def show_run(folder: Path) -> None:
    """Print what ran, what it guarantees, and what came out."""
    from fedpriv.show.summary import describe_measurement, list_warnings, privacy_lines
    from fedpriv.show.table import make_tables
    from fedpriv.study.results import check_claims, read_claims

    results = read_claims(folder)
    print_plain(results.title or results.name, bold=True)
    for table in make_tables(results):
        columns = [Column(name, is_numeric=place >= table.label_count) for place, name in enumerate(table.heads)]
        print_rich(table.caption, columns, table.body)
    loud = [line.replace("**", "") for line in list_warnings(results)]
    for line in (*loud, describe_measurement(results), *privacy_lines(results), f"results: {folder}"):
        print_plain(line)
    check_claims(folder, results)


def compare_runs(first: Path, second: Path) -> None:
    """Print what two runs have in common, seed by seed, and where their settings differ."""
    from fedpriv.show.verdict import compare_folders

    found = compare_folders(first, second)
    for key, one, other in found.settings:
        print_plain(f"{key}: {one} in {first}, {other} in {second}")
    columns = [Column(name, is_numeric=place >= found.label_count) for place, name in enumerate(found.header)]
    print_rich("second minus first; ± is the standard error over seeds that both have", columns, found.body)


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

    ones = {
        kind: (getdoc(kind) or "").splitlines()[0] for kind in (*MECHANISMS.values(), *USER_MECHANISMS.values())
    }
    return [
        (
            kind.name,
            words
            if kind in (*SELECTABLE_MECHANISMS, *USER_MECHANISMS.values())
            else f"{words} (of one algorithm)",
        )
        for kind, words in ones.items()
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
    """Print those of every finished cell; InputError for a run of another model."""
    from fedpriv.show.summary import format_value
    from fedpriv.study.results import check_claims, read_claims

    results = read_claims(folder)
    found = [(cell, compute_coefficients(cell, folder)) for cell in results.cells]
    if as_json:
        told = [
            {
                "point": cell["point"],
                "seed": cell["seed"],
                "coefficients": {name: each._asdict() for name, each in own},
            }
            for cell, own in found
        ]
        sys.stdout.write(json.dumps(told) + "\n")
        return
    for cell, own in found:
        point = "".join(f"{key} = {format_value(value)}, " for key, value in cell["point"].items())
        lines = [
            [
                name,
                f"{each.value:.3f}",
                f"{each.low:.3f} – {each.high:.3f}{'' if each.low <= 0.0 <= each.high else '  *'}",
            ]
            for name, each in own
        ]
        print_table([[f"{point}seed {cell['seed']}", "weight", "95 %"], *lines])
        sys.stdout.write("\n")
    sys.stdout.write(
        "features are scaled to -1 … 1; intervals have sampling and noise in them, of the population's weights "
        "under the same penalty; * has no 0 in it\n"
    )
    check_claims(folder, results)


def compute_coefficients(record: Mapping[str, Any], folder: Path) -> list[tuple[str, "Coefficient"]]:
    """By feature, the constant last, of a cell of results.json; InputError for any other model.

    The noise is the ledger's: what was released, not what was planned.
    """
    import numpy as np
    import torch

    from fedpriv.claims.ledger import stream_from_data
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
    schema, sizes = cell.data.table_schema, cell.batch_sizes
    objective = (load_public_task(cell) if schema is None else make_schema_task(cell, schema)).objective
    while isinstance(objective, View) and not isinstance(objective, GradientAndHessian):
        objective = objective.base
    assert isinstance(objective, RidgeStatistics | GradientAndHessian)
    variance, shares = 0.0, [size / sum(sizes) for size in sizes]
    for stream in map(stream_from_data, record["releases"]):
        whose = [shares[silo] for silo in stream.silos] or [1.0]
        variance += sum(share**2 for share in whose) * stream.std**2
    point = torch.from_numpy(np.load(folder / record["model"], allow_pickle=False)).double()
    counted = 1.0 if schema is None else schema.counted_share(for_testing=False)
    published = MeanStatistics(math.sqrt(variance), round(sum(sizes) * counted), counted, record["rounds"])
    found = objective.coefficients(point, published)
    return list(zip(_feature_names(schema, len(found)), found, strict=True))


def _feature_names(schema: "TableSchema | None", count: int) -> list[str]:
    if schema is None or schema.width + 1 != count:
        return [*(f"feature {place}" for place in range(count - 1)), "constant"]
    return [
        *(
            each
            for name, column in schema.sorted_columns
            for each in ([name] if column.values is None else [f"{name} = {word}" for word in column.values])
        ),
        "constant",
    ]
