"""How what an algorithm needs grows: the smallest number of rounds that reaches a target, and fitted exponents.

For each algorithm and each number of records n the target is an excess risk of

    factor · scale · (1/√n + √d / (ε n)),   scale = L R

(Choquette-Choo, Ganesh & Thakurta 2025, Table 1).  A sweep point's value is the mean over seeds; of swept keys
that are not named here the best value counts.  Exponents are least squares of log T on log n.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.core.figures import with_spread
from fedpriv.scenario.published import Growth
from fedpriv.show.summary import cells_at, points, value_text
from fedpriv.study.results import Results

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Needed:
    """What one algorithm needed at one n; None where no number of rounds in the sweep reached the target."""

    target: float
    rounds: float | None
    gradients: float | None


@dataclass(frozen=True)
class Fit:
    """y ~ n^exponent, from `count` sizes; `half_width` of its 95 % interval is infinite for two."""

    exponent: float
    half_width: float
    count: int


def needed(results: Results, scaling: Growth) -> dict[str, dict[float, Needed]]:
    """For each value of `scaling.by`, and each n: target, rounds and gradient evaluations."""
    table: dict[str, dict[float, Needed]] = {}
    for name in results.axes[scaling.by]:
        table[name] = {
            float(size): _needed_at(results, scaling, {scaling.by: name, scaling.along: size})
            for size in results.axes[scaling.along]
        }
    return table


def _needed_at(results: Results, scaling: Growth, fixed: Mapping[str, Any]) -> Needed:
    here = [point for point in points(results) if all(point[key] == value for key, value in fixed.items())]
    reached: list[tuple[float, float]] = []
    target = math.nan
    for point in here:
        cells = cells_at(results, point)
        if not cells:
            continue
        first = cells[0]
        size, epsilon = float(fixed[scaling.along]), first["epsilon"]
        private = 0.0 if epsilon is None else math.sqrt(first["dimension"]) / (epsilon * size)
        target = scaling.factor * scaling.scale * (1.0 / math.sqrt(size) + private)
        if np.mean([cell[scaling.metric] for cell in cells]) <= target:
            reached.append((float(point[scaling.smallest]), float(first["gradient_evaluations"])))
    rounds, gradients = min(reached, default=(None, None))
    return Needed(target, rounds, gradients)


def fit(needs: Mapping[float, Needed], what: str) -> Fit | None:
    """The exponent of `what` ("rounds" or "gradients") in n; None with fewer than two sizes that were reached."""
    pairs = [(size, value) for size, need in needs.items() if (value := getattr(need, what)) is not None]
    if len(pairs) < 2:
        return None
    from scipy import stats  # half a second, which only a scenario with a scaling table should wait

    sizes, values = (np.log(column) for column in zip(*pairs, strict=True))
    line = stats.linregress(sizes, values)
    half_width = math.inf
    if len(pairs) > 2:
        half_width = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, len(pairs) - 2) * line.stderr)
    return Fit(float(line.slope), half_width, len(pairs))


def scaling_lines(results: Results, scaling: Growth) -> list[list[str]]:
    """Rows of text, header first: an algorithm a row, a size a column, exponents beside the theory's."""
    for key in (scaling.by, scaling.along, scaling.smallest):
        if key not in results.axes:
            raise InputError(f"scaling: {key!r} is not swept; swept are {', '.join(results.axes)}")
    sizes = results.axes[scaling.along]
    rows = [["", *(f"n = {value_text(size)}" for size in sizes), "rounds ~ n^", "theory", "gradients ~ n^"]]
    for name, needs in needed(results, scaling).items():
        entries = ["not reached" if need.rounds is None else f"{need.rounds:g}" for need in needs.values()]
        exponents = [_exponent(fit(needs, what)) for what in ("rounds", "gradients")]
        theory = scaling.theory.get(name)
        rows.append([name, *entries, exponents[0], "" if theory is None else f"{theory:g}", exponents[1]])
    return rows


def _exponent(found: Fit | None) -> str:
    if found is None:
        return "too few"
    width = None if math.isinf(found.half_width) else found.half_width
    return f"{with_spread(found.exponent, width, 2)} ({found.count} sizes)"
