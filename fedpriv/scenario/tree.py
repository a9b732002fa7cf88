"""Dotted keys in a parsed TOML tree."""

from collections.abc import Mapping
from typing import Any

from fedpriv.errors import InputError


def assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a key, making its sections; InputError if one of them is a value."""
    *sections, key = dotted.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise InputError(f"{dotted}: {section} is a value, not a table of keys")
    node[key] = value


def look_up(tree: Mapping[str, Any], dotted: str) -> Any:
    """The value of a key, None if it is not there."""
    node: Any = tree
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
