"""Statistics of a federation's tables: a plan of public tables, one noisy release, and what follows from it.

    plan ─▶ scenario of one round (model "statistics") ─▶ any engine ─▶ its model, times the records ─▶ tables

The scenario is one like any other: silos, guards, noise, integers, ledger and claim treat it as they treat a run
of DP-SGD.  What is computed here is known before the run (cells, standard errors, the price), or is a function of
what was released.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.addons.statistics.curves import Z, compute_survival_bands
from fedpriv.addons.statistics.indicators import (
    PRESENT_MOMENT,
    STATISTICS,
    Cells,
    StatisticsSettings,
    prefix_root_matrix,
)
from fedpriv.addons.statistics.plan import StatisticsPlan, TableRequest, is_plan, read_plan
from fedpriv.core.errors import InputError, suggestion
from fedpriv.data.named import find_schema, load
from fedpriv.data.partition import index_persons
from fedpriv.data.schema import TableSchema
from fedpriv.noise.trust import USER
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import make_schema_task
from fedpriv.scenario.load import Scenario, parse_scenario
from fedpriv.scenario.messages import validate_section
from fedpriv.scenario.schema import Cell

MISSING, SITE = "missing", "site"
_DEFAULT_BINS = 10
TRUSTS = ("untrusted", "secure-aggregation", "trusted")
_MIN_STANDARD_ERRORS = 4.0
"""Standard errors of the number of values below which there is no mean of them."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """A plan with the table that it is about, and the scenario that releases it."""

    plan: StatisticsPlan
    schema: TableSchema
    scenario: Scenario

    @staticmethod
    def from_plan(plan: StatisticsPlan) -> "Statistics":
        """InputError for columns that there are not, and for what no run can be."""
        schema = find_schema(plan.data.name, plan.data.table)
        if schema is None:
            raise InputError(f"data.name = {plan.data.name!r}: statistics are of a table, .csv or .parquet")
        sizes = plan.records or _count_units(plan, schema)
        tables = [_make_cells(asked, schema) for asked in plan.table]
        privacy = plan.privacy.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        tree = {
            "name": plan.name,
            "title": plan.title,
            "seed": plan.seed,
            "data": plan.data.model_dump(mode="json", exclude_none=True, exclude_unset=True)
            | ({} if schema.site is None else {"partition": SITE}),
            "model": {
                "name": STATISTICS,
                "tables": [each.model_dump(mode="json", exclude_none=True) for each in tables],
                **({"real": True} if schema.class_count == 0 else {}),
            },
            "federation": {"silos": len(sizes), "rounds": 1, "batches": list(sizes)},
            "algorithm": {"name": "dp-sgd", "trust": plan.trust, "clip": 1.0, "step": 1.0},
            "privacy": privacy,
            "run": {"dtype": "float64", "evaluations": 1},
        }
        return Statistics(plan, schema, parse_scenario(tree, "plan"))

    @property
    def cell(self) -> Cell:
        return self.scenario.points[0].cell

    @cached_property
    def settings(self) -> StatisticsSettings:
        found = self.cell.model.settings
        assert isinstance(found, StatisticsSettings)
        return found

    @property
    def unit_count(self) -> int:
        """Rows, or persons, that have a place: the public denominator of all means."""
        return sum(self.cell.batch_sizes)

    def make_plan(self, trust: str | None = None, *, for_release: bool = False) -> Plan:
        """The run's plan, from public facts alone."""
        cell = self.cell
        if trust is not None:
            cell = cell.model_copy(update={"algorithm": cell.algorithm.model_copy(update={"trust": trust})})
        return make_plan(cell, make_schema_task(cell, self.schema).objective, for_release=for_release)

    def noise_stds(self, trust: str | None = None, *, for_release: bool = False) -> tuple[float, ...]:
        """The deviation of the noise of every table's coordinates, in records."""
        std = self.make_plan(trust, for_release=for_release).noise.std_in_mean * self.unit_count
        return tuple(float(std) / scale for scale in self.settings.scales)

    def read_tables(self, model: NDArray[np.floating[Any]], *, for_release: bool = False) -> "list[TableResult]":
        """What the released mean of increments says, table by table: a function of it and of public numbers."""
        settings, stds = self.settings, self.noise_stds(for_release=for_release)
        parts = np.split(np.asarray(model), np.cumsum([table.size for table in settings.tables]))[:-1]
        values = [
            part.astype(np.float64) * (self.unit_count / a) for part, a in zip(parts, settings.scales, strict=True)
        ]
        each = zip(self.plan.table, settings.tables, values, stds, strict=True)
        return [read_table(asked, table, self.schema, own, std) for asked, table, own, std in each]


def _count_units(plan: StatisticsPlan, schema: TableSchema) -> tuple[int, ...]:
    """Rows or persons of each silo of a simulation; the relation makes their number public."""
    data = load(plan.data.name, table=plan.data.table)
    sites = None if data.sites is None else data.sites.train
    count = len(data.train_labels)
    if plan.privacy.unit == USER.name and data.persons is not None:
        first = index_persons(data.persons)[0]
        sites, count = None if sites is None else sites[first], len(first)
    if sites is not None:
        return tuple(np.bincount(sites, minlength=len(schema.sites)).tolist())
    silos = plan.silos or 1
    if silos > count:
        raise InputError(f"silos = {silos}: {plan.data.name} has {count} records")
    return (count // silos,) * silos


def _make_cells(asked: TableRequest, schema: TableSchema) -> Cells:
    """A table of a plan as the model has it; InputError for columns that there are not."""
    if unknown := [name for name in asked.edges if name not in asked.of]:
        raise InputError(f"table {asked.title!r}: edges of {unknown[0]!r}, which is none of its columns")
    axes = [_axis_data(asked, name, schema) for name in asked.of]
    form = {"counts": "counts", "means": "moments", "quantiles": "prefix", "survival": "survival"}[asked.kind]
    return validate_section(Cells, {"axes": axes, "form": form, "weight": asked.weight}, f"table {asked.title!r}")


def _axis_data(asked: TableRequest, name: str, schema: TableSchema) -> dict[str, Any]:
    if name not in schema.raw_columns:
        known = ", ".join(map(repr, schema.raw_columns))
        raise InputError(
            f"table {asked.title!r}: {name!r} is no column, only {known}{suggestion(name, schema.raw_columns)}"
        )
    place, words = schema.raw_columns.index(name), column_words(name, schema)
    if words is not None:
        if name in asked.edges:
            raise InputError(f"table {asked.title!r}: edges of {name!r}, a column of words")
        return {"column": place, "words": len(words)}
    bounds = schema.range if name == schema.target else schema.columns[name].range
    assert bounds is not None
    bins = 1 if asked.kind == "means" else _DEFAULT_BINS
    return {"column": place, "edges": asked.edges.get(name) or tuple(np.linspace(*bounds, bins + 1).tolist())}


def column_words(name: str, schema: TableSchema) -> tuple[str, ...] | None:
    """The words of a column; None for one of numbers."""
    if name == schema.target:
        return schema.classes
    return schema.sites if name == schema.site else schema.columns[name].values


def _cell_labels(name: str, table: Cells, place: int, schema: TableSchema) -> list[str]:
    """Of the cells of one axis, the missing ones last."""
    words, edges = column_words(name, schema), table.axes[place].edges
    if edges is None:
        return [*(words or ()), MISSING]
    bins = [f"{low:g} – {high:g}" for low, high in itertools.pairwise(edges)]
    return [f"below {edges[0]:g}", *bins, f"above {edges[-1]:g}", MISSING]


@dataclass(frozen=True)
class TableEstimate:
    """One number of a table, with an interval of 95 % that has the noise in it."""

    of: tuple[str, ...]
    value: float
    standard_error: float
    low: float
    high: float
    covers: str = "these records"
    """What the interval is of: "these records", or "the population", sampling included."""


@dataclass(frozen=True)
class TableResult:
    """A table as it was released, less what no reader needs."""

    name: str
    of: tuple[str, ...]
    kind: str
    standard_error: float
    """Of every coordinate that was released, in records."""
    estimates: tuple[TableEstimate, ...]
    curves: "tuple[Curve, ...]" = ()


@dataclass(frozen=True)
class Curve:
    """A curve over public edges, of one group."""

    group: tuple[str, ...]
    at: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def read_table(
    asked: TableRequest, table: Cells, schema: TableSchema, released: Floats, std: float
) -> TableResult:
    """What one table's released coordinates say; `std` is the deviation of the noise of each."""
    names = [_cell_labels(name, table, place, schema) for place, name in enumerate(asked.of)]
    groups = _cross_labels(names[: len(table.group_axes)])
    found = TableResult(asked.title, asked.of, asked.kind, std, ())
    if table.form == "counts":
        half = Z * std
        counts = tuple(
            TableEstimate(label, value, std, max(0.0, value - half), max(0.0, value + half))
            for label, value in zip(groups, released.tolist(), strict=True)
        )
        return replace(found, estimates=counts)
    if table.form == "moments":
        return replace(found, estimates=tuple(_estimate_moments(table, released, std)))
    parts = released.reshape(len(groups), -1)
    of_group = partial(_estimate_quantiles, asked) if table.form == "prefix" else _estimate_survival
    each = [of_group(table, group, part, std) for group, part in zip(groups, parts, strict=True)]
    estimates = tuple(estimate for some, _ in each for estimate in some)
    return replace(found, estimates=estimates, curves=tuple(curve for _, curve in each if len(curve.at) > 1))


def _estimate_moments(table: Cells, released: Floats, std: float) -> list[TableEstimate]:
    """Number of values, mean and deviation; the last two where there are more than 4 standard errors of values.

    Intervals are of these records, by the delta method, and of the population, the variance of the mean added.
    """
    low, high = table.axes[0].edges or (0.0, 1.0)
    unit, (first, second, third) = (high - low) / 2.0, released.tolist()
    count, error = third / PRESENT_MOMENT, std / PRESENT_MOMENT
    found = [_make_estimate("values", count, error)]
    if count <= _MIN_STANDARD_ERRORS * error:
        return found
    mean, square = first / count, second / count
    of_mean = np.array([1.0, 0.0, -mean / PRESENT_MOMENT]) * std / count
    of_variance = np.array([-2.0 * mean, 0.5, (2.0 * mean**2 - square / 2.0) / PRESENT_MOMENT]) * std / count
    variance = min(1.0, max((square + 1.0) / 2.0 - mean**2, 1.0 / count))
    error, sampled = float(np.linalg.norm(of_mean)), math.sqrt(float(of_mean @ of_mean) + variance / count)
    at, spread = low + unit * (1.0 + mean), unit * float(np.linalg.norm(of_variance)) / (2.0 * math.sqrt(variance))
    return [
        *found,
        _make_estimate("mean", at, unit * error),
        replace(_make_estimate("mean", at, unit * sampled), covers="the population"),
        _make_estimate("deviation", unit * math.sqrt(variance), spread),
    ]


def _make_estimate(name: str, value: float, error: float) -> TableEstimate:
    return TableEstimate((name,), value, error, value - Z * error, value + Z * error)


def _cross_labels(names: list[list[str]]) -> list[tuple[str, ...]]:
    return list(itertools.product(*names))


def _estimate_quantiles(
    asked: TableRequest, table: Cells, group: tuple[str, ...], released: Floats, std: float
) -> tuple[list[TableEstimate], Curve]:
    """Quantiles of the known values, each the upper edge of its bin, and the share of records below every edge.

    An interval of the records is where a band of ± 1.96 deviations of the noise of N_k - q n holds 0; one of the
    population has n q (1 - q) beside that noise.
    """
    from scipy.optimize import isotonic_regression  # slow to import: released quantiles alone pay for it

    edges = np.array(table.axes[-1].edges)
    ordered = len(edges) + 1
    root = prefix_root_matrix(ordered)
    sums = root @ released[:ordered]
    total, upper = float(sums[-1]), np.append(edges, np.inf)
    shown = isotonic_regression(sums).x.clip(0.0, max(total, 0.0))
    estimates = []
    for share in asked.quantiles:
        apart = sums - share * total
        noise = std * np.linalg.norm(root - share * root[-1], axis=1)
        at = _find_first_edge(shown - share * total, upper)
        sampled = np.sqrt(noise**2 + max(total, 0.0) * share * (1.0 - share))
        for covers, error in (("these records", noise), ("the population", sampled)):
            low, high = _find_first_edge(apart + Z * error, upper), _find_first_edge(apart - Z * error, upper)
            label = (*group, f"quantile {share:g}")
            estimates.append(TableEstimate(label, at, float(noise.max()), low, max(low, high), covers))
    scale = 1.0 / total if total > 0.0 else 0.0
    error = Z * std * np.linalg.norm(root, axis=1)[:-1]
    curve = Curve(
        group,
        tuple(edges.tolist()),
        tuple((shown[:-1] * scale).clip(0.0, 1.0).tolist()),
        tuple(((sums[:-1] - error) * scale).clip(0.0, 1.0).tolist()),
        tuple(((sums[:-1] + error) * scale).clip(0.0, 1.0).tolist()),
    )
    return estimates, curve if scale else replace(curve, at=())


def _find_first_edge(values: Floats, upper: Floats) -> float:
    """The smallest edge from which on a value is not below 0; the last one where none is."""
    reached = np.flatnonzero(values >= 0.0)
    return float(upper[reached[0]] if reached.size else upper[-1])


def _estimate_survival(
    table: Cells, group: tuple[str, ...], released: Floats, std: float
) -> tuple[list[TableEstimate], Curve]:
    """Kaplan–Meier's curve at the edges of the bins, and the number at risk at its beginning."""
    bands = compute_survival_bands(released[: 2 * table.bin_count + 1], std)
    start, half = float(bands.start), Z * bands.start_error
    low, high = max(0.0, start - half), max(0.0, start + half)
    last = int(np.sum(bands.is_shown))
    edges = table.axes[-2].edges or ()
    rows = ([1.0, *row[:last].tolist()] for row in (bands.values, bands.low, bands.high))
    found = TableEstimate((*group, "at risk at the start"), start, bands.start_error, low, high)
    return [found], Curve(group, tuple(map(float, edges[: last + 1])), *map(tuple, rows))


def cell_of_plan(path: Path, overrides: Sequence[str]) -> Cell | None:
    """Return the cell that a plan's file asks for, or None for another file."""
    return Statistics.from_plan(read_plan(path, overrides)).cell if is_plan(path) else None
