"""Dotted keys in a parsed TOML tree."""

import tomllib
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


def parsed_assignment(assignment: str, option: str = "--set") -> tuple[str, Any]:
    """A "KEY=VALUE" of a command line's `option`, its value as TOML reads it; InputError if it is none."""
    key, equals, text = assignment.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"{option} {assignment!r}: expected KEY=VALUE, such as {option} federation.silos=10")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text.strip()  # a bare word is taken as text, so that quotes need no quoting in a shell
