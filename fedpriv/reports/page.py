"""A run as one HTML file that stands alone: no scripts, nothing is loaded from elsewhere."""

from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from fedpriv.algorithms import algorithm_named
from fedpriv.errors import InputError
from fedpriv.files import write_text
from fedpriv.reports.comparison import dotted
from fedpriv.reports.notes import how_measured, what_is_missing
from fedpriv.reports.plots import svgs_of
from fedpriv.reports.statement import NOT_PROTECTED, statements
from fedpriv.reports.summary import incomplete, metric_named, value_text
from fedpriv.reports.table import tables_of
from fedpriv.sweep.results import Results, read_results

_CAPTIONS = {
    "curves": "On the test set, round by round",
    "privacy": "Accuracy against privacy",
    "clipped": "How much of what records contribute was clipped",
    "noise": "Noise that each mechanism would need for the same guarantee (from accounting, not from this run)",
}


def write_report(folder: Path, file: Path | None = None) -> Path:
    """Write a run's report to `file`, RUN_DIR/report.html by default; returns it.

    InputError if the folder holds no run, or one without a finished cell.
    """
    results = read_results(folder)
    if not results.cells:
        raise InputError(f"{folder}: no finished cell to report yet; wait for one, or go on with --resume")
    target = file or folder / "report.html"
    write_text(target, page_of(folder, results))
    return target


def page_of(folder: Path, results: Results) -> str:
    """The page as text; the same for the same results.

    Guarantee: everything that comes from a scenario is escaped; only our own drawings enter as markup.
    """
    said = statements(results)
    return _template().render(
        results=results,
        title=results.title or results.name,
        state=incomplete(results),
        missing=what_is_missing(results).replace("**", ""),
        measured=how_measured(results),
        facts=_facts(results),
        statements=said,
        notes=list(dict.fromkeys(each.noise for each in said if each.noise)),
        assumptions=list(dict.fromkeys(line for each in said for line in each.assumptions)),
        about_the_loss=list(dict.fromkeys(line for each in said if each.private for line in each.about_the_loss)),
        not_protected=NOT_PROTECTED,
        tables=tables_of(results),
        figures=[(name, _caption(name), Markup(svg)) for name, svg in svgs_of(folder, results).items()],
        settings=_settings(results),
    )


def _caption(figure: str) -> str:
    """What a drawing shows: one with a name of its own, or a metric's curve."""
    if figure in _CAPTIONS:
        return _CAPTIONS[figure]
    metric = metric_named(figure) or metric_named(f"test_{figure}")
    assert metric is not None
    return f"{metric.title}, round by round".capitalize()


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def _facts(results: Results) -> list[tuple[str, str]]:
    """What ran, a line each: label and value."""
    rows = [algorithm_named(name) for name in _values(results, "algorithm", "name")]
    cells = len(results.cells)
    return [
        ("algorithm", "; ".join(f"{row.title} ({row.source})" for row in rows)),
        ("data", ", ".join(_values(results, "data", "name"))),
        ("partition", ", ".join(_values(results, "data", "partition"))),
        ("model", ", ".join(_values(results, "model", "name"))),
        ("silos", _range(results, "silos")),
        ("rounds", _range(results, "rounds")),
        *([("records", records)] if (records := _range(results, "records")) else []),
        (
            "swept",
            "; ".join(f"{key}: {', '.join(map(value_text, v))}" for key, v in results.axes.items()) or "nothing",
        ),
        ("seeds", ", ".join(map(str, results.seeds))),
        ("cells", f"{cells}, computed in {sum(each['wall_seconds'] for each in results.cells):.1f} s"),
        ("engine", results.engine),
    ]


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
