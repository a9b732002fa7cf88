"""Report of a run as HTML, and exports of a run for other programs.

| output | content |
|---|---|
| report | self-contained page with text, tables, and charts as SVG, readable without a script and on paper |
| fragment | tables of the report with the sentences on privacy, for a notebook |
| dp-accounting | releases as events of dp-accounting |
| ro-crate | metadata of the run's files, their software and privacy claims, as an RO-Crate 1.1 |

A chart has panels, a panel has series, and a series has marks: points (x, y).  A chart may have named rows in
place of numbers on its vertical axis.  Positions in a panel are in units of its view box, which is 560 wide, with
y downwards.

Source of RO-Crate: https://www.researchobject.org/ro-crate/specification/1.1/ .
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from fedpriv.claims.claim import PROTECTION_LEVELS
from fedpriv.claims.entries import make_event_data, read_ledger
from fedpriv.core.errors import InputError, suggestion
from fedpriv.core.figures import format_lower, format_upper
from fedpriv.core.files import write_json, write_text
from fedpriv.papers.table import ALGORITHMS
from fedpriv.scenario.published import flatten_keys
from fedpriv.show.charts import Chart, Mark, Panel, Series, make_charts
from fedpriv.show.looks import DASHES, Look, Scale, format_tick
from fedpriv.show.statement import NOT_PROTECTED, load_audit, make_statements
from fedpriv.show.summary import (
    describe_measurement,
    describe_state,
    format_value,
    list_warnings,
    privacy_lines,
)
from fedpriv.show.table import make_tables
from fedpriv.show.verdict import RUN_COUNTS, describe_run, epsilon_of_repeated_runs, list_party_views
from fedpriv.study.results import Results, describe_engines, read_claims, read_history

WIDTH, HEIGHT = 560, 350
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 74, 16, 14, 52
_CHARACTER_WIDTH = 8.5  # width that a character of a label may need
_MARKERS_PER_LINE = 6  # approximate

# Paths around the origin, about as large as the first, a circle of radius 1.
_MARKER_SHAPES = (
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0Z",
    "M-.9 -.9H.9V.9H-.9Z",
    "M0 -1.2L1.15 .8H-1.15Z",
    "M0 -1.3L1.3 0L0 1.3L-1.3 0Z",
    "M0 1.2L1.15 -.8H-1.15Z",
    "M-.4 -1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4Z",
    "M-1.2 -.7L-.7 -1.2L0 -.5L.7 -1.2L1.2 -.7L.5 0L1.2 .7L.7 1.2L0 .5L-.7 1.2L-1.2 .7L-.5 0Z",
)


def draw_svg(chart: Chart) -> Markup:
    """Draw a chart's panels as SVGs, one after another.

    Guarantee: every text is escaped; an SVG loads nothing from elsewhere.
    """
    return Markup("").join(_draw_panel(chart, panel) for panel in chart.panels)


def draw_legend_key(series: Series) -> Markup:
    """Draw line and marker of a series for the legend."""
    parts = [_draw_line([(1.0, 6.0), (33.0, 6.0)], series.look)] if series.line else []
    if series.dots:
        parts.append(_draw_marker(17.0, 6.0, series.look, hollow=series.hollow))
    attributes = f'{_colour_style(series.look)} aria-hidden="true"'
    return Markup(f'<svg class="key series" viewBox="0 0 34 12" {attributes}>{"".join(parts)}</svg>')


def _colour_style(look: Look) -> str:
    """Return a style attribute with both colours of a look, so that the style sheet can take one."""
    return f'style="--light:{look.light};--dark:{look.dark}"'


def order_charts(charts: Sequence[Chart]) -> list[tuple[Chart, bool]]:
    """Return charts in the order of the page, each with a flag whether it fills a row, else half of one.

    Charts of several panels fill a row and come first.  Of an odd number of others, the one with most series fills
    a row, too.

    Args:
        charts: Charts of one panel or more.
    """
    full_width = [chart for chart in charts if len(chart.panels) > 1]
    half_width = [chart for chart in charts if len(chart.panels) == 1]
    if len(half_width) % 2:
        fullest = max(half_width, key=lambda chart: len(chart.series))
        full_width.append(fullest)
        half_width.remove(fullest)
    return [(chart, True) for chart in full_width] + [(chart, False) for chart in half_width]


def _draw_panel(chart: Chart, panel: Panel) -> Markup:
    """Draw a panel as an SVG element.

    Args:
        chart: Chart with the rows, labels and y axis that all panels share.
        panel: Panel to draw, whose marks, with `Chart.shown_x`, decide the range of its x axis.
    """
    left_margin, height = _LEFT_MARGIN, HEIGHT
    if chart.rows:  # room for names on the left, and for each series in each row
        left_margin = min(240, 24 + round(max(map(len, chart.rows)) * _CHARACTER_WIDTH))
        height = max(190, _TOP_MARGIN + _BOTTOM_MARGIN + (20 + 8 * len(panel.series)) * len(chart.rows))
    horizontal = chart.x_scale(panel, left_margin, WIDTH - _RIGHT_MARGIN)
    vertical = chart.y_scale(height - _BOTTOM_MARGIN, _TOP_MARGIN + 20 if panel.name else _TOP_MARGIN)
    names = [series.name for series in chart.legend]
    parts = [
        *_draw_axes(chart, horizontal, vertical),
        *([_draw_text("panel", left_margin, 20, escape(panel.name), "start")] if panel.name else []),
        # The page's script finds a series by its place in the legend, and the rank shifts the series' markers.
        *(
            _draw_series(chart, names.index(series.name) if names else rank, rank, series, horizontal, vertical)
            for rank, series in enumerate(panel.series)
        ),
    ]
    label = escape(", ".join(filter(None, [chart.caption, panel.name])))
    frame = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" class="chart">'
    return Markup("".join([frame, *parts, "</svg>"]))


def _draw_axes(chart: Chart, horizontal: Scale, vertical: Scale) -> list[str]:
    """Draw grid, axis, ticks and labels of a panel.

    Args:
        chart: Chart of the panel, whose rows, if it has any, are the ticks of the vertical axis.
        horizontal: Scale from values of x to positions in the SVG.
        vertical: Scale from values of y, or indices of rows, to positions in the SVG.

    Returns:
        SVG elements.
    """
    bottom, parts, last_label_x = vertical.start, [], -math.inf
    for value in range(len(chart.rows)) if chart.rows else vertical.ticks(6):
        y = vertical.position(value)
        parts.append(f'<path class="grid" d="M{horizontal.start} {y:.1f}H{horizontal.end}"/>')
        label = escape(_shorten(chart.rows[int(value)])) if chart.rows else format_tick(value)
        parts.append(_draw_text("tick", horizontal.start - 7, y + 4, label, "end"))
    for value in chart.ticks or horizontal.ticks(6):
        x, label = horizontal.position(value), format_tick(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {bottom:g}v5"/>')
        # Labels are not to overlap: one of three characters needs about 34 units.
        if x - last_label_x >= 34.0 + max(0.0, _CHARACTER_WIDTH * (len(label) - 3)):
            parts.append(_draw_text("tick", x, bottom + 19, label, "middle"))
            last_label_x = x
    rotation = f'transform="translate(14 {(vertical.end + bottom) / 2:g}) rotate(-90)"'
    return [
        *parts,
        f'<path class="axis" d="M{horizontal.start} {bottom:g}H{horizontal.end}"/>',
        _draw_text(
            "label",
            (horizontal.start + horizontal.end) / 2,
            bottom + _BOTTOM_MARGIN - 10,
            escape(chart.x_label),
            "middle",
        ),
        f'<text class="label" {rotation} text-anchor="middle">{escape(chart.y_label)}</text>'
        if chart.y_label
        else "",
    ]


def _draw_text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _shorten(name: str) -> str:
    return name if len(name) <= 26 else f"{name[:25]}…"


def _draw_series(
    chart: Chart, legend_index: int, rank: int, series: Series, horizontal: Scale, vertical: Scale
) -> str:
    """Draw a series' line with its band, or marks with bars, then markers, published marks, and tooltips.

    A line with many marks has markers at some of them, shifted by the rank, so that those of close lines can
    differ.

    Args:
        chart: Chart of the series.
        legend_index: Index of the series in the legend, for the page's script.
        rank: Index of the series in its panel.
        series: The series.
        horizontal: Scale from values of x to positions in the SVG.
        vertical: Scale from values of y to positions in the SVG.

    Returns:
        An SVG group.
    """
    marks = [mark for mark in series.marks if math.isfinite(mark.y)]
    positions = [(horizontal.position(mark.x), vertical.position(mark.y)) for mark in marks]
    parts = [f'<g class="series" {_colour_style(series.look)} data-series="{legend_index}">']
    if series.line and len(positions) > 1:
        if any(mark.spread for mark in marks):
            above = [f"{horizontal.position(m.x):.1f} {vertical.position(m.y + m.spread):.1f}" for m in marks]
            below = [
                f"{horizontal.position(m.x):.1f} {vertical.position(m.y - m.spread):.1f}" for m in reversed(marks)
            ]
            parts.append(f'<path class="band" d="M{"L".join([*above, *below])}Z"/>')
        parts.append(_draw_line(positions, series.look))
    else:
        parts += [_draw_bar(mark, horizontal, vertical, along_x=bool(chart.rows)) for mark in marks if mark.spread]
    if series.dots:
        step = max(1, math.ceil(len(positions) / _MARKERS_PER_LINE)) if series.line else 1
        spaced_positions = [position for index, position in enumerate(positions) if index % step == rank % step]
        parts += [_draw_marker(x, y, series.look, hollow=series.hollow) for x, y in spaced_positions]
    parts += [
        _draw_marker(horizontal.position(m.x), vertical.position(m.y), series.look, hollow=True)
        for m in series.published
    ]
    for mark in (*marks, *series.published):
        tip = escape(f"{series.name}: {mark.tooltip}" if mark.tooltip else series.name)
        x, y = horizontal.position(mark.x), vertical.position(mark.y)
        parts.append(f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="3" data-tip="{tip}"/>')
    return "".join([*parts, "</g>"])


def _draw_line(positions: Sequence[tuple[float, float]], look: Look) -> str:
    dash = f' stroke-dasharray="{" ".join(map(str, DASHES[look.dash]))}"' if DASHES[look.dash] else ""
    return f'<path class="line"{dash} d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in positions)}"/>'


def _draw_bar(mark: Mark, horizontal: Scale, vertical: Scale, *, along_x: bool) -> str:
    dx, dy = (mark.spread, 0.0) if along_x else (0.0, mark.spread)
    ends = [
        (horizontal.position(mark.x + side * dx), vertical.position(mark.y + side * dy)) for side in (-1.0, 1.0)
    ]
    return f'<path class="bar" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in ends)}"/>'


def _draw_marker(x: float, y: float, look: Look, *, hollow: bool) -> str:
    kind, size = ("hollow", 7.0) if hollow else ("mark", 4.0)
    shape = f'd="{_MARKER_SHAPES[look.marker]}" transform="translate({x:.1f} {y:.1f}) scale({size:g})"'
    return f'<path class="{kind}" {shape}/>'


CRATE_FILE = "ro-crate-metadata.json"
_CRATE_VERSION = "https://w3id.org/ro/crate/1.1"

Entity = Mapping[str, Any]

_MEDIA_TYPES = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".md": "text/markdown",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".npy": "application/octet-stream",
}
_FILE_DESCRIPTIONS = {
    "results.json": "Finished cells of the run: settings, scores, releases, and what they guarantee",
    "history.jsonl": "Scores after each evaluated round",
    "cells.jsonl": "Cells that results.json does not have yet",
    "table.md": "What was measured, beside what was published",
    "report.html": "The run in words, tables and charts",
    "audit.json": "The outcome of an audit by canaries",
    "dp-events.json": "What was released, as events of dp-accounting",
    "certificate.json": "The claim of the released model with its releases, signed; fedpriv certify --verify",
    "certificate.html": "The certificate as a page for an information-governance board",
    "model-card.md": "The certificate as a model card",
}


def make_crate(folder: Path) -> dict[str, Any]:
    """Make the RO-Crate metadata of a run's folder in its present state.

    The metadata is a JSON-LD graph: the folder with its visible files, the run, its software, and its privacy.

    Raises:
        InputError: If the folder has no results, or they cannot be read, or their date has another form.
    """
    results = read_claims(folder)
    files = [
        _make_file_entity(folder, path)
        for path in sorted(folder.rglob("*"))  # without hidden files, hidden folders and the metadata itself
        if path.is_file() and path.name != CRATE_FILE and "/." not in f"/{path.relative_to(folder).as_posix()}"
    ]
    claims = [
        {"@id": f"#privacy-{number}", "@type": "PropertyValue", "name": "differential privacy", "value": line}
        for number, line in enumerate(_privacy_claims(results), start=1)
    ]
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": results.title or results.name,
        "description": " ".join([f"Results of the fedpriv run {results.name!r}.", *_privacy_claims(results)]),
        "datePublished": _iso_date(results),
        "hasPart": [_make_link(file) for file in files],
        "mentions": [{"@id": "#run"}],
        "variableMeasured": [_make_link(claim) for claim in claims],
    }
    descriptor = {
        "@id": CRATE_FILE,
        "@type": "CreativeWork",
        "about": {"@id": "./"},
        "conformsTo": {"@id": _CRATE_VERSION},
    }
    return {
        "@context": f"{_CRATE_VERSION}/context",
        "@graph": [
            descriptor,
            root,
            *files,
            _make_run_entity(results, files),
            *_make_software_entities(results),
            *claims,
        ],
    }


def _privacy_claims(results: Results) -> list[str]:
    return [line.removeprefix("Privacy: ") for line in privacy_lines(results)]


def _make_file_entity(folder: Path, path: Path) -> Entity:
    entity = {
        "@id": (name := path.relative_to(folder).as_posix()),
        "@type": "File",
        "name": name,
        "contentSize": str(path.stat().st_size),
        "encodingFormat": _MEDIA_TYPES.get(path.suffix, "application/octet-stream"),
    }
    description = _FILE_DESCRIPTIONS.get(name) or (
        "A published model, a flat NumPy vector" if path.suffix == ".npy" else None
    )
    return entity if description is None else {**entity, "description": description}


def _make_run_entity(results: Results, files: list[Entity]) -> Entity:
    data = sorted({str(cell["scenario"]["data"]["name"]) for cell in results.cells if cell["scenario"]})
    return {
        "@id": "#run",
        "@type": "CreateAction",
        "name": f"fedpriv run of {results.name}, engine {describe_engines(results)}",
        "description": f"{results.rerun or 'fedpriv.run in a program'}; data: {', '.join(data) or 'none yet'}",
        "startTime": _iso_date(results),
        "actionStatus": {"@id": f"http://schema.org/{'Completed' if results.complete else 'Active'}ActionStatus"},
        "instrument": {"@id": "#fedpriv"},
        "result": [_make_link(file) for file in files],
    }


def _make_software_entities(results: Results) -> list[Entity]:
    """Describe fedpriv and the programs that it required, in the versions of the run's latest invocation."""
    fedpriv_entity, *dependencies = [
        {
            "@id": f"#{name}",
            "@type": "SoftwareApplication",
            "name": name,
            "version": results.versions.get(name, "unknown"),
        }
        for name in ("fedpriv", *(name for name in results.versions if name not in ("fedpriv", "platform")))
    ]
    return [
        {**fedpriv_entity, "softwareRequirements": [_make_link(dependency) for dependency in dependencies]},
        *dependencies,
    ]


def _iso_date(results: Results) -> str:
    """Format the start of the run as ISO 8601, to the minute.

    Raises:
        InputError: If the results have no such date.
    """
    try:
        date = datetime.strptime(results.date, "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    except ValueError:
        raise InputError(
            f"results.json: date = {results.date!r}: expected one like 2026-01-31 12:00 UTC"
        ) from None
    return date.isoformat(timespec="minutes")


def _make_link(entity: Entity) -> dict[str, str]:
    return {"@id": str(entity["@id"])}


EXPORTS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "dp-accounting": ("dp-events.json", lambda folder: list(map(make_event_data, read_ledger(folder)))),
    "ro-crate": (CRATE_FILE, make_crate),
}
"""Form -> name of the file, and the function that makes its plain data from a run's folder."""


def export_run(folder: Path, form: str) -> Path:
    """Write an export into the run's folder, whole or not at all, and return its path.

    Raises:
        InputError: For an unknown form, a folder without results, or results that the form cannot express.
    """
    if form not in EXPORTS:
        raise InputError(f"--as {form}: known forms are {', '.join(EXPORTS)}{suggestion(form, EXPORTS)}")
    name, make_data = EXPORTS[form]
    write_json(folder / name, make_data(folder))
    return folder / name


_GUESS_SCALE = ", ".join(f"{word} up to {100 * max_share:g} %" for max_share, word in PROTECTION_LEVELS[:-1])

GLOSSARY: tuple[tuple[str, str], ...] = (
    ("record", "One line of a silo's data."),
    ("protected unit", "What is protected as a whole: one record, or all records of one person or client."),
    ("silo", "A party with records of its own, such as a hospital. They leave it only if there is a curator."),
    ("round", "The server sends a model; silos answer with a sum over some of their records."),
    ("clip", "The norm to which the contribution of one unit is scaled down if it is larger."),
    (
        "neighbours",
        "Two data sets that differ in one unit: replace-one exchanges it, zero-out takes it away. Protection "
        "bounds how well anybody can tell which of the two was used.",
    ),
    (
        "μ",
        "Gaussian differential privacy: telling two neighbours apart is at least as hard as telling one draw of "
        "N(0, 1) from one of N(μ, 1). Smaller is more private.",
    ),
    (
        "ε at δ",
        "Whatever result one looks for, its probability under one neighbour is at most e^ε times that under the "
        "other, plus δ. Smaller is more private.",
    ),
    ("zCDP", "ρ of zero-concentrated differential privacy. It is μ²/2 where there is a μ."),
    (
        "best guess",
        "How often the best attacker is right about which of two equally likely neighbours was used. We call "
        f"protection {_GUESS_SCALE}, and next to none above that.",
    ),
    ("mechanism", "How noise of different rounds is correlated: not at all, by a tree, by a banded matrix, …"),
    ("audit", "An attack on the claim by fedpriv itself: it plants records, and tests whether it can find them."),
)


def write_report(folder: Path, file: Path | None = None) -> Path:
    """Write the report of the run in `folder` to `file`, and return its path.

    Args:
        folder: Folder of the run.
        file: File of the report, or None for report.html in the folder.

    Raises:
        InputError: If the folder has no results that can be read, no finished cell or no history, or a damaged
            history or audit.
    """
    if not (results := read_claims(folder)).cells:
        raise InputError(f"{folder}: no finished cell to report yet; wait for one, or go on with --resume")
    target = file or folder / "report.html"
    write_text(target, render_page(folder, results))
    return target


def render_page(folder: Path, results: Results, version: str = "", *, live: bool = False) -> str:
    """Render the report as HTML.

    Guarantee: every text that comes from a scenario is escaped; only our own drawings, style sheet and scripts
    enter as markup.

    Args:
        folder: Folder of the run, which has the history and the audit.
        results: Results of the run.
        version: Version of the results, for a live page.
        live: Whether the page asks its server again and again for results newer than `version`.

    Raises:
        InputError: If there are cells and the history is missing or damaged, or if the audit is damaged.
    """
    # Keywords are the names of page.html.
    statements = make_statements(results)
    audit = load_audit(folder)
    charts = make_charts(results, list(read_history(folder)), audit) if results.cells else []
    clipped_fractions = {cell["fraction_clipped"] for cell in results.cells}
    return _compile_template(_read_resource("page.html")).render(
        results=results,
        title=results.title or results.name,
        version=version,
        live=live,
        style=Markup(_read_resource("page.css")),
        script=Markup(_read_resource("page.js") + (_read_resource("live.js") if live else "")),
        verdict=_prevent_breaks(describe_run(results)),
        holders=list_party_views(results),
        audit=audit,
        repeated=epsilon_of_repeated_runs(results),
        run_counts=RUN_COUNTS,
        glossary=GLOSSARY,
        missing=" ".join(list_warnings(results)).replace("**", ""),
        measured=describe_measurement(results),
        facts=_run_facts(results),
        statements=statements,
        notes=list(dict.fromkeys(statement.noise for statement in statements if statement.noise)),
        assumptions=list(dict.fromkeys(line for statement in statements for line in statement.assumptions)),
        evaluations=list(dict.fromkeys(line for statement in statements for line in statement.evaluations)),
        about_the_loss=list(
            dict.fromkeys(
                line for statement in statements if statement.private for line in statement.loss_assumptions
            )
        ),
        not_protected=NOT_PROTECTED,
        tables=make_tables(results),
        charts=[(chart, draw_svg(chart), full_width) for chart, full_width in order_charts(charts)],
        legend_key=draw_legend_key,
        clipped_everywhere={0: "No", 1: "Every"}.get(clipped_fractions.pop())
        if len(clipped_fractions) == 1
        else None,
        settings=_setting_lines(results),
    )


def _prevent_breaks(text: str) -> str:
    """Replace the spaces in "69.6 %" and "ε = 4", and the hyphen in "1e-05", so that no line breaks there."""
    return re.sub(
        r"(?<=\de)-(?=\d)",
        "\N{NON-BREAKING HYPHEN}",
        re.sub(r"(?<=\d) (?=%)| (?==)|(?<==) ", "\N{NO-BREAK SPACE}", text),
    )


@cache
def _compile_template(template: str) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"leakage": format_upper, "shown": format_lower}
    return environment.from_string(template)


@cache
def _read_resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _run_facts(results: Results) -> list[tuple[str, str]]:
    """Return label and value of each fact on the run."""
    seconds = sum(cell["wall_seconds"] for cell in results.cells)
    return [
        ("algorithm", "; ".join(map(_describe_algorithm, _scenario_values(results, "algorithm", "name")))),
        ("data", ", ".join(_scenario_values(results, "data", "name"))),
        ("partition", ", ".join(_scenario_values(results, "data", "partition"))),
        ("model", ", ".join(_scenario_values(results, "model", "name"))),
        ("silos", _format_values(results, "silos")),
        ("rounds", _format_values(results, "rounds")),
        *([("records read, of all silos", records)] if (records := _format_values(results, "records")) else []),
        *([("records of all silos in a round", batch)] if (batch := _format_values(results, "batch")) else []),
        *([("date", results.date)] if results.date else []),
        (
            "swept",
            "; ".join(f"{key}: {', '.join(map(format_value, v))}" for key, v in results.axes.items()) or "nothing",
        ),
        ("seeds", ", ".join(map(str, results.seeds))),
        ("cells", f"{len(results.cells)}, computed in {seconds:.1f} s"),
        ("engine", describe_engines(results)),
    ]


def _describe_algorithm(name: str) -> str:
    """Return title and source of an algorithm, or the name of a user's own that is not imported."""
    return f"{row.title} ({row.source})" if (row := ALGORITHMS.get(name)) else f"{name} (your own)"


def _scenario_values(results: Results, section: str, key: str) -> list[str]:
    return list(dict.fromkeys(str(cell["scenario"][section][key]) for cell in results.cells))


def _format_values(results: Results, key: str) -> str:
    return ", ".join(map(str, dict.fromkeys(cell[key] for cell in results.cells if key in cell)))


def _setting_lines(results: Results) -> list[tuple[str, str]]:
    """Return the dotted keys of all cells' scenarios with their values, listed where cells differ.

    Name, title and seed are left out.
    """
    values_by_key: dict[str, dict[str, None]] = {}
    for cell in results.cells:
        for key, value in flatten_keys(cell["scenario"]):
            values_by_key.setdefault(key, {})[format_value(value)] = None
    return [
        (key, ", ".join(values)) for key, values in values_by_key.items() if key not in ("name", "title", "seed")
    ]


_FRAGMENT = """\
<div>
<p><strong>{{ title }}</strong>{% if state %} · {{ state }}{% endif %}</p>
{% for table in tables %}
{% if table.caption %}<p>{{ table.caption }}</p>{% endif %}
<table>
<thead><tr>{% for head in table.heads %}<th>{{ head }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.body %}
<tr>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
{% for line in privacy %}
<p>{{ line }}</p>
{% endfor %}
<p><small>{{ measured }}</small></p>
</div>
"""


def render_fragment(results: Results) -> str:
    """Render the tables with privacy claims, caveats and measurement, for a notebook.

    Guarantee: every text that comes from a scenario is escaped.
    """
    return _compile_template(_FRAGMENT).render(
        title=results.title or results.name,
        state=describe_state(results),
        tables=make_tables(results),
        privacy=privacy_lines(results),
        measured=describe_measurement(results),
    )
