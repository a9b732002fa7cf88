"""Summaries of a run's cells: statistics over seeds at each sweep point, and the lines below them.

An axis is a swept key of the scenario with its values, and a sweep point has one value for each axis.  A cell is
one run: a sweep point with a seed, as a dictionary of results.json.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedpriv.accounting.selection import PrivateSelection
from fedpriv.claims.claim import (
    EXTERNAL_STEP_NOTE,
    REAL_ASSUMPTIONS,
    describe_cells,
    describe_evaluation,
    has_external_first_step,
)
from fedpriv.claims.entries import format_differing_cells
from fedpriv.claims.ledger import stream_from_data
from fedpriv.core.extensions import load_add_on_parts
from fedpriv.core.figures import (
    format_count,
    format_upper_delta,
    format_upper_range,
    privacy_caveats,
)
from fedpriv.loss.scores import DEFINED_SUFFIX, MEAN_SUFFIX, WORST_SUFFIX
from fedpriv.noise.trust import CLIENT, RECORD
from fedpriv.study.results import Results, describe_engines


@dataclass(frozen=True)
class Metric:
    """Key of a figure in results.json, with the title, unit and digits with which the figure is printed."""

    key: str
    title: str
    factor: float
    """Factor from the stored figure to the printed one."""
    digits: int
    """Number of decimals of a measured figure."""
    published_digits: int
    """Number of decimals of a published figure."""
    base: str | None = None
    """Key of the metric on all test records, if this one is on silos' own test records, or None."""


METRICS = (
    Metric("test_loss", "test loss", 1.0, 4, 3),
    Metric("test_accuracy", "test accuracy (%)", 100.0, 1, 1),
    Metric("test_auc", "AUC", 1.0, 4, 3),
    Metric("test_balanced_accuracy", "balanced accuracy (%)", 100.0, 1, 1),
    Metric("test_calibration_error", "calibration error (%)", 100.0, 1, 1),
    Metric("test_r2", "R²", 1.0, 4, 3),
    Metric("test_mae", "mean absolute error", 1.0, 4, 3),
    Metric("excess_risk", "excess risk", 1.0, 6, 6),
    Metric("gradient_norm", "gradient norm", 1.0, 4, 4),
    Metric("goldstein", "Goldstein measure", 1.0, 4, 4),
    Metric("test_concordance", "concordance", 1.0, 4, 3),
    Metric("test_integrated_brier", "integrated Brier score", 1.0, 4, 3),
    Metric("test_sensitivity", "sensitivity (%)", 100.0, 1, 1),
    Metric("test_specificity", "specificity (%)", 100.0, 1, 1),
    Metric("test_calibration_error_squared", "calibration error squared", 1.0, 4, 4),
)
"""Metrics of the whole federation, in the order of the columns.

Metrics in percent, such as accuracies, are stored as fractions.
"""


_SILO_LABELS = {MEAN_SUFFIX: "mean of silos", WORST_SUFFIX: "worst silo"}


def find_metric(key: str) -> Metric | None:
    """Return the metric with this key, or None if the key names no metric.

    The key is that of a metric of `METRICS`, or such a key with a suffix: for the mean over silos, the worst silo,
    one silo (`test_loss_at_NAME`), or the number of silos that have the metric.
    """
    for metric in METRICS:
        if key == metric.key:
            return metric
        suffix = key.removeprefix(f"{metric.key}_")
        if suffix == key or f"{metric.key}_" not in key:
            continue
        # An unknown suffix may be part of a longer key, as in test_calibration_error_squared.
        scope_label = _SILO_LABELS.get(suffix) or (
            f"at {suffix.removeprefix('at_')}" if suffix.startswith("at_") else None
        )
        if suffix == DEFINED_SUFFIX:
            title = f"silos that have {metric.title.removesuffix(' (%)')}; the others have one class or value"
            return Metric(key, title, 1.0, 0, 0, base=metric.key)
        if scope_label is not None:
            return replace(metric, key=key, title=f"{metric.title}, {scope_label}", base=metric.key)
    return None


@dataclass(frozen=True)
class Summary:
    """Mean and spread of a metric over the seeds of a sweep point, in the printed unit."""

    mean: float
    std: float | None
    """Sample standard deviation (ddof = 1), or None for a single value."""
    seeds: int
    """Number of finished cells that have the metric, one for each seed."""


@dataclass(frozen=True)
class PublishedComparison:
    """Measured and published values of a metric at a sweep point, either of them None if missing."""

    measured: Summary | None
    published: float | None

    @property
    def difference(self) -> float | None:
        """Measured mean minus published value, or None if either is missing."""
        return None if self.measured is None or self.published is None else self.measured.mean - self.published


def extract_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a cell of results.json, or of a line of history.jsonl, by key.

    Only metrics that `find_metric` knows are returned.
    """
    return {metric.key: record[metric.key] for metric in _find_metrics([record])}


def _find_metrics(records: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """Return the metrics that any record has, first those of `METRICS` in this order, then those of silos."""
    keys = dict.fromkeys(key for record in records for key in record)
    order = {metric.key: index for index, metric in enumerate(METRICS)}
    return sorted(filter(None, map(find_metric, keys)), key=lambda metric: order.get(metric.key, len(order)))


def run_metrics(results: Results) -> list[Metric]:
    """Return all metrics of a run's cells, or loss and accuracy if there are none."""
    return _find_metrics(results.cells) or list(METRICS[:2])


def shared_metrics(results: Results) -> list[Metric]:
    """Return the run's metrics without those of silos, except for `published_metrics`."""
    published = published_metrics(results)
    return [metric for metric in run_metrics(results) if metric.base is None or metric in published]


def silo_metrics(results: Results) -> dict[str, list[Metric]]:
    """Return the metrics on silos' own test records, grouped by the key of the metric on all test records.

    A group has the metric of each silo, its mean over silos, its worst silo, and the number of silos that have it,
    as far as the cells have them.
    """
    metrics_by_base: dict[str, list[Metric]] = {}
    for metric in run_metrics(results):
        if metric.base is not None:
            metrics_by_base.setdefault(metric.base, []).append(metric)
    return metrics_by_base


def sweep_points(results: Results) -> list[dict[str, Any]]:
    """Return all sweep points in the order of the scenario, finished or not."""
    return axis_points(results.axes)


def cells_at_point(results: Results, point: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the finished cells of a sweep point, one for each seed."""
    return [cell for cell in results.cells if cell["point"] == point]


def missing_seeds(results: Results) -> list[tuple[dict[str, Any], list[int]]]:
    """Return each incomplete sweep point with its seeds that have no result."""
    finished = [
        (point, {cell["seed"] for cell in cells_at_point(results, point)}) for point in sweep_points(results)
    ]
    return [
        (point, missing)
        for point, seeds in finished
        if (missing := [seed for seed in results.seeds if seed not in seeds])
    ]


def describe_incomplete(results: Results) -> str:
    """Return "INCOMPLETE: k of n cells are finished", or an empty text if all are finished."""
    # After a killed run all cells may be finished, though results.json is older and says that some are not.
    expected = len(sweep_points(results)) * len(results.seeds)
    finished = expected - sum(len(seeds) for _, seeds in missing_seeds(results))
    return "" if finished == expected else f"INCOMPLETE: {finished} of {expected} cells are finished"


def describe_state(results: Results) -> str:
    """Describe differing and missing cells in one line without a full stop, for a title or a caption.

    The text is empty if all cells are finished and their claims agree with the releases.
    """
    return "; ".join(filter(None, [describe_differing(results), describe_incomplete(results)]))


def describe_differing(results: Results) -> str:
    """Return "DIFFERS: …" if claims in results.json disagree with the releases, or an empty text."""
    return f"DIFFERS: {format_differing_cells(results.differs)}" if results.differs else ""


def summarize(cells: Sequence[Mapping[str, Any]], metric: Metric) -> Summary | None:
    """Return the mean and spread of a metric over cells, or None if no cell has the metric."""
    values = [metric.factor * cell[metric.key] for cell in cells if metric.key in cell]
    return Summary(*mean_and_deviation(values), len(values)) if values else None


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation (ddof = 1), None for a single value.

    If one of several values is not finite, the mean is not finite either, and the deviation is NaN.
    """
    has_spread = len(values) > 1
    if all(map(math.isfinite, values)):
        return statistics.fmean(values), statistics.stdev(values) if has_spread else None
    return sum(values) / len(values), math.nan if has_spread else None


def compare_with_published(results: Results, metric: Metric, point: Mapping[str, Any]) -> PublishedComparison:
    """Return the measured and the published value of a metric at a sweep point."""
    published = results.published.value(metric.key, point) if results.published else None
    return PublishedComparison(summarize(cells_at_point(results, point), metric), published)


SYMBOLS = {"privacy.mu": "μ", "privacy.rho": "ρ", "privacy.epsilon": "ε", "privacy.delta": "δ"}
"""Symbols of papers for keys of a scenario."""
_SELF_EXPLANATORY_KEYS = (
    "algorithm.name",
    "algorithm.trust",
    "data.name",
    "model.name",
)  # their values stand alone


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Return a short name for each dotted key.

    The name is the key's symbol, or its last part, or for `SECTION.name` the section.  Keys whose short names
    coincide keep the dotted form.
    """
    short_by_key = {key: SYMBOLS.get(key) or key.removesuffix(".name").rpartition(".")[2] for key in keys}
    uses = Counter(short_by_key.values())
    return {key: name if uses[name] == 1 else key for key, name in short_by_key.items()}


def format_value(value: Any) -> str:
    """Format a swept value as text, a float without ".0": 4, not 4.0."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def format_point(results: Results, point: Mapping[str, Any]) -> str:
    """Format a sweep point, such as "untrusted, ρ = 4, silos 100"."""
    names = short_names(results.axes)
    return ", ".join(_format_setting(key, names[key], format_value(value)) for key, value in point.items())


def _format_setting(key: str, name: str, value: str) -> str:
    if key in _SELF_EXPLANATORY_KEYS:
        return value
    return f"{name} = {value}" if name in SYMBOLS.values() else f"{name} {value}"


def axis_points(axes: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return the product of all axes, the last axis fastest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def group_by(
    records: Iterable[Mapping[str, Any]], kind: Callable[[Mapping[str, Any]], Any]
) -> dict[Any, list[Mapping[str, Any]]]:
    """Group records by their kind, in the order of each kind's first record."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(kind(record), []).append(record)
    return groups


_MAX_LISTED = 10  # sweep points with missing cells in a warning


def published_metrics(results: Results) -> list[Metric]:
    """Return the run's metrics that the scenario's [paper] or [table] names, none without these."""
    return [
        metric
        for metric in run_metrics(results)
        if results.published and metric.key in results.published.tables.table_metrics
    ]


def list_warnings(results: Results) -> list[str]:
    """Return warnings in Markdown of claims that disagree with the releases, and of missing cells.

    At most 10 sweep points with missing cells are named, by their swept values and missing seeds.
    """
    warnings = []
    if warning := describe_differing(results):
        warnings.append(f"**{warning}.** Figures of privacy are those of the ledger here.")
    if warning := describe_incomplete(results):
        points_and_seeds = [
            (format_point(results, point), f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
            for point, seeds in missing_seeds(results)
        ]
        # The point of a run without a sweep has no text.
        texts = [", ".join(filter(None, point_and_seeds)) for point_and_seeds in points_and_seeds]
        more = f"; and {format_count(len(texts) - _MAX_LISTED, 'more point')}" if len(texts) > _MAX_LISTED else ""
        warnings.append(f"**{warning}.** Missing: {'; '.join(texts[:_MAX_LISTED])}{more}.")
    return warnings


def describe_measurement(results: Results) -> str:
    """Describe in one line the seeds and engines of a run, and how far it is from published values.

    Notes follow on hidden published values, on shared random numbers, and of add-ons, as far as there are any.
    """
    largest_differences = []
    for metric in published_metrics(results):
        differences = [
            compare_with_published(results, metric, point).difference for point in sweep_points(results)
        ]
        if distances := [abs(difference) for difference in differences if difference is not None]:
            largest_differences.append(f"{max(distances):.{metric.digits}f} in {metric.title}")
    notes = (
        f"The largest differences to published values are {' and '.join(largest_differences)}."
        if largest_differences
        else "",
        _withheld_note(results),
        _pairing_note(results),
        *list_findings(results),
    )
    return " ".join(
        [f"{describe_seeds(results)}, computed on engine {describe_engines(results)}.", *filter(None, notes)]
    )


def describe_seeds(results: Results) -> str:
    """Describe the number of seeds, and the meaning of ± for several, without a full stop."""
    return (
        "Metrics are of one seed"
        if len(results.seeds) == 1
        else f"Metrics are means ± sample standard deviations over {len(results.seeds)} seeds"
    )


def list_findings(results: Results) -> list[str]:
    """Return the findings of add-ons, such as points that learnt nothing, a sentence each."""
    return [sentence for describe in load_add_on_parts("findings").values() for sentence in describe(results)]


def _withheld_note(results: Results) -> str:
    """Return a note on published values that are hidden, with the keys whose values differ, or ""."""
    withheld = results.published.withheld_keys if results.published else ()
    return (
        f"Published values are not shown, because they are for other values of {', '.join(withheld)}."
        if withheld
        else ""
    )


def _pairing_note(results: Results) -> str:
    """Return a note to compare rows seed by seed, since they can share random numbers, or "".

    The note is "" for a single row, without cells, and if the noise of any cell is secret.
    """
    simulated = all(cell["noise"] != "release" for cell in results.cells)
    return (
        "Cells of one seed can share the order of records and, scaled, their noise: compare rows "
        "seed by seed, and compute the spread from paired differences."
        if len(sweep_points(results)) > 1 and results.cells and simulated
        else ""
    )


def privacy_lines(results: Results) -> list[str]:
    """Return the lines on privacy: claims with caveats, external first steps, evaluations and tuning."""
    groups = group_by(
        results.cells,
        lambda cell: (
            *(cell[key] for key in ("unit", "relation", "trust", "noise", "delta")),
            cell.get("guarantee", cell["mu"] is None),
            *map(cell.get, ("participation", "holds")),
        ),
    )
    evaluation_lines = {
        describe_evaluation(evaluation, cell["delta"])
        for cell in results.cells
        if (evaluation := cell.get("evaluation")) and evaluation["releases"]
    }
    external_notes = (
        [EXTERNAL_STEP_NOTE] if any(has_external_first_step(cell["releases"]) for cell in results.cells) else []
    )
    claim_lines = [line for cells in groups.values() for line in (describe_cells(cells), *list_caveats(cells))]
    return [*claim_lines, *external_notes, *sorted(evaluation_lines), *describe_tuning(results)]


def list_caveats(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return caveats on the figures of cells that share δ and unit, a sentence each.

    A caveat is a fact that weakens the pair (ε, δ), such as a δ of 1/n or more, with n the number of records of a
    cell's smallest silo, or of its clients.  The cells' largest ε and largest known n decide.
    """
    private = [cell for cell in cells if cell["epsilon"] is not None]
    if not private:
        return []
    sizes = [size for cell in private if (size := _unit_count(cell)) is not None]
    noun = stream_from_data(private[0]["releases"][0]).unit.noun
    # A claim of releases in integers has a slack in δ.
    is_exact = any(cell.get("holds") not in (None, REAL_ASSUMPTIONS) for cell in private)
    max_epsilon = max(cell["epsilon"] for cell in private)
    return privacy_caveats(max_epsilon, private[0]["delta"], max(sizes, default=None), noun, slack=is_exact)


def _unit_count(cell: Mapping[str, Any]) -> int | None:
    """Return the number of records in the smallest silo, or of clients, or None for persons or if unknown."""
    unit = stream_from_data(cell["releases"][0]).unit
    if unit.name == CLIENT.name:
        return cell.get("clients")
    return cell.get("smallest_silo") if unit.name == RECORD.name else None


def describe_tuning(results: Results) -> list[str]:
    """Describe the privacy cost of settings that `fedpriv tune` chose, as one text in a list.

    A row is a part of the sweep with a choice of its own.  A private choice takes the best of a random number of
    runs of μ-GDP.  Its cost is ε, without and with the run of the row's cell, as a range over the cells with
    noise, at the smallest δ of these cells.  The list is empty without a choice by `fedpriv tune`, and if no cell
    has noise.  The text has no ε if the choice was not private, or if a cell with noise has no μ, no row, or a
    row without a μ.

    Guarantee: every ε is computed here, that of a row's run for the μ of its cell.  The distribution of the number
    of runs in the choice, and the μ of each of these runs, are those that [tuned] states.  Nothing compares them
    with the runs of the choice, whose releases are not stored.
    """
    tuned = results.tuning
    if tuned is None or not (private := [cell for cell in results.cells if cell["epsilon"] is not None]):
        return []
    distribution, method = tuned.run_count_distribution, f"by {tuned.metric} on {tuned.held_out} training records"
    if distribution is None:
        return [
            f"Settings were chosen by fedpriv tune: {tuned.settings} for every row, {method}. These figures "
            "do not cover that choice: it read the records without noise."
        ]
    costs: list[tuple[float, ...]] = []
    delta = min(cell["delta"] for cell in private)
    for cell in private:
        row = tuned.find_choice(cell["scenario"])
        if row is None or row.mu is None or cell["mu"] is None:
            return ["Settings of some cells were not chosen by fedpriv tune, or their cost is not known."]
        choices = (PrivateSelection(row.mu, distribution, run_mu) for run_mu in (0.0, cell["mu"]))
        costs.append(tuple(choice.epsilon_of(delta) for choice in choices))
    choice_epsilon, total_epsilon = map(format_upper_range, zip(*costs, strict=True))
    return [
        f"Settings were chosen privately by fedpriv tune: the best of {distribution.description}, {method}. The "
        f"choice of one row costs ε = {choice_epsilon} at delta = {format_upper_delta(delta)}, the choice and a "
        f"run of the row together ε = {total_epsilon}."
    ]
