"""Figures of test records with intervals of 95 %, by whose records they are: what [evaluation.curves] released.

| key of results.json | is |
|---|---|
| `test_auc`, `test_auc_low`, `test_auc_high` | of all test records |
| `test_auc_of_sex=Male`, … | of a group's |
| `test_auc_at_SILO`, … | of a silo's |
| `test_observed_where_0.212`, … | the share of class 1 where the model's mean score is .212 |

A figure of which there were too few records is not there.
"""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedpriv.show.summary import Metric, cells_at, metric_named, points, short_names, value_text
from fedpriv.study.results import Results

_NAMES = ("auc", "balanced_accuracy", "sensitivity", "specificity", "calibration_error_squared")
_LOW = re.compile(rf"test_({'|'.join(_NAMES)})_low(?:_at_(.+))?|test_({'|'.join(_NAMES)})_of_(.+)_low")
_OBSERVED = re.compile(r"test_observed_where_([0-9.]+)")
Rows = tuple[str, Sequence[str], Sequence[Sequence[str]], int]
"""A table's caption, header, body and columns of labels."""


def intervals_of(results: Results) -> list[Rows]:
    """A table of figures and one of a reliability curve; none without [evaluation.curves].  Means over seeds."""
    figures, observed = list[list[str]](), list[list[str]]()
    for point in points(results):
        cells, named = cells_at(results, point), list(map(value_text, point.values()))
        for whose in dict.fromkeys(filter(None, (_whose(key) for cell in cells for key in cell))):
            texts = [_text(cells, _keys(name, whose), _shown(name)) for name in _NAMES]
            figures.append([*named, whose, *texts])
        for cell in cells:
            found = sorted(filter(None, map(_OBSERVED.fullmatch, cell)), key=lambda match: float(match[1]))
            for match in found:
                ends = (match[0], f"{match[0]}_low", f"{match[0]}_high")
                shown = Metric(match[0], "", 100.0, 1, 1)
                observed.append(
                    [*named, str(cell["seed"]), f"{100.0 * float(match[1]):.1f}", _text([cell], ends, shown)]
                )
    names = list(short_names(results.axes).values())
    titles = [_shown(name).title for name in _NAMES]
    tables: list[Rows] = []
    if figures:
        caption = "test records of the silos, with intervals of 95 % that have sampling and noise in them"
        tables.append((caption, [*names, "of", *titles], figures, len(names) + 1))
    if observed:
        caption = "share of class 1 among test records by the model's mean score, with intervals of 95 %"
        tables.append((caption, [*names, "seed", "score (%)", "observed (%)"], observed, len(names) + 2))
    return tables


def _whose(key: str) -> str | None:
    """Of a key with the lower end of an interval whose records it is about."""
    if (match := _LOW.fullmatch(key)) is None:
        return None
    return match[4] or (f"at {match[2]}" if match[2] else "all")


def _keys(name: str, whose: str) -> tuple[str, str, str]:
    if whose == "all" or whose.startswith("at "):
        silo = "" if whose == "all" else f"_at_{whose[3:]}"
        return f"test_{name}{silo}", f"test_{name}_low{silo}", f"test_{name}_high{silo}"
    return (key := f"test_{name}_of_{whose}"), f"{key}_low", f"{key}_high"


def _shown(name: str) -> Metric:
    metric = metric_named(f"test_{name}")
    assert metric is not None
    return metric


def _text(cells: Sequence[Mapping[str, Any]], keys: tuple[str, str, str], metric: Metric) -> str:
    there = [cell for cell in cells if all(key in cell for key in keys)]
    if not there:
        return "–"
    value, low, high = (f"{metric.factor * fmean(cell[key] for cell in there):.{metric.digits}f}" for key in keys)
    return f"{value} ({low} – {high})"
