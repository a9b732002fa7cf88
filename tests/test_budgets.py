"""Ceilings of what there is to read: statements of each room, of a file and in all, files, and files of a round.

A statement is a node of the syntax tree that is one, docstrings and `...` apart: plain texts cost nothing.
Ceilings only fall.  Whoever adds to a room takes something out of it, or lowers another room by as much and
says so in the commit.  Whoever makes one smaller lowers its ceiling.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_OF_A_FILE = 280
ROOMS = {
    "loss": 3636,
    "noise": 2964,
    "silo": 2458,
    "addons/services": 1781,
    "data": 1697,
    "accounting": 1677,
    "papers": 1590,
    "addons/worth": 1366,
    "show": 1325,
    "addons/audit": 1284,
    "engines": 1173,
    "addons/statistics": 1098,
    "cli": 894,
    "plan": 859,
    "scenario": 837,
    "addons/rates": 768,
    "server": 739,
    "core": 731,
    "claims": 718,
    "addons/begin": 706,
    "study": 647,
    "addons/tune": 547,
    "addons/certificate": 509,
    "flower": 497,
    "participation": 496,
    "protocol": 408,
    "addons/readers": 397,
    "rounds": 373,
    "api": 260,
    "clients": 229,
    "addons/learning": 145,
    "addons/trackers": 96,
    "__init__": 33,
    "addons/__init__": 0,
}
"""Statements that each room has at most."""
ALL, FILES = 32938, 279
"""Statements and files of fedpriv, server and clients at most."""
CORE = 24241
"""Statements of all but the add-ons at most."""
ROUND, GUARDED_ROUND = 15, 19
"""Files that a simulated round goes through, and a guard's, at most."""
SLACK = 0.01
"""Part of a ceiling by which a room may be smaller before the ceiling has to follow."""


def is_text(node: ast.AST) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant and isinstance(node.value.value, str | type(...))


def statements(path: Path) -> int:
    count, blocks = 0, [ast.parse(path.read_text(encoding="utf-8")).body]
    while blocks:
        for node in blocks.pop():
            count += isinstance(node, ast.stmt) and not is_text(node)
            blocks += (getattr(node, name, []) for name in ("body", "orelse", "finalbody", "handlers", "cases"))
    return count


def sources() -> list[Path]:
    return [path for top in ("fedpriv", "server", "clients") for path in sorted((ROOT / top).rglob("*.py"))]


def room_of(path: Path) -> str:
    """Return the room of a file; each add-on is one."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "fedpriv":
        return parts[0]
    return parts[1].removesuffix(".py") if parts[1] != "addons" else f"addons/{parts[2].removesuffix('.py')}"


@pytest.fixture(scope="module")
def counted() -> dict[Path, int]:
    return {path: statements(path) for path in sources()}


def test_no_source_file_exceeds_its_statement_limit(counted: dict[Path, int]) -> None:
    assert {str(path.relative_to(ROOT)): count for path, count in counted.items() if count > MOST_OF_A_FILE} == {}


def test_no_package_exceeds_its_statement_ceiling(counted: dict[Path, int]) -> None:
    rooms = Counter[str]()
    for path, count in counted.items():
        rooms[room_of(path)] += count
    assert rooms.keys() == ROOMS.keys(), "a new room has a ceiling, and takes it from others"
    assert {room: count for room, count in rooms.items() if count > ROOMS[room]} == {}
    lower = {room: count for room, count in rooms.items() if count < ROOMS[room] * (1.0 - SLACK) - 1}
    assert lower == {}, "ceilings only fall: write these in ROOMS"


def test_the_total_statement_and_file_counts_stay_within_their_ceilings(counted: dict[Path, int]) -> None:
    assert sum(counted.values()) <= ALL <= sum(ROOMS.values())
    assert sum(count for path, count in counted.items() if not room_of(path).startswith("addons/")) <= CORE
    assert len(counted) <= FILES


def test_the_architecture_page_states_the_measured_code_size(counted: dict[Path, int]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    core = sum(count for path, count in counted.items() if not room_of(path).startswith("addons/"))
    figures = f"{core:,} statements in the core, {sum(counted.values()):,} with the add-ons, {len(counted)} files"
    assert figures in page.replace("\n", " ")
    assert f"through {ROUND} files and a guard's through {GUARDED_ROUND}" in page.replace("\n", " ")


def test_a_round_runs_through_no_more_files_than_its_ceiling(tmp_path: Path) -> None:
    from benchmarks import one_round  # what counts statements alone needs none of it

    for path, codes, ceiling in (
        ("simulation", one_round.simulated_round(tmp_path), ROUND),
        ("guard", one_round.guarded_round(tmp_path), GUARDED_ROUND),
    ):
        count = re.match(rf"{path}: (\d+) files\n", one_round.listing(path, codes))
        assert count is not None
        assert 10 < int(count[1]) <= ceiling
