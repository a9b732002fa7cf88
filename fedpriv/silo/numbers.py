"""The numbers of a scenario that a stranger wrote, before any of them is used."""

from collections.abc import Iterable
from typing import Any


def numbers_in(tree: Any, section: str = "", name: str = "") -> Iterable[tuple[str, str, float]]:
    """Every number of a scenario: its section, its dotted name, and itself."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from numbers_in(value, section or str(key)[:40], f"{name}.{str(key)[:40]}".lstrip("."))
    elif isinstance(tree, list):
        for value in tree:
            yield from numbers_in(value, section, name)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield section, name, tree


def no_number(constant: str) -> float:
    """ValueError: for Infinity and NaN, which JSON does not have."""
    raise ValueError(f"{constant} is no number")


def bounded_int(digits: str) -> int:
    """ValueError for a number whose digits alone would take long."""
    if len(digits) > 20:
        raise ValueError("a whole number of more than 20 digits")
    return int(digits)
