"""docs/architecture.md: its walk-through names what a run calls, in the order of the calls; its files exist."""

import re
import sys
import threading
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fedpriv
from benchmarks import one_round
from tests.conftest import small_tree
from tests.doc_pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\| [^|]+ \| `([\w.]+:[\w.]+)` \|$", PAGE, flags=re.MULTILINE)


def code_of(name: str) -> CodeType:
    """Of the function that the page names; an error if there is none."""
    module, _, path = name.partition(":")
    found = reduce(getattr, path.split("."), import_module(module))
    return code(found)


def code(function: Any) -> CodeType:
    found: CodeType = getattr(function, "__wrapped__", function).__code__
    return found


def visited(codes: dict[CodeType, str], scenario: Path, out: Path) -> list[str]:
    """The named functions in the order of their first calls, in all threads of a run."""
    order: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := codes.get(frame.f_code)) is not None:
            order.setdefault(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        fedpriv.run(scenario, engine="inprocess", out=out)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(order)


def test_a_run_calls_the_functions_of_the_architecture_page_in_order(tmp_path: Path) -> None:
    assert len(STEPS) == 15
    scenario = tmp_path / "small.toml"
    scenario.write_text(toml(small_tree()), encoding="utf-8")
    assert visited({code_of(name): name for name in STEPS}, scenario, tmp_path / "run") == STEPS
    assert (tmp_path / "run" / "results.json").exists()


def test_the_committed_architecture_figure_matches_the_page_and_the_code() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `(?:fedpriv\.)?([\w.]+:[\w.]+)` \|$", PAGE, flags=re.MULTILINE)
    assert [(step.words, step.name) for step in one_round.STEPS] == rows
    assert [code_of(name) for name in STEPS] == [code(step.function) for step in one_round.STEPS]
    drawn = one_round.svg()
    assert one_round.OUT.read_text(encoding="utf-8") == drawn, "python -m benchmarks.one_round"
    assert all(f">{step.name}</text>" in drawn for step in one_round.STEPS)
    assert f"](figures/{one_round.OUT.name})" in PAGE


def toml(tree: dict[str, Any]) -> str:
    """Sections of plain values, as a person would write them."""
    tops = [f"{key} = {value!r}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, keys in tree.items():
        if isinstance(keys, dict):
            tops += [f"[{section}]", *(f"{key} = {value!r}" for key, value in keys.items())]
    return "\n".join(tops)


def test_the_section_where_do_i_change_names_existing_files() -> None:
    section = PAGE.partition("## Where do I change")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!what \||---)[^|]+ \| (.+) \|$", section, flags=re.MULTILINE)
    files = [name for row in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", row)]
    assert len(rows) >= 10
    assert len(files) >= 10
    for name in files:
        assert (ROOT / name).exists() or (ROOT / "fedpriv" / name).exists(), name
