"""`fedpriv statistics`: what a plan costs and how wrong it will be, its release, its tables as text and files."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.addons.statistics.kaplan_meier import Z
from fedpriv.addons.statistics.page import data_of, number, write_all
from fedpriv.addons.statistics.plan import read_plan
from fedpriv.addons.statistics.tables import TRUSTS, Statistics, TableResult
from fedpriv.claims.ledger import releases_of
from fedpriv.cli.shown import print_table, say
from fedpriv.core.figures import epsilon_words, upper_figure
from fedpriv.engines.table import LOCAL, Connection, engine_row
from fedpriv.show.table import write_table
from fedpriv.study.results import read_claims
from fedpriv.study.sweep import RunOptions, run_sweep

_SHOWN = 24
"""Lines of a table in the terminal; files have all."""


@dataclass(frozen=True)
class Released:
    """Tables that were released together, in the folder of their run."""

    tables: tuple[TableResult, ...]
    data: dict[str, Any]
    folder: Path


def release(asked: Statistics, engine: str, out: Path | None = None, connection: Connection = LOCAL) -> Released:
    """Run the plan's scenario, and write what it says beside the run's own results."""
    options = RunOptions(engine=engine, out=out, connection=connection)
    folder = run_sweep(asked.scenario, options)
    write_table(folder)
    (record,) = read_claims(folder).cells
    model = np.load(folder / record["model"], allow_pickle=False)
    tables = tuple(asked.results(model, released=engine_row(engine).releases))
    write_all(folder, asked, tables, record)
    return Released(tables, data_of(asked, tables, record), folder)


def statistics(
    path: Path,
    overrides: Sequence[str],
    engine: str,
    out: Path | None,
    connection: Connection,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Print errors and price, and release the tables unless it is a dry run; InputError as for a run."""
    row, asked = engine_row(engine), Statistics.of(read_plan(path, overrides))
    if dry_run:
        _print_dry(asked, released=row.releases, as_json=as_json)
        return
    found = release(asked, engine, out, connection)
    if as_json:
        sys.stdout.write(json.dumps(found.data) + "\n")
        return
    for table in found.tables:
        _print(table)
        sys.stdout.write("\n")
    mu, epsilon, delta = (found.data[name] for name in ("mu", "epsilon", "delta"))
    sys.stdout.write(
        "intervals of 95 %, the noise in them; < stands for less than can be told from none\n"
        f"all tables together: μ = {upper_figure(mu)}, {epsilon_words(epsilon, delta)} "
        f"({found.data['relation']}), trust {found.data['trust']}\n"
        f"written: {found.folder}/statistics.json, .csv and .html; the claim: fedpriv show {found.folder}\n"
    )


def _print_dry(asked: Statistics, *, released: bool, as_json: bool) -> None:
    """Say what every table has for cells, what error under each trust, and the price of all."""
    privacy = asked.cell.privacy
    tables = list(zip(asked.plan.table, asked.settings.tables, strict=True))
    mu = max(stream.mu for stream in releases_of(asked.planned(released=released), 1))
    epsilon, unit = epsilon_of(mu, privacy.delta), privacy.protected.noun
    errors = {trust: asked.errors(trust, released=released) for trust in TRUSTS}
    if as_json:
        each = [
            {
                "name": table.title,
                "cells": cells.size,
                "standard_error": {trust: errors[trust][place] for trust in TRUSTS},
            }
            for place, (table, cells) in enumerate(tables)
        ]
        tree = {"mu": mu, "epsilon": epsilon, "delta": privacy.delta, "places": asked.records, "tables": each}
        sys.stdout.write(json.dumps(tree) + "\n")
        return
    lines = [["table", "kind", "cells", *(f"± {trust}" for trust in TRUSTS)]]
    for place, (table, cells) in enumerate(tables):
        halves = [upper_figure(Z * errors[trust][place], 3) for trust in TRUSTS]
        lines.append([table.title, table.kind, str(cells.size), *halves])
    print_table(lines)
    sys.stdout.write(
        f"\n± is half of an interval of 95 % about one released number, in {unit}s; the plan asks for trust = "
        f'"{asked.plan.trust}"\n'
        f"price, of all tables together: μ = {upper_figure(mu)}, {epsilon_words(epsilon, privacy.delta)} for "
        f"every {unit} ({privacy.relation})\n"
        f"{asked.records} places of {unit}s in {asked.cell.federation.silos} silos; nothing was asked of them\n"
    )


def _print(table: TableResult) -> None:
    """Numbers with intervals; a count below its own half-width is only known to be small."""
    width = max([1, *(len(each.of) for each in table.estimates)])
    lines = [[table.name, *([""] * (width - 1)), "", "95 %", "covers"]]
    for each in table.estimates[:_SHOWN]:
        of = [*each.of, *([""] * (width - len(each.of)))]
        half = Z * each.standard_error
        small = table.kind == "counts" and each.value < half
        shown = f"< {number(each.high)}" if small else number(each.value)
        lines.append([*of, shown, f"{number(each.low)} … {number(each.high)}", each.covers])
    print_table(lines)
    if (more := len(table.estimates) - _SHOWN) > 0:
        sys.stdout.write(f"and {more} more, in the files\n")
    for curve in table.curves if table.kind == "survival" else ():
        where = " ".join((*curve.group, f"survival to {curve.at[-1]:g}"))
        band = f"{number(curve.low[-1])} … {number(curve.high[-1])}"
        say(f"{where}: {number(curve.values[-1])}, {band} of the population\n")
