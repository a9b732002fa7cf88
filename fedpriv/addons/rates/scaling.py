"""Section [scaling] of a scenario: growth of a metric, or of the effort for a target, with n.

| section | value at n |
|---|---|
| without `smallest` | mean of the metric over seeds, at the best (or worst) point of all other swept keys |
| with `smallest` | number of rounds at which the mean reaches the target, interpolated between two of the sweep |

The target is factor · scale · (1/√n + √d/(ε n)), without the last term for a point without noise (Choquette-Choo,
Ganesh & Thakurta 2025, Table 1).  Let r_k be the mean metric at T_k rounds, at the best point of all other keys,
and T_k the smallest number whose r_k is at most the target.  Then

    T = T_{k-1} (T_k/T_{k-1})^f,   f = ln(r_{k-1}/target)/ln(r_{k-1}/r_k)

An exponent is the least-squares slope of ln(value) on ln(n), with two 95 % intervals: by Student's t, and by 400
draws of the seeds with replacement, if there are several seeds.  A value counts in the fit only if it is neither
at its start nor at a floor.  With `smallest` the start is the least number of rounds with finished cells, and a
floor is a target that no number reaches.  Without it values from the key `start` on, and values up to `floor` or
0, are not fitted.

Keys of the section: `along` is the swept key of n, `by` that of the compared values, which have a line each, and
`smallest` that of the rounds.  `metric` is the measured figure.  Without `smallest`, `over` says whether the best
or the worst point counts, where the best has the smallest mean, and seeds of `chosen_on` serve that choice alone.
`theory` has an exponent for some values of `by`.  A point is one value of each swept key, and its cells are its
runs, one a seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from fedpriv.addons.rates.figure import CONFIDENCE, ExponentFit, fit_power
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_with_spread
from fedpriv.scenario.published import Growth
from fedpriv.show.charts import Chart, Mark, Panel, Series
from fedpriv.show.looks import Look, nth_look
from fedpriv.show.summary import cells_at_point, format_value, sweep_points
from fedpriv.show.table import TextTable
from fedpriv.study.results import Results

_DRAWS = 400
_GREY = Look("#707070", "#9a9a9a")


@dataclass(frozen=True)
class Point:
    """Finished cells of one sweep point that have the metric."""

    rounds: float
    """Value of the key `smallest`, or 0 without it."""
    values: Mapping[int, float]
    """Metric by seed."""
    gradients: float
    """Gradient evaluations of a cell."""

    def mean(self, seeds: Sequence[int]) -> float:
        """Return the mean over these seeds, counted as often as they occur, or infinity without any."""
        values = [self.values[seed] for seed in seeds if seed in self.values]
        return fmean(values) if values else math.inf


@dataclass(frozen=True)
class Size:
    """Sweep points at one value of `by` and one n, with their target."""

    n: float
    target: float
    """Target of the metric, or NaN without a `factor` or without points."""
    points: Sequence[Point]


@dataclass(frozen=True)
class Value:
    """Value at one n."""

    value: float | None
    """The metric, or the interpolated number of rounds.

    The value is None without finished cells of the seeds, and if no number of rounds reached the target.
    """
    spread: float = 0.0
    """Half of the 95 % interval over seeds."""
    gradients: float | None = None
    """Gradient evaluations, interpolated like the rounds."""
    is_fitted: bool = True
    """Whether the value is neither at its start nor at a floor."""


@dataclass(frozen=True)
class ScalingLine:
    """Values of one value of `by`, with fitted exponents."""

    name: str
    values: Mapping[float, Value]
    """Value at each n."""
    fit: ExponentFit | None
    resampled: tuple[float, float] | None
    """95 % interval of the exponent over draws of the seeds, or None for one seed or too few values."""
    theory: float | None

    @property
    def fitted_pairs(self) -> list[tuple[float, float]]:
        return _fitted_pairs(self.values)

    def gradient_fit(self) -> ExponentFit | None:
        """Fit gradient evaluations to n, or return None for fewer than two values."""
        pairs = [(n, value.gradients) for n, value in self.values.items() if value.is_fitted and value.gradients]
        return fit_power(pairs)


def find_values(results: Results, scaling: Growth) -> list[ScalingLine]:
    """Return the values and exponents of each value of `scaling.by`.

    Raises:
        InputError: There are finished cells, and none has such a metric.
    """
    if results.cells and not any(scaling.metric in cell for cell in results.cells):
        metrics = [name for name, value in results.cells[0].items() if isinstance(value, float)]
        raise InputError(f"scaling.metric: no {scaling.metric!r} in the results; there are {', '.join(metrics)}")
    return [_find_line(results, scaling, name) for name in results.axes[scaling.by]]


def _find_line(results: Results, scaling: Growth, name: Any) -> ScalingLine:
    """Estimate the values at all n for the value `name` of the key `by`, and fit their exponent."""
    sizes = [_collect(results, scaling, {scaling.by: name, scaling.along: n}) for n in results.axes[scaling.along]]
    seeds = [seed for seed in results.seeds if seed not in scaling.chosen_on]
    values = {size.n: _estimate(scaling, size, seeds) for size in sizes}
    generator = np.random.default_rng(0)
    resamples = [
        {size.n: _estimate(scaling, size, [int(s) for s in generator.choice(seeds, len(seeds))]) for size in sizes}
        for _ in range(_DRAWS if len(seeds) > 1 else 0)
    ]
    spreads = {size.n: _half_width([draw[size.n].value for draw in resamples]) for size in sizes}
    slopes = [fit.exponent for draw in resamples if (fit := fit_power(_fitted_pairs(draw)))]
    return ScalingLine(
        str(name),
        {n: Value(value.value, spreads[n], value.gradients, value.is_fitted) for n, value in values.items()},
        fit_power(_fitted_pairs(values)),
        _interval(slopes),
        scaling.theory.get(str(name)),
    )


def _collect(results: Results, scaling: Growth, fixed: Mapping[str, Any]) -> Size:
    """Collect the sweep points with these values of `by` and `along`, and finished cells with the metric.

    The target follows from the dimension and ε of a point's first such cell.  The last point counts if points
    differ in them.  The target is NaN without a factor or without points.
    """
    points, n, target = [], float(fixed[scaling.along]), math.nan
    for point in sweep_points(results):
        cells = [
            cell
            for cell in (cells_at_point(results, point) if fixed.items() <= point.items() else [])
            if cell.get(scaling.metric) is not None
        ]
        if not cells:
            continue
        first, epsilon = cells[0], cells[0]["epsilon"]
        privacy_error = 0.0 if epsilon is None else math.sqrt(first["dimension"]) / (epsilon * n)
        target = (scaling.factor or math.nan) * scaling.scale * (1.0 / math.sqrt(n) + privacy_error)
        rounds = float(point[scaling.smallest]) if scaling.smallest else 0.0
        metrics = {cell["seed"]: float(cell[scaling.metric]) for cell in cells}
        points.append(Point(rounds, metrics, float(first["gradient_evaluations"])))
    return Size(n, target, points)


def _estimate(scaling: Growth, size: Size, seeds: Sequence[int]) -> Value:
    """Estimate the value at one n by these seeds, which may occur several times.

    With `smallest` it is a number of rounds.  Without, it is the mean metric of the best or worst point, which is
    chosen by its mean over the seeds of `chosen_on`, if there are any, or else over `seeds`.  Points without
    finished cells of the seeds of the choice are passed over.
    """
    if scaling.smallest:
        return _interpolate(size, seeds)
    choice = scaling.chosen_on or seeds
    pick = max if scaling.over == "worst" else min
    chosen_point = pick(
        filter(lambda point: point.mean(choice) < math.inf, size.points),
        key=lambda point: point.mean(choice),
        default=None,
    )
    value = math.inf if chosen_point is None else chosen_point.mean(seeds)
    start = math.inf if scaling.start is None else scaling.start
    return Value(value if value < math.inf else None, is_fitted=max(0.0, scaling.floor) < value < start)


def _interpolate(size: Size, seeds: Sequence[int]) -> Value:
    """Return the interpolated number of rounds at which the mean metric reaches the target.

    A number of rounds counts with its best point, which has the smallest mean.  The interpolation is that of this
    module's formula, with T_k and T_{k-1} as `after` and `before`.  The result is T_k itself if T_k is the least
    number of rounds with finished cells, or if a logarithm of the formula does not exist.  It is None if no number
    reaches the target.
    """
    best: dict[float, tuple[float, float]] = {}
    for point in size.points:
        best[point.rounds] = min(best.get(point.rounds, (math.inf, 0.0)), (point.mean(seeds), point.gradients))
    grid = sorted(best)
    index = next((k for k, rounds in enumerate(grid) if best[rounds][0] <= size.target), None)
    if index is None:
        return Value(None, is_fitted=False)
    after, (risk_after, gradients_after) = grid[index], best[grid[index]]
    if index == 0:
        return Value(after, gradients=gradients_after, is_fitted=False)
    before, (risk_before, gradients_before) = grid[index - 1], best[grid[index - 1]]
    is_usable = math.isfinite(risk_before) and risk_after > 0.0
    share = math.log(risk_before / size.target) / math.log(risk_before / risk_after) if is_usable else 1.0
    return Value(
        before * (after / before) ** share,
        gradients=gradients_before * (gradients_after / gradients_before) ** share
        if is_usable
        else gradients_after,
    )


def _fitted_pairs(values: Mapping[float, Value]) -> list[tuple[float, float]]:
    return [(n, value.value) for n, value in values.items() if value.is_fitted and value.value]


def _interval(numbers: Sequence[float]) -> tuple[float, float] | None:
    """Return the 2.5 and 97.5 percentiles, or None without numbers."""
    if not numbers:
        return None
    low, high = np.percentile(numbers, [50.0 * (1.0 - CONFIDENCE), 50.0 * (1.0 + CONFIDENCE)])
    return float(low), float(high)


def _half_width(values: Sequence[float | None]) -> float:
    interval = _interval([value for value in values if value is not None])
    return 0.0 if interval is None else (interval[1] - interval[0]) / 2.0


def scaling_table(results: Results) -> TextTable:
    """Return the table of a run's [scaling]: a row for each value of `by`, and a column for each n.

    The last columns have the fitted exponent, its interval over draws of the seeds, and the exponent of the
    theory.  With `smallest` there is also the exponent of the gradient evaluations.

    Raises:
        InputError: There are finished cells, and none has the section's metric.
    """
    scaling = results.growth
    assert scaling is not None  # only runs with the section have this table
    lines = find_values(results, scaling)
    sizes = results.axes[scaling.along]
    symbol = scaling.along.rpartition(".")[2] if not scaling.smallest else "n"
    effort = "rounds" if scaling.smallest else scaling.metric
    header = ["", *(f"{symbol} = {format_value(n)}" for n in sizes), f"{effort} ~ {symbol}^", "by seeds", "theory"]
    rows = []
    for line in lines:
        row = [line.name, *(_format_entry(value, scaling) for value in line.values.values())]
        row.append("too few" if line.fit is None else f"{line.fit.text(3)} ({line.fit.value_count} sizes)")
        row.append("-" if line.resampled is None else f"{line.resampled[0]:.3f} to {line.resampled[1]:.3f}")
        rows.append([*row, "" if line.theory is None else f"{line.theory:g}"])
        if scaling.smallest:
            rows[-1].append("too few" if (fit := line.gradient_fit()) is None else fit.text(3))
    if scaling.smallest:
        header.append("gradients ~ n^")
    return TextTable(_caption(scaling), header, rows, label_count=1)


def _caption(scaling: Growth) -> str:
    intervals = "exponents with 95 % intervals, by least squares and by draws of the seeds"
    if scaling.smallest:
        return (
            f"{scaling.smallest} at which mean {scaling.metric} reaches {scaling.factor:g} · {scaling.scale:g} · "
            f"(1/√n + √d/(εn)), interpolated; {intervals}"
        )
    choice = f", chosen on seed {', '.join(map(str, scaling.chosen_on))}" if scaling.chosen_on else ""
    return f"mean {scaling.metric} at the {scaling.over} of the other settings{choice}; {intervals}"


def _format_entry(value: Value, scaling: Growth) -> str:
    if value.value is None:
        return "not reached" if scaling.smallest else "-"
    text = format_with_spread(value.value, value.spread or None, 2 if scaling.smallest else 4)
    return text if value.is_fitted else f"{text} (not fitted)"


def scaling_chart(results: Results) -> Chart | None:
    """Return the chart of a run's [scaling], or None for a run without the section.

    It shows values with 95 % intervals, fitted lines, and a grey triangle for each different exponent that the
    theory has for a fitted line.

    Raises:
        InputError: There are finished cells, and none has the section's metric.
    """
    scaling = results.growth
    if scaling is None:
        return None
    series = []
    for index, line in enumerate(find_values(results, scaling)):
        marks = [Mark(n, v.value, spread=v.spread) for n, v in line.values.items() if v.value]
        look = nth_look(index)
        name = line.name if line.fit is None else f"{line.name}: exponent {line.fit.text(3)}"
        series.append(Series(name, look, marks, line=False))
        fitted = _fitted_line(line, look)
        names = {one_series.name for one_series in series if one_series.look == _GREY}  # one triangle for each
        series += [one_series for one_series in fitted if one_series.name not in names]
    return Chart(
        "scaling",
        _caption(scaling),
        scaling.along,
        scaling.smallest or scaling.metric,
        [Panel("", series)],
        "Grey triangles have the exponents of the theory." if any(s.look == _GREY for s in series) else "",
        log_x=True,
        log_y=True,
    )


def _fitted_line(line: ScalingLine, look: Look) -> list[Series]:
    """Return the fitted line, and a triangle with the theory's exponent near the line's end.

    The result is empty without a fit, and has no triangle without an exponent of the theory.
    """
    pairs = line.fitted_pairs
    if line.fit is None:
        return []
    centre_x, centre_y = np.exp(np.mean(np.log(np.array(pairs)), axis=0))
    ends = (pairs[0][0], pairs[-1][0])
    fitted = [Mark(x, float(centre_y * (x / centre_x) ** line.fit.exponent)) for x in ends]
    series = [Series(f"{line.name}: exponent {line.fit.text(3)}", look, fitted, dots=False)]
    if line.theory is not None:
        # The triangle begins a fifth below the fitted line, and its right angle lies below its sloping side.
        low_x, high_x, low = ends[1] / 3.0, ends[1], 0.8 * fitted[1].y * 3.0**-line.fit.exponent
        end = low * 3.0**line.theory
        corners = [(low_x, low), (high_x, low) if end > low else (low_x, end), (high_x, end), (low_x, low)]
        series.append(
            Series(f"theory: {line.theory:g}", _GREY, [Mark(x, float(y)) for x, y in corners], dots=False)
        )
    return series
