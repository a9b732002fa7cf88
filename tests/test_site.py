"""The documentation as a site: every page in the menu, references made from the code, a strict build."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedpriv.data.schema import FeatureColumn, TableSchema
from fedpriv.papers.table import ALGORITHMS
from fedpriv.scenario.schema import Cell
from tests.doc_pages import ROOT
from tests.show.browser import CHROMIUM, look_at

DOCS = ROOT / "docs"


def script(name: str) -> Any:
    """A module that lies beside the pages."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> Any:
    return script("hooks")


def menu() -> list[str]:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r": (\S+\.md)$", nav, flags=re.MULTILINE)


def test_every_documentation_page_is_in_the_menu_exactly_once() -> None:
    assert sorted(menu()) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def rows(text: str, heading: str) -> list[str]:
    """First cells of the table under a heading."""
    below = text.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    return re.findall(r"^\| `(.+?)` \|", below, flags=re.MULTILINE)


def test_the_reference_lists_every_key_of_every_section(hooks: Any) -> None:
    text = hooks.scenario_reference()
    for name, field in Cell.model_fields.items():
        section: Any = field.annotation
        if hasattr(section, "model_fields"):
            assert rows(text, f"[{name}]") == list(section.model_fields)
        else:
            assert name in rows(text, "At the top")
    assert rows(text, "[data.table]") == list(TableSchema.model_fields)
    assert rows(text, "[data.table.columns.NAME]") == list(FeatureColumn.model_fields)
    silos = next(line for line in text.splitlines() if line.startswith("| `silos`"))
    assert "a whole number at least 1, at most 1e+07 | **must be given** |" in silos
    delta = next(line for line in text.splitlines() if line.startswith("| `delta`"))
    assert "a number above 0, below 1 | `1e-05` |" in delta


def test_the_reference_lists_every_algorithm_with_its_keys(hooks: Any) -> None:
    text = hooks.algorithms_reference()
    for name, row in ALGORITHMS.items():
        assert rows(text, f"{row.title}: `{name}`") == list(row.settings.model_fields)
        assert row.source in text


def test_the_reference_lists_commands_with_options_and_arguments(hooks: Any) -> None:
    text = hooks.commands_reference()
    shown = ("run", "table", "plot", "report", "audit", "silo run", "silo init", "privacy compare", "data fetch")
    for name in shown:
        assert f"### fedpriv {name}\n" in text
    assert "| `--set` | Override a key; a swept key is narrowed. Repeatable. |" in text
    assert "| `RUN_DIR` | A folder that `fedpriv run` wrote. |" in text


def test_generated_marks_in_pages_are_replaced_and_unknown_marks_refused(hooks: Any) -> None:
    replace = hooks.on_page_markdown
    assert replace("a\n<!-- generated: algorithms -->\nb", page=None) == f"a\n{hooks.algorithms_reference()}\nb"
    with pytest.raises(KeyError, match="nothing"):
        replace("<!-- generated: nothing -->")
    marks = {
        name for path in DOCS.rglob("*.md") for name in re.findall(r"<!-- generated: (.+) -->", path.read_text())
    }
    assert marks == set(hooks.GENERATED)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (extra: docs)")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<!-- generated" not in text
        elsewhere = r"""<(?:script|link|img)[^>]+(?:src|href)=["']https?://(?!127\.0\.0\.1)"""
        assert not re.search(elsewhere, text), page.name
    if CHROMIUM is not None:  # formulas are typeset by what the site ships
        typeset = """new Promise((done) => setInterval(() => {
          const found = document.querySelectorAll("mjx-container").length; if (found) done(found); }, 100))"""
        seen = look_at((site / "formulas.html").as_uri(), 1300, typeset)
        assert seen.answers[0] >= 10
        assert seen.complaints == []
        assert [address for address in seen.requests if not address.startswith(("file:", "data:"))] == []


def test_documentation_versions_are_listed_with_the_newest_first(tmp_path: Path) -> None:
    versions = script("versions")
    for name in ("0.2.0", "0.10.0", "0.9.1", "stylesheets"):
        (tmp_path / name).mkdir()
    versions.write_list(tmp_path)
    assert versions.listed(tmp_path) == ["0.10.0", "0.9.1", "0.2.0"]
    assert [one["aliases"] for one in json.loads((tmp_path / "versions.json").read_text())] == [["latest"], [], []]
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()


def test_the_version_agrees_in_pyproject_citation_and_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, flags=re.MULTILINE)[:2] == ["Unreleased", version]


def test_comments_for_the_documentation_tests_are_removed_from_pages(hooks: Any) -> None:
    shown = hooks.on_page_markdown("<!-- long: an hour -->\n```sh\nmake run    # network: fetches\n```\n")
    assert shown == "```sh\nmake run    # fetches\n```\n"
