"""Doors: what a newcomer reads first of every room is true."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [
    layer.strip().removeprefix("fedpriv.")
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    if contract["name"] == "the rooms"
    for layers in contract["layers"]
    for layer in layers.split("|")
]
TOP = ("server", "clients")
ADD_ONS = sorted(path.parent.name for path in (ROOT / "fedpriv" / "addons").glob("*/__init__.py"))
ROOMS = [*(room for room in LAYERS if room != "addons"), *(f"addons/{name}" for name in ADD_ONS)]


def folder_of(room: str) -> Path:
    return ROOT / room if room in TOP else ROOT / "fedpriv" / room


def door_of(room: str) -> str:
    """Return the docstring of a room."""
    text = (folder_of(room) / "__init__.py").read_text(encoding="utf-8")
    found = re.match(r'"""(.*?)"""', text, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_docstring_names_at_least_three_members_of_its_package(room: str) -> None:
    """Three names at least; a table says more."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder_of(room).rglob("*.py"))
    body = door_of(room).partition("\n")[2].partition("\nImports:")[0]
    names = re.findall(r"`([A-Za-z_]+)`", body)
    there = [
        name for name in names if re.search(rf"^\s*(?:class|def) {name}\b|^{name}\b.* = ", text, re.MULTILINE)
    ]
    assert len(there) >= 3
    assert len(re.findall(r"\.(?:\s|$)", door_of(room).partition("\n")[0])) == 1, "one sentence first"


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_docstring_states_the_packages_it_may_import(room: str) -> None:
    """By the contract that lint-imports keeps; rooms that share a floor import those below it."""
    imports = door_of(room).partition("\nImports: ")[2].strip()
    if room.startswith("addons/"):
        assert imports == ("the core, and `statistics`." if room == "addons/audit" else "the core.")
        return
    below = LAYERS[LAYERS.index(room) + 1 :]
    below = [other for other in below if other not in TOP] if room in TOP else below
    if not below:
        assert imports == "no room."
    elif len(below) == 1:
        assert imports == f"`{below[0]}`."
    elif below[:2] == list(TOP):
        assert imports == "rooms from `server` and `clients` down."
    else:
        assert imports == f"rooms from `{below[0]}` down."
