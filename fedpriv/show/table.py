"""Tables of a run as Markdown, CSV or LaTeX, with measured and published values side by side.

An axis is a swept key of the scenario with its values, and a sweep point has one value for each axis.  A cell is
one run, a sweep point with a seed, as a dictionary of results.json.  Published values are those that a paper
reports, as the scenario's section [paper] or [table] has them.  An add-on may give further rows and tables.
"""

import csv
import io
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from fedpriv.core.extensions import load_add_on_part, load_add_on_parts
from fedpriv.core.figures import format_upper, format_upper_delta, format_upper_epsilon, format_with_spread
from fedpriv.core.files import write_text
from fedpriv.noise.trust import TRUSTS
from fedpriv.papers.table import ALGORITHMS
from fedpriv.scenario.published import PublishedTables
from fedpriv.show.summary import (
    METRICS,
    Metric,
    axis_points,
    cells_at_point,
    compare_with_published,
    describe_measurement,
    describe_seeds,
    describe_state,
    format_point,
    format_value,
    list_findings,
    list_warnings,
    privacy_lines,
    published_metrics,
    run_metrics,
    shared_metrics,
    short_names,
    silo_metrics,
    sweep_points,
)
from fedpriv.study.results import Results, read_claims

Style = Literal["markdown", "csv", "latex"]
ExtraRow = tuple[str, Callable[[Metric, Mapping[str, Any]], str]]
"""Title of a row, and a function from a metric and fixed keys of sweep points to the row's text."""


_LEADING_COLUMNS = ("silos", "rounds", "μ", "ε at δ")
_TRAILING_COLUMNS = ("gradients", "sent by a silo (MB)", "clipped (%)", "seconds, all seeds")


@dataclass(frozen=True)
class TextTable:
    """Table without a style, whose first `label_count` columns name the row and whose others hold figures."""

    caption: str
    header: Sequence[str]
    body: Sequence[Sequence[str]]
    label_count: int
    column_axis: str = ""
    """Name of the axis whose values are the headers of the figures, or empty."""

    @property
    def heads(self) -> list[str]:
        """Header, with the name of the column axis behind the first label."""
        first_label, *figure_heads = self.header
        return [f"{first_label} \\ {self.column_axis}" if self.column_axis else first_label, *figure_heads]


def render_tables(results: Results, style: Style) -> str:
    """Render a run in a style: its tables, or for "csv" a row for each sweep point and metric."""
    return STYLES[style](results)


def write_table(folder: Path) -> str:
    """Write a run's tables to RUN_DIR/table.md, and return their Markdown."""
    text = render_tables(read_claims(folder), "markdown")
    write_text(folder / "table.md", text)
    return text


def make_tables(results: Results) -> list[TextTable]:
    """Make the tables of a run, and then, unless its scenario has [scaling], those of silos and add-ons.

    | run | tables |
    |---|---|
    | with [scaling] | its scaling table alone |
    | with metrics that its [paper] or [table] names | rows by columns, for each metric and values of other axes |
    | other | one table of all sweep points |
    """
    if results.growth is not None:
        return [load_add_on_part("scaling", "table")(results)]
    metrics = published_metrics(results)
    added_rows = [rows(results) for rows in load_add_on_parts("rows").values()]
    if results.published is None or not metrics:
        return [_point_table(results, added_rows), *_silo_tables(results), *_addon_tables(results)]
    paper = results.published.tables
    further_axes = {key: values for key, values in results.axes.items() if key not in (paper.rows, paper.columns)}
    grids = [
        _grid_table(results, paper, metric, fixed, added_rows)
        for metric in metrics
        for fixed in axis_points(further_axes)
    ]
    return [*grids, *_silo_tables(results), *_addon_tables(results)]


def _silo_tables(results: Results) -> list[TextTable]:
    """Make a table for each metric of silos' own test records, a row a sweep point and a column a silo.

    Further columns are for all silos together, such as the mean over silos.
    """
    tables = []
    for base, metrics in silo_metrics(results).items():
        base_title = next(metric.title for metric in METRICS if metric.key == base)
        titles = [metric.title.removeprefix(f"{base_title}, ").removeprefix("at ") for metric in metrics]
        body = [
            [*map(format_value, point.values()), *(_format_figure(results, metric, point) for metric in metrics)]
            for point in sweep_points(results)
        ]
        names = list(short_names(results.axes).values())
        caption = f"{base_title} by silo, on its own test records"
        tables.append(TextTable(caption, [*names, *titles], body, label_count=len(names)))
    return tables


def _addon_tables(results: Results) -> list[TextTable]:
    return [TextTable(*table) for tables in load_add_on_parts("tables").values() for table in tables(results)]


def _grid_table(
    results: Results,
    paper: PublishedTables,
    metric: Metric,
    fixed: Mapping[str, Any],
    added_rows: Sequence[ExtraRow],
) -> TextTable:
    """Make the table of a metric in a paper's form: rows and columns are the values of one swept key each.

    Args:
        results: Results of the run.
        paper: Swept keys of rows and columns, and any published values.
        metric: Metric whose measured and published figures fill the table.
        fixed: Values of all other swept keys, which the caption names.
        added_rows: Rows of add-ons, of which one without any text for this metric is left out.
    """
    names, columns = short_names(results.axes), results.axes[paper.columns]
    column_points = [{**fixed, paper.columns: column} for column in columns]
    body = [
        [
            format_value(row),
            *(_format_figure(results, metric, {**point, paper.rows: row}) for point in column_points),
        ]
        for row in results.axes[paper.rows]
    ]
    for title, text_of in added_rows:
        texts = [text_of(metric, point) for point in column_points]
        body += [[title, *texts]] if any(texts) else []
    fixed_part = f", {format_point(results, fixed)}" if fixed else ""
    published = ": measured [published, measured - published]" if getattr(paper, metric.key, None) else ""
    return TextTable(
        f"{metric.title}{fixed_part}{published}",
        [names[paper.rows], *map(format_value, columns)],
        body,
        label_count=1,
        column_axis=names[paper.columns],
    )


def _format_figure(results: Results, metric: Metric, point: Mapping[str, Any]) -> str:
    """Format "mean ± std [published, measured - published]" of a metric at a sweep point.

    Figures that do not exist are left out.  The text begins with "missing" if no finished cell has the metric, and
    gives the number of seeds that have it if others do not.
    """
    comparison = compare_with_published(results, metric, point)
    measured, text, comparisons = comparison.measured, "missing", []
    if measured is not None:
        text = format_with_spread(measured.mean, measured.std, metric.digits)
        if measured.seeds < len(results.seeds):
            text += f" ({measured.seeds} of {len(results.seeds)} seeds)"
    if comparison.published is not None:
        comparisons.append(f"{comparison.published:.{metric.published_digits}f}")
    if comparison.difference is not None:
        comparisons.append(f"{comparison.difference:+z.{metric.digits}f}")
    return f"{text} [{', '.join(comparisons)}]" if comparisons else text


def _point_table(results: Results, added_rows: Sequence[ExtraRow]) -> TextTable:
    """Make the table with a row for each sweep point.

    Columns are the swept keys, then figures such as rounds, μ and metrics, without those that are swept keys.

    Args:
        results: Results of the run.
        added_rows: Rows of add-ons, which have texts in the columns of metrics.  One without texts is left out.
    """
    names = list(short_names(results.axes).values())
    columns = [*_LEADING_COLUMNS, *(metric.title for metric in shared_metrics(results)), *_TRAILING_COLUMNS]
    figure_columns = [name for name in columns if name not in names]
    rows = [(point, _figures_by_column(results, point)) for point in sweep_points(results)]
    body = [
        [*map(format_value, point.values()), *(row.get(name, "") for name in figure_columns)]
        for point, row in rows
    ]
    for title, text_of in added_rows:
        texts = {metric.title: text_of(metric, {}) for metric in shared_metrics(results)}
        if any(texts.values()):
            if not names:  # a single point has no label, and two rows need one
                names, body = ["model"], [["released", *row] for row in body]
            body.append([title, *[""] * (len(names) - 1), *(texts.get(name, "") for name in figure_columns)])
    return TextTable("", [*names, *figure_columns], body, label_count=len(names))


def _figures_by_column(results: Results, point: Mapping[str, Any]) -> dict[str, str]:
    """Format the figures of a sweep point by column.

    Metrics are means over seeds with their spread, clipped fractions are means over the seeds that report them,
    and seconds are sums over seeds.  Other figures are those of the first cell.  A point without finished cells
    has metrics alone, as "missing" with any published value.
    """
    row = {metric.title: _format_figure(results, metric, point) for metric in run_metrics(results)}
    if not (cells := cells_at_point(results, point)):
        return row
    first_cell, private = cells[0], cells[0]["epsilon"] is not None
    mu = "none" if first_cell["mu"] is None else format_upper(first_cell["mu"])
    clipped_fractions = [cell["fraction_clipped"] for cell in cells if cell["fraction_clipped"] is not None]
    return row | {
        "silos": str(first_cell["silos"]),
        "rounds": str(first_cell["rounds"]),
        "μ": mu if private else "no noise",
        "ε at δ": f"{format_upper_epsilon(first_cell['epsilon'])} at {format_upper_delta(first_cell['delta'])}"
        if private
        else "none",
        "gradients": f"{first_cell['gradient_evaluations']:,}",
        "sent by a silo (MB)": f"{first_cell['bytes_sent'] / 1e6:.3g}",
        "clipped (%)": f"{100.0 * statistics.fmean(clipped_fractions):.2f}"
        if clipped_fractions
        else "not reported",
        "seconds, all seeds": f"{sum(cell['wall_seconds'] for cell in cells):.1f}",
    }


def _render_markdown(results: Results) -> str:
    blocks = [f"## {results.title or results.name}"]
    for table in make_tables(results):
        blocks += [f"**{table.caption}**", _align_columns(table)] if table.caption else [_align_columns(table)]
    blocks += [*list_warnings(results), describe_measurement(results), *privacy_lines(results)]
    return "\n\n".join(blocks).replace("<", "&lt;") + "\n"


def _align_columns(table: TextTable) -> str:
    """Render a Markdown table whose columns also align as plain text, labels left, figures right.

    Bars in texts are escaped, and lines of a text joined.
    """
    columns, rows = (
        [],
        [[" ".join(text.splitlines()).replace("|", r"\|") for text in row] for row in (table.heads, *table.body)],
    )
    for index, (header, *body) in enumerate(zip(*rows, strict=True)):
        width = max(3, len(header), *map(len, body))
        rule, side = ("-" * width, "<") if index < table.label_count else ("-" * (width - 1) + ":", ">")
        columns.append([f"{text:{side}{width}}" for text in (header, rule, *body)])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))


def _render_csv(results: Results) -> str:
    """Render a CSV text with one row for each sweep point and metric, at full precision.

    Metrics are in the printed unit, such as percent.  The facts on privacy are those of the point's first cell.
    The column "ledger" has "DIFFERS" if the claim of a cell of the point is not that of its releases, and else
    "ok", or nothing for a point without finished cells.
    """
    facts = ["mu", "epsilon", "delta", "relation", "trust"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*results.axes, "metric", "mean", "std", "seeds", "published", "difference", *facts, "ledger"])
    for point in sweep_points(results):
        cells = cells_at_point(results, point)
        first_cell: Mapping[str, Any] = next(iter(cells), {})
        claim = "DIFFERS" if any(cell["cell"] in results.differs for cell in cells) else "ok" if cells else None
        for metric in run_metrics(results):
            comparison = compare_with_published(results, metric, point)
            measured = astuple(comparison.measured) if comparison.measured else (None, None, 0)
            figures = [metric.title, *measured, comparison.published, comparison.difference]
            writer.writerow([*point.values(), *figures, *map(first_cell.get, facts), claim])
    return buffer.getvalue()


def _render_latex(results: Results, table: TextTable, number: int = 0) -> str:
    """Render a table as a LaTeX float, with its caption and its label.

    A table with a column axis has a spanner of its name, a heading above all columns of figures.  If algorithms or
    trust settings are swept, header and body have their titles in place of their names.

    Args:
        results: Results of the run.
        table: Table of the run.
        number: Position of the table among those of the run, from 0.
    """
    sentences = [
        results.title or results.name,
        table.caption,
        describe_state(results),
        describe_seeds(results),
        *list_findings(results),
        *privacy_lines(results),
    ]
    titles = {
        name: entry.title
        for key, table_of_names in (("algorithm.name", ALGORITHMS), ("algorithm.trust", TRUSTS))
        for name, entry in table_of_names.items()
        if key in results.axes
    }
    rows = [[titles.get(text, text) for text in row] for row in [table.header, *table.body]]
    # A bracket at the start of a row would be an argument of the command before.
    header, *body = ["{}" * row[0].startswith("[") + " & ".join(map(_escape_latex, row)) + r" \\" for row in rows]
    caption = " ".join(text.rstrip(".") + "." for text in sentences if text)
    label = re.sub(r"[^A-Za-z0-9]+", "-", results.name).strip("-") + (f"-{number + 1}" if number else "")
    column_count = len(table.header)
    figures = column_count - table.label_count
    if table.column_axis:
        spanner = (
            rf"{'& ' * table.label_count}\multicolumn{{{figures}}}{{c}}{{{_escape_latex(table.column_axis)}}} \\"
        )
        header = f"{spanner}\n\\cmidrule(lr){{{table.label_count + 1}-{column_count}}}\n{header}"
    lines = [
        r"\begin{table}  % \usepackage{booktabs}",
        r"\centering",
        rf"\caption{{{_escape_latex(caption)}}}",
        rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{{'l' * table.label_count}{'r' * figures}}}",
        *(r"\toprule", header, r"\midrule", *body, r"\bottomrule"),
        *(r"\end{tabular}", r"\end{table}"),
    ]
    return "\n".join(lines) + "\n"


_LATEX_ESCAPES = str.maketrans(
    {
        **{character: f"\\{character}" for character in "%&#_{}$"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": "$|$"},
        **{"±": r"$\pm$", "²": "$^2$", "μ": r"$\mu$", "ρ": r"$\rho$", "ε": r"$\varepsilon$", "δ": r"$\delta$"},
        **{"·": r"$\cdot$", "√": r"$\surd$", "σ": r"$\sigma$", "λ": r"$\lambda$", "…": r"\ldots{}", "–": "--"},
    }
)


def _escape_latex(text: str) -> str:
    """Escape plain text for LaTeX, with signs, integer powers and some symbols in mathematics mode."""
    escaped = re.sub(r"(\w+)\^(-?\d+)", r"\0\1\0\2\0", text).translate(_LATEX_ESCAPES)
    return re.sub("\0(.*?)\0(.*?)\0", r"$\1^{\2}$", re.sub(r"(?<!\S)([+-])(?=\d|\s)", r"$\1$", escaped))


STYLES: dict[Style, Callable[[Results], str]] = {
    "markdown": _render_markdown,
    "csv": _render_csv,
    "latex": lambda results: "\n".join(
        _render_latex(results, table, number) for number, table in enumerate(make_tables(results))
    ),
}
