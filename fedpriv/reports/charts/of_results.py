"""What a run's charts show: accuracy against privacy, curves, noise by mechanism, trade-off curves."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

from fedpriv.figures import epsilon_words, lower_figure, upper_figure
from fedpriv.reports.audited import StoredAudit
from fedpriv.reports.charts.chart import Chart, Mark, Series
from fedpriv.reports.plots.noise import costs_by_rounds, question_of
from fedpriv.reports.plots.tradeoff import levels, privacy_scale
from fedpriv.reports.summary import (
    Metric,
    cells_at,
    compare,
    metrics_of,
    point_text,
    points,
    product,
    summarize,
)
from fedpriv.sweep.results import Results

_MOST_SERIES = 28
_PRIVACY_KEYS = ("privacy.mu", "privacy.rho", "privacy.zcdp", "privacy.epsilon")
_NAMES = {"mu": "μ of Gaussian DP (smaller is more private)", "epsilon": "ε (smaller is more private)"}
_NORMAL = NormalDist()


def charts_of(results: Results, history: Sequence[Mapping[str, Any]], audit: StoredAudit | None) -> list[Chart]:
    """Every chart that the results allow."""
    made = [
        _privacy(results),
        *(_curves(results, history, metric) for metric in metrics_of(results) if metric.base is None),
        _noise(results),
        _tradeoff(results, audit),
    ]
    return [chart for chart in made if chart is not None and any(series.marks for series in chart.series)]


def _privacy(results: Results) -> Chart | None:
    """The first metric that says how good a model is, against μ or ε; a line for what else is swept."""
    known = levels(results)
    if len(known) < 2:
        return None
    metric = next((each for each in metrics_of(results) if each.key == "test_accuracy"), metrics_of(results)[0])
    told = {key: list(values) for key, values in results.axes.items() if key not in _PRIVACY_KEYS}
    series: list[Series] = []
    for number, fixed in enumerate(product(told)):
        measured, published = _along(results, metric, fixed)
        name = _named(results, fixed)
        series.append(Series(name, measured, colour=number))
        if published:
            series.append(Series(f"{name}, published", published, line=False, hollow=True, colour=number))
    return Chart(
        "privacy",
        f"{metric.title.capitalize()} against privacy",
        _NAMES[privacy_scale(results)],
        metric.title,
        series[: 2 * _MOST_SERIES],
        log_x=True,
        ticks=sorted(known.values()),
    )


def _along(results: Results, metric: Metric, fixed: Mapping[str, Any]) -> tuple[list[Mark], list[Mark]]:
    """Measured and published values of the points that have `fixed`, by rising μ or ε."""
    scale = privacy_scale(results)
    found: list[tuple[float, Mark]] = []
    published: list[Mark] = []
    for point in points(results):
        cells = cells_at(results, point)
        if not cells or any(point[key] != value for key, value in fixed.items()) or cells[0][scale] is None:
            continue
        level, comparison = cells[0][scale], compare(results, metric, point)
        if comparison.measured is not None:
            mean, std = comparison.measured.mean, comparison.measured.std
            tip = f"{_level(cells[0])}: {_figure(mean, std, metric)}"
            found.append((level, Mark(level, mean, tip, std or 0.0)))
        if comparison.published is not None:
            value = comparison.published
            published.append(Mark(level, value, f"{_level(cells[0])}: {value:.{metric.published_digits}f}"))
    return [mark for _, mark in sorted(found, key=lambda pair: pair[0])], published


def _curves(results: Results, history: Sequence[Mapping[str, Any]], metric: Metric) -> Chart:
    """The metric round by round; a line a sweep point."""
    chosen = points(results)[:_MOST_SERIES]
    where = {cell["cell"]: cell["point"] for cell in results.cells}
    lines = [line for line in history if metric.key in line]
    series = []
    for point in chosen:
        places = {place for place, there in where.items() if there == point}
        rounds = sorted({line["round"] for line in lines if line["cell"] in places})
        marks = []
        for t in rounds:
            summary = summarize([line for line in lines if line["cell"] in places and line["round"] == t], metric)
            if summary is not None:
                tip = f"round {t}: {_figure(summary.mean, summary.std, metric)}"
                marks.append(Mark(t, summary.mean, tip, summary.std or 0.0))
        series.append(Series(_named(results, point), marks))
    left = len(points(results)) - len(chosen)
    note = f"The first {len(chosen)} settings; {left} more are in the table." if left else ""
    values = [mark.y for each in series for mark in each.marks]
    wide = metric.key != "test_accuracy" and bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    caption = f"{metric.title.capitalize()}, round by round"
    return Chart(metric.key, caption, "round", metric.title, series, note, log_y=wide)


def _noise(results: Results) -> Chart | None:
    """What each mechanism would add for the same guarantee."""
    question = question_of(results.cells)
    if question is None:
        return None
    series = [
        Series(
            f"{name}, this run" if name == question.used else name,
            [Mark(rounds, error, f"{rounds} rounds: {error:.4g}") for rounds, error in along],
        )
        for name, along in costs_by_rounds(question).items()
    ]
    return Chart(
        "noise",
        "Noise that each mechanism would need for the same guarantee",
        "rounds",
        "noise in one release",
        series,
        f"From accounting, not from this run: μ = {upper_figure(question.mu, 3)}; 1 is the clip norm over the "
        "batch size.",
        log_x=True,
        log_y=True,
    )


def _tradeoff(results: Results, audit: StoredAudit | None) -> Chart | None:
    """How often a test that looks for one record must err: missed records against false alarms."""
    mus = sorted({float(upper_figure(cell["mu"])) for cell in results.cells if cell["mu"] is not None})
    if audit is not None:
        mus = sorted({*mus, float(upper_figure(audit.claimed_mu))})
    if not mus:
        return None
    alphas = [0.0005, 0.002, 0.005, 0.01, 0.02, *(n / 20 for n in range(1, 20)), 0.98, 0.995]
    shown = mus if len(mus) <= 6 else [*mus[:3], *mus[-3:]]
    series = [Series("blind guessing", [Mark(a, 1 - a, f"{a:.3g}, {1 - a:.3g}") for a in (0.0, 1.0)])]
    for mu in shown:
        curve = [Mark(a, b, f"false alarms {a:.3g}, missed {b:.3g}") for a, b in _errors(mu, alphas)]
        series.append(Series(f"μ = {upper_figure(mu)}", curve))
    if audit is not None:
        at = _NORMAL.cdf(-audit.mu / 2)
        found, claimed = lower_figure(audit.mu, 3), upper_figure(audit.claimed_mu, 6)
        tip = f"at least μ = {found} with confidence {audit.confidence:g}, claimed {claimed}"
        series.append(Series("audit", [Mark(at, at, tip)], line=False, hollow=True))
    return Chart(
        "tradeoff",
        "What an attacker must get wrong",
        "false alarms (a record that is not there is claimed)",
        "missed (a record that is there)",
        series,
        "No test on everything that is released lies below the curve of its μ. An audit's point is where its test "
        "would balance both errors.",
    )


def _errors(mu: float, alphas: Iterable[float]) -> list[tuple[float, float]]:
    """The trade-off curve of μ-Gaussian differential privacy: β = Φ(Φ⁻¹(1 - α) - μ)."""
    return [(alpha, _NORMAL.cdf(_NORMAL.inv_cdf(1.0 - alpha) - mu)) for alpha in alphas]


def _named(results: Results, point: Mapping[str, Any]) -> str:
    varied = {key: value for key, value in point.items() if len(results.axes[key]) > 1}
    return point_text(results, varied) or "this run"


def _level(cell: Mapping[str, Any]) -> str:
    epsilon = epsilon_words(cell["epsilon"], cell["delta"])
    return epsilon if cell["mu"] is None else f"μ = {upper_figure(cell['mu'])}, {epsilon}"


def _figure(mean: float, std: float | None, metric: Metric) -> str:
    spread = "" if std is None else f" ± {std:.{metric.digits}f}"
    return f"{mean:.{metric.digits}f}{spread}"
