"""Ceilings of what stops a newcomer in names and docstrings of the product; they only fall."""

import importlib
import re
from pathlib import Path

import pytest

from tests.words import ROOT, first_sentence, product_files, read_places

CEILINGS = {
    "openings": 0,
    "semicolons": 0,
    "long": 0,
    "clauses": 0,
    "names": 47,
    "functions": 20,
    "classes": 0,
    "undocumented": 0,
}
"""Most places of each kind."""


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    places = read_places(product_files())
    return {kind: len(places[kind]) for kind in CEILINGS}


@pytest.mark.parametrize("kind", CEILINGS)
def test_counts_of_unclear_wording_stay_below_their_ceilings(kind: str, counts: dict[str, int]) -> None:
    assert counts[kind] <= CEILINGS[kind], f"python -m tests.words {kind}"
    assert counts[kind] >= 0.9 * CEILINGS[kind] - 2, "ceilings only fall: write this count"


def test_unclear_names_and_docstrings_are_detected_by_kind(tmp_path: Path) -> None:
    source = '''
"""Of the others; a private choice tells nothing of them."""

class Twice: ...
class Twice: ...

def at(told):
    for each in told:
        found = each

def is_open() -> bool:
    """Whether it is open."""

def load() -> int:
    """Load what is kept by whoever asks for it, and %s."""
''' % ("more " * 20)
    path = tmp_path / "source.py"
    path.write_text(source)
    places = read_places([path])
    assert {kind: len(places[kind]) for kind in CEILINGS} == {
        "openings": 1,
        "semicolons": 1,
        "long": 1,
        "clauses": 1,
        "names": 3,
        "functions": 1,
        "classes": 1,
        "undocumented": 1,
    }
    assert first_sentence("One, e.g. two. Three.") == "One, e.g. two."


def test_every_code_reference_of_the_glossary_exists() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:fedpriv|server)\.[\w.]+)`", page)
    assert len(names) > 50
    for name in names:
        module, _, member = name.removeprefix("server.").rpartition(".")
        owner = importlib.import_module(module if name.startswith("fedpriv.") else f"fedpriv.server.{module}")
        assert hasattr(owner, member), name
