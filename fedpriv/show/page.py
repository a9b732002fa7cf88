"""A run as HTML: a report that stands alone and prints, and the piece of it that a notebook shows."""

import re
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from fedpriv.claims.claim import GUESSES
from fedpriv.core.errors import InputError
from fedpriv.core.figures import lower_figure, upper_figure
from fedpriv.core.files import write_text
from fedpriv.papers.table import ALGORITHMS
from fedpriv.scenario.published import dotted
from fedpriv.show.charts import charts_of
from fedpriv.show.statement import NOT_PROTECTED, statements, stored_audit
from fedpriv.show.summary import caveats_of, how_measured, state_of, value_text, warnings_of
from fedpriv.show.svg import legend_key, svg, wide_first
from fedpriv.show.table import tables_of
from fedpriv.show.verdict import RUNS, holders, repeated, verdict
from fedpriv.study.results import Results, engines_of, read_claims, read_history

_WORDS = ", ".join(f"{word} up to {100 * most:g} %" for most, word in GUESSES)

GLOSSARY: tuple[tuple[str, str], ...] = (
    ("record", "What one line of a silo's data says: the unit whose presence or content is protected."),
    ("silo", "A party with records of its own, such as a hospital. Its records never leave it."),
    ("round", "The server asks at one model; every silo answers with a sum over some of its records."),
    ("clip", "The norm to which one record's contribution is scaled down, so that it cannot stand out."),
    (
        "neighbours",
        "Two data sets that differ in one record: replace-one exchanges it, zero-out takes it away. Protection "
        "means that nobody can tell which of the two was used.",
    ),
    (
        "μ",
        "Gaussian differential privacy: telling two neighbours apart is as hard as telling one draw of N(0, 1) "
        "from one of N(μ, 1). Smaller is more private.",
    ),
    (
        "ε at δ",
        "With probability 1 - δ or more, what is released is at most e^ε times likelier under one neighbour than "
        "under the other. Smaller is more private.",
    ),
    ("zCDP", "ρ of zero-concentrated differential privacy; μ²/2 for Gaussian noise."),
    (
        "best guess",
        "How often the best attacker tells two neighbours apart, out of equally likely ones. We call protection "
        f"{_WORDS}.",
    ),
    ("mechanism", "How noise of different rounds is correlated: independent, by a tree, by a banded matrix, …"),
    ("audit", "An attack by the code's own authors: records planted on purpose, and tests that look for them."),
)


def write_report(folder: Path, file: Path | None = None) -> Path:
    """Write a run's report to `file`, RUN_DIR/report.html by default; returns it.

    InputError if the folder holds no run, or one without a finished cell.
    """
    results = read_claims(folder)
    if not results.cells:
        raise InputError(f"{folder}: no finished cell to report yet; wait for one, or go on with --resume")
    target = file or folder / "report.html"
    write_text(target, page_of(folder, results))
    return target


def page_of(folder: Path, results: Results, version: str = "", *, live: bool = False) -> str:
    """The page as text; the same for the same results.  A `live` page asks its server for news of its `version`.

    Guarantee: everything that comes from a scenario is escaped; only our own drawings enter as markup.
    """
    said = statements(results)
    audit = stored_audit(folder)
    history = list(read_history(folder)) if results.cells else []
    charts = charts_of(results, history, audit) if results.cells else []
    shares = {cell["fraction_clipped"] for cell in results.cells}
    return _compiled(_file("page.html")).render(
        results=results,
        title=results.title or results.name,
        version=version,
        live=live,
        style=Markup(_file("page.css")),
        script=Markup(_file("page.js") + (_file("live.js") if live else "")),
        verdict=_unbroken(verdict(results)),
        holders=holders(results),
        audit=audit,
        repeated=repeated(results),
        run_counts=RUNS,
        glossary=GLOSSARY,
        state=state_of(results),
        missing=" ".join(warnings_of(results)).replace("**", ""),
        measured=how_measured(results),
        facts=_facts(results),
        statements=said,
        notes=list(dict.fromkeys(each.noise for each in said if each.noise)),
        assumptions=list(dict.fromkeys(line for each in said for line in each.assumptions)),
        evaluations=list(dict.fromkeys(line for each in said for line in each.evaluations)),
        about_the_loss=list(dict.fromkeys(line for each in said if each.private for line in each.about_the_loss)),
        not_protected=NOT_PROTECTED,
        tables=tables_of(results),
        charts=[(chart, svg(chart), whole) for chart, whole in wide_first(charts)],
        legend_key=legend_key,
        clipped_everywhere={0: "No", 1: "Every"}.get(shares.pop()) if len(shares) == 1 else None,
        settings=_settings(results),
    )


def _unbroken(text: str) -> str:
    """With spaces and hyphens at which no line ends: in "69.6 %", "ε = 4" and "1e-05"."""
    spaced = re.sub(r"(?<=\d) (?=%)| (?==)|(?<==) ", "\N{NO-BREAK SPACE}", text)
    return re.sub(r"(?<=\de)-(?=\d)", "\N{NON-BREAKING HYPHEN}", spaced)


@cache
def _compiled(template: str) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"leakage": upper_figure, "shown": lower_figure}
    return environment.from_string(template)


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _facts(results: Results) -> list[tuple[str, str]]:
    """What ran, a line each: label and value."""
    cells = len(results.cells)
    return [
        ("algorithm", "; ".join(map(_algorithm, _values(results, "algorithm", "name")))),
        ("data", ", ".join(_values(results, "data", "name"))),
        ("partition", ", ".join(_values(results, "data", "partition"))),
        ("model", ", ".join(_values(results, "model", "name"))),
        ("silos", _range(results, "silos")),
        ("rounds", _range(results, "rounds")),
        *([("records read, of all silos", records)] if (records := _range(results, "records")) else []),
        *([("records of all silos in a round", batch)] if (batch := _range(results, "batch")) else []),
        *([("date", results.date)] if results.date else []),
        (
            "swept",
            "; ".join(f"{key}: {', '.join(map(value_text, v))}" for key, v in results.axes.items()) or "nothing",
        ),
        ("seeds", ", ".join(map(str, results.seeds))),
        ("cells", f"{cells}, computed in {sum(each['wall_seconds'] for each in results.cells):.1f} s"),
        ("engine", engines_of(results)),
    ]


def _algorithm(name: str) -> str:
    """Its title and source; of one's own, which a report needs no file of, its name."""
    row = ALGORITHMS.get(name)
    return f"{name} (your own)" if row is None else f"{row.title} ({row.source})"


def _values(results: Results, section: str, key: str) -> list[str]:
    return list(dict.fromkeys(str(cell["scenario"][section][key]) for cell in results.cells))


def _range(results: Results, key: str) -> str:
    return ", ".join(map(str, dict.fromkeys(cell[key] for cell in results.cells if key in cell)))


def _settings(results: Results) -> list[tuple[str, str]]:
    """Dotted keys of all cells' scenarios with their value, or their values where they differ."""
    found: dict[str, dict[str, None]] = {}
    for cell in results.cells:
        for key, value in dotted(cell["scenario"]):
            found.setdefault(key, {})[value_text(value)] = None
    return [(key, ", ".join(values)) for key, values in found.items() if key not in ("name", "title", "seed")]


_PIECE = """\
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
{% for line in caveats %}
<p>{{ line }}</p>
{% endfor %}
<p><small>{{ measured }}</small></p>
</div>
"""


def fragment_of(results: Results) -> str:
    """The tables and how they were measured; everything that comes from a scenario is escaped."""
    return _compiled(_PIECE).render(
        title=results.title or results.name,
        state=state_of(results),
        tables=tables_of(results),
        caveats=caveats_of(results.cells),
        measured=how_measured(results),
    )
