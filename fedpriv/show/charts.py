"""Chart data of a run, or of mechanisms: metrics, clipping, noise of mechanisms, trade-off curves.

A chart has panels, a panel has series, and a series has marks: points (x, y) with a spread, the half-width of an
error band or bar.  A chart may have named rows in place of numbers on its y axis.  A look is colour, dashes and
marker.

A sweep point, or setting, has one value for each swept key of the scenario.  A cell is one run, a sweep point with
a seed, as a dictionary of results.json.  A mechanism says how the noise of different rounds is correlated.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from fedpriv.claims.claim import format_figures
from fedpriv.claims.ledger import stream_from_data
from fedpriv.core.extensions import load_add_on_parts
from fedpriv.core.figures import format_count, format_lower, format_upper, format_upper_delta, format_with_spread
from fedpriv.noise.registry import SELECTABLE_MECHANISMS
from fedpriv.participation.orders import FixedOrder
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
    """Point of a series, with a tooltip and the half-width of its error band or bar."""

    x: float
    """Value on the x axis, in the units of the chart's `x_label`."""
    y: float
    """Value on the y axis, or the number of a named row, from 0, plus an offset in the row."""
    tooltip: str = ""
    """Text of the mark behind the name of its series in the HTML report, or "" for none."""
    spread: float = 0.0
    """Half-width of the error band or bar, along y, or along x in a chart with named rows."""


@dataclass(frozen=True)
class Series:
    """Marks that share a name and a look."""

    name: str
    """Name in the legend."""
    look: Look
    """Colour, dashes and marker."""
    marks: Sequence[Mark]
    line: bool = True
    """Whether a line joins the marks."""
    dots: bool = True
    """Whether markers are drawn, on a long line at some of its marks only."""
    hollow: bool = False
    """Whether the marks are outlines."""
    published: Sequence[Mark] = ()
    """Values that a paper reports for the same settings, drawn as hollow marks of the same look."""


@dataclass(frozen=True)
class Panel:
    """Series that share a pair of axes, with a name for their common settings, or ""."""

    name: str
    series: Sequence[Series]


@dataclass(frozen=True)
class Chart:
    """Figure of panels that share one y axis."""

    key: str
    """Name of the chart, such as "privacy" or the key of a metric."""
    caption: str
    x_label: str
    y_label: str
    panels: Sequence[Panel]
    note: str = ""
    """Sentences below the chart, or "" for none."""
    log_x: bool = False
    """Whether the x axis is logarithmic, if it has any number above 0."""
    log_y: bool = False
    """Whether the y axis is logarithmic, if it has any number above 0, and no rows."""
    ticks: Sequence[float] = ()
    """Values for ticks on the x axis, or empty for those of `Scale.ticks`."""
    rows: Sequence[str] = ()
    """Row names on the y axis, numbered 0, 1, … from the top, or empty for numbers on this axis."""
    shown_x: Sequence[float] = ()
    """Values that the range of the x axis includes besides those of the marks."""

    @property
    def series(self) -> list[Series]:
        """Series of all panels, in order."""
        return [series for panel in self.panels for series in panel.series]

    @property
    def legend(self) -> list[Series]:
        """One series for each name, or an empty list if there are not several names."""
        series_by_name = {series.name: series for series in self.series}
        return list(series_by_name.values()) if len(series_by_name) > 1 else []

    @property
    def has_published(self) -> bool:
        """Whether any series has published values, so that hollow marks need an explanation."""
        return any(series.published for series in self.series)

    def x_scale(self, panel: Panel, start: float, end: float) -> Scale:
        """Return the x axis of a panel, mapped to drawing coordinates from `start` to `end`."""
        sides = (-1.0, 1.0) if self.rows else (0.0,)
        return make_scale([*_extents(panel.series, "x", sides), *self.shown_x], start, end, logarithmic=self.log_x)

    def y_scale(self, start: float, end: float) -> Scale:
        """Return the shared y axis, mapped to drawing coordinates from `start` (bottom) to `end` (top)."""
        if self.rows:
            return Scale(len(self.rows) - 0.5, -0.5, start, end, logarithmic=False)
        return make_scale(_extents(self.series, "y", (-1.0, 1.0)), start, end, logarithmic=self.log_y)


def _extents(series: Iterable[Series], axis: str, sides: Iterable[float]) -> list[float]:
    marks = [
        mark
        for one_series in series
        for mark in (*one_series.marks, *one_series.published)
        if math.isfinite(mark.y)
    ]
    return [getattr(mark, axis) + side * mark.spread for mark in marks for side in sides]


_PRIVACY_KEYS = ("privacy.mu", "privacy.rho", "privacy.zcdp", "privacy.epsilon")
_PRIVACY_LABELS = {
    "mu": "μ of Gaussian DP",
    "rho": "ρ",
    "zcdp": "ρ of zero-concentrated DP",
    "epsilon": "ε at δ = {delta}",
}
_NORMAL = NormalDist()
_MAX_PANELS = 12
_CLIPPED_METRIC = Metric("fraction_clipped", "increments that were clipped (%)", 100.0, 2, 2)
_MIN_VISIBLE_ERROR = 0.01
"""Least rate of equal misses and false alarms at which a curve can be told from the axes."""


def make_charts(results: Results, history: Sequence[Mapping[str, Any]], audit: StoredAudit | None) -> list[Chart]:
    """Make all charts that the finished cells allow, without series that have no mark."""
    charts = [
        _privacy_chart(results),
        *(_rounds_chart(results, history, metric) for metric in shared_metrics(results)),
        _clipping_chart(results),
        *make_noise_charts(results.cells),
        _tradeoff_chart(results, audit),
        *(make(results) for make in load_add_on_parts("charts").values()),
    ]
    return [chart for chart in map(_drop_empty_series, filter(None, charts)) if chart.panels]


def _drop_empty_series(chart: Chart) -> Chart:
    panels = [
        Panel(source_panel.name, [series for series in source_panel.series if series.marks])
        for source_panel in chart.panels
    ]
    return replace(chart, panels=[panel for panel in panels if panel.series])


def _make_metric_chart(
    results: Results,
    key: str,
    metric: Metric,
    caption_suffix: str,
    axes: Mapping[str, list[Any]],
    make_series: Callable[[dict[str, Any], str, Look], Series],
) -> Chart:
    """Make a chart with one series for each point of `axes`, grouped in panels.

    `make_layout` says which swept keys name a panel.  The other keys name a series and decide its look.
    Beyond 12 panels, and beyond `MAX_SERIES` series in a panel, points are left out, and the note counts their
    sweep points.  The y axis is logarithmic for positive values that differ widely, other than percentages.

    Args:
        results: Results of the run.
        key: Name of the chart.
        metric: Metric on the y axis.
        caption_suffix: End of the caption, which begins with the metric's title.
        axes: Values of each swept key that distinguishes series.
        make_series: Function (point, name, look) that makes the series of a point.
    """
    layout = make_layout(axes)
    series_by_panel: dict[str, list[Series]] = {}
    omitted_points: dict[str, None] = {}
    for point in axis_points(axes):
        title = describe_keys(results, point, layout.panels)
        if (title not in series_by_panel and len(series_by_panel) == _MAX_PANELS) or len(
            series_by_panel.get(title, [])
        ) == MAX_SERIES:
            omitted_points[str(point)] = None
            continue
        name = describe_keys(results, point, (*layout.kinds, *layout.levels)) or "this run"
        series_by_panel.setdefault(title, []).append(make_series(point, name, layout.choose_look(point)))
    caption, panels = (
        f"{metric.title[0].upper()}{metric.title[1:]}{caption_suffix}",
        [Panel(title, panel_series) for title, panel_series in series_by_panel.items()],
    )
    # A point of `axes` stands for several settings if it lacks the swept keys of privacy.
    omitted_count = len(omitted_points) * len(sweep_points(results)) // len(axis_points(axes))
    logarithmic = metric.factor == 1.0 and is_wide(
        [mark.y for panel_series in panels for drawn_series in panel_series.series for mark in drawn_series.marks]
    )
    note = f"The table has {format_count(omitted_count, 'more setting')}." if omitted_count else ""
    return Chart(key, caption, "", metric.title, panels, note, log_y=logarithmic)


def privacy_levels(results: Results) -> dict[str, float]:
    """Return the privacy levels of the cells with noise, by their text of three digits, rounded up."""
    scale = privacy_key(results)
    return {format_upper(cell[scale], 3): cell[scale] for cell in results.cells if cell["epsilon"] is not None}


def privacy_key(results: Results) -> str:
    """Return the privacy scale of the charts: the one that the scenario swept, or "mu".

    It is "mu" also for a sweep of ε at several δ, which cannot be compared, and "epsilon" if a cell with noise has
    no μ.
    """
    noisy_cells = [cell for cell in results.cells if cell["epsilon"] is not None]
    swept = [key.removeprefix("privacy.") for key in _PRIVACY_KEYS if len(results.axes.get(key, ())) > 1]
    comparable = swept[:1] != ["epsilon"] or len({cell["delta"] for cell in noisy_cells}) == 1
    every_mu = all(cell["mu"] is not None for cell in noisy_cells)
    return "epsilon" if not every_mu else swept[0] if swept and comparable else "mu"


def _privacy_chart(results: Results) -> Chart | None:
    """Chart test accuracy against μ, ρ or ε, one series for each combination of the other swept keys.

    A run without test accuracy shows its first metric.  The result is None for fewer than two privacy levels.
    """
    levels = privacy_levels(results)
    if len(levels) < 2:
        return None
    metric = next(
        (candidate for candidate in run_metrics(results) if candidate.key == "test_accuracy"),
        run_metrics(results)[0],
    )
    other_axes = {key: list(values) for key, values in results.axes.items() if key not in _PRIVACY_KEYS}

    def make_series(fixed: dict[str, Any], name: str, look: Look) -> Series:
        return _make_privacy_series(results, metric, fixed, Series(name, look, []))

    chart = _make_metric_chart(results, "privacy", metric, " against privacy", other_axes, make_series)
    deltas = " or ".join(dict.fromkeys(format_upper_delta(cell["delta"]) for cell in results.cells))
    return replace(
        chart,
        x_label=f"{_PRIVACY_LABELS[privacy_key(results)].format(delta=deltas)} (smaller is more private)",
        log_x=True,
        ticks=sorted(levels.values()),
    )


def _make_privacy_series(results: Results, metric: Metric, fixed: Mapping[str, Any], series: Series) -> Series:
    """Return `series` with the measured and published values of the sweep points that match `fixed`.

    A measured mark has the point's value on the privacy scale (`privacy_key`) as x, the metric's mean over seeds
    as y, and the sample standard deviation as spread, 0 for one seed.  A published mark has no spread.  Points
    without noise or finished cells are left out.

    Args:
        results: Results of the run.
        metric: Metric on the y axis.
        fixed: Values of swept keys that a point must have.
        series: Series with name and look, and without marks.
    """
    scale = privacy_key(results)
    measured: list[Mark] = []
    published: list[Mark] = []
    for point in sweep_points(results):
        # Cells are looked for at the few points of this series only, since each search compares all cells.
        cells = cells_at_point(results, point) if fixed.items() <= point.items() else []
        if not cells or cells[0]["epsilon"] is None:
            continue
        level, guarantee, comparison = (
            cells[0][scale],
            format_figures(cells[0]),
            compare_with_published(results, metric, point),
        )
        if (mean := comparison.measured) is not None:
            tooltip = f"{guarantee}: {format_with_spread(mean.mean, mean.std, metric.digits)}"
            measured.append(Mark(level, mean.mean, tooltip, mean.std or 0.0))
        if (value := comparison.published) is not None:
            published.append(Mark(level, value, f"{guarantee}, published: {value:.{metric.published_digits}f}"))
    return replace(series, marks=sorted(measured, key=lambda mark: mark.x), published=published)


def _rounds_chart(results: Results, history: Sequence[Mapping[str, Any]], metric: Metric) -> Chart:
    """Chart a metric by round, with one series for each sweep point.

    A mark is the mean over seeds, with the sample standard deviation as spread, 0 for one seed.  The x axis is the
    round, or, if runs in any one panel differ in length, the percentage of each run's rounds.

    Args:
        results: Results of the run.
        history: Evaluations of all cells, as `read_history` yields them.
        metric: Metric on the y axis.  Evaluations without it are left out.
    """
    by_cell = group_by((line for line in history if metric.key in line), lambda line: line["cell"])
    panels = make_layout(results.axes).panels
    by_panel = group_by(results.cells, lambda cell: describe_keys(results, cell["point"], panels))
    equal = all(len({cell["rounds"] for cell in cells}) == 1 for cells in by_panel.values())

    def make_series(point: dict[str, Any], name: str, look: Look) -> Series:
        """Make the line of a setting, with the mean over its cells in each evaluated round."""
        cells = cells_at_point(results, point)
        lines = (line for cell in cells for line in by_cell.get(cell["cell"], []))
        marks = []
        for t, round_lines in sorted(group_by(lines, lambda line: line["round"]).items()):
            if (summary := summarize(round_lines, metric)) is not None:
                tooltip = f"round {t}: {format_with_spread(summary.mean, summary.std, metric.digits)}"
                x_value = t if equal else 100 * t / cells[0]["rounds"]
                marks.append(Mark(x_value, summary.mean, tooltip, summary.std or 0.0))
        return Series(name, look, marks)

    chart = _make_metric_chart(results, metric.key, metric, ", round by round", results.axes, make_series)
    return replace(chart, x_label="round" if equal else "share of the rounds (%)")


def _clipping_chart(results: Results) -> Chart | None:
    """Chart the percentage of clipped increments, with rows for the settings.

    A mark is the mean over seeds, with the sample standard deviation as spread, 0 for one seed.  Settings that
    differ only in trust, for example, can share a row as series.  Rows beyond `MAX_SERIES` are left out.  The
    result is None for a single setting, and if all fractions are 1, or none is above 0.
    """
    shares = {cell["fraction_clipped"] for cell in results.cells}
    if not any(shares) or shares == {1} or len(sweep_points(results)) == 1:
        return None
    layout = make_layout(results.axes)
    row_keys = [key for key, values in results.axes.items() if len(values) > 1 and key not in layout.kinds]
    rows = list(dict.fromkeys(describe_keys(results, point, row_keys) for point in sweep_points(results)))[
        :MAX_SERIES
    ]
    kinds = axis_points({key: results.axes[key] for key in layout.kinds})
    marks: list[list[Mark]] = [[] for _ in kinds]
    for point in sweep_points(results):
        cells_with_count = [
            cell for cell in cells_at_point(results, point) if cell["fraction_clipped"] is not None
        ]
        row, kind = describe_keys(results, point, row_keys), kinds.index({key: point[key] for key in layout.kinds})
        if row in rows and (stats := summarize(cells_with_count, _CLIPPED_METRIC)):
            row_offset = 0.5 * (kind + 0.5) / len(kinds) - 0.25  # within the middle half of a row
            tip = (
                f"{row}{': ' if row else ''}{format_with_spread(stats.mean, stats.std, _CLIPPED_METRIC.digits)} %"
            )
            marks[kind].append(Mark(stats.mean, rows.index(row) + row_offset, tip, stats.std or 0.0))
    series = [
        Series(describe_keys(results, kind, layout.kinds) or "this run", nth_look(number), kind_marks, line=False)
        for number, (kind, kind_marks) in enumerate(zip(kinds, marks, strict=True))
    ]
    return Chart(
        "clipped",
        "How much of what records contribute was clipped",
        _CLIPPED_METRIC.title,
        "",
        [Panel("", series)],
        rows=rows,
        shown_x=(0.0, 1.0),  # percent, so that a tiny clipped fraction does not fill the axis
    )


@dataclass(frozen=True)
class _UsedMechanism:
    """Mechanism that a run used, with the setting in which the noise charts compare all mechanisms."""

    setting: AccountingSetting
    """Setting of the run, but for clip norm and batch size, which are 1, and in a fixed order.

    Rounds are those of one period if sums restart from 0.
    """
    mu: float
    """μ of the run's claim."""
    label: str
    """Label of the mechanism, with its parameters."""


_HORIZON_COUNT = 12  # most numbers of rounds for which noise is calibrated


def make_noise_charts(cells: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Chart the noise of each mechanism at a run's guarantee, by accounting alone.

    The charts are for the first cell that has a μ and a mechanism that can be compared with others, if there is
    one.  The chart of the mean over silos is made for several silos only.
    """
    question = next(filter(None, (_find_used_mechanism(cell) for cell in cells if cell["mu"] is not None)), None)
    if question is None:
        return []
    setting = question.setting
    sums = "running sums" if setting.decay == 1.0 else f"sums with decay {setting.decay:.3g}"
    passes = f" over {setting.epochs} epochs" if setting.epochs > 1 else ""
    note = (
        f"These figures follow from accounting, not from this run: they are for {sums}{passes}, under "
        f"{format_upper(question.mu, 3)}-GDP with {setting.relation} neighbours. Their unit is the clip norm over "
        "the batch size."
    )
    return [
        _noise_by_rounds_chart(question, note),
        *([_noise_in_mean_chart(question)] if setting.silos > 1 else []),
    ]


def _find_used_mechanism(cell: Mapping[str, Any]) -> _UsedMechanism | None:
    """Find the mechanism that a cell used, with its accounting setting, or None if charts cannot show it.

    Charts are for mechanisms that a scenario can select, or subclasses, with a decay other than 0, and for units
    with records in one silo.  Running sums are released in a single pass, in which they may restart from 0, or in
    whole epochs of a fixed order.  If sums restart after a period, the setting has the rounds of one period.
    """
    stream = stream_from_data(cell["releases"][0])
    if not isinstance(stream.mechanism, SELECTABLE_MECHANISMS) or stream.decay == 0.0 or stream.unit.max_silos > 1:
        return None
    single_pass = stream.schedule.single_pass
    rounds = stream.period or stream.schedule.rounds
    is_fixed = type(stream.schedule) is FixedOrder and rounds % stream.schedule.rounds_per_epoch == 0
    if not single_pass and (not is_fixed or stream.period is not None):
        return None
    setting = AccountingSetting(
        rounds=rounds,
        decay=stream.decay,
        silos=cell["silos"],
        trust=cell["trust"],
        relation=stream.relation,
        epochs=1 if single_pass else rounds // stream.schedule.rounds_per_epoch,
    )
    return _UsedMechanism(setting, cell["mu"], stream.mechanism.label)


def _noise_by_rounds_chart(question: _UsedMechanism, note: str) -> Chart:
    """Chart the root mean square over rounds of the noise in a release, against the number of rounds.

    Noise is the standard deviation of a coordinate, in units of the clip norm over the batch size.  A release is
    that of a silo, or the mean over silos if the server adds the noise or messages are masked.  Each mechanism has
    a series, and is calibrated anew at the run's μ for each number of rounds.

    Args:
        question: Accounting setting and μ of a run, and the mechanism that it used.
        note: Text below the chart.
    """
    setting = question.setting
    kind = "error_rms" if setting.trust_setting.private_messages else "error_in_mean"
    lengths = np.unique(np.geomspace(1, setting.rounds // setting.epochs, _HORIZON_COUNT).astype(int))
    horizons = [int(length) * setting.epochs for length in lengths]
    costs, series = (
        [replace(setting, rounds=rounds).compare_mechanisms(question.mu) for rounds in horizons],
        list[Series](),
    )
    for number, name in enumerate(setting.compare_mechanisms(question.mu)):
        errors = [(t, getattr(cost[name], kind)) for t, cost in zip(horizons, costs, strict=True) if name in cost]
        marks = [Mark(t, error, f"{t} rounds: {error:.4g}") for t, error in errors]
        series.append(Series(_mechanism_label(name, question), nth_look(number), marks))
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
    """Chart the noise in a silo's release, and in the mean over silos without and with a trusted server.

    Noise is the standard deviation of a coordinate, in units of the clip norm over the batch size, as the root
    mean square over rounds at the run's μ.  Each of the three has a row, and each mechanism has a series.

    Args:
        question: Accounting setting and μ of a run of several silos, and the mechanism that it used.
    """
    setting = question.setting
    costs = {
        trust: replace(setting, trust=trust).compare_mechanisms(question.mu) for trust in ("untrusted", "trusted")
    }
    views = {
        "a silo's release": ("untrusted", "error_rms"),
        f"mean of {setting.silos}, untrusted": ("untrusted", "error_in_mean"),
        f"mean of {setting.silos}, trusted": ("trusted", "error_in_mean"),
    }
    names = list(setting.compare_mechanisms(question.mu))
    series = []
    for number, name in enumerate(names):
        row_offset = 0.5 * (number + 0.5) / len(names) - 0.25  # within the middle half of a row
        values = [(view, getattr(costs[trust][name], kind)) for view, (trust, kind) in views.items()]
        marks = [Mark(value, row + row_offset, f"{view}: {value:.4g}") for row, (view, value) in enumerate(values)]
        series.append(Series(_mechanism_label(name, question), nth_look(number), marks, line=False))
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
    """Chart the noise of mechanisms at one guarantee, over a lower bound for all mechanisms.

    Each mechanism has a row.  Its marks are the ratios for an algorithm's output and for its queries, or the ratio
    for running sums if the table has no output.  Rows are sorted by the first of these, the smallest on top.

    Args:
        table: Noise of each mechanism, its ratios to the lower bound, and its memory in vectors.
        title: Beginning of the caption.
    """
    has_output = table.lower_bound.output is not None
    lines = sorted(table.lines, key=lambda line: line.ratio.output or line.ratio.queries)
    queries = "in queries, root mean square" if has_output else "in running sums, root mean square"
    ratios = {"in the output": [line.ratio.output or 0.0 for line in lines]} if has_output else {}
    ratios[queries] = [line.ratio.queries for line in lines]
    bound = Series("lower bound for all mechanisms", shade(5), [Mark(1.0, -0.5), Mark(1.0, len(lines) - 0.5)])
    series = [
        Series(name, nth_look(number), [Mark(value, row) for row, value in enumerate(values)], line=False)
        for number, (name, values) in enumerate(ratios.items())
    ]
    return Chart(
        "comparison",
        f"{title}: noise at the same guarantee",
        "noise over the lower bound for all mechanisms",
        "",
        [Panel("", [*series, replace(bound, dots=False)])],
        log_x=True,
        rows=[
            f"{line.name}{' (auto)' if line.is_auto else ''}, {line.cost.memory_vectors} vectors" for line in lines
        ],
    )


def _tradeoff_chart(results: Results, audit: StoredAudit | None) -> Chart | None:
    """Chart misses against false alarms for the best membership test on one protected unit.

    Under μ-Gaussian DP no test of whether a unit took part in training has, at a rate α of false alarms, a rate of
    misses below Φ(Φ⁻¹(1 - α) - μ), with Φ the normal distribution function.  The chart has the line of blind
    guessing, such curves for at most six claimed μ, without those that cannot be told from the axes, and the point
    of equal errors at an audit's lower bound on μ.  The result is None if there is neither a curve nor an audit.
    """
    claims = [cell["mu"] for cell in results.cells if cell["mu"] is not None]
    mus = sorted({float(format_upper(mu)) for mu in [*claims, *([audit.claimed_mu] if audit else [])]})
    visible_mus = [mu for mu in mus if _NORMAL.cdf(-mu / 2) >= _MIN_VISIBLE_ERROR]
    if not visible_mus and audit is None:
        return None
    # `level_look` tells six levels apart.
    drawn_mus = visible_mus if len(visible_mus) <= 6 else [*visible_mus[:3], *visible_mus[-3:]]
    diagonal = [Mark(a, 1 - a, f"{a:.3g}, {1 - a:.3g}") for a in (0.0, 1.0)]
    series = [Series("blind guessing", replace(shade(5), dash=1), diagonal, dots=False)]
    for number, mu in enumerate(drawn_mus):
        curve = [Mark(a, b, f"false alarms {a:.3g}, missed {format_lower(b, 3)}") for a, b in _tradeoff_points(mu)]
        series.append(Series(f"μ = {format_upper(mu)}", level_look(number, len(drawn_mus)), curve))
    if audit is not None:
        balanced_error = _NORMAL.cdf(-audit.mu / 2)
        lower_bound = f"at least μ = {format_lower(audit.mu, 3)} with confidence {audit.confidence:g}"
        tooltip = f"{lower_bound}, claimed {format_upper(audit.claimed_mu, 6)}"
        series.append(
            Series(
                "audit",
                replace(shade(1), marker=3),
                [Mark(balanced_error, balanced_error, tooltip)],
                line=False,
                hollow=True,
            )
        )
    notes = [
        "No test for a protected unit of the training, on everything that a run releases, lies below the curve of "
        "the run's μ."
    ]
    if audit is not None:
        notes.append("The audit's point has equal errors, at the least μ that the audit shows.")
    if omitted_labels := [format_upper(mu) for mu in mus if mu not in visible_mus]:
        notes.append(f"Curves that lie on the axes are left out: μ = {', '.join(omitted_labels)}.")
    if len(visible_mus) > len(drawn_mus):
        notes.append(f"Not drawn: {format_count(len(visible_mus) - len(drawn_mus), 'curve')} between these.")
    return Chart(
        "tradeoff",
        "Best possible attack: missed vs. false alarms",
        "false alarms (a unit that is not there is claimed)",
        "missed (a unit that is there)",
        [Panel("", series)],
        " ".join(notes),
    )


def _tradeoff_points(mu: float) -> list[tuple[float, float]]:
    """Sample the trade-off curve β = Φ(Φ⁻¹(1 - α) - μ) of μ-Gaussian DP as pairs (α, β), ends included."""
    alphas = [0.0005, 0.002, 0.005, 0.01, 0.02, *(n / 20 for n in range(1, 20)), 0.98, 0.995]
    inner = [(alpha, _NORMAL.cdf(_NORMAL.inv_cdf(1.0 - alpha) - mu)) for alpha in alphas]
    return [(0.0, 1.0), *inner, (1.0, 0.0)]
