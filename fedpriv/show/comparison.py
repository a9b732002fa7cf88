"""Two runs side by side: where their settings differ, and by how much their figures do, seed by seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.core.errors import InputError
from fedpriv.core.figures import with_spread
from fedpriv.scenario.published import dotted
from fedpriv.show.summary import METRICS, Metric, cells_at, mean_and_deviation, points, short_names, value_text
from fedpriv.study.results import Results, read_results

_NOT_COMPARED = ("name", "title", "seed", "label")


@dataclass(frozen=True)
class Comparison:
    """A row for each sweep point and metric that both runs have; the first `labels` columns name it."""

    settings: Sequence[tuple[str, str, str]]
    """Keys whose values differ between the first cells: key, value in the first run, value in the second."""
    header: Sequence[str]
    body: Sequence[Sequence[str]]
    labels: int


def compared(first: Path, second: Path) -> Comparison:
    """Compare two folders; InputError if they have no sweep point and seed in common.

    Cells of one seed share records and, scaled, noise: differences are taken seed by seed.
    """
    one, other = read_results(first), read_results(second)
    common = [key for key in one.axes if key in other.axes]
    rows = []
    for point in points(one):
        for metric in METRICS:
            pairs = _pairs(one, other, point, common, metric)
            if pairs:
                labels = [value_text(point[key]) for key in one.axes]
                rows.append([*labels, metric.title, *_figures(pairs, metric)])
    if not rows:
        raise InputError(f"{first} and {second} have no finished sweep point and seed in common")
    names = list(short_names(one.axes).values())
    header = [*names, "metric", "seeds", "first", "second", "second - first"]
    return Comparison(_settings(one, other), header, rows, len(names) + 1)


def _pairs(
    one: Results, other: Results, point: Mapping[str, Any], common: Sequence[str], metric: Metric
) -> list[tuple[float, float]]:
    """The metric in both runs, a pair for each seed of the point; axes of one run only must be single."""
    matching = [there for there in points(other) if all(there[key] == point[key] for key in common)]
    if len(matching) != 1:
        return []
    there = {cell["seed"]: cell for cell in cells_at(other, matching[0])}
    return [
        (metric.factor * cell[metric.key], metric.factor * there[cell["seed"]][metric.key])
        for cell in cells_at(one, point)
        if cell["seed"] in there and metric.key in cell and metric.key in there[cell["seed"]]
    ]


def _figures(pairs: Sequence[tuple[float, float]], metric: Metric) -> list[str]:
    mean, deviation = mean_and_deviation([second - first for first, second in pairs])
    error = None if deviation is None else deviation / math.sqrt(len(pairs))
    means = (with_spread(mean_and_deviation(each)[0], None, metric.digits) for each in zip(*pairs, strict=True))
    return [str(len(pairs)), *means, with_spread(mean, error, metric.digits, signed=True)]


def _settings(one: Results, other: Results) -> list[tuple[str, str, str]]:
    first, second = (dict(dotted(results.cells[0]["scenario"])) for results in (one, other))
    keys = [key for key in {**first, **second} if key.partition(".")[0] not in _NOT_COMPARED]
    swept = {*one.axes, *other.axes}
    return [
        (key, value_text(first.get(key, "not set")), value_text(second.get(key, "not set")))
        for key in keys
        if first.get(key) != second.get(key) and key not in swept
    ]
