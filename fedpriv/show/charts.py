"""The charts of a run as data: metrics by round and by privacy, clipping, noise by mechanism, trade-off curves.

`make_charts` computes every series once; two pens draw them: `svg.py` for the report's page, `plots.py` with
matplotlib for files.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from fedpriv.claims.claim import format_figures
from fedpriv.claims.ledger import stream_from_data
from fedpriv.core.figures import format_lower, format_upper, format_with_spread
from fedpriv.noise.registry import SELECTABLE_MECHANISMS
from fedpriv.show.looks import (
    MAX_SERIES,
    Look,
    Scale,
    describe_keys,
    is_wide,
    level_look,
    make_layout,
    make_scale,
    nth_look,
    shade,
)
from fedpriv.show.statement import StoredAudit
from fedpriv.show.summary import (
    Metric,
    axis_points,
    cells_at_point,
    compare_with_published,
    group_by,
    run_metrics,
    shared_metrics,
    summarize,
    sweep_points,
)
from fedpriv.study.results import Results
from fedpriv.study.setting import AccountingSetting, MechanismTable


@dataclass(frozen=True)
class Mark:
    """A point: its place, the text for the pointer, and a spread that a band or bar shows to both sides."""

    x: float
    y: float
    tooltip: str = ""
    spread: float = 0.0
    """Along y; along x where the chart has named rows."""


@dataclass(frozen=True)
class Series:
    """One line with marks, or one of the two alone; `hollow` marks are drawn around those of others."""

    name: str
    look: Look
    marks: Sequence[Mark]
    line: bool = True
    dots: bool = True
    hollow: bool = False
    published: Sequence[Mark] = ()
    """What a paper printed for the same settings: hollow marks of the same look."""


@dataclass(frozen=True)
class Panel:
    """Series that share a pair of axes; `name` says what they have in common."""

    name: str
    series: Sequence[Series]


@dataclass(frozen=True)
class Chart:
    """A figure: panels side by side, with one y axis for all."""

    key: str
    caption: str
    x_label: str
    y_label: str
    panels: Sequence[Panel]
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[float] = ()
    """On the x axis; round numbers if left out."""
    rows: Sequence[str] = ()
    """Names on the y axis, whose values are then 0, 1, … from the top."""
    shown_x: Sequence[float] = ()
    """Values that the x axis shows in any case."""

    @property
    def series(self) -> list[Series]:
        """Those of all panels."""
        return [series for panel in self.panels for series in panel.series]

    @property
    def legend(self) -> list[Series]:
        """One series a name, empty where there is only one to tell."""
        named = {series.name: series for series in self.series}
        return list(named.values()) if len(named) > 1 else []

    @property
    def has_published(self) -> bool:
        """Whether hollow marks need an explanation."""
        return any(series.published for series in self.series)

    def x_scale(self, panel: Panel, start: float, end: float) -> Scale:
        """The x axis of a panel."""
        sides = (-1.0, 1.0) if self.rows else (0.0,)
        return make_scale([*_extents(panel.series, "x", sides), *self.shown_x], start, end, logarithmic=self.log_x)

    def y_scale(self, start: float, end: float) -> Scale:
        """The y axis of all panels, from the bottom to the top."""
        if self.rows:
            return Scale(len(self.rows) - 0.5, -0.5, start, end, logarithmic=False)
        return make_scale(_extents(self.series, "y", (-1.0, 1.0)), start, end, logarithmic=self.log_y)


def _extents(series: Iterable[Series], axis: str, sides: Iterable[float]) -> list[float]:
    marks = [mark for each in series for mark in (*each.marks, *each.published) if math.isfinite(mark.y)]
    return [getattr(mark, axis) + side * mark.spread for mark in marks for side in sides]


_PRIVACY_KEYS = ("privacy.mu", "privacy.rho", "privacy.zcdp", "privacy.epsilon")
_PRIVACY_LABELS = {"mu": "μ of Gaussian DP (smaller is more private)", "epsilon": "ε (smaller is more private)"}
_NORMAL = NormalDist()
_MAX_PANELS = 12
_CLIPPED_METRIC = Metric("fraction_clipped", "increments that were clipped (%)", 100.0, 2, 2)
_MIN_VISIBLE_ERROR = 0.01
"""A trade-off curve that balances both errors below this share cannot be told from the axes."""


def make_charts(results: Results, history: Sequence[Mapping[str, Any]], audit: StoredAudit | None) -> list[Chart]:
    """Every chart that the finished cells allow, without series that have no mark."""
    made = [
        _privacy_chart(results),
        *(_rounds_chart(results, history, metric) for metric in shared_metrics(results)),
        _clipping_chart(results),
        *make_noise_charts(results.cells),
        _tradeoff_chart(results, audit),
    ]
    return [chart for chart in map(_drop_empty_series, filter(None, made)) if chart.panels]


def _drop_empty_series(chart: Chart) -> Chart:
    panels = [Panel(each.name, [series for series in each.series if series.marks]) for each in chart.panels]
    return replace(chart, panels=[panel for panel in panels if panel.series])


def _make_metric_chart(
    results: Results,
    key: str,
    metric: Metric,
    about: str,
    axes: Mapping[str, list[Any]],
    series: Callable[[dict[str, Any], str, Look], Series],
) -> Chart:
    """A chart with a series a point of `axes`, in panels; its note says how many are left out."""
    layout = make_layout(axes)
    found: dict[str, list[Series]] = {}
    left: dict[str, None] = {}
    for point in axis_points(axes):
        title = describe_keys(results, point, layout.panels)
        if (title not in found and len(found) == _MAX_PANELS) or len(found.get(title, [])) == MAX_SERIES:
            left[str(point)] = None
            continue
        name = describe_keys(results, point, (*layout.kinds, *layout.levels)) or "this run"
        found.setdefault(title, []).append(series(point, name, layout.choose_look(point)))
    panels = [Panel(title, each) for title, each in found.items()]
    caption = f"{metric.title[0].upper()}{metric.title[1:]}{about}"
    note = f"{len(left)} more settings are in the table." if left else ""
    logarithmic = metric.factor == 1.0 and is_wide(
        [mark.y for each in panels for one in each.series for mark in one.marks]
    )
    return Chart(key, caption, "", metric.title, panels, note, log_y=logarithmic)


def privacy_levels(results: Results) -> dict[str, float]:
    """The privacy of all cells by the text that is shown: rounding in an accountant makes no second value."""
    scale = privacy_key(results)
    return {format_upper(cell[scale], 3): cell[scale] for cell in results.cells if cell[scale] is not None}


def privacy_key(results: Results) -> str:
    """What privacy is drawn in: μ, or ε if a cell with a guarantee has no μ, as with sampling."""
    return "epsilon" if any(c["mu"] is None and c["epsilon"] is not None for c in results.cells) else "mu"


def _privacy_chart(results: Results) -> Chart | None:
    """Accuracy, or the first metric, against μ or ε; a line for what else is swept."""
    known = privacy_levels(results)
    if len(known) < 2:
        return None
    metric = next((each for each in run_metrics(results) if each.key == "test_accuracy"), run_metrics(results)[0])
    told = {key: list(values) for key, values in results.axes.items() if key not in _PRIVACY_KEYS}

    def series(fixed: dict[str, Any], name: str, look: Look) -> Series:
        return _make_privacy_series(results, metric, fixed, Series(name, look, []))

    chart = _make_metric_chart(results, "privacy", metric, " against privacy", told, series)
    return replace(chart, x_label=_PRIVACY_LABELS[privacy_key(results)], log_x=True, ticks=sorted(known.values()))


def _make_privacy_series(results: Results, metric: Metric, fixed: Mapping[str, Any], series: Series) -> Series:
    """Measured and published values of the points that have `fixed`, by rising μ or ε."""
    scale = privacy_key(results)
    measured: list[Mark] = []
    published: list[Mark] = []
    for point in sweep_points(results):
        cells = cells_at_point(results, point)
        if not cells or any(point[key] != value for key, value in fixed.items()) or cells[0][scale] is None:
            continue
        level, words, found = (
            cells[0][scale],
            format_figures(cells[0]),
            compare_with_published(results, metric, point),
        )
        if (mean := found.measured) is not None:
            tip = f"{words}: {format_with_spread(mean.mean, mean.std, metric.digits)}"
            measured.append(Mark(level, mean.mean, tip, mean.std or 0.0))
        if (value := found.published) is not None:
            published.append(Mark(level, value, f"{words}, published: {value:.{metric.published_digits}f}"))
    return replace(series, marks=sorted(measured, key=lambda mark: mark.x), published=published)


def _rounds_chart(results: Results, history: Sequence[Mapping[str, Any]], metric: Metric) -> Chart:
    """The metric round by round; runs of unequal length in one panel share the axis as shares of their rounds."""
    by_cell = group_by((line for line in history if metric.key in line), lambda line: line["cell"])
    panels = make_layout(results.axes).panels
    by_panel = group_by(results.cells, lambda cell: describe_keys(results, cell["point"], panels))
    equal = all(len({cell["rounds"] for cell in cells}) == 1 for cells in by_panel.values())

    def series(point: dict[str, Any], name: str, look: Look) -> Series:
        cells = cells_at_point(results, point)
        lines = (line for cell in cells for line in by_cell.get(cell["cell"], []))
        marks = []
        for t, of_round in sorted(group_by(lines, lambda line: line["round"]).items()):
            if (found := summarize(of_round, metric)) is not None:
                tip = f"round {t}: {format_with_spread(found.mean, found.std, metric.digits)}"
                place = t if equal else 100 * t / cells[0]["rounds"]
                marks.append(Mark(place, found.mean, tip, found.std or 0.0))
        return Series(name, look, marks)

    chart = _make_metric_chart(results, metric.key, metric, ", round by round", results.axes, series)
    return replace(chart, x_label="round" if equal else "share of the rounds (%)")


def _clipping_chart(results: Results) -> Chart | None:
    """The share of increments that were clipped, a row a setting; None for one setting, or where none or all were.

    Clipping biases the increments, noise is proportional to the clip: a chart to choose the clip by.
    """
    shares = {cell["fraction_clipped"] for cell in results.cells}
    if not any(shares) or shares == {1} or len(sweep_points(results)) == 1:
        return None
    layout = make_layout(results.axes)
    others = [key for key, values in results.axes.items() if len(values) > 1 and key not in layout.kinds]
    rows = list(dict.fromkeys(describe_keys(results, point, others) for point in sweep_points(results)))[
        :MAX_SERIES
    ]
    kinds = axis_points({key: results.axes[key] for key in layout.kinds})
    marks: list[list[Mark]] = [[] for _ in kinds]
    for point in sweep_points(results):
        told = [cell for cell in cells_at_point(results, point) if cell["fraction_clipped"] is not None]
        row, kind = describe_keys(results, point, others), kinds.index({key: point[key] for key in layout.kinds})
        if row in rows and (found := summarize(told, _CLIPPED_METRIC)):
            aside = 0.5 * (kind + 0.5) / len(kinds) - 0.25
            tip = (
                f"{row}{': ' if row else ''}{format_with_spread(found.mean, found.std, _CLIPPED_METRIC.digits)} %"
            )
            marks[kind].append(Mark(found.mean, rows.index(row) + aside, tip, found.std or 0.0))
    series = [
        Series(describe_keys(results, kind, layout.kinds) or "this run", nth_look(place), each, line=False)
        for place, (kind, each) in enumerate(zip(kinds, marks, strict=True))
    ]
    return Chart(
        "clipped",
        "How much of what records contribute was clipped",
        _CLIPPED_METRIC.title,
        "",
        [Panel("", series)],
        rows=rows,
        shown_x=(0.0, 1.0),  # percent: nearly nothing clipped must not look like much
    )


@dataclass(frozen=True)
class _UsedMechanism:
    """What is compared: a setting with clip norm and batch 1, a μ, and the mechanism that was used."""

    setting: AccountingSetting
    mu: float
    label: str


_HORIZON_COUNT = 12


def make_noise_charts(cells: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The noise of each mechanism at a run's guarantee: from accounting alone, nothing is drawn.

    For the first cell with a guarantee and a mechanism that a scenario can name; none without such a cell.
    """
    question = next(filter(None, (_find_used_mechanism(cell) for cell in cells if cell["mu"] is not None)), None)
    if question is None:
        return []
    setting = question.setting
    sums = "running sums" if setting.decay == 1.0 else f"sums with decay {setting.decay:.3g}"
    passes = f", {setting.epochs} epochs" if setting.epochs > 1 else ""
    note = (
        f"From accounting, not from this run: {sums}, {format_upper(question.mu, 3)}-GDP, {setting.relation} "
        f"neighbours{passes}; 1 is the clip norm over the batch size."
    )
    return [
        _noise_by_rounds_chart(question, note),
        *([_noise_in_mean_chart(question)] if setting.silos > 1 else []),
    ]


def _find_used_mechanism(cell: Mapping[str, Any]) -> _UsedMechanism | None:
    stream = stream_from_data(cell["releases"][0])
    if (
        not isinstance(stream.mechanism, SELECTABLE_MECHANISMS) or stream.decay == 0.0
    ):  # nothing is summed: all add the same
        return None
    once = stream.period is not None or stream.schedule.single_pass
    rounds = stream.period or stream.schedule.rounds
    if not once and rounds % stream.schedule.rounds_per_epoch:
        return None  # the last pass is cut, and the figure is of whole ones
    setting = AccountingSetting(
        rounds=rounds,
        decay=stream.decay,
        silos=cell["silos"],
        trust=cell["trust"],
        relation=stream.relation,
        epochs=1 if once else rounds // stream.schedule.rounds_per_epoch,
    )
    return _UsedMechanism(setting, cell["mu"], stream.mechanism.label)


def _noise_by_rounds_chart(question: _UsedMechanism, note: str) -> Chart:
    """The root mean square over the rounds of the noise in a release, by number of rounds."""
    setting = question.setting
    lengths = np.unique(np.geomspace(1, setting.rounds // setting.epochs, _HORIZON_COUNT).astype(int))
    horizons = [int(length) * setting.epochs for length in lengths]
    costs = [replace(setting, rounds=rounds).compare_mechanisms(question.mu) for rounds in horizons]
    series = []
    for place, name in enumerate(setting.compare_mechanisms(question.mu)):
        along = [(t, cost[name].error_rms) for t, cost in zip(horizons, costs, strict=True) if name in cost]
        marks = [Mark(t, error, f"{t} rounds: {error:.4g}") for t, error in along]
        series.append(Series(_mechanism_label(name, question), nth_look(place), marks))
    return Chart(
        "noise",
        "Noise that each mechanism would need for the same guarantee",
        "rounds",
        "noise in one release",
        [Panel("", series)],
        note,
        log_x=True,
        log_y=True,
    )


def _noise_in_mean_chart(question: _UsedMechanism) -> Chart:
    """The noise after all rounds: in a silo's release, and in the mean over silos with either trust."""
    setting = question.setting
    costs = {
        trust: replace(setting, trust=trust).compare_mechanisms(question.mu) for trust in ("untrusted", "trusted")
    }
    views = {
        "a silo's release": ("untrusted", "error"),
        f"mean of {setting.silos}, untrusted": ("untrusted", "error_in_mean"),
        f"mean of {setting.silos}, trusted": ("trusted", "error_in_mean"),
    }
    names = list(setting.compare_mechanisms(question.mu))
    series = []
    for place, name in enumerate(names):
        aside = 0.5 * (place + 0.5) / len(names) - 0.25
        values = [(view, getattr(costs[trust][name], kind)) for view, (trust, kind) in views.items()]
        marks = [Mark(value, row + aside, f"{view}: {value:.4g}") for row, (view, value) in enumerate(values)]
        series.append(Series(_mechanism_label(name, question), nth_look(place), marks, line=False))
    return Chart(
        "noise-in-mean",
        "The same noise in the mean over silos",
        f"noise, {setting.rounds} rounds",
        "",
        [Panel("", series)],
        log_x=True,
        rows=list(views),
    )


def _mechanism_label(name: str, question: _UsedMechanism) -> str:
    return f"{name}, this run" if name == question.label else name


def make_comparison_chart(table: MechanismTable, title: str) -> Chart:
    """Mechanisms side by side, the smallest ratio on top."""
    output = table.lower_bound.output is not None
    lines = sorted(table.lines, key=lambda line: line.ratio.output or line.ratio.queries)
    queries = "in queries, root mean square" if output else "in running sums, root mean square"
    ratios = {"in the output": [line.ratio.output or 0.0 for line in lines]} if output else {}
    ratios[queries] = [line.ratio.queries for line in lines]
    bound = Series("the least that any mechanism leaves", shade(5), [Mark(1.0, -0.5), Mark(1.0, len(lines) - 0.5)])
    series = [
        Series(name, nth_look(place), [Mark(value, row) for row, value in enumerate(values)], line=False)
        for place, (name, values) in enumerate(ratios.items())
    ]
    return Chart(
        "comparison",
        f"{title}: noise at the same guarantee",
        "noise over the least that any mechanism leaves",
        "",
        [Panel("", [*series, replace(bound, dots=False)])],
        log_x=True,
        rows=[
            f"{line.name}{' (auto)' if line.is_auto else ''}, {line.cost.memory_vectors} vectors" for line in lines
        ],
    )


def _tradeoff_chart(results: Results, audit: StoredAudit | None) -> Chart | None:
    """Missed records against false alarms: the errors of the best test that looks for one record."""
    claims = [cell["mu"] for cell in results.cells if cell["mu"] is not None]
    mus = sorted({float(format_upper(mu)) for mu in [*claims, *([audit.claimed_mu] if audit else [])]})
    seen = [mu for mu in mus if _NORMAL.cdf(-mu / 2) >= _MIN_VISIBLE_ERROR]
    if not seen and audit is None:
        return None
    shown = seen if len(seen) <= 6 else [*seen[:3], *seen[-3:]]
    ends = [Mark(a, 1 - a, f"{a:.3g}, {1 - a:.3g}") for a in (0.0, 1.0)]
    series = [Series("blind guessing", replace(shade(5), dash=1), ends, dots=False)]
    for place, mu in enumerate(shown):
        curve = [Mark(a, b, f"false alarms {a:.3g}, missed {b:.3g}") for a, b in _tradeoff_points(mu)]
        series.append(Series(f"μ = {format_upper(mu)}", level_look(place, len(shown)), curve))
    if audit is not None:
        at = _NORMAL.cdf(-audit.mu / 2)
        found = f"at least μ = {format_lower(audit.mu, 3)} with confidence {audit.confidence:g}"
        tip = f"{found}, claimed {format_upper(audit.claimed_mu, 6)}"
        series.append(Series("audit", replace(shade(1), marker=3), [Mark(at, at, tip)], line=False, hollow=True))
    notes = ["No test on everything that is released lies below the curve of its μ."]
    if audit is not None:
        notes.append("An audit's point is where its test would balance both errors.")
    if hidden := [format_upper(mu) for mu in mus if mu not in seen]:
        notes.append(f"Left out because their curves lie on the axes: μ = {', '.join(hidden)}.")
    if len(seen) > len(shown):
        notes.append(f"{len(seen) - len(shown)} curves between these are left out.")
    return Chart(
        "tradeoff",
        "Best possible attack: missed vs. false alarms",
        "false alarms (a record that is not there is claimed)",
        "missed (a record that is there)",
        [Panel("", series)],
        " ".join(notes),
    )


def _tradeoff_points(mu: float) -> list[tuple[float, float]]:
    """The trade-off curve of μ-Gaussian differential privacy, with its ends: β = Φ(Φ⁻¹(1 - α) - μ)."""
    alphas = [0.0005, 0.002, 0.005, 0.01, 0.02, *(n / 20 for n in range(1, 20)), 0.98, 0.995]
    inner = [(alpha, _NORMAL.cdf(_NORMAL.inv_cdf(1.0 - alpha) - mu)) for alpha in alphas]
    return [(0.0, 1.0), *inner, (1.0, 0.0)]
