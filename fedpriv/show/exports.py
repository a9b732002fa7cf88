"""A run in forms that other programs read, each a file in its folder: dp-accounting's events, and an RO-Crate 1.1.

The crate is metadata only: who made which file, with what, and what is protected; nothing is copied or changed.
Source: https://www.researchobject.org/ro-crate/specification/1.1/ .
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedpriv.claims.entries import events_of, read_ledger
from fedpriv.core.errors import InputError, suggestion
from fedpriv.core.files import write_json
from fedpriv.show.summary import privacy_lines
from fedpriv.study.results import Results, engines_of, read_claims

METADATA = "ro-crate-metadata.json"
_VERSION = "https://w3id.org/ro/crate/1.1"

Entity = Mapping[str, Any]

_FORMATS = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".md": "text/markdown",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".npy": "application/octet-stream",
}
_WORDS = {
    "results.json": "Every cell of the run: settings, scores, releases, and what they guarantee",
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


def crate_of(folder: Path) -> dict[str, Any]:
    """The metadata of a run's folder as it is now; InputError for a folder without results."""
    results = read_claims(folder)
    files = [_file(folder, path) for path in sorted(folder.rglob("*")) if _belongs(folder, path)]
    claims = [
        {"@id": f"#privacy-{number}", "@type": "PropertyValue", "name": "differential privacy", "value": line}
        for number, line in enumerate(_claims(results), start=1)
    ]
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": results.title or results.name,
        "description": " ".join([f"Results of the fedpriv run {results.name!r}.", *_claims(results)]),
        "datePublished": _date(results),
        "hasPart": [_link(file) for file in files],
        "mentions": [{"@id": "#run"}],
        "variableMeasured": [_link(claim) for claim in claims],
    }
    descriptor = {
        "@id": METADATA,
        "@type": "CreativeWork",
        "about": {"@id": "./"},
        "conformsTo": {"@id": _VERSION},
    }
    return {
        "@context": f"{_VERSION}/context",
        "@graph": [descriptor, root, *files, _run(results, files), *_software(results), *claims],
    }


def _claims(results: Results) -> list[str]:
    return [line.removeprefix("Privacy: ") for line in privacy_lines(results)]


def _belongs(folder: Path, path: Path) -> bool:
    """Files of the run; not drafts, and not the metadata itself."""
    inside = path.relative_to(folder)
    return path.is_file() and path.name != METADATA and not any(part.startswith(".") for part in inside.parts)


def _file(folder: Path, path: Path) -> Entity:
    name = path.relative_to(folder).as_posix()
    file = {
        "@id": name,
        "@type": "File",
        "name": name,
        "contentSize": str(path.stat().st_size),
        "encodingFormat": _FORMATS.get(path.suffix, "application/octet-stream"),
    }
    words = _WORDS.get(name) or ("A published model, a flat NumPy vector" if path.suffix == ".npy" else None)
    return file if words is None else {**file, "description": words}


def _run(results: Results, files: list[Entity]) -> Entity:
    data = sorted({str(cell["scenario"]["data"]["name"]) for cell in results.cells if cell["scenario"]})
    return {
        "@id": "#run",
        "@type": "CreateAction",
        "name": f"fedpriv run of {results.name}, engine {engines_of(results)}",
        "description": f"{results.rerun or 'fedpriv.run in a program'}; data: {', '.join(data) or 'none yet'}",
        "startTime": _date(results),
        "actionStatus": {"@id": f"http://schema.org/{'Completed' if results.complete else 'Active'}ActionStatus"},
        "instrument": {"@id": "#fedpriv"},
        "result": [_link(file) for file in files],
    }


def _software(results: Results) -> list[Entity]:
    """What computed the results, as they say themselves."""
    own, *others = [
        {"@id": f"#{name}", "@type": "SoftwareApplication", "name": name, "version": results.versions[name]}
        for name in ("fedpriv", *(name for name in results.versions if name not in ("fedpriv", "platform")))
    ]
    return [{**own, "softwareRequirements": [_link(one) for one in others]}, *others]


def _date(results: Results) -> str:
    """When the run began, as ISO 8601."""
    return datetime.strptime(results.date, "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC).isoformat(timespec="minutes")


def _link(entity: Entity) -> dict[str, str]:
    return {"@id": str(entity["@id"])}


EXPORTS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "dp-accounting": ("dp-events.json", lambda folder: list(map(events_of, read_ledger(folder)))),
    "ro-crate": (METADATA, crate_of),
}
"""The file of each form, and the function that makes plain data from a run's folder."""


def export(folder: Path, form: str) -> Path:
    """Write a form into the run's folder, whole or not at all; returns the file.

    InputError for a form that there is not, a folder without results, and what the form cannot say.
    """
    if form not in EXPORTS:
        raise InputError(f"--as {form}: known forms are {', '.join(EXPORTS)}{suggestion(form, EXPORTS)}")
    name, made = EXPORTS[form]
    write_json(folder / name, made(folder))
    return folder / name
