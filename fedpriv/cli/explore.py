"""`fedpriv list`, `show` and `compare`: what there is, and what a run gave."""

import tomllib
from collections.abc import Callable, Mapping
from inspect import getdoc
from pathlib import Path

from fedpriv.cli.tables import Column, print_plain, print_rich
from fedpriv.errors import InputError, suggestion

Lines = list[tuple[str, str]]


def list_what(what: str | None) -> None:
    """Print the scenarios, algorithms, mechanisms, data sets and models, or one kind of them."""
    if what is not None and what not in KINDS:
        raise InputError(f"fedpriv list {what}: known are {', '.join(KINDS)}{suggestion(what, KINDS)}")
    for kind in KINDS if what is None else [what]:
        print_rich(kind, [Column("name"), Column("what it is", wrap=True)], KINDS[kind]())


def show_run(folder: Path) -> None:
    """Print what ran, what it guarantees, and what came out."""
    from fedpriv.reports.notes import how_measured, privacy_lines, what_differs, what_is_missing
    from fedpriv.reports.table import tables_of
    from fedpriv.sweep.claims import check_claims, read_claims

    results = read_claims(folder)
    print_plain(results.title or results.name, bold=True)
    for table in tables_of(results):
        first = f"{table.header[0]} \\ {table.across}" if table.across else table.header[0]
        columns = [
            Column(name, right=place >= table.labels) for place, name in enumerate([first, *table.header[1:]])
        ]
        print_rich(table.caption, columns, table.body)
    loud = [line.replace("**", "") for line in (what_differs(results), what_is_missing(results))]
    for line in (*loud, how_measured(results), *privacy_lines(results)):
        if line:
            print_plain(line)
    print_plain(f"results: {folder}")
    check_claims(folder, results)


def compare_runs(first: Path, second: Path) -> None:
    """Print what two runs have in common, seed by seed, and where their settings differ."""
    from fedpriv.reports.comparison import compared

    found = compared(first, second)
    for key, one, other in found.settings:
        print_plain(f"{key}: {one} in {first}, {other} in {second}")
    columns = [Column(name, right=place >= found.labels) for place, name in enumerate(found.header)]
    print_rich("second minus first; ± is the standard error over seeds that both have", columns, found.body)


def _scenarios() -> Lines:
    from fedpriv.shipped import shipped

    return [(name, _title(path)) for name, path in shipped().items()]


def _title(path: Path) -> str:
    return str(tomllib.loads(path.read_text(encoding="utf-8")).get("title", ""))


def _algorithms() -> Lines:
    from fedpriv.algorithms import ALGORITHMS
    from fedpriv.extensions import load_extensions

    load_extensions()
    return [(name, f"{row.title} ({row.source})") for name, row in ALGORITHMS.items()]


def _mechanisms() -> Lines:
    from fedpriv.mechanisms.registry import CHOSEN, MECHANISMS

    ones = {name: (getdoc(kind) or "").splitlines()[0] for name, kind in MECHANISMS.items()}
    return [
        (name, words if MECHANISMS[name] in CHOSEN else f"{words} (of one algorithm)")
        for name, words in ones.items()
    ]


def _data() -> Lines:
    from fedpriv.data.fetch import COMPUTED, ORIGINS
    from fedpriv.data.registered import added
    from fedpriv.extensions import load_extensions

    load_extensions()
    return [
        *((name, "fetched once, verified on every use") for name in ORIGINS),
        *((name, "computed, needs no file") for name in COMPUTED),
        *((name, "your own") for name in added()),
        ("FILE.npz", "records of your own in a file"),
    ]


def _models() -> Lines:
    from fedpriv.extensions import load_extensions
    from fedpriv.models.table import MODELS

    load_extensions()
    return [
        (name, f"{'regression' if row.regression else 'classes'}; keys: {_keys(row.settings.model_fields)}")
        for name, row in MODELS.items()
    ]


def _keys(fields: Mapping[str, object]) -> str:
    return ", ".join(fields) or "none"


KINDS: dict[str, Callable[[], Lines]] = {
    "scenarios": _scenarios,
    "algorithms": _algorithms,
    "mechanisms": _mechanisms,
    "data": _data,
    "models": _models,
}
