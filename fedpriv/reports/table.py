"""Measured beside published: results as Markdown, CSV or LaTeX."""

import csv
import io
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedpriv.reports.results import Results


@dataclass(frozen=True)
class Metric:
    """How a figure of results.json is shown: its name, the unit it is printed in, and its digits."""

    key: str
    title: str
    factor: float
    digits: int
    published_digits: int


METRICS = (
    Metric("test_loss", "test loss", 1.0, 4, 3),
    Metric("test_accuracy", "test accuracy (%)", 100.0, 1, 1),
)
"""Losses as they are; accuracies are stored as shares and printed, as papers do, in percent."""


@dataclass(frozen=True)
class Summary:
    """One metric at one sweep point over its seeds, in the unit it is printed in."""

    mean: float
    std: float | None
    seeds: int


def render(results: Results, style: str) -> str:
    """All tables of a run in one of `STYLES`."""
    return STYLES[style](results)


def summarize(cells: Sequence[Mapping[str, Any]], metric: Metric) -> Summary | None:
    """Mean and sample standard deviation over seeds; None without a cell."""
    values = [metric.factor * cell[metric.key] for cell in cells]
    if not values:
        return None
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def cells_at(results: Results, point: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The finished cells whose swept values include those of `point`."""
    return [cell for cell in results.cells if all(cell["point"].get(key) == value for key, value in point.items())]


def points(results: Results) -> Iterator[dict[str, Any]]:
    """Every sweep point in the order of the scenario, finished or not."""
    for values in itertools.product(*results.axes.values()):
        yield dict(zip(results.axes, values, strict=True))


def short(key: str) -> str:
    """The last part of a dotted key."""
    return key.rpartition(".")[2]


def _markdown(results: Results) -> str:
    blocks = [f"## {results.title or results.name}"]
    if results.published is not None:
        blocks += [_grid_block(results, metric, fixed) for metric in METRICS for fixed in _other_points(results)]
    else:
        blocks.append(_aligned(*_plain_rows(results)))
    return "\n\n".join([*filter(None, blocks), _footer(results)]) + "\n"


def _other_points(results: Results) -> list[dict[str, Any]]:
    """One sweep point for each combination of the axes that the paper's tables do not have."""
    assert results.published is not None
    table = results.published.table
    others = {key: values for key, values in results.axes.items() if key not in (table.rows, table.columns)}
    return [dict(zip(others, values, strict=True)) for values in itertools.product(*others.values())]


def _grid_block(results: Results, metric: Metric, fixed: Mapping[str, Any]) -> str:
    published = results.published
    if published is None or getattr(published.table, metric.key) is None:
        return ""
    rows, columns = published.table.rows, published.table.columns
    header = [f"{short(rows)} \\ {short(columns)}", *map(str, results.axes[columns])]
    body = [
        [
            str(row),
            *(_entry(results, metric, {**fixed, rows: row, columns: column}) for column in results.axes[columns]),
        ]
        for row in results.axes[rows]
    ]
    where = ", ".join(f"{short(key)} = {value}" for key, value in fixed.items())
    title = f"**{metric.title}**{f' ({where})' if where else ''}: measured [published, difference]"
    return f"{title}\n\n{_aligned(header, body)}"


def _entry(results: Results, metric: Metric, point: Mapping[str, Any]) -> str:
    summary = summarize(cells_at(results, point), metric)
    if summary is None:
        return "missing"
    spread = "" if summary.std is None else f" ± {summary.std:.{metric.digits}f}"
    text = f"{summary.mean:.{metric.digits}f}{spread}"
    known = results.published.value(metric.key, point) if results.published else None
    if known is None:
        return text
    return f"{text} [{known:.{metric.published_digits}f}, {summary.mean - known:+.{metric.digits}f}]"


def _plain_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    header = [*map(short, results.axes), "silos", "rounds", "mu", "epsilon", *(m.title for m in METRICS)]
    body = []
    for point in points(results):
        cells = cells_at(results, point)
        row = [str(value) for value in point.values()]
        if cells:
            first = cells[0]
            facts = [str(first["silos"]), str(first["rounds"]), _number(first["mu"]), _number(first["epsilon"])]
        else:
            facts = ["", "", "", ""]
        body.append([*row, *facts, *(_entry(results, metric, point) for metric in METRICS), _clipped(cells)])
    return [*header, "clipped (%)"], body


def _clipped(cells: Sequence[Mapping[str, Any]]) -> str:
    return f"{100 * statistics.fmean(cell['fraction_clipped'] for cell in cells):.1f}" if cells else ""


def _footer(results: Results) -> str:
    expected = len(results.seeds) * len(list(points(results)))
    lines = []
    if not results.complete:
        lines.append(f"**INCOMPLETE: {len(results.cells)} of {expected} cells are there.**")
    seeds = len(results.seeds)
    kind = "one seed" if seeds == 1 else f"mean ± standard deviation over {seeds} seeds"
    lines.append(f"{kind}; engine {results.engine}{_largest_differences(results)}.")
    lines += [_statement(group) for group in _by_statement(results)]
    return "\n".join(lines)


def _largest_differences(results: Results) -> str:
    if results.published is None:
        return ""
    texts = []
    for metric in METRICS:
        gaps = []
        for point in points(results):
            summary, known = (
                summarize(cells_at(results, point), metric),
                results.published.value(metric.key, point),
            )
            if summary is not None and known is not None:
                gaps.append(abs(summary.mean - known))
        if gaps:
            texts.append(f"{metric.title} {max(gaps):.{metric.digits}f}")
    return f"; largest difference from the paper: {', '.join(texts)}" if texts else ""


def _by_statement(results: Results) -> list[list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in results.cells:
        groups.setdefault((cell["trust"], cell["relation"], cell["noise"], cell["delta"]), []).append(cell)
    return list(groups.values())


def _statement(cells: Sequence[Mapping[str, Any]]) -> str:
    """One privacy statement for cells that differ in μ only."""
    first = cells[0]
    who = f"{first['trust']} server"
    if first["mu"] is None:
        return f"Privacy ({who}): none, the run adds no noise."
    distinct = {cell["mu"]: cell for cell in sorted(cells, key=lambda cell: float(cell["mu"]))}.values()
    numbers = "; ".join(
        f"mu = {_number(cell['mu'])}: (ε, δ) = ({_number(cell['epsilon'])}, {cell['delta']:g}) exact, "
        f"ε = {_number(cell['epsilon_paper'])} by the paper's formula"
        for cell in distinct
    )
    return (
        f"Privacy ({who}): mu-GDP exactly for {first['unit']}, {first['relation']} neighbours; {numbers}. "
        f"The noise is {first['noise']} noise: seeded and reproducible, not for release."
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _aligned(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    widths = [max(len(row[place]) for row in [header, *body]) for place in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, body)])


def _csv(results: Results) -> str:
    """One tidy row for each sweep point and metric."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    facts = ["mu", "epsilon", "delta", "relation", "trust"]
    writer.writerow([*results.axes, "metric", "mean", "std", "seeds", "published", "difference", *facts])
    for point in points(results):
        cells = cells_at(results, point)
        for metric in METRICS:
            summary = summarize(cells, metric)
            if summary is None:
                continue
            known = results.published.value(metric.key, point) if results.published else None
            gap = None if known is None else summary.mean - known
            figures = [metric.title, summary.mean, summary.std, summary.seeds, known, gap]
            writer.writerow([*point.values(), *figures, *(cells[0][fact] for fact in facts)])
    return buffer.getvalue()


def _latex(results: Results) -> str:
    """A booktabs table a metric, or one table of all points."""
    if results.published is None:
        return _tabular(results.title or results.name, *_plain_rows(results))
    table = results.published.table
    blocks = []
    for metric in METRICS:
        if getattr(table, metric.key) is None:
            continue
        for fixed in _other_points(results):
            header = [short(table.rows), *map(str, results.axes[table.columns])]
            body = [
                [str(row)]
                + [
                    _entry(results, metric, {**fixed, table.rows: row, table.columns: column})
                    for column in results.axes[table.columns]
                ]
                for row in results.axes[table.rows]
            ]
            caption = ", ".join(
                [f"{results.title}: {metric.title}", *(f"{short(k)} = {v}" for k, v in fixed.items())]
            )
            blocks.append(_tabular(caption, header, body))
    return "\n".join(blocks)


def _tabular(caption: str, header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [" & ".join(map(_escape, row)) + r" \\" for row in [header, *body]]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape(caption)}}}",
            rf"\begin{{tabular}}{{{'l' * len(header)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _escape(text: str) -> str:
    replaced = text.replace("\\", r"\textbackslash ")
    for character in "%&#_":
        replaced = replaced.replace(character, f"\\{character}")
    return replaced.replace("±", r"$\pm$").replace("μ", r"$\mu$")


STYLES: dict[str, Callable[[Results], str]] = {"markdown": _markdown, "csv": _csv, "latex": _latex}
