"""Statistics of a federation's tables: a plan, one noisy release, and the estimates from it.

    plan ─▶ scenario of one round (model "statistics") ─▶ any engine ─▶ its model, times the records ─▶ tables

A release is the noisy mean over records of (a_j C_j e_k)_j: e_k indicates the record's cell in table j, C_j is the
identity or the square root of sums over ordered cells, and a_j is the table's scale (`indicators`).

Released coordinates of table j are this mean times the public number of records over a_j, so that they are in
records.  If persons or clients are protected, they are counted in place of records.  Columns of a table are its
axes.  For quantiles and survival curves, the first axes split the records into groups, each with a curve.
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
from fedpriv.core.errors import InputError, refuse, suggestion
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
"""Standard errors of the number of values above which their mean is estimated."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """A plan with the schema of its table, and the scenario that releases it."""

    plan: StatisticsPlan
    """Tables to release, with the data, budget and trust."""
    schema: TableSchema
    """Columns of the data with their public ranges and words."""
    scenario: Scenario
    """Scenario of one round with the model "statistics"."""

    @staticmethod
    def from_plan(plan: StatisticsPlan) -> "Statistics":
        """Make the scenario of a plan, a run of one round of DP-SGD with step 1 and clip 1.

        The round starts from the model 0, so that the model after it is the noisy mean of (a_j C_j e_k)_j.
        Records are split over silos by site if the schema names a column for it.  Sizes of silos that the plan
        does not give are counted in the data.

        Raises:
            InputError: The data are no table or cannot be read, the plan has another number of silos than its
                records or its data, or no run can have the tables or the settings of the plan.
        """
        schema = find_schema(plan.data.name, plan.data.table)
        if schema is None:
            raise InputError(
                f"data.name = {plan.data.name!r}: statistics are of a table, such as a .csv or .parquet file"
            )
        sizes = plan.records or _count_units(plan, schema)
        refuse(
            {
                f"silos = {plan.silos}: {'`records` is' if plan.records else 'the data are'} of {len(sizes)} of "
                "them; leave `silos` out": plan.silos not in (None, len(sizes))
            }
        )
        tables = [_make_cells(request, schema) for request in plan.table]
        tree = {
            "name": plan.name,
            "title": plan.title,
            "seed": plan.seed,
            "data": plan.data.model_dump(mode="json", exclude_none=True, exclude_unset=True)
            | ({} if schema.site is None else {"partition": SITE}),
            "model": {
                "name": STATISTICS,
                "tables": [table.model_dump(mode="json", exclude_none=True) for table in tables],
                **({"real": True} if schema.class_count == 0 else {}),  # the target of the table is a number
            },
            "federation": {"silos": len(sizes), "rounds": 1, "batches": list(sizes)},
            "algorithm": {"name": "dp-sgd", "trust": plan.trust, "clip": 1.0, "step": 1.0},
            "privacy": plan.privacy.model_dump(mode="json", exclude_none=True, exclude_unset=True),
            "run": {"dtype": "float64", "evaluations": 1},
        }
        return Statistics(plan, schema, parse_scenario(tree, "plan"))

    @property
    def cell(self) -> Cell:
        return self.scenario.points[0].cell

    @cached_property
    def settings(self) -> StatisticsSettings:
        settings = self.cell.model.settings
        assert isinstance(settings, StatisticsSettings)
        return settings

    @property
    def unit_count(self) -> int:
        """Public number of units (rows, persons or clients) in all silos, denominator of the released mean."""
        return sum(self.cell.batch_sizes)

    def make_plan(self, trust: str | None = None, *, for_release: bool = False) -> Plan:
        """Plan the run from public facts alone.

        Args:
            trust: Trust setting in place of the plan's own, or None for that of the plan.
            for_release: Whether the noise is that of a release, made of integers, and not of a simulation.
        """
        cell = self.cell
        if trust is not None:
            cell = cell.model_copy(update={"algorithm": cell.algorithm.model_copy(update={"trust": trust})})
        return make_plan(cell, make_schema_task(cell, self.schema).objective, for_release=for_release)

    def noise_stds(self, trust: str | None = None, *, for_release: bool = False) -> tuple[float, ...]:
        """Return for each table the standard deviation of the noise in any of its coordinates, in records.

        Args:
            trust: Trust setting in place of the plan's own, or None for that of the plan.
            for_release: Whether the noise is that of a release, made of integers, and not of a simulation.
        """
        std = self.make_plan(trust, for_release=for_release).noise.std_in_mean * self.unit_count
        return tuple(float(std) / scale for scale in self.settings.scales)

    def read_tables(self, model: NDArray[np.floating[Any]], *, for_release: bool = False) -> "list[TableResult]":
        """Compute the tables from the released model and public numbers.

        Args:
            model: Released model, (d,), the noisy mean of (a_j C_j e_k)_j (`Indicators`).
            for_release: Whether the noise is that of a release, made of integers, and not of a simulation.
        """
        settings, stds = self.settings, self.noise_stds(for_release=for_release)
        parts = np.split(np.asarray(model), np.cumsum([table.size for table in settings.tables]))[:-1]
        values = [
            part.astype(np.float64) * (self.unit_count / a) for part, a in zip(parts, settings.scales, strict=True)
        ]
        requests = zip(self.plan.table, settings.tables, values, stds, strict=True)
        return [
            read_table(request, table, self.schema, released, std) for request, table, released, std in requests
        ]


def _count_units(plan: StatisticsPlan, schema: TableSchema) -> tuple[int, ...]:
    """Count the training rows of each silo, or its persons if these are protected and the data name them.

    Silos are the sites of the table, and a person counts at the site of the person's first row.  Without sites
    there are as many equal silos as the plan says, or one, and the remainder of the division is left out.

    Raises:
        InputError: The data cannot be read, or there are more silos than rows or persons.
    """
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
        raise InputError(f"silos = {silos}: {plan.data.name} has {count} records or persons to divide")
    return (count // silos,) * silos


def _make_cells(request: TableRequest, schema: TableSchema) -> Cells:
    """Return the model's form of a plan's table.

    Raises:
        InputError: The table's columns, edges or weight cannot be used.
    """
    if unknown := [name for name in request.edges if name not in request.of]:
        raise InputError(f"table {request.title!r}: edges of {unknown[0]!r}, which is none of its columns")
    axes = [_axis_data(request, name, schema) for name in request.of]
    form = {"counts": "counts", "means": "moments", "quantiles": "prefix", "survival": "survival"}[request.kind]
    return validate_section(
        Cells, {"axes": axes, "form": form, "weight": request.weight}, f"table {request.title!r}"
    )


def _axis_data(table: TableRequest, name: str, schema: TableSchema) -> dict[str, Any]:
    """Return an axis as plain data: the column's position, and its number of words or the edges of bins.

    A column without words has numbers.  Without given edges there are 10 bins of equal width over the range of the
    column, or one bin in a table of means.

    Raises:
        InputError: The data have no such column, or a column of words is given edges.
    """
    if name not in schema.raw_columns:
        columns = ", ".join(map(repr, schema.raw_columns))
        raise InputError(
            f"table {table.title!r}: {name!r} is no column, only {columns}{suggestion(name, schema.raw_columns)}"
        )
    position, labels = schema.raw_columns.index(name), column_words(name, schema)
    if labels is not None:
        if name in table.edges:
            raise InputError(f"table {table.title!r}: edges of {name!r}, a column of words")
        return {"column": position, "words": len(labels)}
    bounds = schema.range if name == schema.target else schema.columns[name].range
    assert bounds is not None
    bins = 1 if table.kind == "means" else _DEFAULT_BINS
    return {"column": position, "edges": table.edges.get(name) or tuple(np.linspace(*bounds, bins + 1).tolist())}


def column_words(name: str, schema: TableSchema) -> tuple[str, ...] | None:
    """Return the words of a column, or None for a column of numbers."""
    if name == schema.target:
        return schema.classes
    return schema.sites if name == schema.site else schema.columns[name].values


def _cell_labels(name: str, table: Cells, place: int, schema: TableSchema) -> list[str]:
    """Return the labels of the cells of one axis, with the missing cell last."""
    labels, edges = column_words(name, schema), table.axes[place].edges
    if edges is None:
        return [*(labels or ()), MISSING]
    bins = [f"{low:.15g} – {high:.15g}" for low, high in itertools.pairwise(edges)]
    return [f"below {edges[0]:.15g}", *bins, f"above {edges[-1]:.15g}", MISSING]


@dataclass(frozen=True)
class TableEstimate:
    """One number of a table, with an interval of 95 % that includes the noise."""

    of: tuple[str, ...]
    """Labels of the cell, or labels of the group and the name of the figure."""
    value: float
    """Estimate in records, or in the unit of a column."""
    standard_error: float
    """Standard deviation of the estimate, by noise or, for the population, by noise and sampling.

    Quantiles have the largest s_k of `_estimate_quantiles`, in records, for both intervals.
    """
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    covers: str = "these records"
    """Subject of the interval: "these records", or "the population" if sampling is included."""


@dataclass(frozen=True)
class TableResult:
    """Estimates and curves of a released table."""

    name: str
    """Title of the table in the plan."""
    of: tuple[str, ...]
    """Columns of the table."""
    kind: str
    """Kind of the table: "counts", "means", "quantiles" or "survival"."""
    standard_error: float
    """Standard deviation of the noise in each released coordinate, in records."""
    estimates: tuple[TableEstimate, ...]
    curves: "tuple[Curve, ...]" = ()


@dataclass(frozen=True)
class Curve:
    """A curve over public edges, of one group, with a band from `low` to `high`."""

    group: tuple[str, ...]
    """Labels of the group, empty if no column splits the curve."""
    at: tuple[float, ...]
    """Edges at which the curve has values."""
    values: tuple[float, ...]
    """Survival at each edge, or the share of records in cells below it, among those with a value."""
    low: tuple[float, ...]
    """Lower end of the band at each edge."""
    high: tuple[float, ...]
    """Upper end of the band at each edge."""


def read_table(
    request: TableRequest, table: Cells, schema: TableSchema, released: Floats, std: float
) -> TableResult:
    """Compute the estimates and curves of one table from its released coordinates.

    A table of counts has an estimate for each cell, with the interval ± 1.96 standard deviations of the noise, cut
    at 0.  A table of means has those of `_estimate_moments`.  For quantiles and survival each group has estimates,
    and a curve if it has values at two edges or more.

    Args:
        request: The table in the plan.
        table: The same table in the model.
        schema: Schema of the data, which names the cells.
        released: Released coordinates of this table, (size,), in records.
        std: Standard deviation of the noise in each coordinate, in records.
    """
    names = [_cell_labels(name, table, axis_index, schema) for axis_index, name in enumerate(request.of)]
    # Cells of counts, or the groups that have a curve each.
    groups = list(itertools.product(*names[: len(table.group_axes)]))
    result = TableResult(request.title, request.of, request.kind, std, ())
    if table.form == "counts":
        half = Z * std
        counts = tuple(
            TableEstimate(label, value, std, max(0.0, value - half), max(0.0, value + half))
            for label, value in zip(groups, released.tolist(), strict=True)
        )
        return replace(result, estimates=counts)
    if table.form == "moments":
        return replace(result, estimates=tuple(_estimate_moments(table, released, std)))
    parts = released.reshape(len(groups), -1)
    estimate_group = partial(_estimate_quantiles, request) if table.form == "prefix" else _estimate_survival
    group_results = [estimate_group(table, group, part, std) for group, part in zip(groups, parts, strict=True)]
    estimates = tuple(estimate for group_estimates, _ in group_results for estimate in group_estimates)
    return replace(
        result, estimates=estimates, curves=tuple(curve for _, curve in group_results if len(curve.at) > 1)
    )


def _estimate_moments(table: Cells, released: Floats, std: float) -> list[TableEstimate]:
    """Estimate the number of values, their mean and their standard deviation.

    With (s_1, s_2, s_3) released sums of (x, 2x² - 1, 1.7), for numbers x cut to the range, which is scaled to
    -1 … 1, the number of values is n = s_3/1.7, their mean is s_1/n and their variance (s_2/n + 1)/2 - (s_1/n)²,
    raised to 1/n and cut to 1.  Estimates of mean and deviation are in the unit of the column, and are left out if
    n is at most 4 standard deviations of its noise.

    Intervals are by the delta method.  The mean has an interval for the population, too, which adds the variance
    of sampling.

    Args:
        table: Table of moments, whose two edges are the range that is scaled to -1 … 1.
        released: Noisy sums s_1, s_2 and s_3, (3,).
        std: Standard deviation of the noise in each sum, in records.

    Returns:
        Estimates "values", "mean" for these records, "mean" for the population, and "deviation".
    """
    low, high = table.axes[0].edges or (0.0, 1.0)
    unit, (first, second, third) = (high - low) / 2.0, released.tolist()
    count, error = third / PRESENT_MOMENT, std / PRESENT_MOMENT
    estimates = [_make_estimate("values", count, error)]
    if count <= _MIN_STANDARD_ERRORS * error:
        return estimates
    mean, square = first / count, second / count
    # Derivatives by s_1, s_2 and s_3, times the standard deviation of the noise.
    mean_gradient = np.array([1.0, 0.0, -mean / PRESENT_MOMENT]) * std / count
    variance_gradient = np.array([-2.0 * mean, 0.5, (2.0 * mean**2 - square / 2.0) / PRESENT_MOMENT]) * std / count
    variance = min(1.0, max((square + 1.0) / 2.0 - mean**2, 1.0 / count))
    error, population_error = (
        float(np.linalg.norm(mean_gradient)),
        math.sqrt(float(mean_gradient @ mean_gradient) + variance / count),
    )
    mean_value, deviation_error = (
        low + unit * (1.0 + mean),
        unit * float(np.linalg.norm(variance_gradient)) / (2.0 * math.sqrt(variance)),
    )
    return [
        *estimates,
        _make_estimate("mean", mean_value, unit * error),
        replace(_make_estimate("mean", mean_value, unit * population_error), covers="the population"),
        _make_estimate("deviation", unit * math.sqrt(variance), deviation_error),
    ]


def _make_estimate(name: str, value: float, error: float) -> TableEstimate:
    return TableEstimate((name,), value, error, value - Z * error, value + Z * error)


def _estimate_quantiles(
    request: TableRequest, table: Cells, group: tuple[str, ...], released: Floats, std: float
) -> tuple[list[TableEstimate], Curve]:
    """Estimate quantiles of the values that are not missing, and the share in the cells below each edge.

    N_k is the noisy number of values in cells up to k, and n that of all values.  The quantile q is the first
    upper edge of a cell with N_k ≥ q n, once N is made monotone and cut to 0 … max(0, n).  The upper edge of the
    last cell is infinite.

    Intervals use N as released.  Let e_k = N_k - q n, which without noise is below 0 before the quantile and 0 or
    more from it on, and s_k the standard deviation of its noise.  The interval for these records begins at the
    first edge with e_k ≥ -1.96 s_k, and ends at the first edge from which on every e_k ≥ 1.96 s_k, or is infinite
    without such an edge.  It begins too late only if the noise at the quantile's own edge is below -1.96 s_k, and
    ends too early only if that at the edge before is 1.96 s_k or more, with a probability of 2.5 % each.  The
    interval for the population adds the variance max(0, n) q (1 - q) to that of the noise, and half a record to
    1.96 standard deviations, because counts are whole.

    Args:
        request: The table in the plan, with its quantiles q.
        table: The same table in the model.
        group: Labels of the group.
        released: Released coordinates of the group, of which the last is for missing values.
        std: Standard deviation of the noise in each coordinate, in records.

    Returns:
        Two estimates for each quantile, for these records and for the population, and the curve of the shares
        with its band (`_bound_shares`).  The curve has no edges `at` if n is not above 0.
    """
    from scipy.optimize import isotonic_regression  # slow to import

    edges = np.array(table.axes[-1].edges)
    ordered = len(edges) + 1
    root = prefix_root_matrix(ordered)
    # The coordinates are `root` times the counts of cells, and `root` times `root` adds up cells, which gives N_k.
    sums = root @ released[:ordered]
    total, upper = float(sums[-1]), np.append(edges, np.inf)
    monotone_sums = isotonic_regression(sums).x.clip(0.0, max(total, 0.0))
    estimates = []
    for share in request.quantiles:
        excess = sums - share * total
        noise = std * np.linalg.norm(root - share * root[-1], axis=1)
        quantile = _find_first_edge(monotone_sums - share * total, upper)
        population_half = Z * np.sqrt(noise**2 + max(total, 0.0) * share * (1.0 - share)) + 0.5
        for covers, half in (("these records", Z * noise), ("the population", population_half)):
            low = _find_first_edge(excess + half, upper)
            # The least value from an edge on is at least 0 if all of them are.
            high = _find_first_edge(np.minimum.accumulate((excess - half)[::-1])[::-1], upper)
            label = (*group, f"quantile {share:.15g}")
            estimates.append(TableEstimate(label, quantile, float(noise.max()), low, high, covers))
    if total <= 0.0:
        return estimates, Curve(group, (), (), (), ())
    shares = [(monotone_sums / total).clip(0.0, 1.0), *_bound_shares(sums, root, std)]
    return estimates, Curve(group, tuple(edges.tolist()), *(tuple(row[:-1].tolist()) for row in shares))


def _bound_shares(sums: Floats, root: Floats, std: float) -> tuple[Floats, Floats]:
    """Return the ends of the intervals of 95 % for the shares of these records in the cells up to each.

    The interval has the shares f with |N_k - f n| ≤ 1.96 standard deviations of the noise in N_k - f n (Fieller
    1954), in which n has noise, too.  Its ends are cut to 0 … 1, so that it is 0 alone or 1 alone if all these
    shares lie outside.  The interval is 0 … 1 if n is within 1.96 standard deviations of 0.

    Args:
        sums: N, of which the last is n, above 0.
        root: Square root of prefix sums, by which the noise of the release enters N.
        std: Standard deviation of the noise in each coordinate, in records.
    """
    # 1.96² times the variances of N_k, and their covariances with n, whose own variance is the last covariance.
    noise = (Z * std) ** 2 * np.stack([np.sum(root**2, axis=1), root @ root[-1]])
    # The squared condition, (N_k - f n)² ≤ 1.96² Var(N_k - f n), is a f² - 2 b f + c ≤ 0.
    a, b, c = sums[-1] ** 2 - noise[1, -1], sums * sums[-1] - noise[1], sums**2 - noise[0]
    if a <= 0.0:
        return np.zeros_like(sums), np.ones_like(sums)
    half = np.sqrt(np.maximum(b**2 - a * c, 0.0))
    return ((b - half) / a).clip(0.0, 1.0), ((b + half) / a).clip(0.0, 1.0)


def _find_first_edge(values: Floats, upper: Floats) -> float:
    """Return the entry of `upper` at the first value of at least 0, or its last one if all are negative."""
    hits = np.flatnonzero(values >= 0.0)
    return float(upper[hits[0]] if hits.size else upper[-1])


def _estimate_survival(
    table: Cells, group: tuple[str, ...], released: Floats, std: float
) -> tuple[list[TableEstimate], Curve]:
    """Estimate the Kaplan–Meier curve at the edges of the bins, and the number at risk at its start.

    The curve is 1 at the first edge, and ends before the first bin with too few records at risk for the noise.

    Args:
        table: Table of a time and an event.
        group: Labels of the group.
        released: Released coordinates of the group: those of events by bin, those of censored records by bin and
            of all records beyond the bins, and last, not used here, that of records in none of these.
        std: Standard deviation of the noise in each coordinate, in records.

    Returns:
        The estimate of the number at risk, and the curve.
    """
    bands = compute_survival_bands(released[: 2 * table.bin_count + 1], std)
    start, half = float(bands.start), Z * bands.start_error
    low, high = max(0.0, start - half), max(0.0, start + half)
    shown_count = int(np.sum(bands.is_shown))
    edges = table.axes[-2].edges or ()
    rows = ([1.0, *row[:shown_count].tolist()] for row in (bands.values, bands.low, bands.high))
    at_risk = TableEstimate((*group, "at risk at the start"), start, bands.start_error, low, high)
    return [at_risk], Curve(group, tuple(map(float, edges[: shown_count + 1])), *map(tuple, rows))


def cell_of_plan(path: Path, overrides: Sequence[str]) -> Cell | None:
    """Return the cell of a plan's file, or None for a file that is no plan.

    Raises:
        InputError: The plan is malformed, its data cannot be used, or no run can have its settings.
    """
    return Statistics.from_plan(read_plan(path, overrides)).cell if is_plan(path) else None
