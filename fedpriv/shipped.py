"""Scenarios by name: those that fedpriv ships, and files of one's own.

It imports no torch, so that a wrong name is told at once.
"""

from pathlib import Path

from fedpriv.errors import InputError, suggestion


def shipped_folder() -> Path:
    """Where the shipped scenarios are: in the package, or beside it in Flower's bundle."""
    inside = Path(__file__).parent / "scenario" / "shipped"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[1] / "scenarios"


def shipped() -> dict[str, Path]:
    """Every shipped scenario by name."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.toml"))}


def scenario_file(given: Path) -> Path:
    """The file that a person means by a path, or by a shipped scenario's name.

    A file that exists is that file; otherwise NAME, NAME.toml and scenarios/NAME.toml mean the shipped scenario.
    InputError if there is neither.
    """
    if given.exists():
        return given
    plain = given.parent in (Path(), Path("scenarios")) and given.suffix in ("", ".toml")
    known = shipped()
    name = given.name.removesuffix(".toml")
    if plain and name in known:
        return known[name]
    raise InputError(
        f"{given}: no such file, and no scenario of that name is shipped; `fedpriv list scenarios` names them"
        f"{suggestion(name, known)}"
    )
