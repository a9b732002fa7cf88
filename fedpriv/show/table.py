"""A run's tables: measured beside published, as Markdown, CSV or LaTeX.

How what an algorithm needs grows: the smallest number of rounds that reaches a target, and fitted exponents.

For each algorithm and each number of records n the target is an excess risk of

    factor · scale · (1/√n + √d / (ε n)),   scale = L R

(Choquette-Choo, Ganesh & Thakurta 2025, Table 1).  A sweep point's value is the mean over seeds; of swept keys
that are not named here the best value counts.  Exponents are least squares of log T on log n.
"""

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.core.extensions import all_added
from fedpriv.core.figures import delta_figure, epsilon_figure, upper_figure, with_spread
from fedpriv.core.files import write_text
from fedpriv.scenario.published import Growth, Paper
from fedpriv.show.summary import (
    Metric,
    cells_at,
    compare,
    how_measured,
    metrics_of,
    point_text,
    points,
    privacy_lines,
    product,
    published_metrics,
    shared_metrics,
    short_names,
    silo_metrics,
    state_of,
    value_text,
    warnings_of,
)
from fedpriv.study.results import Results, read_claims

Style = Literal["markdown", "csv", "latex"]
AddedRow = tuple[str, Callable[[Metric, Mapping[str, Any]], str]]
"""A row's title, and its text for a metric at the sweep points that have some values."""


_BEFORE = ("silos", "rounds", "μ", "ε at δ")
_AFTER = ("gradients", "sent by a silo (MB)", "clipped (%)", "seconds, all seeds")


@dataclass(frozen=True)
class Table:
    """A table before a style is given to it.  The first `labels` columns name the row, the others hold figures."""

    caption: str
    header: Sequence[str]
    body: Sequence[Sequence[str]]
    labels: int
    across: str = ""
    """What the headers of the figures are values of."""

    @property
    def heads(self) -> list[str]:
        """The header, with what is across beside its first name."""
        first, *others = self.header
        return [f"{first} \\ {self.across}" if self.across else first, *others]


def render(results: Results, style: Style) -> str:
    """All tables of a run, ending with a newline."""
    return STYLES[style](results)


def write_table(folder: Path) -> str:
    """Write RUN_DIR/table.md, the Markdown of a run that is complete; what was written."""
    text = render(read_claims(folder), "markdown")
    write_text(folder / "table.md", text)
    return text


def tables_of(results: Results) -> list[Table]:
    """A table of the paper's form for each metric it has and each value of other axes, or one of all points."""
    if results.scaling is not None:
        return [_scaling(results, results.scaling)]
    shown = published_metrics(results)
    added_rows = [rows(results) for rows in all_added("rows").values()]
    if results.published is None or not shown:
        return [_list(results, added_rows), *_by_silo(results), *_intervals(results)]
    paper = results.published.table
    others = {key: values for key, values in results.axes.items() if key not in (paper.rows, paper.columns)}
    grids = [_grid(results, paper, metric, fixed, added_rows) for metric in shown for fixed in product(others)]
    return [*grids, *_by_silo(results), *_intervals(results)]


def _by_silo(results: Results) -> list[Table]:
    """For each metric of the silos' own test records a row a sweep point and a column a silo."""
    tables = []
    for metrics in silo_metrics(results).values():
        titles = [metric.title.rpartition(", ")[2].removeprefix("at ") for metric in metrics]
        body = [
            [*map(value_text, point.values()), *(_cell_text(results, metric, point) for metric in metrics)]
            for point in points(results)
        ]
        names = list(short_names(results.axes).values())
        caption = f"{metrics[0].title.rpartition(', ')[0]} by silo, on its own test records"
        tables.append(Table(caption, [*names, *titles], body, labels=len(names)))
    return tables


def _intervals(results: Results) -> list[Table]:
    return [Table(*table) for tables in all_added("tables").values() for table in tables(results)]


def _scaling(results: Results, scaling: Growth) -> Table:
    header, *body = scaling_lines(results, scaling)
    return Table(
        f"smallest {scaling.smallest} whose mean {scaling.metric} is at most "
        f"{scaling.factor:g} · {scaling.scale:g} · (1/√n + √d/(εn)); fitted exponents with 95 % intervals",
        header,
        body,
        labels=1,
    )


def _grid(
    results: Results, paper: Paper, metric: Metric, fixed: Mapping[str, Any], added_rows: Sequence[AddedRow]
) -> Table:
    names, columns = short_names(results.axes), results.axes[paper.columns]
    along = [{**fixed, paper.columns: column} for column in columns]
    body = [
        [value_text(row), *(_cell_text(results, metric, {**point, paper.rows: row}) for point in along)]
        for row in results.axes[paper.rows]
    ]
    for title, text_of in added_rows:
        texts = [text_of(metric, point) for point in along]
        body += [[title, *texts]] if any(texts) else []
    where = f", {point_text(results, fixed)}" if fixed else ""
    published = ": measured [published, measured - published]" if getattr(paper, metric.key, None) else ""
    return Table(
        f"{metric.title}{where}{published}",
        [names[paper.rows], *map(value_text, columns)],
        body,
        labels=1,
        across=names[paper.columns],
    )


def _cell_text(results: Results, metric: Metric, point: Mapping[str, Any]) -> str:
    """mean ± std [published, difference], as far as they are there."""
    comparison = compare(results, metric, point)
    measured, text, known = comparison.measured, "missing", []
    if measured is not None:
        text = with_spread(measured.mean, measured.std, metric.digits)
        if measured.seeds < len(results.seeds):
            text += f" ({measured.seeds} of {len(results.seeds)} seeds)"
    if comparison.published is not None:
        known.append(f"{comparison.published:.{metric.published_digits}f}")
    if comparison.difference is not None:
        known.append(f"{comparison.difference:+z.{metric.digits}f}")
    return f"{text} [{', '.join(known)}]" if known else text


def _list(results: Results, added_rows: Sequence[AddedRow]) -> Table:
    """A row a sweep point; what is swept is not shown twice."""
    names = list(short_names(results.axes).values())
    columns = [*_BEFORE, *(metric.title for metric in shared_metrics(results)), *_AFTER]
    shown = [name for name in columns if name not in names]
    rows = [(point, _row(results, point)) for point in points(results)]
    body = [[*map(value_text, point.values()), *(row.get(name, "") for name in shown)] for point, row in rows]
    for title, text_of in added_rows:
        texts = {metric.title: text_of(metric, {}) for metric in shared_metrics(results)}
        if any(texts.values()):
            if not names:  # one point: two rows have to say which is which
                names, body = ["model"], [["released", *row] for row in body]
            body.append([title, *[""] * (len(names) - 1), *(texts.get(name, "") for name in shown)])
    return Table("", [*names, *shown], body, labels=len(names))


def _row(results: Results, point: Mapping[str, Any]) -> dict[str, str]:
    """Figures of a sweep point by column; without a finished cell only that its metrics are missing."""
    row = {metric.title: _cell_text(results, metric, point) for metric in metrics_of(results)}
    if not (cells := cells_at(results, point)):
        return row
    first, private = cells[0], cells[0]["epsilon"] is not None
    mu = "none" if first["mu"] is None else upper_figure(first["mu"])
    told = [cell["fraction_clipped"] for cell in cells if cell["fraction_clipped"] is not None]
    return row | {
        "silos": str(first["silos"]),
        "rounds": str(first["rounds"]),
        "μ": mu if private else "no noise",
        "ε at δ": f"{epsilon_figure(first['epsilon'])} at {delta_figure(first['delta'])}" if private else "none",
        "gradients": f"{first['gradient_evaluations']:,}",
        "sent by a silo (MB)": f"{first['bytes_sent'] / 1e6:.3g}",
        "clipped (%)": f"{100.0 * statistics.fmean(told):.2f}" if told else "not told",
        "seconds, all seeds": f"{sum(cell['wall_seconds'] for cell in cells):.1f}",
    }


def _markdown(results: Results) -> str:
    blocks = [f"## {results.title or results.name}"]
    for table in tables_of(results):
        blocks += [f"**{table.caption}**", _aligned(table)] if table.caption else [_aligned(table)]
    blocks += [*warnings_of(results), how_measured(results), *privacy_lines(results)]
    return "\n\n".join(blocks).replace("<", "&lt;") + "\n"


def _aligned(table: Table) -> str:
    """A Markdown table whose columns also line up as plain text: labels to the left, figures to the right."""
    columns = []
    for place, (head, *body) in enumerate(zip(table.heads, *table.body, strict=True)):
        width = max(3, len(head), *map(len, body))
        rule, side = ("-" * width, "<") if place < table.labels else ("-" * (width - 1) + ":", ">")
        columns.append([f"{text:{side}{width}}" for text in (head, rule, *body)])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))


def _csv(results: Results) -> str:
    """One tidy row a sweep point and metric, at full precision; a point without a finished cell has 0 seeds."""
    facts = ["mu", "epsilon", "delta", "relation", "trust"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*results.axes, "metric", "mean", "std", "seeds", "published", "difference", *facts, "ledger"])
    for point in points(results):
        cell: Mapping[str, Any] = next(iter(cells_at(results, point)), {})
        claim = None if not cell else "DIFFERS" if cell["cell"] in results.differs else "ok"
        for metric in metrics_of(results):
            comparison = compare(results, metric, point)
            measured = astuple(comparison.measured) if comparison.measured else (None, None, 0)
            figures = [metric.title, *measured, comparison.published, comparison.difference]
            writer.writerow([*point.values(), *figures, *map(cell.get, facts), claim])
    return buffer.getvalue()


def _tabular(results: Results, table: Table) -> str:
    sentences = [results.title or results.name, table.caption, state_of(results), how_measured(results)]
    header, *body = [" & ".join(map(_escape, row)) + r" \\" for row in [table.header, *table.body]]
    last = len(table.header)
    figures = last - table.labels
    if table.across:
        spanner = rf"{'& ' * table.labels}\multicolumn{{{figures}}}{{c}}{{{_escape(table.across)}}} \\"
        header = f"{spanner}\n\\cmidrule(lr){{{table.labels + 1}-{last}}}\n{header}"
    lines = [
        r"\begin{table}  % \usepackage{booktabs}",
        r"\centering",
        rf"\caption{{{_escape('. '.join(filter(None, sentences)))}}}",
        rf"\begin{{tabular}}{{{'l' * table.labels}{'r' * figures}}}",
        *(r"\toprule", header, r"\midrule", *body, r"\bottomrule"),
        *(r"\end{tabular}", r"\end{table}"),
    ]
    return "\n".join(lines) + "\n"


_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "%&#_{}$"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": "$|$"},
        **{"±": r"$\pm$", "²": "$^2$", "μ": r"$\mu$", "ρ": r"$\rho$", "ε": r"$\varepsilon$", "δ": r"$\delta$"},
    }
)


def _escape(text: str) -> str:
    """Plain text as LaTeX; signs of numbers become mathematical ones."""
    return re.sub(r"(?<!\S)([+-])(?=\d|\s)", r"$\1$", text.translate(_LATEX))


STYLES: dict[Style, Callable[[Results], str]] = {
    "markdown": _markdown,
    "csv": _csv,
    "latex": lambda results: "\n".join(_tabular(results, table) for table in tables_of(results)),
}


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
    return {
        name: {
            float(size): _needed_at(results, scaling, {scaling.by: name, scaling.along: size})
            for size in results.axes[scaling.along]
        }
        for name in results.axes[scaling.by]
    }


def _needed_at(results: Results, scaling: Growth, fixed: Mapping[str, Any]) -> Needed:
    here = [point for point in points(results) if all(point[key] == value for key, value in fixed.items())]
    reached: list[tuple[float, float]] = []
    size, target = float(fixed[scaling.along]), math.nan
    for point, cells in ((point, cells) for point in here if (cells := cells_at(results, point))):
        first, epsilon = cells[0], cells[0]["epsilon"]
        private = 0.0 if epsilon is None else math.sqrt(first["dimension"]) / (epsilon * size)
        target = scaling.factor * scaling.scale * (1.0 / math.sqrt(size) + private)
        if np.mean([cell[scaling.metric] for cell in cells]) <= target:
            reached.append((float(point[scaling.smallest]), float(first["gradient_evaluations"])))
    return Needed(target, *min(reached, default=(None, None)))


def fit(needs: Mapping[float, Needed], what: str) -> Fit | None:
    """The exponent of `what` ("rounds" or "gradients") in n; None with fewer than two sizes that were reached."""
    pairs = [(size, value) for size, need in needs.items() if (value := getattr(need, what)) is not None]
    if len(pairs) < 2:
        return None
    from scipy import stats  # half a second, which only a scenario with a scaling table should wait

    sizes, values = (np.log(column) for column in zip(*pairs, strict=True))
    line = stats.linregress(sizes, values)
    factor = stats.t.ppf(0.5 + _CONFIDENCE / 2, len(pairs) - 2) if len(pairs) > 2 else math.inf
    return Fit(float(line.slope), float(factor * line.stderr), len(pairs))


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
