"""What a run's charts show: accuracy against privacy, curves, noise by mechanism, trade-off curves.

From numbers to places on an axis, and the numbers worth a tick.

A chart as SVG: readable without a script, in light and dark, on a screen and on paper.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from markupsafe import Markup, escape

from fedpriv.core.figures import epsilon_words, lower_figure, upper_figure
from fedpriv.show.privacy_plots import costs_by_rounds, levels, privacy_scale, question_of
from fedpriv.show.statement import StoredAudit
from fedpriv.show.summary import Metric, cells_at, compare, metrics_of, point_text, points, product, summarize
from fedpriv.study.results import Results

_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    def place(self, value: float) -> float:
        """Where a value is drawn; values beyond the axis at its ends."""
        share = (self._number(value) - self._number(self.low)) / (self._number(self.high) - self._number(self.low))
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Round numbers on the axis, about `most` at most."""
        return _logarithmic(self.low, self.high, most) if self.logarithmic else _linear(self.low, self.high, most)

    def _number(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.logarithmic else value


def scale_of(values: Sequence[float], start: float, end: float, *, logarithmic: bool) -> Scale:
    """The axis that shows all values, with a little room; logarithmic only where all are above 0."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if logarithmic and low > 0.0:
        room = max((high / low) ** 0.05, 1.05)
        return Scale(low / room, high * room, start, end, logarithmic=True)
    room = 0.05 * (high - low) or max(abs(high), 1.0) * 0.1
    return Scale(low - room, high + room, start, end, logarithmic=False)


def _linear(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in _STEPS if power * each >= rough)
    first = math.ceil(low / step)
    return [step * each for each in range(first, math.floor(high / step) + 1)]


def _logarithmic(low: float, high: float, most: int) -> list[float]:
    for steps in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [each * 10.0**power for power in powers for each in steps if low <= each * 10.0**power <= high]
        if len(found) <= most:
            return found if len(found) > 1 else [low, high]
    stride = math.ceil(len(found) / most)
    return found[::stride]


WIDTH, HEIGHT = 560, 350
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 16, 14, 52
COLOURS = 7
"""So many colours repeat, with other dashes."""


@dataclass(frozen=True)
class Mark:
    """A point: its place, what the pointer shows, and how far a band reaches to both sides."""

    x: float
    y: float
    tip: str
    spread: float = 0.0


@dataclass(frozen=True)
class Series:
    """One line, or points alone; `hollow` points are what others published."""

    name: str
    marks: Sequence[Mark]
    line: bool = True
    hollow: bool = False
    colour: int | None = None
    """Of another series, where the two belong together; its own otherwise."""


@dataclass(frozen=True)
class Chart:
    """A figure of the page."""

    key: str
    caption: str
    x: str
    y: str
    series: Sequence[Series]
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[float] = ()
    """On the x axis; round numbers if left out."""

    def look(self, place: int) -> str:
        """The classes of a series, which the style sheet gives a colour and dashes."""
        own = self.series[place].colour
        number = place if own is None else own
        return f"c{number % COLOURS} d{number // COLOURS % 3}"


def drawn(chart: Chart) -> Markup:
    """The chart's SVG.

    Guarantee: every text is escaped; nothing is loaded from elsewhere.
    """
    marks = [mark for series in chart.series for mark in series.marks if math.isfinite(mark.y)]
    across = scale_of([mark.x for mark in marks], _LEFT, WIDTH - _RIGHT, logarithmic=chart.log_x)
    reach = [mark.y + side * mark.spread for mark in marks for side in (-1.0, 1.0)]
    if chart.log_y:
        reach = [value for value in reach if value > 0.0]
    up = scale_of(reach, HEIGHT - _BOTTOM, _TOP, logarithmic=chart.log_y)
    parts = [*_axes(chart, across, up)]
    for place, series in enumerate(chart.series):
        parts.append(_series(chart, place, series, across, up))
    frame = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.caption)}" class="chart">'
    return Markup("".join([frame, *parts, "</svg>"]))


def _axes(chart: Chart, across: Scale, up: Scale) -> list[str]:
    bottom, parts = HEIGHT - _BOTTOM, []
    for value in up.ticks(6):
        y = up.place(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        place = f'x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f'<text class="tick" {place}>{_number(value)}</text>')
    last = -math.inf
    for value in chart.ticks or across.ticks(6):
        x = across.place(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {bottom}v5"/>')
        if x - last >= 34.0:
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{_number(value)}</text>'
            )
            last = x
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x)}</text>'
    )
    height = (_TOP + bottom) / 2
    parts.append(
        f'<text class="label" transform="translate(14 {height}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y)}</text>"
    )
    return parts


def _series(chart: Chart, place: int, series: Series, across: Scale, up: Scale) -> str:
    marks = [mark for mark in series.marks if math.isfinite(mark.y)]
    at = [(across.place(mark.x), up.place(mark.y)) for mark in marks]
    parts = [f'<g class="series {chart.look(place)}" data-series="{place}">']
    if series.line and any(mark.spread for mark in marks):
        above = [f"{x:.1f} {up.place(mark.y + mark.spread):.1f}" for (x, _), mark in zip(at, marks, strict=True)]
        below = [f"{x:.1f} {up.place(mark.y - mark.spread):.1f}" for (x, _), mark in zip(at, marks, strict=True)]
        parts.append(f'<path class="band" d="M{"L".join([*above, *reversed(below)])}Z"/>')
    if series.line and len(at) > 1:
        parts.append(f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in at)}"/>')
    size = 6 if series.hollow else 3.2
    for (x, y), mark in zip(at, marks, strict=True):
        kind = "hollow" if series.hollow else "mark"
        tip = escape(f"{series.name}: {mark.tip}")
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}" data-tip="{tip}"/>')
    return "".join([*parts, "</g>"])


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


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
