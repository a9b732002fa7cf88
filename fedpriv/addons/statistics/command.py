"""`fedpriv statistics` and `fedpriv.statistics`: a plan's released tables, with intervals and claim.

A plan asks for tables of counts, means, quantiles or survival curves.  They are written as JSON, as CSV and as a
page of bars and curves with their intervals.

`fedpriv coefficients` prints a regression's weights, with intervals that include the noise.
"""

import csv
import dataclasses
import io
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from fedpriv.addons.statistics.curves import Z
from fedpriv.addons.statistics.plan import read_plan
from fedpriv.addons.statistics.tables import TRUSTS, Curve, Statistics, TableResult
from fedpriv.api.results import RunResults, load_results
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.cli.options import print_table, print_text
from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.core.figures import format_epsilon_delta, format_upper
from fedpriv.core.files import write_text
from fedpriv.engines.table import LOCAL, Connection, find_engine_row
from fedpriv.show.table import write_table
from fedpriv.study.results import read_claims
from fedpriv.study.sweep import RunOptions, run_sweep

if TYPE_CHECKING:
    from fedpriv.data.schema import TableSchema
    from fedpriv.loss.ridge import Coefficient

JSON_FILE, CSV_FILE, PAGE_FILE = "statistics.json", "statistics.csv", "statistics.html"
_WIDTH, _MARGIN, _BAR_HEIGHT, _HEIGHT, _BOTTOM = 560, 190, 22, 260, 30
_FIGURES = ("value", "low", "high", "covers")
"""Keys of a row that are no labels."""


def format_number(value: float) -> str:
    """Format a figure of size 100 or more as a whole number, and others to three significant digits.

    Infinity is "above", as for a quantile beyond the last edge.  NaN and minus infinity are "-".
    """
    if not math.isfinite(value):
        return "above" if value > 0 else "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table_rows(table: TableResult) -> list[dict[str, Any]]:
    """Return one row for each estimate and each point of a survival curve.

    A row has its labels, its "value", the ends "low" and "high" of its interval of 95 %, and in "covers" the
    subject of the interval, which is these records or the population.  A count has a label for each column of the
    table, that of its cell, under the column's name, or under "column NAME" if NAME is one of these four keys.
    Other rows have one label, "of".
    """
    rows = []
    for estimate in table.estimates:
        labels = (
            {
                f"column {name}" if name in _FIGURES else name: label
                for name, label in zip(table.of, estimate.of, strict=True)
            }
            if table.kind == "counts"
            else {"of": " ".join(estimate.of)}
        )
        rows.append(
            {
                **labels,
                "value": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "covers": estimate.covers,
            }
        )
    for curve in table.curves if table.kind == "survival" else ():
        for time, value, low, high in zip(curve.at, curve.values, curve.low, curve.high, strict=True):
            of = " ".join((*curve.group, f"survival at {time:.15g}"))
            rows.append({"of": of, "value": value, "low": low, "high": high, "covers": "the population"})
    return rows


def statistics_data(stats: Statistics, tables: Sequence[TableResult], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables, and the claim of the cell `record`, as plain data.

    Infinities and NaN in tables become None.
    """
    claim = {name: record[name] for name in ("mu", "epsilon", "delta", "relation", "trust", "engine")}
    tree = {"name": stats.plan.name, "unit": stats.plan.privacy.unit, "places": stats.unit_count, **claim}
    return {**tree, "tables": [_replace_infinities(dataclasses.asdict(table)) for table in tables]}


def _replace_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_infinities(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_infinities(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render_csv(tables: Sequence[TableResult]) -> str:
    """Render the rows of all tables (`table_rows`) as one CSV file, with a row's labels joined by " / "."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["table", "of", *_FIGURES])
    for table in tables:
        for row in table_rows(table):
            of = " / ".join(str(value) for key, value in row.items() if key not in _FIGURES)
            writer.writerow([table.name, of, *(row[key] for key in _FIGURES)])
    return buffer.getvalue()


def write_statistics(
    folder: Path, stats: Statistics, tables: Sequence[TableResult], record: Mapping[str, Any]
) -> None:
    """Write JSON, CSV and the page into the folder of the run."""
    write_text(
        folder / JSON_FILE, json.dumps(statistics_data(stats, tables, record), indent=1, ensure_ascii=False) + "\n"
    )
    write_text(folder / CSV_FILE, render_csv(tables))
    write_text(folder / PAGE_FILE, render_statistics_page(stats, tables, record))


def render_statistics_page(stats: Statistics, tables: Sequence[TableResult], record: Mapping[str, Any]) -> str:
    """Render a self-contained page of bars and curves, with intervals of 95 % that include the noise.

    Guarantee: every text of a plan or a table is escaped, the page loads nothing from elsewhere, and that of a
    simulation says that nothing is protected.

    Args:
        stats: Plan and scenario.
        tables: Released tables.
        record: Cell of the run's results, with the claim.
    """
    title, css, reader = (
        stats.plan.title or stats.plan.name,
        resources.files("fedpriv.show").joinpath("page.css").read_text(),
        "Whoever reads this"
        if record["noise"] == "release"
        else "This was a simulation, whose noise anybody can recompute and remove: nothing here is protected. "
        "Whoever reads such tables of a deployment",
    )
    verdict = (
        f"{reader} learns of every {stats.cell.privacy.protected_unit.noun} no more than "
        f"μ = {format_upper(record['mu'])} allows, {format_epsilon_delta(record['epsilon'], record['delta'])} "
        f"({record['relation']}), all tables together. Trust: {record['trust']}."
    )
    parts = [
        Markup(
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{}</title><style>{}</style></head>'
        ).format(title, Markup(css)),
        Markup('<body><main><h1>{}</h1><p class="verdict">{}</p>').format(title, verdict),
        Markup(
            "<p>A bar is a count as it was released, none below 0, and the line on it is an interval of 95 % that "
            "includes the noise. A band about survival is of 95 % for the population, and includes noise and "
            "sampling. A band about shares of records is of 95 % for these records, and includes the noise.</p>"
        ),
    ]
    for table in tables:
        parts.append(Markup("<h2>{}</h2>").format(table.name))
        if table.kind == "counts":
            parts.append(_draw_bars(table))
        parts += [_draw_curve(table, curve) for curve in table.curves]
        parts.append(_render_table(table))
    return str(Markup("\n").join([*parts, Markup("</main></body></html>")])) + "\n"


def _render_table(table: TableResult) -> Markup:
    rows = table_rows(table)
    head = Markup("").join(Markup("<th>{}</th>").format(name) for name in (rows[0] if rows else ()))
    lines = [
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup("<td>{}</td>").format(format_number(value) if isinstance(value, float) else value)
                for value in row.values()
            )
        )
        for row in rows
    ]
    return Markup('<div class="wide"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        head, Markup("").join(lines)
    )


def _draw_bars(table: TableResult) -> Markup:
    """Draw a bar for each count, and its interval as a line."""
    scale = (_WIDTH - _MARGIN - 20) / max([1.0, *(max(entry.high, entry.value) for entry in table.estimates)])
    bar = Markup(
        '<text x="{}" y="{}" text-anchor="end">{}</text><rect x="{}" y="{}" width="{:.1f}" height="{}" '
        'fill="var(--good)" opacity=".55"/><path d="M{:.1f} {}H{:.1f}" stroke="var(--ink)" stroke-width="2"/>'
    )
    bars = [
        bar.format(
            _MARGIN - 8, y + _BAR_HEIGHT / 2 + 2, ", ".join(entry.of), _MARGIN, y,
            scale * max(0.0, entry.value), _BAR_HEIGHT - 6, _MARGIN + scale * entry.low, y + _BAR_HEIGHT / 2 - 3,
            _MARGIN + scale * entry.high,
        )
        for y, entry in zip(itertools.count(4, _BAR_HEIGHT), table.estimates, strict=False)
    ]  # fmt: skip
    return _frame_figure(table.name, len(table.estimates) * _BAR_HEIGHT + 10, bars)


def _draw_curve(table: TableResult, curve: Curve) -> Markup:
    """Draw a survival curve, or the share of records below each edge, with its band of 95 %."""
    # Positions are in units of the SVG's view box, with y downwards and margins for the labels of both axes.
    first, last = curve.at[0], curve.at[-1]
    x_positions = [
        _MARGIN / 3 + (_WIDTH - _MARGIN / 3 - 20) * (at - first) / ((last - first) or 1.0) for at in curve.at
    ]
    axis_height = _HEIGHT - _BOTTOM

    def height(share: float) -> float:
        return axis_height - (axis_height - 15) * share

    band = [f"{x:.1f},{height(y):.1f}" for x, y in zip(x_positions, curve.high, strict=True)]
    band += [f"{x:.1f},{height(y):.1f}" for x, y in reversed(list(zip(x_positions, curve.low, strict=True)))]
    line = " ".join(f"{x:.1f},{height(y):.1f}" for x, y in zip(x_positions, curve.values, strict=True))
    shapes = [
        Markup('<polygon points="{}" fill="var(--good)" opacity=".18"/>').format(" ".join(band)),
        Markup('<polyline points="{}" fill="none" stroke="var(--good)" stroke-width="2"/>').format(line),
    ]
    # Lines and numbers at three shares, and numbers at both ends of the horizontal axis.
    for share in (0.0, 0.5, 1.0):
        shapes += [
            Markup('<text x="4" y="{}">{:g}</text>').format(height(share) + 4, share),
            Markup('<path class="grid" d="M40 {0}H{1}"/>').format(height(share), _WIDTH),
        ]
    for x, at in ((x_positions[0], first), (x_positions[-1], last)):
        shapes.append(
            Markup('<text x="{:.0f}" y="{}" text-anchor="middle">{:.15g}</text>').format(x, _HEIGHT - 8, at)
        )
    return _frame_figure(" ".join((table.name, *curve.group)), _HEIGHT, shapes)


def _frame_figure(caption: str, height: float, shapes: Sequence[Markup]) -> Markup:
    frame = Markup('<figure><figcaption>{0}</figcaption><svg viewBox="0 0 {1} {2}" role="img" aria-label="{0}" ')
    return (
        frame.format(escape(caption), _WIDTH, height)
        + Markup('class="chart" style="max-width:40rem">')
        + Markup("").join(shapes)
        + Markup("</svg></figure>")
    )


@dataclass(frozen=True)
class StatisticsResults:
    """Tables that were released together, and the run whose claim covers all of them."""

    tables: tuple[TableResult, ...]
    data: Mapping[str, Any]
    """Tables and claim as plain data, the content of statistics.json."""
    run: RunResults
    """Results of the run that released the tables."""

    def table(self, name: str) -> Any:
        """Return a table by name: a DataFrame where pandas is installed, else a list of dictionaries.

        Raises:
            InputError: The plan has no table of this name.
        """
        tables_by_name = {table.name: table for table in self.tables}
        refuse(
            {f"table {name!r}: the plan has {', '.join(map(repr, tables_by_name))}": name not in tables_by_name}
        )
        rows = table_rows(tables_by_name[name])
        try:
            return import_module("pandas").DataFrame(rows)
        except ImportError:
            return rows


def statistics(
    plan: str | Path | Mapping[str, Any], *, engine: str = "vectorized", out: str | Path | None = None
) -> StatisticsResults:
    """Release the tables of a plan, as `fedpriv statistics` does, and return them.

    Args:
        plan: A plan file, or the same as nested dictionaries.
        engine: "vectorized", "inprocess", "ray" or "deployment".
        out: Folder for the results, by default the first of runs/NAME, runs/NAME-2, … without results.

    Raises:
        InputError: The plan or the engine cannot be used.  The message says why.
        RunError: The run could not be finished, for instance because a silo refused.  The message says why.
        OSError: A file of the results cannot be written.
    """
    stats = Statistics.from_plan(read_plan(plan if isinstance(plan, Mapping) else Path(plan)))
    released: ReleasedTables = release_tables(stats, engine, None if out is None else Path(out))
    return StatisticsResults(released.tables, released.data, load_results(released.folder))


_MAX_SHOWN_LINES = 24
"""Most estimates of a table in the terminal.  Files have all of them."""


@dataclass(frozen=True)
class ReleasedTables:
    """Tables that were released together, in the folder of their run."""

    tables: tuple[TableResult, ...]
    data: dict[str, Any]
    """Tables and claim as plain data, the content of statistics.json."""
    folder: Path
    """Folder of the run."""


def release_tables(
    stats: Statistics, engine: str, out: Path | None = None, connection: Connection = LOCAL
) -> ReleasedTables:
    """Run the plan's scenario, and write the plan's tables into the folder of the run's results.

    The tables are computed from the released model, which is the noisy mean of what records add to the tables.

    Args:
        stats: Plan with its scenario.
        engine: Name of the engine.
        out: Folder of the results, or None for the first of runs/NAME, runs/NAME-2, … without results.
        connection: SuperLink of a deployment.

    Raises:
        InputError, RunError, OSError: As for `statistics`.
    """
    folder = run_sweep(stats.scenario, RunOptions(engine=engine, out=out, connection=connection))
    write_table(folder)  # of the run's own metrics, as `fedpriv run` writes it
    (record,) = read_claims(folder).cells
    model = np.load(folder / record["model"], allow_pickle=False)
    tables = tuple(stats.read_tables(model, for_release=find_engine_row(engine).makes_release))
    write_statistics(folder, stats, tables, record)
    return ReleasedTables(tables, statistics_data(stats, tables, record), folder)


def run_statistics(
    path: Path,
    overrides: Sequence[str],
    engine: str,
    out: Path | None,
    connection: Connection,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Print noise and price of the tables for a dry run, else release the tables and print them.

    Args:
        path: File of the plan.
        overrides: "KEY=VALUE" for dotted keys of the plan.
        engine: Name of the engine.
        out: Folder of the results, or None for the first of runs/NAME, runs/NAME-2, … without results.
        connection: SuperLink of a deployment.
        dry_run: Whether nothing is released.
        as_json: Whether JSON is printed in place of text.

    Raises:
        InputError, RunError, OSError: As for `statistics`.
    """
    row, stats = find_engine_row(engine), Statistics.from_plan(read_plan(path, overrides))
    if dry_run:
        _print_dry_run(stats, for_release=row.makes_release, as_json=as_json)
        return
    released = release_tables(stats, engine, out, connection)
    if as_json:
        sys.stdout.write(json.dumps(released.data) + "\n")
        return
    for table in released.tables:
        _print_result(table)
        sys.stdout.write("\n")
    mu, epsilon, delta = (released.data[name] for name in ("mu", "epsilon", "delta"))
    sys.stdout.write(
        "intervals are of 95 % and include the noise; a count that cannot be told from 0 is < its interval's end\n"
        f"all tables together: μ = {format_upper(mu)}, {format_epsilon_delta(epsilon, delta)} "
        f"({released.data['relation']}), trust {released.data['trust']}"
        f"{'' if row.makes_release else '; a simulation: anybody can recompute this noise and remove it'}\n"
        f"written: {released.folder}/statistics.json, .csv and .html; the claim: fedpriv show {released.folder}\n"
    )


def _print_dry_run(stats: Statistics, *, for_release: bool, as_json: bool) -> None:
    """Print each table's number of cells, its error under each trust setting, and the price of all tables.

    The error is that of the noise in one released coordinate, in units of protection: half an interval of 95 % in
    text, a standard deviation in JSON.  The price is for the plan's own trust setting.

    Args:
        stats: Plan and scenario.
        for_release: Whether the noise is that of a release, made of integers, and not of a simulation.
        as_json: Whether JSON is printed in place of text.
    """
    privacy, tables = stats.cell.privacy, list(zip(stats.plan.table, stats.settings.tables, strict=True))
    claim = compute_claim(make_release_streams(stats.make_plan(for_release=for_release), 1))
    assert claim is not None  # a plan without noise is refused
    mu, epsilon = claim.guarantee.mu or math.inf, claim.guarantee.epsilon_of(privacy.delta)
    unit = privacy.protected_unit.noun
    errors = {trust: stats.noise_stds(trust, for_release=for_release) for trust in TRUSTS}
    if as_json:
        table_data = [
            {
                "name": table.title,
                "cells": cells.size,
                "standard_error": {trust: errors[trust][index] for trust in TRUSTS},
            }
            for index, (table, cells) in enumerate(tables)
        ]
        tree = {
            "mu": mu,
            "epsilon": epsilon,
            "delta": privacy.delta,
            "places": stats.unit_count,
            "tables": table_data,
        }
        sys.stdout.write(json.dumps(tree) + "\n")
        return
    lines = [
        [
            table.title,
            table.kind,
            str(cells.size),
            *(format_upper(Z * errors[trust][index], 3) for trust in TRUSTS),
        ]
        for index, (table, cells) in enumerate(tables)
    ]
    print_table([["table", "kind", "cells", *(f"± {trust}" for trust in TRUSTS)], *lines])
    sys.stdout.write(
        f"\n± is half of an interval of 95 % about one released number, in {unit}s; the plan asks for trust = "
        f'"{stats.plan.trust}"\n'
        f"price, of all tables together: μ = {format_upper(mu)}, "
        f"{format_epsilon_delta(epsilon, privacy.delta)} for every {unit} ({privacy.relation})\n"
        f"{stats.unit_count} places of {unit}s in {stats.cell.federation.silos} silos; nothing was asked of them\n"
    )


def _print_result(table: TableResult) -> None:
    """Print estimates with intervals, at most 24, and the last value of each survival curve with its band.

    A count below 1.96 standard errors cannot be told from 0, and is printed as "<" and its interval's high end.
    """
    width = max([1, *(len(estimate.of) for estimate in table.estimates)])
    lines = [[table.name, *([""] * (width - 1)), "", "95 %", "covers"]]
    for estimate in table.estimates[:_MAX_SHOWN_LINES]:
        of = [*estimate.of, *([""] * (width - len(estimate.of)))]
        half = Z * estimate.standard_error
        text = (
            f"< {format_number(estimate.high)}"
            if table.kind == "counts" and estimate.value < half
            else format_number(estimate.value)
        )
        lines.append(
            [*of, text, f"{format_number(estimate.low)} … {format_number(estimate.high)}", estimate.covers]
        )
    print_table(lines)
    if (more := len(table.estimates) - _MAX_SHOWN_LINES) > 0:
        sys.stdout.write(f"and {more} more, in the files\n")
    for curve in table.curves if table.kind == "survival" else ():
        label = " ".join((*curve.group, f"survival to {curve.at[-1]:.15g}"))
        band = f"{format_number(curve.low[-1])} … {format_number(curve.high[-1])}"
        print_text(f"{label}: {format_number(curve.values[-1])}, {band} of the population\n")


def print_coefficients(folder: Path, *, as_json: bool) -> None:
    """Print the coefficients of each finished cell with their 95 % intervals.

    In text, a star marks an interval without 0.

    Raises:
        InputError: The folder has no results, or a cell has no coefficients that `compute_coefficients` can read.
        RunError: A claim differs from the recorded releases.
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
    """Compute the weights of a cell's regression, with intervals of 95 % for sampling and noise.

    The noise is that of the rounds' recorded release streams.  A stream has the releases of some silos, or of none
    (a server's, or sums of masked messages), with noise of one std.  The noise in the mean over silos has the
    variance Σ_stream std² · Σ_silo p², where p is the silo's weight in the mean.  A stream without silos counts
    with weight 1.

    Sampling is that of the records of a round.  If the weights are not in proportion to the silos' records, their
    number is replaced by that of a plain mean with the same variance, 1 / Σ_silo (p²/B) for B records of a silo.

    Args:
        record: Record of the cell in results.json.
        folder: Folder of the run, which has the model's file.

    Returns:
        Names of the features, and last the constant, each with its coefficient.

    Raises:
        InputError: The cell's model and algorithm have no coefficients with intervals, its rounds are too few for
            them, or its scenario, its data or the model's file cannot be used.
    """
    import torch

    from fedpriv.claims.ledger import ROUNDS, stream_from_data
    from fedpriv.loss.objective import View
    from fedpriv.loss.ridge import RIDGE_STATISTICS, MeanStatistics, RidgeStatistics
    from fedpriv.papers.newton import NOISY_NEWTON, GradientAndHessian
    from fedpriv.plan.plan import silo_weights
    from fedpriv.plan.task import load_public_task, make_schema_task
    from fedpriv.scenario.load import resolve_cell

    cell = resolve_cell(record["scenario"], str(folder))
    refuse(
        {
            f"{folder}: model.name = {cell.model.name!r}: coefficients have intervals where the model is "
            f"{RIDGE_STATISTICS!r}, or the algorithm {NOISY_NEWTON.name!r}": (
                cell.model.name != RIDGE_STATISTICS and cell.algorithm.name != NOISY_NEWTON.name
            )
        }
    )
    # The algorithm wraps the objective into views.  The objective below them computes coefficients.
    schema, sizes = cell.data.table_schema, cell.batch_sizes
    objective = (load_public_task(cell) if schema is None else make_schema_task(cell, schema)).objective
    while isinstance(objective, View) and not isinstance(objective, GradientAndHessian):
        objective = objective.base
    assert isinstance(objective, RidgeStatistics | GradientAndHessian)
    # Noise of the mean over silos, from the ledger.
    weights, streams = silo_weights(cell), list(map(stream_from_data, record["releases"]))
    variance = sum(
        sum(weight**2 for weight in [weights[silo] for silo in stream.silos] or [1.0]) * stream.std**2
        for stream in streams
        if stream.step == ROUNDS  # the model has no noise of a first step, which scales the features
    )
    path = folder / record["model"]
    try:
        model = torch.from_numpy(np.load(path, allow_pickle=False)).double().reshape(objective.initial().shape)
    except Exception as error:  # a damaged file may raise any error
        raise InputError(f"{path}: holds no model of its cell ({sanitize_line(str(error))})") from None
    # In some tables cells decide which rows count, and a public share of them does.
    counted_share = 1.0 if schema is None else schema.counted_share(for_testing=False)
    published = MeanStatistics(
        math.sqrt(variance),
        round(counted_share / sum(weight**2 / size for weight, size in zip(weights, sizes, strict=True))),
        counted_share,
        record["rounds"],
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
