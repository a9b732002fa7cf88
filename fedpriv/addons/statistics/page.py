"""Tables of statistics as rows, as plain data, as CSV and as a page of bars and curves with their intervals."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fedpriv.addons.statistics.tables import Curve, Statistics, TableResult
from fedpriv.core.figures import epsilon_words, upper_figure
from fedpriv.core.files import write_text

JSON, CSV, PAGE = "statistics.json", "statistics.csv", "statistics.html"
_WIDTH, _LEFT, _BAR = 560, 190, 22
_HIGH, _BOTTOM = 260, 30


def number(value: float) -> str:
    """A figure with as many digits as one reads."""
    if not math.isfinite(value):
        return "above" if value > 0 else "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rows_of(table: TableResult) -> list[dict[str, Any]]:
    """A line an estimate, with its interval and what that covers."""
    rows = []
    for each in table.estimates:
        named = dict(zip(table.of, each.of, strict=False)) if table.kind == "counts" else {"of": " ".join(each.of)}
        rows.append({**named, "value": each.value, "low": each.low, "high": each.high, "covers": each.covers})
    for curve in table.curves if table.kind == "survival" else ():
        for at, value, low, high in zip(curve.at, curve.values, curve.low, curve.high, strict=True):
            of = " ".join((*curve.group, f"survival at {at:g}"))
            rows.append({"of": of, "value": value, "low": low, "high": high, "covers": "the population"})
    return rows


def data_of(asked: Statistics, tables: Sequence[TableResult], record: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as plain data; infinities are null."""
    claim = {name: record[name] for name in ("mu", "epsilon", "delta", "relation", "trust", "engine")}
    tree = {"name": asked.plan.name, "unit": asked.plan.privacy.unit, "places": asked.records, **claim}
    return {**tree, "tables": [_finite(dataclasses.asdict(table)) for table in tables]}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_of(tables: Sequence[TableResult]) -> str:
    """All tables as one CSV file."""
    buffer, figures = io.StringIO(), ("value", "low", "high", "covers")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["table", "of", *figures])
    for table in tables:
        for row in rows_of(table):
            of = " / ".join(str(value) for key, value in row.items() if key not in figures)
            writer.writerow([table.name, of, *(row[key] for key in figures)])
    return buffer.getvalue()


def write_all(folder: Path, asked: Statistics, tables: Sequence[TableResult], record: Mapping[str, Any]) -> None:
    """JSON, CSV and the page, beside the results of the run."""
    data = data_of(asked, tables, record)
    write_text(folder / JSON, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / CSV, csv_of(tables))
    write_text(folder / PAGE, page_of(asked, tables, record))


def page_of(asked: Statistics, tables: Sequence[TableResult], record: Mapping[str, Any]) -> str:
    """A page that stands alone: bars and curves, each with an interval of 95 % that has the noise in it.

    Guarantee: every text of a plan or a table is escaped, and nothing is loaded from elsewhere.
    """
    title, css = (
        asked.plan.title or asked.plan.name,
        resources.files("fedpriv.show").joinpath("page.css").read_text(),
    )
    said = (
        f"Whoever reads this learns of every {asked.cell.privacy.protected.noun} no more than "
        f"μ = {upper_figure(record['mu'])} allows, {epsilon_words(record['epsilon'], record['delta'])} "
        f"({record['relation']}), all tables together. Trust: {record['trust']}."
    )
    parts = [
        Markup(
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{}</title><style>{}</style></head>'
        ).format(title, Markup(css)),
        Markup('<body><main><h1>{}</h1><p class="verdict">{}</p>').format(title, said),
        Markup(
            "<p>Bars are counts as they were released; the line on a bar is an interval of 95 %, the noise in it. "
        )
        + Markup("A band about survival covers the population: noise and sampling are both in it.</p>"),
    ]
    for table in tables:
        parts.append(Markup("<h2>{}</h2>").format(table.name))
        if table.kind == "counts":
            parts.append(_bars(table))
        parts += [_curve(table, curve) for curve in table.curves]
        parts.append(_as_table(table))
    return str(Markup("\n").join([*parts, Markup("</main></body></html>")])) + "\n"


def _as_table(table: TableResult) -> Markup:
    rows = rows_of(table)
    head = Markup("").join(Markup("<th>{}</th>").format(name) for name in (rows[0] if rows else ()))
    lines = [
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup("<td>{}</td>").format(number(value) if isinstance(value, float) else value)
                for value in row.values()
            )
        )
        for row in rows
    ]
    body = Markup("").join(lines)
    return Markup('<div class="wide"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        head, body
    )


def _bars(table: TableResult) -> Markup:
    most = max([1.0, *(max(each.high, each.value) for each in table.estimates)])
    scale = (_WIDTH - _LEFT - 20) / most
    drawn = []
    for place, each in enumerate(table.estimates):
        y, middle = place * _BAR + 4, place * _BAR + 4 + _BAR / 2 - 3
        drawn.append(
            Markup(
                '<text x="{}" y="{}" text-anchor="end">{}</text><rect x="{}" y="{}" width="{:.1f}" height="{}" '
                'fill="var(--good)" opacity=".55"/><path d="M{:.1f} {}H{:.1f}" stroke="var(--ink)" '
                'stroke-width="2"/>'
            ).format(
                _LEFT - 8, middle + 5, ", ".join(each.of), _LEFT, y, scale * max(0.0, each.value), _BAR - 6,
                _LEFT + scale * each.low, middle, _LEFT + scale * each.high,
            )
        )  # fmt: skip
    return _figure(table.name, len(table.estimates) * _BAR + 10, drawn)


def _curve(table: TableResult, curve: Curve) -> Markup:
    """Steps of a survival curve, or the share below every edge, with its band."""
    first, last = curve.at[0], curve.at[-1]
    across = [_LEFT / 3 + (_WIDTH - _LEFT / 3 - 20) * (at - first) / ((last - first) or 1.0) for at in curve.at]
    up = _HIGH - _BOTTOM

    def height(share: float) -> float:
        return up - (up - 15) * share

    band = [f"{x:.1f},{height(y):.1f}" for x, y in zip(across, curve.high, strict=True)]
    band += [f"{x:.1f},{height(y):.1f}" for x, y in reversed(list(zip(across, curve.low, strict=True)))]
    line = " ".join(f"{x:.1f},{height(y):.1f}" for x, y in zip(across, curve.values, strict=True))
    drawn = [
        Markup('<polygon points="{}" fill="var(--good)" opacity=".18"/>').format(" ".join(band)),
        Markup('<polyline points="{}" fill="none" stroke="var(--good)" stroke-width="2"/>').format(line),
    ]
    for share in (0.0, 0.5, 1.0):
        drawn.append(Markup('<text x="4" y="{}">{:g}</text>').format(height(share) + 4, share))
        drawn.append(Markup('<path class="grid" d="M40 {0}H{1}"/>').format(height(share), _WIDTH))
    for x, at in ((across[0], first), (across[-1], last)):
        drawn.append(Markup('<text x="{:.0f}" y="{}" text-anchor="middle">{:g}</text>').format(x, _HIGH - 8, at))
    return _figure(" ".join((table.name, *curve.group)), _HIGH, drawn)


def _figure(caption: str, height: float, drawn: Sequence[Markup]) -> Markup:
    frame = Markup('<figure><figcaption>{0}</figcaption><svg viewBox="0 0 {1} {2}" role="img" aria-label="{0}" ')
    own = Markup("").join(drawn)
    return (
        frame.format(escape(caption), _WIDTH, height)
        + Markup('class="chart" style="max-width:40rem">')
        + own
        + Markup("</svg></figure>")
    )
