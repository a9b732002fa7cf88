"""A run's cells summed up: means and spreads over seeds at every sweep point, and the lines that stand under them.

Tables, charts, pages and the terminal take their metrics, points and names from here, and so the lines that say
what is missing, how it was measured, what is protected, and how settings were chosen.
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
from fedpriv.core.figures import format_count_range, format_upper_delta, format_upper_range, privacy_caveats
from fedpriv.data.public import PUBLIC_TABLES
from fedpriv.loss.scores import MEAN_SUFFIX, WORST_SUFFIX
from fedpriv.noise.trust import CLIENT, RECORD
from fedpriv.study.results import Results, describe_engines


@dataclass(frozen=True)
class Metric:
    """How a figure of results.json is shown: its name, the unit it is printed in, and its digits."""

    key: str
    title: str
    factor: float
    digits: int
    published_digits: int
    base: str | None = None
    """The key of everybody's metric, where this one is of the silos' own test records."""


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
"""Losses as they are; accuracies are stored as shares and printed, as papers do, in percent."""


_SILO_LABELS = {MEAN_SUFFIX: "mean of silos", WORST_SUFFIX: "worst silo"}


def find_metric(key: str) -> Metric | None:
    """How the figure `key` is shown, None if it is no metric; a silo's own figures are shown like everybody's."""
    for metric in METRICS:
        if key == metric.key:
            return metric
        rest = key.removeprefix(f"{metric.key}_")
        if rest == key or f"{metric.key}_" not in key:
            continue
        whose = _SILO_LABELS.get(rest) or (f"at {rest.removeprefix('at_')}" if rest.startswith("at_") else None)
        if whose is not None:
            return replace(metric, key=key, title=f"{metric.title}, {whose}", base=metric.key)
    return None


@dataclass(frozen=True)
class Summary:
    """One metric at a sweep point, in the unit it is printed in; `std` (ddof = 1) is None for a single seed."""

    mean: float
    std: float | None
    seeds: int


@dataclass(frozen=True)
class PublishedComparison:
    """One metric at one sweep point: what was measured, and what the paper printed; None where there is none."""

    measured: Summary | None
    published: float | None

    @property
    def difference(self) -> float | None:
        """Measured minus published."""
        if self.measured is None or self.published is None:
            return None
        return self.measured.mean - self.published


def extract_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a cell of results.json, or of a line of history.jsonl, by name."""
    return {metric.key: record[metric.key] for metric in _find_metrics([record])}


def _find_metrics(records: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """The metrics that any record has: those of everybody first, in the order of `METRICS`."""
    keys = dict.fromkeys(key for record in records for key in record)
    order = {metric.key: place for place, metric in enumerate(METRICS)}
    return sorted(filter(None, map(find_metric, keys)), key=lambda metric: order.get(metric.key, len(order)))


def run_metrics(results: Results) -> list[Metric]:
    """All metrics that a run's cells have; loss and accuracy as long as there is no cell."""
    return _find_metrics(results.cells) or list(METRICS[:2])


def shared_metrics(results: Results) -> list[Metric]:
    """Those over all test records, and of the silos' own what the scenario lays out."""
    shown = published_metrics(results)
    return [metric for metric in run_metrics(results) if metric.base is None or metric in shown]


def silo_metrics(results: Results) -> dict[str, list[Metric]]:
    """The silos' own metrics by the name of what they are of: each silo's, the mean, the worst."""
    found: dict[str, list[Metric]] = {}
    for metric in run_metrics(results):
        if metric.base is not None:
            found.setdefault(metric.base, []).append(metric)
    return found


def sweep_points(results: Results) -> list[dict[str, Any]]:
    """Every sweep point in the order of the scenario, finished or not."""
    return axis_points(results.axes)


def cells_at_point(results: Results, point: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The finished cells of a sweep point, one a seed."""
    return [cell for cell in results.cells if cell["point"] == point]


def missing_seeds(results: Results) -> list[tuple[dict[str, Any], list[int]]]:
    """The sweep points that are not complete, and their seeds without a result."""
    finished = [
        (point, {cell["seed"] for cell in cells_at_point(results, point)}) for point in sweep_points(results)
    ]
    return [
        (point, absent)
        for point, seeds in finished
        if (absent := [seed for seed in results.seeds if seed not in seeds])
    ]


def describe_incomplete(results: Results) -> str:
    """ "INCOMPLETE: k of n cells", or nothing when all are there."""
    expected = len(sweep_points(results)) * len(results.seeds)
    finished = expected - sum(len(seeds) for _, seeds in missing_seeds(results))
    return "" if results.complete and finished == expected else f"INCOMPLETE: {finished} of {expected} cells"


def describe_state(results: Results) -> str:
    """What a reader has to know before any figure, without a full stop; nothing of a whole, true run."""
    return "; ".join(filter(None, [describe_differing(results), describe_incomplete(results)]))


def describe_differing(results: Results) -> str:
    """ "DIFFERS: …" where results.json claims something else than was released, or nothing."""
    return f"DIFFERS: {format_differing_cells(results.differs)}" if results.differs else ""


def summarize(cells: Sequence[Mapping[str, Any]], metric: Metric) -> Summary | None:
    """Mean and sample standard deviation over the given cells; None without a cell."""
    values = [metric.factor * cell[metric.key] for cell in cells if metric.key in cell]
    return Summary(*mean_and_deviation(values), len(values)) if values else None


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (None for a single value); no numbers where a value is not finite."""
    several = len(values) > 1
    if all(map(math.isfinite, values)):
        return statistics.fmean(values), statistics.stdev(values) if several else None
    return sum(values) / len(values), math.nan if several else None


def compare_with_published(results: Results, metric: Metric, point: Mapping[str, Any]) -> PublishedComparison:
    """What was measured at a sweep point, beside what was published for it."""
    published = results.published.value(metric.key, point) if results.published else None
    return PublishedComparison(summarize(cells_at_point(results, point), metric), published)


SYMBOLS = {"privacy.mu": "μ", "privacy.rho": "ρ", "privacy.epsilon": "ε", "privacy.delta": "δ"}
"""What papers call these keys."""
_SELF_EXPLANATORY_KEYS = ("algorithm.name", "algorithm.trust", "data.name", "model.name")  # their values do


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Dotted keys -> the symbol, or the last part (the section of a name); a shared one stays whole."""
    last = {key: SYMBOLS.get(key) or key.removesuffix(".name").rpartition(".")[2] for key in keys}
    uses = Counter(last.values())
    return {key: name if uses[name] == 1 else key for key, name in last.items()}


def format_value(value: Any) -> str:
    """A swept value as papers print it: 4, not 4.0."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def format_point(results: Results, point: Mapping[str, Any]) -> str:
    """A sweep point in words: "untrusted, ρ = 4, silos 100"."""
    names = short_names(results.axes)
    return ", ".join(_format_setting(key, names[key], format_value(value)) for key, value in point.items())


def _format_setting(key: str, name: str, value: str) -> str:
    if key in _SELF_EXPLANATORY_KEYS:
        return value
    return f"{name} = {value}" if name in SYMBOLS.values() else f"{name} {value}"


def axis_points(axes: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def group_by(
    records: Iterable[Mapping[str, Any]], kind: Callable[[Mapping[str, Any]], Any]
) -> dict[Any, list[Mapping[str, Any]]]:
    """Records by their kind, in the order in which kinds come first."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(kind(record), []).append(record)
    return found


_MAX_LISTED = 10  # missing points that are named; the tables show the others


def published_metrics(results: Results) -> list[Metric]:
    shown = results.published.tables.table_metrics if results.published else ()
    return [metric for metric in run_metrics(results) if metric.key in shown]


def list_warnings(results: Results) -> list[str]:
    """Which cells claim what was not released, and which have no result, in bold Markdown; none of a whole run."""
    found = []
    if loud := describe_differing(results):
        found.append(f"**{loud}.** Figures of privacy are those of the ledger here.")
    if loud := describe_incomplete(results):
        points_and_seeds = [
            (format_point(results, point), f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
            for point, seeds in missing_seeds(results)
        ]
        texts = [", ".join(filter(None, each)) for each in points_and_seeds]
        more = f"; and {len(texts) - _MAX_LISTED} more points" if len(texts) > _MAX_LISTED else ""
        found.append(f"**{loud}.** Missing: {'; '.join(texts[:_MAX_LISTED])}{more}.")
    return found


def describe_measurement(results: Results) -> str:
    """Seeds, engine, and the largest difference to what was published, in one line."""
    seeds = (
        "1 seed" if len(results.seeds) == 1 else f"{len(results.seeds)} seeds: mean ± sample standard deviation"
    )
    largest = []
    for metric in published_metrics(results):
        differences = [
            compare_with_published(results, metric, point).difference for point in sweep_points(results)
        ]
        if known := [abs(difference) for difference in differences if difference is not None]:
            largest.append(f"{metric.title} {max(known):.{metric.digits}f}")
    worst = f"; largest |difference|: {', '.join(largest)}" if largest else ""
    notes = (
        _withheld_note(results),
        _pairing_note(results),
        _unread_note(results),
        describe_no_better_points(results),
    )
    return " ".join([f"{seeds}; engine {describe_engines(results)}{worst}.", *filter(None, notes)])


_MAX_LISTED_POINTS = 3


def describe_no_better_points(results: Results) -> str:
    """That a model is no better than a constant prediction, by the figures that the run has; else nothing.

    | figure | a constant has |
    |---|---|
    | R² | 0, predicting the mean of the test targets |
    | accuracy, and balanced accuracy | 1 / classes, guessing |
    | test loss of a softmax regression | ln classes, calling all of them equally likely |

    The number of classes is that of a table's public description; where there is none, R² alone is judged.
    """
    told = dict[str, list[str]]()
    for point in sweep_points(results):
        for reason in _why_no_better(cells_at_point(results, point)):
            told.setdefault(reason, []).append(format_point(results, point))
    sentences = []
    for reason, there in told.items():
        shown = "; ".join(filter(None, there[:_MAX_LISTED_POINTS]))
        more = f" and {len(there) - _MAX_LISTED_POINTS} more" if len(there) > _MAX_LISTED_POINTS else ""
        sentences.append(f"No better than a constant{f' ({shown}{more})' if shown else ''}: {reason}.")
    return " ".join(sentences)


def _why_no_better(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the cells of a point, on average, do no better than a constant."""
    if not cells:
        return []
    found = {
        key: statistics.fmean(cell[key] for cell in cells if key in cell)
        for key in ("test_r2", "test_loss", "test_accuracy", "test_balanced_accuracy")
        if any(key in cell for cell in cells)
    }
    reasons = ["R² is below 0"] if found.get("test_r2", 1.0) < 0.0 else []
    scenario = cells[0]["scenario"]
    classes = _class_count(scenario.get("data", {}))
    if classes == 0:
        return reasons
    reasons += [
        f"{words} is that of guessing among {classes} classes"
        for key, words in (("test_accuracy", "accuracy"), ("test_balanced_accuracy", "balanced accuracy"))
        if found.get(key, 1.0) <= 1.0 / classes
    ]
    if scenario["model"]["name"] == "softmax-regression" and found.get("test_loss", 0.0) >= math.log(classes):
        reasons.append(
            f"test loss is above ln {classes} = {math.log(classes):.3f}: its probabilities say less than calling "
            "all classes equally likely, whatever its accuracy"
        )
    return reasons


def _class_count(data: Mapping[str, Any]) -> int:
    """Classes of a table by its public description; 0 for numbers, and for data that are no table."""
    if (given := data.get("table")) is not None:
        return len(given.get("classes") or ())
    known = PUBLIC_TABLES.get(data.get("name", ""))
    return 0 if known is None else known.schema.class_count


def _withheld_note(results: Results) -> str:
    """Why no published values are shown, where a scenario has some."""
    withheld = results.published.withheld_keys if results.published else ()
    return f"Published values are for other settings and not shown: {', '.join(withheld)}." if withheld else ""


def _pairing_note(results: Results) -> str:
    """That rows share their random numbers: differences between them spread less than each of them does."""
    simulated = all(cell["noise"] != "release" for cell in results.cells)
    return (
        "Cells of one seed share the order of records and, scaled, their noise: compare rows "
        "seed by seed, and compute the spread from paired differences."
        if len(sweep_points(results)) > 1 and results.cells and simulated
        else ""
    )


def _unread_note(results: Results) -> str:
    """That samples were asked for which no round reads."""
    left = [cell["unread"] for cell in results.cells if cell.get("unread")]
    return (
        f"Of the samples asked for {format_count_range(left)} are never read: they do not fill a round of every "
        "silo."
        if left
        else ""
    )


def privacy_lines(results: Results) -> list[str]:
    """A line for each distinct statement; those that differ only in μ share one; then those of evaluations."""
    groups = group_by(
        results.cells,
        lambda cell: (
            *(cell[key] for key in ("unit", "relation", "trust", "noise", "delta")),
            cell.get("guarantee", cell["mu"] is None),
            *map(cell.get, ("participation", "holds")),
        ),
    )
    tests = {
        describe_evaluation(told, cell["delta"]) for cell in results.cells if (told := cell.get("evaluation"))
    }
    elsewhere = (
        [EXTERNAL_STEP_NOTE] if any(has_external_first_step(cell["releases"]) for cell in results.cells) else []
    )
    said = [line for cells in groups.values() for line in (describe_cells(cells), *list_caveats(cells))]
    return [*said, *elsewhere, *sorted(tests), *describe_tuning(results)]


def list_caveats(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What weakens the figures of cells with one δ: their smallest silo, and the largest ε."""
    private = [cell for cell in cells if cell["epsilon"] is not None]
    if not private:
        return []
    sizes = [size for cell in private if (size := _unit_count(cell)) is not None]
    noun = stream_from_data(private[0]["releases"][0]).unit.noun
    released = any(cell.get("holds") not in (None, REAL_ASSUMPTIONS) for cell in private)
    worst = max(cell["epsilon"] for cell in private)
    return privacy_caveats(worst, private[0]["delta"], max(sizes, default=None), noun, slack=released)


def _unit_count(cell: Mapping[str, Any]) -> int | None:
    """How many units the smallest silo has, or the pool of clients; None where that is not public."""
    unit = stream_from_data(cell["releases"][0]).unit
    if unit.name == CLIENT.name:
        return cell.get("clients")
    return cell.get("smallest_silo") if unit.name == RECORD.name else None


def describe_tuning(results: Results) -> list[str]:
    """What the choice of settings by `fedpriv tune` costs beside the runs; nothing where there was none.

    Guarantee: the figures are recomputed from the law of the choice and the releases of every cell.
    """
    tuned = results.tuning
    if tuned is None or not (private := [cell for cell in results.cells if cell["epsilon"] is not None]):
        return []
    law, how = tuned.run_count_distribution, f"by {tuned.metric} on {tuned.held_out} training records"
    if law is None:
        return [
            f"Settings were chosen by fedpriv tune: {tuned.settings} for every row, {how}. These figures do not "
            "cover that choice: it read the records without noise."
        ]
    costs: list[tuple[float, float]] = []
    for cell in private:
        row = tuned.find_choice(cell["scenario"])
        if row is None or row.mu is None or cell["mu"] is None:
            return ["Settings of some cells were not chosen by fedpriv tune, or their cost is not known."]
        choice, both = (
            PrivateSelection(row.mu, law, then).epsilon_of(cell["delta"]) for then in (0.0, cell["mu"])
        )
        costs.append((choice, both))
    delta = f"delta = {format_upper_delta(private[0]['delta'])}"
    alone, together = (format_upper_range([pair[place] for pair in costs]) for place in (0, 1))
    return [
        f"Settings were chosen privately by fedpriv tune: the best of {law.description}, {how}. The choice of one "
        f"row costs ε = {alone} at {delta}, the choice and a run of the row together ε = {together} "
        "(Papernot & Steinke 2022)."
    ]
